"""What a compiled program moves between devices, read from its text."""

import math
import re
from typing import NamedTuple

COLLECTIVES = 'all-reduce', 'all-gather', 'all-to-all', 'reduce-scatter', 'collective-permute'
WIDTHS = {'pred': 1, 'bf16': 2, 'c64': 8, 'c128': 16}
CALLED = re.compile(r'(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.-]+)')


class Moved(NamedTuple):
    """One collective: its opcode, bytes and shapes of its results, how often a call runs it."""

    opcode: str
    size: int
    turns: int
    shapes: list


def arrays(result: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of each array of a result, such as ``(f32[2,3]{1,0}, pred[])``."""
    found = []
    for kind, text in re.findall(r'\b([a-z]+\d*(?:e\w+)?)\[([\d,]*)\]', result):
        width = WIDTHS.get(kind) or int(re.sub(r'\D', '', kind)) // 8
        shape = tuple(map(int, filter(None, text.split(','))))
        found.append((width * math.prod(shape), shape))
    return found


def computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r'(ENTRY )?%?([\w.-]+) .*\{$', line)
        if head and not line.startswith(' '):
            lines = found['ENTRY' if head[1] else head[2]] = []
        elif ' = ' in line:
            lines.append(line)
    return found


def instruction(line: str) -> tuple[str, str]:
    """``(opcode, result)``."""
    result, opcode = re.match(r'\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(', line).groups()
    return opcode, result


def turns(line: str) -> int:
    """How often a loop runs; one that says no number runs once at most here."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    return int(known[1]) if known else 1


def collectives(text: str) -> list[Moved]:
    """Every collective of a program, those of loops with their turns."""
    parts, found = computations(text), []

    def walk(name: str, times: int):
        for line in parts[name]:
            opcode, result = instruction(line)
            if opcode.removesuffix('-start') in COLLECTIVES:
                sizes, shapes = zip(*arrays(result), strict=True)
                found.append(Moved(opcode, sum(sizes), times, list(shapes)))
            elif opcode in ('while', 'call', 'conditional', 'fusion'):
                called = re.findall(r'branch_computations=\{(.*?)\}', line)
                names = [n.strip('% ') for list_ in called for n in list_.split(',')]
                inside = times * turns(line) if opcode == 'while' else times
                for each in names + CALLED.findall(line):
                    walk(each, inside)

    walk('ENTRY', 1)
    return found


def moved(text: str) -> int:
    """The bytes that a call moves."""
    return sum(c.size * c.turns for c in collectives(text))


def copies(text: str, shape: str) -> int:
    """The copies of an array, such as ``f32[8,80,64]``, outside of fusions."""
    lines = (
        line for name, each in computations(text).items() if 'fused' not in name for line in each
    )
    return sum(
        instruction(line)[0] == 'copy' and instruction(line)[1].startswith(shape) for line in lines
    )
