"""The learners by name, and ``compile``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import brainstate
import jax
import jax.numpy as jnp

from .. import rules
from .._compiler import ETraceGraph, Policy, path_key, path_name
from .._public_names import instead_of, instead_of_arguments
from .._rules import ESDRTRL, Rule
from .._signatures import public, refuses
from .._windows import check_choice, did_you_mean
from ..errors import OptionError
from ..rules import d_rtrl, es_d_rtrl
from .base import ETraceLearner
from .states import check_model

L = TypeVar('L', bound=ETraceLearner)
ONE_STEP = ' Of a whole sequence, give one step: `xs[0]`.'
LANE = 'lane'  # the tag of states that have one


class Lanes(brainstate.nn.Module):
    """``module`` for each lane of a batch of ``size``: its step sees one sample, and the states
    that its ``init_state`` makes have the lanes in axis 0. Parameters are shared, random numbers
    are drawn for each lane; paths of states are those of the module.
    """

    def __init__(self, module: brainstate.nn.Module, size: int):
        super().__init__()
        self.module, self.size = module, size

    # After the module's own, which make states of one sample.
    @brainstate.nn.call_order(8)
    def init_state(self, *args, **kwargs) -> None:
        """The module's states again, for each lane."""

        @brainstate.transform.vmap_new_states(state_tag=LANE, axis_size=self.size)
        def make():
            brainstate.nn.init_all_states(self.module)

        make()

    def update(self, *inputs):
        """One step of every lane; axis 0 of inputs and outputs is the lane."""
        lanes = brainstate.nn.Vmap(self.module, vmap_states=LANE, axis_size=self.size)
        return lanes(*inputs)

    def states(self, *filters):
        """The states of the module."""
        return self.module.states(*filters)

    def hidden_leaves(self) -> list[str]:
        """The paths of the hidden states in lanes."""

        def value(state):
            grouped = isinstance(state, brainstate.HiddenGroupState)
            return dict.fromkeys(state.name2index, 0) if grouped else state.value

        hidden = self.states(brainstate.HiddenState).items()
        values = {path: value(state) for path, state in hidden if LANE in (state.tag or ())}
        return [path_name(path_key(p)) for p, _ in jax.tree_util.tree_leaves_with_path(values)]


def lanes_of(model: brainstate.nn.Module, inputs: tuple, batch_size: int | None) -> Lanes:
    """The model in lanes, for inputs with the batch in axis 0."""
    if batch_size is None:
        raise OptionError(
            'vmap=True runs the model for each sample of a batch: give batch_size too, or drop '
            'vmap for a model that takes a batch itself.'
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]:
        shape = jnp.shape(leaf)
        if shape[:1] != (batch_size,):
            raise OptionError(
                f'vmap=True with batch_size {batch_size}, but input {jax.tree_util.keystr(path)} '
                f'has shape {list(shape)}. Give inputs with the batch in axis 0; the model sees '
                f'one sample of it.{ONE_STEP if shape[1:2] == (batch_size,) else ""}'
            )
    return Lanes(model, batch_size)


def shell_of(make: Callable[..., Rule], **refused: str) -> Callable[[type[L]], type[L]]:
    """A decorator that gives a learner class the constructor ``(model, *arguments of make, policy,
    mark)``; ``refused``: see :func:`refuses`.
    """
    first, *others = inspect.signature(ETraceLearner.__init__).parameters.values()
    model, _, policy, mark = others
    own = inspect.signature(make).parameters.values()
    signature = inspect.Signature([first, model, *own, policy, mark])

    def decorate(cls: type[L]) -> type[L]:
        def __init__(self, *args, **options):  # noqa: N807
            given = signature.bind(self, *args, **options).arguments
            beside = {name: given.pop(name) for name in ('policy', 'mark') if name in given}
            _, model, *of_rule = given.items()
            ETraceLearner.__init__(self, model[1], make(**dict(of_rule)), **beside)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        cls.__init__ = refuses(cls.__name__, **refused)(__init__)  # type: ignore[method-assign]
        cls.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return cls

    return decorate


