"""The stateful shell: learners for brainstate models."""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from .base import ETraceLearner
from .learners import (
    D_RTRL,
    ES_D_RTRL,
    IODimVjpAlgorithm,
    ParamDimVjpAlgorithm,
    compile,
    compile_etrace_graph,
    pp_prop,
)
from .states import ModelStates, check_model

__all__ = [
    'D_RTRL',
    'ES_D_RTRL',
    'ETraceLearner',
    'IODimVjpAlgorithm',
    'ModelStates',
    'ParamDimVjpAlgorithm',
    'check_model',
    'compile',
    'compile_etrace_graph',
    'pp_prop',
]
