"""A whole primitive in one record: implementation, layout and trace rules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from ..errors import RuleContractError
from ._jax_rules import of_weights
from ._layouts import output_trace
from ._primitive import (
    ETP_PRIMITIVES,
    REQUIRED_SLOTS,
    RULE_SLOTS,
    ETPPrimitive,
    checked_invars,
    described,
    register_primitive,
)
from ._reverse import Reverse, with_reverse


@dataclasses.dataclass(frozen=True)
class ETPPrimitiveSpec:
    """The description of an ETP primitive: its function, the places of its operands, its trace
    rules.

    - ``name``, ``impl``: the primitive's name, and its function ``y = impl(x, *trainables)``
    - ``yw_to_w``, ``xy_to_dw``, ``init_drtrl``, ``init_pp``: the four rules; these and
      ``trainable_invars_fn`` are required by :func:`register_primitive_spec`, while
      :func:`braintrace.kit.new_etp_primitive` derives what is left out
    - ``instant_drtrl``, ``solve_drtrl``: for a trace whose layout differs from the parameter's
    - ``trainable_invars_fn``, ``x_invar_index``, ``y_outvar_index``, ``batched``,
      ``gradient_enabled``: as for :func:`register_primitive`
    - ``cases``: pairs ``(operands, params)`` on which :func:`braintrace.kit.check` tries the laws;
      an operand is anything with shape and dtype
    - ``reverse``: made by :func:`braintrace.kit.rule_reverse`, replaces the reverse rule of
      ``impl``
    - ``check``: ``check(avals, params)`` raises for operands that do not fit, before ``impl`` sees
      them
    - ``static``: names of the parameters, whose values must be hashable
    - ``structure``: names of the last operands that are arrays without a gradient, which no step
      changes, such as the places of sparse entries; each rule gets them by keyword, beside the
      parameters

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> shifted = lambda x, w: jnp.roll(x * w, 1, -1)
    >>> spec = kit.ETPPrimitiveSpec('doc_shifted', shifted, batched=True)
    >>> kit.new_etp_primitive(spec)(jnp.ones((1, 3)), jnp.arange(3.0))
    Array([[2., 0., 1.]], dtype=float32)
    """

    name: str
    impl: Callable
    yw_to_w: Callable | None = None
    xy_to_dw: Callable | None = None
    init_drtrl: Callable | None = None
    init_pp: Callable | None = None
    trainable_invars_fn: Callable[[dict], dict[str, int]] | None = None
    x_invar_index: int | None = 0
    y_outvar_index: int = 0
    batched: bool = False
    gradient_enabled: bool = False
    instant_drtrl: Callable | None = None
    solve_drtrl: Callable | None = None
    cases: Sequence[tuple] = ()
    reverse: Reverse | None = None
    check: Callable | None = None
    static: Sequence[str] | None = None
    structure: Sequence[str] = ()

    def __new__(cls, *args, **fields):
        """Refuse a misnamed field by its name."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise RuleContractError(
                f'ETPPrimitiveSpec has no field {", ".join(map(repr, unknown))}. Its fields are '
                f'{", ".join(known)}.'
            )
        return super().__new__(cls)

    def resolve_trainable_invars(self, params: dict) -> dict[str, int]:
        """Trainable name -> operand index, for an equation with these static parameters."""
        if self.trainable_invars_fn is None:
            raise RuleContractError(f'the spec of {self.name!r} has no trainable_invars_fn.')
        return checked_invars(self.name, self.trainable_invars_fn(params))


ETP_PRIMITIVE_SPECS: dict[ETPPrimitive, ETPPrimitiveSpec] = {}


