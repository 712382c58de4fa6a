"""Each agent of ``examples/agents.py`` makes the published update: here once more in NumPy, with an
explicit influence matrix, sample by sample.
"""

import functools
import inspect

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError, StructureError
from braintrace.tasks import environments
from tests.functional.plain import drawn
from tests.precision import float64 as float64
from tests.test_examples import load

T, B, I, H, A = 14, 2, 3, 4, 3
DISCOUNT, LAM = 0.9, 0.7
pytestmark = pytest.mark.usefixtures('float64')


@pytest.fixture(scope='module')
def agents():
    return load('agents', 'matplotlib', 'optax')


def cell_of(names, ops):
    def cell(p, h, x):
        h = ops.element_wise(p['a'], lambda a: a) * h + jnp.tanh(ops.matmul(x, p['w']))
        return tuple(h @ p[name] for name in names), h

    return cell


class Plain:
    """The ops of the cell without the package."""

    element_wise = staticmethod(lambda a, f: f(a))
    matmul = staticmethod(jnp.matmul)


def weights(names, sizes):
    p = {'a': 0.5 * drawn(H, seed=1), 'w': drawn(I, H, seed=2)}
    return p | {n: 0.5 * drawn(H, k, seed=3 + i) for i, (n, k) in enumerate(zip(names, sizes))}


def experience(steps=T):
    done = np.zeros((steps, B), bool)
    done[5, 0] = done[9, 1] = done[10, 0] = True
    return drawn(steps, B, I, seed=7), np.asarray(drawn(steps, B, seed=8)), done


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@functools.cache
def derived(names, sizes):
    """Compiled once for all samples: outputs and state of a step, and their derivatives with
    respect to the weights, as one vector, and to the state.
    """
    cell, back = cell_of(names, Plain), jax.flatten_util.ravel_pytree(weights(names, sizes))[1]

    def step(w, h, x):
        return cell(back(w), h, x)

    return jax.jit(lambda *at: (step(*at), jax.jacfwd(step, argnums=(0, 1))(*at)))


class Influence:
    """Real-time recurrent learning by its definition, of one sample: the dense derivative of the
    state with respect to all weights.
    """

    def __init__(self, names, p):
        self.derived = derived(names, tuple(p[name].shape[1] for name in names))
        self.restart(len(flat(p)))

    def restart(self, size):
        self.h, self.m = np.zeros(H), np.zeros((H, size))

    def __call__(self, w, x):
        """Outputs, and the derivative of each of their numbers."""
        (outputs, h), (of_outputs, (h_w, h_h)) = self.derived(w, self.h, x)
        grads = [np.asarray(of_w) + np.asarray(of_h) @ self.m for of_w, of_h in of_outputs]
        self.h, self.m = np.asarray(h), np.asarray(h_w) + np.asarray(h_h) @ self.m
        return [np.asarray(o) for o in outputs], grads


class Adam:
    """Kingma and Ba 2015, downhill, with a bound of 1 on the norm if there is one."""

    def __init__(self, rate, size, bound=np.inf):
        self.rate, self.bound, self.t = rate, bound, 0
        self.m, self.v = np.zeros(size), np.zeros(size)

    def __call__(self, w, g):
        g = g * min(1, self.bound / np.linalg.norm(g)) if g.any() else g
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return w - self.rate * m / (np.sqrt(v) + 1e-8)


def played(agent, params, experience, seed=0):
    """Weights after each step, and the actions and flags of what is best."""
    xs, rewards, done = experience
    now, rows = agent.init(params, xs[0]), []
    act, update = jax.jit(agent.act), jax.jit(agent.update)
    for t in range(len(xs)):
        actions, acted = act(now, xs[t], jax.random.fold_in(jax.random.key(seed), t))
        now = update(now, acted, rewards[t], done[t])
        rows.append((flat(now['params']), np.asarray(actions)))
    return [np.stack(x) for x in zip(*rows)]


def learner_of(names):
    return functional.online(cell_of(names, braintrace), rules.d_rtrl())


