"""A cell compiled for one shape signature: its step on flat leaves, differentiable or observed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import copy
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import _jax
from .._compiler import ETraceGraph, abstract, is_inexact, key_counts, param_name, path_name
from .._executor import (
    Executor,
    Factors,
    Probes,
    Signals,
    spread,
    stopped,
    varying,
    without_types,
)
from .._jax import Tracer, is_key
from .._rules import (
    NEWEST,
    Network,
    NoHistory,
    Rule,
    Window,
    Windowed,
    arrays_of,
    counting,
    not_finite,
    shared_pairs,
    uncounted,
)
from .._warnings import tell
from .._windows import (
    Gradients,
    Moment,
    Observation,
    Penalised,
    Sequence,
    check_flags,
    counted,
    first_order,
    signature,
    task_loss,
    zero_gradient,
)
from ..errors import StructureError
from ._places import in_automatic_axes
from ._state import (
    OnlineState,
    batch_remedy,
    check_apart,
    flatten_paths,
    goes_on,
    put_back,
)


class Seen(NamedTuple):
    """A step after :meth:`Compiled.observe`: ``pull`` takes the result's cotangent back to
    ``given``, to old hidden states and to probes.
    """

    result: Any
    aux: Any
    factors: Factors
    weights: dict
    pull: Callable


class CompiledSteps:
    """The steps that a learner has compiled, by shapes and mesh, and the checks of fingerprints
    that wait for the first: a cache, as a function under ``jit`` has one.
    """

    def __init__(self) -> None:
        self.steps: dict[tuple, Compiled] = {}
        self.checks: list[Callable] = []


class Compiled:
    """One shape signature: graph, executor and the differentiable step on flat leaves."""

    def __init__(self, graph: ETraceGraph, rule: Rule | None, probes: bool = False):
        self.graph, self.program = graph, graph.program
        self.rule = NoHistory() if rule is None else rule
        self.executor = Executor(graph, probes=probes or self.rule.probes)
        # JAX keeps what a jitted function was traced to while the function lives, and that holds
        # the rules of the step: they must not hold the function, or nothing is ever freed.
        rules = copy(self)
        step = jax.custom_vjp(without_types(rules._primal))
        step.defvjp(without_types(rules._forward), without_types(rules._backward))
        # a program that is kept can not hold what a surrounding transformation hides
        hidden = any(
            isinstance(c, Tracer) for c in (*self.program.constants.values(), *arrays_of(self.rule))
        )
        self.step = step if hidden else jax.jit(step)

    @cached_property
    def held(self) -> list[jax.Array]:
        """Arrays of the constants ``graph.held``; they are behind the leaves of the
        parameters.
        """
        with jax.ensure_compile_time_eval(), jax.transfer_guard('allow'):
            return [jnp.asarray(self.program.constants[v]) for v in self.graph.held]

    def network(self, params: list, weights: dict | None = None) -> Network:
        """The graph and the weights of its ops, for the rule."""
        weights = self.executor.op_weights(params) if weights is None else weights
        return Network(self.executor.bound_graph(params), weights)

    @property
    def t_shape(self) -> tuple[int, ...]:
        return () if self.graph.lanes is None else (self.graph.lanes,)

    def init(self) -> tuple[dict, jax.Array]:
        """The empty trace and t, made by one program."""
        return in_automatic_axes(jax.jit(self._init), lambda: P())()

    def _init(self):
        t, rule = jnp.zeros(self.t_shape, jnp.int32), self.rule
        fading = self.graph.fading  # an array may be traced
        fades = isinstance(fading, jax.Array) or fading
        count = jnp.zeros((), jnp.int32) if fades else None
        return counting(rule.init(self.graph), count), t

    def written(self, params: list, trace: dict, t: jax.Array):
        """The entries of every state, with the newest step in them, also under ``vmap``."""
        written = partial(self.rule.written, self.executor.bound_graph([*params, *self.held]))
        for _ in range(t.ndim - len(self.t_shape)):
            written = jax.vmap(written)
        return written(uncounted(trace)[0], t)

    @cached_property
    def lane_paths(self) -> tuple[frozenset[str], tuple[tuple[str, int], ...]]:
        """``laned`` and ``lane_axes`` of the learner's states (see :class:`OnlineState`)."""
        program, graph, axes = self.program, self.graph, {}
        for leaf, key in enumerate(program.leaf_keys):
            # of a leaf that is several states the pieces have to agree
            split = program.splits[leaf]
            axis, *others = {graph.batch_axes.get(c) for c in program.pieces(leaf)}
            if split is not None and axis is not None:
                axis = split.leaf_axis(axis)
            if axis is not None and not others:
                axes[path_name(('carry', *key))] = axis
        laned = {path for path, axis in axes.items() if axis == 0}
        trace = {} if graph.lanes is None else jax.eval_shape(self.init)[0]
        for rel, group, _, _, has_lanes, _ in graph.pairs:
            slots = trace.get(rel.key, {}).get(group.name, {})
            for key, e in flatten_paths(slots).items():
                if has_lanes and not rel.op.repeats and e.shape[:1] == (graph.lanes,):
                    laned.add(path_name(('trace', rel.key, group.name, *key)))
        if NEWEST in trace:
            of_newest = flatten_paths({'trace': {NEWEST: trace[NEWEST].lanes(graph)}})
            axes |= {path_name(path): axis for path, axis in of_newest.items() if axis >= 0}
            laned |= {path for path, axis in axes.items() if axis == 0}
        return frozenset(laned), tuple((path, axis) for path, axis in axes.items() if axis)

    @property
    def without_batch(self) -> tuple[str, ...]:
        """The hidden leaves of several axes, where none of them is known to be a batch."""
        program, states = self.program, self.graph.states if self.graph.lanes is None else ()
        leaves = dict.fromkeys(map(program.leaf_of, states))
        several = (leaf for leaf in leaves if program.leaf_avals[leaf].ndim > 1)
        return tuple(path_name(program.leaf_keys[leaf]) for leaf in several)

    def tell_of_batch(self, not_finite: str) -> None:
        """Tell where all samples start again, since no axis is known to be the batch."""
        if names := self.without_batch:
            tell(
                f'not_finite is {not_finite!r}, and all samples start again where one is not '
                'finite: the step does not show which axis of its states is the batch. If it is '
                f'axis 0, say so: braintrace.Policy(batched={names!r}).'
            )

    def checked_flags(self, what: str, flags, length: int) -> jax.Array:
        """Reset flags of a sequence as bool of shape ``(T,)`` or ``(T, B)``; ``what`` begins the
        message.
        """
        carry = dict(zip(self.program.leaf_keys, self.program.leaf_avals, strict=True))
        remedy = batch_remedy(carry, flags, self.t_shape)
        return check_flags(what, flags, ((length,), (length, *self.t_shape)), remedy)

    def state(self, carry, trace: dict, t: jax.Array) -> OnlineState:
        """The state of a learner, with what is known of its arrays."""
        random = self.program.raw_keys, self.key_counts
        return OnlineState(carry, trace, t, *self.lane_paths, *random, self.shared)

    @cached_property
    def key_counts(self) -> frozenset[tuple[str, ...]]:
        """``key_counts`` of the learner's states (see :class:`OnlineState`)."""
        return key_counts(self.program)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """What samples share in the trace, in phrases."""
        return tuple(
            f'the trace of {pair.relation.key} ({pair.op.primitive.name}, {pair.op.where}) under '
            f'{self.rule.title} is one for several samples'
            for pair in shared_pairs(self.rule, self.graph)
        )

    @cached_property
    def state_signature(self) -> tuple:
        """Structure and shapes of trace and t."""
        return signature(jax.eval_shape(self.init))

    def restarted(self, fresh: list, hidden: Callable, carry: list, flags: jax.Array) -> list:
        """The leaves of the carry, the hidden leaves of any dtype put back in flagged lanes."""
        check_apart(self.shared, flags)
        program, axes = self.program, self.graph.batch_axes
        leaves = enumerate(zip(program.leaf_keys, carry, strict=True))
        stays = goes_on(hidden, program.raw_keys | self.key_counts)
        put = [leaf for leaf, (key, x) in leaves if not stays(key, x)]
        new, start = program.apart(carry), program.apart(fresh)
        for c in (c for leaf in put for c in program.pieces(leaf)):
            new[c] = put_back(flags, start[c], new[c], program.carry_names[c], axes.get(c))
        return program.together(new)

    def advance(self, params, state: OnlineState, inputs: tuple, held: list | None = None):
        """One step ``(outputs, state)`` of trees; ``held``: arrays of the constants that
        ``graph.held`` names, which a jitted function may take as arguments, None: as constants.
        """
        p, c, x = map(jax.tree.leaves, (params, state.carry, inputs))
        args = [*p, *(self.held if held is None else held)], c, state.trace, state.t, x
        outputs, carry, trace, t = self.step(*spread(args, varying(args)))
        trees = self.program.trees
        new = state.replace(carry=jax.tree.unflatten(trees['carry'], carry), trace=trace, t=t)
        return jax.tree.unflatten(trees['outputs'], outputs), new

    def run(self, params: list, carry: list, inputs: list) -> tuple[list, list]:
        """One step without rule and observation: ``(outputs, carry)``."""
        weights, probes = self.executor.op_weights(params), self.executor.zero_probes()
        outputs, new_carry, _ = self.executor.forward(params, weights, carry, inputs, probes)
        return outputs, new_carry

    def factors(self, params, weights, carry, inputs, xs, carried=None) -> Factors:
        """The factors of one step, as constants but for the numbers of the rule."""
        if not self.rule.traces:
            return Factors(xs, {}, {})
        at, carried = stopped(((params, weights, carry, inputs), carried))
        return Factors(stopped(xs), *self.rule.factors(self.executor, at, carried))

    def _primal(self, params, carry, trace, t, inputs):
        trace, count = uncounted(trace)
        weights, probes = self.executor.op_weights(params), self.executor.zero_probes()
        outputs, new_carry, xs = self.executor.forward(params, weights, carry, inputs, probes)
        factors = self.factors(params, weights, carry, inputs, xs, (trace, t))
        trace = self.rule.update(self.network(params, weights), trace, factors, t)
        return outputs, new_carry, counting(trace, counted(count)), counted(t)

    def observe(self, step: Callable, given, carry: list, held: list, count, carried=None) -> Seen:
        """One step around one call of the cell; ``carried``: see ``Rule.factors``.

        ``step(cell, given, carry) -> (result, aux)`` calls ``cell(params, carry, inputs) ->
        (outputs, carry)`` once, on lists of leaves; ``result`` is differentiated. ``held`` is put
        behind these parameters; ``count``: of all steps before this one, None where nothing asks.
        """
        executor, whole = self.executor, self.rule.credit == 'whole'

        def run(given, hidden, probes):
            calls = []

            def cell(params, carry, inputs):
                params = [*params, *held]
                # Factors and signals give the gradient of an op's weight, not this pull-back.
                weights = executor.op_weights(stopped(params))
                outputs, new_carry, xs = executor.forward(
                    params, weights, carry, inputs, probes, whole, count
                )
                calls.append((params, weights, inputs, xs))
                return outputs, new_carry

            result, aux = step(cell, given, executor.with_states(carry, hidden))
            return result, (aux, *calls)

        result, pull, (aux, (params, weights, inputs, xs)) = jax.vjp(
            run, given, executor.old_states(carry), executor.zero_probes(), has_aux=True
        )
        factors = self.factors(params, weights, carry, inputs, xs, carried)
        return Seen(result, aux, factors, weights, pull)

    def signals(self, pull: Callable, cotangent, counts: jax.Array | None = None) -> tuple:
        """As of the executor; without a trace nothing asks for those of states."""
        *others, signals = self.executor.signals(pull, cotangent, counts)
        return *others, signals if self.rule.traces else Signals(signals.dy, {}, {})

    @property
    def _inexact_inputs(self) -> list[int]:
        return [i for i, v in enumerate(self.program.inputs) if is_inexact(self.program.avals[v])]

    def _forward(self, params, carry, trace, t, inputs):
        params, carry, inputs = first_order((params, carry, inputs))
        direct, inexact = self.graph.direct, self._inexact_inputs

        def step(cell, given, carry):
            now = _replaced(params, direct, given[0]), carry, _replaced(inputs, inexact, given[1])
            return cell(*now), None

        given = [params[i] for i in direct], [inputs[i] for i in inexact]
        trace, count = uncounted(trace)
        # params have what is held
        seen = self.observe(step, given, carry, [], count, (trace, t))
        (outputs, new_carry), factors = seen.result, seen.factors
        new = self.rule.update(self.network(params, seen.weights), trace, factors, t)
        rest = seen.pull, params, seen.weights, factors, trace, new, t
        return (outputs, new_carry, counting(new, counted(count)), counted(t)), rest

    def _backward(self, residuals, cotangents):
        # signals by the pull-back, gradients by the rule, then to the parameters behind ops
        pull, params, weights, factors, trace, new, t = residuals
        (to_direct, to_inputs), signals = self.signals(pull, tuple(cotangents[:2]))
        step = Window.of_step(factors, signals, t)
        ops = self.rule.gradient(self.network(params, weights), trace, new, step)
        direct = dict(zip(self.graph.direct, to_direct, strict=True))
        grads = self.total(params, Gradients(ops, direct))
        of_inputs = dict(zip(self._inexact_inputs, to_inputs, strict=True))
        return (
            [grads.get(i) for i in range(len(params))],
            None,
            None,
            None,
            [of_inputs.get(i) for i in range(len(self.program.inputs))],
        )

    def around(self, step: Callable, **where) -> ObservedStep:
        """A step around this cell (see :class:`ObservedStep`)."""
        return ObservedStep(self, step, **where)

    def total(self, params: list, gradients: Gradients) -> dict[int, Any]:
        """Gradient of each weight by its place: the part of the ops, pulled back once, plus the
        direct part.
        """
        grads: dict[int, Any] = self.executor.pull_back(params, gradients.ops)
        for place, g in gradients.direct.items():
            grads[place] = g + grads[place] if place in grads else g
        return grads

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Places of the parameters that stay as they are."""
        places = jax.tree.unflatten(self.program.trees['params'], range(len(self.program.params)))
        return frozenset(
            place
            for path, place in jax.tree_util.tree_leaves_with_path(places)
            if self.graph.routes[param_name(path)].kind == 'frozen'
        )


def _replaced(values: list, places, new) -> list:
    """A copy of a list with other values at some places."""
    values = list(values)
    for place, x in zip(places, new, strict=True):
        values[place] = x
    return values


class ObservedStep:
    """A step around one call of a compiled cell: the observer of a run along a sequence.

    ``step(cell, weights, world, *slices) -> ((loss, aux), world)`` calls ``cell(params, carry,
    inputs) -> (outputs, carry)`` once, on lists of leaves. A world is a pair: the leaves of the
    cell's carry, and whatever else the step changes.

    ``params``: the leaves of the cell's parameters; ``held``: what is behind them. ``places``:
    for each leaf of the weights the parameter that it replaces; places from ``len(params)`` on
    belong to weights of the step alone.
    ``direct``: places of the weights that reach the loss otherwise than as the weight of an op.
    ``restart(carry, flags)``: the carry with flagged lanes put back. ``shares``: the parts of the
    loss and of a penalty beside it that belong to this shard.
    """

    def __init__(
        self,
        compiled: Compiled,
        step: Callable,
        *,
        params: list,
        places: tuple[int, ...],
        direct: frozenset[int],
        restart: Callable,
        held: list,
        shares: tuple[float, float] = (1.0, 1.0),
    ):
        self.compiled, self.graph, self.rule = compiled, compiled.graph, compiled.rule
        self.step, self.params, self.places = step, params, places
        self.restart, self.held, self.shares = restart, held, shares
        # the leaves of the weights that are differentiated
        self.chosen = [i for i, place in enumerate(places) if place in direct]

    def _params(self, weights) -> list:
        """The cell's parameters; weights take their places."""
        full = [*self.params, *[None] * len(self.places)]
        full = _replaced(full, self.places, jax.tree.leaves(weights))[: len(self.params)]
        return [*full, *self.held]

    def network(self, weights) -> Network:
        return self.compiled.network(self._params(weights))

    def observe(self, weights, world, at: Sequence, carried=None) -> Observation:
        (carry, rest), (leaves, treedef) = world, jax.tree.flatten(weights)
        chosen = self.chosen

        def step(cell, given, carry):
            full = jax.tree.unflatten(treedef, _replaced(leaves, chosen, given))
            (loss, aux), new = self.step(cell, full, (carry, rest), *at.slices)
            return loss, (aux, new)

        given = [leaves[i] for i in chosen]
        seen = self.compiled.observe(step, given, carry, self.held, at.done, carried)
        loss, (aux, new) = seen.result, seen.aux
        counts = None if at.penalties is None else at.mask != 0
        to_given, signals = self.compiled.signals(seen.pull, self._weights(loss, at), counts)
        direct = {self.places[i]: g for i, g in zip(chosen, to_given, strict=True)}
        return Observation(new, seen.factors, signals, direct, task_loss(loss), aux)

    def _weights(self, loss, at: Sequence):
        """The weight of the loss, of a penalised one that of both."""
        weight = (self.shares[0] * at.mask).astype(task_loss(loss).dtype)
        if not isinstance(loss, Penalised):
            return weight
        penalties = at.mask if at.penalties is None else at.penalties
        return Penalised(weight, (self.shares[1] * penalties).astype(loss.penalty.dtype))

    def spoiled(self, now: Moment, pending) -> jax.Array:
        graph, (laned, _), rule = self.graph, self.compiled.lane_paths, self.rule
        stored, found = [(now.trace, now.t > 0)], []
        if isinstance(rule, Windowed):
            stored, found = rule.counting_in(graph, now.trace, pending, now.t)
        for trace, alive in stored:
            for path, e in flatten_paths(trace).items():
                if not is_key(e):
                    bad = not_finite(e, 0 if path_name(('trace', *path)) in laned else None)
                    found.append(bad & (alive if bad.ndim else alive.any()))
        # what `carry0` has, such as the largest number so far, or is not put back counts as finite
        fresh = self.restart(now.world[0], jnp.array(True))
        pieces = map(self.compiled.program.apart, (now.world[0], fresh))
        for c, (h, first) in enumerate(zip(*pieces, strict=True)):
            if is_inexact(abstract(h)):
                here = jnp.where(jnp.isfinite(first), h, 0)
                found.append(not_finite(here, graph.batch_axes.get(c)))
        # of what belongs to no lane all are to blame, if no lane is
        of_lanes, of_all = (
            jnp.array([bad for bad in found if bad.ndim == n]).any(0) for n in (now.t.ndim, 0)
        )
        bad = of_lanes | (of_all & ~of_lanes.any())
        try:
            jax.eval_shape(self.restart, now.world[0], bad)
        except StructureError:  # a hidden leaf that is not known by lanes: all start again together
            return bad.any()
        return bad

    def observe_together(self, weights, world, part: Sequence, keep: bool, carried) -> Observation:
        compiled, executor = self.compiled, self.compiled.executor
        leaves, treedef = jax.tree.flatten(weights)
        chosen, (trace, ts) = self.chosen, carried or (None, None)
        if part.penalties is not None:
            part = part._replace(counts=part.mask != 0)

        def one(given, state, at, virtual, counts: bool = True):
            """``(state, (weighed loss, shown, factors))`` after a step; the loss may not count."""
            (world, trace), (now, probes, t), calls = state, at, []

            def cell(params, carry, inputs):
                params = [*params, *self.held]
                weights = executor.op_weights(stopped(params))
                outputs, carry_after, xs = executor.forward(
                    params, weights, carry, inputs, Probes(probes, {}, virtual), True, now.done
                )
                factors, new, of_step = Factors({}, {}, {}), None, (params, weights, carry, inputs)
                if keep:
                    factors = compiled.factors(*stopped(of_step), xs, (trace, t))
                if t is not None:  # the trace moves inside, and nothing asks for factors later
                    network = compiled.network(*stopped(of_step[:2]))
                    new = compiled.rule.update(network, trace, factors, t)
                    factors = Factors({}, {}, {})
                calls.append((factors._replace(x=xs), new))
                return outputs, carry_after

            world = world if now.flags is None else self.reset(world, now.flags)
            full = jax.tree.unflatten(treedef, _replaced(leaves, chosen, given))
            (loss, aux), world = self.step(cell, full, world, *now.slices)
            # each term by its own weight: a penalty counts where the loss may not
            terms = jax.tree.map(operator.mul, self._weights(loss, now), loss)
            weighed, *penalty = jax.tree.leaves(terms)
            weighed = sum(penalty, weighed if counts else jnp.zeros_like(weighed))
            ((factors, trace),) = calls
            return [world, trace], (weighed, (task_loss(loss), aux), factors)

        def run(given, hidden, virtual, probes):
            def turn(state, at):
                *state, virtual = state
                # a loss without weight and its derivative need not be numbers
                if part.counts is None:
                    state, shown = one(given, state, at, virtual)
                else:
                    both = partial(one, given), partial(one, given, counts=False)
                    state, shown = jax.lax.cond(at[0].counts, *both, state, at, virtual)
                # a virtual state counts at the border: inside, what it stands for is followed
                return (*state, jax.tree.map(jnp.zeros_like, virtual)), shown

            start = (executor.with_states(world[0], hidden), world[1]), trace, virtual
            (end, last, _), (losses, *others) = jax.lax.scan(turn, start, (part, probes, ts))
            return losses.sum(), (end, last, *others)

        zeros, of_steps = executor.zero_probes(), (len(part.mask),)
        probes = {key: jnp.zeros(of_steps + p.shape, p.dtype) for key, p in zeros.y.items()}
        given = [leaves[i] for i in chosen]
        args = given, executor.old_states(world[0]), zeros.virtual, probes
        # one pull-back for all steps: of weights past ops, of states before, of every y
        total, pull, (end, last, (losses, aux), factors) = jax.vjp(run, *args, has_aux=True)
        direct, *lam, dy = pull(jnp.ones_like(total))
        of_state = dict(zip(self.graph.states, jax.tree.leaves(lam), strict=True))
        lam = {g.name: tuple(of_state[s] for s in g.states) for g in self.graph.hidden_groups}
        direct = {self.places[i]: g for i, g in zip(chosen, direct, strict=True)}
        return Observation(end, factors, Signals(dy, lam, {}), direct, losses, aux, last)

    def zeros(self, weights) -> Gradients:
        """The gradients before the first step."""
        of_ops, leaves = self.network(weights).weights, jax.tree.leaves(weights)
        return Gradients(
            jax.tree.map(lambda w: jnp.zeros(w.shape, _jax.wide(w.dtype)), of_ops),
            {self.places[i]: jnp.zeros_like(leaves[i]) for i in self.chosen},
        )

    def reset(self, world, flags: jax.Array):
        carry, rest = world
        return self.restart(carry, flags), rest

    def total(self, weights, gradients: Gradients):
        """Gradients as a tree like the weights; zeros (float0 for integers) where there is none."""
        found = self.compiled.total(self._params(weights), gradients)
        leaves, treedef = jax.tree.flatten(weights)
        grads = [
            found[place] if place in found else zero_gradient(leaf)
            for place, leaf in zip(self.places, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, grads)

    def moves(self, weights):
        """Whether each leaf of the weights may change: all but integers and the cell's frozen
        parameters.
        """
        moves = [
            place not in self.compiled.frozen and is_inexact(abstract(leaf))
            for place, leaf in zip(self.places, jax.tree.leaves(weights), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(weights), moves)
