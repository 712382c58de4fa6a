"""An agent that learns at each step what to remember: actor-critic by D_RTRL and TD(lambda).

A sign is shown once, and 60 steps later the agent has to act on it, while three other inputs are
random signs at every step. Beside it, with the same network and equally many steps: the gradient
of the same step alone, and backpropagation through 5 steps and through whole episodes (A2C). Every
row is the better one of two learning rates, three seeds each, trained in one compiled program.

    python examples/memory_rl.py
    python examples/memory_rl.py --task repeat --steps 2000000
    python examples/memory_rl.py --env gymnax:MemoryChain-bsuite --steps 200000
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from braintrace import compile as compile_model
from braintrace import functional, nn, rules
from braintrace.tasks import agents, environments

DISCOUNT, LAMBDA, VALUE = 0.99, 0.9, 0.5  # the last one weighs its head
POINTS = 50  # of a curve


class ActorCritic(brainstate.nn.Module):
    """A recurrent trace unit remembers; a layer of its state and the input has two heads."""

    def __init__(self, inputs, actions, units=32):
        super().__init__()
        radii = {'r_min': 0.8, 'r_max': 0.999, 'max_phase': 0.6}
        self.cell = nn.RTUCell(inputs, units, activation=lambda x: x, **radii)
        self.hidden = nn.Linear(2 * units + inputs, units)
        self.policy, self.value = nn.Linear(units, actions), nn.Linear(units, 1)

    def update(self, x):
        h = jax.nn.leaky_relu(self.hidden(jnp.concatenate([self.cell(x), x], -1)))
        return self.policy(h), self.value(h)[..., 0]


class Way(NamedTuple):
    """How an agent learns: ``rule`` at each step, or A2C over windows of ``window`` steps; the
    weights change after each ``every`` steps, by Adam or, with a ``kappa``, by bounded steps.
    """

    name: str
    rule: object = None
    every: int = 1
    window: int = 0
    kappa: float = 0.0
    entropy: float = 0.01


RTRL, RTRL_5 = Way('D_RTRL', rules.d_rtrl()), Way('D_RTRL, each 5', rules.d_rtrl(), 5)
BOUNDED = Way('D_RTRL, bounded', rules.d_rtrl(), kappa=0.5, entropy=1e-4)
SAME, SAME_5 = Way('same step', rules.same_step()), Way('same step, each 5', rules.same_step(), 5)
A2C_5 = Way('A2C, 5 steps', window=5)
WAYS = [RTRL, SAME_5, A2C_5]


def choose(outputs, key):
    """An action, drawn from the policy."""
    return jax.random.categorical(key, outputs[0])


def decision(outputs, key):
    """What TD errors weigh: the log-probability of the action, and the value."""
    logits, value = outputs
    return jax.nn.log_softmax(logits)[choose(outputs, key)] + VALUE * value


def entropy(outputs, _):
    """That of the policy."""
    return -jnp.sum(jax.nn.softmax(outputs[0]) * jax.nn.log_softmax(outputs[0]))


class Played(NamedTuple):
    """The step before: its value and reward, whether the episode went on, whether it was one."""

    value: jax.Array
    reward: jax.Array
    going_on: jax.Array
    counts: jax.Array


def online_agent(env, learner, carry, way: Way, rate, batch):
    """``(begin(params, key), step(agent, key) -> agent, returns of the episodes that ended)``."""
    heads = jax.vmap(learner.heads(decision, entropy), (None, 0, 0, 0))
    z_of = agents.eligibility(DISCOUNT * LAMBDA)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    optimizer = agents.obgd(rate, way.kappa) if way.kappa else optax.MultiSteps(adam, way.every)

    def begin(params, key):
        states = env.reset(key, batch)
        state = jax.vmap(learner.init, (None, None, 0))(params, carry, env.observe(states))
        nothing = Played(*jnp.zeros((4, batch)))
        z = z_of.init(params, batch)
        return params, optimizer.init(params), state, states, z, nothing, jnp.zeros(batch)

    def step(agent, key):
        params, opt_state, state, states, z, before, returns = agent
        key, *keys = jax.random.split(key, batch + 1)
        keys = jnp.stack(keys)
        found = heads(params, state, env.observe(states), keys)
        of_decision, of_entropy = found.grads
        # The TD error of the step before, now that the value of what followed is known.
        value = found.outputs[1]
        delta = before.reward + DISCOUNT * before.going_on * value - before.value
        delta = delta * before.counts
        uphill = jax.tree.map(lambda g: way.entropy * g.mean(0), of_entropy)
        if way.kappa:
            updates, opt_state = optimizer.update(z, opt_state, params, delta=delta)
            updates = jax.tree.map(lambda u, g: u + rate * g, updates, uphill)
        else:
            downhill = jax.tree.map(lambda g, h: -g - h, z_of.weigh(z, delta), uphill)
            updates, opt_state = optimizer.update(downhill, opt_state, params)
        params = optax.apply_updates(params, updates)
        # The trace of decisions begins anew with the episode, and the network's memory too.
        z = z_of.update(z, of_decision, before.going_on)
        states, rewards, done = env.step(key, states, jax.vmap(choose)(found.outputs, keys))
        state = jax.vmap(functional.reset, (0, 0, None))(found.state, done, carry)
        returns, ended = returns + rewards, jnp.where(done, returns + rewards, jnp.nan)
        before = Played(value, rewards, 1.0 - done, jnp.ones(batch))
        return (params, opt_state, state, states, z, before, jnp.where(done, 0, returns)), ended

    return begin, step


def a2c_agent(env, learner, carry, way: Way, rate, batch):
    """The same for windows of steps: backpropagation through each, cut at its border."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    cell = jax.vmap(learner.cell, (None, 0, 0))
    first = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), carry)

    def begin(params, key):
        states = env.reset(key, batch)
        return params, optimizer.init(params), first, states, jnp.zeros(batch)

    def play(params, h, states, returns, keys):
        def one(now, key):
            h, states, returns = now
            key, *keys = jax.random.split(key, batch + 1)
            keys = jnp.stack(keys)
            outputs, h = cell(params, h, env.observe(states))
            states, rewards, done = env.step(key, states, jax.vmap(choose)(outputs, keys))
            at = lambda x: done.reshape(-1, *(1,) * (x.ndim - 1))
            h = jax.tree.map(lambda first, x: jnp.where(at(x), first, x), first, h)
            returns, ended = returns + rewards, jnp.where(done, returns + rewards, jnp.nan)
            now = h, states, jnp.where(done, 0, returns)
            return now, (outputs, keys, rewards, 1.0 - done, ended)

        return jax.lax.scan(one, (h, states, returns), keys)

    def loss(params, h, states, returns, keys):
        now, (outputs, keys, rewards, going_on, ended) = play(params, h, states, returns, keys)
        (_, last), _ = cell(params, now[0], env.observe(now[1]))
        values = outputs[1]
        after = jnp.concatenate([values[1:], last[None]])
        delta = jax.lax.stop_gradient(rewards + DISCOUNT * going_on * after - values)

        def back(later, at):
            delta, going_on = at
            later = delta + DISCOUNT * LAMBDA * going_on * later
            return later, later

        _, advantage = jax.lax.scan(back, jnp.zeros(batch), (delta, going_on), reverse=True)
        apart = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (outputs, keys))
        gain = advantage.ravel() * jax.vmap(decision)(*apart) + way.entropy * jax.vmap(entropy)(
            *apart
        )
        return -jnp.mean(gain), (now, ended)

    def step(agent, keys):
        params, opt_state, h, states, returns = agent
        grads, (now, ended) = jax.grad(loss, has_aux=True)(params, h, states, returns, keys)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, *now), ended

    return begin, step


