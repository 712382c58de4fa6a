"""The pictures of the explanations: their scripts run, and rules keep what the page says."""

import importlib
from pathlib import Path

import pytest

PICTURES = Path(__file__).resolve().parents[2] / 'docs' / 'pictures'
pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.syspath_prepend(str(PICTURES))
    return importlib.import_module


@pytest.mark.parametrize('name', ['paths', 'window', 'partition', 'traces'])
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
