"""The protocol of an online learning rule, as pure functions over factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, final

import jax
import numpy as np

from .._compiler import ETraceGraph
from .._executor import Executor, Factors, Signals, Steps, Vector
from ..errors import OptionError
from .feedback import Feedback, View
from .moving import checked, in_text

Weights = dict[str, dict[str, jax.Array]]
OpGradients = dict[str, dict[str, jax.Array]]
Trace = dict[str, dict[str, dict[str, Any]]]


class Network(NamedTuple):
    """A compiled graph, and the weights of its owned ops."""

    graph: ETraceGraph
    weights: Weights


class Window(NamedTuple):
    """Several steps with constant weights, time as the first axis.

    ``x``: the inputs of the ops. ``steps``: each opens to ``(d, df, signals)``. ``t`` (step counts)
    and ``resets`` (flags, or None) are before each step, ``first`` is the first of these counts:
    a slice of ``t`` would count again wherever it is read. ``sums``: the signals of ops without x,
    summed over the steps.
    """

    x: dict[str, Any]
    steps: Steps
    t: jax.Array
    first: jax.Array
    resets: jax.Array | None = None
    sums: dict[str, jax.Array] | None = None

    @classmethod
    def of_step(cls, factors: Factors, signals: Signals, t: jax.Array) -> Window:
        """One step as a window."""
        x, d, df = factors
        x, row, ts = jax.tree.map(lambda a: a[None], (x, (d, df, signals), t))
        return cls(x, Steps(row, lambda row: row), ts, t)

    @property
    def newest(self) -> Factors:
        """The factors of the last step."""
        d, df, _ = self.steps.at(-1)
        return Factors(jax.tree.map(lambda a: a[-1], self.x), d, df)


SHOWN = 'approximation', 'filtered', 'name', 'remembers', 'with_feedback'  # of every rule


@dataclass(frozen=True, repr=False)
class Rule(ABC):
    """An online learning rule: ``init``, ``update`` and ``gradient`` for single steps; a
    :class:`Windowed` one has ``window`` for several at once.

    A *trace* is a dict relation -> group -> slot; a slot holds an array, or a tuple of one for each
    state of which there are entries. Beside them may stand the newest step, which the next one
    writes into them.

    ``t`` counts a lane's trace steps since its last reset, before the step at hand. Where it is 0
    the stored trace counts as zero, whatever it holds, so a reset never touches the trace. ``view``
    has the filter, the feedback and the scope, which :meth:`filtered` and others set.

    >>> import braintrace
    >>> rule = braintrace.rules.es_d_rtrl(0.9)
    >>> isinstance(rule, braintrace.rules.Rule), rule.approximation, rule.remembers
    (True, '...', True)
    """

    view: View = field(default=View(), kw_only=True)
    name: ClassVar[str]
    made_by: ClassVar[str] = ''  # the function of braintrace.rules that makes it
    required: ClassVar[tuple[str, ...]] = ()  # the slots of a primitive that the rule calls
    probes: ClassVar[bool] = False  # whether it needs dL/dh of the new states
    traces: ClassVar[bool] = True  # whether it needs D, D_f and signals of states
    takes_scope: ClassVar[bool] = True  # whether the call that makes it may name one
    filters: ClassVar[bool] = False  # whether its trace has an entry for each state of a group

    @final
    def __dir__(self) -> list[str]:
        """What a value shows; the methods of the protocol are for those who write a rule."""
        own = [f.name for f in fields(self) if f.name != 'view']
        return sorted([*own, *SHOWN, *(name for name in vars(type(self)) if name.startswith('__'))])

    spelled = ''  # the call, where a function of another name makes it

    @final
    def called(self, text: str) -> Self:
        """This rule, which is shown as the call that made it; it is equal to the one before."""
        new = replace(self)
        object.__setattr__(new, 'spelled', text)
        return new

    @property
    def title(self) -> str:
        """The name in a report: the call that the user wrote, where the rule has that."""
        return self.spelled or self.name

    @final
    def __repr__(self) -> str:
        """The call of ``braintrace.rules`` that makes it."""
        return self.spelled or self.own_call

    @property
    def own_call(self) -> str:
        """The same of equal rules; a saved learner has it."""
        given = {f: in_text(getattr(self, f.name)) for f in fields(self) if f.name != 'view'}
        # a dtype is written by its name
        text = lambda value: repr(value.name if isinstance(value, np.dtype) else value)
        shown = [
            repr(value) if f.default is MISSING else f'{f.name}={text(value)}'
            for f, value in given.items()
            if value != f.default
        ]
        own_scope = self.takes_scope and self.view.scope != 'position'
        shown += [f'scope={self.view.scope!r}'] if own_scope else []
        call = f'{self.made_by or type(self).__name__}({", ".join(shown)})'
        call += f'.filtered({self.view.kappa!r})' if self.view.kappa else ''
        return f'{call}.with_feedback({self.view.feedback!r})' if self.view.feedback else call

    @property
    @abstractmethod
    def approximation(self) -> str:
        """A phrase for the report: what the rule leaves out in every model. Empty: nothing."""

    @property
    @abstractmethod
    def credit(self) -> str:
        """``'cut'``: ``dL/dh'`` along the paths of D alone; ``'whole'``: along every path."""

    @property
    @abstractmethod
    def remembers(self) -> bool:
        """Whether anything of an earlier step is in a gradient."""

    @final
    def with_feedback(self, feedback: Feedback) -> Self:
        """This rule, in which errors go back through ops as a :class:`braintrace.Feedback` says.

        Raises :class:`braintrace.errors.OptionError` for another value of ``feedback``.

        >>> import braintrace
        >>> feedback = braintrace.Feedback('random')
        >>> braintrace.rules.d_rtrl().with_feedback(feedback) == braintrace.rules.rflo()
        True
        """
        if not isinstance(feedback, Feedback):
            raise OptionError(
                f'feedback is {feedback!r}; give a braintrace.Feedback, such as '
                "braintrace.Feedback('random')."
            )
        return self._seeing('feedback', feedback)

    @final
    def filtered(self, kappa: float | jax.Array | Literal['auto']) -> Self:
        """This rule, in which readouts read through a filter: it counts each x that a readout read
        k steps ago with ``kappa^k``, as an output that leaks with ``kappa`` remembers it.

        The filtered eligibility trace of Bellec et al. 2020, Nat. Commun. 11:3625: ``ebar^t = kappa
        ebar^{t-1} + dx^t/dw`` for what a readout reads (never for the membrane), one more number
        for each entry of the trace. A readout is an op that reads what other ops made and whose
        result no op reads, in the step or through a state. The factor ``1 - kappa`` of some papers
        belongs to the model's own readout. Exact for one hidden layer in front of a readout ``y^t =
        kappa y^{t-1} + op(x^t)``; with ``kappa = 0`` there is no filter. ``'auto'`` is the leak of
        the readouts, 0 where none leaks; a warning tells of another number than it. An array of
        shape () is a kappa too (:func:`braintrace.rules.es_d_rtrl`), of which nothing is told.
        Raises :class:`braintrace.errors.OptionError` for a kappa outside [0, 1), for a rule that
        has no entry to filter, and when the step is compiled if no readout reads position by
        position what an op with a trace made, or ``'auto'`` finds no number that is the leak of all
        of them.

        >>> import braintrace
        >>> braintrace.rules.d_rtrl().filtered(0.9).view.kappa
        0.9
        """
        value = kappa if isinstance(kappa, str) else checked('kappa', kappa)
        if value is None or (isinstance(value, str) and value != 'auto'):
            raise OptionError(
                f"kappa is {kappa!r}; give a number in [0, 1), 0 for no filter, or 'auto', the "
                "readouts' leak."
            )
        if value and not self.filters:
            raise OptionError(
                f'{self.name} keeps no trace entry that a filter could lengthen, so it has no '
                'kappa: give braintrace.rules.d_rtrl(), which has one for each weight entry, or '
                'filter in the model (braintrace.nn.FilteredReadout).'
            )
        return self._seeing('kappa', value) if value or self.filters else self

    def _seeing(self, name: str, value) -> Self:
        """This rule, with another value of its view."""
        return replace(self, view=replace(self.view, **{name: value}))

    @final
    def check(self, graph: ETraceGraph) -> None:
        """Raise :class:`braintrace.errors.MissingRuleError` where a traced primitive lacks a rule
        that this algorithm needs.
        """
        for relation in graph.hidden_param_op_relations:
            for slot in self.required:
                relation.primitive.rule(slot, self.name)

    @final
    def scoped(self, graph: ETraceGraph) -> ETraceGraph:
        """The compiled step as this rule sees it, also of a step that a rule has seen."""
        # a step that another rule has seen is looked at again, from what was compiled
        rule, compiled = graph.seen or (None, graph)
        if rule is self or rule == self:
            return graph
        return replace(self.widened(self.view.of(compiled)), seen=(self, compiled))

    @abstractmethod
    def widened(self, graph: ETraceGraph) -> ETraceGraph:
        """The step with the relations for which this rule keeps a trace."""

    @abstractmethod
    def factors(self, executor: Executor, at: tuple, moving: Any) -> tuple[dict, dict]:
        """``d`` and ``df`` of :class:`Factors`; ``at``: params, weights, carry and inputs of the
        step. ``moving``: of a :class:`Stepwise` rule its trace and ``t``.
        """

    @abstractmethod
    def init(self, graph: ETraceGraph) -> Trace:
        """The trace before the first step: zeros."""

    @abstractmethod
    def update(self, network: Network, trace: Trace, factors: Factors, t: jax.Array) -> Trace:
        """The trace after one step."""

    @abstractmethod
    def gradient(self, network: Network, before: Trace, after: Trace, step: Window) -> OpGradients:
        """The gradient of one step's loss for the weights of every owned op. ``before`` and
        ``after`` are the traces around the step, a window of length 1.
        """

    @abstractmethod
    def written(self, graph: ETraceGraph, trace: Trace, t: jax.Array) -> Trace:
        """The entries of every state, with the newest step written into them."""

    @abstractmethod
    def delay(self, graph: ETraceGraph, every: int) -> int:
        """The number of updates, ``every`` steps apart, that share one write of the trace."""


