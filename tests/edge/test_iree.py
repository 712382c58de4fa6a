"""Exported steps, compiled and run by IREE where it is installed: ``make edge``."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

from tests.edge.test_exported import CELLS, RULES, exported_row

COMPILER = Path(sys.executable).with_name('iree-compile')
REFUSED: dict[str, str] = {}  # by IREE 3.13: the cell, and what its error says


def compiled(step, folder: Path) -> tuple[Path, str]:
    """The program that IREE makes of a step, and what it says where it makes none."""
    pytest.importorskip('iree.runtime')
    compiler = COMPILER if COMPILER.exists() else shutil.which('iree-compile')
    step.save(folder)
    flags = (
        '--iree-hal-target-backends=llvm-cpu --iree-llvmcpu-target-cpu=generic '
        '--iree-llvmcpu-debug-symbols=false'
    ).split()
    text = [folder / 'step.mlir', '--iree-input-type=stablehlo', '-o', folder / 'step.vmfb']
    found = subprocess.run([compiler, *text, *flags], capture_output=True, text=True)
    return folder / 'step.vmfb', found.stderr if found.returncode else ''


@pytest.mark.nightly
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', CELLS)
def test_iree_compiles_a_learning_step(name, rule, tmp_path):
    _, error = compiled(exported_row(name, RULES[rule], optax.sgd(1e-3)), tmp_path)
    assert REFUSED[name] in error if name in REFUSED else not error


@pytest.mark.nightly
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', ['gru', 'lstm', 'min_gru', 'lru', 'lif', 'alif'])
def test_a_step_of_iree_is_that_of_jax(name, rule, tmp_path):
    rt = pytest.importorskip('iree.runtime')
    step = exported_row(name, RULES[rule], optax.sgd(1e-3))
    binary, error = compiled(step, tmp_path)
    assert not error
    context = rt.SystemContext(config=rt.Config('local-sync'))
    module = rt.VmModule.mmap(context.instance, str(binary))
    context.add_vm_module(module)
    call, (here, there) = context.modules[module.name]['main'], (step.arrays, step.arrays)
    shape = next(r['shape'] for r in step.manifest['arguments'] if r['name'] == 'x')
    names = [row['name'] for row in step.manifest['results']]
    for k in range(20):
        given = {'x': np.random.default_rng(k).normal(size=shape).astype('f4'), 'y': np.float32(0)}
        here, _ = step(here, **given)
        arguments = {**there, **given}
        found = call(*(arguments[row['name']] for row in step.manifest['arguments']))
        there = {n: a for n, a in zip(names, map(np.asarray, found)) if n in here}
    for key, array in here.items():
        np.testing.assert_allclose(there[key], array, rtol=1e-2, atol=1e-3, err_msg=key)
