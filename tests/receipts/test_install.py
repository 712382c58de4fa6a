"""What is installed: a wheel, or a copy of the package, works from another folder, without JAX."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from braintrace.receipts.verifier.canonical import emit
from braintrace.receipts.verifier.golden import GOLDEN_CELLS, generate
from tests.receipts.foreign import Foreign
from tests.sources import PACKAGE, ROOT

DATA = [
    *(f'receipts/verifier/goldens/{cell}.jsonl' for cell in GOLDEN_CELLS),
    *(f'receipts/verifier/schemas/{name}-1.json' for name in ('receipt', 'config', 'sidecar')),
    'receipts/extract/torch_eprop.py',
    'receipts/extract/jax_online.py',
]


def python(cwd, path, *argv, **more):
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, 'PYTHONPATH': str(path)},
        capture_output=True,
        **more,
    )


@pytest.mark.slow
def test_the_verifier_runs_where_jax_is_absent(tmp_path):
    script = """
import sys
sys.modules['jax'] = sys.modules['braintrace'] = None
import verifier
assert verifier.reconcile(None).verdict == 'malformed'
run = verifier.parse_run(verifier.generate('lif', 2))
assert verifier.reconcile_run(run).verdict == 'rederived'
"""
    done = python(tmp_path, PACKAGE / 'receipts', '-c', script)
    assert (done.returncode, done.stderr) == (0, b'')


def installed(folder):
    """The package as a wheel has it, or a copy of its folder where no wheel can be built."""
    if importlib.util.find_spec('hatchling') is None:
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(PACKAGE, folder / 'braintrace', ignore=ignored)
        return folder
    script = f'from hatchling.build import build_wheel; build_wheel({str(folder)!r})'
    subprocess.run([sys.executable, '-c', script], cwd=ROOT, check=True)
    (wheel,) = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (told,) = folder.glob('*.dist-info/METADATA')
    assert f'\nVersion: {version(folder)}\n' in told.read_text()
    return folder


def version(folder):
    text = (Path(folder) / 'braintrace' / '_version.py').read_text()
    return re.search(r"__version__ = '(.*)'", text)[1]


@pytest.mark.nightly
def test_an_installed_package_has_every_command(tmp_path):
    site, cwd = tmp_path / 'site', tmp_path / 'elsewhere'
    site.mkdir()
    cwd.mkdir()
    installed(site)
    assert [name for name in DATA if not (site / 'braintrace' / name).is_file()] == []
    assert version(site) == version(ROOT)
    (cwd / 'run.jsonl').write_bytes(generate('alif', 2))
    (cwd / 'side.jsonl').write_bytes(emit(Foreign().steps(1)[0]))
    for line, code in {
        'verify run.jsonl --run --json --strict': 0,
        'import pytorch side.jsonl --out made.jsonl': 0,
        'verify made.jsonl --level observer --allow tf32,bf16': 0,
        'diff run.jsonl made.jsonl': 1,
        'verify side.jsonl': 2,
        'verify --jsn run.jsonl': 3,
        'import caffe side.jsonl': 4,
        'rules --json': 0,
        'explain 4': 0,
        'examples pytorch --print': 0,
        **{f'generate {cell} --check': 0 for cell in GOLDEN_CELLS},
    }.items():
        done = python(cwd, site / 'braintrace' / 'receipts', '-m', 'verifier', *line.split())
        assert (done.returncode, b'Traceback' in done.stderr) == (code, False), line
    made = python(cwd, site, '-m', 'braintrace.receipts', 'generate', 'lif')
    code = 'import braintrace; print(braintrace.__version__, braintrace.__file__)'
    told = python(cwd, site, '-c', code).stdout.decode().split()
    assert told == [version(ROOT), str(site / 'braintrace' / '__init__.py')]
    piped = python(
        cwd, site, '-m', 'braintrace.receipts', 'verify', '-', '--run', input=made.stdout
    )
    assert (made.returncode, piped.returncode) == (0, 0)
