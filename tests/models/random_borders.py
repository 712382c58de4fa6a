"""Random cells of plain JAX for automatic marks: parameters that branches share, that become
states, outputs and carries of loops. A plan is plain data that is drawn from a seed and printed.

Every cell is position by position but for products of its inputs, so that nothing needs to be cut;
where something is lost all the same, the report says so.
"""

import dataclasses
import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

B, N, I = 2, 3, 2
PARAMS = 'a', 'b', 'g'  # of one number for each position
# what a piece of the cell makes of a value, a parameter and the states
PIECES = (
    'bias gain leak threshold cond cond_other switch nested checkpoint scan long_scan long_rows '
    'fori where stop'
).split()
# what becomes of a parameter at the end of a step
BORDERS = 'itself', 'square', 'branch', 'last', 'mixture', 'old', 'stopped', 'output'


@dataclasses.dataclass(frozen=True)
class Cell:
    """States ``h`` and ``u`` move, ``v`` and ``k`` keep what becomes of parameters. ``pieces``: a
    name, a parameter and another one each; ``borders``: those of two states.
    """

    pieces: tuple[tuple[str, str, str], ...]
    borders: tuple[tuple[str, str], tuple[str, str]]
    batched: bool = False  # the states that keep parameters have lanes
    seed: int | None = None


def draw(seed: int) -> Cell:
    rng = random.Random(seed)
    pieces = tuple(
        (rng.choice(PIECES), *rng.choices(PARAMS, k=2)) for _ in range(rng.randint(1, 3))
    )
    borders = tuple((rng.choice(BORDERS), rng.choice(PARAMS)) for _ in range(2))
    return Cell(pieces, borders, rng.random() < 0.5, seed)


def simpler(cell: Cell) -> Iterator[Cell]:
    """Cells with one thing less."""
    for i in range(len(cell.pieces)):
        yield dataclasses.replace(cell, pieces=cell.pieces[:i] + cell.pieces[i + 1 :])
    for i, (kind, _) in enumerate(cell.borders):
        if kind != 'old':
            borders = [*cell.borders]
            borders[i] = 'old', 'a'
            yield dataclasses.replace(cell, borders=tuple(borders))


def piece(name: str, p, q, z, n):
    """One piece: ``z`` changed by parameters ``p`` and ``q``; ``n`` counts the steps."""
    kinds = {
        'bias': lambda: jnp.tanh(z) + p,
        'gain': lambda: p * jnp.sin(z),
        'leak': lambda: jax.nn.sigmoid(p) * z,
        'threshold': lambda: jnp.maximum(z, 0.1 * p) - 0.2 * z,
        'cond': lambda: jax.lax.cond(n % 2 == 0, lambda z: 0.5 * z + p, lambda z: 0.8 * z - p, z),
        'cond_other': lambda: jax.lax.cond(n % 3 > 0, lambda z: z * p, lambda z: z + q, z),
        'switch': lambda: jax.lax.switch(
            n % 3, [lambda z: z + p, lambda z: p * z - q, lambda z: 0.3 * z], z
        ),
        'nested': lambda: jax.lax.cond(
            n % 2 == 0,
            lambda z: jax.lax.cond(n > 2, lambda z: z - p, lambda z: z * p, z) + 0.1 * p,
            lambda z: q * z + p,
            z,
        ),
        'checkpoint': lambda: jax.checkpoint(lambda z: jnp.sin(z + p) * q)(z),
        'scan': lambda: jax.lax.scan(lambda z, w: (0.7 * z + w, None), z, jnp.stack([p, q, p]))[0],
        'long_scan': lambda: jax.lax.scan(
            lambda z, w: (0.7 * z + jnp.tanh(w), None), z, jnp.stack([p, q] * 6)
        )[0],
        'long_rows': lambda: (
            0.2 * jax.lax.scan(lambda c, w: (w, c * jnp.sin(z)), p, jnp.stack([q] * 10))[1].sum(0)
        ),
        'fori': lambda: jax.lax.fori_loop(0, 3, lambda i, z: 0.6 * z + p, z),
        'where': lambda: jnp.where(n % 2 == 0, z + p, q * z),
        'stop': lambda: z + p * jax.lax.stop_gradient(q),
    }
    return kinds[name]()


def border(kind: str, p, old, z, n):
    """The new value of a state of the shape of ``p``."""
    p = jnp.broadcast_to(p, old.shape)
    kinds = {
        'itself': lambda: p,
        'square': lambda: p**2,
        'branch': lambda: jax.lax.cond(n % 2 == 0, lambda: p, lambda: 0.5 * old),
        'last': lambda: jax.lax.scan(lambda c, w: (w, None), old, jnp.stack([p] * 10))[0],
        'mixture': lambda: 0.7 * old + 0.3 * p,
        'old': lambda: 0.9 * old,
        'stopped': lambda: jax.lax.stop_gradient(p),
        'output': lambda: p * 1,
    }
    return kinds[kind]()


def build(cell: Cell):
    """``(cell, params, carry)``."""
    rng = np.random.default_rng(0)

    def run(p, c, x):
        z = 0.5 * c['h'] + x @ p['w']
        for name, one, other in cell.pieces:
            z = piece(name, p[one], p[other], z, c['n'])
        u = 0.6 * c['u'] + jnp.tanh(z) * c['v'] + c['k']
        new = {'h': z, 'u': u, 'n': c['n'] + 1}
        for state, (kind, name) in zip(('v', 'k'), cell.borders, strict=True):
            new[state] = border(kind, p[name], c[state], z, c['n'])
        shown = [p[name] for kind, name in cell.borders if kind == 'output']
        return u + z * c['k'] + sum(shown), new

    params = {name: rng.uniform(0.2, 0.9, N) for name in PARAMS}
    params['w'] = rng.normal(size=(I, N)) / 2
    kept = (B, N) if cell.batched else (N,)
    carry = {'h': np.zeros((B, N)), 'u': np.zeros((B, N)), 'n': np.array(0)}
    carry |= {state: rng.uniform(0.2, 0.9, kept) for state in ('v', 'k')}
    return run, params, carry
