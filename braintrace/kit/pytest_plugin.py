"""A pytest plugin for suites that test ETP primitives: ``pytest -p braintrace.kit.pytest_plugin
[--etp-results FILE]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .._etrace_op import RULE_SLOTS
from ._check import check
from ._report import LAWS, ConformanceReport, by_op

STATUS = {'passed': 'pass', 'failed': 'fail', 'skipped': 'not_tested'}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--etp-results FILE``."""
    parser.getgroup('braintrace').addoption(
        '--etp-results',
        metavar='FILE',
        help='write which rules and laws of ETP primitives the tests of this run have shown',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker, and the recorder in the process that hears of every test."""
    config.addinivalue_line(
        'markers',
        'etp(op, rule=None, law=None): the test shows a rule or a law of the primitive of this '
        'name',
    )
    path = config.getoption('--etp-results')
    if path and not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Recorder(Path(path)), 'etp-results')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the marks of a test travel with its reports."""
    for item in items:
        item.user_properties += [
            ('etp', _entry(item, *mark.args, **mark.kwargs)) for mark in item.iter_markers('etp')
        ]


def _entry(
    item: pytest.Item, op: str | None = None, rule: str | None = None, law: str | None = None
) -> dict[str, str | None]:
    if not isinstance(op, str) or rule not in (None, *RULE_SLOTS) or law not in (None, *LAWS):
        raise pytest.UsageError(
            f'{item.nodeid}: pytest.mark.etp({op!r}, rule={rule!r}, law={law!r}); expected the '
            f'name of a primitive, a rule among {", ".join(RULE_SLOTS)}, a law among L0 to '
            f'L{len(LAWS) - 1}.'
        )
    return {'op': op, 'rule': rule, 'law': law}


@pytest.fixture
def etp_conformance(request: pytest.FixtureRequest) -> Callable[..., ConformanceReport]:
    """``etp_conformance(op, cases=None, **options)`` runs ``kit.check`` and records the result with
    the test, which fails if a law does.

    In a test suite::

        def test_gain(etp_conformance):
            etp_conformance(gain)
    """

    def conformance(op: Any, cases: Any = None, **options: Any) -> ConformanceReport:
        report = check(op, cases, **options)
        for name, rows in by_op(report).items():
            request.node.user_properties += [
                ('etp', {'op': name, 'rule': None, 'law': law, 'status': rows.status(law)})
                for law in LAWS
            ]
        report.require()
        return report

    return conformance


class Recorder:
    """Records which rules and laws the tests showed, also the tests of other processes."""

    def __init__(self, path: Path):
        if not path.parent.is_dir():
            raise pytest.UsageError(f'--etp-results {path}: there is no folder {path.parent}.')
        self.path, self.entries = path, []
        self.path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the call of a test, and its setup and teardown if they go wrong."""
        if report.when != 'call' and report.passed:
            return
        outcome = 'not_tested' if hasattr(report, 'wasxfail') else STATUS[report.outcome]
        for key, entry in report.user_properties:
            if key == 'etp' and isinstance(entry, dict):
                self.entries.append(
                    {**entry, 'test': report.nodeid, 'status': entry.get('status', outcome)}
                )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file if the tests ran."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.path.write_text(json.dumps({'tests': self.entries}, indent=1))
