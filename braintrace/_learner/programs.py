"""Compiled programs of a learner over a sequence: evolving, gradients, and updates."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import abstract, depends, describe_aval
from .._errors import BraintraceError, OptionError, StepFunctionError
from ..functional import _online as core_
from ..functional import _sequence as seq
from ..functional._compiled import first_order
from ..functional._progress import show_progress
from .states import discover, running, stacked, unstacked

__all__ = ['EvolveProgram', 'GradOptions', 'GradProgram', 'TrainOptions', 'TrainProgram']


class Touched:
    """States that a step function touches beside the learner's: threaded through the loop, or constant in it.

    They are held weakly: where one was replaced by a new object since, the program that knew it is made anew.
    """

    def __init__(self, states: list[tuple[brainstate.State, bool]]):
        self._threaded = [weakref.ref(s) for s, written in states if written]
        self._constant = [weakref.ref(s) for s, written in states if not written]

    @property
    def threaded(self) -> list[brainstate.State]:
        return [ref() for ref in self._threaded]

    @property
    def constant(self) -> list[brainstate.State]:
        return [ref() for ref in self._constant]

    def stale(self) -> bool:
        return any(s is None for s in (*self.threaded, *self.constant))


@dataclass(frozen=True)
class GradOptions:
    """The static part of an ``etrace_grad`` call."""
    window: Any
    memory_budget: int | None
    keep: bool
    reduction: str
    has_aux: bool
    progress: bool


@dataclass(frozen=True)
class TrainOptions(GradOptions):
    """The static part of an ``etrace_train`` call."""
    optimizer: Any
    every: int
    delay: int


def _values(states) -> list:
    return [s.value for s in states]


def _write(states, values) -> None:
    for state, value in zip(states, values, strict=True):
        state.value = value


class EvolveProgram:
    """A compiled forward loop over a step function."""

    def __init__(self, learner, step_fn: Callable, slices, return_outputs: bool, trace: bool):
        self.learner, self.step_fn, self.return_outputs, self.trace = learner, step_fn, return_outputs, trace
        states, written, _ = discover(self._call, *slices)
        self.touched = Touched(list(zip(states, written, strict=True)))
        self.run = jax.jit(self._run)

    def _call(self, *slices):
        before, self.learner._forward_only = self.learner._forward_only, not self.trace
        try:
            return self.step_fn(*slices)
        finally:
            self.learner._forward_only = before

    def _run(self, threaded, constant, sequences):
        def step(values, slices):
            with running([*self.touched.threaded, *self.touched.constant], [*values, *constant]):
                out = self._call(*slices)
                return _values(self.touched.threaded), out if self.return_outputs else None
        return jax.lax.scan(step, threaded, sequences)

    def __call__(self, sequences):
        values, outputs = self.run(_values(self.touched.threaded), _values(self.touched.constant), sequences)
        _write(self.touched.threaded, values)
        return outputs


class GradProgram:
    """A compiled online gradient of a step function over a sequence."""

    def __init__(self, learner, step_fn: Callable, weights: dict, slices, options: GradOptions):
        self.learner, self.step_fn, self.options = learner, step_fn, options
        self.core, self.states = learner._compiled()
        self.compiled = self.core.first
        self.weights = weights
        self._check_weights()
        self.touched = self._touched(slices)
        self.direct = self._direct(slices)
        self.run = jax.jit(self._run, donate_argnums=0)
        self.run_inside = jax.jit(partial(self._run, alone=False))

    def _check_weights(self) -> None:
        wrong = [k for k, s in self.weights.items() if not isinstance(s, brainstate.ParamState)]
        if wrong:
            raise OptionError(f'weights {wrong} are not ParamStates; weights is a dict path -> ParamState.')

    # what the step function touches ---------------------------------------------------------------

    def _touched(self, slices) -> Touched:
        def probe(*slices):
            params, _ = self.states.values()
            return self._call(self.compiled.executor.op_weights(jax.tree.leaves(params)),
                              self.compiled.executor.zero_probes(), slices)[:2]
        states, written, (loss, _) = discover(probe, *slices)
        params, carry = self.states.split()
        own = {id(s) for s in (*params.values(), *carry.values(), *self.weights.values())}
        spoiled = [s for s, w in zip(states, written, strict=True) if w and isinstance(s, brainstate.ParamState)]
        if spoiled:
            raise StepFunctionError(f'step_fn writes {len(spoiled)} ParamState(s), but weights are constant during etrace_grad. Update '
                                    'parameters with the gradients that it returns.')
        return Touched([(s, w) for s, w in zip(states, written, strict=True) if id(s) not in own])

    def _call(self, op_weights, probes, slices):
        """Run step_fn under observation: ``(loss, aux, (inputs, xs))``."""
        from .base import Recording
        learner, recording = self.learner, Recording(op_weights, probes, [])
        before, learner._recording = learner._recording, recording
        try:
            result = self.step_fn(*slices)
        except (TypeError, ValueError) as error:
            if recording.seen or isinstance(error, BraintraceError):
                raise
            raise StepFunctionError(f'step_fn failed before it called the learner: {error}\n'
                                    f'{_expected(slices)}') from error
        finally:
            learner._recording = before
        if not recording.seen:
            raise StepFunctionError(f'step_fn did not call the learner. {_expected(slices)}')
        loss, aux = _loss_of(result, self.options.has_aux)
        return loss, aux, recording.seen[0]

    def _direct(self, slices) -> list:
        """Keys of the weights that reach the loss otherwise than as the weight of an op."""
        keys = list(self.weights)
        values = [self.weights[k].value for k in keys]
        _, carry = self.states.values()
        extra = _values(self.touched.threaded)
        constants = self._constants()

        def loss(values, slices):
            return self._loss(dict(zip(keys, values, strict=True)), constants, (carry, extra), slices,
                              jax.lax.stop_gradient(self._hidden(carry)), self.compiled.executor.zero_probes())[0]
        used = [k for k, u in zip(keys, depends(loss, values, slices), strict=True) if u]
        own = set(map(id, self.states.split()[0].values()))
        idle = [k for k in keys if k not in used and id(self.weights[k]) not in own]
        if idle:
            raise OptionError(f'weights {idle} are no parameters of the model and do not reach the loss of step_fn. Name the states that '
                              f'it reads; the model has {list(self.learner.param_states)}.')
        return used

    # one step -------------------------------------------------------------------------------------

    def _constants(self) -> tuple[dict, list]:
        params, _ = self.states.split()
        return {p: s.value for p, s in params.items()}, _values(self.touched.constant)

    def _hidden(self, carry) -> list:
        return self.compiled.program.old_states(jax.tree.leaves(carry))

    def _params(self, weights: dict, constants) -> dict:
        """Every parameter of the model by path, those in ``weights`` replaced."""
        params, _ = self.states.split()
        by_id = {id(self.weights[k]): v for k, v in weights.items()}
        return {p: by_id.get(id(s), constants[0][p]) for p, s in params.items()}

    def _loss(self, weights, constants, world, slices, hidden, probes):
        """The loss as a function of weights, old hidden states and probes; the rest of the step as auxiliary output."""
        carry, extra = world
        params = self._params(weights, constants)
        op_weights = self.compiled.executor.op_weights(jax.tree.leaves(params))
        leaves, treedef = jax.tree.flatten(carry)
        now = jax.tree.unflatten(treedef, self.compiled.program.with_states(leaves, hidden))
        p_states, c_states = self.states.split()
        outside = [k for k, s in self.weights.items() if id(s) not in set(map(id, p_states.values()))]
        states = [*p_states.values(), *c_states.values(), *(self.weights[k] for k in outside), *self.touched.threaded,
                  *self.touched.constant]
        values = [*params.values(), *(stacked(s, now[k]) for k, s in c_states.items()), *(weights[k] for k in outside), *extra,
                  *constants[1]]
        with running(states, values):
            loss, aux, seen = self._call(op_weights, probes, slices)
            new = {k: unstacked(k, s) for k, s in c_states.items()}, _values(self.touched.threaded)
        return loss, (aux, new, seen)

    def _observe(self, weights, constants, world, slices, weight):
        compiled, carry = self.compiled, world[0]
        direct = {k: weights[k] for k in self.direct}

        def run(direct, hidden, probes):
            return self._loss({**weights, **direct}, constants, world, slices, hidden, probes)
        loss, pull, (aux, new, (inputs, xs)) = jax.vjp(run, direct, self._hidden(carry), compiled.executor.zero_probes(), has_aux=True)
        to_direct, to_hidden, to_probes = pull(weight.astype(loss.dtype))
        params = jax.tree.leaves(self._params(weights, constants))
        factors = compiled.factors(params, compiled.executor.op_weights(params), jax.tree.leaves(carry), inputs, xs)
        return seq.Observation(new, factors, compiled.signals(to_hidden, to_probes), to_direct, loss, aux)

    def _reset(self, initial, world, flags):
        carry, extra = world
        leaves, treedef = jax.tree.flatten(carry)
        new = self.compiled.restarted(jax.tree.leaves({**carry, **initial}), self.core.hidden, leaves, flags)
        return jax.tree.unflatten(treedef, new), extra

    # the whole sequence ---------------------------------------------------------------------------

    def _window(self, weights, constants, initial, world, t, sequence) -> seq.Run:
        def op_weights(weights):
            return self.compiled.executor.op_weights(jax.tree.leaves(self._params(weights, constants)))

        def observe(weights, *args):
            return self._observe(weights, constants, *args)
        return seq.Run(self.compiled.graph, self.core.rule, op_weights, observe, partial(self._reset, initial), weights, world, t, sequence)

    def _show(self, length: int, alone: bool) -> Callable | None:
        return show_progress(length) if self.options.progress and alone else None

    def _run(self, etrace, weights, constants, world, initial, sequences, mask, flags, alone=True):
        options, length = self.options, seq.length_of(sequences)
        sequence = seq.Sequence.of(sequences, mask, flags, length)
        loop = self._window(weights, constants, initial, world, etrace['t'], sequence)
        window = seq.choose_window(options.window, length, loop, core_.tree_bytes(etrace['trace']), options.memory_budget)
        world, trace, t, ops, direct, losses, aux = seq.run_windows(
            loop, weights, world, etrace['trace'], etrace['t'], sequence, window, options.keep, self._show(length, alone))
        grads = core_.scale(self._gradients(weights, constants, ops, direct), sequence.mask, options.reduction)
        return grads, losses, aux, world, {'trace': trace, 't': t if options.keep else 0 * t}

    def _gradients(self, weights, constants, ops, direct) -> dict:
        compiled, params = self.compiled, jax.tree.leaves(self._params(weights, constants))
        by_leaf = compiled.executor.pull_back(params, ops)
        paths = {id(s): p for p, s in self.states.split()[0].items()}
        positions = jax.tree.unflatten(compiled.program.trees['params'], range(len(params)))
        found = {}
        for k, value in weights.items():
            grad = direct.get(k, jax.tree.map(core_.zero_gradient, value))
            path = paths.get(id(self.weights[k]))
            if path is not None:
                grad = jax.tree.map(lambda g, i: g + by_leaf[i] if i in by_leaf else g, grad, positions[path])
            found[k] = grad
        return found

    def _inputs(self) -> tuple:
        """Weights, constants, world and initial hidden states as they are now."""
        learner = self.learner
        weights = {k: s.value for k, s in self.weights.items()}
        _, carry = self.states.values()
        saved = learner.initial.value
        initial = {p: saved[core_.path_name(p)] for p in self.states.hidden}
        return weights, self._constants(), (carry, _values(self.touched.threaded)), initial

    def _donating(self, *given):
        """Run on the trace's own buffer; inside a transformation, where buffers belong to others, on a copy and without progress.

        A failure while running loses that buffer: the trace is then empty, and says so.
        """
        etrace, inputs = self.learner.etrace.value, self._inputs()
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((etrace, inputs, given))):
            return self.run_inside(etrace, *first_order(inputs), *given)
        try:
            return self.run(etrace, *inputs, *given)
        except Exception as error:
            if any(x.is_deleted() for x in jax.tree.leaves(etrace)):
                self.learner._empty_trace()
                error.add_note('The call failed while it ran on the eligibility trace, which is lost: it starts anew, empty. Parameters '
                               'and hidden states are those before the call.')
            raise

    def _keep(self, world, etrace) -> None:
        self.states.write(world[0])
        _write(self.touched.threaded, world[1])
        self.learner.etrace.value = etrace

    def __call__(self, sequences, mask, flags):
        grads, losses, aux, world, etrace = self._donating(sequences, mask, flags)
        self._keep(world, etrace)
        return grads, losses, aux


class TrainProgram(GradProgram):
    """A compiled loop of online gradients and updates."""

    def _run(self, etrace, weights, constants, world, initial, sequences, mask, flags, opt_state, alone=True):
        options = self.options
        moves = jax.tree.map(lambda _: True, weights)

        def update(weights, opt_state, ops, direct, mask):
            grads = core_.scale(self._gradients(weights, constants, ops, direct), mask, options.reduction)
            return seq.optimised(options.optimizer, weights, opt_state, grads, moves)

        length = seq.length_of(sequences)
        sequence = seq.Sequence.of(sequences, mask, flags, length)
        loop = self._window(weights, constants, initial, world, etrace['t'], sequence)
        weights, opt_state, world, trace, t, losses, aux = seq.run_updates(
            loop, update, weights, opt_state, world, etrace['trace'], etrace['t'], sequence, options.every, options.delay,
            self._show(length, alone))
        return weights, opt_state, losses, aux, world, {'trace': trace, 't': t}

    def __call__(self, sequences, mask, flags, opt_state):
        weights, opt_state, losses, aux, world, etrace = self._donating(sequences, mask, flags, opt_state)
        self._keep(world, etrace)
        for key, value in weights.items():
            self.weights[key].value = value
        return losses, aux, opt_state


def _expected(slices) -> str:
    """What a step function is, with the slices that it was called with."""
    found = jax.tree.map(lambda x: describe_aval(abstract(x)), slices)
    shown = ', '.join(str(x).replace("'", '') for x in found)
    return (f'It is called as `step_fn({shown})`, with one step of each sequence; call `learner(x)` once in '
            'it and return the loss of its output, as in `lambda x, target: loss(learner(x), target)`. (A '
            'function `loss(output, target)` of the output is what `braintrace.functional` and '
            '`braintrace.verify` take.)')


def _loss_of(result, has_aux: bool):
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            found = 'one array' if isinstance(result, jax.Array) else type(result).__name__
            raise StepFunctionError(f'has_aux=True, but step_fn returned {found}; return (loss, aux).')
        loss, aux = result
    else:
        if isinstance(result, tuple):
            raise StepFunctionError('step_fn returned a tuple; return one scalar loss, or pass has_aux=True for (loss, aux).')
        loss, aux = result, None
    if not hasattr(loss, 'dtype') and not isinstance(loss, int | float):
        raise StepFunctionError(f'step_fn returned {type(loss).__name__}; return one real scalar, such as a mean.')
    try:
        return core_.check_scalar(jnp.asarray(loss), 'step_fn'), aux
    except (ValueError, TypeError) as e:
        raise StepFunctionError(str(e)) from e