def values(names, p, xs, actions, done, change):
    """Q(lambda) of Watkins, whose update ``change(delta, w, samples)`` makes, sample by sample; the
    weights after each step.
    """
    w, nets, rows = flat(p), [Influence(names, p) for _ in range(B)], []
    samples = [{'z': 0 * w, 'n': 0.0, 'first': True} for _ in range(B)]
    for t in range(len(xs[0])):
        looked = [net(w, xs[0][t, b]) for b, net in enumerate(nets)]
        delta = np.zeros(B)
        for b, ((q, *_), _) in enumerate(looked):
            if t:
                on = 1.0 - done[t - 1, b]
                delta[b] = xs[1][t - 1, b] + DISCOUNT * on * q.max() - samples[b]['q']
        if t:
            for s, ((q, *_), (g, *_)) in zip(samples, looked):
                s['top'] = g[np.argmax(q)]
        w = change(delta if t else None, w, samples)
        for b, ((q, *others), (g, *of_others)) in enumerate(looked):
            s, a = samples[b], actions[t, b]
            keep = DISCOUNT * LAM * float(t > 0 and not done[t - 1, b]) * float(a == np.argmax(q))
            s['z'], s['n'] = keep * s['z'] + g[a], keep**2 * s['n'] + 1
            s['q'], s['g'], s['on'] = q[a], g[a], 1.0 - done[t, b]
            s['keep'] = keep
            if others:
                s['h'], s['of_h'] = others[0][a], of_others[0][a]
                s['x'] = keep * s.get('x', 0.0) + s['h']
                s['y'] = keep * s.get('y', 0 * w) + s['of_h']
            if done[t, b]:
                nets[b].restart(len(w))
        rows.append(w)
    return np.stack(rows)


def test_q_lambda_makes_the_published_step(agents):
    names, p, seen = ('q',), weights(('q',), (A,)), experience()
    agent = agents.q_lambda(learner_of(names), jnp.zeros(H), DISCOUNT, LAM, 0.7, 1.5, explore=8)

    def change(delta, w, samples):
        if delta is None:
            return w
        for d, s in zip(delta, samples):
            size = 0.7 * 1.5 * max(abs(d), 1) * np.abs(s['z']).sum()
            w = w + min(0.7, 0.7 / size) * d * s['z'] / B
        return w

    got, actions = played(agent, p, seen)
    np.testing.assert_allclose(got, values(names, p, seen, actions, seen[2], change), atol=1e-10)
    assert np.abs(got[-1] - flat(p)).max() > 0.05


def test_an_intentional_step_moves_values_by_the_part_that_is_intended(agents):
    names, p, seen = ('q',), weights(('q',), (A,)), experience()
    squares, counts = np.zeros(len(flat(p))), 0

    def change(delta, w, samples):
        nonlocal squares, counts
        z = [s['z'] for s in samples]
        squares, counts = 0.99 * squares + 0.01 * np.mean(np.square(z), 0), counts + 1
        if delta is None:
            return w
        scale = 1 / (np.sqrt(squares / (1 - 0.99**counts)) + 1e-8)
        for d, s in zip(delta, samples):
            step = 0.3 * s['n'] / (s['z'] @ (scale * s['z'])) * d * scale * s['z']
            assert s['z'] @ step == pytest.approx(0.3 * d * s['n'])
            w = w + step / B
        return w

    agent = agents.intentional_q(learner_of(names), jnp.zeros(H), DISCOUNT, LAM, 0.3, 0.99, 8)
    got, actions = played(agent, p, seen)
    np.testing.assert_allclose(got, values(names, p, seen, actions, seen[2], change), atol=1e-9)


def test_qrc_lambda_goes_down_the_gradient_of_the_projected_bellman_error(agents):
    names = 'q', 'h'
    p, seen = weights(names, (A, A)), experience()
    head = flat({n: np.full(np.shape(x), float(n == 'h')) for n, x in p.items()})
    adam = Adam(0.02, len(flat(p)))

    def change(delta, w, samples):
        if delta is None:
            return adam(w, 1.0 * head * w)
        up = 0
        for d, s in zip(delta, samples):
            of_delta = DISCOUNT * s['on'] * s['top'] - s['g']
            of_q = d * s['z'] - s['x'] * of_delta - s['h'] * s['g']
            up = up + (of_q + d * s['y'] - s['h'] * s['of_h']) / B
        return adam(w, head * w - up)

    def cell(p, h, x):
        (q, _), h = cell_of(names, braintrace)(p, h, x)
        return (q, jax.lax.stop_gradient(h) @ p['h']), h

    how = DISCOUNT, LAM, 0.02, 1.0
    agent = agents.qrc_lambda(functional.online(cell), jnp.zeros(H), *how, explore=8)
    got, actions = played(agent, p, seen)
    expected = values(names, p, seen, actions, seen[2], lambda *a: change(*cut(*a, head)))
    np.testing.assert_allclose(got, expected, atol=1e-9)


