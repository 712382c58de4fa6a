"""A learner of exact windows with a synthetic gradient at their ends."""

from __future__ import annotations

from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import DEFAULT, Policy
from .._windows import CallOptions, check_optimizer, length_of
from ..errors import OptionError
from ..extra._synthetic import Bootstrap, SyntheticGradient, signal_shapes
from ..rules import same_step
from .base import ETraceLearner
from .sequences import learn


class DNI(ETraceLearner):
    """Online learning by reverse mode in windows, with a synthetic gradient for what comes later:
    decoupled neural interfaces in time.

    At the end of each window but the last one of a call the loss ``sum(s(h_K) h_K)`` stands for the
    losses of later windows, with ``s(h_K)`` constant; ``s`` learns the derivative that the next
    window sends to its first states, in :meth:`~braintrace.ETraceLearner.etrace_train` together
    with the weights, by the same optimizer, or alone by
    :func:`braintrace.train_synthetic_gradient`. Give ``inside='exact'`` and to
    :meth:`~braintrace.ETraceLearner.etrace_grad` a window. With the true credit it is
    back-propagation through time, with none the truncated one; nothing is kept between calls.

    ``synthesizer``: a :class:`braintrace.SyntheticGradient` or None for a linear one that starts
    at zero; its parameters are ``learner.synthetic.value``. Other arguments as for
    :class:`braintrace.D_RTRL`. Raises :class:`braintrace.errors.OptionError` for another value of
    ``synthesizer``.

    Source: Jaderberg et al. 2017, "Decoupled neural interfaces using synthetic gradients" (ICML,
    arXiv 1608.05343).

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'dni', x, batch_size=3)
    >>> def step_fn(x):
    ...     return jnp.mean(learner(x) ** 2)
    >>> xs = jnp.ones((6, 3, 2))
    >>> len(learner.etrace_grad(xs, step_fn=step_fn, window=2, inside='exact').grads)
    3
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        synthesizer: SyntheticGradient | None = None,
        *,
        policy: Policy = DEFAULT,
        mark: str | Callable | None = None,
    ):
        super().__init__(model, same_step(), policy=policy, mark=mark)
        self.synthesizer = _checked(synthesizer)
        self.around = Bootstrap(model=self.synthesizer)

    def group_signal_shapes(self) -> dict[str, tuple[int, ...]]:
        """Group -> shape of its states, ``(*shape, S)``, as a synthesizer sees them."""
        return signal_shapes(self.graph)

    def attach_synthesizer(self, synthesizer: SyntheticGradient) -> None:
        """Take another synthesizer, with its first parameters."""
        around = Bootstrap(model=_checked(synthesizer))
        if self._own() is not None:  # what does not fit is refused before anything changes
            self._begin(around, self.graph)
        self.around, self.synthesizer = around, synthesizer


def _checked(synthesizer):
    if synthesizer is not None and not isinstance(synthesizer, SyntheticGradient):
        raise OptionError(
            f'synthesizer is {synthesizer!r}; give a braintrace.SyntheticGradient or None. (A '
            'function is a synthesizer of functional.OnlineLearner.sequence_grad.)'
        )
    return synthesizer


def train_synthetic_gradient(
    learner: DNI,
    *sequences,
    step_fn: Callable,
    window: int = 1,
    optimizer=None,
    lr: float = 0.01,
    epochs: int = 1,
    reset: bool = True,
) -> list[float]:
    """Train the synthesizer of a :class:`braintrace.DNI` on a sequence, weights constant; the norms
    of its gradients.

    ``sequences`` and ``step_fn`` as for ``learner.etrace_grad``. Each of the ``epochs`` is one
    update by the ``optimizer`` (an ``optax.GradientTransformation``, by default plain descent with
    the rate ``lr``) over the whole sequence in exact windows, after a reset, where ``reset``.
    Raises :class:`braintrace.errors.OptionError` for a ``window`` that no other one follows, and
    :class:`braintrace.errors.StructureError` for sequences of different lengths.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'dni', x, batch_size=3, seed=0)
    >>> def step_fn(x):
    ...     return jnp.sum(learner(x) ** 2)
    >>> xs = jnp.ones((6, 3, 2))
    >>> norms = braintrace.train_synthetic_gradient(learner, xs, step_fn=step_fn, epochs=20)
    >>> norms[-1] < norms[0]
    True
    """
    if not isinstance(learner, DNI):
        raise OptionError(f'learner is {type(learner).__name__}; give a braintrace.DNI.')
    if optimizer is not None:
        check_optimizer(optimizer)
    bound = learner._compiled()
    options = CallOptions.checked(
        'exact',
        learner.rule,
        reduction='mean',
        progress=False,
        around=learner.around,
        window=window,
        keep_trace=False,
    )
    if window is None or window >= length_of(*sequences):
        raise OptionError(
            f'window is {window}, the whole sequence: the synthesizer learns where one window '
            'follows another. Give an int below the number of steps.'
        )
    moments = None if optimizer is None else optimizer.init(learner.synthetic.value)
    norms = []
    for _ in range(epochs):
        if reset:
            learner.reset_state()
        _, grads = learn(bound, options, sequences, step_fn).learnt
        updates = jax.tree.map(lambda g: -lr * g, grads)
        if optimizer is not None:
            updates, moments = optimizer.update(grads, moments, learner.synthetic.value)
        learner.synthetic.value = jax.tree.map(jnp.add, learner.synthetic.value, updates)
        norms.append(float(sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5))
    return norms
