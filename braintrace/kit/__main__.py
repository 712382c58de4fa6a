"""``python -m braintrace.kit check | describe``: exit code 0 if all is well, 1 if a law fails, 2 if
something is missing, 3 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from ..errors import OptionError
from ._cases import registered
from ._check import check, describe
from ._registry import registry_report
from ._report import ConformanceReport

PASS, FAIL, MISSING, USAGE = range(4)


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage with its own exit code."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f'{self.prog}: {message}\n')


def parser() -> Parser:
    """The commands and their options."""
    root = Parser(
        prog='python -m braintrace.kit',
        description='Check ETP primitives against the laws of their rules, or list them.',
    )
    root.add_argument('--version', action='version', version=f'braintrace {__version__}')
    commands = root.add_subparsers(dest='command', parser_class=Parser)
    checking = commands.add_parser('check', help='try every law')
    checking.add_argument('names', nargs='*', metavar='NAME', help='registered primitives')
    checking.add_argument('--all', action='store_true', help='every registered primitive')
    checking.add_argument(
        '--platform', action='append', help='where, such as gpu; may be given again (default: cpu)'
    )
    checking.add_argument(
        '--results',
        metavar='FILE',
        help='what the tests of a run have shown (pytest --etp-results), instead of a check',
    )
    listing = commands.add_parser('describe', help='list primitives and their rules')
    listing.add_argument(
        'name', nargs='?', metavar='NAME', help='a registered primitive (default: all)'
    )
    for command in (checking, listing):
        command.add_argument(
            '--import',
            action='append',
            default=[],
            dest='modules',
            metavar='MODULE',
            help='a module that registers primitives; may be given again',
        )
        command.add_argument('--json', action='store_true', help='JSON instead of text')
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        options = parser().parse_args(argv)
        if options.command is None:  # no pass, for a script whose word is empty
            parser().print_help(sys.stderr)
            return USAGE
        if options.command == 'check' and bool(options.names) == options.all:
            parser().error('check takes NAMES or --all')
        files = [module for module in options.modules if module.endswith('.py')]
        if files:
            parser().error(
                f'--import takes the name of a module: {files[0].removesuffix(".py")}, with its '
                'folder on PYTHONPATH'
            )
        for module in options.modules:
            _import(module)
        if options.command == 'check':
            return _check(options)
        _show(describe(options.name, 'json' if options.json else 'md'))
        return PASS
    except SystemExit as finished:
        return int(finished.code or PASS)
    except KeyboardInterrupt:
        return 130
    except OptionError as error:
        print(f'python -m braintrace.kit: {error}', file=sys.stderr)
        return USAGE


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # the module may raise anything, which is no failure of a law
        raise OptionError(f'--import {module}: {type(error).__name__}: {error}') from error


def _check(options: argparse.Namespace) -> int:
    names = list(registered()) if options.all else options.names
    if options.results is None:
        reports = [check(name, platforms=options.platform or ('cpu',)) for name in names]
    else:
        reports = [
            registry_report(options.results, name) for name in ([None] if options.all else names)
        ]
    report = ConformanceReport(tuple(row for one in reports for row in one.rows))
    _show(report.to_json() if options.json else str(report))
    return FAIL if report.of('fail') else MISSING if report.of('missing') else PASS


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == '__main__':
    sys.exit(main())
