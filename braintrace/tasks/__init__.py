"""Tasks that need memory: seeded batches of sequences, their losses, their scores, and the score
that a learner without any knowledge of the past reaches.

>>> from braintrace import tasks
>>> print(tasks.evidence())
evidence 7: 225 steps, 40 inputs, 2 outputs, floor 50.0 %
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking
from ._data import characters, digits
from ._memory import adding, copy_memory
from ._run import Run, run
from ._spiking import evidence, match_to_sample, pattern_generation
from ._streams import drifting_filter, mackey_glass, shifting_sine
from ._task import PARTS, Batch, Task

__all__ = [
    'PARTS',
    'Batch',
    'Run',
    'Task',
    'adding',
    'characters',
    'copy_memory',
    'digits',
    'drifting_filter',
    'evidence',
    'run',
    'mackey_glass',
    'match_to_sample',
    'pattern_generation',
    'shifting_sine',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
