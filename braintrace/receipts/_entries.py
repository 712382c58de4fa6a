"""The fields of a receipt, made of the arrays of one step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_receipts.arrays import INLINE, array_digest, node, sample_indices
from braintrace_receipts.bounds import Num, exact, total
from braintrace_receipts.equations import Equations
from braintrace_receipts.primitives import NoFormula
from braintrace_receipts.record import Record as Read
from braintrace_receipts.record import array_paths
from braintrace_receipts.schema import with_arrays

from .. import functional
from ._capture import PRECISIONS, Record, Recording
from ._topology import Topology, plain

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
        return found


def _plain(tree):
    """A tree of dicts with the names of a receipt."""
    return {plain(k): _plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _by_state(value) -> list:
    """The arrays of each state; those of ``f`` are in its last axis."""
    return list(value) if isinstance(value, tuple | list) else list(np.moveaxis(value, -1, 0))


def direct_signals(receipt: dict) -> dict[str, dict]:
    """What of dy and c passes no new state: they without what the receipt's own factors make."""
    fields = dict(array_paths(receipt))
    record = Read(receipt, {p: v if v is None else np.float64(v) for p, v in fields.items()})
    by, dy, c = Equations(record, False), dict[str, np.ndarray](), dict[str, list]()
    eps = np.finfo(receipt['numeric']['dtype']).eps

    def rest(path: str, made: Num | None) -> np.ndarray | None:
        if fields[path] is None:
            return None
        value = record[path]
        made = exact(np.zeros(value.shape)) if made is None else made
        off = value - made.value
        small = np.abs(off) <= NOISE * eps * (np.abs(value) + made.terms)
        return None if small.all() else off

    for name in record.relations:
        with suppress(NoFormula):
            found = rest(f'signals/dy/{name}', total(by.sent_to(name)))
            dy |= {} if found is None else {name: found}
    for name, group in reversed(record.pairs):
        made = enumerate(by.old_signal(name, group))
        c[group] = [rest(f'signals/c/{group}/{i}', one) for i, one in made]
    return {'dy': dy, 'c': {g: ones for g, ones in c.items() if any(o is not None for o in ones)}}


def with_nodes(receipt: dict, dtype, arrays: str, file: str) -> dict:
    """The receipt with a node for each of its arrays, whose floats are written in one dtype, those
    of a narrow trace too. ``arrays`` says what becomes of large ones.
    """
    flat: dict[str, np.ndarray | None] = {}

    def wide(path, value):
        floating = value is not None and jnp.issubdtype(np.asarray(value).dtype, jnp.floating)
        flat[path] = np.asarray(value, dtype) if floating else value

    with_arrays(receipt, wide)

    def node_of(path, _):
        value, also = flat[path], set[int]()
        if value is None:
            return None
        if arrays == 'sample' and np.size(value) > INLINE and path.startswith('traces_before/'):
            # Also at the indices that samples of the trace after the step have.
            stem = path.rpartition('/')[0].replace('before', 'after', 1)
            for other, after in flat.items():
                if other.rpartition('/')[0] == stem and after is not None:
                    also.update(sample_indices(array_digest(after), value.size))
        return node(value, path, arrays=arrays, file=file, also=also)

    return with_arrays(receipt, node_of)
