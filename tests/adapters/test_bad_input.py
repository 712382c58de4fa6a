"""What is no model of a framework, or no step, is refused: what was found, and what to do."""

import sys
from types import SimpleNamespace

import brainstate
import jax
import jax.numpy as jnp
import pytest

from braintrace import adapters, functional, rules
from braintrace.errors import CompileError, OptionError, StructureError

X = jnp.ones((2, 3))


def key():
    return jax.random.key(0)


def of_equinox():
    eqx = pytest.importorskip('equinox')
    gru, linear = eqx.nn.GRUCell(3, 4, key=key()), eqx.nn.Linear(3, 3, key=key())

    class Outputs(eqx.Module):
        def __call__(self, x, h):
            return x

    return SimpleNamespace(gru=gru, linear=linear, outputs=Outputs())


def of_nnx():
    nnx = pytest.importorskip('flax.nnx')

    class Writes(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, carry, x):
            self.w[...] = self.w[...] + 1
            return carry, x

    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    gru = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    only = nnx.Sequential(lambda carry, x: carry + x)
    swapped = nnx.Sequential(lambda carry, x: (x, carry))
    return SimpleNamespace(linear=linear, writes=Writes(), gru=gru, only=only, swapped=swapped)


def of_blox():
    bx = pytest.importorskip('blox')
    graph = bx.Graph('net')
    rng = bx.Rng(graph.child('rng'))
    gru, linear = bx.GRU(graph.child('gru'), 4, rng), bx.Linear(graph.child('out'), 2, rng)
    empty = rng.seed(bx.Params(), seed=0)
    return SimpleNamespace(gru=gru, linear=linear, empty=empty)


CASES = {
    'equinox: no module': (
        of_equinox,
        lambda own: adapters.from_equinox(jnp.tanh, X),
        OptionError,
        'give an Equinox module',
    ),
    'equinox: no inputs': (
        of_equinox,
        lambda own: adapters.from_equinox(own.gru),
        OptionError,
        'give an example of the inputs',
    ),
    'equinox: no carry is known': (
        of_equinox,
        lambda own: adapters.from_equinox(own.linear, X[0]),
        OptionError,
        r'Linear does not say how its carry starts.*Give carry=',
    ),
    'equinox: a batch for one sample': (
        of_equinox,
        lambda own: adapters.from_equinox(own.gru, X),
        CompileError,
        r'GRUCell failed on the example inputs.*batched',
    ),
    'equinox: no step': (
        of_equinox,
        lambda own: adapters.from_equinox(own.linear, X[0], carry=X[0]),
        CompileError,
        'Linear failed on the example inputs.*takes one step',
    ),
    'equinox: no new carry': (
        of_equinox,
        lambda own: adapters.from_equinox(own.outputs, X, carry=(X, X)),
        StructureError,
        r'Outputs returned PyTreeDef\(\*\) for a carry',
    ),
    'nnx: no module': (
        of_nnx,
        lambda own: adapters.from_nnx(jnp.tanh, X),
        OptionError,
        'give a Flax NNX module',
    ),
    'nnx: no carry is known': (
        of_nnx,
        lambda own: adapters.from_nnx(own.linear, X),
        OptionError,
        'it has no method initialize_carry',
    ),
    'nnx: no step': (
        of_nnx,
        lambda own: adapters.from_nnx(own.linear, X, carry=X),
        CompileError,
        'Linear failed on the example inputs.*takes one step',
    ),
    'nnx: no pair': (
        of_nnx,
        lambda own: adapters.from_nnx(own.only, X, carry=X),
        StructureError,
        'return a pair, the new carry first',
    ),
    'nnx: outputs first': (
        of_nnx,
        lambda own: adapters.from_nnx(own.swapped, X, carry=X[:, :2]),
        StructureError,
        r'took a carry of shapes \(2, 2\) and returned one of shapes \(2, 3\)',
    ),
    'nnx: inputs of a sequence': (
        of_nnx,
        lambda own: adapters.from_nnx(own.gru, jnp.ones((5, 2, 3)), carry=jnp.ones((2, 4))),
        StructureError,
        'inputs of one step, not of a sequence',
    ),
    'nnx: parameters are written': (
        of_nnx,
        lambda own: adapters.from_nnx(own.writes, X, carry=X),
        CompileError,
        r"writes the parameters \['w'\]",
    ),
    'blox: no container': (
        of_blox,
        lambda own: adapters.from_blox(own.gru, {}, X),
        OptionError,
        'params dict; give a bx.Module and its bx.Params',
    ),
    'blox: no parameters yet': (
        of_blox,
        lambda own: adapters.from_blox(own.gru, own.empty, X),
        CompileError,
        'GRU failed on the example inputs',
    ),
    'blox: no carry is known': (
        of_blox,
        lambda own: adapters.from_blox(own.linear, own.empty, X),
        OptionError,
        'it has no method initial_state',
    ),
    'blox: strange values': (
        of_blox,
        lambda own: adapters.to_blox({('net', 'w'): X}, own.empty),
        StructureError,
        r"no parameters \['net/w'\]",
    ),
    'brainstate: no module': (
        lambda: None,
        lambda own: adapters.from_brainstate(jnp.tanh, X),
        OptionError,
        r'pass a brainstate\.nn\.Module',
    ),
    'brainstate: states are missing': (
        lambda: brainstate.nn.GRUCell(3, 4),
        lambda own: adapters.from_brainstate(own, X),
        CompileError,
        'init_all_states',
    ),
}


@pytest.mark.tier(quick=2, one_in=2)
@pytest.mark.parametrize('case', CASES)
def test_it_is_refused_with_a_remedy(case):
    make, call, error, message = CASES[case]
    with pytest.raises(error, match=f'(?s){message}'):
        call(make())


@pytest.mark.parametrize(
    ('adapter', 'module', 'package'),
    [
        (adapters.from_equinox, 'equinox', 'equinox'),
        (adapters.from_nnx, 'flax', 'flax'),
        (lambda model, x: adapters.from_blox(model, None, x), 'blox', 'jax-blox'),
    ],
    ids=['equinox', 'flax', 'blox'],
)
def test_a_framework_that_is_not_installed_is_named(monkeypatch, adapter, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=rf'{package} is not installed.*braintrace-online\[adapters\]'
    ):
        adapter(None, X)


def test_a_model_in_the_place_of_a_cell_is_pointed_to_the_adapters():
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.GRUCell(3, 4, key=key())
    learner = functional.online(model, rules.d_rtrl(), mark='auto')
    with pytest.raises(TypeError) as raised:
        learner.init(eqx.filter(model, eqx.is_inexact_array), jnp.zeros(4), X[0])
    assert any('braintrace.adapters makes a cell' in note for note in raised.value.__notes__)
