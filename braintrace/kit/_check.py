"""Checking an op against the laws of trace rules, and describing what is registered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import ETP_PRIMITIVES, REQUIRED_SLOTS, RULE_SLOTS, ETPPrimitive
from ..errors import OptionError, RuleContractError
from ._application import Application
from ._cases import Case, cases_of, subject
from ._contract import contract_findings
from ._evaluate import Finding, evaluate
from ._laws import NUMERICAL
from ._own_rules import platform_parts
from ._report import LAWS, STATUSES, ConformanceReport, Row

LEARNED = ('D_RTRL and BPTT', 'D_RTRL and BPTT, y broadcast', 'ES_D_RTRL and BPTT at one step')
DOUBLE = {'default': 1e-12, 'jvp and finite differences': 1e-6, **dict.fromkeys(LEARNED, 1e-10)}
SINGLE = {'default': 1e-4, 'jvp and finite differences': 5e-2, **dict.fromkeys(LEARNED, 1e-3)}

PLATFORMS = ('cpu', 'gpu', 'cuda', 'rocm', 'tpu')


def check(
    op: Any,
    cases: Sequence | None = None,
    platforms: Sequence[str] = ('cpu',),
    x64: bool = True,
    seed: int = 0,
) -> ConformanceReport:
    """Try every law (``kit.LAWS``) on an op, and report a row for each law and case.

    ``op``: an ``EtpOp``, an ``ETPPrimitive``, a function that binds one, or a registered name.
    ``cases``: pairs ``(operands, params)``; an operand is anything with shape and dtype, ``params``
    are keyword arguments and may hold arrays. By default the cases of the op's spec or of the
    library. Values are drawn from ``seed``, normally distributed, in float64 where ``x64`` is set
    (give False for an op that computes in single precision inside). ``platforms`` to run on, such
    as ``('cpu', 'gpu')``.

    A rule that raises gives a row that fails. Raises ``OptionError`` for an op or a case of another
    kind, and for a function that binds no primitive.

    >>> from braintrace import kit
    >>> print(kit.check('etp_elemwise'))
    etp_elemwise: 12 pass, 4 not_applicable
    """
    name, op = subject(op)
    found = cases_of(op, cases)
    if not found:
        none = Row(name, 'L0', 'missing', case='no cases: give `cases`, or the spec some')
        return ConformanceReport((none,))
    unknown = [p for p in platforms if p not in PLATFORMS and _device(p) is None]
    if unknown:
        raise OptionError(
            f'check: platforms is {platforms!r}, and JAX knows no {", ".join(map(repr, unknown))}; '
            f'give some of {PLATFORMS}.'
        )
    rows: list[Row] = []
    with jax.enable_x64(x64):
        for platform in platforms:
            device = _device(platform)
            if device is None:
                absent = f'no {platform} device here'
                rows += [Row(name, law, 'not_tested', case=absent) for law in LAWS]
                continue
            with jax.default_device(device):
                for case in found:
                    rows += _of_case(name, op, case.wide(x64), platform, x64, seed)
    return ConformanceReport(tuple(rows))


def _device(platform: str) -> Any:
    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        return None


def _of_case(name: str, op: Any, case: Case, platform: str, x64: bool, seed: int) -> list[Row]:
    where = str(case) + ('' if platform == 'cpu' else f' on {platform}')
    try:
        asked = [
            app
            for app in case.applications()
            if not isinstance(op, ETPPrimitive) or app.primitive is op
        ]
        results = [_of_application(app, case, platform, x64, seed) for app in asked]
    except Exception as error:  # the op's code may raise anything; every failure becomes a row
        broken = 'L0' if isinstance(error, RuleContractError) else 'L1'
        failed = Row(name, broken, 'fail', case=f'{where}: {type(error).__name__}: {error}')
        others = {law: Row(name, law, 'not_tested', case=where) for law in LAWS}
        return list((others | {broken: failed}).values())
    if not asked:
        raise OptionError(f'check: {name} binds no ETP primitive on {where}.')
    return [
        _row(name, law, [f for f in findings if f.law == law], where)
        for findings in results
        for law in LAWS
    ]


def _of_application(
    app: Application, case: Case, platform: str, x64: bool, seed: int
) -> list[Finding]:
    draw = app.draw(seed)
    own = [part for name in _tables(platform) for part in platform_parts(name, app.primitive)]
    return [
        *contract_findings(app, draw, case, x64),
        *evaluate(app, [*NUMERICAL, *own], draw, DOUBLE if x64 else SINGLE),
    ]


def _tables(platform: str) -> list[str]:
    """The names that a primitive's tables use for this platform of JAX."""
    return [name for name in ('cuda', 'rocm') if _device(name)] if platform == 'gpu' else [platform]


