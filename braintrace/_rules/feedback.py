"""Rules whose errors go back through other weights, as views of a graph."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph, OpUse, is_inexact, leaks, readouts
from ..errors import OptionError
from .moving import Moving, checked, number_of

# views --------------------------------------------------------------------------------------------
#
# What a rule changes in the compiled step before it looks at it.


# What a field of a view makes of a compiled step: ``fn(graph, value)``, the graph itself where the
# value asks for nothing, or the step is seen so already. What is beside the core registers it.
VIEWS: dict[str, Callable[[ETraceGraph, Any], ETraceGraph]] = {}


@dataclass(frozen=True)
class View:
    """How a rule sees a step; by default as it was compiled.

    ``scope``: what a trace keeps beside its own position. ``kappa``: of the filter of what readouts
    read, 0 for none, ``'auto'`` for the readouts' leak. ``feedback``: the weights through which
    errors go back, None for the ops' own.
    """

    scope: str = 'position'
    kappa: float | Moving | str = 0.0
    feedback: Feedback | None = None

    def of(self, graph: ETraceGraph) -> ETraceGraph:
        """The step in this view, also if it is in this view already."""
        for field in fields(self):
            if field.name in VIEWS:
                graph = VIEWS[field.name](graph, getattr(self, field.name))
        return graph if self.feedback is None or graph.feedback else self.feedback.of(graph)

    def kappa_in(self, graph: ETraceGraph) -> float | Moving:
        """``kappa`` in numbers, of a step in this view."""
        if not isinstance(self.kappa, str):
            return self.kappa
        numbers = [leak.number for leak in leaks(graph)] if graph.program.virtual else []
        return next((number for number in numbers if number is not None), 0.0)

    def notes(self, graph: ETraceGraph) -> list[str]:
        """What of this view changes gradients, in phrases for the report of a step in this view."""
        program, found = graph.program, []
        if kappa := self.kappa_in(graph):
            places = ', '.join(program.carry_keys[c][-1] for c in program.virtual_states)
            shown = kappa if isinstance(kappa, Moving) else f'{kappa:g}'
            found.append(f'kappa {shown} at {places}')
        if graph.feedback:
            places = ', '.join(graph.feedback)
            found.append(f'the error reaches h through B in place of W at {places}')
        return found


# feedback -----------------------------------------------------------------------------------------
#
# Weights through which the error goes back in place of an op's own.


KINDS = ('random', 'adaptive')
COUNT = '(feedback)'  # the key, beside a trace's relations, of the steps since the state was made


@dataclass(frozen=True)
class Feedback:
    r"""How the error goes back through an op: by weights B in place of its own W.

    .. math::
        y = \mathrm{op}(x, W) \qquad
        \frac{dL}{dx} = \left(\frac{d\,\mathrm{op}(x, B)}{dx}\right)^{\!\top} \frac{dL}{dy}

    The gradient of W, and the trace, keep W. A B of your own needs no rule:
    ``y = matmul(stop(x), W) + (x @ B - stop(x @ B))`` in the model, where ``stop`` is
    ``jax.lax.stop_gradient``.

    Parameters
    ----------
    kind : 'random' or 'adaptive'
        ``'random'``: B is fixed (Lillicrap et al. 2016, Nat. Commun. 7:13276). ``'adaptive'``:
        ``B^t = W^t + (1 - decay)^t E``, where t counts all steps since the learner was compiled,
        over resets too: B gets the updates of W, and what is between them shrinks. So it does in
        Kolen and Pollack 1994 (ICNN 3:1375) and Akrout et al. 2019 (NeurIPS, arXiv 1904.05391), by
        weight decay, which here leaves W alone.
    ops : keys of ops, optional
        As the report names them; by default the readouts, ops that read what other ops made and
        whose result no op reads, in the step or through a state.
    scale : float, optional
        The standard deviation of the normal numbers in B, or in E. By default ``1 / sqrt(n)``,
        where n is how many products with x an element of y sums: the features of ``matmul``, the
        taps of a convolution, the entries of a sparse column on average; for an op of two factors
        (lora) that of their product. An array of shape () as in
        :func:`braintrace.rules.es_d_rtrl`.
    decay : float
        In [0, 1), of ``'adaptive'`` alone; an array like ``scale``.
    seed : int
        The numbers are drawn from it and the op's key alone.

    Raises
    ------
    OptionError
        There are other values, or, when the step is compiled, ops that it does not have.

    Examples
    --------
    >>> import braintrace
    >>> rule = braintrace.rules.d_rtrl().with_feedback(braintrace.Feedback('random', seed=3))
    >>> rule.view.feedback.kind
    'random'
    """

    kind: Literal['random', 'adaptive']
    ops: tuple[str, ...] | None = None
    scale: float | jax.Array | None = None
    decay: float | jax.Array = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(
                f"feedback is {self.kind!r}; choose 'symmetric' (the ops' own weights, no "
                "Feedback), 'random' or 'adaptive'."
            )
        if self.ops is not None:
            object.__setattr__(self, 'ops', _keys(self.ops))
        if self.scale is not None:
            scale = checked('scale', self.scale, lambda x: 0 < x < math.inf)
            if scale is None:
                raise OptionError(
                    f'scale is {self.scale!r}; give a standard deviation > 0, or None.'
                )
            object.__setattr__(self, 'scale', scale)
        if (decay := checked('decay', self.decay)) is None:
            raise OptionError(f'decay is {self.decay!r}; give a number in [0, 1).')
        object.__setattr__(self, 'decay', decay)
        if self.decay and self.kind == 'random':
            raise OptionError(
                f"decay is {self.decay} with 'random' feedback, which is fixed; leave it out, or "
                "take 'adaptive'."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral) or self.seed < 0:
            raise OptionError(f'seed is {self.seed!r}; give an int >= 0.')

    def of(self, graph: ETraceGraph) -> ETraceGraph:
        """The step in which these ops have feedback weights."""
        program, feedback = graph.program, {}
        avals, constants = list(program.avals), dict(program.constants)
        for op in self._chosen(graph):
            feedback[op.key] = {}
            for name, array in self.draw(op, program.constants).items():
                feedback[op.key][name] = number = len(avals)
                avals.append(jax.typeof(array))
                constants[number] = array
        return replace(
            graph,
            program=replace(program, avals=tuple(avals), constants=constants),
            feedback=feedback,
            fading=number_of(self.decay) if self.kind == 'adaptive' else None,
        )

    def _chosen(self, graph: ETraceGraph) -> list[OpUse]:
        able = {
            op.key: op
            for op in graph.ops
            if op.owned and op.x is not None and is_inexact(op.x_aval)
        }
        default = [op.key for op in readouts(graph)]
        asked = default if self.ops is None else self.ops
        unknown = [key for key in asked if key not in able]
        if unknown or not asked:
            what = f'names {unknown}' if unknown else 'finds no readout'
            raise OptionError(
                f'Feedback {what}: give as `ops` some of {list(able)}, the ops that read an x of '
                'floats with weights made of parameters alone (`braintrace.matmul(h, W)`; a plain '
                '`h @ W` is none).'
            )
        return [able[key] for key in dict.fromkeys(asked)]

    def draw(self, op: OpUse, constants: Mapping) -> dict[str, Any]:
        """The feedback weights of an op; ``constants``: value number -> array."""
        rng = np.random.default_rng([self.seed, zlib.crc32(op.key.encode())])
        scale = _scale(op, constants) if self.scale is None else number_of(self.scale)
        return {
            name: (scale * rng.standard_normal(aval.shape)).astype(aval.dtype)
            for name, aval in sorted(op.weight_avals.items())
        }


def counting(trace: dict, count: jax.Array | None) -> dict:
    """A trace, and the count of all steps beside it; None: nothing asks for it."""
    return trace if count is None else {**trace, COUNT: count}


def uncounted(trace: dict) -> tuple[dict, jax.Array | None]:
    """The inverse of :func:`counting`."""
    return {key: e for key, e in trace.items() if key != COUNT}, trace.get(COUNT)


def _keys(ops) -> tuple[str, ...]:
    keys = (ops,) if isinstance(ops, str) else tuple(ops) if isinstance(ops, Iterable) else ()
    if not (keys and all(isinstance(key, str) for key in keys)):
        raise OptionError(f'ops is {ops!r}; give keys of ops, as the report names them, or None.')
    return keys


def _scale(op: OpUse, constants: Mapping) -> float:
    """The standard deviation with which y is as large as x: of ``op(1, w) - op(0, w)``, which
    counts products, for ones and for twos, which tell how many weights are in each.
    """
    known = {n: constants[v] for n, v in op.structure.items() if v in constants}
    bound = op.bound(known) if len(known) == len(op.structure) else op.empty()
    with jax.ensure_compile_time_eval():
        x = jnp.ones(op.x_aval.shape, op.x_aval.dtype)

        def products(number: float) -> float:
            weights = {n: jnp.full(a.shape, number, a.dtype) for n, a in op.weight_avals.items()}
            y = bound.impl(x, weights) - bound.impl(0 * x, weights)
            return float(jnp.abs(y).mean())

        ones, twos = products(1.0), products(2.0)
    factors = round(math.log2(twos / ones)) if ones and twos else 1
    return max(ones, 1.0) ** (-0.5 / max(factors, 1))
