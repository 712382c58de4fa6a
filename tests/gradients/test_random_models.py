"""Random models of one to three layers with one to three states, against the NumPy recursions."""

import pytest
from hypothesis import given, settings

import braintrace
from tests import models, oracles
from tests.compare import assert_drawn_close
from tests.gradients.harness import over_sequence
from tests.models.random import build, layers, plans

pytestmark = pytest.mark.drawn
STEPS = 4
D_RTRL, ES_D_RTRL = braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.6)


def examples(number):
    """The same examples in every run; a failing plan is printed and can be given to ``build``."""
    return settings(max_examples=number)


def check(plan, window, rules=(D_RTRL, ES_D_RTRL)):
    case = models.make_case(build(plan), steps=STEPS)
    want = {
        D_RTRL: oracles.dense_recursion,
        ES_D_RTRL: lambda case: oracles.es_recursion(case, 0.6),
    }
    for rule in rules:
        assert_drawn_close(over_sequence(case, rule, window)[0], oracles.total(want[rule](case)))


@pytest.mark.slow
@examples(4)
@given(layers)
def test_one_random_layer(layer):
    check((layer,), 1)


@pytest.mark.slow
@examples(2)
@given(plans)
def test_a_random_stack(plan):
    check(plan, 2)


@pytest.mark.nightly
@examples(20)
@given(plans)
def test_many_random_stacks(plan):
    check(plan, 2)


@pytest.mark.slow
@examples(3)
@given(plans)
def test_random_stacks_in_one_window(plan):
    check(plan, None)


@pytest.mark.nightly
@examples(8)
@given(plans)
def test_many_random_stacks_in_one_window(plan):
    check(plan, None)


@pytest.mark.nightly
@examples(6)
@given(plans)
def test_the_oracles_agree_on_random_stacks(plan):
    case = models.make_case(build(plan), steps=STEPS)
    assert_drawn_close(oracles.two_pass(case), oracles.total(oracles.dense_recursion(case)))
    assert_drawn_close(oracles.same_step(case), oracles.total(oracles.es_recursion(case, 0.0)))
