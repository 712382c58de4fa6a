"""``braintrace-receipts``: exit code 0 if it passes, 1 if it fails, 2 for what cannot be read or is
malformed, 3 for wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from ._version import __version__
from .canonical import each_line, parse
from .checks import CEILINGS
from .errors import MAX_LINE, MAX_RUN, ReceiptError
from .files import resolve_files
from .printing import Page, counted, plain
from .reconciler import Result, reconcile, reconcile_run
from .rules import RULES

PROGRAM = 'braintrace-receipts'
PASS, FAIL, BROKEN, USAGE = range(4)
EPILOG = """exit codes: 0 it passes, 1 it fails, 2 it cannot be read, is malformed or too large,
3 wrong usage"""
ALLOWED = ('tf32', 'bf16')
CONFIGURATION = 'this is a configuration: `derive` makes a receipt of it'


class Usage(Exception):
    """Wrong usage."""


class Parser(argparse.ArgumentParser):
    """A parser that raises, and takes no option by its beginning."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, epilog=EPILOG, **settings)

    def error(self, message: str) -> NoReturn:
        raise Usage(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    said: tuple[int, str, str, str]
    try:
        options = parser().parse_args(words)
        return options.run(options)
    except SystemExit as finished:  # after --help and --version
        return int(finished.code or PASS)
    except KeyboardInterrupt:
        return 130
    except Usage as error:
        said = USAGE, 'usage', str(error), _nearest(words)
    except ReceiptError as error:
        said = BROKEN, error.code, str(error), error.hint
    except OSError as error:
        said = BROKEN, 'io', f'{error.filename or "stdin"}: {error.strerror or error}', ''
    except Exception as error:  # a command ends with a sentence, whatever happened
        said = BROKEN, 'internal', f'{type(error).__name__}: {error}'[:300], ''
    return _told(*said, as_json='--json' in words)


def _told(exit_code: int, code: str, message: str, hint: str, *, as_json: bool) -> int:
    """An error on stderr, and as JSON on stdout where that was asked for."""
    if as_json:
        error = {'code': code, 'message': message, 'hint': hint, 'retryable': code == 'io'}
        _write(json.dumps({'ok': False, 'error': error}) + '\n')
    lines = [f'{PROGRAM}: {plain(message)}', *([f'  {plain(hint)}'] if hint else [])]
    _write('\n'.join(lines) + '\n', sys.stderr)
    return exit_code


def _write(text: str | bytes, stream: Any = None) -> None:
    """Text to a stream, stdout by default; a reader such as `head` may leave."""
    stream = sys.stdout if stream is None else stream
    raw = text if isinstance(text, bytes) else text.encode('utf-8', 'replace')
    try:
        stream.flush()
        if hasattr(stream, 'buffer'):
            stream.buffer.write(raw)
            stream.buffer.flush()
        else:  # a stream of text alone, as a notebook's
            stream.write(raw.decode('utf-8'))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# the commands and their options -------------------------------------------------------------------


def parser() -> Parser:
    """The parser of the command line."""
    about = 'Check recorded training steps: every number of a receipt is derived again.'
    root = Parser(prog=PROGRAM, description=about)
    root.add_argument('--version', action='version', version=f'{PROGRAM} {__version__}')
    root.set_defaults(run=_help)
    commands = root.add_subparsers(dest='command', metavar='COMMAND', parser_class=Parser)

    def command(name: str, run: Any, text: str) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made.add_argument

    add = command('verify', _verify, 'Verify a receipt, or a run of them.')
    add('file', metavar='FILE', help='receipts, one on each line; - for stdin')
    run = 'check what lies between the records too; several lines are always taken as a run'
    add('--run', action='store_true', dest='whole', help=run)
    add('--json', action='store_true', help='JSON on stdout instead of a table')
    strict = (
        'what leaves a doubt fails too: ties, samples, wide bounds, gaps, a cut run, odd updates'
    )
    add('--strict', action='store_true', help=strict)
    accept = 'pass also where all numbers agree and the engine cannot derive the step'
    add('--accept', choices=['consistent'], help=accept)
    allow = 'admit products, and traces, of these precisions'
    add('--allow', type=_allowed, default=(), metavar='tf32,bf16', help=allow)
    level = 'how far a number may be off: 64 roundings (default), or 8 for receipts of an engine'
    add('--level', choices=list(CEILINGS), default='observer', help=level)
    key = (
        'the key of the signatures, the bytes of the file, all of them: each record of a run has '
        'to be signed with its root digest, and the last one as the end'
    )
    add('--key', metavar='FILE', help=key)

    add = command('rules', _rules, 'List the rules, or explain one.')
    add('rule', type=_rule, nargs='?', metavar='N', help=f'the rule to explain, 0 to {max(RULES)}')
    add('--json', action='store_true', help='JSON instead of a table')
    return root


def _help(options: Namespace) -> int:
    """What a bare call gets; no pass, for a script whose word is empty."""
    _write(parser().format_help(), sys.stderr)
    return USAGE


def _allowed(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(',') if name)
    unknown = [name for name in names if name not in ALLOWED]
    if unknown:
        raise argparse.ArgumentTypeError(f'{unknown[0]!r}; choose of {", ".join(ALLOWED)}')
    return names


def _rule(text: str) -> int:
    number = text.upper().removeprefix('R')
    if not number.isascii() or not number.isdigit() or int(number[:9]) not in RULES:
        raise argparse.ArgumentTypeError(f'{text!r} is no rule; they are 0 to {max(RULES)}')
    return int(number)


def _nearest(argv: Sequence[str]) -> str:
    """The known word that is nearest to an unknown one."""
    root = parser()
    commands = next(dict(a.choices or {}) for a in root._actions if a.dest == 'command')
    own = [commands[word] for word in argv[:1] if word in commands]
    actions = [action for parser in own for action in parser._actions]
    options = [name for action in (actions or root._actions) for name in action.option_strings]
    choices = [str(name) for action in actions for name in action.choices or ()]
    words = [*choices, *ALLOWED] if own else list(commands)
    for known, asked in (
        (options, [word.partition('=')[0] for word in argv if word[:1] == '-']),
        (words, [part for word in argv if word[:1] != '-' for part in word.split(',')]),
    ):
        for word in asked:
            found = difflib.get_close_matches(word, known, 1)
            if found and word not in known and word not in commands:
                return f'did you mean {found[0]}?'
    return f'{PROGRAM} {argv[0] + " " if own else ""}--help lists what there is'


# verify -------------------------------------------------------------------------------------------


def _lines(name: str) -> Iterator[bytes]:
    """The lines of a file or of stdin; of one that is too long, pieces that are too long too."""
    size = 0
    with ExitStack() as stack:
        stream = sys.stdin.buffer if name == '-' else stack.enter_context(open(name, 'rb'))
        while line := stream.readline(MAX_LINE + 2):
            size += len(line)
            if size > MAX_RUN:
                raise ReceiptError(
                    'too-large', name, f'more than {MAX_RUN:,} bytes', 'split the run'
                )
            yield line


def _values(name: str) -> Iterator:
    """The values of a file, one for each line, with the arrays of npz files."""
    folder, seen = Path.cwd() if name == '-' else Path(name).parent, set[tuple[str, str]]()

    def value(line: bytes) -> Any:
        found = parse(line)
        return resolve_files(found, folder, seen) if b'"file"' in line else found

    return each_line(_lines(name), value)


def _held(values: Iterator, errors: list) -> Iterator:
    """Values up to an error, which is kept: the reconciler would take it for a fault of its own."""
    try:
        yield from values
    except (ReceiptError, OSError) as error:
        errors.append(error)


def _verify(options: Namespace) -> int:
    key = Path(options.key).read_bytes() if options.key else None
    settings: dict = {'level': options.level, 'allow': options.allow, 'key': key}
    errors: list[Exception] = []
    values = _held(_values(options.file), errors)
    head = list(islice(values, 2))
    if errors:
        raise errors[0]
    if options.whole or len(head) > 1:
        result = reconcile_run(chain(head, values), **settings)
    else:
        result = reconcile(head[0], **settings)
    if result.verdict == 'malformed':
        raise _malformed(result, head[0])
    if errors:
        raise errors[0]
    refused = [] if not options.strict else list(result.doubts)
    if result.verdict == 'consistent' and options.accept != 'consistent':
        refused.insert(0, 'consistent, without --accept consistent')
    passed = result.ok and not refused
    if options.json:
        _write(_json({**asdict(result), 'ok': passed, 'refused': refused}))
    else:
        _write(Page(sys.stdout).verdict(result, passed, refused))
    return PASS if passed else FAIL


def _malformed(result: Result, value: Any) -> ReceiptError:
    first = result.failures[0]
    said = first.hint or f'{first.stored}, where this is due: {first.recomputed}'
    more = len(result.failures) - 1
    hint = f'and {counted(more, "problem")} more' if more else ''
    if isinstance(value, dict) and value.get('schema') == 'braintrace.config/1':
        hint = CONFIGURATION
    return ReceiptError('malformed', first.path, f'{said:.500}', hint)


def _json(value: Any) -> str:
    return json.dumps(_finite(value), default=str, allow_nan=False) + '\n'


def _finite(value: Any) -> Any:
    """JSON has no word for a number that is not finite: its name as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


# rules --------------------------------------------------------------------------------------------


def _rules(options: Namespace) -> int:
    chosen = list(RULES.values()) if options.rule is None else [RULES[options.rule]]
    page = Page(sys.stdout)
    if options.json:
        _write(json.dumps([rule._asdict() for rule in chosen], indent=1) + '\n')
    else:
        _write(page.rules() if options.rule is None else page.explained(chosen[0]))
    return PASS
