"""The learners by name, and ``compile``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import rules
from .._compiler import DEFAULT, Policy
from .._errors import OptionError
from .._public_names import instead_of, takes_public_arguments, without_public
from .._rules import ESDRTRL, Feedback, Rule
from .._signatures import refuses
from .._windows import check_choice, did_you_mean
from ..rules import d_rtrl, es_d_rtrl
from .base import ETraceLearner
from .states import check_model
from .synthetic import DNI

LANE = 'a lane of a batch'  # the tag of states that have one


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
        """The module's states anew, for each lane."""

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
                'one sample of it.'
            )
    return Lanes(model, batch_size)


def shell_of(make: Callable[..., Rule], **refused: str) -> Callable[[type], Any]:
    """A decorator that gives a learner class the constructor ``(model, *arguments of make, policy,
    mark)``; ``refused``: see :func:`refuses`.
    """
    first, *others = inspect.signature(ETraceLearner.__init__).parameters.values()
    model, _, policy, mark = others
    own = inspect.signature(make).parameters.values()
    signature = inspect.Signature([first, model, *own, policy, mark])

    def decorate(cls: type) -> type:
        def __init__(self, *args, **options):  # noqa: N807
            given = signature.bind(self, *args, **options).arguments
            beside = {name: given.pop(name) for name in ('policy', 'mark') if name in given}
            _, model, *of_rule = given.items()
            ETraceLearner.__init__(self, model[1], make(**dict(of_rule)), **beside)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        init = refuses(cls.__name__, **refused)(__init__)
        cls.__init__ = takes_public_arguments(init)  # type: ignore[misc]
        cls.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values()][1:]
        )
        return cls

    return decorate


def feedback_of(feedback, key) -> Any:
    """Feedback whose seed comes from a key, as the public package draws it; else as it is."""
    if key is None:
        return feedback
    if feedback != 'random':
        raise OptionError(
            f'random_feedback_key is given and feedback is {feedback!r}; the key draws the '
            "matrices of feedback='random'."
        )
    seed = key if isinstance(key, int) else int(jax.random.randint(key, (), 0, 2**31 - 1))
    return Feedback('random', seed=seed)


def _snap(n: int = 2, *, credit: str = 'whole') -> Rule:
    return rules.snap(n, credit)


def _e_prop(
    feedback: Any = 'symmetric', kappa_filter_decay: float = 0.0, random_feedback_key=None
) -> Rule:
    return rules.e_prop(kappa_filter_decay, feedback_of(feedback, random_feedback_key))


def _own_diagonal() -> Rule:
    return rules.d_rtrl(scope='own')


def _current_step(decay_or_rank: float | int = 1e-6) -> Rule:
    return rules.es_d_rtrl(decay_or_rank)


