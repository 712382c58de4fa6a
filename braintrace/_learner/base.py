"""The learner: a brainstate module around a model, with the trace as a state beside the model's."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import DEFAULT, ETraceGraph, Policy, Report, path_name, summary
from .._errors import NotCompiledError, OptionError, StepFunctionError
from .._rules import Rule, read
from .._signatures import ShowsArguments
from ..functional import OnlineLearner, OnlineState
from ..functional import reset as functional_reset
from . import saving
from .notices import Notices
from .sequences import SequenceMixin
from .states import ModelStates, as_path

__all__ = ['ETraceLearner', 'ETraceState']


class ETraceState(brainstate.ShortTermState):
    """The eligibility trace and the step count of a learner."""


class Recording(NamedTuple):
    """One step function under observation: probes go in, what the learner's call saw comes out in ``seen``."""
    weights: dict
    probes: Any
    seen: list


class ETraceLearner(SequenceMixin, ShowsArguments, brainstate.nn.Module):
    """Online learning of ``model`` by ``rule``: compile once, then call it in the model's place.

    ``learner.compile_graph(*inputs)``; ``y = learner(*inputs)`` advances states and trace; reverse mode around a call
    (``brainstate.transform.grad(loss, learner.param_states)``) gives the online gradient of that step.
    """

    def __init__(self, model: brainstate.nn.Module, rule: Rule, *, policy: Policy = DEFAULT):
        super().__init__()
        if not isinstance(model, brainstate.nn.Module):
            raise OptionError(f'model is {type(model).__name__}; pass a brainstate.nn.Module.')
        if not isinstance(policy, Policy):
            raise OptionError(f'policy is {policy!r}; give a braintrace.Policy.')
        self.model, self.rule, self.policy = model, rule, policy
        self._core: OnlineLearner | None = None
        self._states: ModelStates | None = None
        self._recording: Recording | None = None
        self._forward_only = False
        self._notices = Notices()
        self._jitted: OrderedDict = OrderedDict()

    def __repr__(self) -> str:
        """Three lines, and where to find more."""
        model = type(self.model).__name__
        if self._core is None:
            return (f'{type(self).__name__} learner of {model}\nnot compiled\n'
                    'call `learner.compile_graph(x)` with inputs like those of one step')
        report = self.report
        head, memory = summary(report)[:2]
        verdict = 'hold the whole past' if report.exact else 'leave out a part of the past'
        more = f'gradients {verdict}; `print(learner.report)` shows all, `learner.model` is the model'
        return '\n'.join([head.replace(':', f' learner of {model}:', 1), memory, more])

    # compiling ------------------------------------------------------------------------------------

    def compile_graph(self, *inputs) -> ETraceGraph:
        """Compile the model's step for inputs like these (arrays or ``ShapeDtypeStruct``s); states and values are untouched.

        What the model reads from ``brainstate.environ`` (such as ``fit``) is taken as it is now, until compiled again.
        """
        states = ModelStates(self.model, inputs)
        params, carry = states.values()
        core = OnlineLearner(states.cell(), self.rule, hidden=states.is_hidden, policy=self.policy)
        state = core.init(params, carry, *inputs)
        self._states, self._core, self._jitted = states, core, OrderedDict()
        self.etrace = ETraceState({'trace': state.trace, 't': state.t})
        self._remember_start()
        return core.graph

    def _compiled(self) -> tuple[OnlineLearner, ModelStates]:
        if self._core is None or self._states is None:
            raise NotCompiledError(f'this {type(self).__name__} is not compiled. Call `learner.compile_graph(x)` with inputs like '
                                   'those of one step (after initialising the model), or use `braintrace.compile`.')
        return self._core, self._states

    @property
    def graph(self) -> ETraceGraph:
        """The compiled :class:`braintrace.ETraceGraph`."""
        return self._compiled()[0].graph

    @property
    def report(self) -> Report:
        """Groups, relations, routes, cuts, exactness and trace memory (see :meth:`braintrace.ETraceGraph.report`).

        ``print(learner.report)``; ``learner.report.at(batch_size)`` for the memory at another batch size.
        """
        return self.graph.report()

    @property
    def param_states(self):
        """The model's parameters: a dict path -> ``ParamState``."""
        return self.model.states(brainstate.ParamState)

    def pure(self) -> tuple[OnlineLearner, dict, dict]:
        """This learner as pure functions, ``(online, params, carry)``, with the values that the model's states have now.

        ``online`` is that of :func:`braintrace.functional.online` for ``online.cell(params, carry, *inputs) -> (outputs, carry)``, one
        step of the model; params and carry are dicts by path. No state is read or written through them.

        >>> import braintrace, jax.numpy as jnp
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 4), 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
        >>> online, params, carry = learner.pure()
        >>> outputs, carry = online.cell(params, carry, jnp.ones((3, 2)))
        >>> outputs.shape, list(carry)
        ((3, 4), [('h',)])
        """
        core, states = self._compiled()
        return core, *states.values()

    # saving ---------------------------------------------------------------------------------------

    def save(self) -> dict[str, jax.Array]:
        """All that this learner is, as a flat dict of string -> array for any checkpoint library.

        The arrays are copies: parameters, hidden and other states of the model, random keys that it
        draws from, the trace and its step count, the states that a reset puts back, and the rule.
        Units and kinds of random keys stand in the names. It does not hold the state of an optimiser,
        nor states that a step function touches beside the learner. Call it outside of a mapping
        transformation: every lane is saved then. See :meth:`restore`.
        """
        return saving.save(self._saved(), self.rule)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go back to what :meth:`save` returned, of this learner or of a compiled one like it.

        The arrays are copied, so one tree serves many times. Raises :class:`braintrace.StructureError`,
        and changes nothing, where a name, a shape, a dtype or the rule differs.

        >>> import braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
        >>> before = learner.save()
        >>> _ = learner(jnp.ones((3, 2)))
        >>> learner.restore(before)
        >>> bool((model.h.value == before['states/h']).all()), learner.etrace.value['t'].tolist()
        (True, [0, 0, 0])
        """
        saving.restore(self._saved(), self.rule, tree)

    def _saved(self) -> dict[tuple[str, ...], brainstate.State]:
        """Every state that :meth:`save` reads, by path."""
        params, carry = self._compiled()[1].split()
        return {**{('parameters', *p): s for p, s in params.items()},
                **{('states', *p): s for p, s in carry.items()},
                ('etrace',): self.etrace, ('initial',): self.initial}

    # running --------------------------------------------------------------------------------------

    def update(self, *inputs):
        """One step of the model: outputs; states and trace advance."""
        core, states = self._compiled()
        if self._forward_only:
            return self.model(*inputs)
        if self._recording is not None:
            return self._observe(self._recording, *states.values(), inputs)
        told = self._notices.of_call(states)
        params, carry = states.values()
        etrace = self.etrace.value
        outputs, new = core.step(params, OnlineState(carry, etrace['trace'], etrace['t']), *inputs)
        outputs, carry = told((outputs, new.carry))
        states.write(carry)
        self.etrace.value = {'trace': new.trace, 't': new.t}
        return outputs

    def _observe(self, recording: Recording, params, carry, inputs):
        """The call inside an observed step function: the two-sided pass with the recording's probes."""
        if recording.seen:
            raise StepFunctionError('step_fn called the learner twice in one step. Call it once, and use its output as often as '
                                    'you like.')
        core, states = self._compiled()
        compiled = core.compiled(params, carry, inputs)
        flat = jax.tree.leaves(params), jax.tree.leaves(carry), jax.tree.leaves(inputs)
        outputs, new, xs = compiled.executor.forward(flat[0], recording.weights, *flat[1:], recording.probes)
        recording.seen.append((flat[2], xs))
        states.write(jax.tree.unflatten(compiled.program.trees['carry'], new))
        return jax.tree.unflatten(compiled.program.trees['outputs'], outputs)

    @brainstate.nn.call_order(9)                # after the model's own: what it made anew is what a reset goes back to
    def init_state(self, *args, **kwargs) -> None:
        """A new, empty trace, and the present hidden states as those that a reset goes back to.

        ``brainstate.nn.init_all_states(learner)`` calls it after it made the model's states anew; under a mapping transformation
        each lane has a trace and initial states of its own.
        """
        if self._core is not None:
            self._empty_trace()
            self._remember_start()

    def _empty_trace(self) -> None:
        trace, t = self._compiled()[0].first.init()
        self.etrace = ETraceState({'trace': trace, 't': t})

    def _remember_start(self) -> None:
        """Copies of the hidden states: calls over a sequence may give buffers away."""
        _, states = self._compiled()
        _, carry = states.values()
        self.initial = brainstate.ShortTermState({path_name(p): jax.tree.map(jnp.copy, carry[p]) for p in states.hidden})

    def reset_state(self, batch_size: int | None = None, *, lanes=None) -> None:
        """Trace and step count to zero, hidden states of every dtype back to their values when the graph was compiled.

        Where ``brainstate.nn.init_all_states(learner)`` has made them anew since, to those. ``lanes``: bool ``(B,)``, only
        the samples of the batch that are flagged. Raises :class:`braintrace.StructureError` for flags of another shape, and
        where it is not known that axis 0 of a hidden state is the batch (:class:`braintrace.Policy`, ``lanes``).
        """
        core, states = self._compiled()
        if lanes is not None:
            return self._reset_lanes(core, states, lanes)
        lanes = core.graph.lanes
        if batch_size is not None and lanes is not None and batch_size != lanes:
            raise OptionError(f'batch_size is {batch_size}, but the graph is compiled for {lanes}. Compile again for another batch.')
        self.etrace.value = jax.tree.map(jnp.zeros_like, self.etrace.value)
        initial = self.initial.value
        states.write({p: initial[path_name(p)] for p in states.hidden})

    def _reset_lanes(self, core: OnlineLearner, states: ModelStates, lanes) -> None:
        etrace, (_, carry) = self.etrace.value, states.values()
        state = OnlineState(carry, etrace['trace'], etrace['t'], core.first.laned,
                            core.first.lane_axes)
        new = functional_reset(state, lanes, {**carry, **{p: self.initial.value[path_name(p)] for p in states.hidden}}, states.is_hidden)
        states.write(new.carry)
        self.etrace.value = {'trace': new.trace, 't': new.t}

    def get_etrace_of(self, param) -> dict:
        """The trace of one parameter: a dict (relation, group) -> slots; zeros where nothing was traced since the last reset.

        ``param``: a ``ParamState`` of the model or its path, as a tuple or joined by ``/``.
        """
        core, _ = self._compiled()
        names = {as_path(k): s for k, s in self.param_states.items()}
        paths = [p for p, s in names.items() if s is param or param in (path_name(p), '/'.join(p)) or as_path(param) == p]
        if not paths:
            raise OptionError(f'{param!r} is no parameter of the model; its parameters are {list(self.param_states)}.')
        wanted = path_name(paths[0])
        state, compiled = self.etrace.value, core.first
        weights = {op.key: op.weight_avals for op in core.graph.ops}

        def written(trace, t):
            values = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), weights)
            return self.rule.written(core.graph, trace, values, t)
        for _ in range(state['t'].ndim - len(compiled.t_shape)):         # under a map
            written = jax.vmap(written)
        trace = written(state['trace'], state['t'])
        found = {}
        for rel in core.graph.hidden_param_op_relations:
            if any(p == wanted or p.startswith(wanted + '/') for ps in rel.paths.values() for p in ps):
                for group, slots in trace[rel.key].items():
                    found[rel.key, group] = _alive(slots, state['t'])
        return found


def _alive(slots: dict, t: jax.Array) -> dict:
    """Slots as they count, zero where a lane has no past; states, where they are apart, in a last axis."""
    def leaf(e):
        flags = t > 0 if t.ndim == 0 or e.shape[:1] == t.shape else (t > 0).any()
        return jnp.where(flags.reshape(flags.shape + (1,) * (e.ndim - flags.ndim)), read(e), 0)
    def slot(e):
        return jnp.stack([leaf(state) for state in e], -1) if isinstance(e, tuple) else leaf(e)
    return {n: slot(e) for n, e in slots.items()}
