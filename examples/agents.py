"""Five agents that learn at every step, over a learner of any cell and any rule.

Each is one function that returns a value of three pure functions: copy it, and change a line.

    python examples/agents.py
    python examples/agents.py --task tmaze --length 20 --agent actor_critic --cell GRU
    python examples/agents.py --rule same_step
    python examples/agents.py --task gymnax:MemoryChain-bsuite

prints the return along training and draws it to ``output/agents.png``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from braintrace import compile as compile_model
from braintrace import functional, nn
from braintrace.errors import OptionError, StructureError
from braintrace.tasks import environments
from braintrace.tasks.agents import eligibility, obgd


class Agent(NamedTuple):
    """``init(params, seen) -> agent``, ``act(agent, seen, key) -> actions, acted`` and
    ``update(agent, acted, rewards, done) -> agent``, for a batch, which is axis 0 of ``seen``.

    An agent is a dict of arrays, ``acted`` what is known of a step before it is paid. The TD error
    of a step is known at the next one, when the value of what followed is.
    """

    init: Callable
    act: Callable
    update: Callable


class Before(NamedTuple):
    """Of the step before, for each sample: the value of what was done, the reward, 0 where the
    episode ended, and 0 where there was no step.
    """

    value: jax.Array
    reward: jax.Array
    going_on: jax.Array
    counts: jax.Array


class Acted(NamedTuple):
    """Of this step, for each sample: the value of the action, that of the best one, whether they
    are one action, gradients, the state after it, and what else an agent needs.
    """

    value: jax.Array
    highest: jax.Array
    best: jax.Array
    grads: Any
    state: Any
    more: Any = ()


def paid(value, rewards, done) -> Before:
    """The record of a step whose rewards and flags are one for each sample."""
    for name, x in (('rewards', rewards), ('done', done)):
        if jnp.shape(x) != value.shape:
            raise StructureError(
                f'{name} has shape {list(jnp.shape(x))}, and {len(value)} samples acted. Give one '
                'for each of them, as environments.vector does.'
            )
    return Before(value, rewards, 1.0 - done, jnp.ones_like(value))


def td_error(before: Before, value, discount):
    """That of the step before, now that the value of what followed is known."""
    return before.counts * (before.reward + discount * before.going_on * value - before.value)


def fading(discount, *lambdas) -> list:
    """Discount times each lambda."""
    for name, value in (('discount', discount), *(('lambda', lam) for lam in lambdas)):
        if not 0 <= value <= 1:
            raise OptionError(f'{name} is {value!r}; give a number from 0 to 1.')
    return [discount * lam for lam in lambdas]


def begun(learner, params, carry, seen) -> dict:
    """What every agent has at first: weights, a state for each sample, and nothing before."""
    outputs, _ = jax.eval_shape(learner.cell, params, carry, seen[0])
    if any(x.ndim != 1 for x in jax.tree.leaves(outputs)):
        raise StructureError(
            f'the heads return {jax.tree.map(lambda x: list(x.shape), outputs)} for one sample of '
            f'shape {list(seen.shape[1:])}. Make the learner and its carry for one sample, whose '
            'heads are vectors; agents map it over the batch, so samples can not depend on each '
            'other.'
        )
    state = jax.vmap(learner.init, (None, None, 0))(params, carry, seen)
    before = Before(*jnp.zeros((4, len(seen))))
    return {'params': params, 'state': state, 'before': before, 't': jnp.zeros((), int)}


def restarted(state, done, carry):
    """Where the episode ended the memory starts again, and with it the trace of the rule."""
    return jax.vmap(functional.reset, (0, 0, None))(state, done, carry)


def by_sample(look: Callable, agent: dict, seen, key):
    """``look(state, seen, key)`` for each sample."""
    return jax.vmap(look)(agent['state'], seen, jax.random.split(key, len(seen)))


def explores(key, q, t, steps):
    """The best action, or one at random in a part of the steps that falls from 1 to 0.01 within
    ``steps``.
    """
    of_chance, of_action = jax.random.split(key)
    by_chance = jax.random.uniform(of_chance) < jnp.maximum(0.01, 1 - t / steps)
    return jnp.where(by_chance, jax.random.randint(of_action, (), 0, len(q)), jnp.argmax(q))


def clipped_adam(rate):
    """Adam of gradients whose norm is at most 1."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def spread(logits):
    """The entropy of a policy; a little of it keeps an agent trying."""
    return -jax.nn.softmax(logits) @ jax.nn.log_softmax(logits)


