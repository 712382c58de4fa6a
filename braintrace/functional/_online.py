"""Online learning of a pure cell: ``online(cell, rule)`` and its ``init``, ``step``, ``grad`` and ``sequence_grad``."""
from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import (
    DEFAULT,
    ETraceGraph,
    Policy,
    Report,
    Route,
    abstract,
    analyse,
    check_arrays,
    check_learnable,
    describe_aval,
    param_name,
    path_name,
)
from .._errors import NotCompiledError, OptionError, StepFunctionError, StructureError
from .._executor import Axes, axes_of, each, in_shards, share, spread, varying
from .._jax import surrounding_mesh
from .._rules import Rule
from . import _sequence as seq
from ._compiled import Compiled, first_order, signature, zero_gradient
from ._findings import check_strict, tell_findings
from ._progress import show_progress
from ._state import OnlineState, flatten_paths, no_key

__all__ = ['REDUCTIONS', 'Memory', 'OnlineLearner', 'check_scalar', 'online', 'path_name', 'scale',
           'split', 'tree_bytes', 'zero_gradient']

REDUCTIONS = ('mean', 'sum')

IN_LOSS_OF: ContextVar[OnlineLearner | None] = ContextVar('learner whose loss runs', default=None)


class Memory(NamedTuple):
    """Rows ``(path, shape, dtype, bytes)`` of a whole :class:`OnlineState`, and their total in bytes."""
    rows: list
    total: int


def _always(path, leaf) -> bool:
    return True


