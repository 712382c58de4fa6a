"""The compiler: jaxpr of one step -> :class:`ETraceGraph`."""

from .analyse import analyse, analyse_again, check_learnable
from .analysis.findings import find_findings, readers
from .analysis.leaks import Leak, leaks
from .analysis.pairs import DPass, read_positions
from .equations import Loop, Remat, is_complex, is_inexact, moved_operands
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
    compressed,
    readouts,
)
from .kinds import STEP_ONLY, WINDOWS, Kind, kind_of
from .listing import listing
from .policy import DEFAULT, Policy
from .primitives import TABLE as PROPERTIES
from .program.builder import Splicing
from .program.dataflow import (
    backward,
    forward,
    gradients,
    key_counts,
    members,
    old_ancestors,
    reach,
)
from .program.flatten import EXPANDED
from .program.leaves import abstract, check_arrays, describe_aval, param_name, path_key, path_name
from .program.program import Program
from .program.tracing import depends
from .stacked_states import MustSplit
