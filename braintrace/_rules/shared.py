"""What a trace holds of single samples, and what samples share in it."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from .._compiler import ETraceGraph
from .by_part import rule_at
from .d_rtrl import DRTRL
from .entries import OpTrace
from .es_d_rtrl import ESDRTRL, alive_slots
from .layout import Pair, pairs, read, where_lanes
from .rule import Rule
from .stepwise import StepRule, by_lane


def shared_pairs(rule: Rule, graph: ETraceGraph) -> list[Pair]:
    """The pairs with something that several samples share, so that these can not start again one by
    one: an input factor of ES-D-RTRL whose op's result reaches states of several samples, a slot of
    one's own rule without the batch in axis 0, entries for states of which some have a batch.
    """
    slots = jax.eval_shape(lambda: rule.init(graph)) if isinstance(rule, StepRule) else {}

    def is_shared(pair: Pair) -> bool:
        if pair.lane is None:
            return not graph.batch_axes.keys().isdisjoint(pair.group.states)
        if isinstance(rule_at(rule, pair.relation), ESDRTRL) and pair.op.x is not None:
            return pair.rows_of_x is None
        lanes = (graph.lanes or 0,)
        return bool(slots) and not all(by_lane(pair, e, lanes) for e in pair.of(slots).values())

    return list(filter(is_shared, pairs(graph)))


def numbers_of(rule: Rule, pair: Pair, slots: dict, flags: jax.Array) -> Mapping:
    """The slots of a pair as numbers, zero but in the flagged lanes."""
    rule, numbers = rule_at(rule, pair.relation), jax.tree.map(read, slots)
    if isinstance(rule, DRTRL):
        own = OpTrace(pair.op, pair.coords, None, pair.by_position)
        return own.alive(numbers, pair.flags(flags))
    if 'init_pp' in rule.required:  # two factors
        return alive_slots(pair, numbers, flags)
    laned = not pair.by_position
    return jax.tree.map(
        lambda e: where_lanes(flags, laned and e.shape[:1] == flags.shape, e), numbers
    )
