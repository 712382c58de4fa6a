"""Agents that learn at every step, beside other ways to the gradient in equally many steps.

    python benchmarks/acting.py                    every row that is not there yet
    python benchmarks/acting.py --again --only 'chain 256, *'    these rows, once more
    python benchmarks/acting.py --quick            one row, short; keeps nothing

The agents are those of ``examples/agents.py``, each with ten seeds in one compiled program. The
records go to ``benchmarks/results/acting.json``; ``benchmarks/results_page.py`` shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from printer import by_name, figure, folded, listed, look, table
from runner import HERE, RESULTS, in_turn, load, measure, options, seconds

from braintrace import compile as compile_model
from braintrace.functional import OnlineState
from braintrace.tasks import environments
from braintrace.tasks.environments import Environment

sys.path.insert(0, str(HERE.parent / 'examples'))
from agents import AGENTS, CELLS, Network, Rows, normalised, of_episodes, train  # noqa: E402

PATH = RESULTS / 'acting.json'
SEEDS = tuple(range(1, 11))


class Windows:
    """Reverse mode through the last ``length`` steps, at every step and with its weights: all of
    them (rolling), or those since the last border of a window (chunked). What was before a window
    is a constant.

    A learner as an agent calls it, whose carry holds the window; :func:`of_agent` puts it in the
    place of one with a rule.
    """

    def __init__(self, learner, length: int, rolling: bool):
        self.learner, self.length, self.rolling = learner, length, rolling
        self.routes = learner.routes

    def carry(self, carry, x):
        past = jax.tree.map(lambda h: jnp.zeros((self.length, *h.shape), h.dtype), carry)
        return {'now': carry, 'past': past, 'seen': jnp.zeros((self.length, *x.shape)), 't': 0}

    def cell(self, params, memory, x):
        add = lambda rows, new: jnp.concatenate([rows[1:], new[None]])
        past, seen = jax.tree.map(add, memory['past'], memory['now']), add(memory['seen'], x)
        t, length = memory['t'], self.length
        steps = jnp.minimum(t + 1, length) if self.rolling else t % length + 1

        def step(h, now):
            place, x = now
            outputs, new = self.learner.cell(params, h, x)
            return jax.tree.map(
                lambda a, b: jnp.where(place >= length - steps, a, b), new, h
            ), outputs

        start = jax.lax.stop_gradient(jax.tree.map(lambda rows: rows[length - steps], past))
        h, outputs = jax.lax.scan(step, start, (jnp.arange(length), seen), unroll=min(length, 5))
        memory = {'now': h, 'past': past, 'seen': seen, 't': t + 1}
        return jax.tree.map(lambda rows: rows[-1], outputs), memory

    def init(self, params, memory, x):
        return OnlineState(jax.tree.map(jnp.asarray, memory), {}, jnp.zeros((), jnp.int32))

    def vjp(self, params, state, x):
        run = lambda params: self.cell(params, state.carry, x)
        outputs, pull, memory = jax.vjp(run, params, has_aux=True)
        return outputs, lambda cotangent: pull(cotangent)[0], state.replace(carry=memory)


class Way(NamedTuple):
    """An agent with its options, its cell, its way to the gradient (a rule, or windows of so many
    steps), and whether what it sees and gets is normalised.
    """

    agent: str
    cell: str
    way: str = 'D_RTRL'
    scaled: bool = False
    options: tuple = ()

    @property
    def name(self) -> str:
        return f'{SPOKEN[self.agent]}, {self.way}' + ', normalised' * self.scaled


SPOKEN = {
    'q_lambda': 'Q(lambda)',
    'intentional_q': 'intentional Q',
    'qrc_lambda': 'QRC(lambda)',
    'actor_critic': 'actor-critic',
    'ppo': 'PPO',
}


def parts(way: Way, env: Environment) -> tuple[Callable, Callable, str]:
    """``agent``, ``model`` and ``rule`` as :func:`agents.train` takes them."""
    make, heads = AGENTS[way.agent]
    kind, _, length = way.way.partition(' ')
    rolling, windows = kind == 'rolling', kind in (*WINDOWS, 'whole')

    def agent(learner, carry):
        how = dict(way.options)
        if windows and way.agent == 'ppo':  # the windows of its updates
            how |= {'inside': 'exact', 'keep_trace': False}
            how |= {'window': int(length)} if kind == 'chunked' else {}
        elif windows:
            learner = Windows(learner, int(length), rolling)
            carry = learner.carry(carry, jnp.zeros(env.inputs))
        made = make(learner, carry, **how)
        return normalised(made) if way.scaled else made

    def model():
        return Network(CELLS[way.cell](env.inputs), env.inputs, **heads(env.actions))

    return agent, model, 'same_step' if way.way == 'same step' else 'd_rtrl'


# the settings -----------------------------------------------------------------------------------


def turns(rows: Rows):
    """The part of the episodes that ended with a reward."""
    return (rows.done & (rows.rewards > 0)).sum() / rows.done.sum()


def of_half(rows: Rows):
    """The mean return of episodes, from -1 to 1, in 0 to 1."""
    return (of_episodes(rows) + 1) / 2


def off(discount: float, rows: Rows):
    """The squared error of values as predictions of the discounted return; the last quarter of the
    steps, whose return is not known yet, is left out.
    """
    back = lambda later, reward: (reward + discount * later,) * 2
    _, returns = jax.lax.scan(back, jnp.zeros(rows.rewards.shape[1]), rows.rewards, reverse=True)
    known = len(returns) * 3 // 4
    return jnp.mean((rows.values - returns)[:known] ** 2)


class Setting(NamedTuple):
    """Ways in one environment: steps of all samples together, samples, and the score; ``published``
    has the figure of others, ``differs`` what is not as theirs.
    """

    env: Environment
    ways: tuple[Way, ...]
    steps: int
    batch: int = 1
    score: Callable = of_episodes
    published: str = ''
    differs: str = ''

    @property
    def name(self) -> str:
        return f'{self.env.name}, batch of {self.batch}, {self.steps:,} steps'


LENGTHS = (8, 64, 256, 512)  # of the picture
WAYS = 'D_RTRL', 'same step'
WINDOWS = 'rolling', 'chunked'


def settings() -> list[Setting]:
    chain, some = environments.chain, (('explore', 20_000),)
    values = partial(Way, 'intentional_q', 'minGRU')
    both = tuple(values(way, True, some) for way in WAYS)
    plain = tuple(values(way, False, some) for way in WAYS)
    solved = 'solved by intentional Q with exact RTRL of minGRU, plain Q never above 64'
    told = {'published': solved, 'differs': 'inputs have no clock'}
    before = {'published': 'ours before: -0.02', 'differs': 'before: actor-critic with RTU'}
    every = (*both, *plain, Way('q_lambda', 'minGRU', options=some))
    found = [
        Setting(chain(256), every, 400_000, **told),
        Setting(chain(512), both, 400_000, published='not reported'),
        Setting(chain(256, 3), (*both, *plain), 800_000, 8, **before),
    ]
    mazes = (10, '.99, SnAp-1 .58, truncated .71'), (20, '.81, .50, .27'), (40, '.61, .49, .17')
    slow = (('explore', 100_000), ('part', 0.1))
    differs = 'their steps and agent are not known to us'
    maze, ways = environments.t_maze, tuple(values(way, True, slow) for way in WAYS)
    found += [
        Setting(maze(length), ways, 300_000, 1, turns, f'RTU {theirs}', differs)
        for length, theirs in mazes
    ]
    cards, deals = (('explore', 60_000), ('discount', 0.0)), (('window', 51), ('discount', 0.0))
    back = environments.repeat_previous(4), ', one step further back than Easy'
    decks = (
        (*back, 'intentional_q', 'RTU', cards, 400_000, 1, '.99'),
        (environments.repeat_first(), '', 'intentional_q', 'GRU', cards, 200_000, 1, '.48'),
        (environments.count_recall(), '', 'ppo', 'minGRU', deals, 400_000, 8, '.23'),
    )
    for env, differs, agent, cell, how, steps, batch, theirs in decks:
        ways, differs = (Way(agent, cell, 'D_RTRL', True, how),), 'discount 0' + differs
        found.append(Setting(env, ways, steps, batch, of_half, theirs, differs))
    how = ('discount', 1 - 1 / 40), ('explore', 1), ('lam', 0.95)
    ways = tuple(Way('intentional_q', 'RTU', way, options=how) for way in WAYS)
    told = '.059 (RTU, lambda .95)', 'our stimuli, trials and discount, after Rafiee et al.'
    conditioned, score = environments.trace_conditioning(40), partial(off, 1 - 1 / 40)
    found.append(Setting(conditioned, ways, 100_000, 1, score, *told))
    rolling = values('rolling 5', options=some)
    found += [Setting(chain(length, 3), (*plain, rolling), 250_000) for length in LENGTHS]
    few_steps = (('explore', 2000),)
    few = dict.fromkeys(AGENTS, few_steps) | {'ppo': (), 'actor_critic': (('rate', 2e-3),)}
    grid = [Way(agent, 'RTU', way, options=few[agent]) for agent in AGENTS for way in WAYS]
    grid += [Way('intentional_q', 'RTU', f'{way} 5', options=few_steps) for way in WINDOWS]
    windows = ('chunked 5', 32), ('chunked 20', 32), ('whole episodes', 21)
    grid += [Way('ppo', 'RTU', way, options=(('window', size),)) for way, size in windows]
    return [*found, Setting(chain(20, 3), tuple(grid), 60_000, 8)]


def learnt(setting: Setting, way: Way, seeds: tuple[int, ...] = SEEDS) -> dict:
    """The record of a row: the score in the last tenth of the steps by seed, and the median of the
    seeds along the steps.
    """
    made = parts(way, setting.env)
    curves, spent = train(
        setting.env, *made, setting.steps, setting.batch, seeds, score=setting.score
    )
    last = curves[:, -4:]  # no number in a part in which no episode ended
    ends = np.nanmean(np.where(np.isnan(last).all(1, keepdims=True), np.inf, last), 1)
    curve = np.round(np.nanmedian(curves, 0), 5)
    return {'scores': ends.tolist(), 'curve': curve.tolist(), 'seconds': spent, 'load': load()}


def step_times(turns: int = 15) -> dict:
    """How much longer a step of Q(lambda) takes with a trace than without one, in turns."""
    env, calls = environments.chain(20, 3), {}
    for name in WAYS:
        agent, model, rule = parts(Way('q_lambda', 'RTU', name), env)
        brainstate.random.seed(1)
        learner, params, carry = compile_model(model(), rule, jnp.zeros(env.inputs)).pure()
        made, world = agent(learner, carry), environments.vector(env)

        def step(now, key, made=made, world=world):
            state, states = now
            actions, acted = made.act(state, world.observe(states), key)
            states, rewards, done = world.step(key, states, actions)
            return (made.update(state, acted, rewards, done), states), None

        states = world.reset(jax.random.key(0), 1)
        start = made.init(params, world.observe(states)), states
        keys = jax.random.split(jax.random.key(1), 5000)
        run = jax.jit(lambda start, step=step, keys=keys: jax.lax.scan(step, start, keys)[0])
        jax.block_until_ready(run(start))
        calls[name] = partial(seconds, partial(run, start))
    spent = in_turn(calls, turns)
    ratios = [a / b for a, b in zip(*spent.values())]
    microseconds = {name: 1e6 * median(of) / 5000 for name, of in spent.items()}
    return {'scores': ratios, 'microseconds': microseconds, 'seconds': 0.0, 'load': load()}


# the page ---------------------------------------------------------------------------------------


def spoken(scores: list[float]) -> str:
    """The median and the span of the seeds that did not diverge."""
    finite = [x for x in scores if np.isfinite(x) and abs(x) < 1e6]
    lost = len(scores) - len(finite)
    shown = f'{median(finite):.3g} ({min(finite):.3g} to {max(finite):.3g})'
    return shown + f', {lost} diverged' * bool(lost)


def tables(records: list[dict]) -> str:
    """A table for each setting: the end of training by seeds, and the middle of the way."""
    found, pieces = by_name(records), []
    columns = {
        'agent': lambda row: row['row'],
        'cell': lambda row: row['net'],
        'median at the end (span)': lambda row: spoken(row['scores']),
        'after half of the steps': lambda row: f'{np.nanmean(row["curve"][18:22]):.3g}',
        'seconds': lambda row: f'{row["seconds"]:.0f}',
    }
    for s in settings():
        rows = [found[key] for key in keys(s) if key in found]
        if rows:
            pieces.append(folded(s.name, f'Score: {SCORES[score_of(s)]}.', listed(rows, columns)))
    return '\n\n'.join(pieces)


def summary(records: list[dict]) -> str:
    """Published figures, and ours: each agent with a trace beside itself without one."""
    found = by_name(records)
    rows = []
    for s in settings():
        for way in s.ways:
            pair = [way, way._replace(way=WAYS[1])]
            ours = [found.get((s.name, each.cell, each.name)) for each in pair]
            if s.published and way.way == WAYS[0] and ours[0]:
                shown = [spoken(row['scores']) if row else '-' for row in ours]
                agent = f'{SPOKEN[way.agent]}, {way.cell}' + ', normalised' * way.scaled
                rows.append([s.name, s.published, agent, *shown, s.differs])
    return table(['task', 'published', 'agent', *WAYS, 'what differs'], rows)


def grid(records: list[dict]) -> str:
    """The five agents by their ways to the gradient, on the last setting: medians."""
    found = by_name(records)
    last = settings()[-1]
    ways = list(dict.fromkeys(way.way for way in last.ways))

    def shown(agent: str, way: str) -> str:
        row = found.get((last.name, 'RTU', Way(agent, 'RTU', way).name))
        return f'{median(row["scores"]):.2f}' if row else '-'

    rows = [[SPOKEN[agent], *(shown(agent, way) for way in ways)] for agent in AGENTS]
    return table([f'{last.name}, RTU', *ways], rows)


def step_time(records: list[dict]) -> str:
    """The time of a step with a trace over that without one."""
    (row,) = [r for r in records if r['task'] == STEPS[0]]
    return f'{median(row["scores"]):.2f}'


def draw(records: list[dict], path: Path) -> None:
    """Left: the curves of a chain of 256 steps. Right: the end of training over the length."""
    found = by_name(records)
    chains = [s for s in settings() if s.env.name.startswith('chain') and s.steps == 250_000]
    left_at = next(s for s in chains if s.env.name.startswith('chain 256 '))
    with figure(path, 1, 2, 3.9, sharey=True) as (drawn, (left, right)):
        for way, key in zip(left_at.ways, keys(left_at)):
            how = look(way.way)
            curve = found[key]['curve']
            at = np.linspace(0, left_at.steps / 1000, len(curve))
            left.plot(at, curve, label=way.name, markevery=0.2, **how)
            ends = np.array([found[s.name, way.cell, way.name]['scores'] for s in chains])
            right.plot(LENGTHS, np.median(ends, 1), **how)
            low, high = np.quantile(ends, [0.1, 0.9], 1)
            right.fill_between(LENGTHS, low, high, color=how['color'], alpha=0.15)
        left.set(
            xlabel='steps, in thousands',
            ylabel='return (1: all right, 0: a guess)',
            title='256 steps to remember',
            ylim=(-0.3, 1.05),
        )
        right.set(xlabel='steps to remember', xscale='log', title='after 250,000 steps')
        right.set_xticks(LENGTHS, LENGTHS)
        right.minorticks_off()
        drawn.legend(loc='outside lower center', ncols=2)


def keys(setting: Setting) -> list[tuple[str, str, str]]:
    return [(setting.name, way.cell, way.name) for way in setting.ways]


def score_of(setting: Setting) -> str:
    return getattr(setting.score, '__name__', 'off')


SCORES = {
    'of_episodes': 'the mean return of an episode',
    'turns': 'the part of the episodes with the right turn',
    'of_half': 'the mean return of an episode, in 0 to 1',
    'off': 'the squared error of the predicted return, the less the better',
}
STEPS = 'time of a step with a trace, over one without', 'RTU', 'Q(lambda)'


def main():
    given = options(__doc__, PATH)
    chosen, seeds = settings(), SEEDS
    if given.quick:
        chosen, seeds = [chosen[-1]._replace(ways=(Way('actor_critic', 'RTU'),), steps=8000)], (1,)
    rows = {} if given.quick else {STEPS: step_times}
    rows |= {
        key: partial(learnt, s, way, seeds) for s in chosen for key, way in zip(keys(s), s.ways)
    }
    measure(given, rows)


if __name__ == '__main__':
    main()
