"""The compiler: jaxpr of one step -> :class:`ETraceGraph`."""
from . import flow
from .analyse import analyse, check_learnable
from .graph import Coordinates, Diagnostic, ETraceGraph, HiddenGroup, OpUse, Relation, Route
from .losses import USE, untraced_uses
from .policy import DEFAULT, Policy
from .program import (
    Loop,
    Program,
    Remat,
    abstract,
    check_arrays,
    depends,
    describe_aval,
    is_inexact,
    param_name,
    path_key,
    path_name,
)
from .reasons import REASONS
from .recurrence import Groups, old_ancestors
from .render import summary
from .report import Report

__all__ = ['Coordinates', 'DEFAULT', 'Diagnostic', 'ETraceGraph', 'Groups', 'HiddenGroup', 'Loop', 'OpUse', 'Policy', 'Program',
           'REASONS', 'Relation', 'Remat', 'Report', 'Route', 'USE', 'abstract', 'analyse', 'check_arrays', 'check_learnable', 'depends',
           'describe_aval', 'flow', 'is_inexact', 'old_ancestors', 'param_name', 'path_key', 'path_name',
           'summary', 'untraced_uses']
