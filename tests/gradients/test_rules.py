"""Every rule against its formula in NumPy: in windows, step by step, under masks and resets of
lanes, and from call to call.
"""

import itertools

import numpy as np
import pytest

from braintrace import functional
from tests import models, oracles
from tests.compare import added, assert_close, assert_drawn_close, assert_moves, at
from tests.gradients.formulas import RANDOM, RULES, SCOPED, SEED, TRACES, formula, forward
from tests.gradients.harness import (
    MASK,
    by_steps,
    other_carry,
    over_sequence,
    quick,
    restarts,
    start,
    step_program,
)
from tests.gradients.rows import FEW, WIDE, crossed, row

pytestmark = pytest.mark.drawn
# The tables of models: a rule has those in which it has something of its own.
FACTORED = 'lstm_fused synapse learned_decay conv1d spiking_two stored_spike mamba two_rows'.split()
MORE = [*FEW, 'min_gru', 'three_layers', 'populations']
# cells in which one op is between the old states and the new ones
SINGLE = 'leaky lstm lstm_fused spiking_two lora sparse conv1d adaptive_lif'.split()
DRAWN = 'leaky gru lstm_fused spiking_two conv1d lora sparse vector learned_decay'.split()
REACH = 'leaky lstm_fused gru sparse lora tail_norm normalised learned_decay'.split()
REACH += 'conv1d conv2d neighbours tail_swap'.split()
wide = [name for name in models.MODELS if name in WIDE]
READS_WEIGHTS = {'lora', 'attention_of_other_ops'}  # whose trace can not wait for its weights


def product(names, rules, *values):
    return [(name, rule, *values) for name in names for rule in rules]


def ragged(names, rule, *others):
    """Of six steps: each row with a full window and a rest, and with one of the others in turn."""
    return product(names, [rule], 4) + [(n, rule, w) for n, w in crossed(names, others)]


def table(arguments, *tables):
    """The rows of several tables, small models first."""
    rows = sorted(itertools.chain(*tables), key=lambda r: r[0] != 'leaky')
    return pytest.mark.parametrize(arguments, [row(*r) for r in rows])


@pytest.mark.tier(quick=8)
@table(
    'name, rule, window',
    product(models.MODELS, ['d_rtrl', 'es_d_rtrl'], 3),
    product(models.MODELS, ['whole'], 3),
    [(n, 'd_rtrl', window) for n, window in crossed(wide, (1, None))],
    [(n, 'es_d_rtrl', window) for n, window in crossed(wide, (None, 1))],
    product(SINGLE, ['own', 'own whole'], 3),
    product(['leaky', 'spiking_two', 'conv1d'], ['two decays', 'input decay'], 3),
    product(REACH, ['snap'], 3),
    product(DRAWN, RANDOM, 3),
    [(*pair, window) for pair in SCOPED for window in (1, None)],
    [(n, rule, w) for n in ('gru', 'conv1d') for rule in RANDOM for w in (1, None)],
    product(['lstm_fused'], ['whole', 'own', 'own whole'], 1),
)
def test_a_window_gives_the_gradient_of_the_formula(name, rule, window):
    got = over_sequence(models.case(name), RULES[rule][0], window)[0]
    assert_drawn_close(got, oracles.total(formula(name, rule)))


@pytest.mark.tier(quick=8)
@table(
    'name, rule',
    product(models.MODELS, ['d_rtrl', 'es_d_rtrl']),
    product([n for n in models.MODELS if n not in READS_WEIGHTS], ['pending']),
    product(wide, ['no decay']),
    product(['leaky', 'lstm_fused'], ['two decays', *RANDOM]),
    product(['gru', 'lstm_fused', 'spiking_three'], ['whole']),
    product(['lstm_fused', 'spiking_two'], ['own', 'own whole']),
    SCOPED,
)
def test_each_step_gives_the_gradient_of_the_formula(name, rule):
    outputs, losses, _ = forward(name)
    for t, (loss, output, grads) in enumerate(by_steps(models.case(name), RULES[rule][0])):
        assert_drawn_close(grads, at(formula(name, rule), t))
        assert_close((output, loss), (outputs[t], losses[t]))


