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
import numpy as np
from jax import Array
from jax.experimental import io_callback

from .._jax import Tracer
from .._public_names import lacking as _lacking
from ..errors import OptionError, StructureError
from ._task import check_whole

__all__ = [
    'Environment',
    'VectorEnvironment',
    'autoencode',
    'battleship',
    'cartpole',
    'chain',
    'concentration',
    'count_recall',
    'from_gymnasium',
    'from_gymnax',
    'pendulum',
    'repeat_first',
    'repeat_previous',
    'reversal',
    't_maze',
    'trace_conditioning',
    'vector',
]
CARDS = 52  # of POPGym's easy settings


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
    episode already: reset the memory of these samples before they see it, by the flags of this very
    step, which come with the last reward.
    """

    env: Environment
    reset: Callable[[Array, int], Any]
    observe: Callable[[Any], Array]
    step: Callable[[Array, Any, Array], tuple]


def vector(env: Environment) -> VectorEnvironment:
    """A batch of an environment, whose finished episodes start again within the step.

    Raises :class:`braintrace.errors.StructureError` for observations that are no floats of the
    shape ``(inputs,)``, and for a ``step`` that does not return such a state, a reward and a flag;
    for actions that are not one whole number for each sample, and outside of ``jit``, where their
    values are known, for one that is out of range.
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
        actions = _whole(env, actions, batch)
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
    et al. 2023, arXiv:2303.01859; its Easy counts the present step, so it is ``back=3`` here, and
    has a deck of 52 cards).

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


