"""What an op adds to a trace, and the gradient that a trace holds, in closed form by primitive.

The layout is that of D_RTRL's trace. Formulas have one axis of lanes in front; :class:`Op` brings
arrays without lanes, and entries for several positions of a state, into that form and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .bounds import Num, asked, constant, exact, where

Slots = dict[str, Num]


class NoFormula(Exception):
    """An application without a closed formula here; the reason is the argument."""


@contextmanager
def told(reasons: set[str]) -> Iterator[None]:
    """Collects why there is no formula; the rest is computed all the same."""
    try:
        yield
    except NoFormula as reason:
        reasons.add(str(reason))


class Formula(NamedTuple):
    """The formulas of a primitive.

    ``instant(op, x, d)``: ``x (x) d`` by slot; ``at(op, slot, d)``: numbers at y with the axes that
    an entry of the slot has more; ``solve(op, slot, e)``: the gradient that entries make, summed
    over lanes; ``ranks(op)``: the axes of x and of y in one lane, None for any; ``x(op, x)``: x as
    the formulas take it; ``laned``: whether y has an axis of lanes.
    """

    instant: Callable[[Op, Any, Num], Slots]
    at: Callable[[Op, str, Num], Num]
    solve: Callable[[Op, str, Num], Num]
    ranks: Callable[[Op], tuple[int | None, int | None]]
    x: Callable[[Op, Num], Num] = lambda op, x: x
    laned: bool = True


@dataclass(frozen=True)
class Op:
    """An application of a primitive: its options, its weights by slot, and the axes of y in one
    lane.
    """

    primitive: str
    options: Mapping[str, Any]
    weights: Callable[[str], Num]
    rank: int = 1

    @property
    def formula(self) -> Formula:
        """Raises ``NoFormula`` for a primitive that has none, or an op in a loop."""
        found = FORMULAS.get(self.primitive)
        if found is None:
            raise NoFormula(f'no formula: {self.primitive}')
        if found.ranks(self)[1] not in (None, self.rank):
            raise self.none(f'and y of {self.rank} axes in a lane')
        return found

    def none(self, why: str) -> NoFormula:
        """The exception for an application that the formulas do not cover."""
        return NoFormula(f'no formula: {self.primitive} {why}')

    def option(self, name: str) -> Any:
        """A static parameter."""
        if name not in self.options:
            raise self.none(f'without its option {name}')
        return self.options[name]

    def weight(self, slot: str) -> Num:
        """The numbers that the op took in a slot."""
        if slot in self.options.get('through', ()):
            raise self.none(f'whose {slot} is a function of its parameter')
        return self.weights(slot)

    def read(self, x: Num | None) -> Num | None:
        """x as the formulas take it, and as ES_D_RTRL sums it: indices as one-hot rows."""
        return None if x is None else self.formula.x(self, x)

    def instant(self, x: Num | None, d: Num) -> Slots:
        """``x (x) d`` by slot, for each lane and each position that an element of y feeds."""
        formula, lead, x = self.formula, self._lead(d), self.read(x)
        rank = formula.ranks(self)[0]
        if rank is not None:
            if x is None:
                raise self.none('without x')
            at = len(x.shape) - rank
            ones = (1,) * (len(lead) - at)
            inner = x.shape[at:]
            x = _flat(x.reshape((*x.shape[:at], *ones, *inner)).to((*lead, *inner)), lead)
        made = formula.instant(self, x, _flat(d, lead))
        return {slot: e.reshape((*lead, *e.shape[1:])) for slot, e in made.items()}

    def carried(self, slot: str, d: Num, e: Num) -> Num:
        """Entries of a slot, each times the number at its element of y."""
        lead = self._lead(d)
        if e.shape[: len(lead)] != lead:
            raise self.none(f'with entries {e.shape} for numbers {d.shape}')
        return (self.formula.at(self, slot, _flat(d, lead)) * _flat(e, lead)).reshape(e.shape)

    def gradient(self, slot: str, d: Num, e: Num) -> Num:
        """The gradient that entries make; ``d`` are numbers at their coordinates."""
        return self.formula.solve(self, slot, _flat(e, self._lead(d)))

    def to_y(self, d: Num) -> Num:
        """Numbers at each position that y feeds, summed to y."""
        for _ in range(len(self._lead(d)) - self.formula.laned):
            d = d.sum(int(self.formula.laned))
        return d

    def _lead(self, d: Num) -> tuple[int, ...]:
        return d.shape[: len(d.shape) - self.rank]


def _flat(num: Num, lead: tuple[int, ...]) -> Num:
    return num.reshape((math.prod(lead), *num.shape[len(lead) :]))


# dense and low-rank products, indices -------------------------------------------------------------


def _outer(x: Num, d: Num) -> Num:
    return x[:, :, None] * d[:, None, :]


def _dense(op: Op, x: Num, d: Num) -> Slots:
    """``y = x @ W + b``: ``x_i d_o`` and ``d_o``."""
    return {'weight': _outer(x, d), 'bias': d}


def _over_columns(op: Op, slot: str, d: Num) -> Num:
    return d if slot == 'bias' else d[:, None, :]


def _summed(op: Op, slot: str, e: Num) -> Num:
    return e.sum(0)


def _vectors(op: Op) -> tuple[int, int]:
    return 1, 1


def _one_hot(op: Op, x: Num) -> Num:
    """Indices as rows of an identity; what is no row is zero."""
    if len(x.shape) != FORMULAS[op.primitive].laned:
        return x
    rows = np.arange(op.weight('weight').shape[0])
    asked(*x.shape, rows.size)
    return exact(x.value[..., None] == rows, x.floor)


def _lora(op: Op, x: Num, d: Num) -> Slots:
    """``y = alpha x @ B @ A + b``: the entry of the effective weight in B's slot."""
    alpha = constant(op.option('alpha'), d.floor)
    of_a = _outer(x @ op.weight('lora_b'), d)
    return {'lora_b': alpha * _outer(x, d), 'lora_a': alpha * of_a, 'bias': d}


