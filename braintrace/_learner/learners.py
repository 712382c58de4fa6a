"""The learners by name, and ``compile``."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import brainstate

from .._errors import OptionError
from .._public_names import instead_of, takes_public_arguments, without_public
from .._rules import ESDRTRL, Rule
from .._windows import check_choice, did_you_mean
from ..rules import d_rtrl, es_d_rtrl
from .base import ETraceLearner
from .lanes import lanes_of
from .rules import (
    OSTL,
    OTPE,
    OTTT,
    RFLO,
    RTRL,
    UORO,
    EProp,
    OSTLFeedforward,
    OSTLRecurrent,
    SameStep,
    SnAp,
    ThreeFactor,
    shell_of,
)
from .states import check_model
from .synthetic import DNI


@shell_of(d_rtrl)
class D_RTRL(ETraceLearner):  # noqa: N801
    """Online learning of a brainstate model with D-RTRL (see :func:`braintrace.rules.d_rtrl`).

    ``model``: a ``brainstate.nn.Module`` that applies its traced weights with braintrace ops and
    keeps its recurrent state in ``brainstate.HiddenState``. ``policy``, a
    :class:`braintrace.Policy`, says what to do with control flow and how strict to be; ``mark``
    sets its ``mark``: with ``'auto'`` a model needs no braintrace op. ``trace_dtype``,
    ``write_every``, ``credit`` and ``scope`` go to :func:`braintrace.rules.d_rtrl`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> learner = braintrace.D_RTRL(model)
    >>> _ = learner.compile_graph(jnp.zeros((3, 2)))
    >>> loss = lambda: jnp.sum(learner(jnp.ones((3, 2))) ** 2)
    >>> grads = brainstate.transform.grad(loss, learner.param_states)()
    >>> set(grads) == set(learner.param_states)
    True
    """


@shell_of(es_d_rtrl, **ESDRTRL.refused)
class ES_D_RTRL(ETraceLearner):  # noqa: N801
    """Online learning of a brainstate model with ES-D-RTRL, also ``pp_prop`` (see
    :func:`braintrace.rules.es_d_rtrl`).

    ``decay_or_rank``: a float decay in [0, 1) or an int rank >= 1, or a pair of them for the
    filters of the input and of the output; decay 0 and rank 1 remember no earlier step. Other
    arguments as for :class:`D_RTRL`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> x, rule = jnp.ones((3, 2)), braintrace.ES_D_RTRL
    >>> learner = braintrace.compile(model, rule, x, batch_size=3, decay_or_rank=0.9)
    >>> learner(x).shape
    (3, 4)
    """


ParamDimVjpAlgorithm = D_RTRL
IODimVjpAlgorithm = ES_D_RTRL
pp_prop = ES_D_RTRL
RandomProjectionVjpAlgorithm = UORO
ETraceAlgorithm = ETraceVjpAlgorithm = ETraceLearner
CLASSES = (
    DNI,
    D_RTRL,
    ES_D_RTRL,
    EProp,
    OSTL,
    OSTLFeedforward,
    OSTLRecurrent,
    OTPE,
    OTTT,
    RFLO,
    RTRL,
    SameStep,
    SnAp,
    ThreeFactor,
    UORO,
)
NAMES: dict[str, type[ETraceLearner]] = {
    **{cls.__name__: cls for cls in CLASSES},
    'pp_prop': ES_D_RTRL,
    'ParamDimVjpAlgorithm': D_RTRL,
    'IODimVjpAlgorithm': ES_D_RTRL,
    'RandomProjectionVjpAlgorithm': UORO,
}


def compile(
    model: brainstate.nn.Module,
    rule,
    *inputs,
    batch_size: int | None = None,
    seed: int | None = None,  # noqa: A001
    vmap: bool = False,
    verbose: int = 0,
    **options,
) -> ETraceLearner:
    """Initialise a model's states, compile its graph for inputs like these, and return the learner.

    Parameters
    ----------
    model : brainstate.nn.Module
        The model: it applies its weights by braintrace ops, as the layers of :mod:`braintrace.nn`
        do, or any module with ``mark='auto'``.
    rule : class, str, Rule or None
        A learner class; its name, in any case of letters and with or without underscores; a value
        of :mod:`braintrace.rules`; or None for gradients of single steps without a trace.
    *inputs : arrays or jax.ShapeDtypeStruct
        Those of one step.
    batch_size : int, optional
        The batch size of the states: it goes to ``brainstate.nn.init_all_states`` only.
    seed : int, optional
        What brainstate's generator draws from while the states are made, and the seed of a rule
        that draws, given by its class or name; the generator is left as it was. The weights of
        ``model`` are drawn already: ``brainstate.random.seed`` before it is made.
    vmap : bool
        The model is written for one sample, and runs for each of the ``batch_size`` samples in
        axis 0 of the inputs.
    verbose : int
        1 or 2 prints the report.
    **options
        Arguments of the class, such as ``policy`` and ``mark``.

    Raises
    ------
    OptionError
        There is no such rule, or an option has a value outside its set.
    CompileError, NotSupportedError, UntracedParameterError
        The model's step can not be learned as it is (:doc:`/reference/errors`).

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3, seed=0)
    >>> learner.graph.hidden_groups[0].shape
    (3, 4)
    """
    check_choice('vmap', vmap, (True, False))
    if verbose not in (0, 1, 2):
        raise OptionError(f'verbose is {verbose!r}; choose 0, or 1 or 2 to print the report.')
    check_model(model)
    size = {} if batch_size is None else {'batch_size': batch_size}
    if vmap:
        model, size = lanes_of(model, inputs, batch_size), {}
    learner = _make(model, rule, options, seed)
    with nullcontext() if seed is None else brainstate.random.seed_context(seed):
        brainstate.nn.init_all_states(model, **size)
    learner.compile_graph(*inputs)
    if verbose:
        learner.show_graph()
    return learner


def _make(model, rule, options: dict, seed: int | None) -> ETraceLearner:
    if isinstance(rule, str):
        rule = _named(rule)
    a_value = rule is None or isinstance(rule, Rule)
    args = (model, rule) if a_value else (model,)
    cls = ETraceLearner if a_value else rule
    if isinstance(cls, type) and issubclass(cls, ETraceLearner):
        own = frozenset(inspect.signature(cls).parameters)
        options = without_public(options, own)
        if seed is not None and 'seed' in own:
            options['seed'] = seed
        try:
            inspect.signature(cls).bind(*args, **_without_refused(cls, options))
        except TypeError as e:
            raise OptionError(
                f'options {options} do not fit {cls.__name__}, which takes '
                f'{sorted(own - {"model", "rule"})}: {e}.'
            ) from e
        return cls(*args, **options)
    raise OptionError(
        f'rule is {_described(rule)}; give a learner class, one of the names {sorted(NAMES)}, a '
        'value of braintrace.rules, or None. The order is `compile(model, rule, *inputs)`.'
    )


def _without_refused(cls, options: dict) -> dict:
    """Options that the class does not refuse by an error of its own."""
    refused = getattr(cls.__init__, 'refused', ())
    return {name: value for name, value in options.items() if name not in refused}


def _named(rule: str) -> type[ETraceLearner]:
    for name, learner in NAMES.items():
        if _plain(name) == _plain(rule):
            return learner
    more = instead_of(rule) or did_you_mean(rule, NAMES)
    raise OptionError(
        f'rule is {rule!r}; give a value of braintrace.rules, or one of {sorted(NAMES)}.{more}'
    )


def _plain(name: str) -> str:
    """A name without its case of letters and its underscores."""
    return name.lower().replace('_', '')


def _described(rule) -> str:
    """An argument that is no rule, in a few words."""
    if hasattr(rule, 'dtype'):
        return f'an array of shape {list(rule.shape)}'
    return (
        f'the function {rule.__name__} (call it: `{rule.__name__}(...)`)'
        if inspect.isfunction(rule)
        else repr(rule)
    )


@takes_public_arguments
def compile_etrace_graph(model: brainstate.nn.Module, *inputs):
    """Compile one step of an initialised model: a frozen :class:`braintrace.ETraceGraph`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
    >>> len(graph.hidden_param_op_relations)
    2
    """
    return ETraceLearner(model, d_rtrl()).compile_graph(*inputs)
