"""What is installed: a wheel has the command, needs no JAX, and works from another folder."""

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

import braintrace_receipts
from braintrace_receipts.canonical import emit
from golden import first_config, generate

ROOT = Path(__file__).resolve().parents[1]


def python(cwd, path, *argv, **more):
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, 'PYTHONPATH': str(path)},
        capture_output=True,
        **more,
    )


@pytest.mark.slow
def test_the_verifier_runs_where_jax_and_braintrace_are_absent(tmp_path):
    script = """
import sys
sys.modules['jax'] = sys.modules['braintrace'] = None
import braintrace_receipts as verifier
assert verifier.reconcile(None).verdict == 'malformed'
run = verifier.parse_run(open('run.jsonl', 'rb').read())
assert verifier.reconcile_run(run).verdict == 'rederived'
loaded = {name.split('.')[0] for name, found in sys.modules.items() if found}
assert loaded <= {*sys.stdlib_module_names, 'numpy', 'braintrace_receipts', '__main__'}, loaded
"""
    (tmp_path / 'run.jsonl').write_bytes(generate('lif', 2))
    done = python(tmp_path, ROOT, '-S', '-c', script)
    if b'numpy' in done.stderr:  # without the packages of the environment even NumPy is absent
        numpy = Path(importlib.util.find_spec('numpy').origin).parents[1]
        done = python(tmp_path, f'{ROOT}{os.pathsep}{numpy}', '-S', '-c', script)
    assert (done.returncode, done.stderr) == (0, b'')


def installed(folder):
    """The package as a wheel has it, or a copy of its folder where no wheel can be built."""
    if importlib.util.find_spec('hatchling') is None:
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(
            ROOT / 'braintrace_receipts', folder / 'braintrace_receipts', ignore=ignored
        )
        return
    script = f'from hatchling.build import build_wheel; build_wheel({str(folder)!r})'
    subprocess.run([sys.executable, '-c', script], cwd=ROOT, check=True)
    (wheel,) = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        assert not [name for name in archive.namelist() if 'golden' in name and '.jsonl' in name]
    (told,) = folder.glob('*.dist-info/METADATA')
    assert f'\nVersion: {braintrace_receipts.__version__}\n' in told.read_text()
    assert re.findall('^Requires-Dist: (.*)$', told.read_text(), re.MULTILINE)[0] == 'numpy>=2.0'


@pytest.mark.nightly
def test_an_installed_package_has_every_command(tmp_path):
    site, cwd = tmp_path / 'site', tmp_path / 'elsewhere'
    site.mkdir()
    cwd.mkdir()
    installed(site)
    (cwd / 'run.jsonl').write_bytes(generate('alif', 2))
    (cwd / 'config.jsonl').write_bytes(emit(first_config('lif')))
    for line, code in {
        'verify run.jsonl --run --json --strict': 0,
        'verify run.jsonl --level observer --allow tf32,bf16': 0,
        'verify config.jsonl': 2,
        'verify --jsn run.jsonl': 3,
        'import caffe run.jsonl': 3,
        'rules --json': 0,
        'rules 4': 0,
    }.items():
        done = python(cwd, site, '-m', 'braintrace_receipts', *line.split())
        assert (done.returncode, b'Traceback' in done.stderr) == (code, False), line
    argv = ('-m', 'braintrace_receipts', 'verify', '-', '--run')
    assert python(cwd, site, *argv, input=generate('lif', 2)).returncode == 0
