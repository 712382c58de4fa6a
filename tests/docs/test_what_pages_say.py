"""The pages say what code, settings and results say: names, tables, figures, pictures."""

import ast
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import braintrace
from braintrace import compat, nn, rules, tasks
from braintrace._public_names import ABSENT, COMPAT
from braintrace.compat._arguments import ARGUMENTS
from braintrace_receipts import RULES
from braintrace_receipts.command import parser
from braintrace_receipts.schema import SCHEMAS
from tests.docs.test_docstrings import MODULES, PUBLIC, parameters
from tests.nn.rows import cells, diagonal, legendre, matrix_memory

OF_CELLS = cells, diagonal, legendre, matrix_memory
ROOT = Path(__file__).resolve().parents[2]
DOCS, PICTURES = ROOT / 'docs', ROOT / 'docs' / 'pictures'
PAGES = [ROOT / 'CONTRIBUTING.md', *DOCS.rglob('*.md')]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding='utf-8')


def loaded(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f'docs_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the first pages -------------------------------------------------------------------------------


def first_block(name: str) -> str:
    return re.search(r'^```python\n.*?^```\n\n```text\n.*?^```', read(name), re.S | re.M)[0]


def test_the_first_page_shows_the_program_of_the_readme():
    assert first_block('docs/index.md') == first_block('README.md')


def test_the_extras_that_the_page_names_exist():
    rows = re.findall(r'^\| `([\w-]+)` \|', read('docs/install.md').split('## Extras')[1], re.M)
    named = {row for row in rows if not row.startswith('make')}
    extras = tomllib.loads(read('pyproject.toml'))['project']['optional-dependencies']
    assert named and named <= extras.keys()


def test_the_facts_about_time_are_those_of_the_readme():
    costs, page = (read(name) for name in ('README.md', 'docs/is_it_for_me.md'))
    costs = costs.split('## What it costs')[1].split('\n## ')[0]
    flat = ' '.join(page.split())
    (beside,) = re.findall(r'It (is slower than the scan at .*?)\.', ' '.join(costs.split()))
    assert f'D_RTRL {beside}.' in flat
    (every,) = re.findall(r'An update at every step takes (.*?) times', ' '.join(costs.split()))
    assert f'{every} times the gradient of the whole sequence' in flat
    ratios = read('docs/performance.md').split('How many times')[1].split('- **Slower**')[0]
    for part, behind in ((0, 'times `jax.grad` of a scan'), (1, 'times code by hand')):
        cells = [
            re.findall(r'\d+(?:\.\d+)?', row.split('|')[2 + part])
            for row in ratios.splitlines()
            if row.startswith('|') and 'scan |' not in row and '---' not in row
            if 'kept for a stream' not in row
        ]
        figures = [float(figure) for cell in cells for figure in cell]
        assert f'{min(figures):g} to {max(figures):g} {behind}' in flat, behind


def test_the_page_on_citing_has_the_papers_of_the_citation_file():
    file, page = read('CITATION.cff'), read('docs/citing.md')
    titles = re.findall(r"^    title: '(.+)'$", file, re.M)
    assert titles and not [title for title in titles if title not in page]


def test_every_example_is_in_the_gallery():
    shown = set(re.findall(r'^### (\w+)\.py$', read('docs/gallery.md'), re.M))
    assert shown == {path.stem for path in (ROOT / 'examples').glob('*.py')}


# -- layers ----------------------------------------------------------------------------------------

LAYERS = read('docs/reference/layers.md')
CELLS = {
    name: cells[1]
    for line in re.findall(r'^\| (`\w+(?:Cell|GRU|LSTM)`.*) \|$', LAYERS, flags=re.MULTILINE)
    for names, *cells in [line.split(' | ')]
    for name in re.findall(r'\w+', names)
}


@pytest.mark.slow
def test_the_table_says_of_every_cell_whether_its_gradient_is_whole():
    """As ``tests/nn/test_table.py`` has it of the report."""
    found = {type(row.make()).__name__: row.exact for part in OF_CELLS for row in part.ROWS}
    assert CELLS.keys() == {name for name in nn.__all__ if name.endswith('Cell')}
    assert CELLS == {name: 'whole' if found[name] else 'part' for name in CELLS}


# -- rules, tasks and promises ---------------------------------------------------------------------


def test_every_rule_has_a_row():
    text = read('docs/reference/learning_rules.md')
    values = {n for n in rules.__all__ if inspect.isfunction(getattr(rules, n))}
    table = text[text.index('| value |') :].split('\n\n')[0]
    assert values == set(re.findall(r'`(\w+)\(', '\n'.join(r[:60] for r in table.splitlines())))


def test_every_task_and_every_argument_has_a_row():
    text = read('docs/howto/training.md')
    made = {n for n in tasks.__all__ if inspect.isfunction(getattr(tasks, n))} - {'run'}
    assert made == set(re.findall(r'`(\w+)\(', text[: text.index('### A task of your own')]))
    options = {*inspect.signature(tasks.run).parameters}
    table = text[text.index('| argument') : text.index('## A test')]
    assert set(re.findall(r'`(\w+)=', table)) <= options


PROMISES = read('docs/reference/promises.md')
LEFT_OUT = {7, 8, 17}


@functools.cache
def names(path: str) -> set[str]:
    tree = ast.parse(read(f'tests/{path}'))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist():
    rows = re.findall(r'^\| B(\d+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$', PROMISES, flags=re.MULTILINE)
    assert sorted(int(number) for number, _ in rows) == sorted({*range(1, 41)} - LEFT_OUT)
    for number, tests in rows:
        found = re.findall(r'`([\w/]+\.py)::(test_\w+)`', tests)
        assert found and len(found) == tests.count('::'), f'B{number} names no test: {tests}'
        missing = [test for path, test in found if test not in names(path)]
        assert not missing, f'B{number}: {missing}'


# -- the public package ----------------------------------------------------------------------------

MIGRATE = read('docs/howto/migrate.md')


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first column, whose cells stand without their code marks."""
    lines = MIGRATE[MIGRATE.index(f'| {title} |') :].split('\n\n')[0].splitlines()[2:]
    rows = [line.removeprefix('| ').removesuffix(' |').split(' | ') for line in lines]
    return [[first.strip('`'), *cells] for first, *cells in rows]


def test_every_name_is_there_or_says_what_to_use():
    rows = table('theirs')
    of_package = {name: cell for name, cell in rows if not name.startswith('nn.')}
    assert (len(of_package), len(rows) - len(of_package)) == (62, 21)
    said = {name: cell for name, cell in of_package.items() if name in ABSENT}
    assert said == {name: f'absent: {text}' for name, text in ABSENT.items()}
    there = [name for name, cell in of_package.items() if cell.startswith(('the same', 'compat'))]
    assert {*there, *ABSENT} == {*of_package}
    in_compat = {name.removeprefix('nn.') for name, cell in rows if cell.startswith('compat')}
    assert in_compat == (COMPAT | {'NotSupportedError'}) - {'load_public'}
    known = [*braintrace.__all__, *compat.__all__, *braintrace.errors.__all__]
    known += ['__version__', '__version_info__']
    assert [name for name in there if name not in known] == []


def test_every_layer_and_cell_is_there():
    cells = [cell for name, cell in table('theirs') if name.startswith('nn.')]
    named = [name[3:] for name, _ in table('theirs') if name.startswith('nn.')]
    named += re.findall(r'`(\w+(?:Cell|Readout))`', ' '.join(cells))
    known = [*braintrace.nn.__all__, *compat.__all__]
    assert [name for name in named if name not in known] == []


def test_every_argument_has_its_sentence():
    rows = dict(table('argument'))
    assert rows.keys() == {*ARGUMENTS, 'vjp_method', 'chunk_size', 'projection_key'}
    for name, argument in ARGUMENTS.items():
        assert argument.remedy in rows[name], name


# -- names -----------------------------------------------------------------------------------------

MODULE = re.compile(r'\.\. (?:automodule|currentmodule):: (\S+)')

LISTED = re.compile(r'(?:   |\.\. (?:py:)?\w+:: )(~?)([\w.]+)(?:\(.*\))?$')


def names_of(text: str):
    """The names in the tables and directives of a page, in full."""
    module = ''
    for line in text.splitlines():
        if found := MODULE.match(line):
            module = found[1]
            if 'automodule' in line:
                yield module
        elif found := LISTED.match(line):
            in_full = found[1] or found[2].startswith('braintrace')
            yield found[2] if in_full else f'{module}.{found[2]}'


def test_every_public_name_is_listed_once():
    pytest.importorskip('sphinx')
    conf, counts = loaded(DOCS / 'conf.py'), Counter()
    for page in (DOCS / 'reference').glob('*.md'):
        counts.update(names_of(page.read_text(encoding='utf-8')))
    wrong = {name: counts[name] for name in conf.public_names() if counts[name] != 1}
    assert not wrong


# without a docstring of their own
VALUES = {'braintrace.kit.LAWS', 'braintrace_receipts.RULES', 'braintrace.tasks.PARTS'}
WITH_EXAMPLES = [name for name in MODULES if '.extra.' not in name]
WITH_EXAMPLES += ['braintrace.compat', 'braintrace.errors', 'braintrace.tasks.events']


@pytest.mark.parametrize('module', [*WITH_EXAMPLES, 'braintrace_receipts'])
def test_every_public_name_has_an_example(module):
    found = importlib.import_module(module)
    without = {
        f'{module}.{name}'
        for name in found.__all__
        if '>>> ' not in (inspect.getdoc(getattr(found, name)) or '')
    }
    assert without == {name for name in VALUES if name.rpartition('.')[0] == module}


ELSEWHERE = {  # a word -> the one to use
    'batch': 'batch_size',
    'every': 'update_every, record_every',
    'loss': 'loss_fn',
    'lr': 'optimizer',
    'n_steps': 'steps',
    'opt': 'optimizer',
    'rng': 'key',
    'sequence': 'xs, ys',
    'time_constant': 'tau',
}

KNOWN = {  # what a word means in a class or function that has it for another idea
    'braintrace.Penalised': {'loss'},  # its value
    'braintrace.functional.StepGradient': {'loss'},
    'braintrace.compat.train_synthetic_gradient': {'lr'},  # of the optimiser that it makes
    'braintrace.receipts.capture': {'loss'},  # a name too
    'braintrace.receipts.audit': {'loss'},
    'braintrace.receipts.Recording': {'loss'},
    'braintrace.receipts.Record': {'loss'},
    'braintrace.tasks.Task': {'loss'},
}


@pytest.mark.parametrize('word', ELSEWHERE)
def test_no_signature_has_a_word_that_has_another_one(word):
    found = {
        name
        for name, value in PUBLIC.items()
        if word in parameters(value) and word not in KNOWN.get(name, ())
    }
    assert not found, f'it is called {ELSEWHERE[word]}'


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_page(tmp_path):
    pytest.importorskip('matplotlib')
    script = PICTURES / 'way_through.py'
    drawn = loaded(script).main([str(tmp_path / 'drawn.svg')])
    kept = script.with_suffix('.svg')
    assert texts(drawn) == texts(kept), f'run python {script} once more'


def texts(picture: Path) -> set[str]:
    """What is written in a picture, without the numbers of its axes."""
    found = re.findall(r'<text[^>]*>([^<]*)</text>', picture.read_text(encoding='utf-8'))
    return {text for text in found if re.search('[a-z]', text)}


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.syspath_prepend(str(PICTURES))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize('name', ['paths', 'window', 'partition', 'traces', 'look_inside'])
def test_a_picture_is_drawn(name, script, tmp_path):
    drawn = script(name).main([str(tmp_path / 'drawn.svg')])
    assert drawn.stat().st_size > 10_000 and (PICTURES / f'{name}.svg').exists()


@pytest.mark.nightly
def test_the_rules_keep_the_paths_that_the_page_names(script):
    kept = script('kept')
    own = {('stay', t, 0, kept.HERE) for t in range(1, kept.STEPS)}
    found = {name: kept.kept(*kept.RULES[name]) for name in ('SameStep', 'D_RTRL', 'BPTT, RTRL')}
    assert not found['SameStep']
    assert found['D_RTRL'] == own | {('read', kept.STEPS - 1, 0, kept.HERE)}
    assert found['D_RTRL'] < found['BPTT, RTRL'] <= kept.segments().keys()


# -- receipts --------------------------------------------------------------------------------------

RECEIPTS = read('docs/reference/receipts.md')


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
    assert RECEIPTS.split(mark)[1].split(end)[0] == rules_table()


def test_the_keys_stand_in_the_order_of_the_schema():
    table = RECEIPTS.split('| key | what it is |')[1].split('\n\n')[0]
    schema = SCHEMAS['braintrace.receipt/1']
    due, names = schema['required'], schema['properties']
    want = [name if name in due else f'{name}?' for name in names]
    assert first_column(table) == want


def test_every_command_and_option_has_a_row():
    commands = next(dict(a.choices) for a in parser()._actions if a.dest == 'command')
    head = RECEIPTS.split('| command | does |')[1].split('\n\n')[0]
    assert re.findall(r'^\| `(\w+)', head, re.MULTILINE) == list(commands)
    options = RECEIPTS.split('| option of `verify` | does |')[1].split('\n\n')[0]
    own = {name for action in commands['verify']._actions for name in action.option_strings}
    assert set(re.findall(r'^\| `(--\w+)', options, re.MULTILINE)) == own - {'-h', '--help'}


# -- blocks, commands and links --------------------------------------------------------------------


def blocks(language, text):
    return re.findall(rf'```{language}\n(.*?)```', text, flags=re.DOTALL)


@pytest.mark.slow
def test_the_test_suite_of_the_guide_to_primitives_runs(tmp_path):
    found = blocks('python', read('docs/reference/primitives.md'))
    imports = found[0].split('\n\nlow_rank_gain')[0]
    block = lambda start: next(text for text in found if text.startswith(start))
    by_hand, tests = block('gain = '), block('# test_my_ops.py')
    (tmp_path / 'my_ops.py').write_text(f'{imports}\n{by_hand}')
    (tmp_path / 'test_my_ops.py').write_text(tests)
    how = {'capture_output': True, 'text': True, 'cwd': tmp_path}
    how['env'] = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(arguments):
        return subprocess.run([sys.executable, '-m', *arguments.split()], **how)

    plugin = '-p braintrace.kit.pytest_plugin --etp-results results.json'
    tested = run(f'pytest -q {plugin} -c /dev/null --rootdir . test_my_ops.py')
    assert '2 passed' in tested.stdout, tested.stdout + tested.stderr
    shown = run('braintrace.kit check etp_gain --import my_ops --results results.json')
    assert shown.stdout == 'etp_gain: 17 pass, 3 not_applicable\n', shown.stderr


def test_the_commands_are_targets_of_the_makefile():
    makefile, guide = read('Makefile'), read('CONTRIBUTING.md')
    targets = set(re.findall(r'^([a-z-]+):', makefile, flags=re.MULTILINE))
    named = set(re.findall(r'make ([a-z-]+)', ''.join(blocks('bash', read('README.md'))) + guide))
    assert {'demo', 'test'} <= named <= targets


def test_the_links_lead_to_files():
    lost = {
        f'{page.name}: {link}'
        for page in [ROOT / 'README.md', *PAGES]
        for link in re.findall(r'\]\((?!https?:)([^)#]+)', page.read_text(encoding='utf-8'))
        if not (page.parent / link).exists()
    }
    assert not lost


def test_the_files_that_documents_name_are_there():
    file = re.compile(r'`([\w/]+(?:/|\.py))`(?!\s+of\s+commit)')
    named = {
        (page.name, name)
        for page in PAGES
        for name in file.findall(page.read_text(encoding='utf-8'))
    }
    of_users = {('primitives.md', 'my_ops.py'), ('primitives.md', 'test_my_ops.py')}
    of_users |= {('stream.md', 'stream.py')}
    keys = ('etrace/', 'initial/', 'parameters/', 'states/')  # of a learner's file
    of_users |= {('checkpoint.md', key) for key in keys}
    folders = '', 'braintrace', 'braintrace/_compiler', 'receipts', 'receipts/braintrace_receipts'
    there = lambda name: any((ROOT / folder / name).exists() for folder in folders)
    assert len(named) > 20
    assert not [row for row in named - of_users if not there(row[1])]
