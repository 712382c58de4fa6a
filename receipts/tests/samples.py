"""A receipt and a config with every key of their schema, and no meaning."""

from __future__ import annotations

from braintrace_receipts import kinds
from braintrace_receipts.array_kind import Array
from braintrace_receipts.schema import SCHEMAS, SHA


def full(name):
    """A value of a schema with each optional key, and two entries in each map and list."""
    return example(SCHEMAS[name])


def example(kind):
    if isinstance(kind, kinds.Fields):
        return {name: example(part) for name, part in kind.kinds.items()}
    if isinstance(kind, kinds.Maybe):
        return example(kind.kind)
    if isinstance(kind, kinds.ByKeys):
        return example(kind.other)
    if isinstance(kind, kinds.List):
        return [example(kind.kind), example(kind.kind)]
    if isinstance(kind, kinds.Table):
        return {'a': example(kind.kind), 'b/c': example(kind.kind)}
    if isinstance(kind, Array):
        return {'shape': [2, 2], 'dtype': 'float32', 'data': [0.1, -0.0, 1e-38, 3.0]}
    return leaf(kind)


def leaf(kind):
    if isinstance(kind, kinds.Number):
        return 0.5
    if isinstance(kind, kinds.Flag):
        return True
    if isinstance(kind, kinds.Whole):
        return max(kind.least, 3)
    if kind.choices:
        return kind.choices[0]
    return ('sha256:' if kind == SHA else '') + 'a' * 64