@dataclass(frozen=True)
class OnlineLearner:
    """What :func:`online` returns: a static description that holds no arrays; equal and hashable by its fields."""
    cell: Callable
    rule: Rule | None
    trainable: Callable = _always
    hidden: Callable = no_key
    policy: Policy = DEFAULT
    _kept: dict = field(default_factory=dict, compare=False, repr=False)
    _warned: set = field(default_factory=set, compare=False, repr=False)

    # compiling ------------------------------------------------------------------------------------

    def compiled(self, params, carry, inputs: tuple, *, new: bool = False) -> Compiled:
        """The compiled step for these shapes; only ``init`` compiles new ones."""
        if IN_LOSS_OF.get() is self:
            raise StepFunctionError(
                'the loss function called the learner, but it is given what the learner returned: here '
                'it is `loss(outputs, target) -> scalar`, such as `lambda y, target: ((y - target) ** '
                '2).mean()`. A function of one step\'s slices that calls the learner is the `step_fn` of '
                '`learner.etrace_grad` and `etrace_train`.')
        for what, tree in (('params', params), ('carry', carry), ('inputs', inputs)):
            check_arrays(tree, what)
        of_shapes = signature((params, carry, inputs))
        key = of_shapes, surrounding_mesh()
        if key not in self._kept:
            if not new and all(shapes != of_shapes for shapes, _ in self._kept):
                self._refuse(params, carry, inputs)
            graph = analyse(self.cell, params, carry, inputs, trainable=self.trainable, hidden=self.hidden, policy=self.policy)
            if self.rule is not None:
                check_learnable(graph)
                self.rule.check(graph)
            if self.policy.strict:
                check_strict(graph)
            tell_findings(graph, self._warned)
            self._kept[key] = Compiled(replace(graph, rule=self.rule), self.rule)
        return self._kept[key]

    @property
    def first(self) -> Compiled:
        """The first compiled signature."""
        if not self._kept:
            raise NotCompiledError('nothing is compiled yet. Call `learner.init(params, carry, *inputs)` first, or '
                                   '`jax.eval_shape(learner.init, params, carry, *inputs)`, which allocates nothing.')
        return next(iter(self._kept.values()))

    def _refuse(self, params, carry, inputs) -> None:
        program = self.first.program
        lines = []
        known = {'params': [program.avals[v] for v in program.params], 'carry': program.leaf_avals,
                 'inputs': [program.avals[v] for v in program.inputs]}
        for what, tree in (('params', params), ('carry', carry), ('inputs', inputs)):
            was = jax.tree.unflatten(program.trees[what], known[what])
            old, new = ({k: describe_aval(abstract(x)) for k, x in flatten_paths(t).items()} for t in (was, tree))
            places = {k: f'{what} {path_name(k, "")}'.strip() for k in {**old, **new}}
            lines += [f'  {place}: {old.get(k, "absent")} when compiled, {new.get(k, "absent")} now'
                      for k, place in places.items() if old.get(k) != new.get(k)]
        batch = next((len(x) for x in jax.tree.leaves(inputs) if jnp.ndim(x) > 1), '...')
        raise StructureError('these arguments are not those that were compiled:\n'
                             + '\n'.join(lines or ['  the tree (or a unit in it) differs'])
                             + '\nPass what was compiled, or compile for these too: `learner.init(params, '
                             'carry, *inputs)`; a brainstate model by `brainstate.nn.init_all_states(model, '
                             f'batch_size={batch})` and `learner.compile_graph(x)`.')

    # the pure functions ---------------------------------------------------------------------------

    def init(self, params, carry, *inputs) -> OnlineState:
        """Compile for these shapes and return the state before the first step: a copy of this carry, a zero trace, t = 0."""
        compiled = self.compiled(params, carry, inputs, new=True)
        carry = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, carry)
        state = OnlineState(carry, *compiled.init(), compiled.laned, compiled.lane_axes)
        return spread(state, varying((params, carry, inputs)))

    def _flat(self, params, state: OnlineState, inputs: tuple):
        if not isinstance(state, OnlineState):
            raise StructureError(f'state is {type(state).__name__}; pass the OnlineState that `init` or `step` returned.')
        compiled = self.compiled(params, state.carry, inputs)
        if compiled.state_signature != signature((state.trace, state.t)):
            raise StructureError('the trace of this state does not belong to this learner and these shapes. Make a state with `init`.')
        return compiled, jax.tree.leaves(params), jax.tree.leaves(state.carry), jax.tree.leaves(inputs)

    def step(self, params, state: OnlineState, *inputs) -> tuple[Any, OnlineState]:
        """One step ``(outputs, state)``; reverse mode of a loss on outputs or new carry gives the online gradient.

        The old carry, trace and t get a zero cotangent: history is the trace's part.
        """
        compiled, p, c, x = self._flat(params, state, inputs)
        args = p, c, state.trace, state.t, x
        outputs, carry, trace, t = compiled.step(*spread(args, varying(args)))
        trees = compiled.program.trees
        new = state.replace(carry=jax.tree.unflatten(trees['carry'], carry), trace=trace, t=t)
        return jax.tree.unflatten(trees['outputs'], outputs), new

    def grad(self, loss_fn: Callable) -> Callable:
        """``(params, state, inputs, targets) -> (loss, outputs), grads, state`` for ``loss_fn(outputs, targets) -> scalar``."""
        loss_of = _checked_loss(self, loss_fn)

        def run(params, state, inputs, targets):
            params = spread(params, varying((params, state, inputs, targets)))

            def loss(params):
                outputs, new = self.step(params, state, *as_inputs(inputs))
                return loss_of(outputs, targets), (outputs, new)
            (value, (outputs, new)), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)
            return (value, outputs), grads, new
        return run

    def sequence_grad(self, loss_fn: Callable, window='auto', reduction: str = 'mean',
                      memory_budget: int | None = None, progress: bool = False) -> Callable:
        """``(params, state, xs, ys, mask=None, reset=None) -> grads, state, losses`` over a whole sequence.

        Time is axis 0 of ``xs`` and ``ys``; weights are constant during the call. ``window``: ``'auto'``, an int >= 1, or None
        for the whole sequence; every window gives the same numbers. ``reset`` is ``(flags, carry0)``, flags bool ``(T,)`` or
        ``(T, B)``: before step t the flagged lanes start anew. ``mask`` ``(T,)`` weighs the losses; where it is 0, a loss need
        not be a number. ``losses`` has shape ``(T,)``. ``progress`` shows a line on
        stderr from inside the compiled loop (not under ``vmap``).
        """
        self._check_sequence(reduction, progress, 'sequence_grad')
        seq.check_window(window, memory_budget)
        loss = _checked_loss(self, loss_fn)

        def run(params, state, xs, ys, mask=None, reset=None):
            params, state, xs = first_order((params, state, xs))
            return in_shards(body, params, state, xs, ys, mask, reset)

        def body(axes: Axes, params, state, xs, ys, mask, reset):
            length = seq.length_of(xs, ys)
            first = jax.tree.map(lambda a: a[0], xs)
            compiled, leaves, carry, _ = self._flat(params, state, as_inputs(first))
            flags, put_back = _resets(compiled, reset, state, length, self.hidden)
            sequence = seq.Sequence.of((xs, ys), mask, flags, length)
            of_loss = _axes_of_loss(compiled, loss, axes, ys)
            loop = _run(compiled, loss, put_back, leaves, carry, state.t, sequence, share(axes, of_loss))
            size = seq.choose_window(window, length, loop, tree_bytes(state.trace), memory_budget)
            carry, trace, t, ops, direct, losses, _ = seq.run_windows(
                loop, leaves, carry, state.trace, state.t, sequence, size, keep=True,
                show=_shown(progress, length, state, xs, ys))
            grads = scale(compiled.total(leaves, ops, direct), sequence.mask, reduction)
            new = state.replace(carry=jax.tree.unflatten(compiled.program.trees['carry'], carry), trace=trace, t=t)
            return (compiled.gradient_tree(leaves, grads), axes), (new, axes), (losses, of_loss)
        return run

    def sequence_update(self, loss_fn: Callable, optimizer, every: int = 1, reduction: str = 'mean',
                        write_every: int | None = None, progress: bool = False) -> Callable:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> params, opt_state, state, losses``: learn along a sequence.

        ``optimizer``: an ``optax.GradientTransformation``, ``opt_state`` that of ``optimizer.init(params)``. The parameters change
        after each ``every`` steps, by the ``reduction`` of these steps' gradients, and once more after what is left at the end;
        leaves that are not trainable stay. Other arguments as for :meth:`sequence_grad`. Between two writes of the trace steps are kept
        as they are, with the same numbers; ``write_every`` fixes their number. Under ``jit``, donate ``state``.

        >>> import jax, jax.numpy as jnp, optax, braintrace
        >>> def cell(params, h, x):
        ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
        ...     return h, h
        >>> learner, optimizer = braintrace.functional.online(cell, braintrace.rules.d_rtrl()), optax.adam(1e-2)
        >>> params, h, xs = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((70, 1, 2))
        >>> train = jax.jit(learner.sequence_update(lambda out, y: jnp.sum((out - y) ** 2), optimizer), donate_argnums=2)
        >>> state = learner.init(params, h, xs[0])
        >>> params, _, state, losses = train(params, optimizer.init(params), state, xs, jnp.zeros((70, 1, 3)))
        >>> bool(losses[-1] < losses[0])
        True
        """
        self._check_sequence(reduction, progress, 'sequence_update')
        seq.check_optimizer(optimizer)
        loss = _checked_loss(self, loss_fn)

        def run(params, opt_state, state, xs, ys, mask=None, reset=None):
            of_args = varying((params, opt_state, state, xs, ys, mask, reset))
            learnt = _axes_of_updates(optimizer, of_args, params, opt_state)
            params, state, xs = first_order((params, state, xs))
            return in_shards(partial(body, learnt), params, opt_state, state, xs, ys, mask, reset)

        def body(learnt, axes: Axes, params, opt_state, state, xs, ys, mask, reset):
            length = seq.length_of(xs, ys)
            compiled, leaves, carry, _ = self._flat(params, state, as_inputs(jax.tree.map(lambda a: a[0], xs)))
            flags, put_back = _resets(compiled, reset, state, length, self.hidden)
            seq.check_updatable(params)
            seq.check_opt_state(optimizer, params, opt_state)
            moves = jax.tree_util.tree_map_with_path(
                lambda p, _: compiled.graph.routes[param_name(p)].kind != 'frozen', params)

            def update(params, opt_state, ops, direct, mask):
                leaves = jax.tree.leaves(params)
                grads = scale(compiled.total(leaves, ops, direct), mask, reduction)
                return seq.optimised(optimizer, params, opt_state, compiled.gradient_tree(leaves, grads), moves)

            delay = seq.choose_delay(write_every, every, compiled.graph, self.rule)
            sequence = seq.Sequence.of((xs, ys), mask, flags, length)
            of_loss = _axes_of_loss(compiled, loss, axes, ys)
            loop = _run(compiled, loss, put_back, params, carry, state.t, sequence, share(axes, of_loss))
            params, opt_state, carry, trace, t, losses, _ = seq.run_updates(
                loop, update, params, opt_state, carry, state.trace, state.t, sequence, every, delay,
                _shown(progress, length, params, state, xs, ys))
            new = state.replace(carry=jax.tree.unflatten(compiled.program.trees['carry'], carry), trace=trace, t=t)
            return (params, learnt[0]), (opt_state, learnt[1]), (new, axes), (losses, of_loss)
        return run

    def _check_sequence(self, reduction, progress, name: str) -> None:
        if progress not in (True, False):
            raise OptionError(f'progress is {progress!r}; choose True or False.')
        if reduction not in REDUCTIONS:
            raise OptionError(f'reduction is {reduction!r}; choose one of {REDUCTIONS}.')
        if self.rule is None:
            raise OptionError(f'{name} needs a rule; this learner was made with rule=None.')

    # descriptions ---------------------------------------------------------------------------------

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the first signature."""
        return self.first.graph

    @property
    def routes(self) -> dict[str, Route]:
        """Path -> :class:`Route` of the first signature."""
        return self.graph.routes

    @property
    def report(self) -> Report:
        """What was compiled, what its trace costs, and what the gradients leave out; ``report(batch_size)``: at another batch size."""
        return self.graph.report()

    def memory(self) -> Memory:
        """Every array of the :class:`OnlineState` with its bytes, and the total; allocates nothing."""
        program, (trace, t) = self.first.program, jax.eval_shape(self.first.init)
        carry = jax.tree.unflatten(program.trees['carry'], list(map(abstract, program.leaf_avals)))
        rows = []
        for name, tree in (('carry', carry), ('trace', trace), ('t', t)):
            for key, leaf in flatten_paths(tree).items():
                rows.append((path_name((name, *key)), leaf.shape, leaf.dtype, tree_bytes(leaf)))
        return Memory(rows, sum(row[-1] for row in rows))


