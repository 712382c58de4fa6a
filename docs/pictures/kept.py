"""Draws `kept.svg`: which paths through time the learning rules keep.

The rules are asked. A small linear network runs over four steps, every path segment of every step
has a gate of its own, and one weight is at work at the first step alone. A segment is kept if the
gradient of that weight changes when its gate is closed. `python docs/pictures/kept.py [FILE]` needs
matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, PALE, save, style, target
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import braintrace
from braintrace import functional, rules

UNITS, STEPS, HERE = 5, 4, 2  # and the unit that the weight feeds
NEXT = np.eye(UNITS) + np.eye(UNITS, k=1) + np.eye(UNITS, k=-1)  # who reads whom
KAPPA = 0.8  # the leak of the readout
EXACT = {'window': 2, 'inside': 'exact'}
RULES: dict[str, tuple] = {
    'SameStep': (rules.same_step(), {}),
    'D_RTRL': (rules.d_rtrl(), {}),
    'ES_D_RTRL': (rules.es_d_rtrl(0.9), {}),
    "D_RTRL, credit='whole'": (rules.d_rtrl(credit='whole'), {}),
    'e-prop': (rules.e_prop(KAPPA), {}),
    'SnAp-2': (rules.snap(2), {}),
    'D_RTRL, exact windows of 2': (rules.d_rtrl(), EXACT),
    'BPTT, RTRL': (rules.rtrl(), {}),
}
KINDS = {
    'stay': {'color': BLUE, 'lw': 2.4, 'zorder': 3},
    'mix': {'color': ORANGE, 'lw': 1.0, 'zorder': 2},
    'read': {'color': GREEN, 'lw': 1.0, 'zorder': 2},
    'leak': {'color': GREEN, 'lw': 2.4, 'zorder': 3},
}


def cell(params, carry, at):
    h, r = carry
    drive = braintrace.matmul(at['x'], params['w'])
    h = 0.7 * at['stay'] * h + h @ (0.5 * at['mix'] * NEXT) + drive
    r = KAPPA * at['leak'] * r + braintrace.matmul(at['read'] * h, params['out'])
    return r, (h, r)


def sequence() -> dict[str, jax.Array]:
    """The input of each step, a one at the first; all gates are open."""
    shapes = {'stay': (1, UNITS), 'mix': (UNITS, UNITS), 'read': (1, UNITS), 'leak': (1, 1)}
    gates = {name: jnp.ones((STEPS, *shape)) for name, shape in shapes.items()}
    return gates | {'x': jnp.zeros((STEPS, 1, 1)).at[0].set(1)}


def kept(rule, options) -> set[tuple]:
    """The segments, (kind, step, *where), that the gradient of the weight depends on."""
    xs, rng = sequence(), np.random.default_rng(0)
    params = {'w': jnp.ones((1, UNITS)), 'out': jnp.asarray(rng.uniform(1, 2, (UNITS, 1)))}
    learner, carry = functional.online(cell, rule), (jnp.zeros((1, UNITS)), jnp.zeros((1, 1)))
    state = learner.init(params, carry, jax.tree.map(lambda a: a[0], xs))
    run = learner.sequence_grad(lambda r, _: jnp.sum(r), reduction='sum', **options)
    last = jnp.zeros(STEPS).at[-1].set(1)  # the loss of the last step counts alone

    def gradient(xs):
        return run(params, state, xs, None, last)[0]['w'][0, HERE]

    @jax.jit
    def changes(kind_of_gates):
        """What closing each gate of one kind changes."""
        ((kind, gates),) = kind_of_gates.items()
        one = jnp.eye(gates.size).reshape(-1, *gates.shape)
        return jax.vmap(lambda gate: gradient(xs | {kind: gates - gate}) - gradient(xs))(one)

    found, size = set(), float(abs(gradient(xs)))
    for kind in ('stay', 'mix', 'read'):
        sizes = np.abs(np.asarray(changes({kind: xs[kind]}))).reshape(xs[kind].shape)
        found |= {(kind, *map(int, place)) for place in np.argwhere(sizes > 1e-4 * size)}
    # The readout of an earlier step reaches the last loss by the leak alone.
    earliest = min((t for kind, t, *_ in found if kind == 'read'), default=STEPS)
    return found | {('leak', t, 0, 0) for t in range(earliest + 1, STEPS)}


def segments() -> dict[tuple, tuple]:
    """Every segment, as (kind, step, *where), and the two points that it joins."""
    found, readout = {}, UNITS + 0.6
    for t in range(STEPS):
        for i in range(UNITS):
            found['read', t, 0, i] = (t, i), (t + 0.35, readout)
            if t:
                found['stay', t, 0, i] = (t - 1, i), (t, i)
                found |= {('mix', t, i, j): ((t - 1, i), (t, j)) for j in np.flatnonzero(NEXT[i])}
        if t:
            found['leak', t, 0, 0] = (t - 0.65, readout), (t + 0.35, readout)
    return found


def draw(axes, title: str, those: set[tuple]) -> None:
    own = {'lw': 0.8, 'color': PALE, 'zorder': 0}
    for segment, (start, end) in segments().items():
        kind, shift = KINDS[segment[0]], 0.0
        if segment[0] == 'mix' and segment[2] == segment[3]:
            shift = -0.15  # beside the unit's leak
        ends = (start[0], end[0]), (start[1] + shift, end[1] + shift)
        axes.plot(*ends, **(kind if segment in those else own))
    for t in range(STEPS):
        for i in range(UNITS):
            axes.plot(t, i, 'o', ms=5, mfc='white', mec=INK, mew=0.7, zorder=4)
        axes.plot(t + 0.35, UNITS + 0.6, 's', ms=5, mfc='white', mec=INK, mew=0.7, zorder=4)
    axes.plot(0, HERE, 'o', ms=7, color=INK, zorder=5)
    axes.plot(STEPS - 0.65, UNITS + 0.6, 's', ms=7, color=INK, zorder=5)
    axes.set_title(title, fontsize=10)
    axes.set(xlim=(-0.3, STEPS - 0.3), ylim=(-0.5, UNITS + 1.1))
    axes.axis('off')


def legend(figure: Figure) -> None:
    names = ('position-wise', 'mixing', 'to the readout', "the readout's leak", 'not kept')
    kinds = [*KINDS.values(), {'color': PALE, 'lw': 1.2}]
    lines = [Line2D([], [], **{'color': k['color'], 'lw': k['lw']}) for k in kinds]
    marks = {'color': 'none', 'mfc': INK, 'mec': INK, 'ms': 7}
    lines += [Line2D([], [], marker=marker, **marks) for marker in 'os']
    labels = [*names, 'the weight acts', 'the loss']
    figure.legend(lines, labels, loc='outside lower center', ncols=4, frameon=False, fontsize=9)


def main(arguments: list[str]) -> Path:
    with style('kept'):
        figure = Figure(figsize=(9.6, 6.0), layout='constrained')
        panels = figure.subplots(2, 4).ravel()
        for axes, (title, (rule, options)) in zip(panels, RULES.items(), strict=True):
            draw(axes, title, kept(rule, options))
        legend(figure)
        return save(figure, target(arguments, 'kept.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
