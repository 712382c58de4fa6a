"""What is no model of a framework, or no step, is refused: what was found, and what to do."""

import re
import sys
from types import SimpleNamespace

import brainstate
import jax
import jax.numpy as jnp
import pytest

from braintrace import adapters, functional, rules
from braintrace.errors import BraintraceError

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

    return SimpleNamespace(
        linear=nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
        gru=nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)),
        writes=Writes(),
        only=nnx.Sequential(lambda carry, x: carry + x),
        swapped=nnx.Sequential(lambda carry, x: (x, carry)),
    )


def of_blox():
    bx = pytest.importorskip('blox')
    graph = bx.Graph('net')
    rng = bx.Rng(graph.child('rng'))
    gru, linear = bx.GRU(graph.child('gru'), 4, rng), bx.Linear(graph.child('out'), 2, rng)
    empty = rng.seed(bx.Params(), seed=0)
    return SimpleNamespace(gru=gru, linear=linear, empty=empty)


def of_brainstate():
    return SimpleNamespace(gru=brainstate.nn.GRUCell(3, 4))


SAID = {
    of_equinox: {
        'OptionError: .*give an Equinox module': lambda own: adapters.from_equinox(jnp.tanh, X),
        'OptionError: .*give an example of the inputs': lambda own: adapters.from_equinox(own.gru),
        'OptionError: .*Linear does not say how its carry starts.*Give carry=': lambda own: (
            adapters.from_equinox(own.linear, X[0])
        ),
        'CompileError: .*GRUCell failed on the example inputs.*batched': lambda own: (
            adapters.from_equinox(own.gru, X)
        ),
        'CompileError: .*Linear failed on the example inputs.*takes one step': lambda own: (
            adapters.from_equinox(own.linear, X[0], carry=X[0])
        ),
        r'StructureError: .*Outputs returned PyTreeDef\(\*\) for a carry': lambda own: (
            adapters.from_equinox(own.outputs, X, carry=(X, X))
        ),
    },
    of_nnx: {
        'OptionError: .*give a Flax NNX module': lambda own: adapters.from_nnx(jnp.tanh, X),
        'OptionError: .*it has no method initialize_carry': lambda own: adapters.from_nnx(
            own.linear, X
        ),
        'CompileError: .*Linear failed on the example inputs.*takes one step': lambda own: (
            adapters.from_nnx(own.linear, X, carry=X)
        ),
        'StructureError: .*return a pair, the new carry first': lambda own: adapters.from_nnx(
            own.only, X, carry=X
        ),
        r'StructureError: .*a carry of shapes \(2, 2\) and returned .* \(2, 3\)': lambda own: (
            adapters.from_nnx(own.swapped, X, carry=X[:, :2])
        ),
        'StructureError: .*inputs of one step, not of a sequence': lambda own: adapters.from_nnx(
            own.gru, jnp.ones((5, 2, 3)), carry=jnp.ones((2, 4))
        ),
        r"CompileError: .*writes the parameters \['w'\]": lambda own: adapters.from_nnx(
            own.writes, X, carry=X
        ),
    },
    of_blox: {
        'OptionError: .*params dict; give a bx.Module and its bx.Params': lambda own: (
            adapters.from_blox(own.gru, {}, X)
        ),
        'CompileError: .*GRU failed on the example inputs': lambda own: adapters.from_blox(
            own.gru, own.empty, X
        ),
        'OptionError: .*it has no method initial_state': lambda own: adapters.from_blox(
            own.linear, own.empty, X
        ),
        r"StructureError: .*no parameters \['net/w'\]": lambda own: adapters.to_blox(
            {('net', 'w'): X}, own.empty
        ),
    },
    of_brainstate: {
        r'OptionError: .*pass a brainstate\.nn\.Module': lambda own: adapters.from_brainstate(
            jnp.tanh, X
        ),
        'CompileError: .*init_all_states': lambda own: adapters.from_brainstate(own.gru, X),
    },
}
ROWS = [(make, words) for make in SAID for words in SAID[make]]


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('make, words', ROWS, ids=[words for _, words in ROWS])
def test_it_is_refused_with_a_remedy(make, words):
    own = make()
    with pytest.raises(BraintraceError) as caught:
        SAID[make][words](own)
    assert re.search(f'(?s){words}', f'{type(caught.value).__name__}: {caught.value}')


@pytest.mark.parametrize(
    ('module', 'package', 'extra', 'call'),
    [
        ('equinox', 'equinox', 'adapters', lambda: adapters.from_equinox(None, X)),
        ('flax', 'flax', 'adapters', lambda: adapters.from_nnx(None, X)),
        ('blox', 'jax-blox', 'adapters', lambda: adapters.from_blox(None, None, X)),
        ('nir', 'nir', 'nir', lambda: adapters.from_nir('a.nir', dt=1e-3)),
    ],
    ids=['equinox', 'flax', 'blox', 'nir'],
)
def test_a_framework_that_is_not_installed_is_named(monkeypatch, module, package, extra, call):
    monkeypatch.setitem(sys.modules, module, None)
    said = rf'{package} is not installed.*braintrace-online\[{extra}\]'
    with pytest.raises(ImportError, match=said):
        call()


def test_a_model_in_the_place_of_a_cell_is_pointed_to_the_adapters():
    eqx = pytest.importorskip('equinox')
    model = eqx.nn.GRUCell(3, 4, key=key())
    learner = functional.online(model, rules.d_rtrl(), mark='auto')
    with pytest.raises(TypeError) as raised:
        learner.init(eqx.filter(model, eqx.is_inexact_array), jnp.zeros(4), X[0])
    assert any('braintrace.adapters makes a cell' in note for note in raised.value.__notes__)