def acts_by_values(learner, explore) -> Callable:
    """``act`` of an agent whose network has one head, a value for each action."""

    def act(agent, seen, key):
        def look(state, seen, key):
            (q,), pull, state = learner.vjp(agent['params'], state, seen)
            action = explores(key, q, agent['t'], explore)
            grads = pull((jax.nn.one_hot(action, len(q)),))
            return action, Acted(q[action], q.max(), action == jnp.argmax(q), grads, state)

        return by_sample(look, agent, seen, key)

    return act


# the agents --------------------------------------------------------------------------------------


def q_lambda(learner, carry, discount=0.99, lam=0.8, rate=1.0, kappa=2.0, explore=10_000) -> Agent:
    """Q(lambda) by bounded steps (stream Q: Elsayed et al. 2024, arXiv:2410.14606). The trace
    starts again at an action that is not the best (Watkins 1989).
    """
    z_of, optimizer = eligibility(*fading(discount, lam)), obgd(rate, kappa)

    def init(params, seen):
        return begun(learner, params, carry, seen) | {'z': z_of.init(params, len(seen))}

    def update(agent, acted, rewards, done):
        params, z, before = agent['params'], agent['z'], agent['before']
        delta = td_error(before, acted.highest, discount)
        updates, _ = optimizer.update(z, None, params, delta=delta)
        return {
            'params': optax.apply_updates(params, updates),
            'before': paid(acted.value, rewards, done),
            'state': restarted(acted.state, done, carry),
            'z': z_of.update(z, acted.grads, before.going_on * acted.best),
            't': agent['t'] + 1,
        }

    return Agent(init, acts_by_values(learner, explore), update)


def intentional_q(
    learner, carry, discount=0.99, lam=0.8, part=0.3, memory=0.999, explore=10_000
) -> Agent:
    """Q(lambda) whose step size is solved for what the step is to do: to move values by ``part`` of
    the TD error (intentional updates: Sharifnassab et al. 2026, arXiv:2604.19033).

    A step ``alpha delta d z``, with a scale d of each weight, moves the values of the past,
    weighted as the trace z weights them, by ``alpha delta z.(d z)``. Each of them is to move by
    ``part delta`` times its weight, so ``alpha = part n / z.(d z)``, n the sum of the squared
    weights. With lambda 0 this is normalised least mean squares. ``d`` is one over the running root
    mean square of z.
    """
    (decay,) = fading(discount, lam)
    z_of, n_of = eligibility(decay), eligibility(decay**2)

    def init(params, seen):
        z, n = z_of.init(params, len(seen)), n_of.init(jnp.zeros(()), len(seen))
        squares = jax.tree.map(jnp.zeros_like, params)
        return begun(learner, params, carry, seen) | {'z': z, 'n': n, 'squares': squares}

    def update(agent, acted, rewards, done):
        params, z, n, before, t = (agent[name] for name in ('params', 'z', 'n', 'before', 't'))
        delta = td_error(before, acted.highest, discount)
        blend = lambda s, e: memory * s + (1 - memory) * jnp.mean(e**2, 0)
        squares = jax.tree.map(blend, agent['squares'], z)
        scale = lambda e, s: e / (jnp.sqrt(s / (1 - memory ** (t + 1))) + 1e-8)
        scaled = jax.tree.map(scale, z, squares)
        size = sum(jax.vmap(jnp.vdot)(*both) for both in zip(*map(jax.tree.leaves, (z, scaled))))
        alpha = part * n / jnp.maximum(size, 1e-8)
        kept = before.going_on * acted.best
        return {
            'params': optax.apply_updates(params, z_of.weigh(scaled, alpha * delta)),
            'before': paid(acted.value, rewards, done),
            'state': restarted(acted.state, done, carry),
            'z': z_of.update(z, acted.grads, kept),
            'n': n_of.update(n, jnp.ones_like(delta), kept),
            'squares': squares,
            't': t + 1,
        }

    return Agent(init, acts_by_values(learner, explore), update)