def _row(name: str, law: str, findings: Sequence[Finding], where: str) -> Row:
    """The row of one law: its gravest finding. ``not_applicable`` counts if every part is."""
    status = min((f.status for f in findings), key=STATUSES.index)
    own = [f for f in findings if f.status == status]
    largest = max(
        own, key=lambda f: -1 if f.worst is None or f.tolerance is None else f.worst / f.tolerance
    )
    texts = '; '.join(dict.fromkeys(f.text for f in own if f.text))
    return Row(
        name, law, status, largest.worst, largest.tolerance, f'{where}: {texts}' if texts else where
    )


def assert_conformant(op: Any, cases: Sequence | None = None, **options: Any) -> None:
    """Raise ``AssertionError`` with every row of :func:`check` that is ``fail`` or ``missing``.

    Arguments, ``op`` and ``cases`` among them, and errors are those of :func:`check`.

    >>> from braintrace import kit
    >>> kit.assert_conformant('etp_elemwise')
    """
    check(op, cases, **options).require()


def describe(op: Any = None, fmt: str = 'md') -> str:
    """List the registered primitives, or one op's, with their rules: by ``fmt`` as a table
    (``'md'``) or as ``'json'``.

    Raises ``OptionError`` for another ``fmt``, or if ``op`` is no primitive.

    >>> from braintrace import kit
    >>> print(kit.describe('etp_elemwise'))
    | op | batched | gradient_enabled | x | trainables | rules | missing |
    |---|---|---|---|---|---|---|
    | etp_elemwise | no | yes | - | weight | yw_to_w, xy_to_dw, init_drtrl, init_pp | - |
    """
    if fmt not in ('md', 'json'):
        raise OptionError(f"describe: fmt is {fmt!r}; choose 'md' or 'json'.")
    rows = [_described(primitive) for primitive in _primitives(op)]
    if fmt == 'json':
        return json.dumps(rows)
    columns = ('op', 'batched', 'gradient_enabled', 'x', 'trainables', 'rules', 'missing')
    lines = [
        f'| {" | ".join(cells)} |'
        for cells in (columns, *([_cell(row[column]) for column in columns] for row in rows))
    ]
    return '\n'.join([lines[0], '|---' * len(columns) + '|', *lines[1:]])


def _primitives(op: Any) -> list[ETPPrimitive]:
    if op is None:
        return sorted(ETP_PRIMITIVES, key=lambda primitive: primitive.name)
    name, found = subject(op)
    forms = list(getattr(found, 'forms', [found]))
    if not all(isinstance(form, ETPPrimitive) for form in forms):
        raise OptionError(
            f'describe: {name} is no ETP primitive; give an EtpOp, an ETPPrimitive or a registered '
            'name.'
        )
    return forms


def _described(primitive: ETPPrimitive) -> dict[str, Any]:
    try:
        trainables = list(primitive.trainable_invars({}))
    except Exception:  # a user's layout may need static parameters, and fail in any way without
        trainables = []
    present = [slot for slot in RULE_SLOTS if primitive.optional_rule(slot) is not None]
    return {
        'op': primitive.name,
        'batched': primitive.batched,
        'gradient_enabled': primitive.gradient_enabled,
        'x': primitive.x_invar_index,
        'trainables': trainables,
        'rules': present,
        'missing': [slot for slot in REQUIRED_SLOTS if slot not in present],
    }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    if isinstance(value, list):
        return ', '.join(value) or '-'
    return '-' if value is None else str(value)


def single_key(rule: Callable, key: str = 'weight') -> Callable:
    """Wrap a rule of bare arrays, for an op with one trainable, into a rule of dicts ``{key:
    array}``.

    ``init_pp`` returns one array in either form and needs no wrapping. The wrapped rule raises
    ``RuleContractError`` for a dict with other keys.

    >>> from braintrace import kit
    >>> kit.single_key(lambda d, trace: d * trace)(2., {'weight': 3.})
    {'weight': Array(6., dtype=float32, weak_type=True)}
    """

    @wraps(rule)
    def in_dicts(*args: Any, **params: Any) -> dict[str, Any]:
        return {key: jnp.asarray(rule(*map(bare, args), **params))}

    def bare(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if set(value) != {key}:
            raise RuleContractError(
                f'single_key: the rule is for one trainable called {key!r}, found {sorted(value)}; '
                'write it in dicts.'
            )
        return value[key]

    return in_dicts