def cut(delta, w, samples, head):
    """No gradient of h into what both heads share."""
    for s in samples:
        for name in ('of_h', 'y'):
            if name in s:
                s[name] = s[name] * head
    return delta, w, samples


def test_actor_critic_has_a_trace_for_each_head_and_a_lambda_for_each_group(agents):
    names, lams, seen = ('policy', 'value'), (0.7, 0.5, 0.9), experience()
    p = weights(names, (A, 1))
    how = {'entropy': 0.1, 'critic': 0.3}
    agent = agents.actor_critic(learner_of(names), jnp.zeros(H), DISCOUNT, lams, 0.02, **how)
    got, actions = played(agent, p, seen)
    xs, rewards, done = seen
    of_cell = flat({n: np.full(np.shape(x), float(n in 'aw')) for n, x in p.items()})
    decays = [DISCOUNT * (of_cell * lams[2] + (1 - of_cell) * lam) for lam in lams[:2]]
    w, nets, adam = flat(p), [Influence(names, p) for _ in range(B)], Adam(0.02, len(flat(p)), 1.0)
    traces, old = np.zeros((B, 2, len(w))), [None] * B
    for t in range(T):
        down, fresh = 0, []
        for b in range(B):
            (logits, (value,)), (of_logits, of_value) = nets[b](w, xs[t, b])
            chance = np.exp(logits) / np.exp(logits).sum()
            if t:
                on = 1.0 - done[t - 1, b]
                delta = rewards[t - 1, b] + DISCOUNT * on * value - old[b]
                down = down - delta * (traces[b, 0] + 0.3 * traces[b, 1]) / B
            of_chance = chance[:, None] * (of_logits - chance @ of_logits)
            down = down + 0.1 * (np.log(chance) @ of_chance) / B
            fresh.append((of_logits[actions[t, b]] - chance @ of_logits, of_value[0], value))
        w = adam(w, down)
        np.testing.assert_allclose(got[t], w, atol=1e-9)
        for b, (of_action, of_value, value) in enumerate(fresh):
            on = float(t > 0 and not done[t - 1, b])
            for k, g in enumerate((of_action, of_value)):
                traces[b, k] = on * decays[k] * traces[b, k] + g
            old[b] = value
            if done[t, b]:
                nets[b].restart(len(w))


