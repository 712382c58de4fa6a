"""Online learning of a pure cell: ``online(cell, rule)``, its ``init``, ``step`` and ``grad``."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._compiler import (
    DEFAULT,
    ETraceGraph,
    Policy,
    Route,
    abstract,
    analyse,
    check_arrays,
    check_learnable,
    path_name,
)
from .._executor import spread, varying
from .._jax import surrounding_mesh
from .._report import Report, make_report
from .._rules import DRTRL, Rule, tree_bytes
from .._signatures import check_needs_no_inputs, public, takes_several
from .._warnings import tell
from .._windows import (
    CallOptions,
    Optimizer,
    StepGradient,
    check_optimizer,
    signature,
    task_loss,
    total_loss,
)
from ..errors import NotCompiledError, OptionError, StructureError
from ..extra.observed import decoded, observed_step
from ..extra.saving import fingerprint
from ..extra.sharding import placed, share_of, state_specs
from ._compiled import Compiled, CompiledSteps
from ._findings import (
    check_strict,
    refuse_shapes,
    seen_from_outside,
    shown,
    tell_findings,
    tell_of_trace,
)
from ._named import named
from ._places import (
    check_devices,
    in_automatic_axes,
    types_of,
    untyped,
    without_explicit_axes,
)
from ._sequences import SequenceCalls, check_outside_of_loss, checked_loss
from ._state import (
    GradientOfSequence,
    GradientOfStep,
    GradientsOfHeads,
    OnlineState,
    UpdateOfSequence,
    flatten_paths,
    no_key,
)

D_RTRL = DRTRL()
OTHER_TRACE = (
    'the trace of this state does not belong to this learner and these shapes. Make a state with '
    '`init`.'
)
SIGNATURES = {
    'cell': '`(params, carry, *inputs) -> (outputs, carry)`',
    'trainable': '`(path, leaf) -> bool`, such as `lambda path, leaf: path[0] == "W"`',
    'hidden': '`(path, leaf) -> bool`, such as `lambda path, leaf: path[-1] != "count"`',
}


class Memory(NamedTuple):
    """``rows`` ``(path, shape, dtype, bytes)`` of a whole :class:`OnlineState`, and their total in
    bytes; :meth:`OnlineLearner.memory` returns it.

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> state = learner.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2)))
    >>> learner.memory().total  # carry 48, trace 96, step counts 12
    156
    """

    rows: list
    total: int


def _always(path, leaf) -> bool:
    return True


INNER = {'advance', 'compiled', 'expect', 'first', 'is_compiled', 'matching', 'recompile', 'taken'}


@dataclass(frozen=True, eq=False)
class OnlineLearner:
    """The learner that :func:`online` returns. It holds no arrays, and is equal to itself alone.

    It compiles at its first call, for the shapes of that call: of ``init``, or of ``step`` and the
    like with a state that was loaded. Other shapes are compiled by ``init``, and an error
    elsewhere. ``trainable``, ``hidden`` and ``policy``: as for :func:`online`; ``recompile``: what
    to call for other shapes, as an error says it. Descriptions raise
    :class:`braintrace.errors.NotCompiledError` where nothing is compiled.

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> params, h, x = {'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2))
    >>> state = learner.init(params, h, x)
    >>> outputs, state = learner.step(params, state, x)
    >>> outputs.shape, state.t.tolist()
    ((3, 4), [1, 1, 1])
    """

    cell: Callable
    rule: Rule | None
    trainable: Callable = _always
    hidden: Callable = no_key
    policy: Policy = DEFAULT
    recompile: str = '`learner.init(params, carry, *inputs)`'

    @cached_property
    def _compiled(self) -> CompiledSteps:
        return CompiledSteps()

    def __dir__(self) -> list[str]:
        """What users call; the compiled steps are for those who build on this."""
        return sorted({*object.__dir__(self)} - INNER)

    def __getstate__(self) -> dict:
        """A copy, or a pickle, has compiled nothing."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        """Cell, rule and options on one line, and what is compiled."""
        fields = ('trainable', 'hidden', 'policy')
        given = ((name, getattr(self, name)) for name in fields)
        options = [f'{n}={shown(x)}' for n, x in given if x not in (_always, no_key, DEFAULT)]
        text = ', '.join([shown(self.cell), shown(self.rule), *options])
        number = len(self._compiled.steps)
        if not number:
            return f'OnlineLearner({text}): not compiled; its first call compiles it'
        kinds = [route.kind for route in self.first.graph.routes.values()]
        counts = ', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))
        more = f', for {number} signatures' if number > 1 else ''
        return f'OnlineLearner({text}): compiled{more}; parameters: {counts}'

    # compiling ------------------------------------------------------------------------------------

    def compiled(self, params, carry, inputs: tuple, *, new: bool = False) -> Compiled:
        """The compiled step for these shapes of ``params``, ``carry`` and ``inputs``. The first
        shapes are compiled wherever they come from, others by ``init`` alone (``new``).
        """
        check_outside_of_loss(self)
        for what, tree in (('params', params), ('carry', carry), ('inputs', inputs)):
            check_arrays(tree, what)
        of_shapes = signature((params, carry, inputs))
        key = of_shapes, surrounding_mesh()
        steps = self._compiled.steps
        if key in steps:
            return steps[key]
        if steps and not new and all(shapes != of_shapes for shapes, _ in steps):
            refuse_shapes(self.first.program, params, carry, inputs, self.recompile)
        # compiling computes with constants of the host
        with jax.transfer_guard('allow'), without_explicit_axes():
            graph = analyse(
                self.cell,
                *untyped((params, carry, inputs)),
                trainable=self.trainable,
                hidden=self.hidden,
                policy=self.policy,
            )
            if self.rule is not None:
                check_learnable(graph)
                with seen_from_outside():
                    graph = self.rule.scoped(graph)
                self.rule.check(graph)
                tell_of_trace(graph, self.rule)
            if self.policy.strict:
                check_strict(graph)
            tell_findings(graph, self.rule, [step.graph for step in steps.values()])
            steps[key] = Compiled(graph, self.rule)
        try:
            for check in self._compiled.checks:
                check(self.fingerprint())
        except StructureError:
            del steps[key]
            self.__dict__.pop('_fingerprint', None)
            raise
        self._compiled.checks.clear()
        return steps[key]

    @property
    def is_compiled(self) -> bool:
        """Whether it has compiled the step for any shapes."""
        return bool(self._compiled.steps)

    def expect(self, check: Callable) -> None:
        """Hand the fingerprint to ``check``, which raises, when the first shapes are compiled."""
        self._compiled.checks.append(check)

    def taken(self, given) -> tuple:
        """The inputs of a step, of what a call is given for them: a tuple holds several, unless
        it is what ``init`` took as one.
        """
        if type(given) is not tuple:
            return (given,)
        known = [compiled.program.trees['inputs'] for compiled in self._compiled.steps.values()]
        if not known:
            return given if takes_several(self.cell, given) else (given,)
        one = jax.tree.structure((given,)) in known and jax.tree.structure(given) not in known
        return (given,) if one else given

    @property
    def first(self) -> Compiled:
        """The first compiled signature."""
        if not self._compiled.steps:
            raise NotCompiledError(
                'nothing is compiled yet. Call `learner.init(params, carry, *inputs)` first, or '
                '`jax.eval_shape(learner.init, params, carry, *inputs)`, which allocates nothing.'
            )
        return next(iter(self._compiled.steps.values()))

    # the pure functions ---------------------------------------------------------------------------

    @public('learner.init')
    def init(self, params, carry, *inputs) -> OnlineState:
        """Compile for these shapes and return the state before the first step: a copy of this
        carry, a zero trace, t = 0.

        Where params or the carry are sharded, the state lies as :meth:`partition_specs` says. Under
        ``jit`` types tell it where the axes of the mesh are explicit; elsewhere give
        ``out_shardings``.
        """
        if not inputs:
            check_needs_no_inputs(self.cell, 2, 'learner.init(params, carry, x)')
        compiled = self.compiled(params, carry, inputs, new=True)
        carry = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, carry)
        state = placed(compiled, compiled.state(carry, *compiled.init()), params)
        return spread(state, varying((params, carry, inputs)))

    def matching(self, params, state: OnlineState, inputs: tuple) -> Compiled:
        """The compiled step for ``params`` and ``inputs``, if ``state`` belongs to it; raises
        :class:`braintrace.errors.StructureError` if not.
        """
        check_devices(params, state)
        compiled = self.compiled(params, state.carry, inputs)
        if compiled.state_signature != signature((state.trace, state.t)):
            raise StructureError(OTHER_TRACE)
        return compiled

    @public('learner.step')
    def step(self, params, state: OnlineState, *inputs) -> tuple[Any, OnlineState]:
        """One step ``(params, state, *inputs) -> (outputs, state)``; reverse mode of a loss on
        outputs or new carry gives the online gradient.

        The old carry, trace and t get a zero cotangent: history is the trace's part.
        """
        return self.advance(params, state, inputs, None)

    def advance(self, params, state: OnlineState, inputs: tuple, held: list | None):
        """:meth:`step` of ``params``, ``state`` and a tuple ``inputs``, with the arrays ``held`` of
        the constants that ``graph.held`` names, which a jitted function may take as arguments;
        None: as constants.
        """
        compiled = self.matching(params, state, inputs)

        def run(params, state, inputs):
            return compiled.advance(params, state, inputs, held)

        def types(params, state, inputs):
            return self._types_of_outputs(params, state, inputs), types_of(state)

        return in_automatic_axes(run, types)(params, state, inputs)

    def _types_of_outputs(self, params, state: OnlineState, inputs: tuple):
        """The specs of a step's outputs, which the cell gives where axes are explicit."""
        outputs, _ = jax.eval_shape(self.cell, params, state.carry, *inputs)
        return jax.tree.map(lambda a: a.sharding.spec, outputs)

    @public('learner.grad')
    def grad(self, loss_fn: Callable) -> GradientOfStep:
        """``(params, state, inputs, targets) -> StepGradient``, for
        ``loss_fn(outputs, targets) -> scalar``.
        """
        loss_of = checked_loss(self, loss_fn)

        @public('learner.grad(loss_fn)')
        def run(params, state, inputs, targets) -> StepGradient:
            check_devices(params, state)
            params = spread(params, varying((params, state, inputs, targets)))

            def loss(params):
                outputs, new = self.step(params, state, *self.taken(inputs))
                value = loss_of(outputs, targets)
                return total_loss(value), (task_loss(value), outputs, new)

            grads, (value, outputs, new) = jax.grad(loss, has_aux=True, allow_int=True)(params)
            return StepGradient(grads, value, outputs, new)

        return run

    @public('learner.vjp')
    def vjp(self, params, state: OnlineState, *inputs) -> tuple[Any, Callable, OnlineState]:
        """One step ``(outputs, pull, state)``: ``pull(cotangent)``, for a cotangent like the
        outputs, is the online gradient of each loss that has this derivative, as often as called.

        >>> import braintrace, jax.numpy as jnp
        >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> params, x = {'W': jnp.ones((2, 4))}, jnp.ones((3, 2))
        >>> state = learner.init(params, jnp.zeros((3, 4)), x)
        >>> h, pull, state = learner.vjp(params, state, x)
        >>> pull(jnp.ones_like(h))['W'].shape, pull(2 * h)['W'].shape
        ((2, 4), (2, 4))
        """
        check_devices(params, state)
        params = spread(params, varying((params, state, inputs)))
        step = lambda params: self.step(params, state, *inputs)  # noqa: E731
        outputs, pull, new = jax.vjp(step, params, has_aux=True)
        return outputs, lambda cotangent: pull(cotangent)[0], new

    @public('learner.heads')
    def heads(self, *losses: Callable) -> GradientsOfHeads:
        """``(params, state, inputs, targets) -> StepGradient`` of several ``loss(outputs, targets)
        -> scalar``, by one pass forward.

        ``grads`` has a tree like ``params`` for each loss, and ``loss`` its value. For gradients
        that stay apart by sample, make the learner of a cell for one sample, and map over samples:
        ``jax.vmap(heads, (None, 0, 0, 0))``. They take (batch x parameters) numbers for each loss.

        >>> import jax, braintrace, jax.numpy as jnp
        >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> params, h, xs = {'W': jnp.ones((2, 4))}, jnp.zeros(4), jnp.ones((3, 2))
        >>> policy = lambda h, action: jnp.mean(h * action)
        >>> value = lambda h, action: jnp.mean(h)
        >>> heads = jax.vmap(learner.heads(policy, value), (None, 0, 0, 0))
        >>> states = jax.vmap(learner.init, (None, None, 0))(params, h, xs)
        >>> found = heads(params, states, xs, jnp.ones(3))
        >>> of_policy, of_value = found.grads
        >>> found.loss[0].shape, of_policy['W'].shape, found.outputs.shape, found.state.t.tolist()
        ((3,), (3, 2, 4), (3, 4), [1, 1, 1])
        """
        if not losses:
            raise OptionError('heads got no loss; give functions `loss(outputs, targets)`.')
        checked = tuple(checked_loss(self, loss) for loss in losses)

        def run(params, state, inputs, targets) -> StepGradient:
            outputs, pull, new = self.vjp(params, state, *self.taken(inputs))
            values, grads = [], []
            for loss in checked:

                def total(outputs, loss=loss):
                    value = loss(outputs, targets)
                    return total_loss(value), task_loss(value)

                of_total, back, value = jax.vjp(total, outputs, has_aux=True)
                values.append(value)
                grads.append(pull(*back(jnp.ones_like(of_total))))
            return StepGradient(tuple(grads), tuple(values), outputs, new)

        def types(params, state, inputs, targets) -> StepGradient:
            outputs = self._types_of_outputs(params, state, self.taken(inputs))
            grads, values = (types_of(params),) * len(losses), (P(),) * len(losses)
            return StepGradient(grads, values, outputs, types_of(state))

        return public('learner.heads(*losses)')(in_automatic_axes(run, types))

    @public('learner.observed')
    def observed(self, loss_fn: Callable) -> Callable:
        """``(params, state, inputs, targets) -> StepGradient, Observed``: :meth:`grad` of
        ``loss_fn``, and the :class:`Observed` values that its gradient is made of.

        For ``d_rtrl`` and ``es_d_rtrl``, also with a filter or feedback; raises
        :class:`braintrace.errors.OptionError` for another rule.

        >>> import braintrace, jax, jax.numpy as jnp
        >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> params, x = {'W': jnp.ones((2, 4))}, jnp.ones((3, 2))
        >>> state = learner.init(params, jnp.zeros((3, 4)), x)
        >>> step = jax.jit(learner.observed(lambda h, y: jnp.sum((h - y) ** 2)))
        >>> gradient, seen = step(params, state, x, jnp.zeros((3, 4)))
        >>> seen.x['W'].shape, seen.d['carry'][0][0].shape, seen.df['W']['carry'][0].shape
        ((3, 2), (3, 4), (3, 4))
        >>> seen.before['W']['carry']['weight'][0].shape, seen.t.tolist()
        ((3, 2, 4), [0, 0, 0])
        """

        def types(params, state, inputs, targets):
            outputs = self._types_of_outputs(params, state, self.taken(inputs))
            return StepGradient(types_of(params), P(), outputs, types_of(state)), P()

        run = observed_step(self, checked_loss(self, loss_fn))
        return public('learner.observed(loss_fn)')(in_automatic_axes(run, types))

    @public('learner.traces')
    def traces(self, params, state: OnlineState) -> dict:
        """The numbers of the trace of ``state`` under ``params``, relation -> group -> slots as in
        :class:`Observed`: all pending steps are written, and lanes where t is 0 hold zeros. Raises
        :class:`braintrace.errors.StructureError` for a state of another learner.

        >>> import braintrace, jax.numpy as jnp
        >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> params, x = {'W': jnp.ones((2, 4))}, jnp.ones((3, 2))
        >>> _, state = learner.step(params, learner.init(params, jnp.zeros((3, 4)), x), x)
        >>> float(learner.traces(params, state)['W']['carry']['weight'][0].sum())
        24.0
        """
        if self.rule is None:
            return {}
        own = signature((state.trace, state.t))
        for compiled in [self.first, *self._compiled.steps.values()]:
            if compiled.state_signature == own:
                return decoded(compiled, jax.tree.leaves(params), state.trace, state.t)
        raise StructureError(OTHER_TRACE)

    # along a sequence -----------------------------------------------------------------------------

    @public('learner.sequence_grad')
    def sequence_grad(
        self,
        loss_fn: Callable,
        window: int | Literal['auto'] | None = 'auto',
        reduction: Literal['mean', 'sum'] = 'mean',
        progress: bool | Callable = False,
        keep_trace: bool = True,
        inside: Literal['trace', 'exact'] = 'trace',
        has_aux: bool = False,
    ) -> GradientOfSequence:
        """``(params, state, xs, ys, mask=None, reset=None) -> Gradient`` over a whole sequence.

        Time is axis 0 of ``xs`` and ``ys``; weights are constant during the call. ``reset`` is
        ``(flags, carry0)``, flags bool ``(T,)`` or ``(T, B)``: before step t the flagged lanes
        start again. ``mask`` ``(T,)`` weighs the losses, and no penalty
        (:class:`braintrace.Penalised`); where it is 0, a loss need not be a number. ``losses`` has
        shape ``(T,)``. With ``rule=None`` each gradient is that of its own step, with the old carry
        held constant. Under ``jit``, donate the state (``donate_argnums=1``): else each call maps
        memory for a new trace, and copies one that is dropped.

        Parameters
        ----------
        loss_fn : function
            ``loss_fn(output, target)``, the loss of one step, a real scalar; with ``has_aux`` a
            pair ``(loss, aux)``, of which ``aux`` comes back, time in front.
        window : 'auto', int or None
            Number of steps that are computed together, None for all; every window gives the same
            numbers, but for ``inside='exact'``.
        reduction : 'mean' or 'sum'
            ``'mean'`` divides by the sum of the mask.
        progress : bool or function
            True shows a line on stderr. ``progress(step, losses)`` is called with the number of
            steps so far and the losses since the last call, between the parts of a loop in Python:
            not inside of transformations.
        keep_trace : bool
            True lets a later call continue the stream. False ends it: ``t`` of the
            state that comes back is 0, so its trace counts as empty, and in a loop over batches no
            trace is ever written while a sequence fits into one window. The cell's carry goes on
            in both.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of each window, in memory
            that grows with the window, and reads the trace at its border: the window, an int or
            None, is then the reach of the exact gradient. One window for the whole sequence is
            back-propagation through time; with ``keep_trace=False`` no trace is read or written,
            which is truncated back-propagation (Williams and Peng 1990).

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
        >>> grad = jax.jit(learner.sequence_grad(loss, keep_trace=False), donate_argnums=1)
        >>> state = learner.init(params, h, xs[0])
        >>> for batch in (xs, 2 * xs):
        ...     start = state.replace(carry=jnp.zeros((1, 3)))
        ...     found = grad(params, start, batch, jnp.zeros((7, 1, 3)))
        ...     state = found.state
        >>> state.t.tolist()
        [0]
        """
        options = CallOptions.checked(
            inside,
            reduction=reduction,
            progress=progress,
            window=window,
            keep_trace=keep_trace,
            has_aux=has_aux,
        )
        return SequenceCalls(self, loss_fn, options).gradient()

    @public('learner.sequence_update')
    def sequence_update(
        self,
        loss_fn: Callable,
        optimizer: Optimizer,
        update_every: int = 1,
        reduction: Literal['mean', 'sum'] = 'mean',
        progress: bool | Callable = False,
        inside: Literal['trace', 'exact'] = 'trace',
        not_finite: Literal['keep', 'reset', 'raise'] = 'keep',
        observe: Callable | None = None,
        has_aux: bool = False,
    ) -> UpdateOfSequence:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained``: learn along a
        sequence.

        Arguments that are not listed are those of :meth:`sequence_grad`. Under ``jit``, donate
        ``state``. Where no transformation surrounds the call, it compiles itself, and Ctrl-C ends
        it after the updates that run, with a ``KeyboardInterrupt`` whose ``so_far`` is what the
        call returns for the steps until then.

        Parameters
        ----------
        optimizer : optax.GradientTransformation
            ``opt_state`` is at first ``optimizer.init(params)``. Leaves that are not trainable
            stay.
        update_every : int
            The parameters change after each so many steps, by the ``reduction`` of these steps'
            gradients, and once more after the steps that are left at the end.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of each update.
        not_finite : 'keep', 'reset' or 'raise'
            ``'reset'``: an update whose gradient, parameters or optimiser state are not finite is
            left out, for all samples, and after it the samples whose state or trace is not finite
            start again from ``carry0``, which ``reset=(None, carry0)`` gives; the others go on as
            they are. Where no sample can start again by itself, all do. ``skipped`` counts both;
            ``losses`` are those of the data as they came. ``'raise'``, without ``jit``, does the
            same and raises :class:`braintrace.errors.NotFiniteError`.
        observe : function, optional
            ``observe(grads, state) -> tree`` after each update, small arrays such as norms; they
            come back as ``observed``, and go to ``progress(step, losses, observed)``. The state's
            trace is that of its last write.

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
        >>> found = train(params, opt_state, state, xs, jnp.zeros((70, 1, 3)))
        >>> bool(found.losses[-1] < found.losses[0])
        True
        """
        check_optimizer(optimizer)
        options = CallOptions.checked(
            inside,
            reduction=reduction,
            progress=progress,
            optimizer=optimizer,
            update_every=update_every,
            not_finite=not_finite,
            observe=observe,
            has_aux=has_aux,
        )
        return SequenceCalls(self, loss_fn, options).update()

    # descriptions ---------------------------------------------------------------------------------

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the first signature."""
        self._tell_others('graph')
        return self.first.graph

    @property
    def routes(self) -> dict[str, Route]:
        """Path -> :class:`Route` of the first signature."""
        self._tell_others('routes')
        return self.first.graph.routes

    @property
    def report(self) -> Report:
        """The compiled graph, the cost of its trace, and the history that gradients leave out;
        ``report(batch_size)``: at another batch size.
        """
        self._tell_others('report')

        def share(batch_size: int, *where):
            return share_of(self.first, self._abstract_state(), batch_size, *where)

        return make_report(self.first.graph, self.rule, share)

    def fingerprint(self) -> dict:
        """What the first signature is, as plain text that JSON takes: paths, shapes and dtypes of
        parameters, carry and trace, the ops, the rule with its numbers, options that are not the
        default, the equations of the step, and versions. :func:`structure_diff` compares two. What
        a callback computes, and a derivative rule of one's own, as a surrogate's, is not seen.

        >>> import braintrace, jax.numpy as jnp
        >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> state = learner.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2)))
        >>> found = learner.fingerprint()
        >>> found['rule'], found['parameters'], found['ops']
        ('d_rtrl()', {'W': 'float32[2, 4] trace'}, {'W': 'etp_mm to carry'})
        >>> found['step'][0]
        '%0 float32[3, 4] = mul(0.9, carry)'
        """
        return deepcopy(self._fingerprint)

    @cached_property
    def _fingerprint(self) -> dict:
        return fingerprint(self.first.graph, self.rule, self._abstract_state())

    def memory(self) -> Memory:
        """Every array of the :class:`OnlineState` with its bytes, and the total; allocates
        nothing.
        """
        self._tell_others('memory')
        state, rows = self._abstract_state(), []
        for name, tree in (('carry', state.carry), ('trace', state.trace), ('t', state.t)):
            for key, leaf in flatten_paths(tree).items():
                rows.append((path_name((name, *key)), leaf.shape, leaf.dtype, tree_bytes(leaf)))
        return Memory(rows, sum(row[-1] for row in rows))

    @public('learner.partition_specs')
    def partition_specs(
        self, param_specs=None, batch_axis: str | None = None, mesh=None
    ) -> OnlineState:
        """The :class:`OnlineState` of ``PartitionSpec``: each array lies where what it belongs to
        lies.

        ``param_specs``: a tree like params, of ``PartitionSpec`` or None (replicated), by default
        all are replicated; ``batch_axis``: the axis of the mesh along the lanes. A trace of D_RTRL
        has the batch in front, then the axes of its weight; a hidden state has the op's output axis
        last, unless two ops disagree. A weight lies as the parameter that it is a function of,
        element by element; a transpose counts as replicated. Specs say where arrays lie, never what
        is computed. Raises :class:`braintrace.errors.StructureError` for another tree, and where a
        ``mesh`` is given, :class:`braintrace.errors.OptionError` for an axis that it has not and
        for one that cuts an array into parts of different sizes.

        >>> import jax, jax.numpy as jnp, braintrace
        >>> from jax.sharding import PartitionSpec as P
        >>> def cell(params, h, x):
        ...     h = h / 2 + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
        ...     return h, h
        >>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
        >>> params, h, x = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((2, 3)), jnp.ones((2, 2))
        >>> _ = jax.eval_shape(learner.init, params, h, x)
        >>> specs = learner.partition_specs({'W': P(None, 'model')}, batch_axis='data')
        >>> specs.trace['W']['carry']['weight'], specs.carry
        ((P('data', None, 'model'),), P('data', 'model'))
        >>> mesh = jax.make_mesh((1, 1), ('data', 'model'))
        >>> shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        >>> state = jax.jit(learner.init, out_shardings=shardings)(params, h, x)
        """
        self._tell_others('partition_specs')
        return state_specs(self.first, self._abstract_state(), param_specs, batch_axis, mesh)

    def _tell_others(self, what: str) -> None:
        """Tell that a signature inside of a ``shard_map`` has other, local shapes."""
        steps = self._compiled.steps
        shapes = {of_shapes for of_shapes, _ in steps}
        if len(shapes) > 1 and len({mesh is None for _, mesh in steps}) > 1:
            tell(
                f'`{what}` is that of the shapes that were compiled first, and this learner runs '
                'inside of a shard_map with others, those of a shard. Make a learner for each.'
            )

    def _abstract_state(self) -> OnlineState:
        """The state of the first signature, of shapes and dtypes."""
        program, (trace, t) = self.first.program, jax.eval_shape(self.first.init)
        carry = jax.tree.unflatten(program.trees['carry'], list(map(abstract, program.leaf_avals)))
        return self.first.state(carry, trace, t)


@public('braintrace.functional.online')
def online(
    cell: Callable,
    rule: Rule | str | None = D_RTRL,
    *,
    trainable: Callable = _always,
    hidden: Callable = no_key,
    policy: Policy = DEFAULT,
    mark: str | Callable | None = None,
) -> OnlineLearner:
    """Online learning of ``cell(params, carry, *inputs) -> (outputs, carry)`` by ``rule``.

    Parameters
    ----------
    cell : function
        One step of the model, a pure function; it applies its weights by braintrace ops.
    rule : Rule, str or None
        A value of :mod:`braintrace.rules`, or the name of one that needs no arguments, as
        :func:`braintrace.compile` takes it; None: no trace, for acting, evaluation and same-step
        gradients.
    trainable : function
        ``(path, leaf) -> bool``, ``path`` a tuple of strings: which leaves of ``params`` of inexact
        dtype are learned. By default all.
    hidden : function
        ``(path, leaf) -> bool``: which leaves of the carry are traced, where their dtype is
        inexact, and put back by a reset. By default all but PRNG keys, and counters that are folded
        into them.
    policy : Policy
        What to do with control flow and lost paths (:class:`braintrace.Policy`).
    mark : 'auto', function or None
        Sets the policy's ``mark``: ``'auto'`` for a cell that applies no braintrace op.

    Raises
    ------
    OptionError
        An argument is of another kind. Errors in the cell come when ``init`` compiles it.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, braintrace
    >>> def cell(params, h, x):
    ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    ...     return h, h
    >>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
    >>> params, h, xs = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((7, 1, 2))
    >>> state = learner.init(params, h, xs[0])
    >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
    >>> found = learner.sequence_grad(loss)(params, state, xs, jnp.zeros((7, 1, 3)))
    >>> found.grads['W'].shape, found.losses.shape, found.state.t.tolist()
    ((5, 3), (7,), [7])
    """
    for name, fn in (('cell', cell), ('trainable', trainable), ('hidden', hidden)):
        if not callable(fn):
            raise OptionError(f'{name} is {fn!r}; give a function {SIGNATURES[name]}.')
    if isinstance(rule, str):
        rule = named(rule)
    if rule is not None and not isinstance(rule, Rule):
        raise OptionError(
            f'rule is {rule!r}; give a value of braintrace.rules, such as '
            'braintrace.rules.d_rtrl(), the name of one, or None.'
        )
    if not isinstance(policy, Policy):
        raise OptionError(f'policy is {policy!r}; give a braintrace.Policy.')
    return OnlineLearner(cell, rule, trainable, hidden, policy.marking(mark))
