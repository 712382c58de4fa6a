"""Stock cells of each framework as ``(cell, params, carry)``, and their weights in the layout of
``tests/adapters/plain.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import adapters, functional, rules, verify
from tests.adapters import plain
from tests.compare import assert_close

UNITS, INPUTS = 4, 3


class Taken(NamedTuple):
    """A cell taken from a framework; ``step`` is its plain twin, ``layout`` turns params into the
    twin's.
    """

    cell: Callable
    params: object
    carry: object
    step: Callable
    layout: Callable


def shaken(tree, seed=0):
    """The tree in float64 with other numbers, also where it starts from zeros."""
    rng = np.random.default_rng(seed)

    def other(a):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        return jnp.asarray(a, float) + 0.4 * rng.normal(size=a.shape)

    return jax.tree.map(other, tree)


def columns(matrix, order):
    """The blocks of the last axis in the order ``ifgo`` or ``rzn``; ``Z`` is a gate for the new
    state, the opposite of ``z``.
    """
    blocks = dict(zip(order, jnp.split(matrix, len(order), -1), strict=True))
    if 'Z' in order:
        blocks['z'] = -blocks['Z']
    return jnp.concatenate([blocks[name] for name in ('ifgo' if 'f' in order else 'rzn')], -1)


def gates(weight, bias, order):
    """A twin's params of matrices for the input and for the state, one below the other, or of the
    matrix for both.
    """
    weight = jnp.concatenate(weight) if isinstance(weight, list) else weight
    return {'W': columns(weight, order), 'b': columns(bias, order)}


def learned(cell, params, carry, xs, ys):
    """The online gradient with automatic marking, which is that of the cut graph; the losses, and
    the learner.
    """
    learner = functional.online(cell, rules.d_rtrl(), mark='auto')
    state = learner.init(params, carry, xs[0])
    grad = jax.jit(learner.sequence_grad(plain.loss, reduction='sum'))
    grads, losses, *_ = grad(params, state, xs, ys)
    cut = verify.cut_bptt_gradients(cell, params, carry, xs, ys, plain.loss, graph=learner.graph)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(cut))
    return grads, losses, learner


def start(step, x):
    """The carry of a plain cell."""
    states = 1 if step in (plain.gru, plain.gru_reset_first) else 2
    return (jnp.zeros((*x.shape[:-1], UNITS)),) * states


# Equinox ------------------------------------------------------------------------------------------


def equinox(name, x):
    eqx = pytest.importorskip('equinox')
    model = shaken(getattr(eqx.nn, name)(INPUTS, UNITS, key=jax.random.key(0)))
    return Taken(*adapters.from_equinox(model, x, batched=x.ndim == 2), *twin(equinox, name))


def of_equinox(p):
    bn = {'bn': p.bias_n} if hasattr(p, 'bias_n') else {}
    return {'W': jnp.concatenate([p.weight_ih, p.weight_hh], 1).T, 'b': p.bias, **bn}


# Flax ---------------------------------------------------------------------------------------------


def nnx(name, x):
    own = pytest.importorskip('flax.nnx')
    model = getattr(own, name)(INPUTS, UNITS, dtype=float, param_dtype=float, rngs=own.Rngs(0))
    own.update(model, shaken(own.state(model, own.Param)))
    return Taken(*adapters.from_nnx(model, x), *twin(nnx, name))


def nnx_lstm(p):
    p = {name: {key: a[...] for key, a in p[name].items()} for name in p}
    return linen_lstm({'params': {'if' if name == 'if_' else name: own for name, own in p.items()}})


def dense(p):
    """Of the cells with one product for all gates."""
    i, h = p['dense_i'], p['dense_h']
    bias = (i if 'bias' in i else h)['bias'][...]
    return {'W': jnp.concatenate([i['kernel'][...], h['kernel'][...]]), 'b': bias}


def linen(name, x):
    nn = pytest.importorskip('flax.linen')
    module = getattr(nn, name)(UNITS, dtype=float, param_dtype=float)
    carry = module.initialize_carry(jax.random.key(0), x.shape)
    params = shaken(module.init(jax.random.key(1), carry, x))

    def cell(params, carry, x):
        carry, outputs = module.apply(params, carry, x)
        return outputs, carry

    return Taken(cell, params, carry, *twin(linen, name))


def linen_gru(p):
    p = p['params']
    rows = [jnp.hstack([p[side + gate]['kernel'] for gate in 'rzn']) for side in 'ih']
    bias = jnp.hstack([p['i' + gate]['bias'] for gate in 'rzn'])
    return gates(rows, bias, 'rzn') | {'bn': p['hn']['bias']}


def linen_lstm(p):
    p = p['params']
    rows = [jnp.hstack([p[side + gate]['kernel'] for gate in 'ifgo']) for side in 'ih']
    return gates(rows, jnp.hstack([p['h' + gate]['bias'] for gate in 'ifgo']), 'ifgo')


# Haiku --------------------------------------------------------------------------------------------


def haiku(name, x):
    hk = pytest.importorskip('haiku')
    make = getattr(hk, name)
    run = hk.without_apply_rng(hk.transform(lambda x, carry: make(UNITS)(x, carry)))
    lanes = x.shape[0] if x.ndim == 2 else None
    start = hk.without_apply_rng(hk.transform(lambda: make(UNITS).initial_state(lanes)))
    carry = jax.tree.map(lambda a: a.astype(float), start.apply({}))
    params = shaken(run.init(jax.random.key(0), x, carry))

    def cell(params, carry, x):
        return run.apply(params, x, carry)

    return Taken(cell, params, carry, *twin(haiku, name))


def haiku_gru(p):
    return gates([p['gru']['w_i'], p['gru']['w_h']], p['gru']['b'], 'Zrn')


def haiku_lstm(p):
    return gates(p['lstm/linear']['w'], p['lstm/linear']['b'], 'igfo')


# blox ---------------------------------------------------------------------------------------------


def blox(name, x):
    bx = pytest.importorskip('blox')
    graph = bx.Graph('net')
    rng = bx.Rng(graph.child('rng'))
    model = getattr(bx, name)(graph.child('cell'), UNITS, rng)
    container = rng.seed(bx.Params(), seed=0)
    carry, container = model.initial_state(container, x)
    _, container = model(container, x, carry)
    return Taken(*adapters.from_blox(model, shaken(container.locked()), x), *twin(blox, name))


def blox_gru(p):
    both = lambda key: jnp.hstack([p['net', 'cell', of, key] for of in ('gates', 'candidate')])
    return gates(both('kernel'), both('bias'), 'Zrn')


def blox_lstm(p):
    return gates(*(p['net', 'cell', 'gates', key] for key in ('kernel', 'bias')), 'igfo')


# brainstate ---------------------------------------------------------------------------------------


def brainstate(name, x):
    import brainstate as bst

    model = getattr(bst.nn, name)(INPUTS, UNITS)
    bst.nn.init_all_states(model, batch_size=x.shape[0] if x.ndim == 2 else None)
    for state in model.states(bst.ParamState).values():
        state.value = shaken(state.value)
    return Taken(*adapters.from_brainstate(model, x), *twin(brainstate, name))


def brainstate_gru(p):
    rz, n = p['Wrz', 'weight'], p['Wh', 'weight']
    weight, bias = (jnp.hstack([rz[key], n[key]]) for key in ('weight', 'bias'))
    return gates(weight, bias, 'rZn')


def brainstate_lstm(p):
    return gates(p['W', 'weight']['weight'], p['W', 'weight']['bias'], 'igfo')


TWINS = {  # a framework and its cell -> the plain twin, and how its weights are laid out
    (equinox, 'GRUCell'): (plain.gru, of_equinox),
    (equinox, 'LSTMCell'): (plain.lstm, of_equinox),
    (nnx, 'GRUCell'): (plain.gru, dense),
    (nnx, 'LSTMCell'): (plain.lstm, nnx_lstm),
    (nnx, 'OptimizedLSTMCell'): (plain.lstm, dense),
    (linen, 'GRUCell'): (plain.gru, linen_gru),
    (linen, 'LSTMCell'): (plain.lstm, linen_lstm),
    (linen, 'OptimizedLSTMCell'): (plain.lstm, linen_lstm),
    (haiku, 'GRU'): (plain.gru_reset_first, haiku_gru),
    (haiku, 'LSTM'): (plain.lstm_forgetting_late, haiku_lstm),
    (blox, 'GRU'): (plain.gru_reset_first, blox_gru),
    (blox, 'LSTM'): (plain.lstm, blox_lstm),
    (brainstate, 'GRUCell'): (plain.gru_reset_first, brainstate_gru),
    (brainstate, 'LSTMCell'): (plain.lstm_forgetting_late, brainstate_lstm),
}


def twin(framework, name):
    return TWINS.get((framework, name), (None, None))
