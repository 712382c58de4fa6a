"""Environments pay what their rules say, start again within the step, and are checked when made."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.errors import OptionError, StructureError
from braintrace.tasks import environments
from braintrace.tasks.environments import Environment, vector

BATCH = 16


def played(env, policy, steps, seed=0):
    """Returns of the finished episodes, ``(their number, mean)``, of ``policy(memory, seen, t) ->
    action, memory``; t counts from the start of an episode.
    """
    env = vector(env)

    def step(now, key):
        states, memory, t, returns = now
        action, memory = jax.vmap(policy)(memory, env.observe(states), t)
        states, rewards, done = env.step(key, states, action)
        returns = returns + rewards
        now = states, memory, jnp.where(done, 0, t + 1), jnp.where(done, 0, returns)
        return now, jnp.where(done, returns, jnp.nan)

    states = env.reset(jax.random.key(seed), BATCH)
    memory = jnp.zeros((BATCH, 8))
    start = states, memory, jnp.zeros(BATCH, int), jnp.zeros(BATCH)
    _, ended = jax.lax.scan(step, start, jax.random.split(jax.random.key(seed + 1), steps))
    return int(jnp.isfinite(ended).sum()), float(jnp.nanmean(ended))


def remembers(memory, seen, t):
    """The sign of the first step."""
    memory = memory.at[0].set(jnp.where(t == 0, seen[0], memory[0]))
    return (memory[0] > 0).astype(int), memory


@pytest.mark.parametrize('distractors', [0, 3])
def test_the_chain_pays_who_remembers_and_nobody_else(distractors):
    env = environments.chain(5, distractors)
    assert played(env, remembers, 60) == (BATCH * 10, 1.0)
    number, mean = played(env, lambda memory, seen, t: (jnp.array(1), memory), 600)
    assert number == BATCH * 100 and abs(mean) < 0.1
    seen = vector(env).observe(vector(env).reset(jax.random.key(0), 2))
    assert seen.shape == (2, 3 + distractors)


def test_the_chain_shows_its_sign_once_and_its_distractors_always():
    env = environments.chain(4, 2)
    _, seen, _, _, done = run(env, np.zeros(5, int))
    assert done.tolist() == [False] * 4 + [True] and seen[:, 2].tolist() == [0, 0, 0, 0, 1]
    assert not seen[1:, :2].any() and set(seen[:, 3:].ravel()) == {-1.0, 1.0}


def test_repeat_previous_pays_the_symbol_of_k_steps_ago():
    def past(memory, seen, t):
        memory = jnp.roll(memory, 1).at[0].set(jnp.argmax(seen))
        return memory[3].astype(int), memory

    number, mean = played(environments.repeat_previous(3, 20), past, 60)
    assert number == BATCH * 3 and mean == pytest.approx(1)
    _, mean = played(environments.repeat_previous(3, 20), lambda m, seen, t: (jnp.array(0), m), 400)
    assert mean == pytest.approx(-0.5, abs=0.05)


def test_the_t_maze_pays_the_turn_that_its_first_place_shows():
    def walk(memory, seen, t):
        up, memory = remembers(memory, seen, t)
        return jnp.where(seen[1] == 1, 3 - up, 0), memory

    assert played(environments.t_maze(6), walk, 70) == (BATCH * 10, 4.0)
    back = lambda memory, seen, t: (jnp.array(1), memory)
    number, mean = played(environments.t_maze(2), back, 28)
    assert number == BATCH and mean == pytest.approx(-2.8)


def run(env, actions, seed=0):
    """The first state, and what is seen, paid and told done along ``actions``, without new starts.
    An action below 0 stands for one at random.
    """
    key, start = jax.random.key(seed), env.reset(jax.random.key(seed + 1))

    def step(state, now):
        t, action = now
        key_t = jax.random.fold_in(key, t)
        drawn = jax.random.randint(jax.random.fold_in(key_t, 1), (), 0, env.actions)
        action = jnp.where(action < 0, drawn, action)
        seen = env.observe(state)
        state, reward, done = env.step(key_t, state, action)
        return state, (seen, action, jnp.asarray(reward, float), done)

    steps = jnp.arange(len(actions)), jnp.asarray(actions)
    _, rows = jax.lax.scan(step, jax.tree.map(jnp.asarray, start), steps)
    return jax.tree.map(np.asarray, (start, *rows))


ANY = np.full(51, -1)


def test_repeat_first_pays_the_first_card_of_a_deck():
    start, seen, actions, rewards, done = run(environments.repeat_first(), ANY)
    cards = start['cards']
    assert np.bincount(cards).tolist() == [13] * 4 and np.array_equal(seen.argmax(1), cards[:51])
    np.testing.assert_allclose(rewards, np.where(actions == cards[0], 1, -1) / 51, rtol=1e-6)
    assert done.tolist() == [False] * 50 + [True]


def test_count_recall_pays_the_count_of_the_asked_colour_until_now():
    env = environments.count_recall()
    start, seen, actions, rewards, done = run(env, ANY)
    shown, asked, counts, right = seen[:, :2].argmax(1), seen[:, 2:].argmax(1), [0, 0], []
    for colour, query in zip(shown, asked, strict=True):
        counts[colour] += 1
        right.append(counts[query])
    np.testing.assert_allclose(rewards, np.where(actions == right, 1, -1) / 51, rtol=1e-6)
    assert run(env, right)[3].sum() == pytest.approx(1) and done.tolist() == [False] * 50 + [True]
    assert np.bincount(start['asked']).tolist() == [26, 26]


def test_autoencode_pays_the_deck_from_its_last_card_to_its_first():
    env = environments.autoencode()
    start, seen, _, rewards, done = run(env, np.full(103, -1))
    cards = start['cards']
    assert np.array_equal(seen[:52, 1:].argmax(1), cards) and not seen[52:].any()
    assert seen[:51, 0].all() and not seen[51:, 0].any() and not rewards[:51].any()
    assert done.tolist() == [False] * 102 + [True]
    backwards = np.concatenate([np.zeros(51, int), cards[::-1]])
    right = run(env, backwards)[3]
    np.testing.assert_allclose(right[51:], np.full(52, 1 / 52), rtol=1e-6)
    wrong = np.where(np.arange(103) == 70, (backwards + 1) % 4, backwards)
    assert run(env, wrong)[3].sum() == pytest.approx(50 / 52)


@pytest.mark.slow
def test_battleship_pays_new_hits_in_a_sea_of_whole_ships():
    env = environments.battleship()
    seas = np.asarray(jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 200))['sea'])
    assert (seas.sum(1) == 12).all() and seas.any(0).all()
    start, seen, actions, rewards, done = run(env, np.full(64, -1), 3)
    hit, want = set(), []
    for place in actions:
        new = start['sea'][place] and place not in hit
        hit |= {int(place)} if new else set()
        want.append(1 / 12 if new else -1 / 52)
    np.testing.assert_allclose(rewards, want, rtol=1e-6)
    assert done.tolist() == [False] * 63 + [True]
    assert np.array_equal(seen[1:, 0], (rewards > 0)[:-1])
    assert np.array_equal(seen[1:, 1:].argmax(1), actions[:-1]) and not seen[0].any()
    ships = np.flatnonzero(start['sea'])
    *_, rewards, done = run(env, [*ships, 0], 3)
    assert rewards[:12].sum() == pytest.approx(1) and done[:12].tolist() == [False] * 11 + [True]


def test_ships_lie_in_one_row_or_column_and_apart():
    """With one ship left out of four each sea is still made of straight pieces."""
    env = environments.battleship()
    sea = np.asarray(jax.jit(env.reset)(jax.random.key(5))['sea']).reshape(8, 8)
    pieces = lambda size: [
        frozenset((r + k * down, c + k * (1 - down)) for k in range(size))
        for down in (0, 1)
        for r in range(8 - down * (size - 1))
        for c in range(8 - (1 - down) * (size - 1))
    ]
    there = frozenset(zip(*map(tuple, np.nonzero(sea)), strict=True))
    left = {there}
    for size in (4, 3, 3, 2):
        left = {rest - ship for rest in left for ship in pieces(size) if ship <= rest}
    assert left == {frozenset()}


def test_concentration_pays_pairs_as_its_rules_say():
    env = environments.concentration()
    cards = np.asarray(jax.jit(env.reset)(jax.random.key(1))['cards'])
    red, black = np.flatnonzero(cards == 0), np.flatnonzero(cards == 1)
    a, b, c = red[:3]
    x, y = black[:2]
    told = [(a, 0), (x, -1), (a, 0), (b, 2), (a, -0.5), (c, 0), (c, -1), (x, 0), (b, -1), (y, 0)]
    actions, want = map(np.array, zip(*told, strict=True))
    _, seen, _, rewards, done = run(env, actions)
    np.testing.assert_allclose(rewards, want / 52, atol=1e-7)
    up = [set(np.flatnonzero(row.reshape(52, 3)[:, 2] == 0)) for row in seen]
    pair, two, mixed = {a, b}, {a, b, c}, {a, b, x}
    assert up == [set(), {a}, {a, x}, {a}, pair, pair, two, two, mixed, mixed] and not done.any()
    pairs = np.concatenate([red, black])
    _, _, _, rewards, done = run(env, pairs)
    assert rewards.sum() == pytest.approx(1) and done.tolist() == [False] * 51 + [True]
    assert run(env, np.full(104, int(a)))[4].tolist() == [False] * 103 + [True]


def test_what_a_sign_means_turns_round_and_the_life_goes_on():
    start, seen, actions, rewards, done = run(environments.reversal(2, 7), np.full(30, -1))
    sign, want = None, []
    for t in range(30):
        sign = (seen[t, 0] > 0) if t % 3 == 0 else sign
        asked, right = t % 3 == 2, bool(actions[t]) == bool(sign) ^ bool(t // 7 % 2)
        want.append(asked * (1.0 if right else -1.0))
        assert seen[t, 1:].tolist() == [t % 3 == 0, t % 3 == 2]
    assert rewards.tolist() == want and not done.any()


def test_the_reward_follows_the_stimulus_after_its_interval():
    start, seen, _, rewards, done = run(environments.trace_conditioning(10, 3), np.zeros(600, int))
    onsets = [t for t in range(600) if seen[t, 0] and (t == 0 or not seen[t - 1, 0])]
    want = np.zeros(600)
    for t in onsets:
        assert seen[t : t + 5, 0].tolist() == [1, 1, 1, 1, 0]
        want[t + 9 : t + 11] = 1  # what the step before the interval's end leads to
    assert not done.any() and np.array_equal(rewards, want)
    assert np.array_equal(seen[1:, 1], rewards[:-1])
    gaps = np.diff(onsets)
    assert len(onsets) > 4 and (gaps >= 90).all() and (gaps <= 130).all() and len(set(gaps)) > 1
    noise = np.asarray(run(environments.trace_conditioning(10, 3), np.zeros(4000, int))[1])[:, 2:]
    assert noise.mean() == pytest.approx(4 / 20, abs=0.03)


def test_the_pendulum_swings_by_the_published_equations():
    env = environments.pendulum(positions_only=False)
    start, seen, actions, rewards, done = run(env, np.full(200, -1))
    angle, speed = np.asarray(start['x'], float)
    for t in range(200):
        short = np.arctan2(np.sin(angle), np.cos(angle))
        torque = (-2.0, 0.0, 2.0)[actions[t]]
        np.testing.assert_allclose(seen[t], [np.cos(angle), np.sin(angle), speed / 8], atol=2e-3)
        worst = np.pi**2 + 0.1 * 8**2 + 0.001 * 2**2
        cost = (short**2 + 0.1 * speed**2 + 0.001 * torque**2) / worst
        assert rewards[t] * 200 == pytest.approx(1 - 2 * cost, abs=5e-3)
        speed = np.clip(speed + 0.05 * (15 * np.sin(angle) + 3 * torque), -8, 8)
        angle = angle + 0.05 * speed
    assert done.tolist() == [False] * 199 + [True]
    assert environments.pendulum().observe(env.reset(jax.random.key(0))).shape == (2,)


def test_the_cart_moves_by_the_published_equations():
    env = environments.cartpole(positions_only=False, steps=40)
    state, step = env.reset(jax.random.key(3)), jax.jit(env.step)
    place, speed, angle, turn = np.asarray(state['x'], float)
    for action in (1, 0, 1, 1, 0):
        state, reward, done = step(jax.random.key(0), state, jnp.array(action))
        force = 10.0 if action else -10.0
        inner = (force + 0.1 * 0.5 * turn**2 * np.sin(angle)) / 1.1
        down = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        turning = (9.8 * np.sin(angle) - np.cos(angle) * inner) / down
        pushed = inner - 0.1 * 0.5 * turning * np.cos(angle) / 1.1
        place, speed = place + 0.02 * speed, speed + 0.02 * pushed
        angle, turn = angle + 0.02 * turn, turn + 0.02 * turning
        np.testing.assert_allclose(state['x'], [place, speed, angle, turn], rtol=1e-5)
        assert float(reward) == 1 and not done
    assert environments.cartpole().observe(state).shape == (2,)
    left = lambda memory, seen, t: (jnp.array(0), memory)
    number, mean = played(environments.cartpole(), left, 60)
    assert number > BATCH and 5 < mean < 15


def test_a_finished_episode_starts_anew_and_the_others_go_on():
    env = vector(environments.chain(2))
    states = env.reset(jax.random.key(0), BATCH)
    states = {**states, 't': states['t'].at[0].set(2)}
    new, _, done = env.step(jax.random.key(1), states, jnp.zeros(BATCH, int))
    assert done.tolist() == [True] + [False] * (BATCH - 1)
    assert new['t'].tolist() == [0] + [1] * (BATCH - 1)
    assert new['bit'][1:].tolist() == states['bit'][1:].tolist()


def test_an_environment_of_gymnasium_acts_behind_a_callback():
    gymnasium = pytest.importorskip('gymnasium')
    env = environments.from_gymnasium('CartPole-v1', 3)
    states = env.reset(jax.random.key(0))

    def step(states, _):
        states, rewards, done = env.step(jax.random.key(0), states, jnp.ones(3, int))
        return states, (env.observe(states), rewards, done)

    _, (seen, rewards, done) = jax.jit(lambda s: jax.lax.scan(step, s, length=12))(states)
    alone, seed = gymnasium.make('CartPole-v1'), jax.random.randint(jax.random.key(0), (), 0, 2**30)
    first, _ = alone.reset(seed=int(seed))
    np.testing.assert_allclose(states[0], first)
    ended = int(np.argmax(done[:, 0]))
    for t in range(ended):
        np.testing.assert_allclose(seen[t, 0], alone.step(1)[0], rtol=1e-6)
    assert alone.step(1)[2] and 5 < ended < 12 and (rewards == 1).all()
    assert np.abs(seen[ended, 0]).max() <= 0.05, 'what is seen with the flag is of a new episode'


def test_symbols_of_gymnasium_are_one_hot_and_its_actions_begin_at_0():
    gymnasium = pytest.importorskip('gymnasium')

    class Card(gymnasium.Env):
        observation_space = gymnasium.spaces.Discrete(4)
        action_space = gymnasium.spaces.Discrete(3, start=-1)

        def reset(self, seed=None, options=None):
            return 2, {}

        def step(self, action):
            return 3, float(action), False, False, {}

    gymnasium.register('Card-v0', Card)
    try:
        env = environments.from_gymnasium('Card-v0', 2)
    finally:
        del gymnasium.registry['Card-v0']
    assert (env.env.inputs, env.env.actions) == (4, 3)
    seen = env.reset(jax.random.key(0))
    assert seen.tolist() == [[0, 0, 1, 0]] * 2
    seen, rewards, _ = env.step(jax.random.key(0), seen, jnp.array([0, 2]))
    assert seen.tolist() == [[0, 0, 0, 1]] * 2 and rewards.tolist() == [-1, 1]


def test_seeds_do_not_share_the_environments_of_gymnasium():
    pytest.importorskip('gymnasium')
    env, key = environments.from_gymnasium('CartPole-v1', 2), jax.random.key(0)
    with pytest.raises(ValueError, match='vmap'):
        jax.vmap(env.reset)(jax.random.split(key, 3))
    states = env.reset(key)
    for actions in ([1, 1, 0], [0.7, 0.2], [2, 2], 1):
        with pytest.raises(StructureError, match='each of 2 samples, from 0 to 1'):
            env.step(key, states, jnp.array(actions))


def test_what_gymnasium_does_not_give_is_refused():
    pytest.importorskip('gymnasium')
    with pytest.raises(OptionError, match="does not make 'nothing'"):
        environments.from_gymnasium('nothing', 2)
    with pytest.raises(OptionError, match='finite number'):
        environments.from_gymnasium('Pendulum-v1', 2)
    with pytest.raises(OptionError, match='a batch of 2, not of 3'):
        environments.from_gymnasium('CartPole-v1', 2).reset(jax.random.key(0), 3)


def test_an_environment_of_gymnax_is_one_of_ours():
    pytest.importorskip('gymnax')
    env = environments.from_gymnax('MemoryChain-bsuite', memory_length=4)
    assert (env.inputs, env.actions) == (3, 2)
    number, mean = played(env, lambda memory, seen, t: (jnp.array(1), memory), 100)
    assert number >= BATCH * 10 and abs(mean) <= 1
    with pytest.raises(OptionError, match="does not make 'nothing'"):
        environments.from_gymnax('nothing')
    with pytest.raises(OptionError, match='continuous'):
        environments.from_gymnax('Pendulum-v1')


@pytest.mark.parametrize(
    'package, make',
    [
        ('gymnasium', lambda: environments.from_gymnasium('CartPole-v1', 2)),
        ('gymnax', lambda: environments.from_gymnax('CartPole-v1')),
    ],
)
def test_without_a_package_its_extra_is_named(monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match=r"pip install 'braintrace-online\[rl\]'"):
        make()


def made(observe=lambda s: s, step=lambda key, s, a: (s, 1.0, True)):
    return Environment('mine', 2, 2, lambda key: jnp.zeros(2), observe, step)


WRONG = {
    'no environment': (3, OptionError, 'env is int'),
    'symbols': (made(lambda s: jnp.zeros(2, int)), StructureError, 'observe returns.*one_hot'),
    'shape': (made(lambda s: s[:1]), StructureError, r'float array of shape \(2,\)'),
    'six values': (made(step=lambda k, s, a: (s, s, 1.0, True, True, {})), StructureError, '6 val'),
    'no pair': (made(step=lambda k, s, a: s), StructureError, r'give \(state, reward, done\)'),
    'state': (made(step=lambda k, s, a: (s[:1], 1.0, True)), StructureError, 'another state'),
    'reward': (made(step=lambda k, s, a: (s, s, True)), StructureError, 'two scalars'),
    'done': (made(step=lambda k, s, a: (s, 1.0, 0)), StructureError, 'two scalars'),
}


@pytest.mark.parametrize('name', WRONG)
def test_functions_that_do_not_fit_are_refused(name):
    env, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        vector(env)


@pytest.mark.parametrize(
    'actions', [0, [0, 1, 1], [0.0, 1.0], [[0, 1], [1, 0]], [0, 2], [-1, 0]], ids=str
)
def test_actions_are_one_whole_number_for_each_sample(actions):
    env = vector(environments.chain(3))
    with pytest.raises(StructureError, match='each of 2 samples, from 0 to 1'):
        env.step(jax.random.key(0), env.reset(jax.random.key(1), 2), jnp.array(actions))


def test_unsigned_actions_are_those_numbers():
    env = vector(environments.pendulum())
    states = env.reset(jax.random.key(0), 2)
    step = lambda actions: env.step(jax.random.key(1), states, actions)[0]['x']
    np.testing.assert_array_equal(step(jnp.zeros(2, jnp.uint8)), step([0, 0]))


LENGTHS = 'chain', 't_maze', 'repeat_first', 'autoencode', 'reversal', 'trace_conditioning'
LENGTHS = [getattr(environments, name) for name in LENGTHS]


@pytest.mark.parametrize('make', [*LENGTHS, environments.cartpole])
def test_lengths_are_positive(make):
    with pytest.raises(OptionError, match='int of at least'):
        make(0) if make is not environments.cartpole else make(steps=0)
