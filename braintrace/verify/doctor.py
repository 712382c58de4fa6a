"""The gradient doctor: an online learner and backpropagation through time on a short window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .. import ETraceGraph, Report, functional
from .._signatures import is_int, public
from ..errors import NotSupportedError, OptionError, StepFunctionError
from . import _measure as measure
from ._activity import activity
from ._sequence import checked, scalar
from .cut import CutStep
from .diagnosis import Activity, Diagnosis, ParameterRow, TraceGrowth
from .findings import findings
from .oracles import total_loss

FAST = 10  # the least growth over half a window that may go on without bound
STEADY = 0.95  # the least ratio of two successive growth factors that counts as exponential growth


@runtime_checkable
class ModelLearner(Protocol):
    """A learner that holds a model, as :class:`braintrace.ETraceLearner` does."""

    def pure(self) -> tuple[functional.OnlineLearner, Any, Any]:
        """The learner as pure functions, and the model's parameters and carry."""
        ...

    def with_environment(self, xs, length: int) -> tuple:
        """Sequences as these functions take them, with what the model reads besides its inputs."""
        ...


@public('braintrace.verify.diagnose')
def diagnose(
    learner: ModelLearner | functional.OnlineLearner,
    xs,
    ys,
    loss_fn: Callable,
    *,
    params=None,
    carry=None,
    steps: int | None = None,
) -> Diagnosis:
    """Compare the online gradient of a learner with BPTT on a short window, and say what is lost,
    where, and what to do.

    Both are gradients of the summed losses, from the present hidden states and an empty trace; no
    state of the learner or of its model changes.

    Parameters
    ----------
    learner : ETraceLearner or OnlineLearner
        A compiled learner.
    xs, ys : pytrees
        Time in axis 0; a plain tuple ``xs`` holds several inputs. What the model reads of
        ``brainstate.environ`` is as it is around the call: time goes on, arrays stay.
    loss_fn : function
        ``loss_fn(outputs, target)``, the loss of one step, a real scalar.
    params, carry : pytrees
        Needed for a learner that :func:`braintrace.functional.online` made; another learner has
        its own.
    steps : int, optional
        Number of first steps to use, by default all; BPTT keeps every one of them in memory.

    Raises
    ------
    OptionError
        The learner is of another kind, or the number of steps is wrong.
    NotCompiledError
        The learner is not compiled.
    StructureError
        Inputs have other shapes than were compiled.
    StepFunctionError
        The loss is no scalar.

    Notes
    -----
    The decomposition of the gradient is that of the design notes, "The identity"; the share of the
    Jacobian that an approximation keeps, weighted here by the loss, is due to Menick et al. (2021),
    "Practical real time recurrent learning with a sparse approximation".

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.MinGRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
    >>> xs, ys = jax.random.normal(jax.random.key(0), (6, 3, 2)), jnp.ones((6, 3, 4))
    >>> loss = lambda output, target: jnp.mean((output - target) ** 2)
    >>> diagnosis = braintrace.verify.diagnose(learner, xs, ys, loss)
    >>> diagnosis.findings
    ('Every gradient is that of BPTT: no path is left out.',)
    >>> [(row.path, round(row.cosine, 4), row.dropped) for row in diagnosis.rows]
    [('W/weight/bias', 1.0, 0.0), ('W/weight/weight', 1.0, 0.0)]
    """
    online, params, carry = _pure(learner, params, carry)
    params, carry, xs, ys = checked(online.cell, params, carry, online.taken(xs), ys, loss_fn)
    xs, ys, count = _window(xs, ys, steps)
    if isinstance(learner, ModelLearner):
        xs = learner.with_environment(xs, count)
    first = jax.tree.map(lambda a: a[0], xs)
    if online is not learner:
        online.compiled(params, carry, first)
    state = online.init(params, carry, *first)
    graph = online.compiled(params, carry, first).graph
    report = online.report

    gradient = online.sequence_grad(
        lambda output, target: scalar(loss_fn(output, target)), reduction='sum'
    )
    (got, losses, *_), online_ms = _timed(gradient, params, state, xs, ys)
    _check_losses(losses)
    wanted, bptt_ms = _timed(
        jax.grad(lambda p: total_loss(online.cell, loss_fn, p, carry, xs, ys), allow_int=True),
        params,
    )
    norms, hidden = measure.trace_norms(online, graph, params, state, xs)
    mass, not_measured = _mass(online, graph, params, carry, xs, ys, loss_fn)
    rows = _rows(report, graph, params, got, wanted, mass)
    flat = tuple(
        row.path
        for row, p, *both in zip(rows, *map(jax.tree.leaves, (params, got, wanted)), strict=True)
        if row.route != 'frozen' and jnp.issubdtype(p.dtype, jnp.inexact) and not np.any(both)
    )
    growth = tuple(_growth(key, *found) for key, found in norms.items())
    active = tuple(
        Activity(name, shown, silent.size, float(silent.mean()), float(saturated.mean()))
        for name, (shown, silent, saturated) in activity(graph, params, carry, xs, hidden).items()
    )
    return Diagnosis(
        report.rule,
        count,
        rows,
        growth,
        active,
        online_ms / count,
        bptt_ms / count,
        findings(report, rows, growth, active, not_measured, flat),
    )


