"""The laws about keys, shapes, dtypes, units and static parameters. Each yields the faults of one
application of an op as sentences.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._etrace_op import REQUIRED_SLOTS
from ..errors import BraintraceError, EtpUnitError, MissingRuleError
from ._application import Application, Draw, cast, compiled, equations, is_inexact
from ._cases import Case
from ._evaluate import Finding, deviation

UNITS = (u.mV, u.second, u.nS, u.metre)
STATIC = (type(None), type(...), bool, int, float, complex, str, bytes, type, np.dtype)


class NotApplicable(Exception):
    """The law does not concern this application."""


def contract_findings(app: Application, draw: Draw, case: Case, x64: bool) -> list[Finding]:
    """A finding for each of these laws."""
    found = [
        _finding(law, functools.partial(faults, app, draw, case, x64)) for law, faults in CONTRACT
    ]
    if slots := missing_rules(app):
        found.append(Finding('L0', 'missing', f'no rule {", ".join(slots)}'))
    return found


def _finding(law: str, faults: Callable[[], Iterator[str]]) -> Finding:
    try:
        found = list(faults())
    except NotApplicable as reason:
        return Finding(law, 'not_applicable', str(reason))
    except MissingRuleError as error:
        return Finding(law, 'not_tested', str(error))
    except Exception as error:  # the op's code may raise anything; every failure becomes a row
        found = [f'{type(error).__name__}: {error}']
    return Finding(law, 'fail' if found else 'pass', '; '.join(dict.fromkeys(found)))


# L0, L5: keys, shapes, dtypes ---------------------------------------------------------------------


def missing_rules(app: Application) -> list[str]:
    """The required slots that are empty."""
    return [slot for slot in REQUIRED_SLOTS if app.primitive.optional_rule(slot) is None]


def _description(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    for slot, rule in (('xy_to_dw', app.gradient), ('instant_drtrl', app.entry)):
        if slot in REQUIRED_SLOTS or app.primitive.optional_rule(slot) is not None:
            yield from _raised(slot, rule, draw.operands, draw.e)
    if not missing_rules(app):
        trace = jax.eval_shape(app.entry, draw.operands, draw.e)
        yield from _raised('yw_to_w', app.carried, draw.e, trace)
        yield from _raised('solve_drtrl', app.solved, draw.e, trace, draw.operands)
    for slot in ('init_drtrl', 'init_pp'):
        yield from _raised(slot, lambda slot=slot: app.empty(slot, 2))


def _raised(slot: str, rule: Callable, *args) -> Iterator[str]:
    try:
        jax.eval_shape(rule, *args)
    except MissingRuleError:
        return
    except BraintraceError as error:
        yield str(error)
    except Exception as error:  # the rule may raise anything; every failure becomes a sentence
        yield f'{slot}: {type(error).__name__}: {error}'


def _empty_traces(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    for states in (1, 3):
        found, output = app.empty('init_drtrl', states), app.empty('init_pp', states)
        entry = jax.eval_shape(app.entry, draw.operands, draw.e)
        traces = {f'init_drtrl of {n!r}': (e, entry[n]) for n, e in found.items()}
        for name, (zeros, one) in {**traces, 'init_pp': (output, app.y_aval)}.items():
            if (zeros.shape, zeros.dtype) != ((*one.shape, states), one.dtype):
                yield (
                    f'{name} is {zeros.dtype}{list(zeros.shape)}, expected '
                    f'{one.dtype}{[*one.shape, states]}'
                )
            if np.any(np.asarray(zeros)):
                yield f'{name} is not zero'


# L1, L8: the primitive in the jaxpr, integer inputs -----------------------------------------------


def _in_sight(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    eager, jitted = app.bind(draw.operands), compiled(app.bind)(draw.operands)
    worst, where = deviation(eager, jitted)
    if not worst <= (1e-12 if x64 else 1e-4):
        yield f'an eager call and a jitted one differ by {worst:.2g}{where}'
    traced = jax.make_jaxpr(lambda operands: jax.vjp(app.bind, operands)[0])(draw.operands)
    if app.primitive not in [eqn.primitive for eqn in equations(traced)]:
        yield 'the jaxpr of the value under differentiation does not show the primitive'


def _integers(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    if app.x_aval is None:
        raise NotApplicable('no x')
    if not is_inexact(app.x_aval) and app.primitive.root.represent is None:
        yield (
            f'x has dtype {app.x_aval.dtype} and the primitive no `represent` that says which '
            'numbers it stands for'
        )


# L11: dtypes and units ----------------------------------------------------------------------------


def _dtypes(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in app.avals if is_inexact(a)):
        raise NotApplicable('complex operands')
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        if dtype == jnp.float64 and not x64:
            continue
        narrow = app.cast(dtype)
        if dtype != jnp.float32 and not _takes(narrow):
            continue
        d = cast(app.y_aval, dtype)
        trace = jax.eval_shape(narrow.entry, narrow.avals, d)
        found = {
            'y': jax.eval_shape(narrow.bind, narrow.avals),
            'xy_to_dw': jax.eval_shape(narrow.gradient, narrow.avals, d),
            'a trace entry': trace,
            'yw_to_w': jax.eval_shape(narrow.carried, d, trace),
            'the gradient from a trace': jax.eval_shape(narrow.solved, d, trace, narrow.avals),
            'init_drtrl': narrow.empty('init_drtrl', 1),
            'init_pp': narrow.empty('init_pp', 1),
        }
        for name, result in found.items():
            other = {str(leaf.dtype) for leaf in jax.tree.leaves(result)} - {str(jnp.dtype(dtype))}
            if other:
                yield f'{name} is {", ".join(other)} for operands of {jnp.dtype(dtype)}'


def _takes(app: Application) -> bool:
    """Whether JAX makes y of these dtypes: its FFT, as one, has none in bfloat16."""
    try:
        jax.eval_shape(app.impl, app.avals)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def _units(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    if case.is_bare:
        raise NotApplicable('a bare primitive knows no units')
    arrays = case.values(seed=0)
    biases = [key for key in arrays if case.role(key, app.invars) == 'bias']
    factors = [key for key, a in arrays.items() if is_inexact(a) and key not in biases]

    def call(arrays: dict, units: dict, bias_unit: Any) -> Any:
        units = units | dict.fromkeys(biases, bias_unit)
        return case.call(
            {k: u.Quantity(a, unit=units[k]) if k in units else a for k, a in arrays.items()}
        )

    def accepts(units: dict) -> bool:
        try:
            jax.eval_shape(lambda arrays: call(arrays, units, _product(units)), arrays)
        except EtpUnitError:
            return False
        return True

    # Units for all factors, or for those to which the op is proportional.
    units = dict(zip(factors, itertools.cycle(UNITS)))
    try:
        if not accepts(units):
            units = {key: unit for key, unit in units.items() if accepts({key: unit})}
    except TypeError as error:
        if isinstance(error, BraintraceError):
            raise
        raise NotApplicable('the op takes no quantities') from error
    if not units:
        raise NotApplicable('the op takes no units')
    product = _product(units)
    got, plain = compiled(lambda a: (call(a, units, product), case.call(a)))(arrays)
    if not u.get_unit(got).has_same_dim(product):
        yield f'y has unit {u.get_unit(got)}, expected {product}'
    elif not deviation(u.Quantity(got).to_decimal(product), plain)[0] <= (1e-12 if x64 else 1e-4):
        yield 'the numbers of y depend on the units'
    if biases:
        wrong = product * u.mole
        try:
            jax.eval_shape(lambda a: call(a, units, wrong), arrays)
        except (BraintraceError, TypeError, ValueError, u.UnitMismatchError):
            return
        yield f'a bias of unit {wrong} is let through where y has {product}'


def _product(units: dict) -> Any:
    return functools.reduce(operator.mul, units.values(), u.UNITLESS)


# L12: static parameters ---------------------------------------------------------------------------


def _static(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    for name, value in app.params.items():
        yield from (f'static parameter {name!r}: {fault}' for fault in _identity(value))
    traces = []

    def call(params, *operands):
        traces.append(params)
        return app.primitive.bind(*operands, **dict(params))

    jitted, items = jax.jit(call, static_argnums=0), tuple(sorted(app.params.items()))
    for same in (items, copy.deepcopy(items)):
        jitted.trace(same, *app.avals)
    if len(traces) > 1:
        yield 'equal static parameters are traced again'


def _identity(value: Any) -> Iterator[str]:
    """The faults of the parts of a static parameter that equal themselves alone."""
    if isinstance(value, tuple):
        for inner in value:
            yield from _identity(inner)
    elif callable(value) and hasattr(value, '__qualname__'):
        if '<' in value.__qualname__:
            yield (
                f'{value!r} is equal to itself alone, so each one made is traced again; give it a '
                'place at the top of a module'
            )
    elif not isinstance(value, STATIC) and type(value).__hash__ in (None, object.__hash__):
        yield f'a {type(value).__name__} is not hashable by value'


# L15: numbers that are not finite -----------------------------------------------------------------


def _not_finite(app: Application, draw: Draw, case: Case, x64: bool) -> Iterator[str]:
    for bad in (math.nan, math.inf):
        operands = [jnp.full_like(a, bad) if is_inexact(a) else a for a in draw.operands]
        y = app.bind(operands)
        if y.shape != app.y_aval.shape:
            yield f'y has shape {y.shape} for {bad}, expected {app.y_aval.shape}'
    if app.batched:
        zero = app.with_batch(0)
        for slot in ('init_drtrl', 'init_pp'):
            zeros, whole = zero.empty(slot, 1), app.empty(slot, 1)
            if jax.tree.map(lambda a: (0, *a.shape[1:]), whole) != jax.tree.map(
                lambda a: a.shape, zeros
            ):
                yield f'{slot} has other shapes for an empty batch'


CONTRACT: list[tuple[str, Callable[..., Iterator[str]]]] = [
    ('L0', _description),
    ('L1', _in_sight),
    ('L5', _empty_traces),
    ('L8', _integers),
    ('L11', _dtypes),
    ('L11', _units),
    ('L12', _static),
    ('L15', _not_finite),
]
