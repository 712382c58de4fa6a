"""Whole sequences through a learner: ``etrace_grad``, ``etrace_train`` and ``etrace_evolve``."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import OptionError, StepFunctionError, StructureError
from ..functional import _online as core_
from ..functional import _sequence as seq
from .programs import EvolveProgram, GradOptions, GradProgram, TrainOptions, TrainProgram

__all__ = ['SequenceMixin']

CARRIES = ('trace', 'drop')
KEPT_PROGRAMS = 8


class Call(NamedTuple):
    """Checked arguments of a call, and what its program depends on."""
    sequences: Any
    mask: jax.Array | None
    flags: jax.Array | None
    weights: dict
    key: tuple


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _slices(sequences):
    return jax.tree.map(lambda a: _shape(jnp.asarray(a)), sequences)


def _signature(tree) -> tuple:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _choice(name: str, value, allowed) -> None:
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        raise OptionError(f'{name} is {value!r}; choose one of {tuple(allowed)}.')


class SequenceMixin:
    """``etrace_grad``, ``etrace_train`` and ``etrace_evolve`` of a learner."""

    # gradients ------------------------------------------------------------------------------------

    def etrace_grad(self, *sequences, step_fn: Callable, mask=None, reset=None, window='auto', memory_budget: int | None = None,
                    carry: str = 'trace', weights: dict | None = None, reduction: str = 'mean', has_aux: bool = False,
                    return_value: bool = False, progress: bool = False):
        """Online gradient of a sequence of losses, from the present state on; weights are constant during the call.

        ``sequences``: pytrees with time in axis 0. ``step_fn(*slices)`` calls the learner once and returns a scalar loss, or
        ``(loss, aux)`` with ``has_aux``. ``mask`` ``(T,)`` weighs the losses; where it is 0, a loss need not be a number. ``reset``,
        bool ``(T,)`` or ``(T, B)``, puts flagged lanes back to the initial states before a step (see :meth:`reset_state`).
        ``window``: ``'auto'``, an int >= 1, or None for the whole sequence; all give the same numbers, ``memory_budget`` bounds
        the bytes of ``'auto'``. Losses come back unweighted; where samples differ in length, weigh them inside ``step_fn``.
        ``progress`` shows a line on stderr (not inside transformations). Define ``step_fn`` once: a new function compiles anew.
        A loss may read old hidden states too; single calls leave their history out, with a warning.
        ``carry='trace'`` lets a later call continue the stream, ``'drop'`` leaves a zero trace; the trace's buffer is reused,
        arrays taken from ``learner.etrace.value`` before do not outlive the call. ``weights``: dict path -> ``ParamState``,
        default ``param_states``.
        ``reduction='mean'`` divides by the sum of the mask. Returns ``grads``, ``(grads, losses)``, ``(grads, aux)`` or
        ``(grads, losses, aux)``, gradients in a dict like ``weights``.

        >>> import braintrace, jax.numpy as jnp
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 4), 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
        >>> def step_fn(x, y):
        ...     return jnp.mean((learner(x) - y) ** 2)
        >>> grads, losses = learner.etrace_grad(jnp.ones((5, 3, 2)), jnp.ones((5, 3, 4)), step_fn=step_fn, return_value=True)
        >>> losses.shape
        (5,)
        """
        _choice('carry', carry, CARRIES)
        _choice('return_value', return_value, (True, False))
        self._compiled()  # type: ignore[attr-defined]
        options = GradOptions(window, memory_budget, carry == 'trace', reduction, has_aux, progress)
        call = self._prepare(sequences, step_fn, mask, reset, weights, options)
        seq.check_window(window, memory_budget)
        program = self._program(('grad', *call.key), lambda: GradProgram(self, step_fn, call.weights, _slices(call.sequences), options))
        grads, losses, aux = program(call.sequences, call.mask, call.flags)
        extra = ([losses] if return_value else []) + ([aux] if has_aux else [])
        return (grads, *extra) if extra else grads

    def etrace_train(self, *sequences, step_fn: Callable, optimizer, opt_state=None, update_every: int = 1, write_every: int | None = None,
                     mask=None, reset=None, weights: dict | None = None, reduction: str = 'mean', has_aux: bool = False,
                     progress: bool = False):
        """Learn along a sequence, from the present state on: the parameters change after each ``update_every`` steps.

        ``optimizer``: an ``optax.GradientTransformation``; ``opt_state``: what an earlier call returned, to continue a stream, default
        ``optimizer.init`` of the weights' values. Each update uses the ``reduction`` of its own steps' gradients; steps left at the end
        get an update of their own. Between two writes of the trace steps are kept as they are, with the same numbers; ``write_every``
        fixes their number. Other arguments as for :meth:`etrace_grad`; define the optimizer once too, another object compiles anew.
        Returns ``(losses, opt_state)``, or ``(losses, aux, opt_state)`` with ``has_aux``. As in every call over a sequence the trace's
        buffer is reused: arrays taken from ``learner.etrace.value`` before do not outlive it; copy them.

        >>> import braintrace, jax.numpy as jnp, optax
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 4), 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
        >>> def step_fn(x, y):
        ...     return jnp.mean((learner(x) - y) ** 2)
        >>> losses, opt_state = learner.etrace_train(jnp.ones((50, 3, 2)), jnp.ones((50, 3, 4)), step_fn=step_fn,
        ...                                          optimizer=optax.adam(1e-2))
        >>> bool(losses[-1] < losses[0])
        True
        """
        seq.check_optimizer(optimizer)
        core, _ = self._compiled()  # type: ignore[attr-defined]
        delay = seq.choose_delay(write_every, update_every, core.graph, core.rule)
        options = TrainOptions(None, None, True, reduction, has_aux, progress, optimizer, update_every, delay)
        call = self._prepare(sequences, step_fn, mask, reset, weights, options)
        values = {k: s.value for k, s in call.weights.items()}
        seq.check_updatable(values)
        opt_state = optimizer.init(values) if opt_state is None else opt_state

        def make():
            seq.check_opt_state(optimizer, values, opt_state)
            return TrainProgram(self, step_fn, call.weights, _slices(call.sequences), options)
        program = self._program(('train', *call.key, _signature(opt_state)), make)
        losses, aux, opt_state = program(call.sequences, call.mask, call.flags, opt_state)
        return (losses, aux, opt_state) if has_aux else (losses, opt_state)

    def _prepare(self, sequences, step_fn, mask, reset, weights, options: GradOptions) -> Call:
        """The checked arguments that both kinds of gradient calls share, and the key of their program."""
        for name, allowed in (('reduction', core_.REDUCTIONS), ('has_aux', (True, False)), ('progress', (True, False))):
            _choice(name, getattr(options, name), allowed)
        if not callable(step_fn):
            raise OptionError(f'step_fn is {step_fn!r}; give a function of one step\'s slices that calls the learner once.')
        if step_fn is self:
            raise StepFunctionError('step_fn is the learner; give a function that computes a loss from its output, such as '
                                    '`lambda x, target: jnp.mean((learner(x) - target) ** 2)`.')
        length = seq.length_of(*sequences)
        sequences = jax.tree.map(jnp.asarray, sequences)
        mask, flags = None if mask is None else seq.check_mask(mask, length), self._flags(reset, length)
        if weights is not None and not isinstance(weights, Mapping):
            raise OptionError(f'weights is {type(weights).__name__}; give a dict path -> ParamState.')
        weights = dict(self.param_states if weights is None else weights)  # type: ignore[attr-defined]
        key = (step_fn, options, _signature((sequences, flags)), tuple(map(id, weights.values())))
        return Call(sequences, mask, flags, weights, key)

    def _program(self, key, make: Callable):
        """The compiled program for a call, made at most once for each step function, shapes and options."""
        kept: OrderedDict = self._jitted  # type: ignore[attr-defined]
        if key not in kept or kept[key].touched.stale():
            kept[key] = make()
            while len(kept) > KEPT_PROGRAMS:
                kept.pop(next(iter(kept)))
        return kept[key]

    def _flags(self, reset, length: int):
        if reset is None:
            return None
        flags = np.asarray(reset) if isinstance(reset, str) else jnp.asarray(reset)
        t = self.etrace.value['t']  # type: ignore[attr-defined]
        if flags.dtype != bool or flags.shape not in ((length,), (length, *t.shape)):
            raise StructureError(f'reset is {flags.dtype}{list(flags.shape)}; give bool of shape [{length}] or {[length, *t.shape]}.')
        return flags

    # running --------------------------------------------------------------------------------------

    def etrace_evolve(self, *sequences, step_fn: Callable | None = None, return_outputs: bool = True,
                      trace: bool = True):
        """Run a sequence forward without gradients; ``step_fn(*slices)`` defaults to the learner itself.

        ``trace=False`` is evaluation: hidden states advance, trace and step count stay. Returns what
        ``step_fn`` returned, stacked over time; ``return_outputs=False`` keeps nothing of it, for a
        long run of which only the states matter, and returns None.

        >>> import braintrace, jax.numpy as jnp
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 4), 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
        >>> learner.etrace_evolve(jnp.ones((5, 3, 2)), trace=False).shape
        (5, 3, 4)
        """
        _choice('return_outputs', return_outputs, (True, False))
        _choice('trace', trace, (True, False))
        self._compiled()  # type: ignore[attr-defined]
        seq.length_of(*sequences)
        sequences = jax.tree.map(jnp.asarray, sequences)
        key = ('evolve', step_fn, return_outputs, trace, _signature(sequences))
        program = self._program(key, lambda: EvolveProgram(self, step_fn or self, _slices(sequences), return_outputs, trace))
        return program(sequences)
