"""Weights of a GRU and an LSTM of PyTorch, Keras and Flax: the cell computes what the framework's
documentation says, and what Flax, and PyTorch where it is installed, compute.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import nn
from braintrace.errors import OptionError, StructureError

I, O = 3, 4
RNG = np.random.default_rng(7)
XS = RNG.normal(size=(5, I))
CELLS = {'gru': nn.GRUCell, 'lstm': nn.LSTMCell}
BLOCKS = {'gru': 3, 'lstm': 4}


def draw(*shape):
    return RNG.normal(size=shape)


def logistic(a):
    return 1 / (1 + np.exp(-a))


# -- each framework as it is documented: weights, and one step -------------------------------------


def torch_weights(kind, suffix=''):
    wide = BLOCKS[kind] * O
    names = 'weight_ih weight_hh bias_ih bias_hh'.split()
    shapes = (wide, I), (wide, O), (wide,), (wide,)
    return {name + suffix: draw(*shape) for name, shape in zip(names, shapes)}


def torch_gru(w, x, h, c):
    of_x, of_h = (
        (w[f'weight_{k}'] @ a + w[f'bias_{k}']).reshape(3, O) for k, a in (('ih', x), ('hh', h))
    )
    r, z = logistic(of_x[0] + of_h[0]), logistic(of_x[1] + of_h[1])
    return (1 - z) * np.tanh(of_x[2] + r * of_h[2]) + z * h, c


def torch_lstm(w, x, h, c):
    gates = w['weight_ih'] @ x + w['bias_ih'] + w['weight_hh'] @ h + w['bias_hh']
    i, f, g, o = gates.reshape(4, O)
    c = logistic(f) * c + logistic(i) * np.tanh(g)
    return logistic(o) * np.tanh(c), c


def keras_weights(kind, rows=()):
    wide = BLOCKS[kind] * O
    return [draw(I, wide), draw(O, wide), draw(*rows, wide)]


def keras_gru_before(w, x, h, c):
    kernel, recurrent, bias = w
    x = x @ kernel + bias
    z = logistic(x[:O] + h @ recurrent[:, :O])
    r = logistic(x[O : 2 * O] + h @ recurrent[:, O : 2 * O])
    return z * h + (1 - z) * np.tanh(x[2 * O :] + (r * h) @ recurrent[:, 2 * O :]), c


def keras_gru_after(w, x, h, c):
    x, u = x @ w[0] + w[2][0], h @ w[1] + w[2][1]
    z, r = logistic(x[:O] + u[:O]), logistic(x[O : 2 * O] + u[O : 2 * O])
    return z * h + (1 - z) * np.tanh(x[2 * O :] + r * u[2 * O :]), c


def keras_lstm(w, x, h, c):
    i, f, g, o = np.split(x @ w[0] + h @ w[1] + w[2], 4)
    c = logistic(f) * c + logistic(i) * np.tanh(g)
    return logistic(o) * np.tanh(c), c


DOCUMENTED = {
    'torch-gru': (torch_weights('gru'), torch_gru, True),
    'torch-lstm': (torch_weights('lstm'), torch_lstm, None),
    'keras-gru': (keras_weights('gru', (2,)), keras_gru_after, True),
    'keras-gru-before': (keras_weights('gru'), keras_gru_before, False),
    'keras-lstm': (keras_weights('lstm'), keras_lstm, None),
}


def loaded(name, weights, after, **options):
    layout, kind = name.split('-')[:2]
    cell = CELLS[kind](I, O, **options | ({} if after is None else {'reset_after': after}))
    nn.load_weights(cell, weights, layout)
    cell.init_state()
    return cell


def outputs(cell):
    return np.asarray(brainstate.transform.for_loop(cell, jnp.asarray(XS, 'float32')))


@pytest.mark.parametrize('name', DOCUMENTED)
def test_the_cell_computes_what_the_framework_documents(name):
    weights, step, after = DOCUMENTED[name]
    h, c, want = np.zeros(O), np.zeros(O), []
    for x in XS:
        h, c = step(weights, x, h, c)
        want.append(h)
    np.testing.assert_allclose(outputs(loaded(name, weights, after)), want, atol=2e-6)


@pytest.mark.parametrize('kind', ['GRUCell', 'LSTMCell', 'OptimizedLSTMCell'])
@pytest.mark.parametrize('library', ['linen', 'nnx'])
def test_the_cell_computes_what_flax_computes(library, kind):
    flax = pytest.importorskip(f'flax.{library}')
    carry = jnp.zeros(O) if kind == 'GRUCell' else (jnp.zeros(O), jnp.zeros(O))
    if library == 'linen':
        cell = getattr(flax, kind)(features=O)
        weights = cell.init(jax.random.key(0), carry, jnp.ones(I))
    else:
        cell = getattr(flax, kind)(I, O, rngs=flax.Rngs(0))
        weights = flax.to_pure_dict(flax.state(cell, flax.Param))
    weights = jax.tree.map(lambda a: draw(*a.shape).astype('float32'), weights)
    if library == 'nnx':
        flax.update(cell, weights)
    want = []
    for x in jnp.asarray(XS, 'float32'):
        args = (weights,) if library == 'linen' else ()
        carry, y = (cell.apply if args else cell)(*args, carry, x)
        want.append(np.asarray(y))
    after = True if kind == 'GRUCell' else None
    name = 'flax-gru' if after else 'flax-lstm'
    np.testing.assert_allclose(outputs(loaded(name, weights, after)), want, atol=2e-6)


@pytest.mark.parametrize('kind', ['GRU', 'LSTM'])
def test_the_cell_computes_what_pytorch_computes(kind):
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    layer = getattr(torch.nn, kind)(I, O)
    want = layer(torch.tensor(XS, dtype=torch.float32))[0].detach().numpy()
    after = True if kind == 'GRU' else None
    cell = loaded(f'torch-{kind.lower()}', layer.state_dict(), after)
    np.testing.assert_allclose(outputs(cell), want, atol=2e-6)


@pytest.mark.parametrize('kind', ['gru', 'lstm'])
def test_the_names_of_a_layer_are_those_of_its_cell(kind):
    weights, step, after = DOCUMENTED[f'torch-{kind}']
    layer = {f'{name}_l0': value for name, value in weights.items()}
    cells = [loaded(f'torch-{kind}', w, after) for w in (weights, layer)]
    np.testing.assert_array_equal(*map(outputs, cells))


@pytest.mark.parametrize('after', [False, True])
def test_weights_without_a_bias_fit_a_cell_without_one(after):
    kernels = DOCUMENTED['keras-gru-before'][0][:2]
    cells = [
        loaded('keras-gru', kernels, after, b_init=None),
        loaded('keras-gru', [*kernels, np.zeros((2, 12) if after else 12)], after, b_init=1.0),
    ]
    np.testing.assert_array_equal(*map(outputs, cells))


TORCH, KERAS = (DOCUMENTED[f'{name}-gru'][0] for name in ('torch', 'keras'))
FLAX = {
    side + gate: {'kernel': draw(I if side == 'i' else O, O)} for side in 'ih' for gate in 'rzn'
}
LSTM = DOCUMENTED['torch-lstm'][0]
gru, lstm = (lambda: nn.GRUCell(I, O, reset_after=True)), (lambda: nn.LSTMCell(I, O))
BEFORE = DOCUMENTED['keras-gru-before'][0]
WITHOUT_BIAS = {name: LSTM[name] for name in ('weight_ih', 'weight_hh')}
WITHOUT_ONE = {name: value for name, value in TORCH.items() if name != 'bias_hh'}
NARROW = lambda: nn.GRUCell(2, O, reset_after=True)  # noqa: E731
REFUSED = {
    'comes after the product.*reset_after=True': (lambda: nn.GRUCell(I, O), TORCH, 'torch'),
    'comes before the product.*reset_after=False': (gru, BEFORE, 'keras'),
    'W needs a bias, and the cell was made with b_init=None': (
        lambda: nn.LSTMCell(I, O, b_init=None),
        WITHOUT_BIAS,
        'torch',
    ),
    r'Wz becomes \(7, 4\).*2 inputs and 4 units, has \(6, 4\)': (NARROW, TORCH, 'torch'),
    'the weight of x has 16 numbers.*3 gates of 4 units have 12': (gru, LSTM, 'torch'),
    'left over: weight_ih_l1. Give one cell': (gru, TORCH | {'weight_ih_l1': LSTM}, 'torch'),
    'missing: bias_hh; left over: none': (gru, WITHOUT_ONE, 'torch'),
    'missing: ii, if, .*left over: ir, iz, in': (lstm, FLAX, 'flax'),
    'hn has no kernel: a ndarray': (gru, FLAX | {'hn': np.ones(2)}, 'flax'),
    "layout='torch' takes a dict of arrays; got a list of 3": (gru, KERAS, 'torch'),
    r'takes the list of `layer.get_weights\(\)`.*got a dict of 4': (gru, TORCH, 'keras'),
    r'kernel has shape \(12,\).*2 axes': (gru, [np.ones(12), *KERAS[1:]], 'keras'),
}


@pytest.mark.parametrize('words', REFUSED)
def test_weights_that_the_cell_cannot_take_are_refused_and_nothing_changes(words):
    make, weights, layout = REFUSED[words]
    cell = make()
    before = {path: state.value for path, state in cell.states().items()}
    with pytest.raises(StructureError, match=words):
        nn.load_weights(cell, weights, layout)
    assert all(state.value is before[path] for path, state in cell.states().items())


def test_another_cell_or_layout_is_refused():
    with pytest.raises(OptionError, match='cell is a MGUCell; give a GRUCell or an LSTMCell'):
        nn.load_weights(nn.MGUCell(I, O), TORCH, 'torch')
    with pytest.raises(OptionError, match="layout is 'jax'; give one of torch, keras, flax"):
        nn.load_weights(gru(), TORCH, 'jax')
    with pytest.raises(OptionError, match="reset_after is 'yes'; give True or False"):
        nn.GRUCell(I, O, reset_after='yes')
