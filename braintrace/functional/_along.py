"""What an online learner does along a whole sequence, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._windows import (
    CARRIES,
    REDUCTIONS,
    GradientOptions,
    check_choice,
    check_inside,
    check_optimizer,
    check_synthesizer,
    check_window,
)
from ._loss import checked_loss
from ._sequences import SequenceCalls


class AlongSequences:
    """The functions of a learner that take a sequence, with time in axis 0."""

    def sequence_grad(
        self: Any,
        loss_fn: Callable,
        window='auto',
        reduction: str = 'mean',
        memory_budget: int | None = None,
        progress: bool = False,
        carry: str = 'trace',
        inside: str = 'trace',
        synthesizer: Callable | None = None,
    ) -> Callable:
        """``(params, state, xs, ys, mask=None, reset=None) -> grads, state, losses`` over a whole
        sequence.

        Time is axis 0 of ``xs`` and ``ys``; weights are constant during the call. ``reset`` is
        ``(flags, carry0)``, flags bool ``(T,)`` or ``(T, B)``: before step t the flagged lanes
        start anew. ``mask`` ``(T,)`` weighs the losses, and no penalty
        (:class:`braintrace.Penalised`); where it is 0, a loss need not be a number. ``losses`` has
        shape ``(T,)``. With ``rule=None`` each gradient is that of its own step, with the old carry
        held constant.

        Parameters
        ----------
        loss_fn : function
            ``loss_fn(output, target)``, the loss of one step, a real scalar.
        window : 'auto', int or None
            Number of steps that are computed together, None for all; every window gives the same
            numbers, but for ``inside='exact'``.
        reduction : 'mean' or 'sum'
            ``'mean'`` divides by the sum of the mask.
        memory_budget : int, optional
            A bound in bytes for what ``'auto'`` chooses.
        progress : bool
            Shows a line on stderr (not under ``vmap``).
        carry : 'trace' or 'drop'
            ``'trace'`` lets a later call continue the stream. ``'drop'`` ends it: ``t`` of the
            state that comes back is 0, so its trace counts as empty, and in a loop over batches no
            trace is ever written while a sequence fits into one window. The cell's carry goes on
            in both.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of each window, in memory
            that grows with the window, and reads the trace at its border: the window, an int or
            None, is then the reach of the exact gradient. One window for the whole sequence is
            back-propagation through time; with ``carry='drop'`` no trace is read or written, which
            is truncated back-propagation (Williams and Peng 1990).
        synthesizer : function, optional
            ``synthesizer(params, states) -> credit`` stands for the losses of later windows, a
            loss ``sum(s(h_K) h_K)`` at the end of each exact window but the last (Jaderberg et al.
            2017); states and credit are dicts group -> array ``(*shape, S)``. ``params`` and
            ``grads`` are pairs with its own; its loss is half of the squared distance to the
            derivative that the next window has.

        Raises
        ------
        OptionError
            An option has another value.

        Examples
        --------
        >>> import jax, jax.numpy as jnp, braintrace
        >>> def cell(params, h, x):
        ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
        ...     return h, h
        >>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
        >>> params, h, xs = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((7, 1, 2))
        >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
        >>> grad = jax.jit(learner.sequence_grad(loss, carry='drop'))
        >>> state = learner.init(params, h, xs[0])
        >>> for batch in (xs, 2 * xs):
        ...     start = state.replace(carry=h)
        ...     grads, state, losses = grad(params, start, batch, jnp.zeros((7, 1, 3)))
        >>> state.t.tolist()
        [0]
        """
        self._check_sequence(reduction, progress)
        check_window(window, memory_budget)
        check_choice('carry', carry, CARRIES)
        exact = check_inside(inside, window)
        check_synthesizer(synthesizer, exact, self.rule)
        options = GradientOptions(window, memory_budget, carry == 'trace', reduction, exact)
        return self._along(loss_fn, progress, synthesizer).gradient(options)

    def sequence_update(
        self: Any,
        loss_fn: Callable,
        optimizer,
        every: int = 1,
        reduction: str = 'mean',
        write_every: int | None = None,
        progress: bool = False,
        inside: str = 'trace',
        synthesizer: Callable | None = None,
    ) -> Callable:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> params, opt_state, state,
        losses``: learn along a sequence.

        Arguments that are not listed are those of :meth:`sequence_grad`. Under ``jit``, donate
        ``state``. Where no transformation surrounds the call, it compiles itself, and Ctrl-C ends
        it after the updates that run, with a ``KeyboardInterrupt`` whose ``so_far`` is what the
        call returns for the steps until then.

        Parameters
        ----------
        optimizer : optax.GradientTransformation
            ``opt_state`` is at first ``optimizer.init(params)``. Leaves that are not trainable
            stay.
        every : int
            The parameters change after each so many steps, by the ``reduction`` of these steps'
            gradients, and once more after the steps that are left at the end.
        write_every : int, optional
            Number of steps between two writes of the trace, in which steps are kept as they are;
            the numbers are the same. By default chosen from the shapes.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of each update.

        Examples
        --------
        >>> import jax, jax.numpy as jnp, optax, braintrace
        >>> def cell(params, h, x):
        ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
        ...     return h, h
        >>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
        >>> optimizer = optax.adam(1e-2)
        >>> params, h, xs = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((70, 1, 2))
        >>> loss = lambda out, y: jnp.sum((out - y) ** 2)
        >>> train = jax.jit(learner.sequence_update(loss, optimizer), donate_argnums=2)
        >>> state, opt_state = learner.init(params, h, xs[0]), optimizer.init(params)
        >>> params, _, state, losses = train(params, opt_state, state, xs, jnp.zeros((70, 1, 3)))
        >>> bool(losses[-1] < losses[0])
        True
        """
        self._check_sequence(reduction, progress)
        check_optimizer(optimizer)
        exact = check_inside(inside, every)
        check_synthesizer(synthesizer, exact, self.rule)
        return self._along(loss_fn, progress, synthesizer).update(
            optimizer, every, write_every, reduction, exact
        )

    def _along(self: Any, loss_fn: Callable, progress: bool, synthesizer) -> SequenceCalls:
        loss = checked_loss(self, loss_fn)
        return SequenceCalls(self._matching, self.hidden, loss, progress, synthesizer)

    @staticmethod
    def _check_sequence(reduction, progress) -> None:
        check_choice('progress', progress, (True, False))
        check_choice('reduction', reduction, REDUCTIONS)
