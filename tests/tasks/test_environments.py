"""Environments pay what their rules say, start anew within the step, and are checked when made."""

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
    key, state = jax.random.key(0), environments.chain(4, 2).reset(jax.random.key(1))
    seen = []
    for k in range(5):
        seen.append(np.asarray(env.observe(state)))
        state, _, done = env.step(jax.random.fold_in(key, k), state, 0)
    assert bool(done) and np.array_equal(np.array(seen)[:, 2], [0, 0, 0, 0, 1])
    assert np.array_equal(np.array(seen)[1:, :2], np.zeros((4, 2)))
    assert set(np.array(seen)[:, 3:].ravel()) == {-1.0, 1.0}


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


def test_the_cart_moves_by_the_published_equations():
    env = environments.cartpole(positions_only=False, steps=40)
    state = env.reset(jax.random.key(3))
    place, speed, angle, turn = np.asarray(state['x'], float)
    for action in (1, 0, 1, 1, 0):
        state, reward, done = env.step(jax.random.key(0), state, jnp.array(action))
        force = 10.0 if action else -10.0
        inner = (force + 0.1 * 0.5 * turn**2 * np.sin(angle)) / 1.1
        turning = (9.8 * np.sin(angle) - np.cos(angle) * inner) / (
            0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        )
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


def test_without_gymnax_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'gymnax', None)
    with pytest.raises(OptionError, match=r"pip install 'braintrace-online\[rl\]'"):
        environments.from_gymnax('CartPole-v1')


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


@pytest.mark.parametrize('actions', [0, [0, 1, 1], [0.0, 1.0], [[0, 1], [1, 0]]], ids=str)
def test_actions_are_one_whole_number_for_each_sample(actions):
    env = vector(environments.chain(3))
    with pytest.raises(StructureError, match='each of 2 samples, from 0 to 1'):
        env.step(jax.random.key(0), env.reset(jax.random.key(1), 2), jnp.array(actions))


@pytest.mark.parametrize('make', [environments.chain, environments.t_maze, environments.cartpole])
def test_lengths_are_positive(make):
    with pytest.raises(OptionError, match='int of at least 1'):
        make(0) if make is not environments.cartpole else make(steps=0)
