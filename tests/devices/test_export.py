"""Programs for platforms that are not here, as they are lowered on a CPU."""

import re

import jax
import jax.numpy as jnp
import pytest

from braintrace import _jax, functional
from tests.devices.cells import CELLS
from tests.devices.programs import RULES, call_of

PLATFORMS = 'cuda', 'rocm', 'tpu'


def exported(cell: str, rule: str, call: str, platform: str) -> str:
    cell, dtype = CELLS[cell], jnp.float32
    learner = functional.online(cell.run, RULES[rule]())
    p, c, (xs, ys) = cell.params(dtype), cell.carry(dtype), cell.data(dtype)
    state = jax.eval_shape(learner.init, p, c, xs[0])
    if call == 'init':
        args, fn = (p, c, xs[0]), learner.init
    else:
        args, fn = (p, state, xs, ys), call_of(learner, call)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    return jax.export.export(jax.jit(fn), platforms=[platform])(*shapes).mlir_module()


def check(text: str, *at: str):
    assert 'stablehlo.custom_call' not in text, at
    wide = re.findall(r'tensor<(?:\d+x)+(?:f64|i64|ui64)>', text)
    # `dense<...> : tensor<2xi64>` are attributes
    assert not wide or all('dense' in line for line in text.splitlines() if wide[0] in line), at


@pytest.mark.slow
def test_a_step_is_lowered_for_a_gpu_without_a_call_of_the_host():
    check(exported('rnn', 'd_rtrl', 'step', 'cuda'))


@pytest.mark.nightly
@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('cell', CELLS)
def test_every_cell_is_lowered_for_every_platform(cell, platform):
    for rule in ('d_rtrl', 'es_d_rtrl'):
        for call in ('init', *STEPS):
            check(exported(cell, rule, call, platform), cell, rule, call, platform)


STEPS = 'step', 'window', 'updates'
FIRST = pytest.param('rnn', 'step', marks=pytest.mark.slow)
OTHERS = [(cell, call) for cell in CELLS for call in STEPS if (cell, call) != ('rnn', 'step')]


@pytest.mark.parametrize(
    'cell, call', [FIRST, *(pytest.param(*row, marks=pytest.mark.nightly) for row in OTHERS)]
)
def test_no_call_has_a_branch_as_if_on_a_gpu_and_its_numbers_are_those_of_the_cpu(cell, call):
    of, dtype = CELLS[cell], jnp.float32
    p, c, (xs, ys) = of.params(dtype), of.carry(dtype), of.data(dtype)
    one = functional.online(of.run)
    state = one.init(p, c, xs[0])
    wanted = jax.jit(call_of(one, call))(p, state, xs, ys)[0]
    with _jax.as_if_on('cuda'):
        other = functional.online(of.run)
        jax.eval_shape(other.init, p, c, xs[0])
        lowered = jax.jit(call_of(other, call)).lower(p, state, xs, ys)
    assert 'stablehlo.case' not in lowered.as_text()
    got = lowered.compile()(p, state, xs, ys)[0]
    for k in wanted:
        assert jnp.allclose(got[k], wanted[k], rtol=1e-3, atol=1e-5), k
