"""A row of the table of models, and a case of it with numbers, which a test makes."""

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tests.models.ops import NumpyOps

SEED = int(os.environ.get('TEST_SEED', 0))  # others at night, see the Makefile
B, I, O, T = 2, 3, 2, 6  # batch, inputs, outputs, steps
N, M = 4, 3  # positions, positions of a second layer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A cell ``(ops, params, carry, x) -> (output, new carry)`` with the shapes it wants and the
    oracles that hold for it.
    """

    name: str
    cell: Callable
    params: Mapping  # parameter -> shape, nested as the cell wants
    carry: Mapping = dataclasses.field(default_factory=lambda: {'h': (B, N)})
    x: tuple = (B, I)
    groups: tuple = ()  # names of the states of each group; (): all states, one group
    # Top-level parameter -> index of the one group whose trace it has, or None for its same-step
    # gradient only; group 0 if it is absent.
    owner: Mapping = dataclasses.field(default_factory=dict)
    cut_bptt: bool = True  # reverse mode with `cut` alone is an oracle
    exact: bool = False  # online == plain BPTT
    smooth: bool = True  # no surrogate gradients: finite differences hold

    def __post_init__(self):
        object.__setattr__(self, 'groups', self.groups or (tuple(self.carry),))

    def reading_of(self, path) -> int:
        """0 for a parameter with its same-step gradient only, g + 1 for one whose trace group g
        has.
        """
        owner = self.owner.get(path[0].key, 0)
        return 0 if owner is None else owner + 1


def of(cell, params, carry=None, *args, name=None, **options) -> Model:
    """The row of a cell, by the cell's name."""
    carry = {'h': (B, N)} if carry is None else carry
    return Model(name or cell.__name__, cell, params, carry, *args, **options)


def shown(ops, p, h):
    return h


def read_out(ops, p, h):
    return ops.dot(h, p['out'])


def cell_of(transition, output=read_out) -> Callable:
    """A cell with one state: ``transition(ops, p, h, r, x)``, in which ops and mixing equations
    read ``r``, and ``output(ops, p, new h)``.
    """

    def cell(ops, p, c, x):
        h = ops.new('h', transition(ops, p, c['h'], ops.cut(c['h']), x))
        return output(ops, p, h), {'h': h}

    return cell


def row(transition, params, *args, output=read_out, name=None, **options) -> Model:
    """The row of such a cell, by the name of its transition."""
    return of(
        cell_of(transition, output), params, *args, name=name or transition.__name__, **options
    )


def states(names, shape=(B, N)) -> dict:
    """States of one shape."""
    return dict.fromkeys(names, shape)


def alone(*names) -> tuple:
    """Each state is a group of its own."""
    return tuple((name,) for name in names)


def untraced(*names) -> dict:
    """Parameters that have their same-step gradient only."""
    return dict.fromkeys(names)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model with parameters, first carry, a sequence, and the loss of one step, all in
    float64.
    """

    model: Model
    params: Any
    carry: Mapping
    xs: np.ndarray
    ys: np.ndarray
    loss: Callable

    def run(self, ops, params, carry, x):
        return self.model.cell(ops, params, carry, x)

    def steps(self, start: int, stop: int, carry: Mapping) -> 'Case':
        """Steps ``start`` to ``stop`` from another first carry."""
        return dataclasses.replace(
            self, carry=carry, xs=self.xs[start:stop], ys=self.ys[start:stop]
        )

    def part(self, lane: int, start: int, stop: int, carry: Mapping) -> 'Case':
        """Steps ``start`` to ``stop`` of one batch lane, from another first carry."""
        one = slice(lane, lane + 1)
        whole = self.steps(start, stop, {k: v[one] for k, v in carry.items()})
        return dataclasses.replace(whole, xs=whole.xs[:, one], ys=whole.ys[:, one])


def squared(output, target):
    return 0.5 * ((output - target) ** 2).sum()


def cubic(output, target):
    return (output * target).sum() + 0.3 * ((output - target) ** 3).sum()


def is_shape(node) -> bool:
    return isinstance(node, tuple)


def make_case(model: Model, loss: Callable = squared, steps: int = T, seed: int = 0) -> 'Case':
    """Random numbers for a model, the same ones for the same name and seed (and ``SEED``)."""
    rng = np.random.default_rng([zlib.crc32(model.name.encode()), seed + SEED])
    draw = functools.partial(
        jax.tree.map, lambda shape: 0.6 * rng.standard_normal(shape), is_leaf=is_shape
    )
    params, carry = draw(dict(model.params)), draw(dict(model.carry))
    xs = 1.5 * rng.standard_normal((steps, *model.x))
    output, _ = model.cell(NumpyOps(), params, carry, xs[0])
    ys = rng.standard_normal((steps, *output.shape))
    return Case(model, params, carry, xs, ys, loss)
