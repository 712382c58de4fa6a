"""Tasks that need memory: seeded batches of sequences, their losses, their scores, and the score
that a learner without any knowledge of the past reaches.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._digits import digits
from ._evidence import evidence
from ._memory import adding, copy_memory
from ._run import Run, run
from ._streams import shifting_sine
from ._task import PARTS, Batch, Task

__all__ = [
    'PARTS',
    'Batch',
    'Run',
    'Task',
    'adding',
    'copy_memory',
    'digits',
    'evidence',
    'run',
    'shifting_sine',
]
