"""The fields of a receipt, made of the arrays of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_receipts.arrays import INLINE, array_digest, node, sample_indices

from .. import functional
from ._capture import PRECISIONS, Record, Recording
from ._topology import Topology, plain

__all__ = ['Fields', 'named']

NOISE = 256  # roundings of the terms: what is less beside them is no path of its own


def named(names, tree) -> dict[str, np.ndarray]:
    """The leaves of a tree by name, in the order of the names."""
    return dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))


@dataclass(frozen=True)
class Fields:
    """The fields of the receipt of one step; ``record`` has arrays of NumPy, ``file`` is the name
    for large arrays.
    """

    recording: Recording
    topology: Topology
    record: Record
    file: str

    @cached_property
    def observed(self) -> functional.Observed:
        """With the names of ops and groups as a receipt has them."""
        return functional.Observed(*map(_plain, self.record.observed))

    @property
    def factored(self) -> bool:
        """Whether the trace is one factor of the input and one of the output."""
        return self.topology.algorithm['name'] == 'ES_D_RTRL'

    def array(self, value, name: str, beside=()) -> dict:
        """The node of an array; the numbers of a narrow trace are written in the step's dtype. A
        sample of it also has the entries that samples of the arrays ``beside`` have.
        """
        value, also = self._wide(value), set[int]()
        if self.recording.arrays == 'sample' and value.size > INLINE:
            for other in beside:
                also.update(sample_indices(array_digest(self._wide(other)), value.size))
        return node(value, name, arrays=self.recording.arrays, file=self.file, also=also)

    def _wide(self, value) -> np.ndarray:
        value = np.asarray(value)
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(self.record.outputs.dtype) if floating else value

    def arrays(self, values: dict, name: str) -> dict:
        return {key: self.array(value, f'{name}/{key}') for key, value in values.items()}

    def states(self, group: str, values, name: str, beside=()) -> list:
        """One node for each state of a group, in the order of the receipt."""
        return [
            None if values[s] is None else self.array(values[s], f'{name}/{i}', beside)
            for i, s in enumerate(self.topology.orders[group])
        ]

    def by_group(self, values: dict, name: str) -> dict:
        return {g: self.states(g, vector, f'{name}/{g}') for g, vector in values.items()}

    # the parts of a receipt -----------------------------------------------------------------------

    @property
    def algorithm(self) -> dict:
        key, found = self.topology.feedback, dict(self.topology.algorithm)
        if key is not None:
            weight = self.observed.feedback[key]['weight']
            found['feedback'] = {'kind': 'fixed', 'array': self.array(weight, 'feedback')}
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
        found = []
        for relation in self.topology.topology['relations']:
            name, groups = relation['name'], relation['groups']
            for group in groups:
                at = f'factors/{name}/{group}'
                rows = [self.observed.d[group][s] for s in self.topology.orders[group]]
                found.append(
                    {
                        'relation': name,
                        'group': group,
                        'x': self._x(name, f'{at}/x'),
                        'D_f': self.states(group, self.observed.df[name][group], f'{at}/D_f'),
                        'D': [self.states(group, r, f'{at}/D/{i}') for i, r in enumerate(rows)],
                    }
                )
            if not groups:
                x = self._x(name, f'factors/{name}/x')
                found.append({'relation': name, 'group': None, 'x': x, 'D_f': [], 'D': []})
        return found

    def _x(self, name: str, path: str) -> dict | None:
        x = self.observed.x.get(name)
        return None if x is None else self.array(x, path)

    def traces(self, when: str) -> list[dict]:
        """The entries of the trace ``'before'`` or ``'after'`` the step, by relation and group."""
        found, trace = [], getattr(self.observed, when)
        for relation, of_group in trace.items():
            for group, slots in of_group.items():
                at = f'traces_{when}/{relation}/{group}'
                after = self.observed.after[relation][group] if when == 'before' else {}
                entries = {
                    slot: self._entry(group, slot, value, f'{at}/{slot}', after.get(slot))
                    for slot, value in sorted(slots.items(), reverse=True)
                }
                found.append({'relation': relation, 'group': group, 'entries': entries})
        return found

    def _entry(self, group: str, slot: str, value, name: str, beside):
        one = slot == 'x' and self.factored
        others = () if beside is None else (beside,) if one else _by_state(beside)
        if one:
            return self.array(value, name, others)
        return self.states(group, _by_state(value), name, others)

    @property
    def loss(self) -> dict:
        record, loss = self.record, self.recording.loss
        found = {
            'name': loss.name,
            'reduction': loss.reduction,
            'mask': self.array(record.mask, 'loss/mask'),
            'divisor': float(loss.divisor(record.mask)),
        }
        if record.probabilities is not None:
            found['probabilities'] = self.array(record.probabilities, 'loss/probabilities')
        found['per_lane'] = self.array(record.per_lane, 'loss/per_lane')
        return found | {'value': float(str(record.loss))}

    @property
    def signals(self) -> dict:
        seen = self.observed
        found = {
            'err': self.array(self.record.err, 'signals/err'),
            'dh': self.by_group(seen.dh, 'signals/dh'),
            'dy': self.arrays(seen.dy, 'signals/dy'),
            'c': self.by_group(seen.c, 'signals/c'),
        }
        if self.factored:
            decay = self.topology.algorithm['decay_f']
            correction = (1 - decay ** (seen.t + 1.0)).astype(self.record.outputs.dtype)
            found['correction'] = self.array(correction, 'signals/correction')
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
        return {
            'dy': self.arrays(dy, 'signals/direct/dy'),
            'c': self.by_group(c, 'signals/direct/c'),
        }


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