def _lora_solve(op: Op, slot: str, e: Num) -> Num:
    """B reaches y through A."""
    return e.sum(0) @ op.weight('lora_a').T if slot == 'lora_b' else e.sum(0)


# element by element -------------------------------------------------------------------------------


def _elemwise(op: Op, x: None, d: Num) -> Slots:
    return {'weight': d}


def _as_it_is(op: Op, slot: str, d: Num) -> Num:
    return d


def _elemwise_solve(op: Op, slot: str, e: Num) -> Num:
    if len(op.weight(slot).shape) != op.rank:
        raise op.none('in a loop')
    return e.sum(0)


# sparse products ----------------------------------------------------------------------------------


def _entries_only(op: Op, at_entry: Num) -> Num:
    """Zero where an index that is the size of its axis says that an entry only pads the matrix."""
    sizes, indices = op.option('shape'), (op.option('rows'), op.option('columns'))
    live = np.logical_and(*(np.asarray(i) < size for i, size in zip(indices, sizes, strict=True)))
    return at_entry if live.all() else where(live, at_entry, exact(0.0, at_entry.floor))


def _gathered(op: Op, axis: int, values: Num) -> Num:
    """Numbers at rows (axis 0) or columns of the entries."""
    at = np.asarray(op.option(('rows', 'columns')[axis]), int)
    asked(values.shape[0], at.size)
    return values[:, np.minimum(at, op.option('shape')[axis] - 1)]


def _sparse(op: Op, x: Num, d: Num) -> Slots:
    """``y = x @ M + b``, ``M[row_k, col_k] += w_k``: ``x_row d_col``."""
    return {'weight': _entries_only(op, _gathered(op, 0, x) * _gathered(op, 1, d)), 'bias': d}


def _at_columns(op: Op, slot: str, d: Num) -> Num:
    return d if slot == 'bias' else _entries_only(op, _gathered(op, 1, d))


# convolutions: y[o, p] = sum_ck x[c, source(p, k)] W[o, c, k] + b[o] ------------------------------


def _layout(op: Op) -> tuple[list[int], list[int], list[int]]:
    """Where batch or output, channel and spatial axes are in x, the kernel and y."""
    if op.options.get('batch_group_count', 1) != 1:
        raise op.none('with batch groups')
    x, kernel, y = op.option('dimension_numbers')
    if x[0] or y[0]:
        raise op.none('with its batch behind another axis')
    return x, kernel, y


