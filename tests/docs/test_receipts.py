"""The reference of receipts has every rule, every key and every option as the code has them, and
the explanation has the figures that were measured.
"""

import json
import re
from pathlib import Path

from braintrace_receipts import RULES
from braintrace_receipts.command import parser
from braintrace_receipts.schema import SCHEMAS
from tests.benches import modules

DOCS = Path(__file__).resolve().parents[2] / 'docs'
REFERENCE = (DOCS / 'reference' / 'receipts.md').read_text(encoding='utf-8')
EXPLANATION = (DOCS / 'explanation' / 'receipts.md').read_text(encoding='utf-8')


def rules_table() -> str:
    rows = [
        f'| {r.number} | {r.title} | {r.family} | `{r.formula}` | {r.needs or "nothing more"} |'
        for r in RULES.values()
    ]
    return '\n'.join(['| R | rule | family | holds | needs |', '|---|---|---|---|---|', *rows])


def first_column(part: str) -> list[str]:
    cells = (line.split('|')[1] for line in part.splitlines() if line.startswith('| `'))
    return [name for cell in cells for name in re.findall(r'`([\w?]+)', cell)]


def test_the_table_of_rules_is_that_of_the_code():
    mark, end = '<!-- rules -->\n', '\n<!-- end of rules -->'
    assert REFERENCE.split(mark)[1].split(end)[0] == rules_table()


def test_the_keys_stand_in_the_order_of_the_schema():
    table = REFERENCE.split('| key | what it is |')[1].split('\n\n')[0]
    schema = SCHEMAS['braintrace.receipt/1']
    due, names = schema['required'], schema['properties']
    want = [name if name in due else f'{name}?' for name in names]
    assert first_column(table) == want


def test_every_command_and_option_has_a_row():
    commands = next(dict(a.choices) for a in parser()._actions if a.dest == 'command')
    head = REFERENCE.split('| command | does |')[1].split('\n\n')[0]
    assert re.findall(r'^\| `(\w+)', head, re.MULTILINE) == list(commands)
    options = REFERENCE.split('| option of `verify` | does |')[1].split('\n\n')[0]
    own = {name for action in commands['verify']._actions for name in action.option_strings}
    assert set(re.findall(r'^\| `(--\w+)', options, re.MULTILINE)) == own - {'-h', '--help'}


def test_the_figures_are_those_that_are_kept():
    with modules('tables', 'receipts') as found:
        bench = found.receipts
        rows = json.loads(bench.RESULTS.read_text(encoding='utf-8'))
        for name, want in bench.tables(rows).items():
            mark, end = bench.MARKS.format(name), bench.MARKS.format(f'end of {name}')
            assert EXPLANATION.split(f'{mark}\n')[1].split(f'\n{end}')[0] == want
