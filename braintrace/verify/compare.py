"""``compare_rules``: one table of what each learning rule gives and costs, on a user's own data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .. import rules as every_rule
from .._signatures import is_int, public
from .._tables import Table
from ..errors import BraintraceError, OptionError
from ._meter import Meter
from ._reading import Estimate, Reading
from ._shown import Shown

LARGEST = 2**28  # bytes of a trace that `rules=None` still tries
AT_ONCE = 32  # directions in one vmap
TIMES = 3


@dataclass(frozen=True)
class RuleRow:
    """A rule in the table of :func:`compare_rules`: ``reading`` of its gradient, ``trace_bytes``,
    ``ms`` of the gradient of one piece, the best of three, and ``exact`` by the report.

    >>> from braintrace.verify import Estimate, Reading, RuleRow
    >>> e = Estimate(1.0, 0.0, 256)
    >>> RuleRow('rtrl()', Reading('rtrl()', '9 steps', e, e, {}, ()), 96, 0.5, True).cosine.value
    1.0
    """

    rule: str
    reading: Reading
    trace_bytes: int
    ms: float
    exact: bool

    @property
    def cosine(self) -> Estimate:
        """The cosine to the true gradient."""
        return self.reading.cosine


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """What :func:`compare_rules` returns: ``rows`` of :class:`RuleRow`, the largest cosine first;
    ``cheapest``: the rule of the smallest trace, of equal ones the fastest, whose cosine is at
    least ``bound``, or None; ``left_out``: rule -> why it was not run.

    >>> from braintrace.verify import Comparison
    >>> print(Comparison((), 0.9, {'snap(2)': 'too large'}))
    no rule has a cosine of 0.9
    not run: snap(2), too large
    """

    rows: tuple[RuleRow, ...]
    bound: float
    left_out: dict[str, str]
    cheapest: str | None = field(init=False)

    def __post_init__(self):
        above = [r for r in self.rows if r.cosine.known and r.cosine.value >= self.bound - 1e-6]
        best = min(above, key=lambda r: (r.trace_bytes, r.ms), default=None)
        object.__setattr__(self, 'cheapest', best and best.rule)

    def _lines(self) -> list[str]:
        first = f'no rule has a cosine of {self.bound}'
        if self.cheapest is not None:
            first = f'the smallest trace with a cosine of {self.bound}: {self.cheapest}'
        return [first, *(f'not run: {rule}, {why}' for rule, why in self.left_out.items())]

    def _tables(self) -> list[Table]:
        columns = ('', 'rule', 'cosine', 'length', 'trace', 'time', 'exact')
        rows = [
            (
                *('*' if r.rule == self.cheapest else ' ', r.rule, str(r.cosine)),
                *(str(r.reading.ratio), f'{r.trace_bytes / 1024:.1f} KiB', f'{r.ms:.1f} ms'),
                'yes' if r.exact else 'no',
            )
            for r in self.rows
        ]
        return [Table('rules', columns, rows)]


def _usual() -> list[every_rule.Rule]:
    return [
        every_rule.same_step(),
        every_rule.es_d_rtrl(0.9),
        every_rule.es_d_rtrl(0.99),
        every_rule.e_prop('auto'),
        every_rule.d_rtrl(),
        every_rule.d_rtrl(credit='whole'),
        every_rule.uoro(),
        every_rule.snap(2),
    ]


@public('braintrace.verify.compare_rules')
def compare_rules(
    learner,
    xs,
    ys,
    loss_fn: Callable,
    rules: Sequence | None = None,
    memory: int | None = None,
    *,
    params=None,
    carry=None,
    directions: int = 256,
    bound: float = 0.9,
) -> Comparison:
    """How near the gradient of each rule is to the true one on this model and this data, and what
    it costs. Nothing learns, and no model changes.

    Parameters
    ----------
    learner : ETraceLearner or OnlineLearner
        The model, compiled with any rule. What :func:`braintrace.functional.online` returned needs
        ``params`` and ``carry``.
    xs, ys : pytrees
        Time in axis 0; a plain tuple ``xs`` holds several inputs.
    loss_fn : function
        ``loss_fn(output, target)``, the loss of one step, a real scalar.
    rules : sequence of Rule or str, optional
        Values of :mod:`braintrace.rules` or their names; by default eight, without those that do
        not fit the model or have a trace of more than 256 MiB; ``left_out`` names them.
    memory : int, optional
        Cut the sequence into pieces of so many steps, each with an empty trace: the true gradient
        looks back to the start of its piece. By default the whole sequence is one.
    directions : int
        For each piece: the error of a cosine c is about ``(1 - c^2) / sqrt(directions)``.
    bound : float
        Of the cheapest rule that is marked.

    Raises
    ------
    OptionError
        An option has another value, or no rule fits.
    NotSupportedError
        The step has an op without forward mode.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
    >>> loss = lambda output, target: jnp.mean(output**2)
    >>> some = ['same_step', 'd_rtrl']
    >>> model = braintrace.nn.MinGRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=3, seed=0)
    >>> found = braintrace.verify.compare_rules(learner, xs, xs, loss, some, bound=0.999)
    >>> found.cheapest, [row.exact for row in found.rows]
    ('d_rtrl()', [True, False])
    """
    if memory is not None and not is_int(memory, 1):
        raise OptionError(f'memory is {memory!r}; give None or an int >= 1, the steps of a piece.')
    if not is_int(directions, 20):
        raise OptionError(f'directions is {directions!r}; give an int >= 20.')
    if rules is not None and (isinstance(rules, str) or not isinstance(rules, Iterable)):
        raise OptionError(f'rules is {rules!r}; give a list of rules or of their names.')
    length = jnp.shape(jax.tree.leaves(xs)[0])[0]
    model, params, carry, xs = _pure(learner, params, carry, xs, length)
    size = length if memory is None else memory
    if size > length:
        raise OptionError(f'memory is {size} steps, and the sequence has {length}.')
    first = jax.tree.map(lambda a: a[0], xs)
    learners, left_out = [], {}
    for rule in _usual() if rules is None else rules:
        online = functional.online(
            model.cell, rule, trainable=model.trainable, hidden=model.hidden, policy=model.policy
        )
        try:
            jax.eval_shape(online.init, params, carry, *first)
        except BraintraceError as e:
            if rules is not None:
                raise
            left_out[str(rule)] = str(e).split('. ')[0]
            continue
        if rules is None and online.report.memory > LARGEST:
            left_out[str(rule)] = f'its trace has {online.report.memory / 2**20:.0f} MiB'
            continue
        learners.append(online)
    if not learners:
        raise OptionError(f'no rule fits this model: {left_out}. Give `rules=`.')

    # The tangents are the same for all rules: to the meter they are gradients by as many losses.
    pieces, turns = length // size, -(-directions // AT_ONCE)
    every = (loss_fn,) * len(learners)
    meter = Meter(model, every, directions=AT_ONCE, keep=pieces * turns * AT_ONCE)

    @jax.jit
    def measure(metered, params, carry, xs, ys, grads):
        again = lambda now, _: (meter.update(now, params, carry, xs, ys, grads), None)
        return jax.lax.scan(again, metered, length=turns)[0]

    gradients = [jax.jit(online.sequence_grad(loss_fn, keep_trace=False)) for online in learners]
    states = [online.init(params, carry, *first) for online in learners]
    metered = meter.init(params, carry)
    for begin in range(0, pieces * size, size):
        part = slice(begin, begin + size)
        at = jax.tree.map(lambda a: jnp.asarray(a)[part], (xs, ys))  # noqa: B023
        found = [gradient(params, state, *at) for gradient, state in zip(gradients, states)]
        grads = tuple(each.grads for each in found)
        metered = measure(metered, params, states[0].carry, *at, grads)
        states = [each.state for each in found]
    readings = cast(tuple[Reading, ...], meter.reading(jax.block_until_ready(metered), params))

    def milliseconds(k: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(gradients[k](params, states[k], *at))
        return 1e3 * (time.perf_counter() - start)

    rows = []
    for k, (online, reading) in enumerate(zip(learners, readings, strict=True)):
        rule, report, back = str(online.rule), online.report, f'the {size} steps of a piece'
        best = min(milliseconds(k) for _ in range(TIMES))
        reading = replace(reading, rule=rule, looks_back=back)
        rows.append(RuleRow(rule, reading, report.memory, best, report.exact))
    rows.sort(key=lambda r: -np.nan_to_num(r.cosine.value, nan=-2))
    return Comparison(tuple(rows), bound, left_out)


def _pure(learner, params, carry, xs, length: int) -> tuple:
    """``(online, params, carry, xs)`` of a learner, ``xs`` a tuple of all inputs."""
    if isinstance(learner, functional.OnlineLearner):
        if params is None or carry is None:
            raise OptionError('this learner holds no arrays: give params= and carry=.')
        return learner, params, carry, learner.taken(xs)
    if not hasattr(learner, 'pure'):
        raise OptionError(
            f'learner is {learner!r}; give the model compiled with any rule: '
            "`braintrace.compile(model, 'D_RTRL', x, batch_size=...)`."
        )
    own, of_params, of_carry = learner.pure()
    params = of_params if params is None else params
    return own, params, of_carry if carry is None else carry, learner.with_environment(xs, length)