def online(cell: Callable, rule: Rule | None = None, *, trainable: Callable = _always, hidden: Callable = no_key,
           strict: bool = False, policy: Policy = DEFAULT) -> OnlineLearner:
    """Online learning of ``cell(params, carry, *inputs) -> (outputs, carry)`` by ``rule``.

    Arguments: ``rule``, a value of :mod:`braintrace.rules` or None (no trace: acting, evaluation, same-step gradients);
    ``trainable`` and ``hidden``, predicates ``(path, leaf) -> bool`` on leaves of params and carry, ``path`` a tuple of strings: which
    leaves of inexact dtype are learned or traced, and which leaves of the carry a reset puts back (by default all but PRNG keys);
    ``policy``, a :class:`braintrace.Policy`, says what to do with control flow; ``strict=True`` makes it strict.

    >>> import jax, jax.numpy as jnp, braintrace
    >>> def cell(params, h, x):
    ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    ...     return h, h
    >>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
    >>> params, h, xs = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((7, 1, 2))
    >>> state = learner.init(params, h, xs[0])
    >>> loss = lambda out, target: jnp.sum((out - target) ** 2)
    >>> grads, state, losses = learner.sequence_grad(loss)(params, state, xs, jnp.zeros((7, 1, 3)))
    >>> grads['W'].shape, losses.shape, state.t.tolist()
    ((5, 3), (7,), [7])
    """
    if rule is not None and not isinstance(rule, Rule):
        raise OptionError(f'rule is {rule!r}; give a value of braintrace.rules, such as braintrace.rules.d_rtrl(), or None.')
    if not isinstance(policy, Policy):
        raise OptionError(f'policy is {policy!r}; give a braintrace.Policy.')
    return OnlineLearner(cell, rule, trainable, hidden, replace(policy, strict=True) if strict else policy)


