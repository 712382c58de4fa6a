"""The fields of a receipt, made of the arrays of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_receipts.arrays import INLINE, array_digest, node, sample_indices
from braintrace_receipts.schema import with_arrays

from .. import functional
from ._capture import PRECISIONS, Record, Recording
from ._topology import Topology, plain

__all__ = ['Fields', 'named', 'with_nodes']

NOISE = 256  # roundings of the terms: what is less beside them is no path of its own


def named(names, tree) -> dict[str, np.ndarray]:
    """The leaves of a tree by name, in the order of the names."""
    return dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))


@dataclass(frozen=True)
class Fields:
    """The fields of the receipt of one step, whose arrays are those of NumPy in ``record``."""

    recording: Recording
    topology: Topology
    record: Record

    @cached_property
    def observed(self) -> functional.Observed:
        """With the names of ops and groups as a receipt has them."""
        return functional.Observed(*map(_plain, self.record.observed))

    @property
    def factored(self) -> bool:
        """Whether the trace is one factor of the input and one of the output."""
        return self.topology.algorithm['name'] == 'ES_D_RTRL'

    def states(self, group: str, values) -> list:
        """One array, or None, for each state of a group, in the order of the receipt."""
        return [values[s] for s in self.topology.orders[group]]

    def by_group(self, values: dict) -> dict:
        return {group: self.states(group, vector) for group, vector in values.items()}

    # the parts of a receipt -----------------------------------------------------------------------

    @property
    def algorithm(self) -> dict:
        key, found = self.topology.feedback, dict(self.topology.algorithm)
        if key is not None:
            weight = self.observed.feedback[key]['weight']
            found['feedback'] = {'kind': 'fixed', 'array': weight}
        return found

    @property
    def numeric(self) -> dict:
        dtype = self.record.outputs.dtype.name
        own = getattr(self.recording.learner.rule, 'trace_dtype', None)
        return {
            'dtype': dtype,
            'trace_dtype': dtype if own is None else np.dtype(own).name,
            'matmul_precision': PRECISIONS[int(self.record.precision)],
            'device': jax.devices()[0].device_kind,
            'k': None,
        }

    @property
    def factors(self) -> list[dict]:
        found, seen = [], self.observed
        for relation in self.topology.topology['relations']:
            name = relation['name']
            for group in relation['groups'] or [None]:
                D_f = [] if group is None else self.states(group, seen.df[name][group])
                D = [] if group is None else self.states(group, seen.d[group])
                found.append(
                    {
                        'relation': name,
                        'group': group,
                        'x': seen.x.get(name),
                        'D_f': D_f,
                        'D': [self.states(group, row) for row in D],
                    }
                )
        return found

    def traces(self, when: str) -> list[dict]:
        """The entries of the trace ``'before'`` or ``'after'`` the step, by relation and group."""
        return [
            {
                'relation': relation,
                'group': group,
                'entries': {
                    slot: value
                    if slot == 'x' and self.factored
                    else self.states(group, _by_state(value))
                    for slot, value in sorted(slots.items(), reverse=True)
                },
            }
            for relation, of_group in getattr(self.observed, when).items()
            for group, slots in of_group.items()
        ]

    @property
    def loss(self) -> dict:
        record, loss = self.record, self.recording.loss
        shown = record.probabilities
        return {
            'name': loss.name,
            'reduction': loss.reduction,
            'mask': record.mask,
            'divisor': float(loss.divisor(record.mask)),
            **({} if shown is None else {'probabilities': shown}),
            'per_lane': record.per_lane,
            'value': float(str(record.loss)),
        }

    @property
    def signals(self) -> dict:
        seen = self.observed
        found = {
            'err': self.record.err,
            'dh': self.by_group(seen.dh),
            'dy': seen.dy,
            'c': self.by_group(seen.c),
        }
        if self.factored:
            found['correction'] = 1 - self.topology.algorithm['decay_f'] ** (seen.t + 1.0)
        if self.topology.topology['cell'] == 'opaque':
            found['direct'] = self._direct()
        return found

    def _placed(self, name: str, group: str, values):
        """Numbers at the positions of a group, gathered to where y stands."""
        positions = self.topology.positions[name].get(group)
        shape = next((d.shape for d in self.observed.df[name][group] if d is not None), None)
        if positions is None or shape is None:
            return values
        return [
            None if v is None else np.reshape(v, (len(v), -1))[:, positions].reshape(shape)
            for v in values
        ]

    def _direct(self) -> dict:
        """What of dy and c passes no new state, of a cell whose formulas no verifier has."""
        seen, dy, c = self.observed, {}, {}
        for key, value in seen.dy.items():
            pairs = [
                pair
                for group, df in seen.df.get(key, {}).items()
                for pair in zip(self._placed(key, group, seen.dh[group]), df, strict=True)
            ]
            rest = _rest(value, pairs)
            if rest is not None:
                dy[key] = rest
        for group, values in seen.c.items():
            columns = zip(*seen.d[group], strict=True)
            rests = [
                None if value is None else _rest(value, zip(seen.dh[group], column, strict=True))
                for value, column in zip(values, columns, strict=True)
            ]
            if any(rest is not None for rest in rests):
                c[group] = rests
        return {'dy': dy, 'c': self.by_group(c)}


def _rest(value, pairs) -> np.ndarray | None:
    """``value - sum a b``, or None where this is rounding."""
    terms = [np.float64(a) * b for a, b in pairs if a is not None and b is not None]
    terms = [_summed(term, np.ndim(value), len(value)) for term in terms]
    rest = np.float64(value) - sum(terms)
    size = np.abs(value) + sum(map(np.abs, terms))
    small = np.abs(rest) <= NOISE * np.finfo(value.dtype).eps * size
    return None if small.all() else rest.astype(value.dtype)


def _summed(term, ndim: int, lanes: int) -> np.ndarray:
    """A product at the entries of y, summed over the axes that these have more than y."""
    first = 1 if ndim and len(term) == lanes else 0
    more = term.ndim - ndim
    return term.sum(tuple(range(first, first + more))) if more > 0 else term


def _plain(tree):
    """A tree of dicts with the names of a receipt."""
    return {plain(k): _plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _by_state(value) -> list:
    """The arrays of each state; those of ``f`` stand in its last axis."""
    return list(value) if isinstance(value, tuple | list) else list(np.moveaxis(value, -1, 0))


def with_nodes(receipt: dict, dtype, arrays: str, file: str) -> dict:
    """The receipt with a node for each of its arrays, whose floats are written in one dtype, those
    of a narrow trace too. ``arrays`` says what becomes of large ones.
    """
    flat: dict[str, np.ndarray | None] = {}

    def wide(path, value):
        floating = value is not None and jnp.issubdtype(np.asarray(value).dtype, jnp.floating)
        flat[path] = np.asarray(value, dtype) if floating else value

    with_arrays(receipt, wide)

    def sampled_beside(path: str, size: int) -> set[int]:
        """The indices that samples of the trace after the step have."""
        stem, also = path.rpartition('/')[0].replace('before', 'after', 1), set[int]()
        for other, value in flat.items():
            if other.rpartition('/')[0] == stem and value is not None:
                also.update(sample_indices(array_digest(value), size))
        return also

    def node_of(path, _):
        value, also = flat[path], set[int]()
        if value is None:
            return None
        if arrays == 'sample' and np.size(value) > INLINE and path.startswith('traces_before/'):
            also = sampled_beside(path, value.size)
        return node(value, path, arrays=arrays, file=file, also=also)

    return with_arrays(receipt, node_of)
