"""``python -m braintrace.receipts``: exit code 0 if it passes, 1 if it fails, 2 for what cannot be
read or is malformed, 3 for wrong usage, 4 if there is no adapter for the format.
"""

from __future__ import annotations

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
from typing import Any

from .canonical import each_line, emit, parse
from .differences import differences
from .errors import MAX_LINE, MAX_RUN, ReceiptError
from .files import resolve_files
from .golden import SHIPPED, foreign_functions, generate, golden_file
from .options import EXAMPLES, PROGRAM, Usage, parsed
from .printing import Page, counted, plain
from .reconciler import Result, reconcile, reconcile_run
from .rules import RULES
from .schema import FRAMEWORKS
from .sidecar import FORMAT, import_run, import_sidecar

__all__ = ['main']

PASS, FAIL, BROKEN, USAGE, NO_ADAPTER = range(5)
OTHERS = {
    FORMAT: f'this is a sidecar: make a receipt of it by `{PROGRAM} import`',
    'braintrace.config/1': 'this is a configuration: `derive` makes a receipt of it',
}


class NoAdapter(Exception):
    """A format that none of the importers reads; the second argument is a hint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    said: tuple[int, str, str, str]
    try:
        options = parsed(words)
        return _COMMANDS[options.command](options)
    except SystemExit as finished:  # after --help
        return int(finished.code or PASS)
    except KeyboardInterrupt:
        return 130
    except Usage as error:
        said = USAGE, 'usage', str(error), error.hint
    except NoAdapter as error:
        said = NO_ADAPTER, 'no-adapter', *error.args
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


# verify -------------------------------------------------------------------------------------------


def _verify(options: Namespace) -> int:
    key = Path(options.key).read_bytes() if options.key else None
    settings: dict = {'level': options.level, 'allow': options.allow, 'key': key}
    errors: list[Exception] = []
    values = _held(_values(options.file), errors)
    head = list(islice(values, 2))
    if errors:
        raise errors[0]
    if options.run or len(head) > 1:
        result = reconcile_run(chain(head, values), **settings)
    else:
        result = reconcile(head[0], **settings)
    if result.verdict == 'malformed':
        raise _malformed(result, head[0])
    if errors:
        raise errors[0]
    refused = _refused(result, options)
    passed = result.ok and not refused
    if options.json:
        _write(_json(_object(result, passed, refused)))
    else:
        _write(Page(sys.stdout).verdict(result, passed, refused))
    return PASS if passed else FAIL


def _refused(result: Result, options: Namespace) -> list[str]:
    """Why a result that holds does not pass."""
    found = []
    if result.verdict == 'consistent' and options.accept != 'consistent':
        found.append('consistent, without --accept consistent')
    return [*found, *(result.doubts if options.strict else ())]


def _malformed(result: Result, value: Any) -> ReceiptError:
    first = result.failures[0]
    said = first.hint or f'{first.stored}, where this is due: {first.recomputed}'
    more = len(result.failures) - 1
    other = value.get('schema') if isinstance(value, dict) else None
    hint = OTHERS.get(other, '') if isinstance(other, str) else ''
    hint = hint or (f'and {counted(more, "problem")} more' if more else '')
    return ReceiptError('malformed', first.path, f'{said:.500}', hint)


def _object(result: Result, passed: bool, refused: Sequence[str]) -> dict:
    found = {name: getattr(result, name) for name in Result.__dataclass_fields__}
    failures = [asdict(one) for one in result.failures]
    return {**found, 'ok': passed, 'failures': failures, 'refused': list(refused)}


def _json(value: Any) -> str:
    return json.dumps(_finite(value), default=str, allow_nan=False) + '\n'


def _finite(value: Any) -> Any:
    """JSON has no word for a number that is not finite: its name as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


# import -------------------------------------------------------------------------------------------