def _check_losses(losses: jax.Array) -> None:
    if missing := np.flatnonzero(~np.isfinite(losses)).tolist():
        raise StepFunctionError(
            'the loss is not a finite number at the steps '
            f'{missing[:10]}{"..." if len(missing) > 10 else ""}, so no gradients can be compared. '
            'Leave these steps out, or let the loss count what is there: `ok = '
            '~jnp.isnan(target)`, `jnp.where(ok, output - jnp.where(ok, target, 0), 0)`.'
        )


def _pure(learner, params, carry) -> tuple[functional.OnlineLearner, Any, Any]:
    """A learner of either kind as ``(online, params, carry)``."""
    if not isinstance(learner, type) and getattr(learner, 'rule', ...) is None:
        raise OptionError(
            'this learner was made with rule=None, so it has no trace to look at. Give it a value '
            'of braintrace.rules.'
        )
    if isinstance(learner, ModelLearner) and not isinstance(learner, type):
        if params is not None or carry is not None:
            raise OptionError(
                'params and carry were given, but this learner has those of its model. Leave them '
                'out.'
            )
        return learner.pure()
    if not isinstance(learner, functional.OnlineLearner):
        raise OptionError(
            f'learner is {type(learner).__name__}; give a compiled learner, such as '
            'braintrace.D_RTRL(model), or what braintrace.functional.online returned.'
        )
    if params is None or carry is None:
        raise OptionError(
            'a learner of pure functions holds no numbers: pass params=... and carry=... too.'
        )
    return learner, params, carry


def _window(xs, ys, steps):
    """The first steps of a sequence, and how many there are."""
    length = len(jax.tree.leaves((xs, ys))[0])
    if steps is not None and not (is_int(steps, 1) and steps <= length):
        raise OptionError(
            f'steps is {steps!r}; give an int from 1 to {length}, the length of the sequence.'
        )
    count = length if steps is None else int(steps)
    return *jax.tree.map(lambda a: a[:count], (xs, ys)), count


def _timed(fn: Callable, *args):
    """The result of a function, and the time of its compiled program in ms, best of three."""
    run = jax.jit(fn)
    result, times = jax.block_until_ready(run(*args)), []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return result, 1e3 * min(times)


