"""The compiler: jaxpr of one step -> :class:`ETraceGraph`."""

from .analyse import analyse, check_learnable
from .analysis.findings import readers
from .equations import Loop, Remat, is_complex, is_inexact
from .graph import (
    Coordinates,
    Derived,
    Diagnostic,
    ETraceGraph,
    Groups,
    HiddenGroup,
    Kept,
    OpUse,
    Relation,
    Route,
    Scope,
)
from .kinds import STEP_ONLY, WINDOWS, Kind, kind_of
from .listing import listing
from .policy import DEFAULT, Policy
from .primitives import TABLE as PROPERTIES
from .program.dataflow import forward, members, old_ancestors, reach
from .program.flatten import EXPANDED
from .program.leaves import abstract, check_arrays, describe_aval, param_name, path_key, path_name
from .program.program import Program
from .program.tracing import depends
from .rewrites import (
    jointly,
    own_groups,
    paths_of,
    readouts,
    rescoped,
    with_filter,
    with_own_diagonal,
)

__all__ = [
    'Coordinates',
    'DEFAULT',
    'Derived',
    'Diagnostic',
    'ETraceGraph',
    'EXPANDED',
    'Groups',
    'HiddenGroup',
    'Kept',
    'Kind',
    'Loop',
    'OpUse',
    'PROPERTIES',
    'Policy',
    'Program',
    'Relation',
    'Remat',
    'Route',
    'STEP_ONLY',
    'Scope',
    'WINDOWS',
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
    'own_groups',
    'param_name',
    'path_key',
    'path_name',
    'paths_of',
    'reach',
    'readers',
    'readouts',
    'with_filter',
    'with_own_diagonal',
    'jointly',
    'kind_of',
    'listing',
    'rescoped',
]
