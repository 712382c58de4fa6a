"""The report of a check: rows of op, law, status and size of the deviation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

STATUSES = ('fail', 'missing', 'not_tested', 'pass', 'not_applicable')  # the gravest first
LAWS = {
    'L0': 'the description and four rules are there, and every dict has exactly the keys of the '
    'trainables',
    'L1': 'eager == jit == vmap == scan; jvp agrees with finite differences; the jaxpr shows the '
    'primitive',
    'L2': 'xy_to_dw == VJP of impl',
    'L3': 'yw_to_w(d, inst(x, e)) == inst(x, d * e)',
    'L4': 'yw_to_w is linear in the trace and in d',
    'L5': 'init_drtrl is zero with shape and dtype of inst and states, init_pp those of y and '
    'states',
    'L6': 'solve(s, inst(x, e)) == VJP of impl at s * e, summed over the batch once',
    'L7': 'the batched form == the stack of unbatched ones',
    'L8': 'each entry of xy_to_dw is linear in x, or independent of it',
    'L9': 'h = tanh(a h + y): D_RTRL == BPTT, and ES_D_RTRL == BPTT at one step',
    'L10': 'gradient_enabled only where dy/dw is diagonal and xy_to_dw passes d through',
    'L11': 'dtypes that impl takes come out; units multiply; a bias of a wrong unit is an error',
    'L12': 'static parameters are hashable by value; a second call does not trace again',
    'L13': "a platform's lowering and trace kernel == the default",
    'L14': 'a reverse rule of its own gives the primals and gradients of impl, whatever is '
    'required',
    'L15': 'batches of size zero, NaN and infinity neither crash nor change shapes',
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One ``law`` on one ``case`` of an ``op``. ``status``: ``'pass'``, ``'fail'``, ``'missing'``,
    ``'not_applicable'`` or ``'not_tested'``; ``worst``: the largest deviation, None if the law
    compares none; ``tolerance``: the largest that passes.

    >>> from braintrace import kit
    >>> print(kit.check('etp_elemwise').rows[0])
    etp_elemwise L0 pass: float64[3, 2]
    """

    op: str
    law: str
    status: str
    worst: float | None = None
    tolerance: float | None = None
    case: str = ''

    def __str__(self) -> str:
        size = ''
        if self.status == 'fail' and self.worst is not None:
            bound = '' if self.tolerance is None else f' > {self.tolerance:g}'
            size = f' {self.worst:.2g}{bound}'
        return f'{self.op} {self.law} {self.status}{size}: {self.case}'

    def as_json(self) -> dict:
        """Plain numbers and strings; a deviation without bound is the string ``'inf'``."""
        finite = self.worst is None or math.isfinite(self.worst)
        return {**dataclasses.asdict(self), 'worst': self.worst if finite else 'inf'}


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """The rows of a check.

    >>> import jax, jax.numpy as jnp, braintrace
    >>> from braintrace import kit
    >>> shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3), (3, 4))]
    >>> report = kit.check(braintrace.matmul, cases=[(shapes, {})])
    >>> report.ok, report.status('L3'), report.status('L10')
    (True, 'pass', 'not_applicable')
    >>> report.require('L3', 'L9')
    """

    rows: tuple[Row, ...]

    def of(self, status: str) -> list[Row]:
        """The rows with this status."""
        return [row for row in self.rows if row.status == status]

    def status(self, law: str) -> str:
        """The gravest status of a law over all cases, ``not_tested`` if it has no row."""
        return next(
            (s for s in STATUSES if any(row.law == law and row.status == s for row in self.rows)),
            'not_tested',
        )

    @property
    def ok(self) -> bool:
        """Whether nothing fails and nothing is missing."""
        return not self.of('fail') and not self.of('missing')

    def require(self, *laws: str) -> None:
        """Raise ``AssertionError`` with the rows of these laws (default: all) that are ``fail`` or
        ``missing``.

        In a test suite, use ``@pytest.mark.parametrize('law', kit.LAWS)`` and a fixture that holds
        the report.
        """
        bad = [
            row
            for row in self.rows
            if row.status in ('fail', 'missing') and (not laws or row.law in laws)
        ]
        if bad:
            raise AssertionError('\n'.join([f'{len(bad)} rows do not conform:', *map(str, bad)]))

    def __str__(self) -> str:
        lines = []
        for op, report in by_op(self).items():
            # A law counts once, with the status of its gravest row.
            found = Counter(map(report.status, {row.law for row in report.rows}))
            order = (*STATUSES[3:], *STATUSES[:3])
            lines.append(f'{op}: ' + ', '.join(f'{found[s]} {s}' for s in order if found[s]))
        return '\n'.join([*lines, *(str(row) for s in STATUSES[:3] for row in self.of(s))])

    def to_json(self) -> str:
        """The report as JSON: the number of ``ops``, the ``rows``, and as text the rows that are
        ``fail``, ``missing`` or ``not_tested``.
        """
        return json.dumps(
            {
                'ops': len({row.op for row in self.rows}),
                'rows': [row.as_json() for row in self.rows],
                **{s: list(map(str, self.of(s))) for s in STATUSES[:3]},
            }
        )


def by_op(report: ConformanceReport) -> dict[str, ConformanceReport]:
    """The report of each op."""
    names = dict.fromkeys(row.op for row in report.rows)
    return {
        name: ConformanceReport(tuple(row for row in report.rows if row.op == name))
        for name in names
    }
