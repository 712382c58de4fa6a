"""Arguments of the public package: what changes nothing here, and the remedy of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import OptionError

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
    'fast_solve': Argument(MEMORY, any_value=True),
    'chunked_trace': Argument(MEMORY, any_value=True),
    'control_flow': Argument(
        'Give `policy=braintrace.Policy(...)`: `refuse` and `unroll` say what becomes of control '
        'flow.',
        (None,),
    ),
    'config': Argument(
        'Give `braintrace.compile(model, rule, x)` a value of `braintrace.rules` as the rule, or '
        '`braintrace.compat.ETraceConfig(...)`, which makes one.',
        (None,),
    ),
    'random_feedback_key': Argument(
        'Give the rule its feedback: `rule.with_feedback(braintrace.Feedback(...))` with '
        "`'random'` and a `seed`; `compat.EProp` takes the key.",
        (None,),
    ),
    'modulator': Argument(
        'The step function returns it with what it modulates: `braintrace.modulated(m, h)`.',
        (None,),
    ),
    'projection_eps': Argument('Drop it: a factor that is zero stays zero.', any_value=True),
    'hidden_width': Argument(
        'Drop it: a `SyntheticGradient` is linear.',
        (None,),
    ),
    'snap_max_jacobian_elements': Argument(INSIDE, any_value=True),
    'include_hidden_perturb': Argument(
        'Drop it: signals are read without perturbations of hidden states.', any_value=True
    ),
    'include_recurrent_mixing': Argument(
        'Drop it: `print(braintrace.report(graph))` lists every path that mixes positions, as '
        'cuts.',
        any_value=True,
    ),
    'include_output_bypass': Argument(INSIDE, any_value=True),
    'sparse_n': Argument(
        "Drop it: the rule has it, as `rules.snap(n)` or `compile(model, 'snap', x, n=2)`; the "
        'graph has what every rule here needs.'
    ),
    'impl_fn': Argument('It is called `impl`: `register_primitive(name, impl)`.'),
}


def without_public(arguments: dict[str, Any], own: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Arguments without those of the public package that change nothing here.

    ``own`` are names that have a meaning here. Raises :class:`braintrace.errors.OptionError` with
    the remedy for one that would change something there.
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