def split(params, learner: OnlineLearner) -> tuple:
    """``(traced, same_step, frozen)``: trees like ``params`` with None where a leaf has another route."""
    routes = learner.routes

    def part(kind):
        return jax.tree_util.tree_map_with_path(lambda p, x: x if routes[param_name(p)].kind == kind else None, params)
    return part('trace'), part('same-step'), part('frozen')


def _shown(progress: bool, length: int, *trees) -> Callable | None:
    """What shows the progress, if asked for; None under ``vmap``, where each lane had a line."""
    mapped = any(map(_jax.mapped_axes, jax.tree.leaves(trees)))
    return show_progress(length) if progress and not mapped else None


def as_inputs(inputs) -> tuple:
    """A plain tuple is passed as ``*inputs``; any other pytree is one input."""
    return inputs if type(inputs) is tuple else (inputs,)


def check_scalar(loss, what: str):
    """The loss, if it is a real scalar."""
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise StepFunctionError(f'{what} returned {jnp.result_type(loss)}{list(jnp.shape(loss))}; return one real scalar, such as a mean.')
    return loss


def _checked_loss(learner: OnlineLearner, loss_fn: Callable) -> Callable:
    """``loss_fn(outputs, target)``, held to return a real scalar and not to step the learner."""
    if not callable(loss_fn):
        raise OptionError(f'loss_fn is {loss_fn!r}; give a function `loss(outputs, target)`.')

    def loss(outputs, target):
        token = IN_LOSS_OF.set(learner)
        try:
            return check_scalar(loss_fn(outputs, target), 'loss_fn')
        finally:
            IN_LOSS_OF.reset(token)
    return loss