def repeat_first(symbols: int = 4) -> Environment:
    """Name the first symbol at every step (RepeatFirst of POPGym: Morad et al. 2023,
    arXiv:2303.01859, Easy: a shuffled deck of 52 cards, 51 steps).

    Inputs: the present symbol, one-hot. Rewards are 1/51 and -1/51; who guesses has the return
    ``2 / symbols - 1``.
    """
    check_whole('symbols', symbols, 2)

    def reset(key: Array):
        return {'cards': _deck(key, symbols), 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        return jax.nn.one_hot(s['cards'][s['t']], symbols)

    def step(key: Array, s, action: Array):
        reward = _sign(action == s['cards'][0]) / (CARDS - 1)
        return {**s, 't': s['t'] + 1}, reward, s['t'] + 2 == CARDS

    return Environment('repeat first', symbols, symbols, reset, observe, step)


def count_recall() -> Environment:
    """Say how often the asked colour was shown until now, this step included (CountRecall of
    POPGym, Easy: two shuffled decks of 26 cards of each of two colours, 51 steps).

    Inputs: the colour that is shown and the one that is asked, one-hot. Actions: 0 to 26. Rewards
    are 1/51 and -1/51.
    """

    def reset(key: Array):
        shown, asked = jax.vmap(_deck, (0, None))(jax.random.split(key), 2)
        return {'shown': shown, 'asked': asked, 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        return jax.nn.one_hot(jnp.stack([s['shown'], s['asked']])[:, s['t']], 2).ravel()

    def step(key: Array, s, action: Array):
        until = jnp.arange(CARDS) <= s['t']
        count = (until & (s['shown'] == s['asked'][s['t']])).sum()
        reward = _sign(action == count) / (CARDS - 1)
        return {**s, 't': s['t'] + 1}, reward, s['t'] + 2 == CARDS

    return Environment('count recall', 4, CARDS // 2 + 1, reset, observe, step)


def autoencode(symbols: int = 4) -> Environment:
    """Watch a deck of 52 cards and name them from the last to the first (Autoencode of POPGym,
    Easy). The last one is still in view when it is to be named.

    Inputs: whether to watch, and the card, one-hot, 0 while cards are named. Rewards of naming are
    1/52 and -1/52.
    """
    check_whole('symbols', symbols, 2)

    def reset(key: Array):
        return {'cards': _deck(key, symbols), 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        card = jax.nn.one_hot(s['cards'][jnp.minimum(s['t'], CARDS - 1)], symbols)
        watch = 1.0 * (s['t'] < CARDS - 1)
        return jnp.concatenate([watch[None], card * (s['t'] < CARDS)])

    def step(key: Array, s, action: Array):
        place = 2 * (CARDS - 1) - s['t']
        right = _sign(action == s['cards'][jnp.minimum(place, CARDS - 1)])
        reward = (place < CARDS) * right / CARDS
        return {**s, 't': s['t'] + 1}, reward, place == 0

    return Environment('autoencode', 1 + symbols, symbols, reset, observe, step)


def battleship() -> Environment:
    """Find the 12 places of ships of 4, 3, 3 and 2 places in a hidden sea of 8 x 8 (Battleship of
    POPGym, Easy). Actions: the places.

    Inputs: whether the last shot hit, and its place, one-hot. A new hit has the reward 1/12, any
    other shot -1/52. An episode ends when all are hit, or after 64 steps.
    """
    ships, places = (4, 3, 3, 2), 64

    def reset(key: Array):
        sea = jnp.zeros((8, 8), bool)
        for size, of_ship in zip(ships, jax.random.split(key, len(ships))):
            # every place of this ship, lying and standing, and those where the sea is free
            flat = [jnp.roll(jnp.arange(64) < size, k) for k in range(64) if k % 8 <= 8 - size]
            lying = jnp.stack(flat).reshape(-1, 8, 8)
            ways = jnp.concatenate([lying, lying.swapaxes(1, 2)])
            free = ~(ways & sea).any((1, 2))
            sea |= ways[jax.random.categorical(of_ship, jnp.where(free, 0.0, -jnp.inf))]
        last = jnp.zeros(places + 1)
        return {'sea': sea.ravel(), 'hit': jnp.zeros(places, bool), 'seen': last, 't': 0}

    def step(key: Array, s, action: Array):
        new = s['sea'][action] & ~s['hit'][action]
        hit = s['hit'].at[action].set(s['sea'][action])
        seen = jnp.concatenate([1.0 * new[None], jax.nn.one_hot(action, places)])
        done = (hit.sum() == sum(ships)) | (s['t'] + 1 == places)
        reward = jnp.where(new, 1 / sum(ships), -1 / (places - sum(ships)))
        return {'sea': s['sea'], 'hit': hit, 'seen': seen, 't': s['t'] + 1}, reward, done

    return Environment('battleship', places + 1, places, reset, lambda s: s['seen'], step)


def concentration() -> Environment:
    """Find pairs of one colour among 52 cards that lie face down (Concentration of POPGym, Easy).
    Actions: the card to turn over.

    Inputs: of each card whether it is red, black or hidden. The second card of a pair has the
    reward 2/52, any other second card -1/52, a first card of a pair that was found -1/104; two
    cards that are no pair are seen until the next action. An episode ends when all are found, or
    after 104 steps.
    """

    def reset(key: Array):
        found = jnp.zeros(CARDS, bool)
        return {'cards': _deck(key, 2), 'found': found, 'up': jnp.full(2, -1), 't': 0}

    def observe(s) -> Array:
        seen = s['found'].at[s['up']].max(s['up'] >= 0, mode='drop')
        return jax.nn.one_hot(jnp.where(seen, s['cards'], 2), 3).ravel()

    def step(key: Array, s, action: Array):
        up = jnp.where(s['up'][1] >= 0, -1, s['up'])  # two that are no pair are turned down
        first, old = up[0], s['found'][action]
        second, alike = first >= 0, s['cards'][first] == s['cards'][action]
        pair = second & alike & ~old & (first != action)
        found = s['found'].at[jnp.stack([first, action])].max(pair)
        reward = pair * 2 / CARDS - (second & ~pair) / CARDS - (old & ~second) / (2 * CARDS)
        turned = jnp.where(second, jnp.stack([first, action]), jnp.stack([action, -1]))
        up = jnp.where(pair | (old & ~second), -1, turned)
        new = {'cards': s['cards'], 'found': found, 'up': up, 't': s['t'] + 1}
        return new, reward, found.all() | (new['t'] == 2 * CARDS)

    return Environment('concentration', 3 * CARDS, CARDS, reset, observe, step)


def reversal(delay: int = 5, period: int = 5000) -> Environment:
    """Name the sign of ``delay`` steps ago, where what it means turns round after each ``period``
    steps: a life of one episode that never ends.

    Inputs: the sign, whether it is shown, whether it is asked for. The action has the reward 1
    where it is right and -1 where it is not; the next sign follows at once.
    """
    check_whole('delay', delay)
    check_whole('period', period)

    def reset(key: Array):
        return {'bit': jax.random.randint(key, (), 0, 2), 't': jnp.zeros((), int)}

    def at(s) -> Array:
        return s['t'] % (delay + 1)

    def observe(s) -> Array:
        shown, asked = at(s) == 0, at(s) == delay
        return jnp.stack([shown * (2.0 * s['bit'] - 1), 1.0 * shown, 1.0 * asked])

    def step(key: Array, s, action: Array):
        right = action == (s['bit'] + s['t'] // period) % 2
        asked = at(s) == delay
        bit = jnp.where(asked, jax.random.randint(key, (), 0, 2), s['bit'])
        return {'bit': bit, 't': s['t'] + 1}, asked * _sign(right), jnp.zeros((), bool)

    return Environment(f'reversal {delay}', 3, 2, reset, observe, step)


def trace_conditioning(isi: int = 20, distractors: int = 0) -> Environment:
    """A stimulus of 4 steps, and ``isi`` steps after its onset 2 steps with the reward 1, to be
    predicted (after Rafiee et al. 2022, doi:10.1177/10597123221085039); nothing is to be done, and
    the episode never ends. From one onset to the next it takes 80 to 120 steps and ``isi``.

    Inputs: the stimulus, the reward of the step before, and ``distractors`` stimuli that begin at
    random, on average every 20 steps.
    """
    check_whole('isi', isi, 4)
    check_whole('distractors', distractors, 0)

    def reset(key: Array):
        left = jnp.zeros(distractors, int)
        return {'t': jnp.zeros((), int), 'trial': 100 + isi, 'left': left}

    def paid(t) -> Array:
        return 1.0 * ((t >= isi) & (t < isi + 2))

    def observe(s) -> Array:
        seen = jnp.stack([1.0 * (s['t'] < 4), paid(s['t'])])
        return jnp.concatenate([seen, 1.0 * (s['left'] > 0)])

    def step(key: Array, s, action: Array):
        of_trial, of_noise = jax.random.split(key)
        over = s['t'] + 1 >= s['trial']
        t = jnp.where(over, 0, s['t'] + 1)
        trial = jnp.where(over, isi + jax.random.randint(of_trial, (), 80, 121), s['trial'])
        begins = (s['left'] <= 0) & (jax.random.uniform(of_noise, (distractors,)) < 1 / 16)
        left = jnp.where(begins, 4, s['left'] - 1)
        return {'t': t, 'trial': trial, 'left': left}, paid(t), jnp.zeros((), bool)

    return Environment(f'trace conditioning {isi}', 2 + distractors, 1, reset, observe, step)


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


def pendulum(positions_only: bool = True) -> Environment:
    """Swing a pendulum up and hold it, 200 steps of 0.05 s; actions: a torque of -2, 0 or 2 N m, of
    which POPGym's continuous task has all between.

    Inputs: cosine and sine of the angle from above; with ``positions_only=False`` the speed over 8
    too. The reward is 1/200 where it is above at rest, down to -1/200.
    """

    def reset(key: Array):
        x = jax.random.uniform(key, (2,), minval=-1, maxval=1) * jnp.array([math.pi, 1.0])
        return {'x': x, 't': jnp.zeros((), int)}

    def observe(s) -> Array:
        angle, speed = s['x']
        seen = [jnp.cos(angle), jnp.sin(angle), speed / 8]
        return jnp.stack(seen[: 2 if positions_only else 3])

    def step(key: Array, s, action: Array):
        angle, speed = s['x']
        torque = 2.0 * (action - 1)
        short = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = (short**2 + 0.1 * speed**2 + 0.001 * torque**2) / (math.pi**2 + 6.404)
        # 1 kg, 1 m, gravity of 10 m / s^2
        speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
        new = {'x': jnp.stack([angle + 0.05 * speed, speed]), 't': s['t'] + 1}
        return new, (1 - 2 * cost) / 200, s['t'] + 1 == 200

    name = 'pendulum, positions' if positions_only else 'pendulum'
    return Environment(name, 2 if positions_only else 3, 3, reset, observe, step)


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


def from_gymnasium(name: str, batch: int, **options) -> VectorEnvironment:
    """A batch of an environment of gymnasium with a finite number of actions, which runs in Python
    behind a callback: under ``jit`` and ``scan``. Under ``vmap``, where all would act in the same
    environments, JAX refuses it. ``options`` are those of ``gymnasium.make``. What is done starts
    again within the step. Observations are flat as ``gymnasium.spaces.flatten`` makes them, symbols
    one-hot; ``observe`` gives what ``reset`` and ``step`` return.

    Needs gymnasium: ``pip install 'braintrace-online[rl]'``. Raises
    :class:`braintrace.errors.OptionError` for other actions, and for observations without a fixed
    length.
    """
    check_whole('batch', batch)
    try:
        import gymnasium
    except ImportError as error:
        raise OptionError(
            f"from_gymnasium({name!r}) needs gymnasium: pip install 'braintrace-online[rl]' "
            f'({error}).'
        ) from error
    try:
        envs = [gymnasium.make(name, **options) for _ in range(batch)]
    except (gymnasium.error.Error, TypeError) as error:
        raise OptionError(f'gymnasium does not make {name!r} with {options}: {error}') from error
    spaces, space, acts = gymnasium.spaces, envs[0].observation_space, envs[0].action_space
    if not isinstance(acts, spaces.Discrete) or not space.is_np_flattenable:
        raise OptionError(
            f'{name} has the actions {acts} and the observations {space}; only a finite number of '
            'actions can be chosen from, by observations of a fixed length.'
        )
    inputs, flat = spaces.flatdim(space), lambda x: np.asarray(spaces.flatten(space, x), np.float32)

    def begin(seed):
        return np.stack([flat(env.reset(seed=int(seed) + k)[0]) for k, env in enumerate(envs)])

    def play(seen, actions):
        rows = []
        for env, action in zip(envs, actions):
            seen, reward, terminated, truncated, _ = env.step(int(action + acts.start))
            done = terminated or truncated
            rows.append((flat(env.reset()[0] if done else seen), np.float32(reward), done))
        return tuple(map(np.stack, zip(*rows)))

    seen = jax.ShapeDtypeStruct((batch, inputs), jnp.float32)
    paid = jax.ShapeDtypeStruct((batch,), jnp.float32), jax.ShapeDtypeStruct((batch,), bool)

    def reset(key: Array, size: int = batch):
        if size != batch:
            raise OptionError(f'{name} was made for a batch of {batch}, not of {size}.')
        seed = jax.random.randint(key, (), 0, 2**30)
        return io_callback(begin, seen, seed, ordered=True).astype(float)

    def step(key: Array, states, actions):
        actions = _whole(one, actions, batch)
        states, rewards, done = io_callback(play, (seen, *paid), states, actions, ordered=True)
        return states.astype(float), rewards.astype(float), done

    one = Environment(name, inputs, int(acts.n), reset, lambda s: s, step)
    return VectorEnvironment(one, reset, lambda states: states, step)


def _deck(key: Array, symbols: int) -> Array:
    """52 cards, the symbols dealt in turn, in any order."""
    return jax.random.permutation(key, jnp.arange(CARDS) % symbols)


def _sign(right: Array) -> Array:
    return jnp.where(right, 1.0, -1.0)


def _whole(env: Environment, actions, batch: int) -> Array:
    """Actions as signed integers; under a transformation their values are not known."""
    actions = jnp.asarray(actions)
    fit = actions.shape == (batch,) and jnp.issubdtype(actions.dtype, jnp.integer)
    found = f'{actions.dtype}{list(actions.shape)}'
    if fit and not isinstance(actions, Tracer):
        low, high = int(np.min(actions)), int(np.max(actions))
        fit, found = 0 <= low and high < env.actions, f'{found} from {low} to {high}'
    if not fit:
        raise StructureError(
            f'{env.name}: actions are {found}; give a whole number for each of {batch} samples, '
            f'from 0 to {env.actions - 1}.'
        )
    return actions.astype(int)


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
