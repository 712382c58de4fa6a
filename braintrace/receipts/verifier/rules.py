"""The table of rules: number, family, meaning, formula, and the function that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import loss_rules, run_rules, step_rules, update_rules
from .claims import check_digest, check_routes, check_skip
from .rederivation import rederive

__all__ = ['RULES', 'RUN_RULES', 'STEP_RULES', 'Rule']


@dataclass(frozen=True)
class Rule:
    """One rule; ``needs`` says when it has something to compare.

    >>> RULES[12].formula
    'value = sum_b mask_b loss_b / divisor'
    """

    number: int
    family: str
    title: str
    formula: str
    needs: str


_TABLE = (
    (0, 'structure', 'structure', 'closed schema, finite values, shapes, known names, caps', ''),
    (1, 'loss', 'error', 'err = mask/divisor dL/doutputs', 'a known loss'),
    (2, 'signal', 'learning signal', 'dh = readout pullback of err, B err, or the modulator',
     'a known cell'),
    (3, 'signal', 'step signals', 'dy = sum_s dh_s D_f_s + direct, c_r = sum_s dh_s D_sr + direct',
     'a trace'),
    (4, 'gradient', 'gradient', 'xy_to_dw(x, dy) + <c, e\'>, or (dh . ef / correction) (x) ex',
     'a primitive with a formula'),
    (5, 'update', 'SGD', 'update = -lr gradient', 'SGD without decay'),
    (6, 'update', 'added', 'parameter after = before + update', 'an optimiser'),
    (7, 'update', 'final state', 'decay: (1 - lr wd) before + update; coupled: gradient + wd '
     'before; frozen parameters bit-equal', 'a decay, or a parameter that stays'),
    (8, 'factor', 'provenance', 'x = its source; D and D_f belong to their group', 'a source'),
    (9, 'chain', 'parameters chain', 'params_before = params_after of the step before, bit for bit',
     'adjacent records'),
    (10, 'run', 'one run', 'one run_id, dense steps, one specification', 'a run'),
    (11, 'loss', 'probabilities', 'softmax probabilities sum to 1', 'softmax_ce'),
    (12, 'loss', 'loss', 'value = sum_b mask_b loss_b / divisor', 'a known loss'),
    (13, 'run', 'forward is reverse', 'online sum over a window = reverse sweep with the cut',
     'a window from zero traces'),
    (14, 'derivation', 'derived again', 'every field from params, carry, traces, inputs, targets',
     'a known cell, loss and optimiser, whole arrays'),
    (15, 'claim', 'skip', 'a skip names a basis that holds', 'a skip'),
    (16, 'claim', 'digest', 'the digest binds the bytes of the receipt', 'a digest'),
    (17, 'claim', 'root digest', 'the root digest binds the records of a run', 'a root digest'),
    (18, 'loss', 'reduction', 'divisor = sum of the mask (mean) or 1; window sum = its gradients',
     'a known loss'),
    (19, 'run', 'lanes stay', 'lane ids are constant between resets', 'adjacent records'),
    (20, 'update', 'slots', 'slots and shapes for each parameter, count + 1', 'a known optimiser'),
    (21, 'update', 'momentum', 'trace = g + m trace\', update = -lr trace (Nesterov: g + m trace)',
     'momentum'),
    (22, 'update', 'first moment', 'mu = b1 mu\' + (1 - b1) g', 'Adam, AdamW'),
    (23, 'update', 'second moment', 'nu = b2 nu\' + (1 - b2) g^2', 'Adam, AdamW'),
    (24, 'update', 'Adam', 'update = -lr mu^ / (sqrt(nu^ + eps_root) + eps)', 'Adam'),
    (25, 'chain', 'optimiser chains', 'state_before = state_after of the update before',
     'adjacent updates'),
    (26, 'run', 'configuration', 'algorithm, cell and optimiser (but lr) are constant', 'a run'),
    (27, 'trace', 'recurrent term', 'sum_r D_sr e\'_r, where D_f (x) x is zero', 'D_RTRL'),
    (28, 'trace', 'factored trace', 'ex = a ex\' + x, ef = a D ef\' + (1 - a) D_f', 'ES_D_RTRL'),
    (29, 'trace', 'instantaneous term', 'D_f (x) x, where sum_r D_sr e\'_r is zero', 'D_RTRL'),
    (30, 'trace', 'trace after', 'e = sum_r D_sr e\'_r + D_f (x) x', 'D_RTRL'),
    (31, 'chain', 'states chain', 'trace, carry and t are those of the step before, but for resets',
     'adjacent records'),
    (32, 'trace', 'fresh start', 'trace zero where t = 0; reset lanes at the initial carry',
     'a lane at its start'),
    (33, 'trace', 'correction', '1 - a^(t+1) counts trace steps', 'ES_D_RTRL'),
    (34, 'factor', 'constants', 'alpha = exp(-dt/tau), and D is made of the declared constants',
     'a known cell'),
    (35, 'disclosure', 'dropped mass', 'share of the hidden Jacobian outside of D; never fails',
     'a known cell'),
    (36, 'structure', 'routes', 'each parameter has one route, and a gradient if it is trained',
     ''),
)  # fmt: skip
RULES = {row[0]: Rule(*row) for row in _TABLE}

# In causal order: the first that fails stands nearest to the cause.
STEP_RULES: tuple[tuple[int, Callable], ...] = (
    (16, check_digest),
    (15, check_skip),
    (36, check_routes),
    (20, update_rules.slots_of),
    (18, loss_rules.reduction),
    (32, step_rules.fresh_start),
    (8, step_rules.provenance),
    (34, step_rules.constants),
    (33, step_rules.trace_correction),
    (11, loss_rules.probabilities),
    (12, loss_rules.loss_value),
    (1, loss_rules.error),
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
