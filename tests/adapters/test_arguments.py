"""Each argument of a stock layer is kept by its adapter, or refused; a new one is seen here."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import adapters
from braintrace.errors import OptionError
from tests.adapters.cells import INPUTS, UNITS
from tests.compare import assert_close

T, BATCH = 3, 2
pytestmark = pytest.mark.filterwarnings('ignore:carry_init is provided')
GIVEN = {'cell', 'graph', 'in_features', 'input_size', 'key', 'rng', 'name'}
GIVEN |= {'hidden_features', 'hidden_size', 'num_in', 'num_out'}


@pytest.fixture
def xs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, BATCH, INPUTS)))


def arguments(kind) -> set[str]:
    """Those of its constructor that may have another value than theirs here."""
    return {*list(inspect.signature(kind.__init__).parameters)[1:]} - GIVEN


def by_steps(adapted, xs):
    """The outputs of a cell, step after step."""
    cell, params, carry = adapted
    ys = []
    for x in xs:
        y, carry = cell(params, carry, x)
        ys.append(y)
    return stacked(ys)


def stacked(steps):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)


def ones(key, shape, dtype=float):
    return jnp.ones(shape, dtype) / 4


def drawn(key, shape, dtype=float):
    return jax.random.normal(key, shape, dtype)


# Flax NNX: a loop over a cell ---------------------------------------------------------------------


def kept(nnx):
    """What an ``nnx.RNN`` may have: the steps of its cell are the same."""
    return {
        'time_major': True,
        'return_carry': True,
        'keep_order': True,  # of what is read from the end
        'unroll': 2,
        'state_axes': nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}),
        'rngs': nnx.Rngs(3),
    }


def refused(nnx):
    return {
        'reverse': True,
        'broadcast_rngs': 'dropout',
        'state_axes': nnx.StateAxes({nnx.RngState: None, ...: nnx.Carry}),
    }


def looped(nnx, **options):
    cell = nnx.GRUCell(
        INPUTS, UNITS, dtype=float, param_dtype=float, carry_init=drawn, rngs=nnx.Rngs(0)
    )
    return nnx.RNN(cell, **options)


def test_each_argument_of_an_nnx_rnn_is_kept_or_refused(xs):
    nnx = pytest.importorskip('flax.nnx')
    assert kept(nnx).keys() | refused(nnx).keys() == arguments(nnx.RNN)
    called = {'initial_carry', 'seq_lengths', 'rngs'}  # and fields again
    assert set(inspect.signature(nnx.RNN.__call__).parameters) <= {
        'self',
        'inputs',
        *called,
        *arguments(nnx.RNN),
    }
    model = looped(nnx, **kept(nnx))
    want = looped(nnx, **kept(nnx))(xs)[1]  # whose keys go on
    assert_close(by_steps(adapters.from_nnx(model, xs[0]), xs), want)
    for name, value in refused(nnx).items():
        with pytest.raises(OptionError, match=f'RNN has {name}.*give model.cell'):
            adapters.from_nnx(looped(nnx, **{name: value}), xs[0])


def test_other_loops_of_nnx_are_refused(xs):
    nnx = pytest.importorskip('flax.nnx')

    class Twice(nnx.RNN):
        def __call__(self, inputs):
            return 2 * super().__call__(inputs)

    both = nnx.Bidirectional(looped(nnx), looped(nnx))
    with pytest.raises(OptionError, match=r'reads a sequence from its end.*forward_rnn\.cell'):
        adapters.from_nnx(both, xs[0])
    adapters.from_nnx(both.forward_rnn.cell, xs[0])
    with pytest.raises(OptionError, match='Twice has a __call__ of its own'):
        adapters.from_nnx(Twice(looped(nnx).cell), xs[0])
    loops = {n for n in dir(nnx) if inspect.isclass(c := getattr(nnx, n)) and is_loop(nnx, c)}
    assert loops == {'RNN', 'Bidirectional'}


def is_loop(nnx, kind) -> bool:
    """Whether it takes a sequence; cells may be called with a carry."""
    base = inspect.getmodule(nnx.RNN).Module
    own = issubclass(kind, base) and kind.__module__ == nnx.RNN.__module__
    return own and not issubclass(kind, nnx.RNNCellBase)


# stock cells --------------------------------------------------------------------------------------


def made(kind, *given, **others):
    """A cell, each argument of whose constructor has another value than its own."""
    assert others.keys() - GIVEN == arguments(kind)
    return kind(*given, **others)


def nnx_cell(name, xs):
    nnx = pytest.importorskip('flax.nnx')
    metadata = 'kernel_metadata', 'recurrent_kernel_metadata', 'bias_metadata'
    model = made(
        *(getattr(nnx, name), INPUTS, UNITS),
        **({'gate_fn': jax.nn.hard_sigmoid} if name != 'SimpleCell' else {'residual': True}),
        **dict.fromkeys(metadata, {'eager_sharding': False}),
        **dict.fromkeys(('kernel_init', 'recurrent_kernel_init'), ones),
        **dict.fromkeys(('bias_init', 'carry_init'), drawn),
        **dict.fromkeys(('dtype', 'param_dtype'), float),
        activation_fn=jnp.sin,
        promote_dtype=lambda arrays, dtype: jax.tree.map(lambda a: 2 * a, arrays),
        keep_rngs=False,  # True is told to be deprecated
        rngs=nnx.Rngs(0),
    )
    return adapters.from_nnx(nnx.RNN(model), xs[0]), nnx.RNN(model, time_major=True)(xs)


def equinox_cell(name, xs):
    eqx = pytest.importorskip('equinox')
    how = {'use_bias': False, 'dtype': float, 'key': jax.random.key(0)}
    model = made(getattr(eqx.nn, name), INPUTS, UNITS, **how)
    carry, ys = jnp.zeros((BATCH, UNITS)), []
    carry = carry if name == 'GRUCell' else (carry, carry)
    for x in xs:
        carry = jax.vmap(model)(x, carry)
        ys.append(carry)
    return adapters.from_equinox(model, xs[0], batched=True), jax.tree.map(
        lambda *steps: jnp.stack(steps), *ys
    )


def blox_cell(name, xs):
    bx = pytest.importorskip('blox')
    graph = bx.Graph('net')
    rng = bx.Rng(graph.child('rng'))
    model = made(getattr(bx, name), graph.child('cell'), UNITS, rng, is_static=True)
    start, container = model.initial_state(rng.seed(bx.Params(), seed=0), xs[0])
    _, container = model(container, xs[0], start)
    container, carry, ys = container.locked(), start, []
    for x in xs:
        (y, carry), container = model(container, x, carry)
        ys.append(y)
    return adapters.from_blox(model, container, xs[0], carry=start), jnp.stack(ys)


def brainstate_cell(name, xs):
    import brainstate

    at = brainstate.nn.init.Constant
    how = {'w_init': at(0.3), 'b_init': at(0.2), 'state_init': at(0.1), 'activation': 'relu'}
    model = made(getattr(brainstate.nn, name), INPUTS, UNITS, **how)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    adapted = adapters.from_brainstate(model, xs[0])
    return adapted, jnp.stack([model(x) for x in xs])


CELLS = [
    (nnx_cell, 'GRUCell'),
    (nnx_cell, 'SimpleCell'),
    (nnx_cell, 'LSTMCell'),
    (nnx_cell, 'OptimizedLSTMCell'),
    (equinox_cell, 'GRUCell'),
    (equinox_cell, 'LSTMCell'),
    (blox_cell, 'GRU'),
    (blox_cell, 'LSTM'),
    (brainstate_cell, 'GRUCell'),
    (brainstate_cell, 'LSTMCell'),
]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('make, name', CELLS)
def test_a_stock_cell_keeps_all_its_arguments(make, name, xs):
    adapted, want = make(name, xs)
    assert_close(by_steps(adapted, xs), want)
