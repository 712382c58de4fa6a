"""Options of rules and of windows that are refused, each with what was found and what to give."""

import jax
import numpy as np
import optax
import pytest

import braintrace
from braintrace import Feedback, functional, rules
from braintrace.errors import OptionError
from braintrace.rules import d_rtrl, e_prop, es_d_rtrl, ottt, rtrl, signs, snap, uoro
from tests.gradients.harness import of_shapes
from tests.models import squared


def plain(p, h, x):
    h = jax.numpy.tanh(braintrace.matmul(jax.numpy.concatenate([x, h], -1), p['w']))
    return h, h


def compiled(rule):
    """A learner of a cell with one matrix, compiled for two lanes of four units."""
    w, h, x = (np.zeros(shape, np.float32) for shape in ((7, 4), (2, 4), (2, 3)))
    of_shapes(plain, rule, {'w': w}, h, x)


def windows(**options):
    return functional.online(plain, d_rtrl()).sequence_grad(squared, **options)


def updates(**options):
    return functional.online(plain, d_rtrl()).sequence_update(squared, optax.sgd(0.1), **options)


IN_RANGE = r'give a number in \[0, 1\), 0 for no filter'
REFUSED = [
    (lambda: d_rtrl(credit='half'), "credit is 'half'; choose 'cut' or 'whole'"),
    (lambda: d_rtrl(scope='reach'), "scope is 'reach'; choose 'position' or 'own'"),
    (lambda: es_d_rtrl((0.9, 1.0)), r'the decays are \(0.9, 1.0\)'),
    (lambda: es_d_rtrl((-0.1, 0.5)), r'give a pair \(a_x, a_f\)'),
    (lambda: es_d_rtrl(True), 'decay_or_rank is True'),
    (lambda: ottt(1.0), 'leak is 1.0'),
    (lambda: signs('each'), "scope is 'each'"),
    (lambda: signs(seed=True), 'seed is True'),
    (lambda: uoro('lane'), "pair is 'lane'"),
    (lambda: uoro(seed=2**32), r'seed is 4294967296; give an int from 0 to 2\*\*32 - 1'),
    (lambda: rtrl('every'), "layers is 'every'; give 'joint' or 'each'"),
    (lambda: rtrl(keep=0), 'keep is 0; give an int from 1'),
    (lambda: rtrl(seed=-1), 'seed is -1; give an int >= 0'),
    (lambda: compiled(rtrl(keep=5)), 'keep is 5, and carry has 4 hidden numbers'),
    (lambda: snap(0), r'n is 0; give an int >= 1 \(same_step\(\) is SnAp-0\)'),
    *((lambda k=k: d_rtrl().filtered(k), IN_RANGE) for k in (1.0, -0.1, True, 'slow')),
    (lambda: es_d_rtrl(0.9).filtered(0.9), 'ES_D_RTRL keeps no trace entry.*d_rtrl'),
    (lambda: rules.same_step().filtered(0.9), 'keeps no trace entry.*d_rtrl'),
    (lambda: Feedback('fixed'), "feedback is 'fixed'; choose 'symmetric'"),
    (lambda: e_prop(feedback='none'), "feedback is 'none'; choose"),
    (lambda: e_prop(np.ones(3)), r'kappa is float\d+\[3\]; .* of shape \(\)'),
    (lambda: e_prop(feedback=3), "feedback is 3; choose 'symmetric'"),
    (lambda: Feedback('random', decay=0.1), "decay is 0.1 with 'random'"),
    (lambda: Feedback('adaptive', decay=1.0), r'decay is 1.0; give a number in \[0, 1\)'),
    (lambda: Feedback('random', scale=0), 'scale is 0; give a standard deviation > 0'),
    (lambda: Feedback('random', seed=-1), 'seed is -1; give an int >= 0'),
    (lambda: Feedback('random', ops=3), 'ops is 3; give keys of ops'),
    (lambda: d_rtrl().with_feedback('random'), 'give a braintrace.Feedback'),
    (
        lambda: compiled(d_rtrl().with_feedback(Feedback('random', ops=('w', 'hidden')))),
        r"names \['hidden'\]: give as `ops` some of \['w'\]",
    ),
    (lambda: compiled(rules.rflo()), r"finds no readout: give.*\['w'\]"),
    (lambda: windows(inside='exact'), 'its length changes the gradient'),
    (lambda: windows(window=3, inside='exactly'), "inside is 'exactly'; choose 'trace' or"),
    (lambda: windows(keep_trace='drop'), "^keep_trace is 'drop'; choose True or False.$"),
    (lambda: updates(inside=None), 'inside is None'),
]


@pytest.mark.parametrize('call, said', REFUSED, ids=[said for _, said in REFUSED])
def test_an_option_that_does_not_fit_is_refused(call, said):
    with pytest.raises(OptionError, match=said):
        call()


@pytest.mark.parametrize('rule', [es_d_rtrl(0.9), rules.same_step()], ids=str)
def test_no_filter_is_a_filter_that_every_rule_has(rule):
    assert rule.filtered(0) == rule
