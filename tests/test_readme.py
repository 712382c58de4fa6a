"""What README and docs promise: their code blocks run, one after the other, and the commands exist."""
from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
PRIMITIVES = (ROOT / 'docs' / 'primitives.md').read_text(encoding='utf-8')


def blocks(language, text=README):
    return re.findall(rf'```{language}\n(.*?)```', text, flags=re.DOTALL)


def test_the_code_blocks_run():
    found = blocks('python')
    assert found
    namespace: dict = {}
    for block in found:
        exec(compile(block, 'README.md', 'exec'), namespace)
    assert namespace['y'].shape == namespace['outputs'].shape == (16, 10)
    assert namespace['losses'].shape == (20,)


def test_the_code_blocks_of_the_guide_to_primitives_run():
    namespace: dict = {}
    for block in blocks('python', PRIMITIVES):
        if not block.startswith('# test_my_ops.py'):
            exec(compile(block, 'primitives.md', 'exec'), namespace)
    assert namespace['losses'].shape == (20,)


def test_the_test_suite_of_the_guide_to_primitives_runs(tmp_path):
    found = blocks('python', PRIMITIVES)
    imports, by_hand = found[0].split('\n\nlow_rank_gain')[0], next(block for block in found if block.startswith('gain = '))
    (tmp_path / 'my_ops.py').write_text(f'{imports}\n{by_hand}')
    (tmp_path / 'test_my_ops.py').write_text(next(block for block in found if block.startswith('# test_my_ops.py')))
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {
        'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])})
    tested = run([sys.executable, '-m', 'pytest', '-q', '-p', 'braintrace.kit.pytest_plugin', '--etp-results', 'results.json', '-c',
                  '/dev/null', '--rootdir', '.', 'test_my_ops.py'])
    assert '2 passed' in tested.stdout, tested.stdout + tested.stderr
    shown = run([sys.executable, '-m', 'braintrace.kit', 'check', 'etp_gain', '--import', 'my_ops', '--results', 'results.json'])
    assert shown.returncode == 0 and shown.stdout == 'etp_gain: 17 pass, 3 not_applicable\n', shown.stdout + shown.stderr


def test_the_code_blocks_of_the_guide_to_compiling_run(capsys):
    namespace: dict = {}
    for block in blocks('python', (ROOT / 'docs' / 'compiling.md').read_text(encoding='utf-8')):
        exec(compile(block, 'compiling.md', 'exec'), namespace)
    shown = capsys.readouterr().out
    assert shown.startswith('(12,)') and 'flowchart' in shown


def test_the_code_blocks_of_the_guide_to_gradients_run(capsys):
    namespace: dict = {}
    for block in blocks('python', (ROOT / 'docs' / 'verify.md').read_text(encoding='utf-8')):
        exec(compile(block, 'verify.md', 'exec'), namespace)
        if 'grads' in namespace:
            for got, want in zip(*(jax.tree.leaves(namespace.pop(k)) for k in ('grads', 'cut')), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    shown = capsys.readouterr().out
    assert 'The temporal path of lower/h through the state of upper/h is lost at etp_mm (upper/' in shown


def test_the_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(encoding='utf-8'), flags=re.MULTILINE))
    named = set(re.findall(r'make ([a-z-]+)', ''.join(blocks('bash')) + (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')))
    assert {'demo', 'test'} <= named <= targets


def test_the_links_lead_to_files():
    links = re.findall(r'\]\((?!https?:)([^)#]+)', README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
