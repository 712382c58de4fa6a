"""Draw what the ring of docs/tutorials/own_op.md learnt, of the page's own code.

Writes own_op.svg beside itself; `python docs/pictures/own_op.py FILE` writes another file. Needs
matplotlib.
"""

import contextlib
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PAGE = HERE.parent / 'tutorials' / 'own_op.md'
BLUE, ORANGE = '#0072b2', '#d55e00'  # of Okabe and Ito


def learnt() -> dict:
    """The names that the page's code defines, down to the training."""
    names: dict = {}
    for block in re.findall(r'^```python\n(.*?)^```', PAGE.read_text('utf-8'), re.M | re.S):
        with contextlib.redirect_stdout(None):
            exec(block, names)
        if 'learnt' in names:
            return names
    raise ValueError(f'no block of {PAGE} makes `learnt`')


def activity(page: dict, speed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ring's activity while the head turns with these speeds, and the true angle."""
    start, jax = 8.0, page['jax']
    cue = np.zeros((len(speed), 1, page['N']), 'float32')
    cue[:4] = 3 * page['bump'](np.array([start]))
    xs = np.concatenate([cue, speed[:, None, None].astype('float32')], -1)
    step = lambda h, x: page['cell'](page['learnt'], h, x)[::-1]
    _, hs = jax.lax.scan(step, np.zeros((1, page['N']), 'float32'), xs)
    return np.asarray(hs[:, 0]), (start + 0.25 * np.cumsum(speed)) % page['N']


def main(argv: list[str]) -> None:
    page = learnt()
    plt.rcParams.update({'font.size': 10, 'svg.hashsalt': 'own_op'})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.9), layout='constrained')
    distance = np.arange(-2, 3)
    for name, color, marker in (('stay', BLUE, 'o'), ('move', ORANGE, 's')):
        left.plot(distance, page['learnt'][name], color=color, marker=marker, label=name)
    left.axhline(0, color='0.6', linewidth=0.8, zorder=0)
    left.set(xlabel='distance on the ring', ylabel='weight', xticks=distance)
    left.set_title('the ten weights', loc='left')
    left.legend(frameon=False, loc='lower right')
    speed = np.repeat([0, 1, 0, -1, 0], [8, 14, 6, 20, 8])
    hs, angle = activity(page, speed)
    right.imshow(hs.T, aspect='auto', origin='lower', cmap='Greys', vmin=0, interpolation='none')
    right.plot(angle, color=ORANGE, linewidth=2, label='true angle')
    right.set(xlabel='step', ylabel='neuron')
    right.set_title('activity while the head turns', loc='left')
    right.legend(frameon=False, loc='upper right')
    path = Path(argv[0]) if argv else HERE / 'own_op.svg'
    no_date = {'Date': None} if path.suffix == '.svg' else {}
    figure.savefig(path, facecolor='white', metadata=no_date)


if __name__ == '__main__':
    main(sys.argv[1:])
