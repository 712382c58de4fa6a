"""Random programs, constructs inside constructs, against the NumPy recursions. A failure prints the
smallest program that still fails.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import braintrace
from braintrace import functional, rules
from braintrace.errors import BraintraceWarning
from tests import models, oracles
from tests.compare import assert_drawn_close
from tests.gradients.harness import quick
from tests.models import random_borders
from tests.models.library import LibraryOps
from tests.models.random_programs import Layer, Program, build, draw, programs, seeds, smallest
from tests.settings import OTHERS, STRICT, under

pytestmark = pytest.mark.drawn
STEPS, DECAY = 3, 0.6
PARTS = 20  # of the many programs
RULES = {'d_rtrl': rules.d_rtrl(), 'es_d_rtrl': rules.es_d_rtrl(DECAY)}


def examples(number):
    """The same examples in every run; ``smallest`` shrinks a failing one and prints it."""
    return settings(max_examples=number, phases=[Phase.generate])


def gradients(case, program: Program):
    cell, policy = (
        functools.partial(case.model.cell, LibraryOps()),
        braintrace.Policy(unroll=program.unroll),
    )
    learner = functional.online(cell, RULES[program.rule], policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
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


@pytest.mark.slow
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


# -- branches and borders, by plain JAX ------------------------------------------------------------

XS = np.random.default_rng(1).normal(size=(5, random_borders.B, random_borders.I))
YS = np.random.default_rng(2).normal(size=(5, random_borders.B, random_borders.N))


def squares(output, y):
    return ((output - y) ** 2).sum()


SETTINGS = STRICT | OTHERS


def obeyed(setting: str, total, params) -> dict:
    """The setting, if reverse mode of the cell runs under it too."""
    try:
        with under({setting: SETTINGS[setting]}):
            jax.eval_shape(jax.grad(total), params)
    except Exception:  # of any kind: the cell does what the setting refuses
        return {}
    return {setting: SETTINGS[setting]}


def check_borders(cell, setting):
    """What the report calls whole is the gradient of reverse mode, under a setting of JAX as well;
    route and report agree.
    """
    run, *values = random_borders.build(cell)
    params, carry = jax.tree.map(jnp.asarray, values)

    def total(params):
        outputs = jax.lax.scan(lambda c, x: run(params, c, x)[::-1], carry, xs)[1]
        return jax.vmap(squares)(outputs, ys).sum()

    xs, ys = jax.device_put((XS, YS))
    x, want = xs[0], quick(jax.grad(total))(params)
    learner = functional.online(run, RULES['d_rtrl'], mark='auto')
    with under(obeyed(setting, total, params)), warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        state = learner.init(params, carry, x)
        gradient = quick(learner.sequence_grad(squares, window=2, reduction='sum'))
        got = gradient(params, state, xs, ys)[0]
    rows = {row.path: row for row in learner.report.parameters}
    whole = [path for path, row in rows.items() if row.history in ('whole', 'not needed')]
    assert_drawn_close({path: got[path] for path in whole}, {path: want[path] for path in whole})
    for path, route in learner.routes.items():
        assert (route.kind == 'trace') == (rows[path].history in ('whole', 'part')), rows[path]


def check_borders_or_name_the_smallest(seed):
    setting = sorted(SETTINGS)[seed % len(SETTINGS)]

    def fails(cell) -> bool:
        try:
            check_borders(cell, setting)
        except Exception:  # an error of the compiler is a failure as well
            return True
        return False

    try:
        check_borders(random_borders.draw(seed), setting)
    except Exception as error:
        last = smallest(random_borders.draw(seed), fails, random_borders.simpler)
        error.add_note(f'the smallest cell that fails, with {setting}: {last}')
        raise


@pytest.mark.slow
@examples(2)
@given(seeds)
def test_a_random_cell_with_branches_and_borders(seed):
    check_borders_or_name_the_smallest(seed)


@pytest.mark.nightly
@pytest.mark.parametrize('part', range(PARTS))
@examples(100 // PARTS)
@given(seed=seeds)
def test_many_random_cells_with_branches_and_borders(part, seed):
    check_borders_or_name_the_smallest(PARTS * seed + part)


def test_a_program_is_made_simpler_until_nothing_is_left():
    layer = Layer('lstm', 3, 'norm', 'while', ('vmap_weights', 'cond_weights', 'scan'), True)
    last = smallest(Program((layer, layer), ('scan', 'jit')), lambda other: True)
    assert last == Program((Layer('leaky', 2, 'tanh', 'leak', (), False),))
