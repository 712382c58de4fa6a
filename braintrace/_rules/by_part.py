"""Several rules in one network, each for the ops of its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from .._compiler import Diagnostic, ETraceGraph, OpUse, Relation
from .._executor import Factors, Steps
from ..errors import OptionError
from .d_rtrl import NEWEST
from .layout import by_pair
from .pending import Newest
from .rule import Network, OpGradients, PositionWise, Rule, Trace, Window, Windowed
from .stepwise import NoHistory


class Parts(tuple[tuple[str, Any], ...]):
    """Pairs of a pattern and its rule, printed as the dict that they were given as."""

    def __repr__(self) -> str:
        return repr(dict(self))


class Member(NamedTuple):
    """A rule, and the step with the ops and relations that are its own."""

    rule: Windowed
    graph: ETraceGraph

    @classmethod
    def of(cls, rule: Windowed, graph: ETraceGraph, keys: frozenset[str]) -> Member:
        graph = graph.restricted(keys)
        return cls(rule if graph.hidden_param_op_relations else NoHistory(), graph)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(op.key for op in self.graph.ops)

    def own(self, by_op: dict) -> dict:
        """What is told of these ops."""
        return {key: by_op[key] for key in self.keys if key in by_op}

    def network(self, weights: dict) -> Network:
        return Network(self.graph, self.own(weights))

    def factors(self, factors: Factors) -> Factors:
        x, d, df = factors
        return Factors(self.own(x), d, self.own(df))

    def trace(self, trace: Trace) -> Trace:
        """The entries of these ops, and the newest step beside those that are written late."""
        newest: Any = trace.get(NEWEST)
        found = self.own(trace)
        if newest is not None and (df := self.own(newest.factors.df)):
            found[NEWEST] = Newest(self.factors(newest.factors)._replace(df=df))
        return found

    def window(self, window: Window) -> Window:
        def of_step(d, df, signals):
            return d, self.own(df), signals._replace(dy=self.own(signals.dy))

        open_, once = window.steps.open, window.steps.once
        steps = Steps(window.steps.rows, lambda row: of_step(*open_(row)), once)
        sums = None if window.sums is None else self.own(window.sums)
        return window._replace(x=self.own(window.x), steps=steps, sums=sums)


def _joined(traces: Iterable[Trace]) -> Trace:
    """The traces of all parts; their newest steps are of one step, with one D."""
    found: dict = {}
    for trace in traces:
        late: list[Any] = [each[NEWEST] for each in (found, trace) if NEWEST in each]
        found |= trace
        if late:
            factors = [step.factors for step in late]
            x = {key: own for step in factors for key, own in step.x.items()}
            df = {key: own for step in factors for key, own in step.df.items()}
            found[NEWEST] = Newest(Factors(x, factors[0].d, df))
    return found


@dataclass(frozen=True, repr=False)
class ByPart(Windowed):
    """A rule for each part of a network (see :func:`braintrace.rules.by_part`).

    The parts share D and the signals of a step; each takes those of its own ops.
    """

    parts: Parts
    default: Any
    takes_scope: ClassVar[bool] = False
    name: ClassVar[str] = 'by_part'
    made_by: ClassVar[str] = 'by_part'
    approximation = ''

    def __post_init__(self) -> None:
        for where, rule in [*self.parts, ('default', self.default)]:
            _check(where, rule)
        for axis, of in (('scope', lambda rule: rule.view.scope), ('credit', lambda r: r.credit)):
            found = {of(rule): repr(rule) for rule in self._tracing}
            if len(found) > 1:
                raise OptionError(
                    f'by_part has {" and ".join(found.values())}, whose {axis} differs '
                    f'({" and ".join(map(repr, found))}): parts share the signal and the D of a '
                    f'step. Give all rules that keep a trace the same {axis}.'
                )
        if self._tracing:
            view = replace(self.view, scope=self._tracing[0].view.scope)
            object.__setattr__(self, 'view', view)

    @property
    def rules(self) -> tuple[Windowed, ...]:
        """Those of the parts, and the default."""
        return *(rule for _, rule in self.parts), self.default

    @property
    def _tracing(self) -> list[Windowed]:
        return [rule for rule in self.rules if rule.traces]

    @property
    def probes(self) -> bool:  # type: ignore[override]
        return any(rule.probes for rule in self.rules)

    @property
    def traces(self) -> bool:  # type: ignore[override]
        return bool(self._tracing)

    @property
    def credit(self) -> str:
        return self._tracing[0].credit if self._tracing else 'cut'

    @property
    def remembers(self) -> bool:
        return any(rule.remembers for rule in self.rules)

    # which op is whose ----------------------------------------------------------------------------

    def at(self, relation: Relation) -> Windowed:
        """The rule of an op that has a trace."""
        paths = (path for several in relation.paths.values() for path in several)
        names = {relation.key, *paths, *(group.name for group in relation.groups)}
        return next((r for pattern, r in self.parts if _matches(pattern, names)), self.default)

    def chosen(self, graph: ETraceGraph) -> list[tuple[str, Windowed, list[str]]]:
        """Each pattern with its rule and the keys of its ops, the default last."""
        left = {op.key: _names(graph, op) for op in graph.ops if op.owned}
        found = []
        for pattern, rule in self.parts:
            keys = [key for key, names in left.items() if _matches(pattern, names)]
            if not keys:
                raise OptionError(_unmatched(graph, pattern))
            left = {key: names for key, names in left.items() if key not in keys}
            found.append((pattern, rule, keys))
        return [*found, ('default', self.default, list(left))]

    def lines(self, graph: ETraceGraph) -> tuple[str, ...]:
        """The rule of each op, for the report."""
        return tuple(
            f'{", ".join(keys)} by {rule!r}' for _, rule, keys in self.chosen(graph) if keys
        )

    def _split(self, graph: ETraceGraph) -> list[Member]:
        return [Member.of(rule, graph, frozenset(keys)) for _, rule, keys in self.chosen(graph)]

    # the protocol ---------------------------------------------------------------------------------

    def widened(self, graph):
        own, findings = {}, []
        for part in self._split(graph):
            part.rule.check(part.graph)
            left_out = part.rule.approximation
            for relation in part.rule.widened(part.graph).hidden_param_op_relations:
                own[relation.key] = relation
                if left_out:
                    text = f'{relation.key} by {part.rule!r}: {left_out}'
                    findings.append(Diagnostic('rule', relation.key, reason=text))
        relations = tuple(own.get(r.key, r) for r in graph.hidden_param_op_relations)
        findings = (*graph.findings, *findings)
        return replace(graph, hidden_param_op_relations=relations, findings=findings)

    def factors(self, executor, at, moving):
        d, df = executor.d_factors(*at)
        parts = (part for part in self._split(executor.graph) if part.rule.traces)
        return d, {key: df[key] for part in parts for key in part.own(df)}

    def init(self, graph):
        def one(part: Member) -> Trace:
            if part.rule.traces:
                return part.rule.init(part.graph)
            return by_pair(part.graph, lambda pair: {})

        return _joined(map(one, self._split(graph)))

    def update(self, network, trace, factors, t):
        return _joined(
            part.rule.update(
                part.network(network.weights), part.trace(trace), part.factors(factors), t
            )
            for part in self._split(network.graph)
        )

    def gradient(self, network, before, after, step):
        grads: OpGradients = {}
        for part in self._split(network.graph):
            traces = part.trace(before), part.trace(after)
            own = part.network(network.weights)
            grads |= part.rule.gradient(own, *traces, part.window(step))
        return grads

    def written(self, graph, trace, t):
        return _joined(
            part.rule.written(part.graph, part.trace(trace), t) for part in self._split(graph)
        )

    def delay(self, graph, every):
        return min(part.rule.delay(part.graph, every) for part in self._split(graph))

    def window(self, network, trace, pending, window, keep):
        grads: OpGradients = {}
        behind = []
        for part, steps in self._pending(network.graph, pending):
            own = part.network(network.weights), part.trace(trace), steps, part.window(window)
            of_part, after = part.rule.window(*own, keep)
            grads |= of_part
            behind.append(after)
        return grads, tuple(behind) if keep else None

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        for part, steps in self._pending(network.graph, pending):
            own = part.network(network.weights), part.own(grads), part.trace(trace), steps
            grads = grads | part.rule.with_history(*own, lam, t, reset)
        return grads

    def advance(self, network, trace, pending, window):
        return tuple(
            part.rule.advance(
                part.network(network.weights), part.trace(trace), steps, part.window(window)
            )
            for part, steps in self._pending(network.graph, pending)
        )

    def close(self, network, trace, pending, t, read):
        return _joined(
            part.rule.close(part.network(network.weights), part.trace(trace), steps, t, read)
            for part, steps in self._pending(network.graph, pending)
        )

    def restarted(self, graph, pending, dead):
        if pending is None:
            return None
        each = self._pending(graph, pending)
        return tuple(part.rule.restarted(part.graph, steps, dead) for part, steps in each)

    def counting_in(self, graph, trace, pending, t):
        stored, found = [], []
        for part, steps in self._pending(graph, pending):
            of_part = part.rule.counting_in(part.graph, part.trace(trace), steps, t)
            stored += of_part[0]
            found += of_part[1]
        return stored, found

    def _pending(self, graph: ETraceGraph, pending) -> Iterator[tuple[Member, Any]]:
        """Each part, and the steps that are pending in it."""
        parts = self._split(graph)
        return zip(parts, (None,) * len(parts) if pending is None else pending, strict=True)


def rule_at(rule: Rule, relation: Relation) -> Rule:
    """The rule by which the weights of an op learn."""
    return rule.at(relation) if isinstance(rule, ByPart) else rule


def _check(where: str, rule: Any) -> None:
    if not isinstance(rule, Rule):
        raise OptionError(
            f'by_part: the rule of {where!r} is {rule!r}; give a value of braintrace.rules, such '
            'as braintrace.rules.same_step().'
        )
    if not (isinstance(rule, Windowed) and isinstance(rule, PositionWise)):
        raise OptionError(
            f'by_part: the rule of {where!r} is {rule!r}, which follows paths between positions or '
            'moves its trace within a step, and can not be beside another. Parts can be '
            'd_rtrl, es_d_rtrl, ottt and same_step.'
        )
    if rule.view.kappa or rule.view.feedback:
        raise OptionError(
            f'by_part: the rule of {where!r} is {rule!r}; a filter and a feedback change the step '
            'of the whole network. Give a feedback to the whole, '
            '`by_part(...).with_feedback(...)`, and a filter to the model '
            '(braintrace.nn.FilteredReadout).'
        )


def _names(graph: ETraceGraph, op: OpUse) -> set[str]:
    """The names by which a pattern finds an op."""
    behind = {i for several in op.parameters.values() for i in several}
    relations = (r for r in graph.hidden_param_op_relations if r.key == op.key)
    groups = {group.name for relation in relations for group in relation.groups}
    return {op.key, *(graph.program.param_names[i] for i in behind), *groups}


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether one of the names is this one, or is below it, or fits its wildcards."""
    return any(
        name == pattern or name.startswith(f'{pattern}/') or fnmatchcase(name, pattern)
        for name in names
    )


def _unmatched(graph: ETraceGraph, pattern: str) -> str:
    names = {op.key: _names(graph, op) for op in graph.ops if op.owned}
    taken = [key for key, own in names.items() if _matches(pattern, own)]
    if taken:
        return (
            f'by_part: all that {pattern!r} matches ({", ".join(taken)}) belongs to patterns in '
            'front of it, and the first one counts; put it in front of them, or leave it out.'
        )
    every = ', '.join(sorted({name for own in names.values() for name in own}))
    return (
        f'by_part: {pattern!r} matches nothing; there are {every}: ops, their parameters and the '
        'hidden groups that they feed. A weight that no braintrace op reads (`h @ W`) has no rule.'
    )