def scale(grads: dict, mask: jax.Array, reduction: str) -> dict:
    """Gradients divided by the sum of the mask for ``'mean'``."""
    if reduction == 'sum':
        return grads
    total = mask.sum()
    total = jnp.where(total == 0, 1, total)
    return jax.tree.map(lambda g: g if g.dtype == jax.dtypes.float0 else g / total.astype(g.dtype), grads)


def tree_bytes(tree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize for x in jax.tree.leaves(tree))


def _axes_of_loss(compiled: Compiled, loss: Callable, axes: Axes, ys) -> Axes:
    """The axes of a surrounding ``shard_map`` along which the loss of a step may differ."""
    program = compiled.program
    outputs = [abstract(program.avals[v]) for v in program.outputs]
    outputs = jax.tree.unflatten(program.trees['outputs'], outputs)
    return axes_of(loss, axes, outputs, jax.tree.map(lambda a: abstract(a[0]), ys))


def _axes_of_updates(optimizer, axes: Axes, params, opt_state) -> tuple:
    """The axes along which leaves of params and the optimiser's state may differ after updates."""
    every = jax.tree.map(lambda _: True, params)

    def update(params, opt_state):
        return seq.optimised(optimizer, params, opt_state, spread(params, axes), every)
    found = each((params, opt_state))
    while axes:
        new = each(jax.eval_shape(update, *jax.tree.map(spread, (params, opt_state), found)))
        if new == found:
            break
        found = jax.tree.map(frozenset.union, found, new)
    return found


def _run(compiled: Compiled, loss: Callable, put_back: Callable, params, carry, t,
         sequence: seq.Sequence, of_each: float = 1.) -> seq.Run:
    def weights(params):
        return compiled.executor.op_weights(jax.tree.leaves(params))

    def observe(params, carry, at, weight):
        x, y = at

        def of_outputs(outputs, _):
            return loss(jax.tree.unflatten(compiled.program.trees['outputs'], outputs), y)
        value, new, factors, pull = compiled.observe(
            jax.tree.leaves(params), weights(params), carry, jax.tree.leaves(as_inputs(x)), of_outputs)
        direct, _, *rest = pull((of_each * weight).astype(value.dtype))
        return seq.Observation(new, factors, compiled.signals(*rest), direct, value, None)
    return seq.Run(compiled.graph, compiled.rule, weights, observe, put_back, params, carry, t, sequence)


def _resets(compiled: Compiled, reset, state: OnlineState, length: int, hidden: Callable):
    """Flags ``(T, ...)`` or None, and the function that puts flagged lanes of the flat carry back."""
    if reset is None:
        return None, lambda carry, flags: carry
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise StructureError(f'reset is {type(reset).__name__}; give a pair (flags, carry0).')
    flags, carry0 = reset
    flags = jnp.asarray(flags)
    if flags.dtype != bool or flags.shape not in ((length,), (length, *state.t.shape)):
        raise StructureError(f'reset flags are {flags.dtype}{list(flags.shape)}; give bool of shape [{length}] or '
                         f'{[length, *state.t.shape]}.')
    return flags, partial(compiled.restarted, jax.tree.leaves(carry0), hidden)
