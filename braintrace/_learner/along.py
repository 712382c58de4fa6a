"""What a learner does along a whole sequence: a gradient, learning, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._public_names import takes_public_arguments
from .._windows import (
    CARRIES,
    LOSS_OUTPUTS,
    GradientOptions,
    Result,
    UpdateOptions,
    check_choice,
    check_inside,
    check_optimizer,
    check_window,
    choose_delay,
    length_of,
    split_weights,
    weighed,
    with_so_far,
)
from .compiled_calls import CallOptions
from .own_states import synthesizer_of
from .sequences import Arguments, evolve, gradient, train


class AlongSequences:
    """The calls of a learner that take a sequence, with time in axis 0."""

    @takes_public_arguments
    def etrace_grad(
        self: Any,
        *sequences,
        step_fn: Callable,
        mask=None,
        reset=None,
        window='auto',
        memory_budget: int | None = None,
        carry: str = 'trace',
        inside: str = 'trace',
        weights: dict | None = None,
        reduction: str = 'mean',
        has_aux: bool = False,
        return_value: bool = False,
        loss_output: str = 'per_step',
        progress: bool = False,
    ):
        """Online gradient of a sequence of losses, from the present state on; weights are constant
        during the call.

        Parameters
        ----------
        *sequences : pytrees
            Inputs, targets, anything that a step reads, with time in axis 0.
        step_fn : function
            ``step_fn(*slices)`` calls the learner once and returns a real scalar loss, a
            :class:`braintrace.Penalised`, or ``(loss, aux)`` with ``has_aux``. A loss may read old
            hidden states too. Define it once: a new function compiles anew.
        mask : array of shape (T,), optional
            Weighs the losses; where it is 0, a loss need not be a number. The penalty of a
            :class:`braintrace.Penalised` is not weighed. Where samples differ in length, weigh
            them inside ``step_fn``.
        reset : bool array of shape (T,) or (T, B), optional
            Puts flagged lanes back to the initial states before a step (:meth:`reset_state`).
        window : 'auto', int or None
            How many steps are computed together, None for all; every window gives the same
            numbers, but for ``inside='exact'``.
        memory_budget : int, optional
            A bound in bytes for what ``'auto'`` chooses.
        carry : 'trace' or 'drop'
            ``'trace'`` lets a later call continue the stream, ``'drop'`` leaves a zero trace.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through each window, and the trace at its
            border: the window, an int or None, is then the reach of the exact gradient. With
            ``carry='drop'`` it is truncated back-propagation through time, whatever the rule is:
            leave that out for separate sequences, too.
        weights : dict, optional
            Path -> ``ParamState``; by default ``param_states``.
        reduction : 'mean' or 'sum'
            ``'mean'`` divides by the sum of the mask.
        has_aux : bool
            Whether ``step_fn`` returns a pair.
        return_value : bool
            Whether the losses come back too.
        loss_output : 'per_step', 'masked' or 'scalar'
            The losses as they are, each times its mask, or reduced as the gradient is.
        progress : bool
            Shows a line on stderr (not inside transformations).

        Returns
        -------
        grads, (grads, losses), (grads, aux) or (grads, losses, aux)
            Gradients in a dict like ``weights``. The trace's buffer is reused: arrays taken from
            ``learner.etrace.value`` before do not outlive the call.

        Raises
        ------
        StepFunctionError
            ``step_fn`` does not call the learner once, or returns no scalar.
        StructureError
            Sequences have different lengths, or a slice is not like what was compiled.
        OptionError
            An option has a value outside its set.

        Examples
        --------
        >>> import braintrace, jax.numpy as jnp
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> def step_fn(x, y):
        ...     return jnp.mean((learner(x) - y) ** 2)
        >>> xs, ys = jnp.ones((5, 3, 2)), jnp.ones((5, 3, 4))
        >>> grads, losses = learner.etrace_grad(xs, ys, step_fn=step_fn, return_value=True)
        >>> losses.shape
        (5,)
        """
        check_choice('carry', carry, CARRIES)
        check_choice('return_value', return_value, (True, False))
        check_choice('loss_output', loss_output, LOSS_OUTPUTS)
        check_window(window, memory_budget)
        exact = check_inside(inside, window)
        along = GradientOptions(window, memory_budget, carry == 'trace', reduction, exact)
        given, bound = Arguments(sequences, step_fn, mask, reset, weights), self._compiled()
        apply = synthesizer_of(self, exact)
        result = gradient(bound.in_time(), given, CallOptions(along, has_aux, progress, apply))
        losses = weighed(result.losses, mask, loss_output, reduction)
        grads, _ = split_weights(result.learnt, apply)
        extra = ([losses] if return_value else []) + ([result.aux] if has_aux else [])
        return _returned((grads, *extra) if extra else grads, result, given)

    def etrace_train(
        self: Any,
        *sequences,
        step_fn: Callable,
        optimizer,
        opt_state=None,
        update_every: int = 1,
        write_every: int | None = None,
        mask=None,
        reset=None,
        weights: dict | None = None,
        reduction: str = 'mean',
        has_aux: bool = False,
        progress: bool = False,
        inside: str = 'trace',
    ):
        """Learn along a sequence, from the present state on: the parameters change after each
        ``update_every`` steps.

        Arguments that are not listed are those of :meth:`etrace_grad`, and so are the errors.

        Parameters
        ----------
        optimizer : optax.GradientTransformation
            Define it once, as ``step_fn``: another object compiles anew.
        opt_state : optional
            What an earlier call returned, to continue a stream; by default ``optimizer.init`` of
            the weights' values.
        update_every : int
            Each update uses the ``reduction`` of its own steps' gradients, their mask and their
            penalties (:class:`braintrace.Penalised`); steps left at the end get an update of their
            own. The optimiser runs also where a mask is zero.
        write_every : int, optional
            Number of steps between two writes of the trace, in which steps are kept as they are;
            the numbers are the same. By default chosen from the shapes.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of an update.

        Returns
        -------
        (losses, opt_state), or (losses, aux, opt_state) with ``has_aux``
            As in every call over a sequence the trace's buffer is reused: arrays taken from
            ``learner.etrace.value`` before do not outlive it; copy them.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C, after the updates that run: weights and states are those of the last one. Its
            ``so_far`` is what the call returns for the steps until then.

        Examples
        --------
        >>> import braintrace, jax.numpy as jnp, optax
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3, seed=0)
        >>> def step_fn(x, y):
        ...     return jnp.mean((learner(x) - y) ** 2)
        >>> xs, ys = jnp.ones((50, 3, 2)), jnp.ones((50, 3, 4))
        >>> losses, opt_state = learner.etrace_train(
        ...     xs, ys, step_fn=step_fn, optimizer=optax.adam(1e-2)
        ... )
        >>> bool(losses[-1] < losses[0])
        True
        """
        check_optimizer(optimizer)
        bound = self._compiled().in_time()
        delay = choose_delay(write_every, update_every, bound.core.graph, bound.core.first.rule)
        exact = check_inside(inside, update_every)
        along = UpdateOptions(optimizer, update_every, delay, reduction, exact)
        given = Arguments(sequences, step_fn, mask, reset, weights)
        calls = CallOptions(along, has_aux, progress, synthesizer_of(self, exact))
        result = train(bound, given, calls, opt_state)
        extra = [result.aux] if has_aux else []
        return _returned((result.losses, *extra, result.learnt[1]), result, given)

    @takes_public_arguments
    def etrace_evolve(
        self: Any,
        *sequences,
        step_fn: Callable | None = None,
        return_outputs: bool = True,
        trace: bool = True,
    ):
        """Run a sequence forward without gradients; ``step_fn(*slices)`` defaults to the learner
        itself.

        ``trace=False`` is evaluation: hidden states advance, trace and step count stay. Returns
        the results of ``step_fn``, stacked over time; ``return_outputs=False`` keeps none of them,
        for a long run where only the states matter, and returns None.

        >>> import braintrace, jax.numpy as jnp
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> learner.etrace_evolve(jnp.ones((5, 3, 2)), trace=False).shape
        (5, 3, 4)
        """
        return evolve(self._compiled().in_time(), sequences, step_fn, return_outputs, trace)


def _returned(value, result: Result, given: Arguments):
    """What a call returns; where it was stopped, its exception, which has that."""
    if result.stopped is None:
        return value
    raise with_so_far(result.stopped, value, len(result.losses), length_of(*given.sequences))
