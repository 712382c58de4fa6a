"""An ETP primitive as a function that users call, and helpers of the factories of such ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..errors import EtpDtypeError, OptionError
from ._primitive import RULE_SLOTS, ETPPrimitive
from ._spec import ETPPrimitiveSpec, get_primitive_spec


class EtpOp:
    """An ETP primitive as a function of arrays and quantities.

    ``op(x, *weights, bias=None, **static)``, which is ``call``, where there is a bias. ``forms``
    are all primitives of the op; ``primitive`` is the form that a batch binds, or the only form.
    ``spec`` raises ``RuleContractError`` where there is none.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> op = kit.make_elementwise_op('doc_scale', lambda x, w: x * w)
    >>> type(op).__name__, op(jnp.ones((2, 3)), jnp.ones(3)).shape, sorted(op.rules)[:2]
    ('EtpOp', (2, 3), ['init_drtrl', 'init_pp'])
    """

    def __init__(self, name: str, call: Callable, forms: Sequence[ETPPrimitive]):
        self.name, self._call, self.forms = name, call, tuple(forms)
        for form in self.forms:
            form.op = self

    def __call__(self, *operands, **options):
        """Apply the op."""
        return self._call(*operands, **options)

    def __repr__(self) -> str:
        return f'EtpOp({"; ".join(map(repr, self.forms))})'

    @property
    def primitive(self) -> ETPPrimitive:
        """The first form."""
        return self.forms[0]

    @property
    def spec(self) -> ETPPrimitiveSpec:
        """The description that the first form was registered with."""
        return get_primitive_spec(self.primitive)

    @property
    def lowering(self):
        """Platform -> function that replaces the implementation of the first form (see
        :class:`braintrace.ETPPrimitive`).
        """
        return self.primitive.lowering

    @property
    def trace_kernel(self):
        """Platform -> fused update of the trace of the first form."""
        return self.primitive.trace_kernel

    @property
    def rules(self) -> dict[str, Callable]:
        """The rules of the first form, by slot."""
        return {
            slot: rule
            for slot in RULE_SLOTS
            if (rule := self.primitive.optional_rule(slot)) is not None
        }


def check_static(name: str, params: dict, static: Sequence[str]) -> None:
    """Refuse static parameters with other names, and values that have no hash."""
    if set(params) != set(static):
        raise OptionError(
            f'{name}: static parameters {sorted(params)} given, expected {sorted(static)}.'
        )
    for key, value in params.items():
        try:
            hash(value)
        except TypeError as error:
            raise EtpDtypeError(
                f'{name}: static parameter {key!r} is a {type(value).__name__}, which has no hash. '
                'Pass arrays as operands, and lists as tuples.'
            ) from error


def arrays(*shapes) -> list[jax.ShapeDtypeStruct]:
    """Operands of these shapes in float32, for the cases of a spec."""
    return [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
