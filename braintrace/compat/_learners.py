"""Learners, ``compile`` and inputs with the names and arguments of the public package."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import brainstate
import jax
import jax.numpy as jnp

from .. import _learner as core
from .. import rules
from .._etrace_op import register_primitive as _register_primitive
from .._learner import ETraceLearner, learner_named, plain, shell_of
from .._rules import Feedback, Rule
from .._windows import check_choice, check_mask, length_of
from ..errors import OptionError, StepFunctionError
from ._arguments import takes_public_arguments, without_public
from ._synthetic import DNI as _DNI

METHODS = ('single-step', 'multi-step')
# Arguments by position, in the order of the public package
NAMED = 'name', 'vjp_method', 'fast_solve'
CHOSEN = 'control_flow', 'config', 'random_feedback_key'
TRACED = *NAMED, 'trace_dtype', 'chunked_trace', *CHOSEN, 'snap_max_jacobian_elements'

# inputs -------------------------------------------------------------------------------------------


class StepData:
    """Inputs of a learner that say how they lie in time; a pytree with the leaves of ``data``."""

    def __init__(self, data: Any):
        self.data = data

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(
            cls, lambda wrapped: ((wrapped.data,), None), lambda _, children: cls(*children)
        )

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.data!r})'


class SingleStepData(StepData):
    """Inputs of one step, or the same in every step next to a :class:`MultiStepData`.

    >>> import jax.numpy as jnp
    >>> from braintrace import compat, nn
    >>> x, model = jnp.zeros((3, 2)), nn.GRUCell(2, 4)
    >>> learner = compat.compile(model, 'D_RTRL', x, batch_size=3)
    >>> learner(compat.SingleStepData(x)).shape
    (3, 4)
    """


class MultiStepData(StepData):
    """Inputs of several steps, with time in axis 0: ``learner(MultiStepData(xs))`` is a loop of
    calls, and returns its outputs stacked over time.

    A gradient around it is that of the loop, the online gradient in memory that grows with the
    steps; :meth:`braintrace.ETraceLearner.etrace_grad` takes the same in constant memory.

    >>> import jax.numpy as jnp
    >>> from braintrace import compat, nn
    >>> x, model = jnp.zeros((3, 2)), nn.GRUCell(2, 4)
    >>> learner = compat.compile(model, 'D_RTRL', x, batch_size=3)
    >>> learner(compat.MultiStepData(jnp.zeros((5, 3, 2)))).shape
    (5, 3, 4)
    """


# learners -----------------------------------------------------------------------------------------


class PublicLearner(ETraceLearner):
    """What scripts of the public package call and read besides the methods of every learner."""

    vjp_method = 'single-step'
    _modulated: bool  # by a third factor, which meets the trace of its own step

    def __call__(self, *inputs):
        """One step of the model, or a loop of them for :class:`MultiStepData`."""
        moving = [x.data for x in inputs if isinstance(x, MultiStepData)]
        still = [x.data if isinstance(x, StepData) else x for x in inputs]
        if not moving:
            return self.update(*still)

        def step(slices):
            rest = iter(slices)
            each = zip(inputs, still, strict=True)
            return self.update(
                *(next(rest) if isinstance(x, MultiStepData) else s for x, s in each)
            )

        if length_of(*moving) > 1:
            return brainstate.transform.for_loop(step, moving)
        outputs = step(jax.tree.map(lambda a: a[0], moving))
        return jax.tree.map(lambda y: y[None], outputs)

    @property
    def module(self):
        """This learner: ``compile(vmap=True)`` of the public package wraps it."""
        return self

    @property
    def is_compiled(self) -> bool:
        """Whether the graph is compiled."""
        return self._own() is not None

    @property
    def hidden_states(self):
        """The model's hidden states: a dict path -> ``HiddenState``."""
        return self.model.states(brainstate.HiddenState)

    @property
    def config(self):
        """The rule, a value of :mod:`braintrace.rules`."""
        return self.rule

    def init_etrace_state(self, *args, **kwargs) -> None:
        """Empty the trace."""
        self.init_state()

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the report, where ``verbose``; return its text, where ``return_msg``."""
        text = str(self.report)
        if verbose:
            print(text)
        return text if return_msg else None

    def etrace_grad(
        self,
        *sequences,
        step_fn,
        mask=None,
        reduction: str = 'mean',
        return_value: bool = False,
        loss_output: str = 'per_step',
        **options,
    ):
        """As :meth:`braintrace.ETraceLearner.etrace_grad`, where a ``'multi-step'`` learner takes
        ``window=1`` or ``chunk_size``, and ``inside='exact'``. Returns ``grads``, ``grads, losses``
        (``return_value``), ``grads, aux`` (``has_aux``) or ``grads, losses, aux``.

        With ``chunk_size`` above 1 ``step_fn`` sees that many steps in axis 0 of its arguments, and
        returns a loss for each; they are given to it one by one, so each loss reads its own step.
        ``loss_output``: the losses ``'per_step'``, ``'masked'`` (each times its mask) or
        ``'scalar'`` (reduced as the gradient is).
        """
        check_choice('loss_output', loss_output, ('per_step', 'masked', 'scalar'))
        size = options.pop('chunk_size', None)
        size = 1 if size is None else size
        if not isinstance(size, int) or size < 1:
            raise OptionError(f'chunk_size is {size!r}; give an int >= 1, or None.')
        if self.vjp_method == METHODS[1]:
            options = {'window': size, 'inside': 'exact', **options}
        if size > 1:
            if self.vjp_method == METHODS[0]:
                raise OptionError(
                    f'chunk_size is {size} for a learner of single steps; make it with '
                    "vjp_method='multi-step'."
                )
            step_fn = self._of_windows(step_fn)
        self._check_inside(options)
        given = {'mask': mask, 'reduction': reduction}
        found = super().etrace_grad(*sequences, step_fn=step_fn, **given, **without_public(options))
        grads, losses, aux, _ = found
        if loss_output != 'per_step':
            weights = check_mask(mask, len(losses))
            masked = jnp.where(weights == 0, 0, losses * weights)
            total = masked.sum() / (weights.sum() if reduction == 'mean' else 1)
            losses = masked if loss_output == 'masked' else total
        asked = ((losses,) if return_value else ()) + ((aux,) if options.get('has_aux') else ())
        return (grads, *asked) if asked else grads

    def etrace_train(self, *sequences, **options):
        """As :meth:`braintrace.ETraceLearner.etrace_train`; ``losses, opt_state``, or ``losses,
        aux, opt_state`` with ``has_aux``.
        """
        self._check_inside(options)
        found = super().etrace_train(*sequences, **options)
        aux = (found.aux,) if options.get('has_aux') else ()
        return found.losses, *aux, found.opt_state

    def _check_inside(self, options: dict) -> None:
        if self._modulated and options.get('inside') == 'exact':
            raise OptionError(
                f"inside is 'exact' for {type(self).__name__}, whose modulator meets the trace of "
                "its own step; an exact window has none inside. Give inside='trace', or another "
                'learner.'
            )

    def etrace_evolve(
        self, *sequences, step_fn=None, chunk_size=None, return_outputs: bool = False, **options
    ):
        """As :meth:`braintrace.ETraceLearner.etrace_evolve`, which returns nothing by default, with
        ``chunk_size`` as in :meth:`etrace_grad`.
        """
        if step_fn is not None and (chunk_size or 1) > 1:
            step_fn = self._of_windows(step_fn)
        given = {'step_fn': step_fn, 'return_outputs': return_outputs}
        return super().etrace_evolve(*sequences, **given, **without_public(options))


def _of_windows(step_fn):
    """The function of one step that a function of several is."""

    def step(*slices):
        found = step_fn(*jax.tree.map(lambda a: a[None], slices))
        if any(jnp.shape(a)[:1] != (1,) for a in jax.tree.leaves(found)):
            raise StepFunctionError(
                'with chunk_size step_fn returns a loss for each step of its window, time in axis '
                f'0; it returned {jax.tree.map(jnp.shape, found)} for a window of one step.'
            )
        return jax.tree.map(lambda a: a[0], found)

    return step


def _public(*order: str, method: str = METHODS[0], modulated: bool = False) -> Any:
    """A decorator that makes a learner class one for scripts of the public package, whose
    constructor takes its arguments too; ``order``: of those given by position, after the model;
    ``method``: of gradients, where `vjp_method` is left out; ``modulated``: by a third factor.
    """

    def decorate(cls: type) -> type:
        own, rest = inspect.signature(cls), inspect.Parameter('rest', inspect.Parameter.VAR_KEYWORD)
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        theirs = inspect.Signature([*(inspect.Parameter(name, either) for name in order), rest])

        def __init__(self, model, *args, **options):  # noqa: N807
            given = theirs.bind_partial(*args, **options).arguments
            options = given.pop('rest', {}) | given
            chosen = options.pop('vjp_method', method)
            check_choice('vjp_method', chosen, METHODS)
            cls.__init__(self, model, **without_public(options, frozenset(own.parameters)))
            self.vjp_method = chosen
            # one for each function, as a new one compiles again; they go with the learner
            self._of_windows = functools.lru_cache(maxsize=16)(_of_windows)

        body: dict[str, Any] = {'__init__': __init__, '_modulated': modulated}
        body |= {'__doc__': cls.__doc__, '__module__': __name__}
        found = type(cls.__name__, (PublicLearner, cls), body)
        arguments = [*own.parameters.values(), rest]
        found.__signature__ = own.replace(parameters=arguments)  # type: ignore[attr-defined]
        return found

    return decorate


def _seed_of(key) -> int:
    """The seed that a JAX key, or an int, stands for."""
    return key if isinstance(key, int) else int(jax.random.randint(key, (), 0, 2**31 - 1))


def _snap(n: int = 2) -> Rule:
    return rules.snap(n)


def _uoro(pair: Literal['sample', 'batch'] = 'sample', seed: int = 0, projection_key=None) -> Rule:
    return rules.uoro(pair, seed if projection_key is None else _seed_of(projection_key))


def _e_prop(
    feedback: Any = 'symmetric', kappa_filter_decay: float = 0.0, random_feedback_key=None
) -> Rule:
    if random_feedback_key is not None:
        if feedback != 'random':
            raise OptionError(
                f'random_feedback_key is given and feedback is {feedback!r}; the key draws the '
                "matrices of feedback='random'."
            )
        feedback = Feedback('random', seed=_seed_of(random_feedback_key))
    return rules.e_prop(kappa_filter_decay, feedback)


@_public('n', *NAMED, 'snap_max_jacobian_elements')
@shell_of(_snap)
class SnAp(ETraceLearner):
    """``rules.snap(n)``, by default of 2 steps.

    >>> from braintrace import compat, nn
    >>> compat.SnAp(nn.VanillaRNNCell(2, 4)).rule
    snap(2)
    """


@_public(*NAMED, 'control_flow', 'projection_key', 'projection_eps', 'random_feedback_key')
@shell_of(_uoro)
class UORO(ETraceLearner):
    """``rules.uoro()``, whose seed may be a ``projection_key``.

    >>> import jax
    >>> from braintrace import compat, nn
    >>> compat.UORO(nn.VanillaRNNCell(2, 4), projection_key=42).rule
    uoro(seed=42)
    """


@_public('feedback', 'kappa_filter_decay', 'random_feedback_key', *NAMED)
@shell_of(_e_prop)
class EProp(ETraceLearner):
    """``rules.e_prop(kappa_filter_decay, feedback)``, whose random feedback is drawn from
    ``random_feedback_key``, a JAX key or an int.

    >>> from braintrace import compat, nn
    >>> compat.EProp(nn.VanillaRNNCell(2, 4), kappa_filter_decay=0.9).rule
    e_prop(kappa=0.9)
    """


@_public(*TRACED)
@shell_of(lambda trace_dtype=None: rules.d_rtrl(trace_dtype, scope='own'))
class OSTLRecurrent(ETraceLearner):
    """``rules.d_rtrl(scope='own')``; OSTL as it was published is ``rules.ostl()``.

    >>> from braintrace import compat, nn
    >>> compat.OSTLRecurrent(nn.VanillaRNNCell(2, 4)).rule
    d_rtrl(scope='own')
    """


@_public('decay_or_rank', 'name')
@shell_of(lambda decay_or_rank=1e-6: rules.es_d_rtrl(decay_or_rank))
class OSTLFeedforward(ETraceLearner):
    """``rules.es_d_rtrl(1e-6)``, the current step; OSTL as it was published for layers without a
    recurrent matrix is ``rules.ostl(recurrent=False)``.

    >>> from braintrace import compat, nn
    >>> compat.OSTLFeedforward(nn.VanillaRNNCell(2, 4)).rule
    es_d_rtrl(1e-06)
    """


@_public('name', 'vjp_method', 'modulator', 'fast_solve', *TRACED[3:6], modulated=True)
@shell_of(rules.d_rtrl)
class ThreeFactor(ETraceLearner):
    """``rules.d_rtrl()`` for a step function that returns :func:`braintrace.modulated`. Exact
    windows are refused: inside of them no trace is there to modulate.

    >>> import braintrace, jax.numpy as jnp
    >>> from braintrace import compat
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.VanillaRNNCell(2, 4)
    >>> learner = compat.compile(model, 'three_factor', x, batch_size=3)
    >>> step_fn = lambda x, reward: braintrace.modulated(-reward, learner(x))
    >>> grads = learner.etrace_grad(jnp.ones((5, 3, 2)), jnp.ones((5, 3)), step_fn=step_fn)
    >>> grads[('W', 'weight')]['weight'].shape
    (6, 4)
    """


D_RTRL = ParamDimVjpAlgorithm = _public(*TRACED)(core.D_RTRL)
ES_D_RTRL = IODimVjpAlgorithm = pp_prop = _public('decay_or_rank', *NAMED, *CHOSEN)(core.ES_D_RTRL)
DNI = _public('synthesizer', *TRACED[:6], method=METHODS[1])(_DNI)
RandomProjectionVjpAlgorithm = UORO
ETraceAlgorithm = ETraceVjpAlgorithm = ETraceLearner
OWN = D_RTRL, DNI, EProp, ES_D_RTRL, OSTLFeedforward, OSTLRecurrent, SnAp, ThreeFactor, UORO
LEARNERS: dict[str, type] = {cls.__name__: cls for cls in OWN} | {
    'IODimVjpAlgorithm': ES_D_RTRL,
    'ParamDimVjpAlgorithm': D_RTRL,
    'RandomProjectionVjpAlgorithm': UORO,
    'pp_prop': ES_D_RTRL,
}


def compile(model: brainstate.nn.Module, rule, *inputs, verbose: int = 0, **options):
    """As :func:`braintrace.compile`, with the learners of this module; ``verbose`` 1 or 2 prints
    the report.

    >>> import jax.numpy as jnp
    >>> from braintrace import compat, nn
    >>> x, model = jnp.zeros((3, 2)), nn.GRUCell(2, 4)
    >>> learner = compat.compile(model, 'pp_prop', x, batch_size=3, decay_or_rank=0.9)
    >>> learner.is_compiled
    True
    """
    if verbose not in (0, 1, 2):
        raise OptionError(f'verbose is {verbose!r}; choose 0, or 1 or 2 to print the report.')
    value = rule
    if isinstance(rule, str):
        named = (cls for name, cls in LEARNERS.items() if plain(name) == plain(rule))
        rule = next(named, None) or learner_named(rule)
    if rule is None or isinstance(rule, Rule):
        rule = _public()(shell_of(lambda: value)(type('ETraceLearner', (ETraceLearner,), {})))
    elif isinstance(rule, type) and not issubclass(rule, PublicLearner):
        rule = LEARNERS.get(rule.__name__) or _public()(rule)
    learner = core.compile(model, rule, *inputs, **options)
    if verbose:
        print(learner.report)
    return learner


compile_etrace_graph = takes_public_arguments(core.compile_etrace_graph)
register_primitive = takes_public_arguments(_register_primitive)