@shell_of(d_rtrl)
class D_RTRL(ETraceLearner):  # noqa: N801
    """Online learning of a brainstate model with D-RTRL (see :func:`braintrace.rules.d_rtrl`).

    ``model``: a ``brainstate.nn.Module`` that applies its traced weights with braintrace ops and
    keeps its recurrent state in ``brainstate.HiddenState``. ``policy``, a
    :class:`braintrace.Policy`, says what to do with control flow and how strict to be; ``mark``
    sets its ``mark``: with ``'auto'`` a model needs no braintrace op. ``trace_dtype``,
    ``credit`` and ``scope`` go to :func:`braintrace.rules.d_rtrl`.

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

    if TYPE_CHECKING:

        def __init__(
            self,
            model: brainstate.nn.Module,
            trace_dtype: Any = None,
            credit: Literal['cut', 'whole'] = 'cut',
            scope: Literal['position', 'own'] = 'position',
            *,
            policy: Policy = ...,
            mark: str | Callable | None = None,
        ): ...


@shell_of(es_d_rtrl, **ESDRTRL.refused)
class ES_D_RTRL(ETraceLearner):  # noqa: N801
    """Online learning of a brainstate model with ES-D-RTRL (see
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

    if TYPE_CHECKING:

        def __init__(
            self,
            model: brainstate.nn.Module,
            decay_or_rank: float | tuple[float, float],
            *,
            policy: Policy = ...,
            mark: str | Callable | None = None,
        ): ...


LEARNERS: dict[str, type[ETraceLearner]] = {
    'D_RTRL': D_RTRL,
    'ES_D_RTRL': ES_D_RTRL,
    **{
        name: shell_of(getattr(rules, name))(type(name, (ETraceLearner,), {}))
        for name in rules.__all__
        if not name.endswith('Rule')
    },
}
NAMES = sorted({*LEARNERS} - {'d_rtrl', 'es_d_rtrl'})


def drawn(make: Callable, seed: int):
    """What ``make()`` returns, its weights drawn from this seed; brainstate's own generator stays
    as it is.
    """
    with brainstate.random.seed_context(seed):
        return make()


@public('braintrace.compile')
def compile(
    model: brainstate.nn.Module,
    rule: type[ETraceLearner] | str | Rule | None,
    *inputs,
    batch_size: int | None = None,
    seed: int | None = None,  # noqa: A001
    vmap: bool = False,
    **options,
) -> ETraceLearner:
    """Initialise a model's states, compile its graph for inputs like these, and return the learner.

    Parameters
    ----------
    model : brainstate.nn.Module
        The model: it applies its weights by braintrace ops, as the layers of :mod:`braintrace.nn`
        do, or any module with ``mark='auto'``.
    rule : class, str, Rule or None
        A value of :mod:`braintrace.rules`; the name of one, in any case of letters and with or
        without underscores; a learner class; or None for gradients of single steps without a trace.
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
    **options
        Arguments of the rule that is named or of the class, and ``policy`` and ``mark``.

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
    check_model(model)
    if isinstance(seed, (str, float, bool)):
        raise OptionError(f'seed is {seed!r}; give an int, or None.')
    size = {} if batch_size is None else {'batch_size': batch_size}
    if vmap:
        model, size = lanes_of(model, inputs, batch_size), {}
    learner = _make(model, rule, options, seed)
    with nullcontext() if seed is None else brainstate.random.seed_context(seed):
        brainstate.nn.init_all_states(model, **size)
    if vmap:
        named = dict.fromkeys((*learner.policy.batched, *model.hidden_leaves()))
        learner.policy = replace(learner.policy, batched=tuple(named))
    learner.compile_graph(*inputs)
    return learner


def _make(model, rule, options: dict, seed: int | None) -> ETraceLearner:
    if isinstance(rule, str):
        rule = learner_named(rule)
    a_value = rule is None or isinstance(rule, Rule)
    # a value goes to the plain learner; a class has its own arguments
    args = (model, rule) if a_value else (model,)
    cls = ETraceLearner if a_value else rule
    if isinstance(cls, type) and issubclass(cls, ETraceLearner):
        own = frozenset(inspect.signature(cls).parameters)
        if seed is not None and 'seed' in own:
            options['seed'] = seed
        try:
            # the class refuses some options by an error of its own
            refused = getattr(cls.__init__, 'refused', ())
            asked = {name: value for name, value in options.items() if name not in refused}
            inspect.signature(cls).bind(*args, **asked)
        except TypeError as e:
            takes = inspect.signature(cls).parameters.values()
            lacks = [p.name for p in takes if p.default is p.empty and p.name not in options]
            lacks = [name for name in lacks if name not in ('model', 'rule')]
            if lacks and options.keys() <= own:
                call = ', '.join(f'{name}=...' for name in lacks)
                raise OptionError(
                    f'{cls.__name__} needs {", ".join(lacks)}: give it by its name, '
                    f'`compile(model, {cls.__name__!r}, x, {call})`.'
                ) from e
            known = own.union(inspect.signature(compile).parameters) - {'options'}
            meant = next((did_you_mean(name, known) for name in options if name not in own), '')
            raise OptionError(
                f'options {options} do not fit {cls.__name__}, which takes '
                f'{sorted(own - {"model", "rule"})}: {e}.{instead_of_arguments(options) or meant}'
            ) from e
        return cls(*args, **options)
    found = f'an array of shape {list(rule.shape)}' if hasattr(rule, 'dtype') else repr(rule)
    if inspect.isfunction(rule):
        found = f'the function {rule.__name__} (call it: `{rule.__name__}(...)`)'
    raise OptionError(
        f'rule is {found}; give a value of braintrace.rules, one of the names {NAMES}, '
        'a learner class, or None. The order is `compile(model, rule, *inputs)`.'
    )


def learner_named(rule: str) -> type[ETraceLearner]:
    """The class of the learner with this name, in any case of letters, with underscores or not."""
    for name, learner in LEARNERS.items():
        if plain(name) == plain(rule):
            return learner
    more = instead_of(rule) or did_you_mean(rule, NAMES)
    raise OptionError(
        f'rule is {rule!r}; give a value of braintrace.rules, or one of {NAMES}.{more}'
    )


def plain(name: str) -> str:
    """A name without its case of letters and its underscores."""
    return name.lower().replace('_', '')


def compile_etrace_graph(model: brainstate.nn.Module, *inputs) -> ETraceGraph:
    """Compile one step of an initialised model: a frozen :class:`braintrace.ETraceGraph`.

    ``inputs`` are those of the step. Raises what :func:`braintrace.compile` does.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
    >>> len(graph.hidden_param_op_relations)
    2
    """
    return ETraceLearner(model, d_rtrl()).compile_graph(*inputs)
