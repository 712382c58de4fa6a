"""A learner class for each rule: shells over the values of ``braintrace.rules``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .. import rules
from .._compiler import DEFAULT, Policy
from .._errors import OptionError
from .._public_names import takes_public_arguments
from .._rules import Feedback, Rule
from .._signatures import refuses
from .base import ETraceLearner


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
