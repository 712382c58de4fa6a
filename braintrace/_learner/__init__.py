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

__all__ = [
    'D_RTRL',
    'ES_D_RTRL',
    'ETraceLearner',
    'IODimVjpAlgorithm',
    'ParamDimVjpAlgorithm',
    'compile',
    'compile_etrace_graph',
    'pp_prop',
]