def _import(options: Namespace) -> int:
    framework = options.framework
    if framework not in FRAMEWORKS:
        raise NoAdapter(f'no adapter for {framework}', f'there are {", ".join(FRAMEWORKS)}')
    raw = b''.join(_lines(options.file))
    several = b'\n' in raw.rstrip(b'\n')
    try:
        receipts, result = (import_run if several else import_sidecar)(raw, framework)
    except ReceiptError as error:
        _refuse_format(raw.split(b'\n', 1)[0], error)
        raise
    lines = b''.join(map(emit, receipts if several else [receipts]))
    if options.out:
        Path(options.out).write_bytes(lines)
    else:
        _write(lines)
    page = Page(sys.stderr)
    said = page.conclusion(result, True) + '\n' if result.ok else page.verdict(result, False)
    _write(said, sys.stderr)
    return BROKEN if result.verdict == 'malformed' else PASS if result.ok else FAIL


def _refuse_format(line: bytes, error: ReceiptError) -> None:
    """Raises ``NoAdapter`` if a line says that it has another format."""
    if error.code == 'schema':
        value = parse(line)
        schema = value.get('schema') if isinstance(value, dict) else None
        if isinstance(schema, str) and schema != FORMAT:
            hint = 'a receipt is ready to be verified' if 'receipt' in schema else ''
            raise NoAdapter(f'no adapter for the format {schema:.80}', hint or f'{FORMAT} is known')


# the others ---------------------------------------------------------------------------------------


def _generate(options: Namespace) -> int:
    if not options.check:
        _write(generate(options.cell, options.steps, options.seed))
        return PASS
    if options.seed:
        raise Usage('--check compares with the run of seed 0')
    steps = min(options.steps, SHIPPED)
    made = generate(options.cell, steps).splitlines()
    shipped = golden_file(options.cell).read_bytes().splitlines()[:steps]
    if made == shipped:
        few = f'; of the {options.steps} asked for, {steps} are' if steps < options.steps else ''
        _write(f'{options.cell}: {counted(steps, "step")}, byte for byte as shipped{few}\n')
        return PASS
    foreign = foreign_functions()
    if foreign:
        raise ReceiptError(
            'platform', options.cell, f'other bytes by other functions: {"; ".join(foreign)}'
        )
    step = next((i for i, (a, b) in enumerate(zip(made, shipped)) if a != b), len(shipped))
    pair = [json.loads(lines[step]) if step < len(lines) else {} for lines in (made, shipped)]
    _write(f'{options.cell}: step {step} has other bytes; A is made here, B is shipped\n')
    _write(Page(sys.stdout).differences(differences(*pair)))
    return FAIL


def _rules(options: Namespace) -> int:
    as_json = json.dumps([asdict(rule) for rule in RULES.values()], indent=1) + '\n'
    _write(as_json if options.json else Page(sys.stdout).rules())
    return PASS


def _explain(options: Namespace) -> int:
    _write(Page(sys.stdout).explained(options.rule))
    return PASS


def _diff(options: Namespace) -> int:
    files = [list(_values(name)) for name in (options.a, options.b)]
    single = all(len(values) == 1 for values in files)
    found = differences(*(values[0] if single else values for values in files))
    _write(Page(sys.stdout).differences(found) if found else 'they are equal\n')
    return FAIL if found else PASS


def _examples(options: Namespace) -> int:
    file = Path(__file__).resolve().parents[1] / 'extract' / EXAMPLES[options.framework]
    if not file.is_file():
        said = f'{file.name} comes with braintrace, and not with a copy of the verifier'
        raise ReceiptError('absent', '', said, 'pip install braintrace, or copy it from there')
    _write(file.read_bytes() if options.print else f'{file}\n')
    return PASS


_COMMANDS = {
    'verify': _verify,
    'import': _import,
    'generate': _generate,
    'rules': _rules,
    'explain': _explain,
    'diff': _diff,
    'examples': _examples,
}
