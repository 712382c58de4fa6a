"""The contract of trace rules: their arguments and results, checked at each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps

from ..errors import RuleContractError

ARGUMENTS = {
    'yw_to_w': '(hidden_dim, trace, **params)',
    'xy_to_dw': '(x, hidden_dim, weights, **params)',
    'init_drtrl': '(x_var, y_var, weight_vars, num_hidden_state)',
    'init_pp': '(x_var, y_var, weight_vars, num_hidden_state)',
    'instant_drtrl': '(x, hidden_dim, weights, **params)',
    'solve_drtrl': '(signal, trace, weights, **params)',
}


def checked_invars(op: str, invars) -> dict[str, int]:
    """Refuse the result of a ``trainable_invars_fn`` unless it maps names to distinct operand
    indices.
    """
    if (
        not isinstance(invars, Mapping)
        or not invars
        or not all(isinstance(name, str) for name in invars)
        or not all(
            isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in invars.values()
        )
        or len(set(invars.values())) < len(invars)
    ):
        raise RuleContractError(
            f'trainable_invars_fn of {op!r} returned {invars!r}; expected a dict from trainable '
            "name to operand index, like {'weight': 1, 'bias': 2}."
        )
    return dict(invars)


def bind_rule(op: str, slot: str, rule: Callable, params: dict, invars: dict[str, int]) -> Callable:
    """Bind ``params`` to ``rule``; the bound rule explains its failures and checks its result."""
    bound = partial(rule, **(_asked_for(rule, params) if slot.startswith('init_') else params))

    @wraps(rule)
    def call(*args):
        try:
            result = bound(*args)
        except (AttributeError, KeyError, TypeError) as error:
            raise RuleContractError(
                f'the rule {slot!r} of {op!r} failed with {type(error).__name__}: {error}. It is '
                f'called as {slot}{ARGUMENTS[slot]}, where weights and traces are '
                f'{_dict_form(invars)}.'
            ) from error
        if slot == 'init_pp':
            _check_output_trace(op, result, args)
        else:
            _check_keys(op, slot, result, invars)
        return result

    return call


def _asked_for(rule: Callable, params: dict) -> dict:
    """The static parameters that an ``init_*`` rule declares; they are optional there."""
    declared = inspect.signature(rule).parameters.values()
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared)
    names = {parameter.name for parameter in declared}
    return {name: value for name, value in params.items() if everything or name in names}


def _dict_form(names) -> str:
    entries = ', '.join(f'{name!r}: array' for name in names)
    return f'dicts of arrays by trainable name, {{{entries}}}'


def _check_keys(op: str, slot: str, result, invars: dict[str, int]) -> None:
    if isinstance(result, Mapping) and set(result) == set(invars):
        return
    found = (
        f'the keys {sorted(result)}'
        if isinstance(result, Mapping)
        else f'a {type(result).__name__}'
    )
    raise RuleContractError(
        f'the rule {slot!r} of {op!r} returned {found}; trace rules take and return '
        f'{_dict_form(invars)}.'
    )


def _check_output_trace(op: str, result, args) -> None:
    expected = (*args[1].aval.shape, args[3])
    if getattr(result, 'shape', None) != expected:
        found = (
            f'shape {result.shape}' if hasattr(result, 'shape') else f'a {type(result).__name__}'
        )
        raise RuleContractError(
            f"the rule 'init_pp' of {op!r} returned {found}; expected one array of zeros of shape "
            f"{expected}: y's shape, then the states."
        )
