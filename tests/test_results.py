"""The results train what they say, and their page says what the records say."""

import json
import sys
from pathlib import Path

import jax
import pytest

from tests.benches import modules

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    'nets',
    'tables',
    'pages',
    'methods',
    'learning',
    'rules',
    'rules_page',
    'results',
    'results_page',
    'causes',
    'acting',
)


@pytest.fixture(scope='module')
def board():
    """The modules of benchmarks/, which import one another by their plain names."""
    with modules(*MODULES) as found:
        yield found


def record(setting, name, scores, **more):
    task = setting.task
    return {
        'task': task.name,
        'net': setting.net,
        'row': name,
        'floor': task.floor,
        'load': 0.5,
        'scores': scores,
        'looks': [[1, scores], [2, scores]],
        'seconds': 4.0,
        'compile_seconds': 1.0,
        'memory': 2048,
    } | more


def test_the_page_says_what_the_records_say(board, tmp_path):
    first, *others = board.results.settings()
    assert first.task.metric == 'accuracy' and first.aim == 0.97
    refused = record(first, 'ES_D_RTRL 0.9', [], refused='no way')
    del refused['scores']
    records = [
        record(first, 'same step, Adam', [0.5, 0.52]),
        record(first, 'D_RTRL', [0.98, 0.96], seconds=2.0),
        record(first, 'BPTT', [0.99, 0.97]),
        refused,
    ]
    found = {'versions': {'jax': '9'}, 'records': records}
    text = board.results_page.page(found)
    assert '| D_RTRL | 97.0 % | 96.0 % to 98.0 % | yes | 2 | 0.5 | 1 | 2 KiB |' in text
    assert '| same step, Adam | 51.0 % | 50.0 % to 52.0 % | no | 4 | 1 |' in text
    assert 'ES_D_RTRL 0.9 is refused: no way' in text and '{{' not in text
    line = '| LIF + ALIF 100 | 50.0 % | 97.0 % | 51.0 % | 97.0 % | 98.0 % | D_RTRL, BPTT |'
    assert line in text and f'4 rows of `make results` (jax 9). {len(todo(board)) - 4} are' in text
    told = 'On 1 of 1 tasks the gradient of the current step alone misses the aim; D_RTRL, which'
    assert text.splitlines()[2].startswith(told) and text.index('{figure}') < text.index('| task')
    kept = board.results_page.Found(found)
    board.results_page.draw(kept, tmp_path / 'all.png', kept.settings, ('BPTT', 'D_RTRL'))
    assert (tmp_path / 'all.png').stat().st_size > 5000 and others


def todo(board):
    return [(s, way) for s in board.results.settings() for way in s.rows()]


def test_rows_are_the_issue_of_their_settings(board):
    rows = todo(board)
    names = {(s.task.name, s.net, way.name) for s, way in rows}
    assert len(names) == len(rows)
    for setting in board.results.settings():
        ways = {way.name for way in setting.rows()}
        assert {'same step, Adam', 'same step, RMSprop', 'D_RTRL'} <= ways
        assert ('BPTT' in ways) != setting.task.stream


def test_held_out_parts_have_what_is_scored(board):
    effort, key = board.results.Effort(), jax.random.key(0)
    for setting in board.results.settings():
        if not setting.task.stream:
            size = min(setting.test, effort.test)
            for part in ('validation', 'test'):
                jax.eval_shape(lambda s=setting, p=part, n=size: s.task.sample(key, n, p))


@pytest.mark.nightly
def test_the_quick_form_trains_and_keeps_nothing(board, monkeypatch, tmp_path, capsys):
    jax_cache = tmp_path / 'cache'
    monkeypatch.setattr(board.results, 'CACHE', jax_cache)
    short = [setting._replace(updates=2) for setting in board.results.quick()]
    monkeypatch.setattr(board.results, 'quick', lambda: short)
    monkeypatch.setattr(
        sys, 'argv', ['results.py', '--quick', '--output', str(tmp_path / 'r.json')]
    )
    board.results.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + sum(len(s.rows()) for s in short)
    assert not (tmp_path / 'r.json').exists() and 'refused' not in ''.join(lines)


def test_the_page_and_readme_are_those_of_the_records_that_are_kept(board):
    kept = json.loads(board.results.PATH.read_text(encoding='utf-8'))
    names = {(s.task.name, s.net, way.name) for s, way in todo(board)}
    assert {(r['task'], r['net'], r['row']) for r in kept['records']} == names
    page, readme = (ROOT / name for name in ('docs/results.md', 'README.md'))
    told = 'run python benchmarks/results_page.py'
    assert page.read_text(encoding='utf-8') == board.results_page.page(kept), told
    text = readme.read_text(encoding='utf-8')
    assert text == board.results_page.readme(text, kept), told


def test_agents_have_their_rows_and_a_picture(board, tmp_path):
    kept = json.loads(board.acting.PATH.read_text(encoding='utf-8'))['records']
    wanted = [(s.name, way.name) for s in board.acting.settings() for way in s.ways]
    assert sorted((r['task'], r['row']) for r in kept) == sorted(set(wanted))
    text = board.acting.tables(kept)
    assert text.count(':::{dropdown} ') == len(board.acting.settings())
    board.acting.draw(kept, tmp_path / 'acting.png')
    assert (tmp_path / 'acting.png').stat().st_size > 10_000


@pytest.mark.nightly
def test_an_agent_is_measured_in_the_quick_form(board, monkeypatch, tmp_path, capsys):
    at = str(tmp_path / 'r.json')
    monkeypatch.setattr(sys, 'argv', ['acting.py', '--quick', '--output', at])
    board.acting.main()
    assert (
        'chain 20 with 3 distractors, batch of 8, 4,000 steps | RTU 32 | D_RTRL: '
        in capsys.readouterr().out
    )


def test_every_question_has_its_table(board):
    kept = json.loads(board.causes.PATH.read_text(encoding='utf-8'))
    assert list(kept) == list(board.causes.QUESTIONS)
    for head, *rows in kept.values():
        assert rows and all(len(row) == len(head) for row in rows)
