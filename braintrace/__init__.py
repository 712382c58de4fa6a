"""Online learning of recurrent and spiking networks: eligibility traces beside the state, in JAX."""
from . import functional, rules
from ._compiler import Diagnostic, ETraceGraph, HiddenGroup, Relation, Route
from ._errors import *  # noqa: F403
from ._errors import __all__ as _errors
from ._etrace_op import (
    ETPPrimitive,
    ETPPrimitiveSpec,
    conv,
    element_wise,
    get_primitive_spec,
    lora_matmul,
    matmul,
    register_primitive,
    register_primitive_spec,
    sparse_matmul,
)

__all__ = [*_errors, 'Diagnostic', 'ETPPrimitive', 'ETPPrimitiveSpec', 'ETraceGraph', 'HiddenGroup', 'Relation', 'Route', 'conv',
           'element_wise', 'functional', 'get_primitive_spec', 'lora_matmul', 'matmul', 'register_primitive',
           'register_primitive_spec', 'rules', 'sparse_matmul']
