"""Random programs, constructs inside constructs, against the NumPy recursions. A failure prints the
smallest program that still fails.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from braintrace import Policy, rules
from tests import models, oracles
from tests.compare import assert_drawn_close
from tests.gradients.harness import learn
from tests.models import random_borders, squared
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
    cell = functools.partial(case.model.cell, LibraryOps())
    data, policy = (case.params, case.carry, case.xs, case.ys), Policy(unroll=program.unroll)
    return learn(cell, RULES[program.rule], *data, window=program.window, policy=policy)[0]


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


def check_or_name_the_smallest(program, check=check, *simpler):
    def fails(program) -> bool:
        try:
            check(program)
        except Exception:  # an error of the compiler is a failure as well
            return True
        return False

    try:
        check(program)
    except Exception as error:
        error.add_note(f'the smallest that fails: {smallest(program, fails, *simpler)}')
        raise


@pytest.mark.slow
@examples(4)
@given(programs)
def test_a_random_program(program):
    check_or_name_the_smallest(program)


@pytest.mark.nightly
@pytest.mark.parametrize('part', range(PARTS))
@examples(300 // PARTS)
@given(seed=seeds)
def test_many_random_programs(part, seed):
    check_or_name_the_smallest(draw(PARTS * seed + part))


# -- stacks of one to three layers with one to three states ----------------------------------------


# -- branches and borders, by plain JAX ------------------------------------------------------------

XS = np.random.default_rng(1).normal(size=(5, random_borders.B, random_borders.I))
YS = np.random.default_rng(2).normal(size=(5, random_borders.B, random_borders.N))


SETTINGS = STRICT | OTHERS


def obeyed(setting: str, backwards, data) -> dict:
    """The setting, if reverse mode of the cell runs under it too."""
    try:
        with under({setting: SETTINGS[setting]}):
            jax.eval_shape(backwards, *data)
    except Exception:  # of any kind: the cell does what the setting refuses
        return {}
    return {setting: SETTINGS[setting]}


def check_borders(cell, setting):
    """What the report calls whole is the gradient of reverse mode, under a setting of JAX as well;
    route and report agree.
    """
    run, *values = random_borders.build(cell)
    data = *jax.tree.map(jnp.asarray, values), *jax.device_put((XS, YS))
    backwards = functools.partial(oracles.by_time, run, loss=squared)
    with under(obeyed(setting, backwards, data)):
        got, learner = learn(run, RULES['d_rtrl'], *data, window=2, mark='auto')
    want = backwards(*data)
    rows = {row.path: row for row in learner.report.parameters}
    whole = [path for path, row in rows.items() if row.history in ('whole', 'not needed')]
    assert_drawn_close({path: got[path] for path in whole}, {path: want[path] for path in whole})
    for path, route in learner.routes.items():
        assert (route.kind == 'trace') == (rows[path].history in ('whole', 'part')), rows[path]


def check_borders_or_name_the_smallest(seed):
    setting = sorted(SETTINGS)[seed % len(SETTINGS)]
    check_or_name_the_smallest(
        random_borders.draw(seed), lambda cell: check_borders(cell, setting), random_borders.simpler
    )


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
