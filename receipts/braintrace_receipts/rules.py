"""The table of rules: what each one holds is in ``rules.toml``, here the function that does."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

from . import run_rules, step_rules, update_rules
from .claims import check_digest, check_routes, check_skip
from .rederivation import rederive


class Rule(NamedTuple):
    """One rule. ``needs`` says when it has something to compare, ``means`` it in words, ``look``
    where to look when it fails, ``defect`` a real one of its kind.

    >>> RULES[12].formula
    'value = sum_b mask_b loss_b / divisor'
    """

    number: int
    family: str
    title: str
    formula: str
    needs: str
    means: str
    look: str
    defect: str = 'none is on record'


_TABLE = tomllib.loads(files(__package__).joinpath('rules.toml').read_text('utf-8'))['rule']
RULES = {row['number']: Rule(**row) for row in _TABLE}

# In causal order: the first that fails is nearest to the cause.
STEP_RULES: tuple[tuple[int, Callable], ...] = (
    (16, check_digest),
    (15, check_skip),
    (36, check_routes),
    (20, update_rules.slots_of),
    (18, step_rules.reduction),
    (32, step_rules.fresh_start),
    (8, step_rules.provenance),
    (34, step_rules.constants),
    (33, step_rules.trace_correction),
    (11, step_rules.probabilities),
    (12, step_rules.loss_value),
    (1, step_rules.error),
    (2, step_rules.learning_signal),
    (3, step_rules.step_signals),
    (29, step_rules.instantaneous),
    (27, step_rules.recurrent),
    (28, step_rules.factored_trace),
    (30, step_rules.trace_after),
    (4, step_rules.gradient),
    (5, update_rules.sgd),
    (21, update_rules.momentum),
    (22, update_rules.first_moment),
    (23, update_rules.second_moment),
    (24, update_rules.adam),
    (7, update_rules.final_state),
    (6, update_rules.added),
    (14, rederive),
    (35, step_rules.dropped_mass),
)
RUN_RULES: tuple[tuple[int, Callable], ...] = (
    (10, run_rules.one_run),
    (26, run_rules.configuration_stays),
    (19, run_rules.lanes_stay),
    (9, run_rules.parameters_chain),
    (18, run_rules.window_sums),
    (13, run_rules.forward_is_reverse),
    (25, run_rules.optimizer_chains),
    (31, run_rules.states_chain),
    (17, run_rules.root_digest),
)
