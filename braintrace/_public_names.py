"""Names and arguments of the public package ``braintrace`` that have no meaning here: what is
accepted and dropped, and what to use for the others. Nothing else knows them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ._errors import OptionError

F = TypeVar('F', bound=Callable)


class Argument(NamedTuple):
    """Values that change nothing here, and what to do with any other; ``any_value`` drops all."""

    remedy: str
    accepted: tuple = ()
    any_value: bool = False


MEMORY = 'Drop it: the compiler chooses how traces are kept and solved.'
INSIDE = 'Drop it: the graph has what every rule here needs.'
ARGUMENTS = {
    'name': Argument('A learner is not looked up by name.', any_value=True),
    'vjp_method': Argument(
        'Drop it: a call of the learner is a single step. For reverse mode through K steps call '
        "`learner.etrace_grad(xs, ys, step_fn=step_fn, window=K, inside='exact')`, which reads the "
        'trace before them; `etrace_train` takes `update_every=K`.',
        ('single-step',),
    ),
    'chunk_size': Argument(
        'Drop it: step_fn takes one step at a time. `window` of etrace_grad says how many steps '
        "run together, with the same numbers for every size, or with `inside='exact'` those of "
        'reverse mode through the window.',
        (None, 1),
    ),
    'fast_solve': Argument(MEMORY),
    'chunked_trace': Argument(MEMORY),
    'control_flow': Argument(
        'Give `policy=braintrace.Policy(...)`: `cond`, `scan`, `unroll` and `while_loop` say what '
        'becomes of control flow.'
    ),
    'config': Argument(
        'Give `braintrace.compile(model, rule, x)` a value of `braintrace.rules` as the rule, or '
        '`braintrace.ETraceConfig(...)`, which makes one.'
    ),
    'random_feedback_key': Argument(
        'Give the rule its feedback: `rule.with_feedback(braintrace.Feedback(...))` with '
        "`'random'` and a `seed`; `braintrace.EProp` takes the key.",
        (None,),
    ),
    'modulator': Argument(
        'The step function returns it with what it modulates: `braintrace.modulated(m, h)`.',
        (None,),
    ),
    'projection_key': Argument('It is called `seed`, an int: `braintrace.UORO(model, seed=42)`.'),
    'projection_eps': Argument('Drop it: a factor that is zero stays zero.'),
    'hidden_width': Argument(
        'Drop it: a `SyntheticGradient` is linear. Any pure function `(params, states) -> credit` '
        'is a synthesizer of `functional.OnlineLearner.sequence_grad`.',
        (None,),
    ),
    'snap_max_jacobian_elements': Argument(INSIDE),
    'include_hidden_perturb': Argument(
        'Drop it: signals are read without perturbations of hidden states.'
    ),
    'include_recurrent_mixing': Argument(
        'Drop it: `print(braintrace.report(graph))` lists every path that mixes positions, as cuts.'
    ),
    'include_output_bypass': Argument(INSIDE),
    'sparse_n': Argument(
        "Drop it: the rule has it, as `rules.snap(n)` or `compile(model, 'snap', x, n=2)`; the "
        'graph has what every rule here needs.'
    ),
    'impl_fn': Argument('It is called `impl`: `register_primitive(name, impl)`.'),
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
    """A sentence that says what to use for a name of the public package, in any case of letters;
    empty for a name that it does not have.
    """
    found = next((key for key in ABSENT if key.lower() == name.lower()), None)
    return '' if found is None else f' The public package has {found}; here: {ABSENT[found]}'


def without_public(arguments: dict[str, Any], own: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Arguments without those of the public package that change nothing here.

    ``own`` are names that have a meaning here. Raises :class:`braintrace.OptionError` with the
    remedy for one that would change something there.
    """
    foreign = {name: v for name, v in arguments.items() if name in ARGUMENTS and name not in own}
    for name, value in foreign.items():
        known = ARGUMENTS[name]
        accepted = any(
            value is a or (isinstance(a, str | int) and value == a) for a in known.accepted
        )
        if not (accepted or known.any_value):
            raise OptionError(
                f'{name} is {value!r}, an argument of the public package. {known.remedy}'
            )
    return {name: value for name, value in arguments.items() if name not in foreign}


def takes_public_arguments(function: F) -> F:
    """The function, which also meets the public package's arguments as :func:`without_public`."""
    own = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def taking(*args, **kwargs):
        return function(*args, **without_public(kwargs, own))

    return taking  # type: ignore[return-value]
