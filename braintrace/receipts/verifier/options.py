"""The commands and options of the command line; wrong usage gets a suggestion."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from .checks import CEILINGS
from .golden import GOLDEN_CELLS, SHIPPED
from .rules import RULES
from .schema import FRAMEWORKS

__all__ = ['EXAMPLES', 'PROGRAM', 'Usage', 'parsed']

PROGRAM = f'python -m {(__package__ or "verifier").removesuffix(".verifier")}'
EXAMPLES = {'pytorch': 'torch_eprop.py', 'jax': 'jax_online.py'}
ALLOWED = ('tf32', 'bf16')
EPILOG = """exit codes: 0 it passes, 1 it fails, 2 it cannot be read, is malformed or too large,
3 wrong usage, 4 no adapter for the format"""


class Usage(Exception):
    """Wrong usage: what is wrong; ``hint`` is the nearest thing that is right."""

    hint = ''


class Parser(argparse.ArgumentParser):
    """A parser that raises, and takes no option by its beginning."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise Usage(message)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line. Raises ``Usage``."""
    root, commands = _parsers()
    try:
        return root.parse_args(argv)
    except Usage as error:
        error.hint = _nearest(argv, commands)
        raise


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    root = Parser(
        prog=PROGRAM,
        description='Check recorded training steps: every number of a receipt is derived again.',
        epilog=EPILOG,
    )
    children = root.add_subparsers(
        dest='command', required=True, metavar='COMMAND', parser_class=Parser
    )
    commands = {}
    for name, (text, add) in _COMMANDS.items():
        commands[name] = children.add_parser(name, help=text, description=text, epilog=EPILOG)
        add(commands[name])
    return root, commands


def _verify(command: Parser) -> None:
    command.add_argument('file', metavar='FILE', help='receipts, one on each line; - for stdin')
    command.add_argument(
        '--run',
        action='store_true',
        help='check what lies between the records too; several lines are always taken as a run',
    )
    command.add_argument('--json', action='store_true', help='JSON on stdout instead of a table')
    command.add_argument(
        '--strict',
        action='store_true',
        help='what leaves a doubt fails too: ties, samples, wide bounds, gaps, a cut run',
    )
    command.add_argument(
        '--accept',
        choices=['consistent'],
        help='pass also where all numbers agree and the engine cannot derive the step',
    )
    command.add_argument(
        '--allow',
        type=_allowed,
        default=(),
        metavar='tf32,bf16',
        help='admit products, and traces, of these precisions',
    )
    command.add_argument(
        '--level',
        choices=list(CEILINGS),
        default='observer',
        help='how far a number may be off: 64 roundings (default), or 8 for receipts of an engine',
    )
    command.add_argument(
        '--key',
        metavar='FILE',
        help='the key of the signatures: the bytes of the file, all of them',
    )


def _import(command: Parser) -> None:
    command.add_argument('framework', help=', '.join(FRAMEWORKS))
    command.add_argument('file', metavar='SIDECAR', help='sidecars, one a line; - for stdin')
    command.add_argument('--out', metavar='FILE', help='where the receipts go (default: stdout)')


def _generate(command: Parser) -> None:
    command.add_argument('cell', choices=GOLDEN_CELLS)
    command.add_argument('--steps', type=_from(1), default=20, metavar='N', help='default: 20')
    command.add_argument('--seed', type=_from(0), default=0, metavar='S', help='default: 0')
    command.add_argument(
        '--check',
        action='store_true',
        help=f'compare the bytes with those shipped: the first {SHIPPED} steps of seed 0',
    )


def _rules(command: Parser) -> None:
    command.add_argument('--json', action='store_true', help='JSON instead of a table')


def _explain(command: Parser) -> None:
    command.add_argument('rule', type=_rule, metavar='N', help=f'0 to {max(RULES)}')


def _diff(command: Parser) -> None:
    command.add_argument('a', metavar='A', help='receipts, one on each line')
    command.add_argument('b', metavar='B', help='receipts, one on each line')


def _examples(command: Parser) -> None:
    command.add_argument('framework', choices=list(EXAMPLES))
    command.add_argument('--print', action='store_true', help='its source, instead of its place')


_COMMANDS = {
    'verify': ('Verify a receipt, or a run of them.', _verify),
    'import': ("Make receipts of another framework's sidecars, and verify them.", _import),
    'generate': ('Write a run that the engine makes.', _generate),
    'rules': ('List the rules.', _rules),
    'explain': ('Explain a rule.', _explain),
    'diff': ('List where two files of receipts differ, worst first; equal files pass.', _diff),
    'examples': ('Show an observer of one file, to copy into a project.', _examples),
}


def _allowed(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(',') if name)
    unknown = [name for name in names if name not in ALLOWED]
    if unknown:
        raise argparse.ArgumentTypeError(f'{unknown[0]!r}; choose of {", ".join(ALLOWED)}')
    return names


def _from(least: int):
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) < 10**6:
            raise argparse.ArgumentTypeError(f'{text!r} is no number from {least} on')
        return int(text[:9])

    return number


def _rule(text: str) -> int:
    number = text.upper().removeprefix('R')
    if not number.isascii() or not number.isdigit() or int(number[:9]) not in RULES:
        raise argparse.ArgumentTypeError(f'{text!r} is no rule; they are 0 to {max(RULES)}')
    return int(number)


def _nearest(argv: Sequence[str], commands: dict[str, Parser]) -> str:
    """The known word that is nearest to an unknown one."""
    own = [commands[word] for word in argv[:1] if word in commands]
    actions = [action for parser in own for action in parser._actions]
    options = [name for action in actions for name in action.option_strings]
    choices = [str(name) for action in actions for name in action.choices or ()]
    words = [*choices, *ALLOWED, *EXAMPLES] if own else list(commands)
    for known, asked in (
        (options or ['--help'], [word.partition('=')[0] for word in argv if word[:1] == '-']),
        (words, [part for word in argv if word[:1] != '-' for part in word.split(',')]),
    ):
        for word in asked:
            found = difflib.get_close_matches(word, known, 1)
            if found and word not in known and word not in commands:
                return f'did you mean {found[0]}?'
    return f'{PROGRAM} {argv[0] + " " if own else ""}--help lists what there is'
