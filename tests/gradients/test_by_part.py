"""Several rules in one network: the gradient of each op against the NumPy recursion of its rule."""

import functools

import jax
import numpy as np

from braintrace import rules
from braintrace.functional import flatten_paths, unflatten_paths
from tests import models, oracles
from tests.compare import assert_close
from tests.gradients.harness import MASK, by_steps, other_carry, over_sequence, start
from tests.gradients.test_updates import gradients, grouped
from tests.late import LATE
from tests.tiers import first, in_turn

ES, D, NONE = rules.es_d_rtrl(0.7), rules.d_rtrl(), rules.same_step()
ORACLES = {
    ES: functools.partial(oracles.es_recursion, decay=0.7),
    D: oracles.dense_recursion,
    LATE: oracles.dense_recursion,
    NONE: functools.partial(oracles.es_recursion, decay=0.0),  # no earlier step
}
NAMES = ['gru', 'lstm_fused', 'adaptive_lif', 'sparse']
TURNS = {
    'factors first': (ES, D, NONE),
    'entries first': (LATE, ES, NONE),
    'no trace first': (NONE, LATE, D),  # two kinds of D_RTRL, one of which is written late
}


@functools.cache
def parted(name, turn):
    """The rule whose parts take turns over the ops, and the rule of each parameter."""
    graph = start(models.case(name), D)[0].graph
    ops = [op for op in graph.ops if op.owned]
    each = {op.key: turn[k % 3] for k, op in enumerate(ops)}
    names, of = graph.program.param_names, {}
    for op in ops:
        for i in (i for several in op.parameters.values() for i in several):
            assert of.setdefault(names[i], each[op.key]) is each[op.key]
    parts = {key: rule for key, rule in each.items() if rule != turn[1]}
    return rules.by_part(parts, default=turn[1]), of


def oracle(case, of):
    """The gradients of each step, of each parameter by the recursion of its rule."""
    found = {rule: flatten_paths(ORACLES[rule](case)) for rule in {*of.values(), NONE}}
    paths = flatten_paths(case.params)
    chosen = {path: found[of.get('/'.join(path), NONE)][path] for path in paths}
    return unflatten_paths(chosen, case.params)


@in_turn(first('gru', 'lstm_fused'), name=NAMES, turn=TURNS)
def test_each_op_gets_the_gradient_of_its_own_rule(name, turn):
    case, (rule, of) = models.case(name), parted(name, TURNS[turn])
    want = oracle(case, of)
    steps = [grads for _, _, grads in by_steps(case, rule)]
    assert_close(jax.tree.map(lambda *g: np.stack(g), *steps), want)
    for window in (1, 4):
        assert_close(over_sequence(case, rule, window)[0], oracles.total(want))


@in_turn(first('gru'), name=NAMES, turn=TURNS, every=[1, 2])
def test_masks_resets_and_updates(name, turn, every):
    case, (rule, of) = models.case(name), parted(name, TURNS[turn])
    carry0, flags = other_carry(case), np.zeros((len(case.xs), 2), bool)
    flags[[2, 5], 0] = flags[[1, 3], 1] = True
    want = oracles.restarted(functools.partial(oracle, of=of), case, flags, carry0)
    got, _, _ = gradients(case, rule, every, reset=(flags, carry0), mask=MASK)
    assert_close(got, grouped(want, every, MASK))
