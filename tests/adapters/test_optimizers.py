"""optax as it is: an optimiser takes parameters and gradients in the framework's own form, and
``sequence_update`` does what a loop of single updates does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import functional, rules
from tests.adapters import cells
from tests.adapters.plain import loss
from tests.compare import assert_close

T, BATCH = 4, 2


def matrices(params):
    """A mask: weight matrices, and no biases."""
    return jax.tree.map(lambda a: a.ndim > 1, params)


def kinds(params):
    return jax.tree.map(lambda a: 'matrix' if a.ndim > 1 else 'bias', params)


OPTIMIZERS = {
    'adamw with a decay mask': lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    'clipping': lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    'a schedule': lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 6)),
    'multi_transform': lambda: optax.multi_transform(
        {'matrix': optax.sgd(0.1), 'bias': optax.set_to_zero()}, kinds
    ),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    'MultiSteps': lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_of_optax_takes_the_gradients_as_they_are(name):
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.normal(size=(T, BATCH, cells.INPUTS)))
    ys = jnp.asarray(rng.normal(size=(T, BATCH, cells.UNITS)))
    cell, params, carry, *_ = cells.nnx('GRUCell', xs[0])
    optimizer = OPTIMIZERS[name]()
    learner = functional.online(cell, rules.d_rtrl(), mark='auto')
    start = params, optimizer.init(params), learner.init(params, carry, xs[0])
    update = jax.jit(learner.sequence_update(loss, optimizer))
    got, losses, _, _, opt_state, *_ = update(*start, xs, ys)

    @jax.jit
    def step(params, opt_state, state, x, y):
        grads, _, _, state = learner.grad(loss)(params, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state

    want = start
    for x, y in zip(xs, ys):
        want = step(*want, x, y)
    assert_close((got, opt_state), want[:2])
    stays = [bool(jnp.all(a == b)) for a, b in zip(*map(jax.tree.leaves, (got, params)))]
    frozen = [kind == 'bias' for kind in jax.tree.leaves(kinds(params))]
    assert stays == (frozen if name == 'multi_transform' else [False] * len(stays))
