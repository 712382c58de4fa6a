"""The compiler: jaxpr of one step -> :class:`ETraceGraph`."""

from .analyse import analyse, check_learnable
from .analysis.left_out import readers
from .equations.equation import Loop, Remat, is_complex, is_inexact
from .graph import (
    Coordinates,
    CutRead,
    Derived,
    Diagnostic,
    ETraceGraph,
    Groups,
    HiddenGroup,
    OpUse,
    Relation,
    Route,
    Use,
)
from .own_diagonal import with_own_diagonal
from .policy import DEFAULT, Policy
from .primitives import of as properties_of
from .program.dataflow import forward, members, old_ancestors, reach
from .program.leaves import (
    abstract,
    check_arrays,
    describe_aval,
    param_name,
    path_key,
    path_name,
)
from .program.program import Program
from .program.tracing import depends

__all__ = [
    'Coordinates',
    'CutRead',
    'DEFAULT',
    'Derived',
    'Diagnostic',
    'ETraceGraph',
    'Groups',
    'HiddenGroup',
    'Loop',
    'OpUse',
    'Policy',
    'Program',
    'Relation',
    'Remat',
    'Route',
    'Use',
    'abstract',
    'analyse',
    'check_arrays',
    'check_learnable',
    'depends',
    'describe_aval',
    'forward',
    'is_complex',
    'is_inexact',
    'members',
    'old_ancestors',
    'param_name',
    'path_key',
    'path_name',
    'properties_of',
    'reach',
    'readers',
    'with_own_diagonal',
]
