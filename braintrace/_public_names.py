"""Names of the public package ``braintrace``: which :mod:`braintrace.compat` has, and what to use
in the place of the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

COMPAT = {
    'CompilationError',
    'DNI',
    'EProp',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceVjpAlgorithm',
    'FixedRandomFeedback',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'MiniGRU',
    'MiniLSTM',
    'MultiStepData',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'SingleStepData',
    'SnAp',
    'SyntheticGradient',
    'ThreeFactor',
    'UORO',
    'ValinaRNNCell',
    'load_public',
    'pp_prop',
    'train_synthetic_gradient',
}
ARGUMENTS = {
    'chunk_size',
    'chunked_trace',
    'config',
    'control_flow',
    'fast_solve',
    'hidden_width',
    'kappa_filter_decay',
    'loss_output',
    'modulator',
    'name',
    'projection_eps',
    'projection_key',
    'random_feedback_key',
    'snap_max_jacobian_elements',
    'verbose',
    'vjp_method',
}
INNER = 'the inside of a compiler; `print(braintrace.report(graph))` shows what this one found.'
ABSENT = {
    'CompilationRecord': 'rows of `braintrace.report(graph).diagnostics`.',
    'CompilationReport': '`braintrace.Report`.',
    'ControlFlowPolicy': '`braintrace.Policy`, as `policy=` of a learner or of `compile`.',
    'DiagnosticKind': 'the `kind` of a row of `braintrace.report(graph).diagnostics`.',
    'DiagnosticLevel': '`Policy(strict=True)` makes every lost path an error.',
    'ETraceGraphExecutor': INNER,
    'ETraceVjpGraphExecutor': INNER,
    'ETraceVmap': '`braintrace.compile(..., vmap=True)` returns a learner like any other.',
    'EligibilityTrace': '`learner.get_etrace_of(param)` returns the trace of a parameter.',
    'GradExpon': 'sum the gradients of etrace_grad with the weights that you want.',
    'HiddenParamOpRelation': '`braintrace.Relation`.',
    'HiddenPerturbation': 'signals are read without perturbations of hidden states.',
    'ModuleInfo': INNER,
    'SequenceDriverMixin': 'every learner has `etrace_grad` and `etrace_evolve`.',
    'add_hidden_perturbation_from_minfo': INNER,
    'add_hidden_perturbation_in_module': INNER,
    'extract_module_info': INNER,
    'find_hidden_groups_from_minfo': '`graph.hidden_groups` of `compile_etrace_graph`.',
    'find_hidden_groups_from_module': '`graph.hidden_groups` of `compile_etrace_graph`.',
    'find_hidden_param_op_relations_from_minfo': (
        '`graph.hidden_param_op_relations` of `compile_etrace_graph`.'
    ),
    'find_hidden_param_op_relations_from_module': (
        '`graph.hidden_param_op_relations` of `compile_etrace_graph`.'
    ),
}


def instead_of(name: str) -> str:
    """A sentence that says where a name of the public package is, in any case of letters, or what
    to use; empty for a name that it does not have.
    """
    for key in COMPAT:
        if key.lower() == name.lower():
            return f' It is for scripts of the public package: `import braintrace.compat`, {key}.'
    found = next((key for key in ABSENT if key.lower() == name.lower()), None)
    return '' if found is None else f' The public package has {found}; here: {ABSENT[found]}'


def instead_of_arguments(names: Iterable[str]) -> str:
    """A sentence that says where arguments of the public package are taken; empty for others."""
    found = sorted(ARGUMENTS.intersection(names))
    return f' `import braintrace.compat` takes {", ".join(found)}.' if found else ''


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that is most like this one, in any case of letters: nearly the same, or it holds
    this one, early rather than late, or it is near at least.
    """
    known, small = {each.lower(): each for each in names}, name.lower()
    near = difflib.get_close_matches(small, known, 1, 0.8)
    holds = [each for each in known if len(small) > 2 and small in each]
    near += sorted(holds, key=lambda each: each.find(small))
    near += difflib.get_close_matches(small, known, 1)
    return known[near[0]] if near else None


def lacking(module: str, names: Iterable[str], more: Callable = lambda name: '') -> Callable:
    """The ``__getattr__`` of a public module: an error that names the nearest of its names, or what
    ``more`` says of the one that it lacks.
    """

    def missing(name: str):
        near = None if name.startswith('__') else nearest(name, names)
        text = more(name) or (f' Did you mean {near}?' if near else '')
        raise AttributeError(f'module {module!r} has no attribute {name!r}.{text}')

    return missing
