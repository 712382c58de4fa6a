"""The compiler: jaxpr of one step -> :class:`ETraceGraph`."""
from .analyse import analyse, check_learnable
from .graph import Coordinates, Diagnostic, ETraceGraph, HiddenGroup, OpUse, Relation, Route
from .program import Program, abstract, check_arrays, depends, describe_aval, is_inexact, path_key, path_name
from .recurrence import Groups, old_ancestors

__all__ = ['Coordinates', 'Diagnostic', 'ETraceGraph', 'Groups', 'HiddenGroup', 'OpUse', 'Program', 'Relation', 'Route', 'abstract',
           'analyse', 'check_arrays', 'check_learnable', 'depends', 'describe_aval', 'is_inexact', 'old_ancestors',
           'path_key', 'path_name']
