"""The operations and bytes of a compiled program, loops included.

XLA's ``cost_analysis`` counts the body of a loop once, so this reads the optimised program. Bytes
are those that enter and leave each fusion and each other operation; of an array of which one slice
is read or written, those of the slice. Operations are those of the products. Of the branches of a
conditional the cheapest counts.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

HEAD = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{$')
LINE = re.compile(r'^\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$')
ARRAY = re.compile(r'\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]')
CALLEE = r'=\{?%?([\w.-]+)'
FREE = {
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'iota'),
    *('partition-id', 'opt-barrier', 'copy-done'),
}


class Cost(NamedTuple):
    flops: float = 0
    bytes: float = 0

    def plus(self, other, times=1) -> Cost:
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes)


class Instruction(NamedTuple):
    name: str
    type: str
    code: str
    operands: list
    text: str
    root: bool


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(',') if n]


def size(text: str) -> int:
    """Bytes of a type."""
    found = 0
    for dtype, shape in ARRAY.findall(text):
        width = 1 if dtype == 'pred' else int(re.sub(r'\D', '', dtype)) / 8
        found += math.prod(numbers(shape)) * width
    return int(found)


def shape(text: str) -> list[int]:
    return numbers(ARRAY.search(text)[2])


def parsed(text: str) -> tuple[dict, str]:
    """The instructions of each computation, by name, and the name of the first to run."""
    found, entry, at = {}, '', []
    for line in text.splitlines():
        line = re.sub(r'/\*.*?\*/', '', line)
        if head := HEAD.match(line):
            at = found[head[1]] = {}
            entry = head[1] if line.startswith('ENTRY') else entry
        elif made := LINE.match(line):
            root, name, kind, code, rest = made.groups()
            operands = re.findall(r'%([\w.-]+)', rest.split(')')[0])
            at[name] = Instruction(name, kind, code, operands, rest, bool(root))
    return found, entry


class Counter:
    """Costs of the computations of one program."""

    def __init__(self, text: str):
        self.computations, self.entry = parsed(text)

    def total(self) -> Cost:
        return self.of(self.entry)

    def of(self, name: str) -> Cost:
        cost = Cost()
        for each in self.computations[name].values():
            cost = cost.plus(self.instruction(each, self.computations[name]))
        return cost

    def called(self, each: Instruction, word: str) -> str:
        return re.search(word + CALLEE, each.text)[1]

    def instruction(self, each: Instruction, among: dict) -> Cost:
        if each.code in FREE:
            return Cost()
        if each.code == 'while':
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', each.text)
            return Cost().plus(self.of(self.called(each, 'body')), int(trips[1]) if trips else 1)
        if each.code == 'conditional':
            return min(map(self.of, self.branches(each)), key=lambda cost: cost.bytes)
        if each.code == 'call':
            return self.of(self.called(each, 'to_apply'))
        if each.code == 'fusion':
            inside = self.computations[self.called(each, 'calls')]
            flops = sum(products(i, inside) for i in inside.values())
            return Cost(flops, self.fused_bytes(each, inside, among))
        return Cost(products(each, among), moved(each, among))

    def branches(self, each: Instruction) -> list[str]:
        several = re.search(r'branch_computations=\{(.*?)\}', each.text)
        if several:
            return [name.strip(' %') for name in several[1].split(',')]
        return [self.called(each, f'{word}_computation') for word in ('true', 'false')]

    def fused_bytes(self, each: Instruction, inside: dict, among: dict) -> int:
        parameters = {
            int(i.text.split(')')[0]): i for i in inside.values() if i.code == 'parameter'
        }
        read = sum(entering(inside, parameters[k]) for k in range(len(each.operands)))
        return read + leaving(inside, next(i for i in inside.values() if i.root))


def entering(inside: dict, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one of its parameters."""
    found = 0
    for use in users(inside, parameter.name):
        if use.code == 'dynamic-slice':
            found += size(use.type)
        elif use.code != 'dynamic-update-slice' or use.operands[0] not in behind(inside, parameter):
            return size(parameter.type)
    return found


def behind(inside: dict, parameter: Instruction) -> set:
    """The names of a parameter and of its bitcasts."""
    names = {parameter.name}
    for i in inside.values():
        if i.code == 'bitcast' and i.operands[0] in names:
            names.add(i.name)
    return names


def users(inside: dict, name: str) -> list[Instruction]:
    names = behind(inside, inside[name])
    return [i for i in inside.values() if i.code != 'bitcast' and names & {*i.operands}]


def leaving(inside: dict, root: Instruction) -> int:
    """Bytes that a fusion writes."""
    while root.code == 'bitcast':
        root = inside[root.operands[0]]
    if root.code == 'tuple':
        return sum(leaving(inside, inside[name]) for name in root.operands)
    if root.code == 'dynamic-update-slice':
        return size(inside[root.operands[1]].type)
    return size(root.type)


def moved(each: Instruction, among: dict) -> int:
    """Bytes of an operation outside of a fusion."""
    if each.code in ('dynamic-slice', 'gather', 'slice'):
        return 2 * size(each.type)
    if each.code == 'dynamic-update-slice':
        return 2 * size(among[each.operands[1]].type)
    return size(each.type) + sum(size(among[name].type) for name in each.operands if name in among)


def products(each: Instruction, among: dict) -> float:
    """Operations of a matrix product."""
    if each.code != 'dot' and '__cublas$' not in each.text:
        return 0
    axes = re.search(r'lhs_contracting_dim\w+"?[=:][\[{]([\d,"]*)[\]}]', each.text)
    if not axes or each.operands[0] not in among:
        return 0
    left = shape(among[each.operands[0]].type)
    contracted = math.prod(left[k] for k in numbers(axes[1].replace('"', '')))
    return 2 * math.prod(shape(each.type)) * contracted


def count(text: str) -> dict:
    """The operations of products and the bytes of the text of an optimised program."""
    return Counter(text).total()._asdict()
