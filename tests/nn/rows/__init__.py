"""The table of modules: every class of ``braintrace.nn`` with a state, or in front of one."""

from tests.nn.rows import cells, delay, diagonal, layers, legendre, matrix_memory, neurons, synapses
from tests.nn.rows.row import Row, bare, built, case_of, inputs, plain, values

PARTS = cells, delay, diagonal, layers, legendre, matrix_memory, neurons, synapses
ROWS: dict[str, Row] = {row.name: row for part in PARTS for row in part.ROWS}

__all__ = ['ROWS', 'Row', 'bare', 'built', 'case_of', 'inputs', 'plain', 'values']
