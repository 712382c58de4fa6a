"""Online learning of recurrent and spiking networks: eligibility traces beside the state, in JAX."""
from . import functional, nn, rules
from ._compiler import Diagnostic, ETraceGraph, HiddenGroup, Policy, Relation, Report, Route
from ._errors import *  # noqa: F403
from ._errors import __all__ as _errors
from ._etrace_op import (
    ETPPrimitive,
    ETPPrimitiveSpec,
    conv,
    einsum,
    element_wise,
    embedding,
    get_primitive_spec,
    grouped_matmul,
    lora_matmul,
    matmul,
    register_primitive,
    register_primitive_spec,
    sparse_matmul,
)
from ._learner import (
    D_RTRL,
    ES_D_RTRL,
    ETraceLearner,
    IODimVjpAlgorithm,
    ParamDimVjpAlgorithm,
    compile,
    compile_etrace_graph,
    pp_prop,
)

# isort: split
from . import verify  # it reads the names above

__all__ = [*_errors, 'D_RTRL', 'Diagnostic', 'ES_D_RTRL', 'ETPPrimitive', 'ETPPrimitiveSpec', 'ETraceGraph', 'ETraceLearner',
           'HiddenGroup', 'IODimVjpAlgorithm', 'ParamDimVjpAlgorithm', 'Policy', 'Relation', 'Report', 'Route', 'compile',
           'compile_etrace_graph', 'conv', 'einsum', 'element_wise', 'embedding', 'functional', 'get_primitive_spec', 'grouped_matmul',
           'lora_matmul', 'matmul', 'nn', 'pp_prop', 'register_primitive', 'register_primitive_spec', 'rules', 'sparse_matmul', 'verify']


def __getattr__(name: str):
    if name == 'kit':       # imported when it is asked for: training needs none of it
        import importlib
        return importlib.import_module('.kit', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