def register_primitive_spec(spec: ETPPrimitiveSpec) -> ETPPrimitive:
    """Register everything that ``spec`` describes and return its primitive; nothing is registered
    if it is refused.

    Raises ``RuleContractError`` for missing rules (all of them named), a rule that is no function,
    a taken name.

    >>> import braintrace
    >>> spec = braintrace.ETPPrimitiveSpec('doc_without_rules', lambda x, w: x * w)
    >>> braintrace.register_primitive_spec(spec)
    Traceback (most recent call last):
    braintrace.errors.RuleContractError: the spec of 'doc_without_rules' lacks yw_to_w, ...
    """
    if not isinstance(spec, ETPPrimitiveSpec):
        raise RuleContractError(f'expected an ETPPrimitiveSpec, found a {type(spec).__name__}.')
    required = (*REQUIRED_SLOTS, 'trainable_invars_fn')
    missing = [name for name in required if getattr(spec, name) is None]
    if missing:
        raise RuleContractError(
            f'the spec of {spec.name!r} lacks {", ".join(missing)}. A spec needs '
            f'{", ".join(required)}; to register a primitive before its rules are written, use '
            '`register_primitive` and `primitive.register_etp_rules(...)`.'
        )
    # everything is checked before the first registration, so that nothing is half registered
    given = lambda *names: {n: v for n in names if (v := getattr(spec, n)) is not None}
    unlisted = [
        f'{name} is {value!r}'
        for name, value in given('static', 'cases', 'structure').items()
        if isinstance(value, str) or not isinstance(value, Sequence)
    ]
    if unlisted:
        raise RuleContractError(
            f'the spec of {spec.name!r}: {", ".join(unlisted)}, expected a list.'
        )
    wrong = [
        f'{name} is a {type(value).__name__}'
        for name, value in given(*RULE_SLOTS, 'check').items()
        if not callable(value)
    ]
    if wrong:
        raise RuleContractError(
            f'the spec of {spec.name!r}: {", ".join(wrong)}; every rule is a function.'
        )
    primitive = register_primitive(spec.name, whole_impl(spec), **described(spec))
    primitive.register_etp_rules(**{slot: getattr(spec, slot) for slot in RULE_SLOTS})
    ETP_PRIMITIVE_SPECS[primitive] = spec
    return primitive


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Undo every registration made inside if anything raises."""
    before = set(ETP_PRIMITIVES)
    try:
        yield
    except BaseException:  # also an interrupt; it is raised again below
        for primitive in ETP_PRIMITIVES - before:
            ETP_PRIMITIVES.discard(primitive)
            ETP_PRIMITIVE_SPECS.pop(primitive, None)
        raise


def completed(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """The spec with the rules that every op can derive from its function: ``xy_to_dw`` is its VJP,
    which sums over a batch, and ``init_pp`` has y's shape.
    """
    if spec.trainable_invars_fn is None:
        invars = {'weight': 0 if spec.x_invar_index is None else 1}
        spec = dataclasses.replace(spec, trainable_invars_fn=lambda params: invars)
    forward = of_weights(spec, whole_impl(spec))

    def xy_to_dw(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: forward(x, w, **params), weights)
        return pull(hidden_dim.astype(y.dtype))[0]

    return dataclasses.replace(
        spec, xy_to_dw=spec.xy_to_dw or xy_to_dw, init_pp=spec.init_pp or output_trace
    )


def register_both_forms(
    spec_of: Callable[[bool], ETPPrimitiveSpec],
) -> tuple[ETPPrimitive, ETPPrimitive]:
    """Complete and register the spec for a batch and that for one sample, and tell each of the
    other.
    """
    with all_or_none():
        batched, single = (register_primitive_spec(completed(spec_of(b))) for b in (True, False))
    # under ``jax.vmap`` over x alone a batch takes the mapped axis in, and one sample gets a batch
    batched.fold_axes = lambda params: (0, 0)
    single.batched_form = batched
    return batched, single


def whole_impl(spec: ETPPrimitiveSpec) -> Callable:
    """The implementation with the spec's checks and its reverse rule."""
    if spec.reverse is not None and not isinstance(spec.reverse, Reverse):
        raise RuleContractError(
            f'the spec of {spec.name!r}: reverse is a {type(spec.reverse).__name__}; make it with '
            '`rule_reverse`.'
        )
    impl = spec.impl if spec.reverse is None else with_reverse(spec.name, spec.impl, spec.reverse)
    if spec.check is None and spec.static is None:
        return impl

    def checked(*operands, **params):
        if spec.static is not None and set(params) != set(spec.static):
            raise RuleContractError(
                f'{spec.name}: static parameters {sorted(params)} given, expected '
                f'{sorted(spec.static)}.'
            )
        if spec.check is not None:
            spec.check([jax.typeof(x) for x in operands], params)
        return impl(*operands, **params)

    return checked


def get_primitive_spec(primitive) -> ETPPrimitiveSpec:
    """The spec that ``primitive`` was registered with.

    Raises ``RuleContractError`` for a primitive that was not registered by a spec.

    >>> import braintrace
    >>> from braintrace import kit
    >>> op = kit.make_elementwise_op('doc_gained', lambda x, w: x * w)
    >>> braintrace.get_primitive_spec(op.primitive).name
    'doc_gained'
    """
    if primitive in ETP_PRIMITIVE_SPECS:
        return ETP_PRIMITIVE_SPECS[primitive]
    what = (
        'was registered without a spec'
        if isinstance(primitive, ETPPrimitive)
        else 'is not an ETP primitive'
    )
    raise RuleContractError(
        f'{str(primitive)!r} {what}; `register_primitive_spec(ETPPrimitiveSpec(...))` registers '
        'one with its spec.'
    )