def qrc_lambda(
    learner, carry, discount=0.99, lam=0.8, rate=1e-3, beta=1.0, second='h', explore=10_000
) -> Agent:
    """Q(lambda) down the gradient of the projected Bellman error (QRC(lambda): Elelimy et al. 2025,
    arXiv:2507.09087). The network has two heads, q and h; h estimates the TD error, has the weights
    theta of the module ``second``, and sends no gradient into what both share.

    Uphill for q is ``delta z - x grad(delta) - h grad(q)`` with x the trace of h, for theta
    ``delta y - h grad(h) - beta theta`` with y the trace of grad(h). No weight is in both, so z and
    y are one tree.
    """
    z_of, adam = eligibility(*fading(discount, lam)), optax.adam(rate)

    def init(params, seen):
        if second not in (modules := {path[0] for path in functional.flatten_paths(params)}):
            raise OptionError(f'second is {second!r}; name the module of h, of {sorted(modules)}.')
        z, x = z_of.init(params, len(seen)), jnp.zeros(len(seen))
        more = {'z': z, 'x': x, 'known': z, 'moments': adam.init(params)}
        return begun(learner, params, carry, seen) | more

    def act(agent, seen, key):
        def look(state, seen, key):
            (q, h), pull, state = learner.vjp(agent['params'], state, seen)
            action, top, no = explores(key, q, agent['t'], explore), jnp.argmax(q), 0 * q
            at, of_top = jax.nn.one_hot(action, len(q)), pull((jax.nn.one_hot(top, len(q)), no))
            more = h[action], pull((at, no)), of_top
            return action, Acted(q[action], q[top], action == top, pull((at, at)), state, more)

        return by_sample(look, agent, seen, key)

    def update(agent, acted, rewards, done):
        params, z, x, before = (agent[name] for name in ('params', 'z', 'x', 'before'))
        h, of_q, of_top = acted.more
        delta = td_error(before, acted.highest, discount)
        following = discount * before.going_on * before.counts * x
        shrink = [beta * (path[0] == second) for path in functional.flatten_paths(params)]
        down = jax.tree.map(
            lambda w, s, d, k, f: s * w - d - k + f,
            params,
            jax.tree.unflatten(jax.tree.structure(params), shrink),
            z_of.weigh(z, delta),
            z_of.weigh(agent['known'], before.counts),
            z_of.weigh(of_top, following),
        )
        updates, moments = adam.update(down, agent['moments'], params)
        kept = before.going_on * acted.best
        x = discount * lam * kept * x + h
        by = lambda a, g: a.reshape(-1, *(1,) * (g.ndim - 1)) * g
        return {
            'params': optax.apply_updates(params, updates),
            'before': paid(acted.value, rewards, done),
            'state': restarted(acted.state, done, carry),
            'z': z_of.update(z, acted.grads, kept),
            'x': x,
            'known': jax.tree.map(lambda q, g: by(x, q) - by(h, g), of_q, acted.grads),
            'moments': moments,
            't': agent['t'] + 1,
        }

    return Agent(init, act, update)


