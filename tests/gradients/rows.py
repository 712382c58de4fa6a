"""Which rows of the tables of models run when."""

import itertools

import pytest

from tests import models
from tests.tiers import nightly, slow

# The rows of `make test-quick`: one of each kind of op, of state and of construct.
CORE = {
    *'leaky gru lstm_fused adaptive_lif learned_decay sparse lora gated_attention conv1d'.split(),
    *'spiking_three calls_mixed cond scan while vmap_weights back_put'.split(),
}
# Those that are asked for more in the gate than the one gradient that every row is asked for.
WIDE = {
    *CORE,
    *'vector lru plain_input stored_spike tail_flip populations fused_attention'.split(),
    *'cond_log_of_negative scan_spikes scan_two_layers broadcast move_gather_negative'.split(),
    'mix_norm',
}


# Those in which D_RTRL has something of its own.
FEW = 'gru lstm_fused adaptive_lif learned_decay conv1d spiking_two stored_spike'.split()
FEW += ['fused_attention', 'two_rows']


def row(name, *values, late=False):
    """A row of a table: quick in the core, nightly where it is ``late``, else slow."""
    marks = [nightly] if late else [] if name in CORE else [slow]
    return pytest.param(
        name, *values, marks=marks, id='-'.join(str(getattr(v, 'name', v)) for v in (name, *values))
    )


def core_first(names):
    """These rows; those outside the core are slow."""
    return [row(name) for name in names]


def wide_first(names):
    """These rows; those outside ``WIDE`` are nightly."""
    return [row(name, late=name not in WIDE) for name in names]


def is_core(name, *values) -> bool:
    """For the tables of ``tests.tiers``, whose first one has the rows."""
    return name in CORE


def every_core_first(table=models.MODELS, **flags):
    """Every row of a table with these flags."""
    return pytest.mark.parametrize('name', core_first(models.names(table, **flags)))


def every_wide_first(table=models.MODELS, **flags):
    """The same, those outside ``WIDE`` nightly."""
    return pytest.mark.parametrize('name', wide_first(models.names(table, **flags)))


def crossed(names, values):
    """Each row with one of these values in turn; the tests of the other rule reverse the turns."""
    return list(zip(names, itertools.cycle(values)))