def train(env, way: Way, steps, batch=8, seeds=(1, 2, 3), rates=(2e-3,), units=32):
    """``(curves, seconds)`` of one program for all rates and seeds: the mean return of the episodes
    that ended, ``(rates, seeds, points)``.
    """
    env = environments.vector(env)
    params = []
    for seed in seeds:
        brainstate.random.seed(seed)
        model = ActorCritic(env.env.inputs, env.env.actions, units)
        learner, of_seed, carry = compile_model(model, way.rule, jnp.zeros(env.env.inputs)).pure()
        params.append(of_seed)
    agent_of = a2c_agent if way.window else online_agent
    size = max(way.window, 1)
    rounds = steps // (batch * size)
    points = min(POINTS, rounds)

    def run(rate, params, key):
        begin, step = agent_of(env, learner, carry, way, rate, batch)

        def point(agent, keys):
            agent, ended = jax.lax.scan(step, agent, keys)
            return agent, jnp.nanmean(ended)

        of_start, of_steps = jax.random.split(key)
        keys = jax.random.split(of_steps, (points, rounds // points, size))
        keys = keys if way.window else keys[:, :, 0]
        return jax.lax.scan(point, begin(params, of_start), keys)[1]

    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    every = jax.vmap(jax.vmap(run, (None, 0, 0)), (0, None, None))
    given = jnp.array(rates), params, keys
    compiled = jax.jit(every).lower(*given).compile()
    start = time.perf_counter()
    curves = jax.block_until_ready(compiled(*given))
    return np.asarray(curves), time.perf_counter() - start


def a2c_of(steps):
    """A2C over windows of as many steps as an episode has, so that each is seen as a whole."""
    return Way('A2C, whole episodes', window=steps)


def last_tenth(curves):
    """The mean return at the end of training, by rate and seed."""
    return np.nanmean(curves[..., -max(curves.shape[-1] // 10, 1) :], -1)


def named(task, length):
    """An environment by its name on the command line."""
    made = {
        'chain': partial(environments.chain, distractors=3),
        'plain': environments.chain,
        'repeat': environments.repeat_previous,
        'tmaze': environments.t_maze,
    }
    return environments.cartpole() if task == 'cartpole' else made[task](length)


def main(argv=None, path=Path(__file__).parent / 'output' / 'memory_rl.png'):
    """Train each way, print the table, draw the curves, and return the ends of training by way."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    lengths = {'chain': 60, 'plain': 60, 'repeat': 4, 'tmaze': 10, 'cartpole': 0}
    parser.add_argument('--task', choices=lengths, default='chain')
    parser.add_argument('--length', type=int, help='steps between what is shown and the action')
    parser.add_argument('--env', help='gymnax:NAME instead of a task')
    parser.add_argument('--steps', type=lambda text: int(float(text)), default=400_000)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--rates', type=float, nargs='+', default=(2e-3, 8e-3))
    asked = parser.parse_args(argv)
    length, episode = asked.length or lengths[asked.task], 64
    if asked.env:
        env = environments.from_gymnax(asked.env.removeprefix('gymnax:'))
    else:
        env = named(asked.task, length)
        episode = {'chain': length + 1, 'plain': length + 1, 'repeat': 51}.get(asked.task, episode)
    print(f'{env.name}: {asked.steps:,} steps, mean return at the end of training')
    figure, axis = plt.subplots(figsize=(7, 4), layout='constrained')
    ends, seeds = {}, tuple(range(1, asked.seeds + 1))
    for way in (*WAYS, a2c_of(episode)):
        curves, seconds = train(env, way, asked.steps, asked.batch, seeds, asked.rates)
        of_rates = last_tenth(curves)
        best = np.argmax(of_rates.mean(1))
        ends[way.name], curve = of_rates[best], curves[best]
        of_seeds = ', '.join(f'{end:.2f}' for end in ends[way.name])
        at_rate = f'rate {asked.rates[best]:g}   {seconds:.0f} s'
        print(f'{way.name:20} {ends[way.name].mean():6.2f}   seeds {of_seeds}   {at_rate}')
        at = np.linspace(0, asked.steps, curve.shape[1])
        (line,) = axis.plot(at, np.nanmean(curve, 0), label=way.name)
        axis.fill_between(at, *np.nanquantile(curve, [0, 1], 0), color=line.get_color(), alpha=0.2)
    axis.set(xlabel='steps', ylabel='return of an episode', title=env.name)
    axis.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return ends


if __name__ == '__main__':
    main()