def actor_critic(
    learner, carry, discount=0.99, lambdas=(0.9, 0.9, 0.9), rate=1e-3, entropy=0.01, critic=0.5
) -> Agent:
    """Actor-critic(lambda) with a trace for the policy and one for the value (Sutton and Barto
    2018, section 13.5), by Adam. ``lambdas``: of the actor, of the critic, and in both of the
    weights that have a trace of the rule (three decays as in RTRRL: Lemmel and Grosu 2025,
    arXiv:2311.04830). The network has two heads: the policy's logits, and one value.
    """
    (of_actor, of_critic, of_cell), adam = fading(discount, *lambdas), clipped_adam(rate)

    def traces(params):
        """That of the actor and that of the critic, with a decay for each weight."""
        cell, *others = functional.partition(params, learner)
        fill = lambda value, tree: jax.tree.map(lambda _: value, tree)
        decays = [
            (fill(of_cell, cell), *(fill(d, tree) for tree in others))
            for d in (of_actor, of_critic)
        ]
        return [eligibility(functional.combine(*parts)) for parts in decays]

    def init(params, seen):
        agent = begun(learner, params, carry, seen)
        z = [z_of.init(params, len(seen)) for z_of in traces(params)]
        return agent | {'z': z, 'moments': adam.init(params)}

    def act(agent, seen, key):
        def look(state, seen, key):
            (logits, (value,)), pull, state = learner.vjp(agent['params'], state, seen)
            action, no = jax.random.categorical(key, logits), jnp.zeros(1)
            chosen = jax.grad(lambda x: jax.nn.log_softmax(x)[action])(logits)
            of_spread = pull((jax.grad(spread)(logits), no))
            grads = [pull((chosen, no)), pull((0 * logits, no + 1))]
            return action, Acted(value, value, True, grads, state, of_spread)

        return by_sample(look, agent, seen, key)

    def update(agent, acted, rewards, done):
        params, before, z_of = agent['params'], agent['before'], traces(agent['params'])
        delta = td_error(before, acted.value, discount)
        uphill = (of.weigh(e, delta) for of, e in zip(z_of, agent['z']))
        down = lambda p, v, s: -p - critic * v - entropy * s.mean(0)
        grads = jax.tree.map(down, *uphill, acted.more)
        updates, moments = adam.update(grads, agent['moments'], params)
        z = [
            of.update(*of_head, before.going_on)
            for of, *of_head in zip(z_of, agent['z'], acted.grads)
        ]
        return {
            'params': optax.apply_updates(params, updates),
            'before': paid(acted.value, rewards, done),
            'state': restarted(acted.state, done, carry),
            'z': z,
            'moments': moments,
            't': agent['t'] + 1,
        }

    return Agent(init, act, update)


class Step(NamedTuple):
    """What PPO keeps of a step: the log-probability of the action, and for the loss its advantage
    and what its value is to be.
    """

    seen: jax.Array
    action: jax.Array
    chance: jax.Array
    value: jax.Array
    reward: jax.Array
    gain: Any = None
    aim: Any = None