def _mass(
    online: functional.OnlineLearner, graph: ETraceGraph, *window
) -> tuple[measure.Mass | None, str]:
    """The history that the losses read, or None and the reason why the cut can not be evaluated."""
    rule = online.rule
    if rule is None:
        return None, 'the learner has no rule.'
    if not _is_cut(graph):
        lost = any(row.left_out for row in online.report.parameters)
        return None, f'{rule.name} follows paths between positions.' if lost else ''
    if graph.feedback or graph.program.virtual:
        return None, 'the rule has a filter, or weights of its own for the way back.'
    try:
        cut = CutStep(graph)
    except NotSupportedError as e:
        return None, str(e)
    if any(map(jnp.iscomplexobj, cut.hidden(window[1]))):
        return None, 'a hidden state is complex.'
    credit = rule.credit if rule.remembers else None
    return measure.history_mass(online.cell, cut, credit, *window), ''


def _is_cut(graph: ETraceGraph) -> bool:
    """Whether a trace follows each unit by itself, which :class:`CutStep` evaluates."""
    whole = graph.hidden_param_op_relations and not any(graph.recurrent.values())
    return not (whole or any(eqn.extra for eqn in graph.program.equations))


def _rows(
    report: Report, graph: ETraceGraph, params, got, wanted, mass
) -> tuple[ParameterRow, ...]:
    """One row for each leaf of the parameters; the report has them in the same order."""
    rows, column = [], 0
    for row, p, g, w in zip(
        report.parameters, *map(jax.tree.leaves, (params, got, wanted)), strict=True
    ):
        dropped, by_group = (None if row.left_out or _is_cut(graph) else 0.0), {}
        if jnp.issubdtype(p.dtype, jnp.inexact):
            cosine, ratio = _compare(np.ravel(g), np.ravel(w))
            if mass is not None:
                lost = mass.dropped[:, column]
                total = float(mass.kept[:, column].sum() + lost.sum()) or 1.0
                shares = zip(graph.hidden_groups, lost, strict=True)
                dropped = float(lost.sum()) / total
                by_group = {group.name: float(share) / total for group, share in shares}
            column += 1
        else:
            cosine, ratio = 1.0, 1.0
        known = row.path, row.shape, row.route, row.reason, row.history
        rest = dropped, by_group, row.left_out, _trace_bytes(report, row.path)
        rows.append(ParameterRow(*known, cosine, ratio, *rest))
    return tuple(rows)


def _compare(g: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """Cosine and ratio of norms. If both gradients are zero, both are 1; if one is zero, the cosine
    is 0.
    """
    g, w = (np.asarray(a, np.result_type(a, np.float64)) for a in (g, w))
    a, b = np.linalg.norm(g), np.linalg.norm(w)
    if a == 0 or b == 0:
        return (1.0, 1.0) if a == b else (0.0, math.inf if b == 0 else 0.0)
    return float(np.vdot(w / b, g / a).real), float(a / b)


def _trace_bytes(report: Report, path: str) -> int:
    """The bytes of a parameter's trace: the arrays named after its slot in the op, or else all
    arrays of the relation.
    """
    total = 0
    for rel in report.relations:
        slots = {name for name, paths in rel.parameters.items() if path in paths}
        own = [row.bytes for row in rel.trace if row.slot in slots]
        total += sum(own) if own else rel.bytes if slots else 0
    return total


def _growth(relation: str, norms: np.ndarray, largest: np.ndarray, limit: float) -> TraceGrowth:
    """The growth over the last half of the window. If it is fast and does not slow down, it is
    extrapolated to the limit.
    """
    quarter = len(norms) // 4
    early, middle, late, top = (
        float(a) for a in (norms[-1 - 2 * quarter], norms[-1 - quarter], norms[-1], largest[-1])
    )
    growth = late / early if early else 1.0 if late == 0 else math.inf
    left = math.inf
    if not math.isfinite(late):
        left = 0.0
    elif FAST < growth < math.inf and late * early > STEADY * middle**2:
        left = 2 * quarter * (math.log(limit) - math.log(top)) / math.log(growth)
    return TraceGrowth(relation, tuple(map(float, norms)), growth, top, limit, left)
