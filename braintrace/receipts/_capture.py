"""Learning steps that also return what a receipt holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import functional
from ..errors import EtpDtypeError, NotSupportedError, OptionError, StructureError
from ._cells import Cell
from ._losses import Loss, loss_of
from ._topology import Topology, check_rule, topology_of

ARRAYS = ('inline', 'npz', 'sample')
PRECISIONS = ('highest', 'tf32', 'bf16')


class Record(NamedTuple):
    """What one step was made of, as arrays; :class:`Recorder` writes it.

    - ``observed``: :class:`braintrace.functional.Observed`
    - ``carry_before``, ``carry_after``, ``outputs``: of the cell
    - ``gradients``, ``loss``: of this step alone
    - ``per_lane``, ``err``: the loss of each lane, and the derivative of the loss by the outputs
    - ``probabilities``: of the outputs, with the loss ``'softmax_ce'``, else None
    - ``mask``, ``reset``: the weight of each lane, and whether it started again before the step
    - ``precision``: of products, a place in ``('highest', 'tf32', 'bf16')``

    >>> import jax, jax.numpy as jnp, braintrace
    >>> cell = Cell.rnn()
    >>> learner = braintrace.functional.online(cell)
    >>> params = cell.init(jax.random.key(0), 3, 4, 2)
    >>> xs, ys = jnp.ones((6, 5, 3)), jnp.ones((6, 5, 2))
    >>> state = learner.init(params, cell.carry(params, 5), xs[0])
    >>> *_, record = capture(learner).grad(params, state, xs[0], ys[0])
    >>> record.per_lane.shape, record.err.shape
    ((5,), (5, 2))
    """

    observed: functional.Observed
    carry_before: Any
    carry_after: Any
    outputs: jax.Array
    gradients: Any
    loss: jax.Array
    per_lane: jax.Array
    probabilities: jax.Array | None
    err: jax.Array
    mask: jax.Array
    reset: jax.Array
    precision: jax.Array


class Run(NamedTuple):
    """Several steps with constant parameters: ``steps``, a :class:`Record` of each, time in front,
    the ``inputs`` and ``targets``, their ``gradients``, the ``weights`` ``(T,)`` of their losses,
    and ``initial``, the carry that resets put back.

    >>> import jax, jax.numpy as jnp, braintrace
    >>> cell = Cell.rnn()
    >>> learner = braintrace.functional.online(cell)
    >>> params = cell.init(jax.random.key(0), 3, 4, 2)
    >>> xs, ys = jnp.ones((6, 5, 3)), jnp.ones((6, 5, 2))
    >>> state = learner.init(params, cell.carry(params, 5), xs[0])
    >>> _, run = capture(learner).sequence_grad(params, state, xs, ys)
    >>> run.steps.outputs.shape, run.weights.shape
    ((6, 5, 2), (6,))
    """

    steps: Record
    inputs: jax.Array
    targets: jax.Array
    gradients: Any
    weights: jax.Array
    initial: Any


class Block(NamedTuple):
    """One update along a sequence: ``params``, the ``run`` of steps, the ``updates``, and
    ``opt_before``, ``opt_after`` and ``params_after``, in the order of the arguments of
    :meth:`Recorder.write_sequence`.

    >>> import jax, jax.numpy as jnp, optax, braintrace
    >>> cell = Cell.rnn()
    >>> learner = braintrace.functional.online(cell)
    >>> params = cell.init(jax.random.key(0), 3, 4, 2)
    >>> xs, ys = jnp.ones((6, 5, 3)), jnp.ones((6, 5, 2))
    >>> state = learner.init(params, cell.carry(params, 5), xs[0])
    >>> train = capture(learner).sequence_update(optax.sgd(0.1), update_every=2)
    >>> _, blocks = train(params, optax.sgd(0.1).init(params), state, xs, ys)
    >>> len(blocks), blocks[0].run.inputs.shape
    (3, (2, 5, 3))
    """

    params: Any
    run: Run
    updates: Any
    opt_before: Any
    opt_after: Any
    params_after: Any


@dataclass(frozen=True)
class Recording:
    """Steps of a learner that also return what a receipt holds; :func:`capture` makes it, and has
    the arguments: ``loss``, ``cell``, ``roles``, ``arrays``, ``allow_tf32``.

    Raises :class:`braintrace.errors.StructureError` for inputs, targets or a ``mask`` of other
    shapes or lanes, :class:`braintrace.errors.OptionError` for a ``mask`` with a loss of your own,
    :class:`braintrace.errors.NotSupportedError` for what a receipt has no formulas for.

    >>> import jax, jax.numpy as jnp, braintrace
    >>> cell = Cell.rnn()
    >>> learner = braintrace.functional.online(cell)
    >>> params, x, y = cell.init(jax.random.key(0), 3, 4, 2), jnp.ones((5, 3)), jnp.ones((5, 2))
    >>> state = learner.init(params, cell.carry(params, 5), x)
    >>> step = jax.jit(capture(learner).grad)
    >>> gradient, record = step(params, state, x, y)
    >>> record.observed.df['W']['h'][0].shape
    (5, 4)
    """

    learner: functional.OnlineLearner
    loss: Loss
    cell: Cell | None = None
    roles: tuple[tuple[str, str], ...] = ()
    arrays: str = 'inline'
    allow_tf32: bool = False

    @property
    def topology(self) -> Topology:
        """The cell, its groups and its relations, as a receipt names them."""
        return topology_of(self.learner, self.cell, dict(self.roles))

    def grad(self, params, state, inputs, targets, mask=None):
        """``StepGradient, Record``: the numbers of ``learner.grad(loss)``, and what they were made
        of.

        ``inputs`` (B, I), ``targets`` (B, O); ``mask`` (B,) weighs the losses of the lanes. Pure.
        Raises :class:`braintrace.errors.EtpDtypeError` for numbers that a receipt can not hold, and
        :class:`braintrace.errors.NotSupportedError` for products in TF32.
        """
        mask = self._mask(state, inputs, mask)
        return self._step(params, state, inputs, targets, mask, jnp.zeros(mask.shape, bool))

    def _mask(self, state, inputs, mask):
        if not hasattr(inputs, 'shape') or inputs.ndim != 2:
            raise StructureError(
                'inputs are no array (lanes, I); a receipt has one, so put several together.'
            )
        if mask is not None and self.loss.own is not None:
            raise OptionError('mask: a loss of your own weighs the lanes itself. Leave it out.')
        dtype = _dtype(state.carry)
        if mask is None:
            return jnp.ones(len(inputs), dtype)
        if jnp.shape(mask) != (len(inputs),):
            raise StructureError(
                f'mask is {list(jnp.shape(mask))}; give the weights of the lanes, [{len(inputs)}].'
            )
        return jnp.asarray(mask, dtype)

    def _step(self, params, state, inputs, targets, mask, reset):
        precision, wanted = self._precision(params, state), (targets, mask)
        lanes = self.learner.graph.lanes
        if lanes is not None and lanes != len(inputs):
            raise StructureError(
                f'inputs have {len(inputs)} lanes, and the learner was compiled for {lanes} first: '
                'its receipts tell of that network. Record another batch size by a learner of its '
                'own.'
            )
        step = self.learner.observed(self.loss.total)
        found, observed = step(params, state, inputs, wanted)
        grads, loss, outputs, new = found
        record = Record(
            observed,
            state.carry,
            new.carry,
            outputs,
            grads,
            loss,
            self.loss.lanes(outputs, targets, loss),
            self.loss.probabilities(outputs),
            jax.grad(self.loss.total)(outputs, wanted),
            mask,
            reset,
            jnp.asarray(PRECISIONS.index(precision)),
        )
        return found, record

    def _precision(self, params, state) -> str:
        """How products round on the default device, one of ``PRECISIONS``; refuses what a receipt
        can not hold.
        """
        dtype = _dtype(params)
        asked = str(getattr(jax.config, 'jax_default_matmul_precision', None) or 'default').lower()
        platform = jax.default_backend()
        full = asked in ('highest', 'float32', 'f32_f32_f32', 'f64_f64_f64')
        if platform == 'cpu' or dtype == jnp.float64 or full:
            return 'highest'
        found = 'bf16' if platform == 'tpu' or 'bf' in asked else 'tf32'
        if not self.allow_tf32:
            raise NotSupportedError(
                f'products of float32 are made in {found} on this device, so a verifier could '
                'accept wrong numbers. Set jax.config.update("jax_default_matmul_precision", '
                '"highest"), or pass allow_tf32=True and verify with --allow.'
            )
        return found

    def sequence_grad(self, params, state, xs, ys, mask=None, reset=None):
        """``Gradient, Run`` of a whole sequence, time in axis 0: but for rounding the numbers of
        ``learner.sequence_grad(loss)``, made step by step, and what each step was made of.

        ``mask`` (T,) and ``reset``, a pair ``(flags, carry0)``, as there. Pure.
        """
        self._check_window(params)
        wanted = self._with_lanes(state, xs, ys)
        gradient = self.learner.sequence_grad(self.loss.total)
        jax.eval_shape(gradient, params, state, xs, wanted, mask, reset)  # it checks its arguments
        run, state = self._run(params, state, (xs, ys, mask, reset))
        return functional.Gradient(run.gradients, run.steps.loss, None, state), run

    def sequence_update(self, optimizer, update_every: int = 1) -> Callable:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained, blocks``: but for
        rounding the numbers of ``learner.sequence_update(loss, optimizer, update_every)``, and the
        :class:`Block` of each update.
        """

        @jax.jit
        def block(params, opt_state, state, xs, ys, mask, reset):
            self._check_window(params)
            run, new = self._run(params, state, (xs, ys, mask, reset))
            shown = _shown(optimizer, run.gradients)
            update = self.learner.sequence_update(self.loss.total, shown, len(xs))
            start, wanted = shown.init(params, opt_state), self._with_lanes(state, xs, ys)
            found = update(params, start, state, xs, wanted, mask, reset)
            opt, updates = found.opt_state
            made = Block(params, run, updates, opt_state, opt, found.params)
            return made, new, run.steps.loss

        def along(params, opt_state, state, xs, ys, mask=None, reset=None):
            blocks, losses = [], []
            for start in range(0, len(xs), update_every):
                part = slice(start, start + update_every)
                weights = None if mask is None else mask[part]
                flags = None if reset is None else (reset[0][part], reset[1])
                made, state, found = block(
                    params, opt_state, state, xs[part], ys[part], weights, flags
                )
                params, opt_state = made.params_after, made.opt_after
                blocks.append(made)
                losses.append(found)
            found = functional.Trained(params, jnp.concatenate(losses), None, state, opt_state)
            return found, blocks

        return along

    def _narrow(self, dtype) -> bool:
        """Whether the trace is rounded when it is written."""
        own = getattr(self.learner.rule, 'trace_dtype', None)
        return own is not None and jnp.finfo(own).bits < jnp.finfo(dtype).bits

    def _check_window(self, params) -> None:
        if self._narrow(_dtype(params)):
            raise NotSupportedError(
                'the trace is stored in a narrow dtype, and a sequence rounds it at other steps '
                'than single steps do. Record single steps, or leave trace_dtype out.'
            )

    def _with_lanes(self, state, xs, ys):
        """Targets of a sequence as the loss takes them: with a mask of ones."""
        return ys, jnp.ones(xs.shape[:2], _dtype(state.carry))

    def _run(self, params, state, data: tuple) -> tuple[Run, functional.OnlineState]:
        """Each step observed, and the state after them."""
        xs, ys, mask, reset = data
        lanes = xs.shape[1:2]
        ones = self._mask(state, xs[0], None)
        flags, initial = (jnp.zeros(len(xs), bool), state.carry) if reset is None else reset
        wide = flags[:, None] if jnp.ndim(flags) == 1 else flags
        flags = jnp.broadcast_to(wide, (len(xs), *lanes))

        def step(state, at):
            x, y, now = at
            if reset is not None:
                state = functional.reset(state, now, initial, self.learner.hidden)
            (*_, state), record = self._step(params, state, x, y, ones, now)
            return state, record

        state, steps = jax.lax.scan(step, state, (xs, ys, flags))
        weights = jnp.ones(len(xs), ones.dtype) if mask is None else jnp.asarray(mask, ones.dtype)
        grads = _weighted(steps.gradients, weights)
        return Run(steps, xs, ys, grads, weights, None if reset is None else initial), state


