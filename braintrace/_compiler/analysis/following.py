"""Labels that travel forward along the D pass, from old states.

They tell which of two disagreeing paths moved positions. For anything else they are unsound: a
value may be zero where its derivative is not.
"""

from __future__ import annotations

import bisect

import numpy as np

from ..equations import labels as lb
from ..equations.equation import END, Equation, is_inexact
from ..equations.labels import backward, forward
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from .d_pass import DPass


class Following:
    """Forward labels."""

    def __init__(self, d_pass: DPass):
        self.d_pass, self.program = d_pass, d_pass.program

    def own_positions(self, value: int, state: int) -> np.ndarray | None:
        """For each element of a value, its own position: labels that agree with it were not moved.

        It is the position that the value reads of old states shaped like ``state``. A value of the
        state's shape that reads several or none has its own places.
        """
        d_pass = self.d_pass
        if value in d_pass.old:
            return lb.identity(self.program.avals[value].shape)
        shape = d_pass.shapes[state]
        alike = (v for v, s in zip(d_pass.old, d_pass.shapes, strict=True) if s == shape)
        found = self.follow({v: lb.identity(shape) for v in alike}, value)
        if lb.has(found) and not lb.meet(found):
            return found
        own = self.program.avals[value].shape
        return lb.identity(own) if own == shape else None

    def follow(self, sources: dict[int, np.ndarray], target: int) -> np.ndarray | None:
        env = dict(sources)
        stops = self.program.op_set | self.d_pass.mixing.keys()
        order = flow.slice_behind(self.program, target, stops)
        at = 0
        while at < len(order):
            i = order[at]
            eqn = self.program.equations[i]
            at += 1
            if eqn.loop is None:
                self._pass(i, eqn, env)
            elif self._cross(i, eqn, env):
                # labels came round: go through the loop once more
                at = bisect.bisect_right(order, self.program.begin_of[i])
        return env.get(target)

    def _pass(self, i: int, eqn: Equation, env: dict[int, np.ndarray]) -> None:
        if any(v in env for v in eqn.ins):
            outs = forward(
                eqn,
                self.program.avals,
                [env.get(v) for v in eqn.ins],
                self.d_pass.known(i),
                linear=False,
                smooth=lambda eqn: self._keeps_positions(i, eqn),
            )
            env.update({o: lab for o, lab in zip(eqn.outs, outs, strict=True) if lb.has(lab)})

    def _cross(self, i: int, eqn: Equation, env: dict[int, np.ndarray]) -> bool:
        """Cross the border of a loop; whether the loop must be followed once more."""
        ending = eqn.primitive is END
        for k, (v, o) in enumerate(zip(eqn.ins, eqn.outs, strict=True)):
            lab = env.get(v)
            if lab is None:
                continue
            # a sequence has the iterations as a first axis, a slice lacks it
            if k >= eqn.loop.num_carry and ending:
                lab = np.broadcast_to(lab, self.program.avals[o].shape)
            elif k >= eqn.loop.num_carry:
                lab = every_row(eqn.loop, lab)
            env[o] = lab if ending else lb.merge(env.get(o), lab)
        again = False
        # the next iteration reads the carry that this one made
        for first, last in self.program.feedback(i) if ending else ():
            merged = lb.merge(env.get(first), env.get(last))
            if merged is not None and not (first in env and np.array_equal(env[first], merged)):
                env[first], again = merged, True
        return again

    def _keeps_positions(self, i: int, eqn: Equation) -> bool:
        """Whether a function with a derivative rule of its own acts element by element."""
        avals = self.program.avals
        control = eqn.does.control
        if control is None or control.option != 'custom_rule':
            return False
        shape = avals[eqn.outs[0]].shape
        if any(avals[v].shape != shape for v in (*eqn.ins, *eqn.outs) if is_inexact(avals[v])):
            return False
        out = [lb.identity(avals[o].shape) if is_inexact(avals[o]) else None for o in eqn.outs]
        ins = backward(eqn, avals, out, self.d_pass.known(i), [True] * len(eqn.ins))
        return all(lab is None or lb.in_place(lab) for lab in ins)


def every_row(loop, labels: np.ndarray) -> np.ndarray:
    """Labels of one iteration's slice; iterations with different labels have to be unrolled."""
    if len(labels) and (labels != labels[0]).any():
        raise MustUnroll(loop)
    return labels[0] if len(labels) else lb.nothing(labels.shape[1:])
