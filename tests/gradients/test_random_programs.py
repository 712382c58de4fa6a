"""Random programs, constructs inside constructs, against the NumPy recursions. A failure prints the
smallest program that still fails.
"""

import functools
import warnings

import pytest
from hypothesis import Phase, given, settings

import braintrace
from tests import models, oracles
from tests.compare import assert_drawn_close
from tests.gradients.harness import quick
from tests.models.library import LibraryOps
from tests.models.random_programs import Layer, Program, build, draw, programs, seeds, smallest

pytestmark = pytest.mark.drawn
STEPS, DECAY = 3, 0.6
PARTS = 20  # of the many programs
RULES = {'d_rtrl': braintrace.rules.d_rtrl(), 'es_d_rtrl': braintrace.rules.es_d_rtrl(DECAY)}


def examples(number):
    """The same examples in every run; ``smallest`` shrinks a failing one and prints it."""
    return settings(max_examples=number, phases=[Phase.generate])


def gradients(case, program: Program):
    cell, policy = (
        functools.partial(case.model.cell, LibraryOps()),
        braintrace.Policy(unroll=program.unroll),
    )
    learner = braintrace.functional.online(cell, RULES[program.rule], policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', braintrace.BraintraceWarning)
        state = learner.init(case.params, case.carry, case.xs[0])
    run = learner.sequence_grad(case.loss, window=program.window, reduction='sum')
    return quick(run)(case.params, state, case.xs, case.ys)[0]


def wanted(case, rule):
    """The oracle, which is not needed twice."""
    oracle = (
        oracles.dense_recursion.__wrapped__
        if rule == 'd_rtrl'
        else functools.partial(oracles.es_recursion.__wrapped__, decay=DECAY)
    )
    return oracles.total(oracle(case))


def check(program: Program):
    case = models.make_case(build(program), steps=STEPS)
    assert_drawn_close(gradients(case, program), wanted(case, program.rule))


def fails(program: Program) -> bool:
    try:
        check(program)
    except Exception:  # an error of the compiler is a failure as well
        return True
    return False


def check_or_name_the_smallest(program: Program):
    try:
        check(program)
    except Exception as error:
        error.add_note(f'the smallest program that fails: {smallest(program, fails)}')
        raise


@examples(5)
@given(programs)
def test_a_random_program(program):
    check_or_name_the_smallest(program)


@pytest.mark.nightly
@pytest.mark.parametrize('part', range(PARTS))
@examples(300 // PARTS)
@given(seed=seeds)
def test_many_random_programs(part, seed):
    check_or_name_the_smallest(draw(PARTS * seed + part))


@pytest.mark.nightly
@examples(15)
@given(programs)
def test_the_oracles_agree_on_random_programs(program):
    case = models.make_case(build(program), steps=STEPS)
    assert_drawn_close(oracles.two_pass(case), oracles.total(oracles.dense_recursion(case)))
    assert_drawn_close(oracles.same_step(case), oracles.total(oracles.es_recursion(case, 0.0)))


def test_a_program_is_made_simpler_until_nothing_is_left():
    layer = Layer('lstm', 3, 'norm', 'while', ('vmap_weights', 'cond_weights', 'scan'), True)
    last = smallest(Program((layer, layer), ('scan', 'jit')), lambda other: True)
    assert last == Program((Layer('leaky', 2, 'tanh', 'leak', (), False),))
