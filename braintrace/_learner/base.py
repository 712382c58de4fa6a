"""The learner: a brainstate module around a model, with the trace as a state beside the model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import DEFAULT, ETraceGraph, Policy, path_name
from .._jax import is_key
from .._report import Report, summary
from .._rules import Rule, Trace, counting, numbers_of, pairs, uncounted
from .._signatures import ShowsArguments, check_needs_no_inputs, public
from .._windows import (
    CallOptions,
    Gradient,
    Optimizer,
    Result,
    Trained,
    check_optimizer,
    did_you_mean,
    length_of,
    signature,
    with_so_far,
)
from ..errors import NotCompiledError, OptionError, StructureError
from ..extra.saving import restore as restore_states
from ..extra.saving import save as save_states
from ..functional import Exported, OnlineLearner, OnlineState, export_step
from ..functional import reset as functional_reset
from .sequences import evolve, learn
from .states import (
    CARRY,
    ETraceState,
    ModelStates,
    Path,
    Role,
    StructureState,
    World,
    as_path,
    check_model,
)
from .step_functions import Bound, Notices, substitute

# What to call where a model meets other shapes than it was compiled for.
REMEDY = '`brainstate.nn.init_all_states(model, batch_size={batch})` and `learner.compile_graph(x)`'


KEPT_NAMES = 'etrace', 'model', 'policy', 'rule'  # of an instance


class ETraceLearner(ShowsArguments, brainstate.nn.Module):
    """Online learning of ``model`` by ``rule``: compile once, then call it in the model's place.

    ``learner.compile_graph(*inputs)`` compiles, which :func:`braintrace.compile` does for you;
    ``y = learner(*inputs)`` advances states and trace; reverse mode around a call
    (``brainstate.transform.grad(loss, learner.param_states)``) gives the online gradient of that
    step. :meth:`etrace_grad` and :meth:`etrace_train` do the same along a sequence.

    ``rule``: a value of :mod:`braintrace.rules`, or None: each gradient is that of its step alone,
    without a trace. ``policy`` and ``mark``: as for :class:`braintrace.D_RTRL`. Raises
    :class:`braintrace.errors.NotCompiledError` where nothing is compiled, and
    :class:`braintrace.errors.OptionError` for another ``model`` or ``policy``.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> learner = braintrace.ETraceLearner(model, braintrace.rules.snap(1))
    >>> _ = learner.compile_graph(jnp.zeros((3, 2)))
    >>> learner(jnp.ones((3, 2))).shape
    (3, 4)
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: Rule | None,
        *,
        policy: Policy = DEFAULT,
        mark: str | Callable | None = None,
    ):
        super().__init__()
        check_model(model)
        if not isinstance(policy, Policy):
            raise OptionError(f'policy is {policy!r}; give a braintrace.Policy.')
        self._notices = Notices()  # before the model: a pickle is refused here
        self.model, self.rule, self.policy = model, rule, policy.marking(mark)
        self._bound: Bound | None = None

    def __dir__(self) -> list[str]:
        """What a learner adds to a module, and what it needs of one."""
        own = {n for cls in type(self).__mro__ if issubclass(cls, ETraceLearner) for n in vars(cls)}
        hidden = {'init_state', 'update'}
        return sorted({*own, 'states'} - hidden | {n for n in KEPT_NAMES if n in vars(self)})

    def __repr__(self) -> str:
        """Three lines, and where to find more."""
        model = type(self.model).__name__
        if self._own() is None:
            return (
                f'{type(self).__name__} learner of {model}\nnot compiled\n'
                'call `learner.compile_graph(x)` with inputs like those of one step'
            )
        report = self.report
        head, memory = summary(report)[:2]
        verdict = 'hold the whole past' if report.exact else 'leave out a part of the past'
        if report.rounding and not any(row.left_out for row in report.parameters):
            verdict = 'hold the whole past, rounded'
        more = (
            f'gradients {verdict}; `print(learner.report)` shows all, `learner.model` is the model'
        )
        return '\n'.join([head.replace(':', f' learner of {model}:', 1), memory, more])

    # compiling ------------------------------------------------------------------------------------

    @public('learner.compile_graph')
    def compile_graph(self, *inputs) -> ETraceGraph:
        """Compile the model's step for inputs like these, arrays or ``jax.ShapeDtypeStruct``, and
        return its graph; states and values are untouched.

        Of what the model reads from ``brainstate.environ``, ``t``, ``i`` and arrays are inputs of
        the step, which each call reads again. All else (``dt``, ``fit``, ``precision``) is taken as
        it is now, until compiled again, and a call at another value is refused. Reads by ``get``
        and what calls it are seen, however they are imported; ``all`` reads every value. What
        ``context(...)`` binds by ``as``, and what Python holds beside (a global, an attribute of a
        module that is no state), is not seen: it stays as it is now, as under ``jax.jit``.
        """
        if not inputs:
            check_needs_no_inputs(self.model.update, 0, 'compile(model, rule, x)')
        states = ModelStates(self.model, inputs)
        params, carry = states.values()
        core = OnlineLearner(
            states.cell(), self.rule, hidden=states.is_hidden, policy=self.policy, recompile=REMEDY
        )
        read = states.environment.inputs
        state = core.init(params, carry, *inputs, *([read] if read else []))
        self._bound = Bound(self, core, states)
        self.etrace = ETraceState({'trace': state.trace, 't': state.t})
        self.structure = StructureState(core.first.held)
        self._remember_start()
        return core.graph

    def _own(self) -> Bound | None:
        """What this learner is compiled to; None for a deep copy, whose model is another one.

        A copy that shares the model shares what it was compiled to.
        """
        bound = self._bound
        if bound is not None and bound.owner is not self:
            shared = bound.states.model is self.model
            bound = self._bound = Bound(self, bound.core, bound.states) if shared else None
        return bound

    def _compiled(self) -> Bound:
        if (bound := self._own()) is None:
            raise NotCompiledError(
                f'this {type(self).__name__} is not compiled. Call `learner.compile_graph(x)` with '
                'inputs like those of one step (after initialising the model), or use '
                '`braintrace.compile`.'
            )
        return bound

    @property
    def graph(self) -> ETraceGraph:
        """The compiled :class:`braintrace.ETraceGraph`."""
        return self._compiled().core.graph

    @property
    def report(self) -> Report:
        """Groups, relations, routes, cuts, exactness and trace memory (see
        :func:`braintrace.report`).

        ``print(learner.report)``; ``learner.report.at(batch_size)`` for the memory at another batch
        size. ``param_specs`` of its ``at`` is as :meth:`partition_specs` takes it.
        """
        found = self._compiled().core.report

        def share(batch_size, param_specs, batch_axis, mesh):
            specs = self._param_specs(param_specs)
            where = {'param_specs': specs, 'batch_axis': batch_axis, 'mesh': mesh}
            return found.at(batch_size, **where).share

        return dataclasses.replace(found, share_of=share)

    def partition_specs(
        self, param_specs: Mapping | None = None, batch_axis: str | None = None, mesh=None
    ) -> OnlineState:
        """Where the states and the trace lie on a mesh, as ``PartitionSpec`` by path: see
        :meth:`braintrace.functional.OnlineLearner.partition_specs`.

        ``param_specs``: path of a ``ParamState``, as a tuple or joined by ``/``, -> a spec or a
        tree of specs like its value; parameters that are left out are replicated. ``batch_axis``:
        the name of the axis of ``mesh`` that shares the batch.

        >>> import braintrace, jax.numpy as jnp
        >>> model, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((3, 2))
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> learner.partition_specs(batch_axis='data').carry
        {('h',): P('data', None)}
        """
        specs = self._param_specs(param_specs)
        return self._compiled().core.partition_specs(specs, batch_axis, mesh)

    def place(
        self, mesh, param_specs: Mapping | None = None, batch_axis: str | None = None
    ) -> None:
        """Put the parameters, all states and the trace on a mesh, as :meth:`partition_specs` says.
        Calls run there from now on; give inputs whose batch lies along ``batch_axis``. Raises
        :class:`braintrace.errors.OptionError` for a mesh with explicit axes, and for one of no
        devices.

        >>> import braintrace, jax, jax.numpy as jnp
        >>> model, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((3, 2))
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
        >>> learner.place(mesh, batch_axis='data')
        >>> learner.etrace.value['t'].sharding.spec
        P('data',)
        """
        of_params = self._param_specs(param_specs)
        specs = self._compiled().core.partition_specs(of_params, batch_axis, mesh)
        if not isinstance(mesh, jax.sharding.Mesh) or jax.sharding.AxisType.Explicit in (
            mesh.axis_types
        ):
            raise OptionError(
                f'mesh is {mesh!r}; a learner of a module takes a `jax.sharding.Mesh` of devices '
                'with automatic axes: `jax.make_mesh(shape, names, axis_types='
                '(jax.sharding.AxisType.Auto,) * len(names))`. `functional.online` takes explicit '
                'axes too.'
            )
        world = self._compiled().states.now()

        def put(tree, specs):
            def leaf(x, spec):
                return jax.device_put(x, jax.NamedSharding(mesh, spec or jax.P()))

            return jax.tree.map(leaf, tree, specs)

        world.write(put(world.read(Role.WEIGHT), of_params))
        world.write(put(world.read(*CARRY), specs.carry))
        initial = {path_name(path): spec for path, spec in specs.carry.items()}
        self.initial.value = {k: put(x, initial[k]) for k, x in self.initial.value.items()}
        self.etrace.value = put(self.etrace.value, {'trace': specs.trace, 't': specs.t})

    def _param_specs(self, given: Mapping | None) -> dict[Path, Any]:
        """A spec for each leaf of each parameter of the core."""
        values = self._compiled().states.now().read(Role.WEIGHT)
        found = {path: jax.tree.map(lambda _: jax.P(), value) for path, value in values.items()}
        for path, spec in (given or {}).items():
            key = tuple(path.split('/')) if isinstance(path, str) else tuple(path)
            if key not in found:
                raise OptionError(
                    f'param_specs has {path!r}, and the model has no such parameter. Its '
                    f'parameters are {[path_name(p) for p in found]}.'
                )
            found[key] = spec
        return found

    @property
    def param_states(self) -> dict[tuple[str, ...], brainstate.ParamState]:
        """The model's parameters, a dict from path to ``ParamState``."""
        return self.model.states(brainstate.ParamState)

    def pure(self) -> tuple[OnlineLearner, dict, dict]:
        """This learner as pure functions, ``(online, params, carry)``, with the values that the
        model's states have now.

        ``online`` is made by :func:`braintrace.functional.online` of ``online.cell(params, carry,
        *inputs) -> (outputs, carry)``, one step of the model; params and carry are dicts by path.
        No state is read or written through them. Where the step reads ``t``, ``i`` or arrays of
        ``brainstate.environ``, a dict of them is its last input; :meth:`with_environment` puts it
        behind sequences.

        >>> import braintrace, jax.numpy as jnp
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> online, params, carry = learner.pure()
        >>> outputs, carry = online.cell(params, carry, jnp.ones((3, 2)))
        >>> outputs.shape, list(carry)
        ((3, 4), [('h',)])
        """
        bound = self._compiled()
        bound.states.environment.check()
        return bound.core, *bound.states.values()

    def with_environment(self, xs, length: int) -> tuple:
        """Sequences ``xs`` of ``length`` steps as the functions of :meth:`pure` take them: all
        inputs and, behind them, a dict of what the step reads of ``brainstate.environ``, if it
        does. The time ``t`` goes on by ``dt`` and ``i`` by one, from the values there or zero;
        arrays stay.

        Raises :class:`braintrace.errors.StructureError` for what is not set there.

        >>> import braintrace, jax.numpy as jnp
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> [xs.shape for xs in learner.with_environment(jnp.ones((5, 3, 2)), 5)]
        [(5, 3, 2)]
        """
        states = self._compiled().states
        xs = states.taken(xs)
        if not states.environment.inputs or len(xs) != len(states.example):
            return xs
        read, times = states.environment.along(length)
        return *xs, {
            **jax.tree.map(lambda a: jnp.broadcast_to(a, (length, *a.shape)), read),
            **times,
        }

    # saving ---------------------------------------------------------------------------------------

    @public('learner.save')
    def save(self) -> dict[str, jax.Array]:
        """All that this learner is, as a flat dict of string -> array for any checkpoint library.

        The arrays are copies: parameters, hidden and other states of the model, random keys that it
        draws from, the trace and its step count, the states that a reset puts back, and as bytes of
        texts the rule and the :meth:`fingerprint`. Units and kinds of random keys are in the
        names. It does not hold the state of an optimiser, nor states that a step function touches
        beside the learner. Call it outside of a mapping transformation: every lane is saved then.
        See :meth:`restore`.
        """
        return save_states(self._saved(), self.rule, self.fingerprint())

    def fingerprint(self) -> dict:
        """What this compiled learner is, as plain text: see
        :meth:`braintrace.functional.OnlineLearner.fingerprint`.

        >>> import braintrace, jax.numpy as jnp
        >>> from braintrace import rules
        >>> model = braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, rules.es_d_rtrl(0.9), jnp.zeros(2))
        >>> learner.fingerprint()['rule']
        'es_d_rtrl(0.9)'
        """
        return self._compiled().core.fingerprint()

    @public('learner.restore')
    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go back to what :meth:`save` returned, of this learner or of a compiled one like it.

        The arrays are copied, so one tree serves many times, and go where :meth:`place` put those
        of this learner. Raises
        :class:`braintrace.errors.StructureError`, and changes nothing, where a name, a shape, a
        dtype, the rule or the model's step differs.

        >>> import braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
        >>> before = learner.save()
        >>> _ = learner(jnp.ones((3, 2)))
        >>> learner.restore(before)
        >>> bool((model.h.value == before['states/h']).all()), learner.etrace.value['t'].tolist()
        (True, [0, 0, 0])
        """
        restore_states(self._saved(), self.rule, self.fingerprint(), tree)

    def _saved(self) -> dict[tuple[str, ...], brainstate.State]:
        """Every state that :meth:`save` reads, by path."""
        world = self._compiled().states.now()
        return {
            **{('parameters', *p): world.states[p] for p in world.of(Role.WEIGHT)},
            **{('states', *p): world.states[p] for p in world.of(*CARRY)},
            ('etrace',): self.etrace,
            ('initial',): self.initial,
        }

    @public('learner.export')
    def export(
        self,
        loss_fn: Callable | None,
        x,
        y=None,
        *,
        optimizer: Optimizer | None = None,
        opt_state=None,
        reset: bool = False,
        platforms=('cpu',),
    ) -> Exported:
        """One step of this learner, from the values that its states have now, as a program that
        needs neither this package nor the model: see
        :func:`braintrace.functional.export_step`, whose arguments and errors these are.

        ``loss_fn(outputs, y)`` is a function of the model's outputs; with an ``optimizer``,
        ``opt_state`` may be what :meth:`etrace_train` returned. ``platforms``: of the file for JAX.
        ``reset=True``: flagged samples start again from the states that :meth:`reset_state` puts
        back. What the step reads of ``brainstate.environ`` and varies
        is an input of the program behind ``x``.

        >>> import braintrace, jax.numpy as jnp, optax
        >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
        >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
        >>> loss = lambda out, y: jnp.mean((out - y) ** 2)
        >>> learner.export(loss, x, jnp.zeros((3, 4)), optimizer=optax.sgd(0.1))
        Exported(learning: x float32[3, 2], y float32[3, 4]; ... bytes are kept)
        """
        (online, params, carry), bound = self.pure(), self._compiled()
        given, states = bound.given(bound.states.taken(x)), self.param_states

        def is_by_path(tree) -> bool:
            return isinstance(tree, dict) and tree.keys() == states.keys()

        def by_names(tree):  # an optimiser's tree over the weights of `etrace_train`
            return {as_path(k): v for k, v in tree.items()} if is_by_path(tree) else tree

        return export_step(
            online,
            loss_fn,
            params,
            online.first.state(carry, **self.etrace.value),
            given if len(given) > 1 else given[0],
            y,
            optimizer=optimizer,
            opt_state=jax.tree.map(by_names, opt_state, is_leaf=is_by_path),
            reset={**carry, **bound.initial()} if reset is True else reset,
            platforms=platforms,
        )

    # running --------------------------------------------------------------------------------------

    if TYPE_CHECKING:  # a model may return any tree; most return an array

        def __call__(self, *inputs) -> jax.Array: ...

    @public('learner')
    def update(self, *inputs) -> jax.Array:
        """One step of the model: outputs; states and trace advance."""
        bound = self._compiled()
        if (call := substitute(self)) is not None:
            return call(*inputs)
        inputs = bound.given(inputs)
        told, world = self._notices.of_call(bound.states), bound.states.now()
        state = OnlineState(world.read(*CARRY), **self.etrace.value)
        params = world.read(Role.WEIGHT)
        outputs, new = bound.core.advance(params, state, inputs, bound.held())
        outputs, carry = told((outputs, new.carry))
        world.write(carry)
        self.etrace.value = {'trace': new.trace, 't': new.t}
        return outputs

    # After the model's own: a reset goes back to the states that the model made again.
    @brainstate.nn.call_order(9)
    def init_state(self, *args, **kwargs) -> None:
        """Empty the trace, and let a reset go back to the present hidden states.

        ``brainstate.nn.init_all_states(learner)`` calls it after it made the model's states again;
        under a mapping transformation each lane has a trace and initial states of its own.
        """
        if (bound := self._own()) is not None:
            self.etrace = ETraceState(bound.empty_trace())
            self._remember_start()

    def _remember_start(self) -> None:
        """Copies of the hidden states: calls over a sequence may give buffers away."""
        hidden = self._compiled().states.now().read(Role.HIDDEN)
        self.initial = brainstate.ShortTermState(
            {path_name(p): jax.tree.map(jnp.copy, value) for p, value in hidden.items()}
        )

    @public('learner.reset_state')
    def reset_state(self, batch_size: int | None = None, *, lanes=None) -> None:
        """Trace and step count to zero, hidden states of every dtype back to their values when the
        graph was compiled.

        Where ``brainstate.nn.init_all_states(learner)`` has made them again since, to those. A lane
        of the states, inside ``vmap(in_states=...)``, goes back as ``reset_state`` of its own
        modules says. ``lanes``: bool ``(B,)``, only the samples of the batch that are flagged.
        ``batch_size``: what other modules of brainstate are given, here a check. Raises
        :class:`braintrace.errors.StructureError` for flags of another shape, and where it is not
        known which axis of a hidden state is the batch (:class:`braintrace.Policy`, ``batched``),
        :class:`braintrace.errors.OptionError` for another ``batch_size``.
        """
        bound, etrace = self._compiled(), self.etrace.value
        world, initial = bound.states.now(), bound.initial()
        if lanes is not None:
            carry = world.read(*CARRY)
            state = bound.core.first.state(carry, **etrace)
            new = functional_reset(state, lanes, {**carry, **initial}, bound.core.hidden)
            world.write(new.carry)
            self.etrace.value = {'trace': new.trace, 't': new.t}
            return
        batch = bound.core.graph.lanes
        if batch_size is not None and batch is not None and batch_size != batch:
            raise OptionError(
                f'batch_size is {batch_size}, but the graph is compiled for {batch}. Compile again '
                'for another batch.'
            )
        trace, count = uncounted(etrace['trace'])
        with jax.transfer_guard('allow'):  # of the number 0
            empty = jax.tree.map(lambda e: e if is_key(e) else jnp.zeros_like(e), trace)
            t = jnp.zeros_like(etrace['t'])
        self.etrace.value = {'trace': counting(empty, count), 't': t}
        world.write(initial if _jax.is_outermost() else self._whole(world, initial))

    def _whole(self, world: World, initial: dict[Path, Any]) -> dict[Path, Any]:
        """The values of the states that are whole here; where ``vmap`` shows a lane of a state, the
        model itself puts it back.
        """
        now = world.read(Role.HIDDEN)
        lanes = [path for path in initial if signature(initial[path]) != signature(now[path])]
        before = {path: world.states[path].value for path in lanes}
        if lanes:
            brainstate.nn.reset_all_states(self.model)
        if kept := [path_name(p) for p, value in before.items() if world.states[p].value is value]:
            raise StructureError(
                f'a lane of the states {kept} is to be reset inside of a transformation, and no '
                '`reset_state` of their modules does so. Reset outside of it, where the batch is '
                'whole.'
            )
        return {path: value for path, value in initial.items() if path not in lanes}

    @public('learner.get_etrace_of')
    def get_etrace_of(self, param) -> dict:
        """The trace of one parameter: a dict (relation, group) -> slots; zeros where nothing was
        traced since the last reset. A slot of D_RTRL has every state of the group in its last axis,
        also a state that no loss reads.

        ``param``: a ``ParamState`` of the model or its path, as a tuple or joined by ``/``.
        """
        bound, etrace, states = self._compiled(), self.etrace.value, self.param_states
        for path, state in ((as_path(key), state) for key, state in states.items()):
            names = path_name(path), '/'.join(path)
            if state is param or param in names or as_path(param) == path:
                break
        else:
            named = ['/'.join(as_path(key)) for key in states]
            raise OptionError(
                f'{param!r} is no parameter of the model; its parameters are {named}.'
                + did_you_mean(param, named)
            )
        params = jax.tree.leaves(bound.states.now().read(Role.WEIGHT))
        trace = bound.core.first.written(params, etrace['trace'], etrace['t'])
        return _traces_of(bound.core.first, trace, etrace['t'], path_name(path))

    # along a sequence -----------------------------------------------------------------------------

    @public('learner.etrace_grad')
    def etrace_grad(
        self,
        *sequences,
        step_fn: Callable,
        mask=None,
        reset=None,
        window: int | Literal['auto'] | None = 'auto',
        keep_trace: bool = True,
        inside: Literal['trace', 'exact'] = 'trace',
        weights: dict | None = None,
        reduction: Literal['mean', 'sum'] = 'mean',
        has_aux: bool = False,
        progress: bool | Callable = False,
    ) -> Gradient[dict[Any, Any], None]:
        """Online gradient of a sequence of losses, from the present state on; weights are constant
        during the call.

        Parameters
        ----------
        *sequences : pytrees
            Inputs, targets, anything that a step reads, with time in axis 0.
        step_fn : function
            ``step_fn(*slices)`` calls the learner once and returns a real scalar loss, a
            :class:`braintrace.Penalised`, or ``(loss, aux)`` with ``has_aux``. A loss may read old
            hidden states too. Define it once: a new function compiles again.
        mask : array of shape (T,), optional
            Weighs the losses; where it is 0, a loss need not be a number. The penalty of a
            :class:`braintrace.Penalised` is not weighed. Where samples differ in length, weigh
            them inside ``step_fn``.
        reset : bool array of shape (T,) or (T, B), optional
            Puts flagged lanes back to the initial states before a step (:meth:`reset_state`).
        window : 'auto', int or None
            How many steps are computed together, None for all; every window gives the same
            numbers, but for ``inside='exact'``.
        keep_trace : bool
            True lets a later call continue the stream, False leaves a zero trace.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through each window, and the trace at its
            border: the window, an int or None, is then the reach of the exact gradient. With
            ``keep_trace=False`` it is truncated back-propagation through time, whatever the rule
            is: leave that out for separate sequences, too.
        weights : dict, optional
            Path -> ``ParamState``; by default ``param_states``.
        reduction : 'mean' or 'sum'
            ``'mean'`` divides by the sum of the mask.
        has_aux : bool
            Whether ``step_fn`` returns a pair.
        progress : bool or function
            True shows a line on stderr. ``progress(step, losses)`` is called with the number of
            steps so far and the losses since the last call, between the parts of a loop in Python.
            Neither inside of transformations. An exception of it ends the call as Ctrl-C does
            (:meth:`etrace_train`).

        Returns
        -------
        braintrace.functional.Gradient
            ``grads`` is a dict like ``weights``, ``aux`` is None without ``has_aux``, and the state
            stays in the learner. The trace's buffer is reused: arrays taken from
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
        >>> found = learner.etrace_grad(xs, ys, step_fn=step_fn)
        >>> found.losses.shape
        (5,)
        """
        options = CallOptions.checked(
            inside,
            reduction=reduction,
            progress=progress,
            has_aux=has_aux,
            window=window,
            keep_trace=keep_trace,
        )
        bound = self._compiled()
        result = learn(bound, options, sequences, step_fn, mask, reset, weights)
        return _returned(
            Gradient(result.learnt, result.losses, result.aux, None), result, sequences
        )

    @public('learner.etrace_train')
    def etrace_train(
        self,
        *sequences,
        step_fn: Callable,
        optimizer: Optimizer,
        opt_state=None,
        update_every: int = 1,
        mask=None,
        reset=None,
        weights: dict | None = None,
        reduction: Literal['mean', 'sum'] = 'mean',
        has_aux: bool = False,
        progress: bool | Callable = False,
        inside: Literal['trace', 'exact'] = 'trace',
        not_finite: Literal['keep', 'reset', 'raise'] = 'keep',
        observe: Callable | None = None,
    ) -> Trained[None, None]:
        """Learn along a sequence, from the present state on: the parameters change after each
        ``update_every`` steps.

        Arguments that are not listed are those of :meth:`etrace_grad`, and so are the errors.

        Parameters
        ----------
        optimizer : optax.GradientTransformation
            Define it once, as ``step_fn``: another object compiles again.
        opt_state : optional
            What an earlier call returned, to continue a stream; by default ``optimizer.init`` of
            the weights' values.
        update_every : int
            Each update uses the ``reduction`` of its own steps' gradients, their mask and their
            penalties (:class:`braintrace.Penalised`); steps left at the end get an update of their
            own. The optimiser runs also where a mask is zero.
        inside : 'trace' or 'exact'
            ``'exact'`` takes reverse mode without cuts through the steps of an update.
        not_finite : 'keep', 'reset' or 'raise'
            ``'reset'``: an update whose gradient, parameters or optimiser state are not finite is
            left out, and after it the samples whose state or trace is not finite start again as by
            :meth:`reset_state`; ``skipped`` counts both. ``'raise'``, without ``jit``, does the
            same and raises :class:`braintrace.errors.NotFiniteError`.
        observe : function, optional
            ``observe(grads, state) -> tree`` after each update, small arrays such as norms, which
            come back as ``observed``, and go to ``progress(step, losses, observed)``. ``grads`` is
            a dict like ``weights``, ``state`` the :class:`braintrace.functional.OnlineState`, of
            which the trace is that of its last write.

        Returns
        -------
        braintrace.functional.Trained
            ``losses``, ``aux`` with ``has_aux``, ``opt_state``, ``skipped`` and ``observed``;
            parameters and state stay in the learner. As in every call over a sequence the trace's
            buffer is reused: arrays taken from ``learner.etrace.value`` before do not outlive it;
            copy them.

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
        >>> found = learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.adam(1e-2))
        >>> bool(found.losses[-1] < found.losses[0])
        True
        """
        check_optimizer(optimizer)
        options = CallOptions.checked(
            inside,
            reduction=reduction,
            progress=progress,
            has_aux=has_aux,
            optimizer=optimizer,
            update_every=update_every,
            not_finite=not_finite,
            observe=observe,
        )
        bound = self._compiled()
        result = learn(bound, options, sequences, step_fn, mask, reset, weights, opt_state)
        shown = result.losses, result.aux
        of_updates = result.learnt[1], result.skipped, result.observed
        found = Trained(None, *shown, None, *of_updates)
        return _returned(found, result, sequences)

    @public('learner.etrace_evolve')
    def etrace_evolve(
        self,
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
        return evolve(self._compiled(), sequences, step_fn, return_outputs, trace)


def _returned(value, result: Result, sequences: tuple):
    """What a call returns; where it was stopped, its exception, which has that."""
    if result.stopped is None:
        return value
    raise with_so_far(result.stopped, value, len(result.losses), length_of(*sequences))


def _traces_of(compiled: Any, trace: Trace, t: jax.Array, parameter: str) -> dict:
    """``(relation, group) -> slots`` of the relations that hold a parameter or a part of it: as
    numbers, zero where a lane has no past; separate states go to a last axis.
    """

    def numbers(trace, t):
        found = {}
        for pair in pairs(compiled.graph) if trace else ():
            paths = [path for several in pair.relation.paths.values() for path in several]
            if any(path == parameter or path.startswith(parameter + '/') for path in paths):
                slots = numbers_of(compiled.rule, pair, pair.of(trace), t > 0)
                found[pair.place] = {
                    name: jnp.stack(e, -1) if isinstance(e, tuple) else e
                    for name, e in slots.items()
                }
        return found

    # the states of a learner under `vmap` have its axes in front
    for _ in range(t.ndim - len(compiled.t_shape)):
        numbers = jax.vmap(numbers)
    return numbers(trace, t)
