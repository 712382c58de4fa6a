"""SIGKILL at random moments: the stream goes on from its file, and ends bit by bit as if nothing
had been.
"""

import pytest

from tests.test_examples import load


@pytest.fixture(autouse=True)
def compiled_once(tmp_path_factory, monkeypatch):
    """The processes find each other's programs: compiling is most of what each costs."""
    folder = tmp_path_factory.mktemp('compiled')
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(folder))
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


@pytest.mark.nightly
def test_five_kills_leave_no_trace(capsys):
    assert load('stream_for_months').kill(5, 40)
    assert capsys.readouterr().out.count('killed after chunk') == 5


@pytest.mark.nightly
def test_fifty_kills_leave_no_trace(capsys):
    assert load('stream_for_months').kill(50, 400, seed=1)
    assert capsys.readouterr().out.count('killed after chunk') == 50