def _weighted(grads, weights):
    """The mean of gradients with time in front; a gradient of weight 0 need not be a number."""
    total = weights.sum()
    divisor = jnp.where(total == 0, 1, total)

    def mean(g):
        if g.dtype == jax.dtypes.float0:
            return g[0]
        w = weights.reshape(-1, *[1] * (g.ndim - 1)).astype(g.dtype)
        return jnp.where(w == 0, 0, w * g).sum(0) / divisor.astype(g.dtype)

    return jax.tree.map(mean, grads)


class _Shown(NamedTuple):
    """An optimiser that takes gradients of its own, and whose state also holds the updates."""

    init: Callable
    update: Callable


def _shown(optimizer, grads) -> _Shown:
    def init(params, state=None):
        state = optimizer.init(params) if state is None else state
        return state, jax.tree.map(jnp.zeros_like, params)

    def update(given, state, params=None):
        own = jax.tree.map(lambda a, b: b if a.dtype == jax.dtypes.float0 else a, grads, given)
        updates, new = optimizer.update(own, state[0], params)
        return updates, (new, updates)

    return _Shown(init, update)


def _dtype(tree):
    """The one dtype of the floats of a tree."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)}
    floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
    if len(floats) != 1 or not floats <= {jnp.dtype('float32'), jnp.dtype('float64')}:
        found = sorted(str(dtype) for dtype in floats)
        raise EtpDtypeError(
            f'parameters and carry have the dtypes {found}; a receipt holds float32 or float64, '
            'one of them for all. Cast them.'
        )
    return floats.pop()


def capture(
    learner,
    loss='half_mse',
    *,
    reduction: str = 'mean',
    cell: Cell | None = None,
    roles: dict[str, str] | None = None,
    arrays: str = 'inline',
    allow_tf32: bool = False,
) -> Recording:
    """A :class:`Recording` of a learner: its steps, and what they were made of.

    Parameters
    ----------
    learner : functional.OnlineLearner
        A compiled or new learner, whose cell takes one input (lanes, I). Of a learner of a
        brainstate model its :meth:`pure` functions are recorded.
    loss : 'half_mse', 'softmax_ce' or function
        ``sum_b mask_b L_b``, with ``L = 1/2 sum (out - target)^2`` or ``-sum target
        log_softmax(out)``; a function ``loss(outputs, targets)`` of your own is not derived again.
    reduction : 'mean' or 'sum'
        ``'mean'`` divides by the sum of the mask over lanes.
    cell : Cell, optional
        What the learner's cell computes, if it is not a :class:`Cell` itself; without one the cell
        is opaque, and a verdict can not be ``rederived``.
    roles : dict, optional
        The names that your cell has for ``recurrent`` and ``readout`` (the path of the op's
        weight, or the key of the op in the report) and for its states ``h``, ``V``, ``z``, ``a``,
        ``o``.
    arrays : 'inline', 'npz' or 'sample'
        Where arrays of more than 4096 elements go.
    allow_tf32 : bool
        Takes products of float32 that round to fewer bits, as recent GPUs make them.

    Raises
    ------
    OptionError, NotSupportedError
        An option has another value, or a receipt has no formulas for the learner's rule.

    Examples
    --------
    >>> import braintrace
    >>> learner = braintrace.functional.online(Cell.lif(), braintrace.rules.es_d_rtrl(0.9))
    >>> capture(learner, 'softmax_ce').cell.kind
    'lif'
    """
    pure = getattr(learner, 'pure', None)
    learner = pure()[0] if pure is not None else learner
    if not isinstance(learner, functional.OnlineLearner):
        raise OptionError(
            f'learner is {type(learner).__name__}; give what braintrace.functional.online '
            'returned, or a compiled learner of a model, such as braintrace.D_RTRL(model).'
        )
    if arrays not in ARRAYS:
        raise OptionError(f"arrays is {arrays!r}; choose 'inline', 'npz' or 'sample'.")
    if cell is not None and not isinstance(cell, Cell):
        raise OptionError(f'cell is {cell!r}; give a receipts.Cell, such as Cell.lif(tau=20.0).')
    check_rule(learner)
    if cell is None and isinstance(learner.cell, Cell):
        cell = learner.cell
    named = tuple(sorted((roles or {}).items()))
    return Recording(learner, loss_of(loss, reduction), cell, named, arrays, allow_tf32)
