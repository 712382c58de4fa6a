"""The formats as closed, ordered, versioned tables: receipt and config.

``check`` judges structure and types alone: keys, kinds of values, finite numbers, arrays that hold
what their shape says. What the names mean and which shapes fit each other is rule 0's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .array_kind import DIGEST, Array, array_schema
from .errors import MAX_ELEMENTS, MAX_LANES, MAX_NAMES
from .kinds import (
    ByKeys,
    Fields,
    Flag,
    Kind,
    List,
    Maybe,
    Number,
    Problem,
    Table,
    Text,
    Whole,
)

TEXT, NUMBER, FLAG, ARRAY = Text(), Number(), Flag(), Array()
COUNT = Whole(0)
ARRAYS = Table(ARRAY)  # by a parameter's path or a state's name
STATES = List(Maybe(ARRAY))  # one for each state of a group
SHA = Text(pattern='sha256:[0-9a-f]{64}')
NOTES = Table(Text(most=100_000))

BASES = (
    'nondeterministic_hardware',
    'unsupported_operation',
    'distributed_field',
    'third_party',
    'opaque_cell',
    'sampled_arrays',
)

FEEDBACK = Maybe(Fields({'kind': Text(choices=('fixed', 'modulator')), 'array': ARRAY}))
ALGORITHM = Fields(
    {
        'name': Text(choices=('D_RTRL', 'ES_D_RTRL')),
        'credit': Text(choices=('cut', 'whole')),
        'decay_x': Maybe(NUMBER),
        'decay_f': Maybe(NUMBER),
        'kappa': NUMBER,
        'feedback': FEEDBACK,
    }
)
NUMERIC = Fields(
    {
        'dtype': Text(choices=('float32', 'float64')),
        'trace_dtype': Text(choices=('float32', 'float64', 'bfloat16')),
        'matmul_precision': Text(choices=('highest', 'tf32', 'bf16')),
        'device': TEXT,
        'k': Maybe(NUMBER),
    }
)
SURROGATE = Fields({'name': TEXT, 'parameters': Table(NUMBER)})
CONSTANTS = Fields(
    {
        'leak?': NUMBER,
        'dt?': NUMBER,
        'tau?': NUMBER,
        'alpha?': NUMBER,
        'theta?': NUMBER,
        'reset_gradient?': FLAG,
        'surrogate?': SURROGATE,
        'tau_a?': NUMBER,
        'rho?': NUMBER,
        'beta?': NUMBER,
        'tau_out?': NUMBER,
        'kappa_out?': NUMBER,
    }
)
INDICES = List(COUNT, MAX_ELEMENTS)
AXES = List(COUNT, 8)
SIZES = List(Whole(1), 8)
# What of an application is static, as far as a formula needs it. ``through``: slots whose weight is
# a function of the parameter; ``positions``: where in a lane of a group the elements of y stand, if
# not each at its own place, or null where that is not told.
OPTIONS = Fields(
    {
        'alpha?': NUMBER,
        'rows?': INDICES,
        'columns?': INDICES,
        'shape?': List(COUNT, 2),
        'strides?': SIZES,
        'padding?': List(List(Whole(), 2), 8),
        'lhs_dilation?': SIZES,
        'rhs_dilation?': SIZES,
        'feature_group_count?': Whole(1),
        'batch_group_count?': Whole(1),
        'dimension_numbers?': List(AXES, 3),
        'equation?': TEXT,
        'through?': List(TEXT),
        'behind?': List(TEXT),
        'positions?': Table(Maybe(INDICES)),
    }
)
RELATION = Fields(
    {
        'name': TEXT,
        'primitive': TEXT,
        'params': Table(TEXT),
        'groups': List(TEXT),
        'source': Maybe(List(TEXT)),
        'options?': OPTIONS,
    }
)
TOPOLOGY = Fields(
    {
        'cell': Text(choices=('rnn', 'lif', 'alif', 'opaque')),
        'readout': Maybe(Text(choices=('linear', 'leaky'))),
        'groups': List(
            Fields({'name': TEXT, 'shape': List(COUNT, 8), 'states': List(TEXT)}), MAX_NAMES
        ),
        'relations': List(RELATION, MAX_NAMES),
        'routes': Table(
            Fields({'kind': Text(choices=('trace', 'same-step', 'frozen')), 'reason?': TEXT})
        ),
        'roles': Table(TEXT),
        'constants': CONSTANTS,
    }
)
# The lanes of a step: who they are, who starts anew, and how many steps each trace has seen.
BATCH: dict[str, Kind] = {
    'lanes': List(Whole(), MAX_LANES),
    'reset': List(FLAG, MAX_LANES),
    't': List(COUNT, MAX_LANES),
}
ENTRIES = ByKeys(Fields({'x': ARRAY, 'f': STATES}), Table(STATES))
TRACES = List(Fields({'relation': TEXT, 'group': TEXT, 'entries': ENTRIES}))
FACTORS = List(
    Fields(
        {
            'relation': TEXT,
            'group': Maybe(TEXT),
            'x': Maybe(ARRAY),  # null for an op that reads nothing
            'D_f': STATES,
            'D': List(STATES),
        }
    )
)
LOSS_INPUT: dict[str, Kind] = {
    'name': TEXT,
    'reduction': Text(choices=('mean', 'sum')),
    'mask': ARRAY,
}
LOSS = Fields(
    {
        **LOSS_INPUT,
        'divisor': NUMBER,
        'probabilities?': ARRAY,
        'per_lane': ARRAY,
        'value': NUMBER,
    }
)
SIGNALS = Fields(
    {
        'err': ARRAY,
        'dh': Table(STATES),
        'dy': ARRAYS,
        'c': Table(STATES),
        'correction?': ARRAY,
        'direct?': Fields({'dy': ARRAYS, 'c': Table(STATES)}),
    }
)
WINDOW = Fields(
    {
        'index': COUNT,
        'length': Whole(1),
        'reduction': Text(choices=('mean', 'sum')),
        'weight': NUMBER,
        'divisor': NUMBER,
        'gradients?': ARRAYS,
    }
)
OPTIMIZER_CONFIG = Fields(
    {
        'lr': NUMBER,
        'momentum?': NUMBER,
        'nesterov?': FLAG,
        'b1?': NUMBER,
        'b2?': NUMBER,
        'eps?': NUMBER,
        'eps_root?': NUMBER,
        'weight_decay?': NUMBER,
    }
)
OPTIMIZER_STATE = Fields({'count': Maybe(COUNT), 'slots': Table(ARRAYS)})
OPTIMIZER_INPUT: dict[str, Kind] = {
    'name': TEXT,
    'config': OPTIMIZER_CONFIG,
    'state_before': OPTIMIZER_STATE,
}
OPTIMIZER = Fields({**OPTIMIZER_INPUT, 'state_after': OPTIMIZER_STATE, 'updates': ARRAYS})
HEAD: dict[str, Kind] = {'run_id': TEXT, 'step': COUNT, 'every': Whole(1)}
SIGNATURE = Fields({'algorithm': Text(choices=('hmac-sha256',)), 'key_id': TEXT, 'value': DIGEST})

RECEIPT = Fields(
    {
        'schema': Text(choices=('braintrace.receipt/1',)),
        **HEAD,
        'spec_digest': SHA,
        'algorithm': ALGORITHM,
        'numeric': NUMERIC,
        'topology': TOPOLOGY,
        **BATCH,
        'inputs': ARRAY,
        'targets': ARRAY,
        'params_before': ARRAYS,
        'carry_before': ARRAYS,
        'initial?': ARRAYS,
        'factors': FACTORS,
        'traces_before': TRACES,
        'traces_after': TRACES,
        'carry_after': ARRAYS,
        'outputs': ARRAY,
        'loss': LOSS,
        'signals': SIGNALS,
        'gradients': ARRAYS,
        'window?': WINDOW,
        'optimizer': Maybe(OPTIMIZER),
        'params_after': ARRAYS,
        'skip?': Fields({'basis': Text(choices=BASES)}),
        'source?': Fields({'framework': TEXT, 'version': TEXT}),
        'import_provenance?': Fields({'source_hash': SHA, 'format': TEXT, 'importer': TEXT}),
        'helper?': NOTES,
        'labels?': NOTES,
        'digests?': Fields({'receipt': SHA, 'root?': SHA, 'signature?': SIGNATURE}),
    }
)
CONFIG = Fields(
    {
        'schema': Text(choices=('braintrace.config/1',)),
        **HEAD,
        'algorithm': ALGORITHM,
        'numeric': NUMERIC,
        'topology': TOPOLOGY,
        **BATCH,
        'inputs': ARRAY,
        'targets': ARRAY,
        'params_before': ARRAYS,
        'carry_before': ARRAYS,
        'initial?': ARRAYS,
        'traces_before?': TRACES,
        'loss': Fields(LOSS_INPUT),
        'optimizer': Maybe(Fields(OPTIMIZER_INPUT)),
    }
)
SCHEMAS: dict[str, Fields] = {
    'braintrace.receipt/1': RECEIPT,
    'braintrace.config/1': CONFIG,
}
MOST = 50  # problems that ``check`` tells


def check(value: Any, schema: str) -> list[Problem]:
    """What is wrong with the structure of any value, first things first; empty if nothing is.

    >>> check(None, 'braintrace.receipt/1')
    [Problem(path='', message='null where an object is due')]
    """
    found: list[Problem] = []
    for problem in SCHEMAS[schema].problems(value, ''):
        found.append(problem)
        if len(found) == MOST:
            break
    return found


def json_schema(name: str) -> dict:
    """The JSON Schema (draft 2020-12) of a format; ``properties`` are in the canonical order."""
    return {
        '$schema': 'https://json-schema.org/draft/2020-12/schema',
        '$id': name,
        **SCHEMAS[name].schema(),
        '$defs': {'array': array_schema()},
    }


def schema_text(name: str) -> str:
    """The text of the shipped file of a format."""
    return json.dumps(json_schema(name), indent=1) + '\n'


def schema_file(name: str) -> Path:
    """Where the JSON Schema of a format is shipped: ``schemas/receipt-1.json``."""
    stem = name.removeprefix('braintrace.').replace('/', '-')
    return Path(__file__).with_name('schemas') / f'{stem}.json'
