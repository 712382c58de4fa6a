"""The stateful shell: learners for brainstate models."""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from .base import ETraceLearner
from .evaluation import evaluate
from .learners import (
    D_RTRL,
    ES_D_RTRL,
    compile,
    compile_etrace_graph,
    drawn,
    learner_named,
    plain,
    shell_of,
)
from .states import ModelStates, check_model