def ppo(
    learner, carry, discount=0.99, lam=0.95, window=32, epochs=4, rate=3e-3, entropy=0.01, **how
) -> Agent:
    """PPO (Schulman et al. 2017, arXiv:1707.06347) by windows, whose traces reach back beyond them.
    ``how``: of ``learner.sequence_grad``; inside='exact', keep_trace=False for truncated BPTT."""
    (decay,), adam = fading(discount, lam), clipped_adam(rate)

    def loss(outputs, step):
        logits, (value,) = outputs
        ratio = jnp.exp(jax.nn.log_softmax(logits)[step.action] - step.chance)
        gain = jnp.minimum(ratio * step.gain, jnp.clip(ratio, 0.8, 1.2) * step.gain)
        return 0.5 * (value - step.aim) ** 2 - gain - entropy * spread(logits)

    grad = jax.vmap(learner.sequence_grad(loss, None, **how), (None, 0, 1, 1, None, (1, None)))

    def init(params, seen):
        if not isinstance(window, int) or window < 1 or window * len(seen) < 2:
            raise OptionError(f'window is {window!r} and the batch {len(seen)}; give two steps.')
        agent, none = begun(learner, params, carry, seen), jnp.zeros((window, len(seen)))
        steps = Step(jnp.zeros((window, *seen.shape)), none.astype(int), none, none, none)
        done = jnp.zeros((window + 1, len(seen)), bool)  # with that of the step before the window
        agent |= {'steps': steps, 'done': done, 'now': agent['state'].carry}
        return agent | {'moments': adam.init(params)}

    def act(agent, seen, key):
        def look(now, seen, key):
            (logits, (value,)), now = learner.cell(agent['params'], now, seen)
            action = jax.random.categorical(key, logits)
            more = seen, action, jax.nn.log_softmax(logits)[action]
            return action, Acted(value, value, True, (), now, more)

        return by_sample(look, agent | {'state': agent['now']}, seen, key)

    def learn(agent, last):
        """From a window, now that the value of what followed is known."""
        steps, done = agent['steps'], agent['done']
        following = jnp.concatenate([steps.value[1:], last[None]])
        delta = steps.reward + discount * ~done[1:] * following - steps.value
        back = lambda later, of: (of[0] + decay * of[1] * later,) * 2
        _, gain = jax.lax.scan(back, 0 * last, (delta, ~done[1:]), reverse=True)
        scaled = (gain - gain.mean()) / (gain.std() + 1e-8)
        steps, state = steps._replace(gain=scaled, aim=gain + steps.value), agent['state']
        for epoch in range(epochs):  # the state goes on with the weights that acted
            found = grad(agent['params'], state, steps.seen, steps, None, (done[:-1], carry))
            grads = jax.tree.map(lambda g: g.mean(0), found.grads)
            updates, moments = adam.update(grads, agent['moments'])
            agent |= {'params': optax.apply_updates(agent['params'], updates), 'moments': moments}
            agent |= {} if epoch else {'state': found.state}
        return agent | {'done': done.at[0].set(done[-1])}

    def update(agent, acted, rewards, done):
        t, step = agent['t'], Step(*acted.more, *paid(acted.value, rewards, done)[:2])
        at, same = t % window, lambda agent, _: agent
        agent = jax.lax.cond((at == 0) & (t > 0), learn, same, agent, acted.value)
        steps = jax.tree.map(lambda x, v: x.at[at].set(v), agent['steps'], step)
        dones = agent['done'].at[at + 1].set(done)
        carried = restarted(agent['state'].replace(carry=acted.state), done, carry).carry
        return agent | {'steps': steps, 'done': dones, 'now': carried, 't': t + 1}

    return Agent(init, act, update)


# what goes with all of them ----------------------------------------------------------------------


def normalised(agent: Agent, discount=0.99) -> Agent:
    """The agent with observations that have mean 0 and variance 1 by what was seen until now, and
    rewards over the deviation of the discounted return (stream-x: Elsayed et al. 2024,
    arXiv:2410.14606; moments by Welford 1962, for a batch by Chan, Golub and LeVeque 1979). What
    was always the same, but for rounding, keeps its scale.
    """
    fading(discount)

    def counted(known, x):
        n, mean, squares = known
        off, total = x.mean(0) - mean, n + len(x)
        squares = squares + ((x - x.mean(0)) ** 2).sum(0) + off**2 * n * len(x) / total
        return total, mean + off * len(x) / total, squares

    def deviation(known):
        n, mean, squares = known
        varied = squares > n * (1e-6 * mean) ** 2
        return jnp.where(varied, jnp.sqrt(squares / jnp.maximum(n - 1, 1)), 1.0) + 1e-8

    def init(params, seen):
        none = jnp.zeros(()), jnp.zeros(seen.shape[1:]), jnp.zeros(seen.shape[1:])
        of_return = (jnp.zeros(()),) * 3
        more = {'seen': none, 'paid': of_return, 'return': jnp.zeros(len(seen))}
        return {'agent': agent.init(params, seen), **more}

    def act(now, seen, key):
        known = counted(now['seen'], seen)
        actions, acted = agent.act(now['agent'], (seen - known[1]) / deviation(known), key)
        return actions, (acted, known)

    def update(now, acted, rewards, done):
        acted, known = acted
        returns = discount * now['return'] + rewards
        of_return = counted(now['paid'], returns)
        inner = agent.update(now['agent'], acted, rewards / deviation(of_return), done)
        returns = jnp.where(done, 0.0, returns)
        return {'agent': inner, 'seen': known, 'paid': of_return, 'return': returns}

    return Agent(init, act, update)


