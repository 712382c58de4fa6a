"""The stateful shell: learners for brainstate models."""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from .base import ETraceLearner
from .learners import (
    D_RTRL,
    ES_D_RTRL,
    ETraceAlgorithm,
    ETraceVjpAlgorithm,
    IODimVjpAlgorithm,
    ParamDimVjpAlgorithm,
    compile,
    compile_etrace_graph,
    pp_prop,
)
from .public_names import MultiStepData, SingleStepData
from .states import ModelStates, check_model

__all__ = [
    'D_RTRL',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceLearner',
    'ETraceVjpAlgorithm',
    'IODimVjpAlgorithm',
    'ModelStates',
    'MultiStepData',
    'ParamDimVjpAlgorithm',
    'SingleStepData',
    'check_model',
    'compile',
    'compile_etrace_graph',
    'pp_prop',
]