@shell_of(rules.same_step)
class SameStep(ETraceLearner):
    """Online learning without a trace (see :func:`braintrace.rules.same_step`), the baseline.

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'same_step', x, batch_size=3)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(_snap)
class SnAp(ETraceLearner):
    """Online learning with SnAp-n, what a weight changes within ``n`` steps (see
    :func:`braintrace.rules.snap`).

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'snap', x, batch_size=3, n=1)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(rules.rtrl)
class RTRL(ETraceLearner):
    """Online learning with the whole derivative of every hidden number by every weight (see
    :func:`braintrace.rules.rtrl`): exact, and dear.

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'rtrl', x, batch_size=3)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(rules.uoro)
class UORO(ETraceLearner):
    """Online learning with UORO, an unbiased and noisy estimate of RTRL (see
    :func:`braintrace.rules.uoro`); also ``RandomProjectionVjpAlgorithm``.

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'uoro', x, batch_size=3)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(_e_prop)
class EProp(ETraceLearner):
    """Online learning with e-prop (see :func:`braintrace.rules.e_prop`).

    ``feedback``: ``'symmetric'``, ``'random'`` or a :class:`braintrace.Feedback`;
    ``kappa_filter_decay`` in [0, 1): the leak of the readout behind its matrix;
    ``random_feedback_key``: a JAX key or an int from which random feedback is drawn. Other
    arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'e_prop', x, batch_size=3)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(rules.rflo)
class RFLO(ETraceLearner):
    """Online learning with random feedback and the leak of each unit (see
    :func:`braintrace.rules.rflo`).

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> from braintrace.nn import Linear, VanillaRNNCell
    >>> model = brainstate.nn.Sequential(VanillaRNNCell(2, 4), Linear(4, 1))
    >>> learner = braintrace.compile(model, 'rflo', jnp.ones((3, 2)), batch_size=3)
    >>> learner(jnp.ones((3, 2))).shape
    (3, 1)
    """


@shell_of(rules.ottt)
class OTTT(ETraceLearner):
    """Online learning with an input trace of the membrane's leak (see
    :func:`braintrace.rules.ottt`).

    ``leak`` in [0, 1). Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> from braintrace.nn import LIF, Linear
    >>> model = brainstate.nn.Sequential(Linear(2, 4), LIF(4), Linear(4, 1))
    >>> learner = braintrace.compile(model, 'ottt', jnp.ones((3, 2)), batch_size=3, leak=0.95)
    >>> learner(jnp.ones((3, 2))).shape
    (3, 1)
    """


@shell_of(rules.otpe)
class OTPE(ETraceLearner):
    """Online learning with the trace of what the next layer keeps of a spike (see
    :func:`braintrace.rules.otpe`).

    ``leak`` in [0, 1), of the next layer. Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> from braintrace.nn import LIF, LeakyRateReadout, Linear
    >>> model = brainstate.nn.Sequential(Linear(2, 4), LIF(4), LeakyRateReadout(4, 1, tau=20.0))
    >>> learner = braintrace.compile(model, 'otpe', jnp.ones((3, 2)), batch_size=3, leak=0.95)
    >>> learner(jnp.ones((3, 2))).shape
    (3, 1)
    """


@shell_of(rules.ostl)
class OSTL(ETraceLearner):
    """Online learning with OSTL as it was published (see :func:`braintrace.rules.ostl`).

    ``recurrent=False``: without the recurrent matrices. Other arguments as for
    :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'ostl', x, batch_size=3)
    >>> learner(x).shape
    (3, 4)
    """


@shell_of(_own_diagonal)
class OSTLRecurrent(ETraceLearner):
    """Online learning with D-RTRL and each recurrent op's own diagonal, what the public package
    calls so: ``rules.d_rtrl(scope='own')``.

    OSTL as it was published keeps the whole recurrent matrix of each layer:
    :class:`braintrace.OSTL`. Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace
    >>> learner = braintrace.OSTLRecurrent(braintrace.nn.VanillaRNNCell(2, 4))
    >>> learner.rule == braintrace.rules.d_rtrl(scope='own')
    True
    """


@shell_of(_current_step)
class OSTLFeedforward(ETraceLearner):
    """Online learning with the filters of ES-D-RTRL and a decay of 1e-6, what the public package
    calls so: the current step, and nothing else.

    OSTL as it was published for layers without a recurrent matrix is
    ``rules.ostl(recurrent=False)``. Other arguments as for :class:`braintrace.ES_D_RTRL`.

    >>> import braintrace
    >>> braintrace.OSTLFeedforward(braintrace.nn.VanillaRNNCell(2, 4)).rule
    es_d_rtrl(1e-06)
    """


class ThreeFactor(ETraceLearner):
    """Online learning by a modulator and the trace of D-RTRL: the value is ``rules.d_rtrl()``, and
    the step function returns :func:`braintrace.modulated`. Exact windows are refused: inside of
    them no trace is there to modulate.

    Other arguments as for :class:`braintrace.D_RTRL`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = braintrace.compile(model, 'three_factor', x, batch_size=3)
    >>> step_fn = lambda x, reward: braintrace.modulated(-reward, learner(x))
    >>> grads = learner.etrace_grad(jnp.ones((5, 3, 2)), jnp.ones((5, 3)), step_fn=step_fn)
    >>> grads[('W', 'weight')]['weight'].shape
    (6, 4)
    """

    @takes_public_arguments
    def __init__(
        self,
        model: brainstate.nn.Module,
        *,
        policy: Policy = DEFAULT,
        mark: str | Callable | None = None,
    ):
        super().__init__(model, rules.d_rtrl(), policy=policy, mark=mark)
        self.modulates = True


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