def sparse(shape) -> jax.Array:
    """Weights for a layer: nine tenths of the inputs of each unit are cut off, the others uniform
    within one over the root of their number (sparse initialisation of stream-x, as above).
    """
    inputs, units = shape
    bound, keys = 1 / np.sqrt(inputs), brainstate.random.split_keys(2)
    drawn = jax.random.uniform(keys[0], shape, minval=-bound, maxval=bound)
    rank = jnp.argsort(jax.random.uniform(keys[1], shape), 0)
    return jnp.where(rank < int(np.ceil(0.9 * inputs)), 0.0, drawn)


class Network(brainstate.nn.Module):
    """A cell, a hidden layer that sees the input too, and heads by name with their sizes."""

    def __init__(self, cell, inputs: int, units: int = 32, w_init=None, **heads: int):
        super().__init__()
        how = {} if w_init is None else {'w_init': w_init}
        self.cell, self.names = cell, tuple(heads)
        self.hidden = nn.Linear(cell.out_size[-1] + inputs, units, **how)
        for name, size in heads.items():
            setattr(self, name, nn.Linear(units, size, **how))

    def update(self, x):
        wide = jnp.pad(x, (0, self.cell.in_size[-1] - len(x)))
        h = jax.nn.leaky_relu(self.hidden(jnp.concatenate([self.cell(wide), x])))
        stopped = jax.lax.stop_gradient(h)
        return tuple(getattr(self, n)(stopped if n == 'h' else h) for n in self.names)


RING = {'r_min': 0.8, 'r_max': 0.999, 'max_phase': 0.6}
TIMES = {'timescale': (1.0, 1000.0)}
CELLS: dict[str, Callable] = {  # of so many inputs
    'RTU': lambda inputs: nn.RTUCell(inputs, 32, activation=lambda x: x, **RING),
    'minGRU': lambda inputs: nn.MinGRUCell(inputs, 32, **TIMES),
    'GRU': lambda inputs: nn.GRUCell(inputs, 32, **TIMES),
    'LRU': lambda inputs: nn.LRUCell(max(inputs, 32), 32, **RING),
    'eLSTM': lambda inputs: nn.ELSTMCell(inputs, 32, **TIMES),
}
AGENTS: dict[str, tuple[Callable, Callable]] = {  # and the heads of its network
    'q_lambda': (q_lambda, lambda n: {'q': n}),
    'intentional_q': (intentional_q, lambda n: {'q': n}),
    'qrc_lambda': (qrc_lambda, lambda n: {'q': n, 'h': n}),
    'actor_critic': (actor_critic, lambda n: {'policy': n, 'value': 1}),
    'ppo': (ppo, lambda n: {'policy': n, 'value': 1}),
}


