"""Agents that act from partial observations, beside what else learns in equally many steps.

    python benchmarks/acting.py                    every row that is not there yet
    python benchmarks/acting.py --again --only '*chain 20* | D_RTRL'    these rows, once more
    python benchmarks/acting.py --quick            one row, short; keeps nothing

The agents are those of ``examples/memory_rl.py``, each with three seeds and all learning rates of
its setting in one compiled program; a row is that of the rate whose end is best. The records go to
``benchmarks/results/acting.json``; ``benchmarks/results_page.py`` shows them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from printer import figure, folded, listed, look, table
from runner import HERE, RESULTS, load, measure, options

from braintrace.tasks import environments
from braintrace.tasks.environments import Environment

sys.path.insert(0, str(HERE.parent / 'examples'))
from memory_rl import A2C_5, BOUNDED, RTRL, RTRL_5, SAME, SAME_5, Way, a2c_of, last_tenth, train  # noqa: E402

PATH = RESULTS / 'acting.json'
NET, SEEDS = 'RTU 32', (1, 2, 3)
SAME_BOUNDED = SAME._replace(
    name='same step, bounded', kappa=BOUNDED.kappa, entropy=BOUNDED.entropy
)
WHOLE = a2c_of(0).name
SHOWN = (RTRL.name, SAME_5.name, A2C_5.name, WHOLE)


class Setting(NamedTuple):
    """Ways of learning in one environment: steps of all samples together, samples, learning rates;
    ``aim``: the return that D_RTRL is to reach, None where it is only reported.
    """

    env: Environment
    ways: tuple[Way, ...]
    steps: int
    batch: int
    rates: tuple[float, ...]
    aim: float | None

    @property
    def name(self) -> str:
        return f'{self.env.name}, batch of {self.batch}, {self.steps:,} steps'


def settings() -> list[Setting]:
    chain, rates = partial(environments.chain, distractors=3), (2e-3, 8e-3)
    alone, plain = (RTRL, BOUNDED, SAME, SAME_BOUNDED), (8, 32, 60, 128)

    def beside(length: int, *online: Way) -> tuple[Way, ...]:
        return *online, A2C_5, a2c_of(length + 1)

    return [
        Setting(chain(60), beside(60, RTRL, RTRL_5, SAME, SAME_5), 400_000, 8, rates, 0.95),
        Setting(chain(20), beside(20, RTRL, RTRL_5, SAME, SAME_5), 200_000, 8, rates, 0.95),
        Setting(chain(20), alone, 200_000, 1, (1e-3, 4e-3), 0.8),
        Setting(
            environments.repeat_previous(4),
            beside(50, RTRL, SAME),
            2_000_000,
            16,
            (1e-3, 4e-3),
            0.8,
        ),
        *(
            Setting(environments.chain(n), beside(n, RTRL_5, SAME_5), 400_000, 8, rates, aim)
            for n, aim in zip(plain, (0.95, 0.95, 0.95, None))
        ),
        *(
            Setting(chain(n), beside(n, RTRL, SAME_5), 400_000, 8, rates, None)
            for n in (8, 20, 128, 256)
        ),
    ]


def learnt(setting: Setting, way: Way, seeds: tuple[int, ...]) -> dict:
    """The record of a row; bounded steps have a rate of their own, 1."""
    rates = (1.0,) if way.kappa else setting.rates
    curves, seconds = train(setting.env, way, setting.steps, setting.batch, seeds, rates)
    ends = last_tenth(curves)
    best = int(np.argmax(ends.mean(1)))
    return {
        'rate': rates[best],
        'of_rates': dict(zip(map(str, rates), ends.mean(1).tolist())),
        'scores': ends[best].tolist(),
        'curve': np.round(curves[best], 4).tolist(),
        'seconds': seconds / len(rates),
        'load': load(),
    }


# the page ---------------------------------------------------------------------------------------


def tables(records: list[dict]) -> str:
    """A table for each setting: the end of training, and the return after three tenths."""
    found, parts = {(r['task'], r['row']): r for r in records}, []

    def early(row: dict) -> float:
        curve = np.array(row['curve'])
        return np.nanmean(curve[:, : round(0.3 * curve.shape[1])][:, -5:])

    def worse(row: dict) -> str:
        return f'{min(row["of_rates"].values()):.2f}' if len(row['of_rates']) > 1 else '-'

    columns = {
        'agent': lambda row: row['row'],
        'return at the end': lambda row: f'{np.mean(row["scores"]):.2f}',
        'seeds': lambda row: ', '.join(f'{end:.2f}' for end in row['scores']),
        'after 30 % of the steps': lambda row: f'{early(row):.2f}',
        'rate': lambda row: f'{row["rate"]:g}',
        'with the other rate': worse,
        'seconds': lambda row: f'{row["seconds"]:.0f}',
    }
    for s in settings():
        aim = '' if s.aim is None else f' Aim of D_RTRL: {s.aim:g}.'
        budget = f'Learning rates {" and ".join(f"{r:g}" for r in s.rates)}.{aim}'
        rows = [found[s.name, way.name] for way in s.ways]
        parts.append(folded(s.name, budget, listed(rows, columns)))
    return '\n\n'.join(parts)


def summary(records: list[dict]) -> str:
    """The return at the end, the mean of the seeds, of all agents in all settings."""
    ends = {(r['task'], r['row']): f'{np.mean(r["scores"]):.2f}' for r in records}
    ways = list(dict.fromkeys(way.name for s in settings() for way in s.ways))
    rows = [[s.name, *(ends.get((s.name, name), '-') for name in ways)] for s in settings()]
    return table(['task', *ways], rows)


def draw(records: list[dict], path: Path) -> None:
    """Left: the curves of the chain of 60 steps. Right: the end of training over its length."""
    found = {(r['task'], r['row']): r for r in records}
    chains = [
        s for s in settings() if 'distractors' in s.env.name and s.batch == 8 and s.steps == 400_000
    ]
    chains.sort(key=lambda s: int(s.env.name.split()[1]))
    with figure(path, 1, 2, 3.9, sharey=True) as (drawn, (left, right)):
        for name in SHOWN:
            how = look(name)
            curve = np.array(found[settings()[0].name, name]['curve'])
            at = np.linspace(0, settings()[0].steps / 1000, curve.shape[1])
            left.plot(at, np.nanmean(curve, 0), label=name, markevery=0.2, **how)
            low, high = np.nanquantile(curve, [0, 1], 0)
            left.fill_between(at, low, high, color=how['color'], alpha=0.15)
            ends = np.array([found[s.name, name]['scores'] for s in chains])
            lengths = [int(s.env.name.split()[1]) for s in chains]
            right.plot(lengths, ends.mean(1), **how)
            right.fill_between(lengths, ends.min(1), ends.max(1), color=how['color'], alpha=0.15)
        left.set(
            xlabel='steps, in thousands',
            ylabel='return (1: all right, 0: a guess)',
            title='60 steps to remember',
            ylim=(-0.2, 1.05),
        )
        right.set(xlabel='steps to remember', xscale='log', title='after 400,000 steps')
        right.set_xticks(lengths, lengths)
        right.minorticks_off()
        drawn.legend(loc='outside lower center', ncols=2)


def main():
    given = options(__doc__, PATH)
    chosen, seeds = settings(), SEEDS
    if given.quick:
        chosen, seeds = [chosen[1]._replace(ways=(RTRL,), steps=4000)], (1,)
    rows = {
        (s.name, NET, way.name): partial(learnt, s, way, seeds) for s in chosen for way in s.ways
    }
    measure(given, rows)


if __name__ == '__main__':
    main()
