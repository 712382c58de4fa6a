"""The kappa filter of e-prop: hidden states that are always zero, put into a step where readouts
read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import (
    Diagnostic,
    ETraceGraph,
    Leak,
    MustSplit,
    OpUse,
    Program,
    Splicing,
    analyse_again,
    backward,
    gradients,
    leaks,
    moved_operands,
    readouts,
)
from .._rules import VIEWS, Moving, number_of, times
from ..errors import OptionError

NOTICED = 1e-3  # between kappa and a leak
FILTER = '(filter)'  # the first part of the name of a filter's state


def with_filter(graph: ETraceGraph, kappa: float | Moving | str) -> ETraceGraph:
    """The step in which each readout that leaks reads ``x + r`` in place of x, where ``r = (x -
    stop(x)) + kappa (r' - stop(r'))`` is a state whose value is always zero: it counts with x as
    often as a readout that leaks with ``kappa`` remembers it. With ``kappa`` 0, and where there are
    such states already, the step itself; ``'auto'``: the leak of the readouts.

    An x that is put together of several values has a filter for each of them.
    """
    program = graph.program
    if not kappa or program.virtual:
        return graph
    # only where a hidden state keeps an op's result does a later step remember its x
    ahead = backward(program, dict.fromkeys(program.new_states, 1), gradients(program))
    found = [(op, op.x) for op in readouts(graph) if op.x is not None and not op.repeats]
    reading = [(op, x) for op, x in found if ahead[op.y]]
    auto, known = kappa == 'auto', list(leaks(graph))
    if isinstance(kappa, str):
        if not reading:
            return graph
        kappa = _the_leak(reading, known)
    every = dict.fromkeys(v for _, x in reading for v in _pieces(program, x))
    made = _filtered(graph, kappa, reading, every)
    # a value that no traced op reaches position by position needs no filter
    traced = {c for r in made.hidden_param_op_relations for g in r.groups for c in g.states}
    states = range(len(program.carry), len(made.program.carry))
    needed = [v for c, v in zip(states, every, strict=True) if c in traced]
    if not needed:
        if auto:
            return graph
        raise OptionError(_nothing_to_filter(graph, kappa))
    made = made if len(needed) == len(every) else _filtered(graph, kappa, reading, needed)
    others = [
        Diagnostic(
            'leaky-readout',
            leak.op.key,
            leak.op.where,
            reason='other',
            states=(program.carry_names[leak.state],),
        )
        for leak in (() if isinstance(kappa, Moving) else known)
        if leak.share is not None
        and abs(leak.share - kappa).max() > max(NOTICED, jnp.finfo(leak.share.dtype).eps)
    ]
    return replace(made, findings=(*made.findings, *others))


def _the_leak(reading: Sequence[tuple[OpUse, int]], known: Sequence[Leak]) -> float:
    """The number that is the leak of every readout."""
    leak_of = {leak.op.key: leak.number for leak in known}
    numbers = {leak_of.get(op.key) for op, _ in reading}
    found = numbers.pop()
    if numbers or found is None:
        lines = [f'{op.key} ({op.where}): {leak_of.get(op.key)}' for op, _ in reading]
        raise OptionError(
            "kappa is 'auto', and there is no number that is the leak of every readout: "
            f'{"; ".join(lines)}. Give a number, let the readouts leak in front of their weights '
            "(braintrace.nn.FilteredReadout), or take exact windows (inside='exact')."
        )
    return found


def _nothing_to_filter(graph: ETraceGraph, kappa: float | Moving) -> str:
    found = ', '.join(f'{op.key} ({op.where})' for op in readouts(graph)) or 'none'
    return (
        f'kappa is {kappa}, and no readout that leaks reads position by position what an op with a '
        f'trace made; the readouts are: {found}. A readout is an op that reads what other '
        'ops made, and whose result no op reads (`braintrace.matmul(h, W)`; a plain `h @ W` is '
        'none); its result has to be kept in a hidden state, as in braintrace.nn.LeakyRateReadout, '
        'and its x to be a state, or made of states of one shape element by element. A readout '
        'that does not leak, or that filters in front of its weights '
        '(braintrace.nn.FilteredReadout), needs no kappa; for another take exact windows '
        "(inside='exact')."
    )


def _pieces(program: Program, value: int) -> Iterator[int]:
    """The values that a value is put together of."""
    i = program.producer.get(value)
    eqn = None if i is None else program.equations[i]
    does = None if eqn is None or eqn.scope else eqn.does
    assembles = does is not None and does.assembles and not does.repeats
    if eqn is None or not assembles or moved_operands(eqn) != tuple(range(len(eqn.ins))):
        yield value
        return
    for v in eqn.ins:
        yield from _pieces(program, v)


def _filtered(
    graph: ETraceGraph,
    kappa: float | Moving,
    reading: list[tuple[OpUse, int]],
    values: Collection[int],
) -> ETraceGraph:
    """The step in which these values are filtered where readouts read them."""
    program, edit = graph.program, Splicing(graph.program)
    # a filter of few bits would decay at another rate
    wide = lambda aval: aval.update(dtype=_jax.wide(aval.dtype))
    old = {v: edit.value(wide(program.avals[v])) for v in values}
    new: dict[int, int] = {}
    reads: dict[int, int] = {}
    keys: dict[int, tuple[str, ...]] = {}
    x_of: dict[int, int] = {}  # y of a readout -> its new x

    def filtered(x, r):
        stop = jax.lax.stop_gradient
        r = (x - stop(x)).astype(r.dtype) + times(number_of(kappa), r - stop(r))
        return r, stop(x) + r.astype(x.dtype)

    for op, x in sorted(reading, key=lambda each: each[0].equation):
        pieces = list(dict.fromkeys(_pieces(program, x)))
        for k, v in enumerate(pieces):
            if v in old and v not in new:
                new[v], reads[v] = edit.put(op.equation, filtered, (v, old[v]))
                keys[v] = FILTER, op.key if len(pieces) == 1 else f'{op.key}[{k}]'
        together = partial(_together, program, x, pieces)
        (x_of[op.y],) = edit.put(op.equation, together, [reads.get(v, v) for v in pieces])
    spliced = edit.result(
        carry=(*program.carry, *old.values()),
        carry_keys=(*program.carry_keys, *(keys[v] for v in old)),
        hidden=(*program.hidden, *range(len(program.carry), len(program.carry) + len(old))),
        virtual=program.virtual + len(old),
    )
    # the readouts read their new x
    equations = list(spliced.equations)
    for i, eqn in enumerate(equations):
        for x in (x for y, x in x_of.items() if y in eqn.outs):
            k = eqn.primitive.x_invar_index
            equations[i] = replace(eqn, ins=(*eqn.ins[:k], x, *eqn.ins[k + 1 :]))
    new_carry = (*spliced.new_carry, *(new[v] for v in old))
    try:
        return analyse_again(
            graph, replace(spliced, equations=tuple(equations), new_carry=new_carry)
        )
    except MustSplit:
        raise OptionError(_nothing_to_filter(graph, kappa)) from None


def _together(program: Program, value: int, pieces: Sequence[int], *xs: jax.Array) -> jax.Array:
    """A value, put together of other pieces."""
    if value in pieces:
        return xs[pieces.index(value)]
    eqn = program.equations[program.producer[value]]
    outs = eqn.evaluate([_together(program, v, pieces, *xs) for v in eqn.ins])
    return outs[eqn.outs.index(value)]


VIEWS['kappa'] = with_filter