class WritesAtOnce(Rule):
    """A rule that writes each step into entries of every state."""

    @final
    def written(self, graph, trace, t):
        return trace

    @final
    def delay(self, graph, every):
        return 1


class PositionWise(Rule):
    """A rule whose D is position by position."""

    @final
    def factors(self, executor, at, moving):
        return executor.d_factors(*at)


class Windowed(Rule):
    """A rule that takes the steps of a window at once: it moves its trace once for all of them."""

    @abstractmethod
    def window(
        self, network: Network, trace: Trace, pending: Any, window: Window, keep: bool
    ) -> tuple[OpGradients, Any]:
        """The sum of the gradients of a window's losses, and the steps that are pending after it.

        ``pending``: the steps since the trace was written, or None. Without ``keep`` nothing can be
        written afterwards.
        """

    @abstractmethod
    def with_history(
        self,
        network: Network,
        grads: OpGradients,
        trace: Trace,
        pending: Any,
        lam: dict[str, Vector],
        t: jax.Array,
        reset: jax.Array | None,
    ) -> OpGradients:
        """``grads + < lam, e >``: ``lam`` are derivatives of losses by the states before a window,
        ``pending`` steps are not in the trace. Its first step, at ``t``, resets some lanes (None:
        none).
        """

    @abstractmethod
    def advance(self, network: Network, trace: Trace, pending: Any, window: Window) -> Any:
        """The steps that are pending after a window, whose signals are not read."""

    @abstractmethod
    def close(self, network: Network, trace: Trace, pending: Any, t: jax.Array, read: Any) -> Trace:
        """The trace with all pending steps written into it. ``read``, results that were made of the
        old trace, are computed first, so that the write needs no copy.
        """

    @abstractmethod
    def restarted(self, graph: ETraceGraph, pending: Any, dead: jax.Array) -> Any:
        """What is pending, without the lanes that start again."""

    @abstractmethod
    def counting_in(
        self, graph: ETraceGraph, trace: Trace, pending: Any, t: jax.Array
    ) -> tuple[list[tuple[Trace, jax.Array]], list[jax.Array]]:
        """The arrays that the next gradient reads, with the flags of the lanes in which they count,
        and of each array of the pending steps the lanes in which a number is not finite.
        """


class PendsWhole(Windowed):
    """A rule whose trace is small: what is pending is the whole trace after some steps."""

    @final
    def restarted(self, graph, pending, dead):
        return pending

    @final
    def counting_in(self, graph, trace, pending, t):
        return [(trace if pending is None else pending, t > 0)], []
