"""Environments to act in, in which the present observation does not tell what to do.

Each is a value of pure functions for one sample; :func:`vector` makes a batch of it that starts
finished episodes again.

>>> import jax, jax.numpy as jnp
>>> from braintrace.tasks import environments
>>> env = environments.vector(environments.chain(20, distractors=3))
>>> states = env.reset(jax.random.key(0), 8)
>>> env.observe(states).shape
(8, 6)
>>> states, rewards, done = env.step(jax.random.key(1), states, jnp.zeros(8, int))
>>> rewards.shape, done.dtype
((8,), dtype('bool'))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._public_names import lacking as _lacking
from ..errors import OptionError, StructureError
from ._task import check_whole

__all__ = [
    'Environment',
    'VectorEnvironment',
    'cartpole',
    'chain',
    'from_gymnax',
    'repeat_previous',
    't_maze',
    'vector',
]


class Environment(NamedTuple):
    """One sample: ``reset(key) -> state``, ``observe(state) -> float (inputs,)`` and ``step(key,
    state, action) -> state, reward, done``, with ``actions`` many actions. The state after the last
    step of an episode is not observed. A time limit is an end like any other: nothing tells them
    apart.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace.tasks import environments
    >>> reset, step = lambda key: jnp.zeros(1), lambda key, s, action: (s, 1.0 * action, True)
    >>> env = environments.Environment('one is right', 1, 2, reset, lambda s: s, step)
    >>> environments.vector(env).reset(jax.random.key(0), 3).shape
    (3, 1)
    """

    name: str
    inputs: int
    actions: int
    reset: Callable[[Array], Any]
    observe: Callable[[Any], Array]
    step: Callable[[Array, Any, Array], tuple]


class VectorEnvironment(NamedTuple):
    """A batch: ``reset(key, batch) -> states``, ``observe(states) -> (batch, inputs)``, ``step(key,
    states, actions) -> states, rewards, done``. Where ``done`` is True, the state is that of a new
    episode already.
    """

    env: Environment
    reset: Callable[[Array, int], Any]
    observe: Callable[[Any], Array]
    step: Callable[[Array, Any, Array], tuple]


def vector(env: Environment) -> VectorEnvironment:
    """A batch of an environment, whose finished episodes start again within the step.

    Raises :class:`braintrace.errors.StructureError` for observations that are no floats of the
    shape ``(inputs,)``, and for a ``step`` that does not return such a state, a reward and a flag.
    """
    _check(env)

    def reset(key: Array, batch: int):
        check_whole('batch', batch)
        return jax.vmap(env.reset)(jax.random.split(key, batch))

    def one(key: Array, state, action):
        of_step, of_reset = jax.random.split(key)
        new, reward, done = env.step(of_step, state, action)
        fresh = env.reset(of_reset)
        return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, new), reward, done

    def step(key: Array, states, actions):
        batch = len(jax.tree.leaves(states)[0])
        shape, dtype = jnp.shape(actions), jnp.result_type(actions)
        if shape != (batch,) or not jnp.issubdtype(dtype, jnp.integer):
            raise StructureError(
                f'{env.name}: actions are {dtype}{list(shape)}; give a whole number for each of '
                f'{batch} samples, from 0 to {env.actions - 1}.'
            )
        keys = jax.random.split(key, batch)
        states, rewards, done = jax.vmap(one)(keys, states, actions)
        return states, jnp.asarray(rewards, float), jnp.asarray(done, bool)

    return VectorEnvironment(env, reset, jax.vmap(env.observe), step)


def chain(length: int = 20, distractors: int = 0) -> Environment:
    """A sign is shown at the first step, and ``length`` steps later the action that names it has
    the reward 1, the other one -1 (MemoryChain of bsuite: Osband et al. 2020, arXiv:1908.03568).

    Inputs: the sign, whether it is shown, whether it is asked for, and ``distractors`` signs that
    are random at every step. The return of who guesses is 0, of who remembers 1.
    """
    check_whole('length', length)
    check_whole('distractors', distractors, 0)

    def noise(key: Array) -> Array:
        return jax.random.rademacher(key, (distractors,), float)

    def reset(key: Array):
        of_bit, of_noise = jax.random.split(key)
        bit = jax.random.randint(of_bit, (), 0, 2)
        return {'bit': bit, 't': jnp.zeros((), int), 'noise': noise(of_noise)}

    def observe(s) -> Array:
        shown, asked = s['t'] == 0, s['t'] == length
        signs = jnp.stack([shown * (2.0 * s['bit'] - 1), 1.0 * shown, 1.0 * asked])
        return jnp.concatenate([signs, s['noise']])

    def step(key: Array, s, action: Array):
        done = s['t'] == length
        reward = done * jnp.where(action == s['bit'], 1.0, -1.0)
        return {'bit': s['bit'], 't': s['t'] + 1, 'noise': noise(key)}, reward, done

    name = f'chain {length}' + (f' with {distractors} distractors' if distractors else '')
    return Environment(name, 3 + distractors, 2, reset, observe, step)


def repeat_previous(back: int = 4, steps: int = 51, symbols: int = 4) -> Environment:
    """Name the symbol of ``back`` steps ago, from step ``back`` on (RepeatPrevious of POPGym: Morad
    et al. 2023, arXiv:2303.01859; its Easy has 4 steps back and a deck of 52 cards).

    Inputs: the present symbol, one-hot; the symbols are independent. Rewards add up to 1 where all
    are right and to -1 where none is; the return of who guesses is ``2 / symbols - 1``.
    """
    check_whole('back', back)
    check_whole('steps', steps, back + 1)
    check_whole('symbols', symbols, 2)

    def reset(key: Array):
        return {'past': jax.random.randint(key, (back + 1,), 0, symbols), 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        return jax.nn.one_hot(s['past'][0], symbols)

    def step(key: Array, s, action: Array):
        right = jnp.where(action == s['past'][back], 1.0, -1.0)
        reward = (s['t'] >= back) * right / (steps - back)
        new = jax.random.randint(key, (1,), 0, symbols)
        past = jnp.concatenate([new, s['past'][:-1]])
        return {'past': past, 't': s['t'] + 1}, reward, s['t'] + 1 == steps

    return Environment(f'repeat previous {back}', symbols, symbols, reset, observe, step)


def t_maze(length: int = 10) -> Environment:
    """Walk a corridor of ``length`` steps and turn to the side that its first place showed (Bakker
    2002, NIPS 14). Actions: on, back, up, down.

    Inputs: the side at the first step, whether the end is reached, whether it is not. The right
    turn has the reward 4; the wrong one, standing still and a turn within the corridor -0.1. An
    episode ends with a turn at the end of the corridor, or after ``4 length + 20`` steps.
    """
    check_whole('length', length)

    def reset(key: Array):
        zero = jnp.zeros((), int)
        return {'up': jax.random.randint(key, (), 0, 2), 'at': zero, 't': zero}

    def observe(s) -> Array:
        side = (s['t'] == 0) * (2.0 * s['up'] - 1)
        return jnp.stack([side, 1.0 * (s['at'] == length), 1.0 * (s['at'] < length)])

    def step(key: Array, s, action: Array):
        end = s['at'] == length
        turned, right = end & (action >= 2), action == 3 - s['up']
        at = jnp.clip(s['at'] + (action == 0) - (action == 1), 0, length)
        reward = jnp.where(turned & right, 4.0, jnp.where(at != s['at'], 0.0, -0.1))
        new = {'up': s['up'], 'at': at, 't': s['t'] + 1}
        return new, reward, turned | (new['t'] >= 4 * length + 20)

    return Environment(f'T-maze {length}', 3, 4, reset, observe, step)


def cartpole(positions_only: bool = True, steps: int = 500) -> Environment:
    """Balance a pole on a cart that is pushed left or right, 0.02 s a step (Barto, Sutton and
    Anderson 1983); the reward is 1 for each of at most ``steps`` steps.

    Inputs: the place of the cart and the angle of the pole, each over its bound; with
    ``positions_only=False`` their velocities too. A memory of one step is enough here.
    """
    check_whole('steps', steps)
    seen = jnp.array([0, 2] if positions_only else [0, 2, 1, 3])
    bounds = jnp.array([2.4, 1.0, 12 * math.pi / 180, 1.0])

    def reset(key: Array):
        x = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return {'x': x, 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        return (s['x'] / bounds)[seen]

    def step(key: Array, s, action: Array):
        # masses of 1 and 0.1 kg, half a length of 0.5 m, a force of 10 N
        place, speed, angle, turn = s['x']
        force, cos, sin = jnp.where(action == 1, 10.0, -10.0), jnp.cos(angle), jnp.sin(angle)
        push = (force + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        pushed = push - 0.05 * turning * cos / 1.1
        x = s['x'] + 0.02 * jnp.stack([speed, pushed, turn, turning])
        fell = (jnp.abs(x) > bounds)[jnp.array([0, 2])].any()
        return {'x': x, 't': s['t'] + 1}, jnp.ones(()), fell | (s['t'] + 1 >= steps)

    name = 'cartpole, positions' if positions_only else 'cartpole'
    return Environment(name, len(seen), 2, reset, observe, step)


def from_gymnax(name: str, **options) -> Environment:
    """An environment of gymnax with a finite number of actions, such as ``'MemoryChain-bsuite'``;
    ``options`` replace fields of its parameters. An episode that is cut off counts as one that
    ended.

    Needs gymnax and six: ``pip install 'braintrace-online[rl]'``. Raises
    :class:`braintrace.errors.OptionError` for other actions.
    """
    try:
        import gymnax
    except ImportError as error:
        raise OptionError(
            f'from_gymnax({name!r}) needs gymnax and six: '
            f"pip install 'braintrace-online[rl]' ({error})."
        ) from error
    try:
        env, params = gymnax.make(name)
        params = params.replace(**options)
    except (ValueError, TypeError) as error:
        raise OptionError(f'gymnax does not make {name!r} with {options}: {error}') from error
    actions = getattr(env.action_space(params), 'n', None)
    if actions is None:
        raise OptionError(
            f'{name} has continuous actions; only a finite number can be chosen from.'
        )

    def reset(key: Array):
        seen, state = env.reset(key, params)
        return {'seen': jnp.ravel(seen).astype(float), 'state': state}

    def step(key: Array, s, action: Array):
        # (seen, state, reward, terminated, truncated, info), before 1.0 one flag instead of two
        seen, state, reward, *ended, _ = env.step(key, s['state'], action, params)
        new = {'seen': jnp.ravel(seen).astype(float), 'state': state}
        return new, reward, jnp.stack(ended).any()

    inputs = math.prod(env.observation_space(params).shape)
    return Environment(name, inputs, int(actions), reset, lambda s: s['seen'], step)


def _check(env: Environment) -> None:
    """Refuse functions that do not fit together; nothing is computed."""
    if not isinstance(env, Environment):
        raise OptionError(f'env is {type(env).__name__}; give an Environment.')
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(env.reset, key)
    seen = jax.eval_shape(env.observe, state)
    if getattr(seen, 'shape', None) != (env.inputs,) or not jnp.issubdtype(
        seen.dtype, jnp.floating
    ):
        raise StructureError(
            f'{env.name}: observe returns {seen}; give a float array of shape ({env.inputs},), '
            'a symbol as one-hot: jax.nn.one_hot(symbol, symbols).'
        )
    found = jax.eval_shape(env.step, key, state, jax.ShapeDtypeStruct((), int))
    if not isinstance(found, tuple) or len(found) != 3:
        count = f'{len(found)} values' if isinstance(found, tuple) else type(found).__name__
        raise StructureError(
            f'{env.name}: step returns {count}; give (state, reward, done). Environments of gymnax '
            'return six: environments.from_gymnax(name).'
        )
    new, reward, done = found
    shapes = lambda tree: jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree)
    if shapes(new) != shapes(state):
        raise StructureError(
            f'{env.name}: step returns another state than reset: {shapes(new)} instead of '
            f'{shapes(state)}.'
        )
    if jnp.shape(reward) or jnp.shape(done) or not jnp.issubdtype(jnp.result_type(done), bool):
        raise StructureError(
            f'{env.name}: step returns the reward {reward} and done {done}; give two scalars, the '
            'second a bool.'
        )


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
