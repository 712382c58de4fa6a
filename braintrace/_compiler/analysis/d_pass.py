"""What the analyses of the D pass share.

The D pass is the step in which every cut equation reads constants and the y of every op is a free
variable.
"""

from __future__ import annotations

from ..program import dataflow as flow
from ..program.program import Program

# What a value depends on: old states, the y of ops, old states that no parameter reaches; from
# OTHERS on there is a bit for each old state.
OLD, Y, CLOCK, OTHERS = 1, 2, 4, 3


class DPass:
    """States are numbered as in ``program.hidden``.

    ``old``, ``new``, ``shapes``: each state's value before and after the step, and its shape.
    ``untaught``: states that no parameter ever reaches. ``depends``: the bits of each value, see
    above. ``mixing``: the reason for each cut so far.
    """

    def __init__(self, program: Program):
        self.program = program
        self.old = [program.carry[c] for c in program.hidden]
        self.new = program.new_states
        self.shapes = [program.avals[v].shape for v in self.old]
        untaught = _untaught(program)
        self.untaught = {s for s, c in enumerate(program.hidden) if c in untaught}
        self.depends = self._depends()
        self.mixing: dict[int, str] = {}

    def _depends(self) -> list[int]:
        program = self.program
        start = dict.fromkeys((o for i in program.ops for o in program.equations[i].outs), Y)
        for s, v in enumerate(self.old):
            kind = CLOCK if s in self.untaught else OLD
            start[v] = start.get(v, 0) | kind | 1 << OTHERS + s
        stops = program.op_set | program.blocks
        return flow.forward(program, start, lambda i, found: 0 if i in stops else found)

    def cut(self, i: int, why: str) -> None:
        self.mixing[i] = why

    def known(self, i: int) -> list:
        return [self.program.constants.get(v) for v in self.program.equations[i].ins]


def _untaught(program: Program) -> set[int]:
    """Hidden states (positions in the carry) that no parameter ever reaches, as a clock."""
    found = set(program.hidden)
    while True:
        # the reader of a taught state is taught at the next step
        start = {program.params[i]: 1 for i in program.trainable}
        start |= {program.carry[c]: 1 for c in program.hidden if c not in found}
        taught = flow.forward(program, start, flow.gradients(program))
        rest = {c for c in found if not taught[program.new_carry[c]]}
        if rest == found:
            return found
        found = rest