@pytest.mark.parametrize('traced', [True, False], ids=['traced', 'truncated'])
def test_ppo_learns_from_a_window_with_the_trace_of_what_was_before(agents, traced):
    names, window, epochs = ('policy', 'value'), 5, 3
    how = {} if traced else {'inside': 'exact', 'keep_trace': False}
    p, seen = weights(names, (A, 1)), experience(T)
    options = DISCOUNT, LAM, window, epochs, 0.05
    agent = agents.ppo(learner_of(names), jnp.zeros(H), *options, entropy=0.1, **how)
    got, actions = played(agent, p, seen)
    xs, rewards, done = seen
    w, size = flat(p), len(flat(p))
    nets, adam, rows = [Influence(names, p) for _ in range(B)], Adam(0.05, size, 1.0), []
    log_chance = lambda logits: logits - np.log(np.exp(logits).sum())
    acting, kept = [Influence(names, p) for _ in range(B)], [[] for _ in range(B)]
    for t in range(T):
        for b in range(B):
            (logits, (value,)), _ = acting[b](w, xs[t, b])
            kept[b].append((log_chance(logits)[actions[t, b]], value))
            if done[t, b]:
                acting[b].restart(size)
        if t and t % window == 0:
            begin, gains = t - window, np.zeros((window, B))
            for b in range(B):
                later = 0.0
                for k in reversed(range(window)):
                    s, on = begin + k, 1.0 - done[begin + k, b]
                    delta = rewards[s, b] + DISCOUNT * on * kept[b][s + 1][1] - kept[b][s][1]
                    later = gains[k, b] = delta + DISCOUNT * LAM * on * later
            scaled = (gains - gains.mean()) / (gains.std() + 1e-8)
            starts = [(net.h, net.m) for net in nets]
            for epoch in range(epochs):
                grad = 0
                for b, net in enumerate(nets):
                    net.h, net.m = starts[b]
                    for k in range(window):
                        s = begin + k
                        if s and done[s - 1, b]:
                            net.restart(size)
                        (logits, (value,)), (of_logits, of_value) = net(w, xs[s, b])
                        logs, chance = log_chance(logits), np.exp(log_chance(logits))
                        ratio = np.exp(logs[actions[s, b]] - kept[b][s][0])
                        g = scaled[k, b]
                        held = ratio * g <= np.clip(ratio, 0.8, 1.2) * g
                        of_action = of_logits[actions[s, b]] - chance @ of_logits
                        of_chance = chance[:, None] * (of_logits - chance @ of_logits)
                        aim = gains[k, b] + kept[b][s][1]
                        step = (value - aim) * of_value[0] + 0.1 * (logs @ of_chance)
                        grad = grad + (step - held * ratio * g * of_action) / (window * B)
                if epoch == 0:
                    after = [(net.h, net.m) for net in nets]
                w = adam(w, grad)
            for net, (h, m) in zip(nets, after):
                net.h, net.m = h, m * traced
        rows.append(w)
    np.testing.assert_allclose(got, np.stack(rows), atol=1e-9)
    assert np.abs(got[-1] - flat(p)).max() > 0.05


def test_the_normaliser_is_that_of_all_that_was_seen(agents):
    told = []
    probe = agents.Agent(
        lambda params, seen: {'params': params},
        lambda agent, seen, key: (told.append(['seen', np.asarray(seen)]), 0),
        lambda agent, acted, rewards, done: told.append(['paid', np.asarray(rewards)]) or agent,
    )
    agent, (xs, rewards, done) = agents.normalised(probe, 0.9), experience()
    now, returns, every = agent.init({}, xs[0]), np.zeros(B), []
    for t in range(T):
        _, acted = agent.act(now, xs[t], None)
        now = agent.update(now, acted, rewards[t], done[t])
        all_seen = np.asarray(xs[: t + 1]).reshape(-1, I)
        want = (xs[t] - all_seen.mean(0)) / all_seen.std(0, ddof=1)
        np.testing.assert_allclose(told[2 * t][1], want, rtol=1e-6)
        returns = 0.9 * returns + rewards[t]
        every += list(returns)
        scaled = rewards[t] / np.std(every, ddof=1)
        np.testing.assert_allclose(told[2 * t + 1][1], scaled, rtol=1e-6)
        returns = returns * ~done[t]


@pytest.mark.parametrize('batch', [1, 3, 8])
def test_what_was_always_the_same_keeps_its_scale(agents, batch):
    """Here each episode is one step, so every return is its reward."""
    told, x = [], jnp.full((batch, 2), 0.1)
    probe = agents.Agent(
        lambda params, seen: {},
        lambda agent, seen, key: (told.append(seen), 0),
        lambda agent, acted, rewards, done: told.append(rewards) or agent,
    )
    agent = agents.normalised(probe, 0.9)
    now = agent.init({}, x)
    for _ in range(3):
        _, acted = agent.act(now, x, None)
        now = agent.update(now, acted, x[:, 0], jnp.ones(batch, bool))
        np.testing.assert_allclose(told[-2], 0, atol=1e-12)
        np.testing.assert_allclose(told[-1], 0.1, rtol=1e-6)


def test_sparse_weights_cut_off_nine_tenths_of_the_inputs_of_each_unit(agents):
    weight = np.asarray(agents.sparse((20, 6)))
    assert (np.count_nonzero(weight, 0) == 2).all() and np.abs(weight).max() < 1 / np.sqrt(20)
    assert len({tuple(np.flatnonzero(column)) for column in weight.T}) > 1


