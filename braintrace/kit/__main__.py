"""``python -m braintrace.kit check | describe``: exit code 0 where all is well, 1 a law fails, 2 something is missing, 3 usage."""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import OptionError
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
    root = Parser(prog='python -m braintrace.kit', description='Check ETP primitives against the laws of their rules, or list them.')
    commands = root.add_subparsers(dest='command', required=True, parser_class=Parser)
    checking = commands.add_parser('check', help='try every law')
    checking.add_argument('name', nargs='?', metavar='NAME', help='a registered primitive')
    checking.add_argument('--all', action='store_true', help='every registered primitive')
    checking.add_argument('--platform', action='append', help='where, such as gpu; may be given again (default: cpu)')
    checking.add_argument('--results', metavar='FILE', help='what the tests of a run have shown (pytest --etp-results), instead of a check')
    listing = commands.add_parser('describe', help='list primitives and their rules')
    listing.add_argument('name', nargs='?', metavar='NAME', help='a registered primitive (default: all)')
    for command in (checking, listing):
        command.add_argument('--import', action='append', default=[], dest='modules', metavar='MODULE',
                             help='a module that registers primitives; may be given again')
        command.add_argument('--json', action='store_true', help='JSON instead of text')
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        options = parser().parse_args(argv)
        if options.command == 'check' and bool(options.name) == options.all:
            parser().error('check takes a NAME or --all')
        for module in options.modules:
            importlib.import_module(module)
        return _check(options) if options.command == 'check' else _describe(options)
    except SystemExit as finished:
        return int(finished.code or PASS)
    except (ImportError, OptionError) as error:
        print(f'python -m braintrace.kit: {error}', file=sys.stderr)
        return USAGE


def _check(options: argparse.Namespace) -> int:
    if options.results is not None:
        report = registry_report(options.results, options.name)
    else:
        names = list(registered()) if options.all else [options.name]
        report = ConformanceReport(tuple(row for name in names for row in check(name, platforms=options.platform or ('cpu',)).rows))
    print(report.to_json() if options.json else report)
    return FAIL if report.of('fail') else MISSING if report.of('missing') else PASS


def _describe(options: argparse.Namespace) -> int:
    print(describe(options.name, 'json' if options.json else 'md'))
    return PASS


if __name__ == '__main__':
    sys.exit(main())