# training ----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Steps, in rows of samples: rewards, flags, returns of the episode until now, values; of a
    :func:`normalised` agent, whose values are in another unit, rewards instead.
    """

    rewards: jax.Array
    done: jax.Array
    returns: jax.Array
    values: jax.Array


def of_episodes(rows: Rows):
    """The mean return of the episodes that ended."""
    return jnp.where(rows.done, rows.returns, 0).sum() / rows.done.sum()


def train(
    env, agent, model, rule='d_rtrl', steps=200_000, batch=1, seeds=(1, 2, 3), score=of_episodes
):
    """``(curves, seconds)`` of one program for all seeds: the score of each of 40 parts of the
    steps, ``(seeds, 40)``. ``agent(learner, carry)`` and ``model()`` make what learns. Without a
    rule, None, the gradient is that of the same step, and in PPO of its windows.
    """
    if steps < 40 * batch:
        raise OptionError(f'steps is {steps}; give {40 * batch} at least, 40 for each sample.')
    env, params = environments.vector(env), []
    for seed in seeds:
        brainstate.random.seed(seed)
        learner, weights, carry = compile_model(model(), rule, jnp.zeros(env.env.inputs)).pure()
        params.append(weights)
    made = agent(learner, carry)

    def step(now, key):
        state, states, returns = now
        of_act, of_step = jax.random.split(key)
        actions, acted = made.act(state, env.observe(states), of_act)
        states, rewards, done = env.step(of_step, states, actions)
        state, returns = made.update(state, acted, rewards, done), returns + rewards
        rows = Rows(rewards, done, returns, getattr(acted, 'value', rewards))
        return (state, states, jnp.where(done, 0.0, returns)), rows

    def part(now, keys):
        now, rows = jax.lax.scan(step, now, keys)
        return now, score(rows)

    def run(params, key):
        of_start, of_steps = jax.random.split(key)
        states = env.reset(of_start, batch)
        start = made.init(params, env.observe(states)), states, jnp.zeros(batch)
        return jax.lax.scan(part, start, jax.random.split(of_steps, (40, steps // batch // 40)))[1]

    given = (
        jax.tree.map(lambda *x: jnp.stack(x), *params),
        jax.vmap(jax.random.key)(np.array(seeds)),
    )
    compiled = jax.jit(jax.vmap(run)).lower(*given).compile()
    start = time.perf_counter()
    curves = np.asarray(compiled(*given))
    return curves, time.perf_counter() - start


TASKS: dict[str, Callable] = {  # of a length
    'chain': environments.chain,
    'distractors': partial(environments.chain, distractors=3),
    'tmaze': environments.t_maze,
    'repeat_previous': environments.repeat_previous,
    'repeat_first': lambda _: environments.repeat_first(),
    'cartpole': lambda _: environments.cartpole(),
}


PICTURE = Path(__file__).parent / 'output' / 'agents.png'


def main(argv=None, path=PICTURE):
    """Train an agent, print and draw its curve, and return it, ``(seeds, 40)``."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--agent', choices=AGENTS, default='intentional_q')
    parser.add_argument('--cell', choices=CELLS, default='minGRU')
    parser.add_argument('--rule', default='d_rtrl', help='as braintrace.compile takes it')
    parser.add_argument('--task', default='chain', help=f'{", ".join(TASKS)}, or gymnax:NAME')
    parser.add_argument('--length', type=int, default=64, help='steps to remember')
    parser.add_argument('--steps', type=lambda text: int(float(text)), default=200_000)
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--seeds', type=int, default=3)
    asked = parser.parse_args(argv)
    if asked.task.startswith('gymnax:'):
        env = environments.from_gymnax(asked.task.removeprefix('gymnax:'))
    elif asked.task in TASKS:
        env = TASKS[asked.task](asked.length)
    else:
        parser.error(f'--task is {asked.task!r}: give one of {", ".join(TASKS)}, or gymnax:NAME')
    make, heads = AGENTS[asked.agent]
    seeds = tuple(range(1, asked.seeds + 1))
    curves, seconds = train(
        env,
        lambda learner, carry: normalised(make(learner, carry)),
        lambda: Network(CELLS[asked.cell](env.inputs), env.inputs, **heads(env.actions)),
        asked.rule,
        asked.steps,
        asked.batch,
        seeds,
    )
    print(f'{env.name}: {asked.agent}, {asked.cell}, {asked.rule}, {seconds:.0f} s')
    tenths = np.nanmean(curves.reshape(len(seeds), 10, 4), 2)
    for seed, row in zip(seeds, tenths):
        print(f'seed {seed}: return by tenths of the steps', *(f'{x:.2f}' for x in row))
    figure, axis = plt.subplots(figsize=(7, 4), layout='constrained')
    at = np.linspace(0, asked.steps, curves.shape[1])
    axis.plot(at, curves.T, color='#0072B2', alpha=0.3)
    axis.plot(at, np.nanmedian(curves, 0), color='#0072B2')
    axis.set(xlabel='steps', ylabel='return of an episode', title=env.name)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return curves


if __name__ == '__main__':
    main()
