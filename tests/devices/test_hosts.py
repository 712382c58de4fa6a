"""Two processes, as on two hosts: they learn, save, and go on after one of them was killed."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / 'examples' / 'several_hosts.py'
CHUNKS = 4


def run(file: Path, *args: str) -> subprocess.CompletedProcess:
    path = f'{ROOT}{os.pathsep}{ROOT / "receipts"}'
    env = dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=path)
    command = [sys.executable, '-W', 'ignore', str(EXAMPLE), '--file', str(file), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def chunks(done: subprocess.CompletedProcess) -> list[int]:
    return [int(k) for k in re.findall(r'^chunk (\d+):', done.stdout, re.MULTILINE)]


def arrays(file: Path) -> dict:
    with np.load(file) as found:
        return {name: found[name] for name in found.files if not name.startswith('~')}


@pytest.mark.slow
def test_two_processes_learn_and_the_first_one_saves(tmp_path):
    done = run(tmp_path / 'state.npz')
    assert done.returncode == 0, done.stderr[-4000:]
    assert chunks(done) == list(range(CHUNKS))
    found = arrays(tmp_path / 'state.npz')
    assert found['3'] == CHUNKS and found['2/carry'].shape == (8, 16)
    assert list(tmp_path.iterdir()) == [tmp_path / 'state.npz']


@pytest.mark.nightly
def test_a_run_of_which_one_process_was_killed_goes_on_to_the_same_bits(tmp_path):
    calm, disturbed = tmp_path / 'calm.npz', tmp_path / 'disturbed.npz'
    assert run(calm).returncode == 0
    killed = run(disturbed, '--kill', '2')
    assert killed.returncode != 0 and chunks(killed) == [0, 1]
    again = run(disturbed)
    assert again.returncode == 0 and chunks(again) == [2, 3]
    wanted, got = arrays(calm), arrays(disturbed)
    assert wanted.keys() == got.keys()
    assert all(wanted[name].tobytes() == got[name].tobytes() for name in wanted)


UNLIKE = r'StructureError: process 1 differs from process 0 in: %s, so nothing is replaced\.'
TOLD = {  # what process 0 and process 1 are told
    'nobody sees it': ('FileNotFoundError',) * 2,
    'saved': ('done$',) * 2,
    'loaded': ('1.0$',) * 2,
    'other cells save': (UNLIKE % 'step',) * 2,
    'other cells load': (UNLIKE % 'step',) * 2,
    'other versions': (UNLIKE % 'versions',) * 2,
    'one sees it': (UNLIKE % 'whether it sees the file',) * 2,
    'torn for one': ('OSError: process 1 could not read', 'StructureError: .* is no file of'),
    'no folder': ('FileNotFoundError: .* is not there', 'OSError: process 0 could not write'),
    'other files': (UNLIKE % 'the content of the file',) * 2,
    'as it was': ('1.0$',) * 2,
    'other numbers': ('done process 1 differs from process 0 in: w, though all should hold',) * 2,
    'those of process 0': ('3.0$',) * 2,
}


@pytest.mark.slow
def test_processes_that_are_not_alike_are_told_and_no_file_is_replaced(tmp_path):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    env = dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=f'{ROOT}{os.pathsep}{ROOT / "receipts"}')
    command = [sys.executable, '-W', 'ignore', '-m', 'tests.devices.two_hosts']
    processes = [
        subprocess.Popen(
            [*command, str(k), address, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
        )
        for k in (0, 1)
    ]
    try:
        texts = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for k, text in enumerate(texts):
        found = dict(line.split(' | ') for line in text.splitlines() if ' | ' in line)
        assert found.keys() == TOLD.keys(), text
        for what, line in found.items():
            assert re.match(TOLD[what][k], line), (k, what, line)
