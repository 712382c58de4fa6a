"""The findings of the gradient doctor as plain data, which prints as tables, makes a dict for JSON
and draws a figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._tables import Table
from ._shown import Shown, empty_figure


@dataclass(frozen=True)
class ParameterRow:
    """The online gradient of one parameter next to its gradient by BPTT over the window.

    ``path``, ``shape``, ``route``, ``reason`` and ``history`` are as in ``learner.report``;
    ``trace_bytes`` is the size of its trace. ``cosine`` is the cosine of the angle between both,
    ``norm_ratio`` the norm of the online gradient over the norm of BPTT's (1 where both are zero).
    ``left_out``: the paths that carry no history, each with ``kind`` and ``text``, as there.

    ``dropped`` is the lost share of the history that the losses read. For each hidden group of h
    let J be the sum ``sum_t dL^t/dh^{t-1} dh^{t-1}/dw`` along every path, and C its part along the
    paths that the rule keeps; the share is ``|J - C|^2``, summed over groups, divided by the sum of
    ``|C|^2 + |J - C|^2``. ``dropped_by_group`` splits it by group. It is None where the step has
    a loop, or states whose paths can not be told apart, and for rules with a filter, feedback
    weights, the own diagonal, or a trace beyond positions that leaves something out.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model, loss = braintrace.nn.GRUCell(2, 4), lambda output, target: jnp.mean(output**2)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
    >>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
    >>> diagnosis = braintrace.verify.diagnose(learner, xs, xs, loss)
    >>> row = next(row for row in diagnosis.rows if row.path == 'Wr/weight/weight')
    >>> row.route, row.history, 0 < row.cosine < 1
    ('same-step', 'none', True)
    """

    path: str
    shape: tuple[int, ...]
    route: str
    reason: str
    history: str
    cosine: float
    norm_ratio: float
    dropped: float | None
    dropped_by_group: dict[str, float]
    left_out: tuple
    trace_bytes: int


@dataclass(frozen=True)
class TraceGrowth:
    """The norm of a relation's trace after each step of the window, ``norms``.

    ``growth`` is the last norm over the norm half a window earlier (two times a quarter, rounded
    down). ``largest`` is the largest entry, ``limit`` the largest number that its dtype holds. If
    the growth goes on, the limit is reached in ``steps_left`` steps; infinity where the growth is
    less than tenfold, or slower in the last quarter than in the quarter before.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model, loss = braintrace.nn.GRUCell(2, 4), lambda output, target: jnp.mean(output**2)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
    >>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
    >>> diagnosis = braintrace.verify.diagnose(learner, xs, xs, loss)
    >>> [(row.relation, row.steps_left) for row in diagnosis.trace_growth]
    [('Wh/weight/weight', inf), ('Wz/weight/weight', inf)]
    """

    relation: str
    norms: tuple[float, ...]
    growth: float
    largest: float
    limit: float
    steps_left: float


@dataclass(frozen=True)
class Activity:
    """The share of silent and saturated units of a hidden group.

    ``shown_by`` is ``spikes`` where a step function of the group's states makes zeros and ones, or
    a state holds its result: a unit is silent if it never spikes, and saturated if it spikes at
    more than half of all steps. Otherwise it is ``states``: a unit is silent if all its states stay
    within 1e-6 of zero, in units of their root mean square over the window, and saturated if a
    state that stays between -1 and 1 in every unit is beyond 0.99 at more than half of all steps.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model, loss = braintrace.nn.GRUCell(2, 4), lambda output, target: jnp.mean(output**2)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
    >>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
    >>> diagnosis = braintrace.verify.diagnose(learner, xs, xs, loss)
    >>> [(row.group, row.shown_by, row.silent) for row in diagnosis.activity]
    [('h', 'states', 0.0)]
    """

    group: str
    shown_by: str
    units: int
    silent: float
    saturated: float


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The result of :func:`braintrace.verify.diagnose`; it prints as text and shows as tables in a
    notebook.

    - ``rule``, ``steps``: the learner's rule, and the length of the window
    - ``findings``: sentences that say what is lost, where, and what to do
    - ``rows``: a :class:`ParameterRow` for each parameter
    - ``trace_growth``: a :class:`TraceGrowth` for each relation
    - ``activity``: an :class:`Activity` for each hidden group
    - ``ms_per_step``: the time of the online gradient over the window divided by its steps, best of
      three; ``bptt_ms_per_step``: the same for BPTT

    >>> import braintrace, jax, jax.numpy as jnp
    >>> model, loss = braintrace.nn.GRUCell(2, 4), lambda output, target: jnp.mean(output**2)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
    >>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
    >>> diagnosis = braintrace.verify.diagnose(learner, xs, xs, loss)
    >>> len(diagnosis.rows), diagnosis.silent
    (6, {'h': 0.0})
    """

    rule: str
    steps: int
    rows: tuple[ParameterRow, ...]
    trace_growth: tuple[TraceGrowth, ...]
    activity: tuple[Activity, ...]
    ms_per_step: float
    bptt_ms_per_step: float
    findings: tuple[str, ...]

    @property
    def silent(self) -> dict[str, float]:
        """Hidden group -> share of silent units."""
        return {a.group: a.silent for a in self.activity}

    @property
    def saturated(self) -> dict[str, float]:
        """Hidden group -> share of saturated units."""
        return {a.group: a.saturated for a in self.activity}

    def _lines(self) -> list[str]:
        return [
            f'{self.rule} over {self.steps} step(s): {self.ms_per_step:.3g} ms a step, BPTT '
            f'{self.bptt_ms_per_step:.3g} ms',
            *(f'- {text}' for text in self.findings),
        ]

    def _tables(self) -> list[Table]:
        columns = ('parameter', 'route', 'reason', 'history')
        numbers = ('cosine', 'norm ratio', 'dropped', 'trace')
        gradients = [
            (
                *(r.path, r.route, r.reason, r.history),
                *(f'{r.cosine:.4f}', f'{r.norm_ratio:.4g}'),
                *(_share(r.dropped), f'{r.trace_bytes} B'),
            )
            for r in self.rows
        ]
        traces = [
            (t.relation, *(f'{v:.3g}' for v in (t.norms[-1], t.growth, t.largest, t.steps_left)))
            for t in self.trace_growth
        ]
        activity = [
            (a.group, str(a.units), a.shown_by, _share(a.silent), _share(a.saturated))
            for a in self.activity
        ]
        of_traces = ('trace of', 'norm', 'growth', 'largest', 'steps to overflow')
        of_units = ('hidden group', 'units', 'shown by', 'silent', 'saturated')
        return [
            Table('gradients', (*columns, *numbers), gradients),
            Table('traces', of_traces, traces),
            Table('activity', of_units, activity),
        ]

    def figure(self):
        """A matplotlib figure: cosine, norm ratio and dropped share of each parameter, and the
        trace's norm along the window; a notebook shows it.

        Raises :class:`braintrace.errors.OptionError` without matplotlib.
        """
        fig = empty_figure(figsize=(11, 1.8 + 0.28 * len(self.rows)), layout='constrained')
        names = [r.path for r in self.rows][::-1]
        *bars, growth = fig.subplots(1, 4, width_ratios=[2, 2, 2, 3])
        columns = {
            'cosine to BPTT': [r.cosine for r in self.rows],
            'norm / that of BPTT': [r.norm_ratio for r in self.rows],
            'dropped share of the history': [r.dropped or 0.0 for r in self.rows],
        }
        for ax, (title, values) in zip(bars, columns.items(), strict=True):
            ax.barh(names, [v if math.isfinite(v) else 0.0 for v in values[::-1]], color='tab:blue')
            ax.axvline(1, color='gray', linewidth=0.6)
            ax.set_title(title, fontsize=9)
            ax.tick_params(labelsize=8, labelleft=ax is bars[0])
        for t in self.trace_growth:
            growth.plot(range(1, self.steps + 1), t.norms, label=t.relation)
        if any(t.growth > 100 for t in self.trace_growth):
            growth.set_yscale('log')
        growth.set_title('norm of the trace by step', fontsize=9)
        growth.tick_params(labelsize=8)
        if self.trace_growth:
            growth.legend(fontsize=7)
        return fig


def _share(value: float | None) -> str:
    return '?' if value is None else f'{100 * value:.1f} %'
