"""The rules of what a receipt says of itself: digests, routes, and why a part was skipped."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

import numpy as np

from .canonical import digest
from .checks import Check, Gated
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .record import Record


def check_digest(r: Record, c: Check) -> None:
    """The digest is that of the bytes; a signature is checked where there is a key."""
    digests, c.ended = r.raw.get('digests'), False
    if c.key is not None:
        c.true('digests/signature', 'signature' in (digests or {}), 'none', 'one: a key was given')
    if digests is None:
        raise Gated('the receipt has no digest')
    found = digest(r.raw)
    c.true('digests/receipt', digests['receipt'] == found, digests['receipt'], found)
    signature = digests.get('signature')
    if signature is None:
        return
    if c.key is None:
        c.tell('signature', 'not checked: no key was given')
        return
    own, c.ended = (
        hmac.compare_digest(signed(digests, c.key, end), signature['value'])
        for end in (False, True)
    )
    c.true('digests/signature', own or c.ended, '...', 'of this key, for this digest and root')


def signed(digests: Mapping, key: bytes, end: bool = False) -> str:
    """The signature of a receipt at its place in a run, by its digests, and of the end."""
    text = '\n'.join((digests['receipt'], digests.get('root', ''), 'end' if end else ''))
    return hmac.new(key, text.encode(), 'sha256').hexdigest()


def check_skip(r: Record, c: Check) -> None:
    """A skip names a basis that this receipt has."""
    skip = r.raw.get('skip')
    if skip is None:
        raise Gated('nothing is skipped')
    optimizer = r.raw['optimizer'] or {'name': 'sgd'}
    unknown = r.raw['loss']['name'] not in LOSSES or optimizer['name'] not in OPTIMIZERS
    holds = {
        'opaque_cell': not r.known,
        'sampled_arrays': bool(r.sampled),
        'unsupported_operation': unknown or not r.known,
    }
    basis = skip['basis']
    c.true('skip/basis', holds.get(basis, True), basis, 'a basis that this receipt has')


def check_routes(r: Record, c: Check) -> None:
    """Each parameter has one route, and a gradient if it is trained."""
    declared, gradients = r.topology['routes'], r.keys('gradients')
    related = {
        path
        for one in r.relations.values()
        for path in [*one['params'].values(), *one.get('options', {}).get('behind', ())]
    }
    for path in sorted(r.keys('params_before') | set(declared)):
        route = declared.get(path)
        at = f'topology/routes/{path}'
        if not c.true(at, route is not None, 'no route', 'trace, same-step or frozen'):
            continue
        frozen, has = route['kind'] == 'frozen', path in gradients
        want = 'no gradient, or none declared' if frozen else 'a gradient'
        c.true(f'gradients/{path}', has != frozen, 'a gradient' if has else 'no gradient', want)
        if route['kind'] == 'trace':
            c.true(at, path in related, 'trace, and no relation', 'a relation that has it')
        whole = has and r.sample(f'gradients/{path}') is None
        if whole and not np.any(r[f'gradients/{path}']) and 'reason' not in route:
            c.tell(f'zero_gradient/{path}', 'all of its gradient is zero')
