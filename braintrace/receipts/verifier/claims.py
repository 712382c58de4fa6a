"""The rules of what a receipt claims about itself: its digests, and why a part was skipped."""

from __future__ import annotations

import hmac

from .canonical import digest
from .checks import Check, Gated
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .record import Record


def check_digest(r: Record, c: Check) -> None:
    """The digest is that of the bytes; a signature is checked where there is a key."""
    digests = r.raw.get('digests')
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
    want = signed(digests['receipt'], c.key)
    c.true('digests/signature', hmac.compare_digest(want, signature['value']), '...', 'of this key')


def signed(receipt_digest: str, key: bytes) -> str:
    """The signature of a digest."""
    return hmac.new(key, receipt_digest.encode(), 'sha256').hexdigest()


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
