"""The stateful shell: learners for brainstate models."""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from .base import ETraceLearner
from .configurations import (
    ETraceConfig,
    FixedRandomFeedback,
    KappaFilter,
    MultiStepData,
    SingleStepData,
)
from .evaluation import evaluate
from .learners import (
    D_RTRL,
    ES_D_RTRL,
    OSTL,
    OTPE,
    OTTT,
    RFLO,
    RTRL,
    UORO,
    EProp,
    ETraceAlgorithm,
    ETraceVjpAlgorithm,
    IODimVjpAlgorithm,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    SameStep,
    SnAp,
    ThreeFactor,
    compile,
    compile_etrace_graph,
    pp_prop,
)
from .states import ModelStates, check_model
from .synthetic import (
    DNI,
    train_synthetic_gradient,
)

__all__ = [
    'DNI',
    'D_RTRL',
    'EProp',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceLearner',
    'ETraceVjpAlgorithm',
    'FixedRandomFeedback',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'ModelStates',
    'MultiStepData',
    'OSTL',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'OTPE',
    'OTTT',
    'ParamDimVjpAlgorithm',
    'RFLO',
    'RTRL',
    'RandomProjectionVjpAlgorithm',
    'SameStep',
    'SingleStepData',
    'SnAp',
    'ThreeFactor',
    'UORO',
    'check_model',
    'compile',
    'compile_etrace_graph',
    'evaluate',
    'pp_prop',
    'train_synthetic_gradient',
]