@pytest.mark.tier(quick=3)
@table(
    'name, rule, window',
    ragged(FEW, 'd_rtrl', 1, None),
    ragged(FACTORED, 'es_d_rtrl', 1, None),
    product(['leaky', 'sparse'], RANDOM, 4),
    [(*pair, 3) for pair in SCOPED],
)
def test_a_mask_weighs_the_losses_and_nothing_else(name, rule, window):
    grads, losses, _, state = over_sequence(models.case(name), RULES[rule][0], window, mask=MASK)
    assert_drawn_close(grads, oracles.total(formula(name, rule), MASK))
    assert_drawn_close((losses, dict(state.carry)), forward(name)[1:])


@pytest.mark.tier(quick=3)
@table(
    'name, rule, window',
    ragged(MORE, 'd_rtrl', None, 1),
    ragged(FACTORED, 'es_d_rtrl', None, 1),
    product(['leaky', 'lstm_fused'], ['two decays'], 4),
    product(['lstm_fused'], ['whole', 'own whole'], 4),
    product(['leaky', 'learned_decay', 'spiking_two'], RANDOM, 4),
    [(*pair, 3) for pair in SCOPED],
)
def test_a_reset_of_lanes_is_a_restart_of_those_lanes(name, rule, window):
    case, want = models.case(name), formula(name, rule, reset=True)
    assert_moves(oracles.total(want))
    got = over_sequence(case, RULES[rule][0], window, reset=restarts(case), mask=MASK)[0]
    assert_drawn_close(got, oracles.total(want, MASK))


@pytest.mark.tier(quick=0)
@table('name, rule', product(['lstm', 'vector', 'context'], ['d_rtrl']), [('vector', 'es_d_rtrl')])
def test_a_reset_of_all_lanes_is_a_restart(name, rule):
    case, carry0 = models.case(name), other_carry(models.case(name))
    parts = [case.steps(0, 3, carry0), case.steps(3, 6, carry0)]
    want = added([oracles.total(RULES[rule][1](part)) for part in parts])
    reset = np.array([True, False, False, True, False, False]), carry0
    assert_drawn_close(over_sequence(case, RULES[rule][0], 3, reset=reset)[0], want)


@pytest.mark.tier(quick=2)
@table('name, rule', product(['leaky', *MORE], ['pending']), [('leaky', 'es_d_rtrl')])
def test_a_reset_between_steps_ends_pending_steps_too(name, rule):
    case, rule_, want = models.case(name), RULES[rule][0], formula(name, rule, reset=True)
    state, step, (flags, carry0) = start(case, rule_)[1], step_program(case, rule_), restarts(case)
    for t, (x, y, flag) in enumerate(zip(case.xs, case.ys, flags, strict=True)):
        state = functional.reset(state, flag, carry0)
        grads, _, _, state = step(case.params, state, x, y)
        assert_drawn_close(grads, at(want, t))


@pytest.mark.tier(quick=1)
@table(
    'name, rule',
    product(FEW, ['d_rtrl']),
    product(FACTORED, ['es_d_rtrl']),
    product(['leaky'], RANDOM),
)
def test_a_later_call_continues_the_stream(name, rule):
    case, rule_ = models.case(name), RULES[rule][0]
    first, _, _, half = over_sequence(case, rule_, 1, slice(0, 3))
    second, _, _, state = over_sequence(case, rule_, None, slice(3, 6), half)
    assert_drawn_close(added([first, second]), oracles.total(formula(name, rule)))
    assert np.all(state.t == 6)
    if rule not in RANDOM:  # whose trace holds a key
        steps = over_sequence(case, rule_, 1, slice(3, 6), half)[3]
        assert_drawn_close((state.carry, state.trace), (steps.carry, steps.trace))


@pytest.mark.tier(quick=1)
@table('name, rule', [*zip(['leaky', 'lstm_fused'] * 2, RANDOM)])
def test_an_exact_window_meets_a_random_trace_at_its_border(name, rule):
    case = models.case(name)
    learner, state = start(case, RULES[rule][0])
    run = quick(learner.sequence_grad(case.loss, window=2, inside='exact', reduction='sum'))
    got = run(case.params, state, case.xs, case.ys)[0]
    assert_drawn_close(got, oracles.at_borders(case, TRACES[rule](case, SEED).before, 2))
