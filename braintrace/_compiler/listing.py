"""The equations of a step as text, alike in every process."""

from __future__ import annotations

import zlib
from enum import Enum

import jax
import numpy as np

from .. import _jax
from .program.leaves import describe_aval
from .program.program import Program


def listing(program: Program) -> list[str]:
    """A line for each equation: its results, primitive, parameters and operands.

    Parameters and states have their names, other values are numbered as they come; a constant is
    its number, an array of them its checksum. What has no text of its own, as a derivative rule, is
    left out.

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.5 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> state = learner.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2)))
    >>> from braintrace._compiler import listing
    >>> listing(learner.graph.program)[0]
    '%0 float32[3, 4] = mul(0.5, carry)'
    """
    names = {v: _constant(x) for v, x in program.constants.items()}
    names |= dict(zip(program.params, program.param_names, strict=True))
    names |= dict(zip(program.carry, program.carry_names, strict=True))
    names |= {v: f'input {i}' for i, v in enumerate(program.inputs)}
    numbers: dict[int, int] = {}

    def name(v: int) -> str:
        return names[v] if v in names else f'%{numbers.setdefault(v, len(numbers))}'

    lines = []
    for eqn in program.equations:
        operands = ', '.join(map(name, eqn.ins))
        results = ', '.join(f'{name(v)} {describe_aval(program.avals[v])}' for v in eqn.outs)
        lines.append(f'{results} = {eqn.primitive.name}({operands}){_params(eqn.params)}')
    results = ', '.join(map(name, (*program.outputs, *program.new_carry)))
    return [*lines, f'return {results}']


def _constant(x) -> str:
    if isinstance(x, _jax.Tracer | jax.ShapeDtypeStruct):
        return describe_aval(x)
    array = np.asarray(jax.random.key_data(x) if _jax.is_key(x) else x)
    if array.size == 1:
        return str(array.reshape(())[()])
    return f'{describe_aval(array)} #{zlib.crc32(array.tobytes()):08x}'


def _params(params: dict) -> str:
    named = ((key, _plain(value)) for key, value in sorted(params.items()) if key != 'name')
    found = {key: text for key, text in named if text}
    found |= {f'inside {i}': _inside(jaxpr) for i, jaxpr in enumerate(_jax.sub_jaxprs(params))}
    return f' {found}' if found else ''


def _plain(value) -> str:
    """The text of a parameter; empty where it has none that is alike in every process."""
    if isinstance(value, bool | int | float | str | Enum):
        return str(value)
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name if isinstance(value, np.dtype) else value.__name__
    if isinstance(value, tuple | list):
        return f'({", ".join(map(_plain, value))})'
    return getattr(value, '__qualname__', '') if callable(value) else ''


def _inside(jaxpr) -> str:
    """The primitives of an inner program, with the numbers that are in it."""
    found = []
    for eqn in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        numbers = [str(v.val) for v in eqn.invars if isinstance(v, _jax.Literal)]
        found.append(f'{eqn.primitive.name}({", ".join(numbers)}){_params(eqn.params)}')
    return '; '.join(found)