def _sources(op: Op, axis: int, size: int, outputs: int, window: int) -> np.ndarray:
    """``(outputs, window)``: what of x a tap reads along a spatial axis; ``size`` for padding."""
    stride, (low, _) = op.option('strides')[axis], op.option('padding')[axis]
    apart, taps_apart = (op.option(name)[axis] for name in ('lhs_dilation', 'rhs_dilation'))
    asked(outputs, window)
    at = np.arange(outputs)[:, None] * stride + np.arange(window) * taps_apart - low
    inside = (at >= 0) & (at <= (size - 1) * apart) & (at % apart == 0)
    return np.where(inside, at // apart, size)


def _taps(op: Op, x: Num, d: Num) -> Num:
    """What each element of y reads at each entry of its patch: ``(lanes, *y, *patch)``."""
    (of_x, of_kernel, of_y), kernel = _layout(op), op.weight('weight').shape
    outs, ins, *window = (kernel[axis] for axis in of_kernel)
    groups = op.option('feature_group_count')
    if outs % groups:
        raise op.none(f'of {outs} outputs in {groups} groups')
    asked(outs, ins)
    channels = np.arange(outs)[:, None] // (outs // groups) * ins
    sizes = [x.shape[axis] for axis in of_x[2:]]
    spatial = [
        _sources(op, i, size, d.shape[axis], taps)
        for i, (size, axis, taps) in enumerate(zip(sizes, of_y[2:], window, strict=True))
    ]

    def moved(array: np.ndarray) -> np.ndarray:
        asked(array.shape[of_x[0]], outs, ins, *sizes)
        array = np.transpose(array, of_x)[:, channels + np.arange(ins)]
        for i, sources in enumerate(spatial):
            axis = 3 + 2 * i
            padding = [(0, int(a == axis)) for a in range(array.ndim)]
            asked(*array.shape[:axis], *sources.shape, *array.shape[axis + 1 :])
            array = np.take(np.pad(array, padding), sources, axis)
        n = len(window)
        y = [1, *range(3, 3 + 2 * n, 2)]
        patch = [2, *range(4, 4 + 2 * n, 2)]
        y, patch = ([a[i] for i in np.argsort(o[1:])] for a, o in ((y, of_y), (patch, of_kernel)))
        return np.transpose(array, (0, *y, *patch))

    return x.moved(moved)


def _patch_axes(op: Op, slot: str, d: Num) -> Num:
    more = 0 if slot == 'bias' else len(op.option('strides')) + 1
    return d.reshape((*d.shape, *(1,) * more))


def _conv(op: Op, x: Num, d: Num) -> Slots:
    """An entry for each element of y and each kernel entry that it reads."""
    return {'weight': _patch_axes(op, 'weight', d) * _taps(op, x, d), 'bias': d}


def _conv_solve(op: Op, slot: str, e: Num) -> Num:
    """The sum over lanes and positions; the output channel goes to its place."""
    _, of_kernel, of_y = _layout(op)
    for axis in reversed([0, *sorted(of_y[2:])]):
        e = e.sum(axis)
    return e if slot == 'bias' else _transposed(e, _front_to(of_kernel[0], len(of_kernel)))


def _front_to(place: int, rank: int) -> list[int]:
    axes = list(range(1, rank))
    return [*axes[:place], 0, *axes[place:]]


def _conv_ranks(op: Op) -> tuple[int, int]:
    rank = len(op.option('strides')) + 1
    return rank, rank


# products by an equation of letters ---------------------------------------------------------------


class _Letters(NamedTuple):
    """The axes of x, the weight and y in one lane."""

    x: str
    weight: str
    y: str

    def entry(self, slot: str) -> str:
        """The axes of an entry: uses of a weight by several elements of y are kept apart."""
        shared = ''.join(a for a in self.y if a not in self.weight)
        own = self.weight if slot == 'weight' else [a for a in self.y if a in self.weight]
        return shared + ''.join(own)


def _letters(op: Op) -> _Letters:
    return _Letters(*op.option('equation').replace('->', ',').split(','))


def _transposed(num: Num, axes: list[int]) -> Num:
    return num.moved(lambda array: array.transpose(axes))


def _spread(num: Num, letters: str, target: str) -> Num:
    """Axes behind the lanes in the order of a target, of size 1 for those that are not there."""
    num = _transposed(num, [0, *(1 + letters.index(a) for a in target if a in letters)])
    sizes = dict(zip((a for a in target if a in letters), num.shape[1:], strict=True))
    return num.reshape((num.shape[0], *(sizes.get(a, 1) for a in target)))


def _einsum(op: Op, x: Num, d: Num) -> Slots:
    e, read = _letters(op), op.weight('weight').shape
    for i in reversed([i for i, a in enumerate(e.x) if a not in e.weight + e.y]):
        x = x.sum(1 + i)
    left, target = ''.join(a for a in e.x if a in e.weight + e.y), e.entry('weight')
    made = _spread(x, left, target) * _spread(d, e.y, target)
    uses = made.shape[: len(target) + 1 - len(e.weight)]
    bias = _spread(d, e.y, e.entry('bias'))
    return {'weight': made.to((*uses, *read)), 'bias': bias}


def _at_letters(op: Op, slot: str, d: Num) -> Num:
    e = _letters(op)
    return _spread(d, e.y, e.entry(slot))


def _einsum_solve(op: Op, slot: str, e: Num) -> Num:
    letters = _letters(op)
    for _ in range(1 + sum(a not in letters.weight for a in letters.y)):
        e = e.sum(0)
    return e


def _einsum_ranks(op: Op) -> tuple[int, int]:
    letters = _letters(op)
    return len(letters.x), len(letters.y)


# the table ----------------------------------------------------------------------------------------

_DENSE = Formula(_dense, _over_columns, _summed, _vectors)
_FORMS = {
    'etp': _DENSE,
    'etp_embed': _DENSE._replace(x=_one_hot),
    'etp_lora': Formula(_lora, _over_columns, _lora_solve, _vectors),
    'etp_sp': Formula(_sparse, _at_columns, _summed, _vectors),
    'etp_einsum': Formula(_einsum, _at_letters, _einsum_solve, _einsum_ranks),
}
_FORMS['etp_einsum_shared'] = _FORMS['etp_einsum']
FORMULAS: dict[str, Formula] = {
    **{f'{name}_mm': formula for name, formula in _FORMS.items()},
    **{f'{name}_mv': formula._replace(laned=False) for name, formula in _FORMS.items()},
    'etp_conv': Formula(_conv, _patch_axes, _conv_solve, _conv_ranks),
    'etp_elemwise': Formula(
        _elemwise, _as_it_is, _elemwise_solve, lambda op: (None, None), laned=False
    ),
}
