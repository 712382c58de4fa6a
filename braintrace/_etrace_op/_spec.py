"""A whole primitive in one record: implementation, layout and trace rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._signatures import is_int
from ..errors import RuleContractError
from ._reverse import Reverse, with_reverse

TO_INIT = '(x_var, y_var, weight_vars, num_hidden_state)'
TO_WEIGHTS = '(x, hidden_dim, weights, **params)'
# slot -> the arguments of its rule, its result, and what that is
CONTRACTS = {
    'yw_to_w': ('(hidden_dim, trace, **params)', 'dict', 'the trace, scaled at each element of y'),
    'xy_to_dw': (TO_WEIGHTS, 'dict', 'the VJP of ``impl`` over its trainables'),
    'init_drtrl': (TO_INIT, 'dict', "zeros, D_RTRL's trace"),
    'init_pp': (TO_INIT, 'zeros', "ES_D_RTRL's output factor"),
    'instant_drtrl': (TO_WEIGHTS, 'dict', "one step's entry of a trace of another layout"),
    'solve_drtrl': (
        '(signal, trace, weights, **params)',
        'dict',
        'the gradient from a trace of another layout',
    ),
}
REQUIRED_SLOTS = ('yw_to_w', 'xy_to_dw', 'init_drtrl', 'init_pp')


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
      changes, such as the places of sparse entries; each rule gets them by keyword, with the
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

    @property
    def rules(self) -> dict[str, Callable]:
        """The rules that are given, by slot."""
        return {slot: rule for slot in CONTRACTS if (rule := getattr(self, slot)) is not None}

    def resolve_trainable_invars(self, params: dict) -> dict[str, int]:
        """Trainable name -> operand index, for an equation with these static parameters."""
        if self.trainable_invars_fn is None:
            raise RuleContractError(f'the spec of {self.name!r} has no trainable_invars_fn.')
        invars = self.trainable_invars_fn(params)
        # names, each with an operand of its own
        if (
            not isinstance(invars, Mapping)
            or not invars
            or not all(isinstance(name, str) and is_int(i, 0) for name, i in invars.items())
            or len(set(invars.values())) < len(invars)
        ):
            raise RuleContractError(
                f'trainable_invars_fn of {self.name!r} returned {invars!r}; expected a dict from '
                "trainable name to operand index, like {'weight': 1, 'bias': 2}."
            )
        return dict(invars)


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


def check_described(spec: ETPPrimitiveSpec) -> None:
    """Refuse a malformed description; rules may lack."""
    name = spec.name
    if not isinstance(name, str) or not name:
        raise RuleContractError(
            f'a primitive needs a name, found {name!r}; expected a non-empty string.'
        )
    check_callable(f'the implementation of {name!r}', spec.impl)
    for what, else_ in (('x_invar_index', ' or None'), ('y_outvar_index', '')):
        value = getattr(spec, what)
        if not (is_int(value, 0) or (value is None and else_)):
            raise RuleContractError(
                f'{what} of {name!r} is {value!r}, expected an integer >= 0{else_}.'
            )
    for what in (*CONTRACTS, 'trainable_invars_fn', 'check'):
        if (value := getattr(spec, what)) is not None:
            kind = f'the rule {what!r}' if what in CONTRACTS else what
            check_callable(f'{kind} of {name!r}', value)
    for what in ('static', 'cases', 'structure'):
        value = getattr(spec, what)
        if isinstance(value, str) or not isinstance(value, Sequence | None):
            raise RuleContractError(f'the spec of {name!r}: {what} is {value!r}, expected a list.')


def check_callable(what: str, value: Any) -> None:
    """Refuse a value that can not be called."""
    if not callable(value):
        raise RuleContractError(f'{what} is a {type(value).__name__}, expected a function.')
