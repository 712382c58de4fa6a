"""Several devices are there, and none is used: the program that one device would run by itself, and
the one that they would share, give the numbers of a process with one device.
"""

import functools

import jax
import pytest

from braintrace import Policy, functional, rules
from braintrace._jax import platforms
from tests.compare import assert_close
from tests.gradients.harness import over_sequence, quick
from tests.models import MODELS, PROGRAMS, case
from tests.models.library import LibraryOps
from tests.precision import float64_models as float64_models

RULES = {'d_rtrl': rules.d_rtrl(), 'es_d_rtrl': rules.es_d_rtrl(0.7)}
WINDOW = 4
REFUSED = 'while_mixing', 'while_mixing_tail'  # they have no gradient in reverse mode


@pytest.fixture(params=['alone', 'shared'])
def devices(request, monkeypatch):
    """Eight devices, of which one runs a program, or all run it together."""
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    monkeypatch.setattr(platforms, 'is_alone', lambda context: request.param == 'alone')


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', [n for n in (MODELS | PROGRAMS) if n not in REFUSED])
@pytest.mark.parametrize('rule', RULES)
def test_a_gradient_is_the_same_beside_devices_that_are_not_used(name, rule, devices):
    of = case(name)
    cell = functools.partial(of.model.cell, LibraryOps())
    # loops are kept, as long ones are
    learner = functional.online(cell, RULES[rule], policy=Policy(unroll=0))
    run = learner.sequence_grad(of.loss, window=WINDOW, reduction='sum')
    state = learner.init(of.params, of.carry, of.xs[0])
    got = quick(run)(of.params, state, of.xs, of.ys)
    wanted = over_sequence(of, RULES[rule], WINDOW, unroll=0)
    assert_close((got.grads, got.losses), (wanted.grads, wanted.losses))
