"""The section of ``docs/performance.md`` on the network of ``brain_scale.py``."""

from __future__ import annotations

import json
from pathlib import Path

from tables import listed

RESULTS = Path(__file__).parent / 'results' / 'brain_scale.json'
GIB = 1024


def rows_of(found: dict) -> list[dict]:
    """Sizes and ways whose time and memory are both there."""
    rows = []
    for name, turns in found['rows'].items():
        size, kind = name.split(' ', 1)
        for way, times in turns.items() if kind == 'turns' else ():
            if (memory := found['rows'].get(f'{size} memory {way}')) is not None:
                alone = turns['model alone']['cpu ms']
                own = {'size': int(size), 'way': way, 'share': times['cpu ms'] / alone}
                rows.append(own | times | {'memory': memory})
    return rows


def described(found: dict) -> str:
    """The table, what the example learnt, and the step by hand."""
    columns = {
        'neurons, synapses': lambda r: f'{r["size"]:,}, {r["size"] // 10_000} million',
        'way': lambda r: r['way'],
        'CPU ms a step': lambda r: r['cpu ms'],
        'times the model alone': lambda r: r['share'],
        'wall ms a step': lambda r: r['ms'],
        'first call s': lambda r: r['memory']['first call s'],
        'peak GiB': lambda r: r['memory']['memory']['peak'] / GIB,
        'of it with the network built': lambda r: r['memory']['built']['peak'] / GIB,
        'arrays kept GiB': lambda r: r['memory']['memory']['arrays'] / GIB,
    }
    text = [listed(rows_of(found), columns)]
    for name, row in found['rows'].items():
        size, kind = name.split(' ', 1)
        if kind == 'learning':
            text.append(
                f'The example with {int(size):,} neurons took {row["s"]:.0f} s ({row["cpu s"]:.0f} '
                f'CPU s) for {row["steps"]:,} steps, two evaluations, compilation and picture, and '
                f'at most {row["memory"]["peak"] / GIB:.2f} GiB. Its loss over a period with the '
                f'weights as they are: {row["loss before"]:.3f} before, {row["loss after"]:.3f} '
                'after.'
            )
        if kind == 'by hand':
            ours, hand = (row['cpu ms'][way] for way in ('ES_D_RTRL', 'by hand'))
            text.append(
                f'A step of ES_D_RTRL by hand, with a gradient each step, of {int(size) // 10_000} '
                f"million synapses: {hand:.0f} CPU ms, the library's {ours:.0f}, turn by turn "
                f'(`python benchmarks/sparse.py --synapses {int(size) * 100} --rules es`).'
            )
    return '\n\n'.join(text)


def brain_scale(_) -> str:
    """The section, of the results that are kept."""
    return described(json.loads(RESULTS.read_text(encoding='utf-8')))
