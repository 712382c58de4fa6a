"""``compare_rules``: one table of what each learning rule gives and costs, on a user's own data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .. import rules as every_rule
from .._signatures import is_int, public
from .._tables import Table, as_html, as_text
from ..errors import BraintraceError, OptionError
from ._meter import Meter, _row, _signs
from ._reading import Estimate, Reading
from .diagnosis import _plain

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
class Comparison:
    """What :func:`compare_rules` returns: ``rows`` of :class:`RuleRow`, the largest cosine first;
    ``cheapest``: the rule of the smallest trace whose cosine is at least ``bound``, or None;
    ``left_out``: rule -> why it was not run.

    >>> from braintrace.verify import Comparison
    >>> print(Comparison((), 0.9, {'snap(2)': 'too large'}))
    no rule has a cosine of 0.9
    not run: snap(2), too large
    """

    rows: tuple[RuleRow, ...]
    bound: float
    left_out: dict[str, str]

    @property
    def cheapest(self) -> str | None:
        """The rule of the smallest trace, of equal ones the fastest, above the bound."""
        above = [r for r in self.rows if r.cosine.known and r.cosine.value >= self.bound - 1e-6]
        return min(above, key=lambda r: (r.trace_bytes, r.ms)).rule if above else None

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as JSON has them."""
        rows = [{**_plain(r), 'reading': r.reading.as_dict()} for r in self.rows]
        rest = {'bound': self.bound, 'left_out': dict(self.left_out)}
        return {'rows': rows, 'cheapest': self.cheapest, **rest}

    def _lines(self) -> list[str]:
        first = f'no rule has a cosine of {self.bound}'
        if (cheapest := self.cheapest) is not None:
            first = f'the smallest trace with a cosine of {self.bound}: {cheapest}'
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

    def __str__(self) -> str:
        return as_text(self._lines(), self._tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._lines(), self._tables())


def _usual() -> list[every_rule.Rule]:
    return [
        every_rule.same_step(),
        every_rule.es_d_rtrl(0.9),
        every_rule.es_d_rtrl(0.99),
        every_rule.e_prop(0.9),
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
    rules : sequence of Rule, optional
        By default eight of :mod:`braintrace.rules`, without those that do not fit the model or have
        a trace of more than 256 MiB; ``left_out`` names them.
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
    >>> some = [braintrace.rules.same_step(), braintrace.rules.d_rtrl()]
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
    length = jnp.shape(jax.tree.leaves(xs)[0])[0]
    model, params, carry, xs = _pure(learner, params, carry, xs, length)
    size = length if memory is None else memory
    if size > length:
        raise OptionError(f'memory is {size} steps, and the sequence has {length}.')
    whole = length // size
    pieces = jax.tree.map(
        lambda a: jnp.asarray(a)[: whole * size].reshape(whole, size, *a.shape[1:]), (xs, ys)
    )
    first = jax.tree.map(lambda a: a[0], xs)
    groups = -(-directions // AT_ONCE)
    keys = jax.random.split(jax.random.key(0), (whole, groups))
    meter = Meter(model, loss_fn)
    carries, truth = jax.jit(lambda *a: _truth(meter, *a))(params, carry, pieces, keys)
    rows, left_out = [], {}
    for rule in _usual() if rules is None else rules:
        online = functional.online(
            model.cell, rule, trainable=model.trainable, hidden=model.hidden, policy=model.policy
        )
        try:
            jax.eval_shape(online.init, params, carry, *first)
            trace_bytes = online.report.memory
        except BraintraceError as e:
            if rules is not None:
                raise
            left_out[str(rule)] = str(e).split('. ')[0]
            continue
        if rules is None and trace_bytes > LARGEST:
            left_out[str(rule)] = f'its trace has {trace_bytes / 2**20:.0f} MiB'
            continue
        rows.append(_row_of(online, meter, params, carries, pieces, keys, truth, first))
    if not rows:
        raise OptionError(f'no rule fits this model: {left_out}. Give `rules=`.')
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


def _drawn(meter: Meter, params, key) -> list:
    leaves = [leaf for _, _, leaf in meter._chosen(params)]
    keys = jax.random.split(key, len(leaves))
    return [_signs(k, jnp.zeros((AT_ONCE, *jnp.shape(p)), p.dtype)) for k, p in zip(keys, leaves)]


def _truth(meter: Meter, params, carry, pieces, keys) -> tuple:
    """The carry before each piece, and ``<g, v>`` of every direction there."""

    def piece(carry, at):
        (xs, ys), keys = at

        def some(key):
            tangents = [
                jnp.zeros((AT_ONCE, *jnp.shape(h)), h.dtype)
                for h in jax.tree.leaves(carry)
                if jnp.issubdtype(h.dtype, jnp.inexact)
            ]
            found = meter.along(params, carry, _drawn(meter, params, key), tangents, xs, ys)
            return found[0], found[2]

        a, ends = jax.lax.map(some, keys)
        return jax.tree.map(lambda e: e[0], ends), (carry, a)

    return jax.lax.scan(piece, carry, (pieces, keys))[1]


def _row_of(learner, meter: Meter, params, carries, pieces, keys, truth, first) -> RuleRow:
    gradient = learner.sequence_grad(meter.loss_fn, keep_trace=False)

    @jax.jit
    def grads_of(params, carry, xs, ys):
        return gradient(params, learner.init(params, carry, *first), xs, ys).grads

    @jax.jit
    def products(grads, a, keys):
        found = [jax.tree.leaves(grads)]
        places = [i for i, _, _ in meter._chosen(params)]

        def some(at):
            a, key = at
            row = lambda a, v: _row(places, found, a, v)[0]  # noqa: E731
            return jax.vmap(row)(a, _drawn(meter, params, key))

        return jax.lax.map(some, (a, keys))

    rows, times = [], []
    for i in range(len(truth)):
        at = jax.tree.map(lambda a: a[i], (carries, *pieces))  # noqa: B023
        grads = jax.block_until_ready(grads_of(params, *at))
        for _ in range(TIMES if i == 0 else 0):
            start = time.perf_counter()
            jax.block_until_ready(grads_of(params, *at))
            times.append(time.perf_counter() - start)
        rows.append(np.asarray(products(grads, truth[i], keys[i])))
    samples = np.concatenate(rows)
    samples = samples.reshape(-1, samples.shape[-1])
    size = jnp.shape(jax.tree.leaves(pieces)[0])[1]
    paths = [path for _, path, _ in meter._chosen(params)]
    rule = str(learner.rule)
    reading = Reading.of(rule, f'the {size} steps of a piece', paths, samples)
    return RuleRow(rule, reading, learner.report.memory, 1e3 * min(times), learner.report.exact)
