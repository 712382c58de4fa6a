"""A receipt as flat fields: path -> array, and the structure that says which paths there are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import array_of, is_sampled, samples_of
from .bounds import TINY, UNIT, Num, exact
from .canonical import spec_digest
from .schema import with_arrays

FILTER = '(filter)'  # the state of a group that a filter adds


class Unavailable(Exception):
    """A field whose numbers are not all here; the reason is the argument."""


def array_paths(raw: Mapping) -> list[tuple[str, Any]]:
    """``(path, node or None)`` of every array of a receipt or of a configuration."""
    found: list[tuple[str, Any]] = []
    with_arrays(raw, lambda path, value: found.append((path, value)))
    return found


def elements_of(nodes: Iterable[tuple[str, Any]], sampled: bool = False) -> int:
    """The numbers of arrays, or of those that are whole."""
    counted = (one for _, one in nodes if one is not None and (sampled or not is_sampled(one)))
    return sum(math.prod(one['shape']) for one in counted)


def below(paths: list[str], prefix: str) -> list[str]:
    """Of sorted paths those behind a prefix and its slash."""
    return paths[bisect_left(paths, f'{prefix}/') : bisect_left(paths, f'{prefix}0')]


@dataclass(eq=False)
class Record:
    """A receipt whose structure was found to be right; ``fields`` has its arrays."""

    raw: Mapping
    fields: dict[str, Any] = field(default_factory=dict)
    kept: dict[tuple, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.fields:
            return
        for path, node in array_paths(self.raw):
            kept = node is None or is_sampled(node)
            self.fields[path] = node if kept else array_of(node)
        for name in ('value', 'divisor'):
            if name in self.raw['loss']:
                self.fields[f'loss/{name}'] = np.asarray(self.raw['loss'][name], float)

    def __getitem__(self, path: str) -> np.ndarray:
        found = self.fields.get(path)
        if isinstance(found, np.ndarray):
            return found
        why = f'{path} is not there' if found is None else f'sampled: {path}'
        raise Unavailable(why)

    def sample(self, path: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Flat indices and values of a sampled array."""
        found = self.fields.get(path)
        return samples_of(found) if is_sampled(found) else None

    @property
    def sampled(self) -> list[str]:
        """Paths of which a sample alone is here."""
        return [path for path, value in self.fields.items() if is_sampled(value)]

    def num(self, path: str) -> Num:
        """A field as it stands, without an error."""
        if (path,) not in self.kept:
            self.kept[path,] = exact(self[path], self.floor)
        return self.kept[path,]

    def entries(self, prefix: str) -> list[Num | None]:
        """The list of fields ``prefix/0, prefix/1, ...``; None is a zero by structure."""
        found, i = [], 0
        while f'{prefix}/{i}' in self.fields:
            missing = self.fields[f'{prefix}/{i}'] is None
            found.append(None if missing else self.num(f'{prefix}/{i}'))
            i += 1
        return found

    def matrix(self, prefix: str) -> list[list[Num | None]]:
        """Rows ``prefix/0, ...`` of entries."""
        rows, i = [], 0
        while f'{prefix}/{i}/0' in self.fields:
            rows.append(self.entries(f'{prefix}/{i}'))
            i += 1
        return rows

    # structure ------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """How many numbers are here."""
        return sum(one.size for one in self.fields.values() if isinstance(one, np.ndarray))

    @property
    def dtype(self) -> str:
        return self.raw['numeric']['dtype']

    @cached_property
    def floor(self) -> float:
        """The smallest normal number over u."""
        return TINY[self.dtype] / UNIT[self.dtype]

    @property
    def algorithm(self) -> Mapping:
        return self.raw['algorithm']

    @property
    def factored(self) -> bool:
        """Whether the trace is one factor of the input and one of the output."""
        return self.algorithm['name'] == 'ES_D_RTRL'

    @property
    def topology(self) -> Mapping:
        return self.raw['topology']

    @property
    def known(self) -> bool:
        """Whether the engine knows the cell."""
        return self.topology['cell'] != 'opaque'

    @property
    def constants(self) -> Mapping:
        return self.topology['constants']

    @cached_property
    def relations(self) -> dict[str, Mapping]:
        return {relation['name']: relation for relation in self.topology['relations']}

    @cached_property
    def groups(self) -> dict[str, Mapping]:
        return {group['name']: group for group in self.topology['groups']}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each relation with each of its groups."""
        return [(name, g) for name, r in self.relations.items() for g in r['groups']]

    def frozen(self, path: str) -> bool:
        """Whether a parameter is declared to stay."""
        return self.topology['routes'].get(path, {}).get('kind') == 'frozen'

    @property
    def lanes(self) -> int:
        return len(self.raw['lanes'])

    @cached_property
    def t(self) -> np.ndarray:
        return np.asarray(self.raw['t'])

    @cached_property
    def reset(self) -> np.ndarray:
        return np.asarray(self.raw['reset'], bool)

    @cached_property
    def spec(self) -> str:
        """The digest of what stays the same in a run."""
        return spec_digest(self.raw)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Algorithm, numbers, cell and loss: what a run keeps."""
        numbers = {f'algorithm/{k}': v for k, v in self.algorithm.items() if k != 'feedback'}
        numeric = {f'numeric/{k}': v for k, v in self.raw['numeric'].items() if k != 'k'}
        kind = (self.algorithm['feedback'] or {}).get('kind')
        names = ('cell', 'readout', 'roles', 'constants')
        topology = {f'topology/{name}': self.topology[name] for name in names}
        loss = {f'loss/{name}': self.raw['loss'][name] for name in ('name', 'reduction')}
        return {**numbers, **numeric, **topology, **loss, 'algorithm/feedback': kind}

    def of_lanes(self, path: str, lanes: np.ndarray | None) -> np.ndarray | None:
        """A field at some lanes, or whole if there are none; None is a zero by structure."""
        if self.fields.get(path) is None:
            return None
        value = self[path]
        has = lanes is not None and value.shape[:1] == lanes.shape
        return value[lanes] if has else value

    def x(self, relation: str) -> Num | None:
        """What an op read; None if it reads nothing."""
        groups = self.relations[relation]['groups']
        path = f'factors/{relation}/{groups[0] if groups else ""}/x'
        return None if path in self.fields and self.fields[path] is None else self.num(path)

    def shape(self, path: str) -> tuple[int, ...]:
        """Of a field, also of a sampled one."""
        found = self.fields[path]
        return tuple(found['shape']) if is_sampled(found) else found.shape

    @cached_property
    def paths(self) -> list[str]:
        """Of all fields, sorted."""
        return sorted(self.fields)

    def keys(self, prefix: str) -> set[str]:
        """What is behind a prefix."""
        return {path[len(prefix) + 1 :] for path in below(self.paths, prefix)}
