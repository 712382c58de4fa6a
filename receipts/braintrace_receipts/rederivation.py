"""Rule 14: the engine derives the step again, and every field that it makes is compared."""

from __future__ import annotations

import numpy as np

from .bounds import Num, exact, far
from .checks import Check, Gated
from .engine import Derived, derive_step
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .record import Record

# What the engine makes: a stored field behind one of these that it does not make is refused.
MADE = (
    'carry_after',
    'factors',
    'gradients',
    'outputs',
    'params_after',
    'signals',
    'traces_after',
)


def obstacle(r: Record) -> str:
    """Why the engine cannot derive this step; empty if it can."""
    if not r.known:
        return 'the engine does not know this cell'
    return f'sampled: {", ".join(r.sampled)}' if r.sampled else ''


def unknown(r: Record) -> dict[str, str]:
    """Fields that the engine takes as they stand or leaves out, and why."""
    found, optimizer = {}, r.raw['optimizer']
    if r.raw['loss']['name'] not in LOSSES:
        found['signals/err'] = f'no formula for the loss {r.raw["loss"]["name"]}'
    if optimizer is not None and optimizer['name'] not in OPTIMIZERS:
        found['params_after'] = f'no formula for the optimiser {optimizer["name"]}'
    return found


def rederive(r: Record, c: Check) -> None:
    """Every field of the step, derived again; all that the engine makes has to be there."""
    reason = obstacle(r)
    if reason:
        raise Gated(reason)
    derived = derive_step(r)
    if derived.margin is not None:
        derived = _with_ties(r, c, derived, derived.margin)
    for path, num in derived.fields.items():
        stored = r.fields.get(path)
        missing = path not in r.fields and num is not None
        if c.true(path, not missing, 'it is missing', 'a field of this name'):
            c.close(path, None if stored is None else r[path], num)
    left = unknown(r)
    for path in sorted(set(r.fields) - set(derived.fields)):
        made = path.split('/')[0] in MADE and r.fields[path] is not None
        if made and not path.startswith(tuple(left)):
            c.true(path, False, 'a field', 'nothing: the engine makes no such field')
    if left:
        raise Gated('; '.join(left.values()))


def _with_ties(r: Record, c: Check, derived: Derived, margin: Num) -> Derived:
    """The step with the stored spikes where a potential is too near to its threshold to tell."""
    path = f'carry_after/{r.topology["roles"]["z"]}'
    stored = r[path]
    other = stored != (margin.value > 0)
    if not other.any():
        return derived
    away, bound = far(np.zeros(margin.shape), margin, c.limits.k * c.limits.unit)
    near = ~away
    tied = other & near
    c.ties += int(tied.sum())
    forced = np.where(tied, stored, margin.value > 0)
    if (other & ~near).any():
        own = exact(margin.value > 0)
        bad, _ = far(np.where(tied, own.value, stored), own, 0.0)
        at = tuple(int(i[0]) for i in np.nonzero(bad))
        distance, limit = abs(float(margin.value[at])), float(bound[at])
        c.fail(
            f'{path}[{", ".join(map(str, at))}]',
            float(stored[at]),
            float(own.value[at]),
            'the membrane is not near its threshold',
            delta=distance,
            bound=limit,
            count=int(bad.sum()),
        )
    return derive_step(r, forced)
