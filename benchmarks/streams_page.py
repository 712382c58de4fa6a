"""What ``streams.py`` found, as tables and a picture of ``docs/results.md``."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, pstdev

import numpy as np
from printer import BLACK, BLUE, GREEN, GREY, VERMILLION, by_name, figure, table
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
    RULES,
    SYSTEMS,
    TRIALS,
    rows,
)


def scored(records: list[dict]) -> dict:
    """Those that learnt, by name."""
    return by_name([r for r in records if 'scores' in r])


def spread(scores) -> str:
    """A mean, and the standard deviation of the seeds."""
    off = pstdev(scores)
    return f'{mean(scores):.3g}' + (f' ± {off:.2g}' if off else '')


def spoken(row: dict | None) -> str:
    return spread(row['scores']) if row else '-'


def pairs(records: list[dict]) -> dict:
    """Ours and theirs, mean and deviation, of all that both have; that of one seed is theirs."""
    found = {(r['task'], r['row']): r['scores'] for r in records if PLAIN in r['net']}
    return {
        (name, row): (mean(found[name, row]), pstdev(found[name, row]) or given[1], *given)
        for name, figures in PUBLISHED.items()
        for row, given in figures.items()
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
    return text + (f'; outside: {", ".join(outside)}.' if outside else '.')


def published_table(records: list[dict]) -> str:
    """Ours over theirs, by rule and series; then our rows of other networks."""
    found, lines = scored(records), []
    for way in OURS:
        rule = way.name if way.net.startswith(PLAIN) else f'{way.name}, {way.net}'
        line = [rule]
        for name in SYSTEMS:
            row, given = found.get((name, way.net, way.name)), PUBLISHED[name].get(way.name)
            line.append(spoken(row) + (f' ({given[0]:g} ± {given[1]:g})' if given and row else ''))
        lines.append(line)
    return table(['', *SYSTEMS], lines)


def exact_seeds(records: list[dict]) -> str:
    """How many seeds exact RTRL has on each series."""
    numbers: dict[int, list[str]] = {}
    for r in records:
        if r['row'] == 'RTRL' and r['task'] in SYSTEMS:
            numbers.setdefault(len(r['seeds']), []).append(r['task'])
    each = (f'{n} on {" and ".join(names)}' for n, names in sorted(numbers.items(), reverse=True))
    return ', '.join(each)


def adding_thousand(records: list[dict]) -> str:
    """The error of D_RTRL on the adding problem of 1,000 steps."""
    row = scored(records).get(('adding 1000', 'minLSTM 32', 'D_RTRL'))
    return f'{mean(row["scores"]):.2g}' if row else 'not measured yet'


def unbroken_table(records: list[dict]) -> str:
    found = scored(records)
    lines = []
    for name in SYSTEMS:
        keys = [(f'{name}{how}', PLAIN, row) for row in FEW for how in ('', ', without restarts')]
        told = [spoken(found.get(key)) for key in keys]
        lines.append([name, *map('; '.join, zip(told[::2], told[1::2]))])
    return table(['with restarts; without', *FEW], lines)


def holm(p: list[float]) -> list[float]:
    """Probabilities for as many tests at once (Holm 1979)."""
    ranks, found, least = np.argsort(p), np.zeros(len(p)), 0.0
    for place, k in enumerate(ranks):
        least = max(least, min(1.0, (len(p) - place) * p[k]))
        found[k] = least
    return found.tolist()


def compared(records: list[dict], pairs: dict) -> dict:
    """Of pairs of rows, by any names: the ratio of the means, and the probability of Wilcoxon's
    test of the seeds' differences, with Holm's correction over all pairs.
    """
    from scipy.stats import wilcoxon

    found = scored(records)
    there = {k: pair for k, pair in pairs.items() if found.keys() >= {*pair}}
    both = {k: tuple(found[row]['scores'] for row in pair) for k, pair in there.items()}
    chances = holm([wilcoxon(a, b).pvalue for a, b in both.values()])
    return {k: (mean(a) / mean(b), p) for (k, (a, b)), p in zip(both.items(), chances)}


def rules_apart(records: list[dict]) -> str:
    """Which of the published series tell SnAp-1 from the gradient of the same step."""
    each = compared(records, {s: [(s, PLAIN, row) for row in FEW[:2]] for s in SYSTEMS})
    told = [f'{name} ({100 * (1 - r):.0f} %)' for name, (r, p) in each.items() if p < 0.05 > r - 1]
    same = [name for name, (_, p) in each.items() if p >= 0.05]
    return (
        f'SnAp-1 has a lower error than the gradient of the same step on {", ".join(told)}; on '
        f'{", ".join(same)} ten seeds do not tell them apart.'
    )


def without_restarts(records: list[dict]) -> str:
    """How many times lower errors are without restarts, on the three systems."""
    found = scored(records)
    pairs = [
        (found.get((name, PLAIN, row)), found.get((f'{name}, without restarts', PLAIN, row)))
        for name in list(SYSTEMS)[:3]
        for row in FEW
    ]
    ratios = [mean(a['scores']) / mean(b['scores']) for a, b in pairs if a and b] or [1]
    return f'{min(ratios):.1f} to {max(ratios):.0f}'


def against_same_step(records: list[dict]) -> dict:
    names = [(name, net) for name in FILES for net in NETWORKS]
    two = 'D_RTRL', 'same step'
    return compared(records, {n: [(f'next {n[0]}', n[1], row) for row in two] for n in names})


def told_real(records: list[dict]) -> str:
    """Where D_RTRL is better than the gradient of the same step, and where nothing recurrent is."""
    each, found = against_same_step(records), by_name(records)
    gains = [f'{name} ({net})' for (name, net), (r, p) in each.items() if r < 1 and p < 0.05]
    losses = [f'{name} ({net})' for (name, net), (r, p) in each.items() if r > 1 and p < 0.05]
    beaten = []
    for name in FILES:
        score = lambda key: mean(found[key]['scores']) if key in found else np.inf
        ours = min(score((f'next {name}', net, row)) for net in NETWORKS for row in ONLINE)
        if min(score((f'next {name}', ALONE, row)) for row in BESIDE) < ours:
            beaten.append(name)
    error = lambda name, net, row: mean(found[f'next {name}', net, row]['scores'])
    stops = [error(*at, 'D_RTRL, frozen') / error(*at, 'D_RTRL') for at in each]
    return (
        f'On these sequences credit through time buys nothing: of {len(each)} pairs D_RTRL is '
        f'better than the gradient of the same step on {", ".join(gains) or "none"} and worse on '
        f'{", ".join(losses) or "none"} (Wilcoxon, Holm, 0.05). Learning on buys much: a network '
        f'that stops after the first tenth ends with {min(stops):.1f} to {max(stops):.1f} times '
        f'the error. On {", ".join(beaten) or "none"} a reservoir, a linear model or the last '
        'sample is better than every network here.'
    )


def real_table(records: list[dict]) -> str:
    found, lines = scored(records), []
    shown = (*list(ONLINE)[:3], ROLLING, list(ONLINE)[3])
    each = against_same_step(records)
    for name in FILES:
        for net in NETWORKS:
            got = [found.get((f'next {name}', net, row)) for row in shown]
            told = '{:.3f} ({:.2g})'.format(*each[name, net]) if (name, net) in each else '-'
            lines.append([name, net, *map(spoken, got), told])
    return table(['', 'network', *shown, 'D_RTRL / same step (p)'], lines)


def beside_table(records: list[dict]) -> str:
    found = scored(records)
    lines = []
    for name in FILES:
        got = [found.get((f'next {name}', ALONE, row)) for row in BESIDE]
        samples = next((r['samples'] for r in got if r), ())
        size = ' x '.join(f'{n:,}' for n in samples)
        lines.append([name, size, *map(spoken, got)])
    missing = ', '.join(r['task'][5:] for r in records if 'refused' in r)
    told = f'\n\nNot measured: {missing}, of which no package has a file.' if missing else ''
    return table(['', 'samples', *BESIDE], lines) + told


def seconds_table(records: list[dict]) -> str:
    """Those of ten seeds, without compiling."""
    found = scored(records)
    told = lambda row: f'{row["seconds"]:.0f}' if row else '-'
    kinds = {(net, row): f'{row}, {net}' for net in NETWORKS for row in (*ONLINE, ROLLING)}
    kinds |= {(ALONE, row): row for row in BESIDE}
    each = lambda kind: [told(found.get((f'next {name}', *kind))) for name in FILES]
    return table(['', *FILES], [[name, *each(kind)] for kind, name in kinds.items()])


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


def streams_missing(records: list[dict]) -> str:
    """Which rows there should be, and are not yet."""
    there = by_name(records)
    lacking = [' | '.join(key) for key in rows() if key not in there]
    if not lacking:
        return 'all of its rows are measured.'
    told = '; '.join(f'`{name}`' for name in lacking)
    return f'{len(lacking)} of its rows are not measured yet: {told}.'


def page(records: list[dict]) -> dict[str, str]:
    """What ``results.in.md`` asks for, by name."""
    told = told_published, told_real, rules_apart, without_restarts, exact_seeds, adding_thousand
    shown = published_table, unbroken_table, real_table, beside_table, seconds_table, trials_table
    return {f.__name__: f(records) for f in (*told, *shown, streams_missing)}


COLORS = dict(zip(RULES, (BLACK, BLUE, VERMILLION, GREEN, GREY)))
MARKERS = dict(zip(SYSTEMS, 'osD^v'))


def draw(records: list[dict], path: Path) -> None:
    """Ours over theirs, means and deviations: rules by colour, series by marker."""
    with figure(path, 1, 1, 4.6) as (drawn, ax):
        for (name, row), (ours, off, theirs, their_off) in pairs(records).items():
            low = [[min(their_off, theirs * 0.9)], [their_off]], [[min(off, ours * 0.9)], [off]]
            how = {'color': COLORS[row], 'marker': MARKERS[name], 'markersize': 6}
            ax.errorbar(theirs, ours, xerr=low[0], yerr=low[1], elinewidth=0.8, **how)
        ends = [1e-3, 1]
        ax.plot(ends, ends, color=GREY, linewidth=1, linestyle=':', zorder=0)
        ax.set(xscale='log', yscale='log', xlim=ends, ylim=ends)
        ax.set(xlabel='published error', ylabel='ours')
        for row, color in COLORS.items():
            ax.plot([], [], 'o', color=color, label=row)
        for name, mark in MARKERS.items():
            ax.plot([], [], mark, color=GREY, fillstyle='none', label=name)
        drawn.legend(loc='outside right center')
