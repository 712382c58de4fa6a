"""README's and docs' promises: their code blocks run in order, and the commands exist."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
PRIMITIVES = (ROOT / 'docs' / 'reference' / 'primitives.md').read_text(encoding='utf-8')


def blocks(language, text=README):
    return re.findall(rf'```{language}\n(.*?)```', text, flags=re.DOTALL)


def python(arguments):
    return [sys.executable, *arguments.split()]


@pytest.mark.slow
def test_the_code_blocks_of_the_guide_to_primitives_run():
    namespace: dict = {}
    for block in blocks('python', PRIMITIVES):
        if not block.startswith('# test_my_ops.py'):
            exec(compile(block, 'primitives.md', 'exec'), namespace)
    assert namespace['losses'].shape == (20,)


@pytest.mark.slow
def test_the_test_suite_of_the_guide_to_primitives_runs(tmp_path):
    found = blocks('python', PRIMITIVES)
    imports = found[0].split('\n\nlow_rank_gain')[0]
    by_hand, tests = (
        next(block for block in found if block.startswith(start))
        for start in ('gain = ', '# test_my_ops.py')
    )
    (tmp_path / 'my_ops.py').write_text(f'{imports}\n{by_hand}')
    (tmp_path / 'test_my_ops.py').write_text(tests)
    run = functools.partial(
        subprocess.run,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    plugin = '-p braintrace.kit.pytest_plugin --etp-results results.json'
    tested = run(python(f'-m pytest -q {plugin} -c /dev/null --rootdir . test_my_ops.py'))
    assert '2 passed' in tested.stdout, tested.stdout + tested.stderr
    kit = '-m braintrace.kit check etp_gain --import my_ops --results results.json'
    shown = run(python(kit))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout == 'etp_gain: 17 pass, 3 not_applicable\n', shown.stderr


def test_the_commands_are_targets_of_the_makefile():
    makefile, guide = (
        (ROOT / name).read_text(encoding='utf-8') for name in ('Makefile', 'CONTRIBUTING.md')
    )
    targets = set(re.findall(r'^([a-z-]+):', makefile, flags=re.MULTILINE))
    named = set(re.findall(r'make ([a-z-]+)', ''.join(blocks('bash')) + guide))
    assert {'demo', 'test'} <= named <= targets


def test_the_links_lead_to_files():
    pages = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').rglob('*.md')]
    lost = {
        f'{page.name}: {link}'
        for page in pages
        for link in re.findall(r'\]\((?!https?:)([^)#]+)', page.read_text(encoding='utf-8'))
        if not (page.parent / link).exists()
    }
    assert not lost


def test_the_files_that_documents_name_are_there():
    pages = [ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').rglob('*.md')]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r'`([\w/]+(?:/|\.py))`', page.read_text(encoding='utf-8'))
    }
    made_by_users = {('primitives.md', 'my_ops.py'), ('primitives.md', 'test_my_ops.py')}
    made_by_users |= {('stream.md', 'stream.py')}
    keys = ('etrace/', 'initial/', 'parameters/', 'states/')  # of a learner's file
    made_by_users |= {('checkpoint.md', key) for key in keys}
    places = [ROOT, ROOT / 'braintrace', ROOT / 'braintrace' / '_compiler', ROOT / 'receipts']
    places.append(ROOT / 'receipts' / 'braintrace_receipts')
    assert len(named) > 20
    lost = {
        (page, name)
        for page, name in named - made_by_users
        if not any((place / name).exists() for place in places)
    }
    assert not lost
