"""Which integers of a carry are random keys: those that the step takes for one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random

from braintrace import _jax
from braintrace._compiler.program.tracing import raw_keys

KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
KEYS = jax.ShapeDtypeStruct((3, 2), jnp.uint32)
RBG = jax.ShapeDtypeStruct((4,), jnp.uint32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def turn(key):
    return random.split(key)[0]


def drawn(key):
    return random.normal(key, ())


def of_rbg(key):
    return random.key_data(random.split(random.wrap_key_data(key, impl='rbg'))[0])


# a step of a carry, its leaves, and those that are keys
STEPS = {
    'a count of two': (lambda c: c + 1, [KEY], []),
    'a count that is folded in': (lambda c, k: (c + 1, random.fold_in(k, c[0])), [KEY, KEY], [1]),
    'a key that is not used': (lambda k: k, [KEY], []),
    'split': (turn, [KEY], [0]),
    'wrapped': (lambda k: random.key_data(turn(random.wrap_key_data(k))), [KEY], [0]),
    'four numbers': (of_rbg, [RBG], [0]),
    'one for each lane': (jax.vmap(turn), [KEYS], [0]),
    'one of several': (lambda k, i: (k, i + (drawn(k[i]) > 0)), [KEYS, NUMBER], [0]),
    'some that stay': (lambda k: jnp.stack([turn(k[0]), k[1], k[2]]), [KEYS], [0]),
    'kept where a flag is set': (
        lambda k, i: (jnp.where(i > 0, turn(k), k), i),
        [KEY, NUMBER],
        [0],
    ),
    'in a call': (lambda k: jax.jit(jax.checkpoint(turn))(k), [KEY], [0]),
    'in a branch': (lambda k, i: (lax.cond(i > 0, turn, jnp.array, k), i), [KEY, NUMBER], [0]),
    'in a scan': (lambda k: lax.scan(lambda k, _: (turn(k), 0), k, None, length=3)[0], [KEY], [0]),
    'in a loop': (lambda k: lax.fori_loop(0, 3, lambda i, k: turn(k), k), [KEY], [0]),
    'passed on inside a scan': (
        lambda a, b: lax.scan(lambda c, _: ((c[1], turn(c[0])), 0), (a, b), None, length=4)[0],
        [KEY, KEY],
        [0, 1],
    ),
    'exchanged': (lambda a, b: (b, turn(a)), [KEY, KEY], [0, 1]),
}


@pytest.mark.parametrize('name', STEPS)
def test_integers_are_keys_where_the_step_takes_them_for_one(name):
    step, carry, keys = STEPS[name]
    jaxpr, _ = _jax.trace(lambda *c: jax.tree.leaves(step(*c)), *carry)
    assert raw_keys(jaxpr, len(carry), 0) == keys
