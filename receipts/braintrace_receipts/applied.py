"""The applications of ops that a receipt tells of: their formulas, and where their y stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .bounds import exact
from .checks import Gated
from .engine import Entries, op_of
from .primitives import FORMULAS, NoFormula, Op
from .record import Record


@contextmanager
def told(reasons: set[str]) -> Iterator[None]:
    """Collects why there is no formula; the rest is compared all the same."""
    try:
        yield
    except NoFormula as reason:
        reasons.add(str(reason))


def gate(reasons: set[str]) -> None:
    """Gates a rule off if there is any reason."""
    if reasons:
        raise Gated('; '.join(sorted(reasons)))


def application(r: Record, name: str) -> Op:
    """The application of a relation. Raises ``NoFormula``."""
    relation = r.relations[name]
    known = FORMULAS.get(relation['primitive'])
    laned = known is None or known.laned
    op = op_of(r, relation, len(r.shape(f'signals/dy/{name}')) - laned)
    _ = op.formula  # it raises where there is none
    return op


def placed(r: Record, name: str, group: str, values: Entries) -> Entries:
    """Numbers at the positions of a group, gathered to those that a relation's y feeds."""
    at = f'factors/{name}/{group}/D_f'
    like = [r.shape(f'{at}/{i}') for i in r.keys(at) if r.fields[f'{at}/{i}'] is not None]
    positions = r.relations[name].get('options', {}).get('positions', {})
    found: Entries = []
    for one in values:
        if one is not None and like and group in positions:
            if positions[group] is None:
                raise NoFormula(f'no positions of {name} in {group}')
            flat = one.reshape((one.shape[0], -1))
            one = flat[:, np.asarray(positions[group], int)].reshape(like[0])
        found.append(one)
    return found


def known_entries(r: Record, prefix: str) -> Entries:
    """A list of fields, with NaN where a sample does not tell."""
    found: Entries = []
    for i in range(len(r.keys(prefix))):
        path = f'{prefix}/{i}'
        sample = r.sample(path)
        if sample is None:
            found.append(None if r.fields[path] is None else r.num(path))
            continue
        whole = np.full(r.shape(path), np.nan)
        whole.reshape(-1)[sample[0]] = sample[1]
        found.append(exact(whole, r.floor))
    return found