def test_the_flag_that_comes_with_the_last_reward_resets_the_memory(agents):
    """An environment that resets itself shows the new episode at the next step: its memory is that
    of a new agent, and no step earlier or later.
    """
    env = environments.vector(environments.chain(3))
    agent = agents.q_lambda(learner_of(('q',)), jnp.zeros(H), explore=1)
    states = env.reset(jax.random.key(0), B)
    now = agent.init(weights(('q',), (2,)), env.observe(states))
    act, go, update = jax.jit(agent.act), jax.jit(env.step), jax.jit(agent.update)
    for t in range(6):
        actions, acted = act(now, env.observe(states), jax.random.key(t))
        states, rewards, done = go(jax.random.key(t), states, actions)
        now = update(now, acted, rewards, done)
        steps = now['state'].t.tolist()
        assert steps == [(t + 1) % 4] * B and bool(done.all()) == (t == 3)
        assert (not np.asarray(now['state'].carry).any()) == (t == 3)
        assert (np.asarray(env.observe(states))[:, 1] == 1).all() == (t == 3)
    fresh = jax.tree.leaves(agent.init(now['params'], env.observe(states))['z'])
    assert not any(np.asarray(e).any() for e in fresh)


def test_what_is_not_one_for_each_sample_is_refused(agents):
    agent, x = agents.q_lambda(learner_of(('q',)), jnp.zeros(H)), drawn(B, I)
    now = agent.init(weights(('q',), (A,)), x)
    _, acted = agent.act(now, x, jax.random.key(0))
    with pytest.raises(StructureError, match=r'rewards has shape \[\], and 2'):
        agent.update(now, acted, jnp.ones(()), jnp.zeros(B, bool))
    with pytest.raises(StructureError, match=r'done has shape \[3\], and 2'):
        agent.update(now, acted, jnp.ones(B), jnp.zeros(3, bool))


P, X = weights(('q', 'h'), (A, A)), drawn(1, I)
TWO, ONE, H0 = learner_of(('q', 'h')), learner_of(('q',)), jnp.zeros(H)
REFUSED = [  # what is said, and a call of the module of agents
    (
        r"'theta'.*\['a', 'h', 'q', 'w'\]",
        lambda a: a.qrc_lambda(TWO, H0, second='theta').init(P, X),
    ),
    *(
        (f'window is {n} and the batch 1', lambda a, n=n: a.ppo(TWO, H0, window=n).init(P, X))
        for n in (0, 1, 2.5)
    ),
    ('79; give 80', lambda a: a.train(environments.chain(3), None, None, steps=79, batch=2)),
    (r'discount is 1\.5', lambda a: a.q_lambda(ONE, H0, discount=1.5, lam=0.5)),
    (r'discount is 1\.5', lambda a: a.ppo(ONE, H0, discount=1.5, lam=0.5)),
    (r'discount is 1\.5', lambda a: a.normalised(None, 1.5)),
    *(
        ('from 0 to 1', lambda a, name=name, lam=lam: a.AGENTS[name][0](ONE, H0, lam=lam))
        for name in ('q_lambda', 'intentional_q', 'qrc_lambda', 'ppo')
        for lam in (-0.1, 1.5)
    ),
    ('from 0 to 1', lambda a: a.actor_critic(ONE, H0, lambdas=(0.9, 0.9, -0.1))),
]


@pytest.mark.parametrize('said, call', REFUSED, ids=[said for said, _ in REFUSED])
def test_options_that_would_teach_nothing_are_refused(agents, said, call):
    with pytest.raises(OptionError, match=said):
        call(agents)


def test_a_learner_of_a_batch_is_refused(agents):
    """Its samples may depend on each other; an agent has a state and gradients for each of them."""

    def cell(p, h, x):
        h = 0.5 * h + jnp.tanh(braintrace.matmul(x - x.mean(0), p['w']))
        return (h @ p['q'],), h

    learner, p = functional.online(cell), {'w': drawn(I, H), 'q': drawn(H, A)}
    with pytest.raises(StructureError, match=r'heads return \(\[2, 3\],\).*for one sample'):
        agents.q_lambda(learner, jnp.zeros((B, H))).init(p, drawn(B, I))


def test_an_agent_is_sixty_lines_at_most(agents):
    for make, _ in agents.AGENTS.values():
        assert len(inspect.getsource(make).splitlines()) <= 60
