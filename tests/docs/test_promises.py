"""The page of promises: every row is there, and every test that it names."""

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / 'docs' / 'reference' / 'promises.md').read_text(encoding='utf-8')
LEFT_OUT = {7, 8, 17}


@functools.cache
def names(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text(encoding='utf-8'))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist():
    rows = re.findall(r'^\| B(\d+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$', PAGE, flags=re.MULTILINE)
    assert sorted(int(number) for number, _ in rows) == sorted({*range(1, 41)} - LEFT_OUT)
    for number, tests in rows:
        found = re.findall(r'`([\w/]+\.py)::(test_\w+)`', tests)
        assert found and len(found) == tests.count('::'), f'B{number} names no test: {tests}'
        missing = [test for path, test in found if test not in names(path)]
        assert not missing, f'B{number}: {missing}'
