"""What an op registers, and how a test leaves no trace of it."""

import copy

import pytest

from braintrace import _etrace_op as ops

TABLES = [
    ops.ETP_PRIMITIVES,
    ops.ETP_PRIMITIVE_SPECS,
    *(primitive.own_rules for primitive in ops.ETP_PRIMITIVES),
]


@pytest.fixture
def registries_are_restored():
    """What a test registers is gone afterwards."""
    kept = [copy.copy(table) for table in TABLES]
    yield
    for table, content in zip(TABLES, kept):
        table.clear()
        table.update(content)
