"""What ``streams.py`` found, as tables and a picture of ``docs/results.md``."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, pstdev

import numpy as np
from printer import BLUE, GREY, figure, listed, table
from streams import (
    ALONE,
    BESIDE,
    FEW,
    FILES,
    NETWORKS,
    ONLINE,
    OURS,
    PLAIN,
    PUBLISHED,
    ROLLING,
    SYSTEMS,
    TRIALS,
    sequence,
)

WAYS = tuple(dict.fromkeys(way.name for way in OURS if way.net not in NETWORKS))


def by_name(records: list[dict]) -> dict:
    return {(r['task'], r['net'], r['row']): r for r in records if 'scores' in r}


def spread(scores, digits: int = 2) -> str:
    """A mean, and the standard deviation of the seeds, as the study tells them."""
    middle, off = mean(scores), pstdev(scores)
    return f'{middle:.{digits}g} ± {off:.{digits}g}' if off else f'{middle:.3g}'


def pairs(records: list[dict]) -> dict:
    """Ours and theirs, mean and deviation, of all that both have."""
    found = {(r['task'], r['row']): r['scores'] for r in records if PLAIN in r['net']}
    return {
        (name, row): (mean(found[name, row]), pstdev(found[name, row]), *given)
        for name, rows in PUBLISHED.items()
        for row, given in rows.items()
        if (name, row) in found
    }


def within(pair: tuple) -> bool:
    """Whether two means differ by less than both deviations together."""
    ours, off, theirs, their_off = pair
    return abs(ours - theirs) <= off + their_off


def told_published(records: list[dict]) -> str:
    both = pairs(records)
    near = sum(map(within, both.values()))
    outside = [f'{row} on {name}' for (name, row), pair in both.items() if not within(pair)]
    text = f'Of {len(both)} published figures ours meet {near} within the two standard deviations'
    return text + (f'; outside are {", ".join(outside)}.' if outside else '.')


def published_table(records: list[dict]) -> str:
    """Ours over theirs, by rule and series; then our rows of other networks."""
    found, lines = by_name(records), []
    for way in OURS:
        rule = way.name if way.net.startswith(PLAIN) else f'{way.name}, {way.net}'
        line = [rule]
        for name in SYSTEMS:
            row, given = found.get((name, way.net, way.name)), PUBLISHED[name].get(way.name)
            told = spread(row['scores']) if row else '-'
            line.append(told + (f' ({given[0]:g} ± {given[1]:g})' if given and row else ''))
        lines.append(line)
    return table(['', *SYSTEMS], lines)


def unbroken_table(records: list[dict]) -> str:
    found = by_name(records)
    lines = [
        [
            name,
            *(
                f'{spread(found[name, PLAIN, row]["scores"])}; '
                f'{spread(found[f"{name}, without restarts", PLAIN, row]["scores"])}'
                for row in FEW
            ),
        ]
        for name in SYSTEMS
    ]
    return table(['with restarts; without', *FEW], lines)


def holm(p: list[float]) -> list[float]:
    """Probabilities for as many tests at once (Holm 1979)."""
    ranks, found, least = np.argsort(p), np.zeros(len(p)), 0.0
    for place, k in enumerate(ranks):
        least = max(least, min(1.0, (len(p) - place) * p[k]))
        found[k] = least
    return found.tolist()


def compared(records: list[dict], first: str, second: str) -> dict:
    """``(file, net) -> (ratio of the means, probability)`` of two rows, by Wilcoxon's test of the
    seeds' differences and Holm's correction over all of them.
    """
    from scipy.stats import wilcoxon

    found, each = by_name(records), {}
    for name in FILES:
        for net in NETWORKS:
            a, b = (found.get((f'next {name}', net, row)) for row in (first, second))
            if a and b:
                p = wilcoxon(a['scores'], b['scores']).pvalue
                each[name, net] = mean(a['scores']) / mean(b['scores']), p
    return dict(zip(each, zip((r for r, _ in each.values()), holm([p for _, p in each.values()]))))


def told_real(records: list[dict]) -> str:
    """Where D_RTRL is better than the gradient of the same step, and than all that needs none."""
    each, found = compared(records, 'D_RTRL', 'same step'), by_name(records)
    gains = [f'{name} ({net})' for (name, net), (r, p) in each.items() if r < 1 and p < 0.05]
    losses = [f'{name} ({net})' for (name, net), (r, p) in each.items() if r > 1 and p < 0.05]
    beaten = []
    for name in FILES:
        score = lambda key: mean(found[key]['scores']) if key in found else np.inf
        ours = min(score((f'next {name}', net, row)) for net in NETWORKS for row in ONLINE)
        if min(score((f'next {name}', ALONE, row)) for row in BESIDE) < ours:
            beaten.append(name)
    text = f'D_RTRL is better than the same step on {", ".join(gains) or "none"}'
    text += f', worse on {", ".join(losses) or "none"}, and the rest is within the noise of ten'
    text += f' seeds (Wilcoxon, Holm, 0.05); on {", ".join(beaten) or "none"} a linear model, a'
    return text + ' reservoir or the last sample is better than every network.'


def real_table(records: list[dict]) -> str:
    found, lines = by_name(records), []
    rows = (*list(ONLINE)[:3], ROLLING, list(ONLINE)[3])
    each = compared(records, 'D_RTRL', 'same step')
    for name in FILES:
        for net in NETWORKS:
            got = [found.get((f'next {name}', net, row)) for row in rows]
            p = f'{each[name, net][1]:.2g}' if (name, net) in each else '-'
            lines.append([name, net, *(spread(r['scores']) if r else '-' for r in got), p])
    return table(['', 'network', *rows, 'p'], lines)


def beside_table(records: list[dict]) -> str:
    found = by_name(records)
    lines = []
    for name in FILES:
        got = [found.get((f'next {name}', ALONE, row)) for row in BESIDE]
        size = ' x '.join(f'{n:,}' for n in sequence(name)[0].shape)
        lines.append([name, size, *(spread(r['scores']) if r else '-' for r in got)])
    missing = [f'{r["task"][5:]} ({r["refused"]})' for r in records if 'refused' in r]
    told = f'\n\nNot there: {"; ".join(missing)}.' if missing else ''
    return table(['', 'samples', *BESIDE], lines) + told


def seconds_table(records: list[dict]) -> str:
    columns = {
        'sequence': lambda r: r['task'],
        'network': lambda r: r['net'],
        'row': lambda r: r['row'],
        'seeds': lambda r: str(len(r['seeds'])),
        'seconds': lambda r: f'{r["seconds"]:.0f}',
        'to compile': lambda r: f'{r["compile_seconds"]:.0f}' if 'compile_seconds' in r else '-',
        'commit': lambda r: r['commit'],
    }
    return listed(by_name(records).values(), columns)


def trials_table(records: list[dict]) -> str:
    lines = []
    for r in records:
        if (r['task'], r['net']) in TRIALS and 'scores' in r:
            percent = r['metric'] == 'accuracy'
            told = [f'{100 * s:.1f}' if percent else f'{s:.3g}' for s in r['scores']]
            middle = mean(r['scores'])
            shown = f'{100 * middle:.1f} %' if percent else f'{middle:.3g} {r["metric"]}'
            lines.append([r['task'], r['net'], r['row'], shown, ', '.join(told)])
    return table(['task', 'network', 'row', 'mean', 'seeds'], lines)


def page(records: list[dict]) -> dict[str, str]:
    """What ``results.in.md`` asks for, by name."""
    parts = (told_published, published_table, unbroken_table, told_real, real_table)
    parts += (beside_table, seconds_table, trials_table)
    return {f.__name__: f(records) for f in parts}


def draw(records: list[dict], path: Path) -> None:
    """Ten seeds of ours, and mean and deviation of theirs, by rule; a panel for each series."""
    found, both = by_name(records), pairs(records)
    with figure(path, 1, len(SYSTEMS), 3.4, sharey=True) as (drawn, axes):
        for ax, name in zip(axes, SYSTEMS):
            for k, row in enumerate(WAYS):
                net = next(way.net for way in OURS if way.name == row)
                scores = found.get((name, net, row), {}).get('scores', ())
                ax.plot(scores, [k + 0.12] * len(scores), 'o', color=BLUE, markersize=3, alpha=0.6)
                if (name, row) in both:
                    middle, off = both[name, row][2:]
                    low = max(middle - off, middle / 20)
                    ax.plot([low, middle + off], [k - 0.2] * 2, color=GREY, linewidth=2)
                    ax.plot(middle, k - 0.2, 's', color=GREY, markersize=5)
            ax.set(title=name, xscale='log')
        axes[0].set_yticks(range(len(WAYS)), WAYS)
        axes[0].invert_yaxis()
        drawn.supxlabel('normalised error of the last sixth (grey: published)')
