"""The benchmarks compare like with like, and the pages say what the results say."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ('rnn', 3, 2, 4, 2)
MODULES = ('models', 'by_hand', 'columns', 'worker', 'figures', 'report')


@pytest.fixture(scope='module')
def bench():
    """The modules of benchmarks/, which import one another by their plain names."""
    sys.path.insert(0, str(ROOT / 'benchmarks'))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(ROOT / 'benchmarks'))
        for name in MODULES:
            sys.modules.pop(name, None)


class TracesAtEachCall:
    """A learner that runs its step function in Python at each call: it compiles nothing."""

    def __init__(self, model, *args, **options):
        self.model, self.states, self.reset_state = model, model.states, lambda: None

    def compile_graph(self, x):
        pass

    def __call__(self, x):
        return (
            brainstate.transform.for_loop(self.model, x.xs)
            if isinstance(x, Window)
            else self.model(x)
        )

    def etrace_grad(self, *sequences, step_fn, chunk_size=None):
        return step_fn(*[s[:chunk_size] if chunk_size else s[0] for s in sequences])


class Window:
    def __init__(self, xs):
        self.xs = xs


@pytest.fixture
def peer(bench, monkeypatch):
    """The worker with a package in whose calls nothing is compiled."""
    package = types.SimpleNamespace(
        D_RTRL=TracesAtEachCall, pp_prop=TracesAtEachCall, MultiStepData=Window
    )
    monkeypatch.setattr(bench.worker, 'braintrace', package)
    return bench.worker


def second_run(worker, column, call):
    runs: dict = {}
    worker.answer(
        {'make': 'it', 'task': column.task, 'call': call, 'spec': TINY, **column.arguments}, runs
    )
    return worker.answer({'time': 'it'}, runs)


def peers(bench):
    return [c for c in (*bench.columns.SEQUENCES, *bench.columns.UPDATES) if c.package == 'public']


def test_every_column_of_the_public_package_is_compiled_once(bench, peer):
    assert len(peers(bench)) >= 8
    for column in peers(bench):
        assert second_run(peer, column, column.call).keys() == {'seconds'}, column.name


def test_a_call_outside_of_jit_is_refused_and_not_timed(bench, peer):
    for column in (
        bench.columns.named('public d_rtrl'),
        bench.columns.named('public pp_prop 1 window'),
    ):
        assert 'wrap the call in jit' in second_run(peer, column, 'as it is')['error'], column.name


def test_the_first_calls_are_those_columns_too(bench):
    for columns in bench.columns.FIRST.values():
        assert {bench.columns.named(c).package for c in columns} == {'ours', 'public'}


@pytest.mark.parametrize('kind', ['rnn', 'gru', 'lstm'])
def test_bptt_by_hand_is_the_gradient_of_the_scan(bench, kind):
    spec = bench.models.Spec(kind, 3, 2, 4, batch=2, layers=2)
    with jax.enable_x64(True):
        params, hidden = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64), bench.models.initial(spec)
        )
        hidden = {name: h + 0.1 * (1 + i) for i, (name, h) in enumerate(hidden.items())}
        xs, ys = (jnp.asarray(a, jnp.float64) for a in bench.models.data(spec))
        oracle, _ = bench.worker.bptt(spec)
        gradient, _ = bench.worker.by_hand(spec)
        wanted, found = jax.jit(lambda *at: (oracle(*at), gradient(*at)))(params, hidden, xs, ys)
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        size = np.linalg.norm(exact)
        assert exact.dtype == np.float64 and size > 1e-6
        assert np.linalg.norm(found[name] - exact) < 1e-10 * size, name


def timed(columns, spec, pair='oldest'):
    """A row of results in which the k-th column takes k + 1 ms a step."""
    times = {
        c.name: {'median': 1e-3 * (k + 1) * spec[3]}
        for k, c in enumerate(columns)
        if pair == 'oldest' or c.everywhere
    }
    return {
        'spec': spec,
        'pair': pair,
        'times': {n: {**t, 'low': t['median'], 'high': t['median']} for n, t in times.items()},
    }


@pytest.fixture
def found(bench):
    """Results as performance.py writes them."""
    c = bench.columns
    versions = {'python': '3', 'jax': '1', 'brainstate': '2', 'braintrace': '0.0'}
    main = [(spec, pair) for pair in c.PAIRS for spec in c.MAIN]
    return {
        'environments': {
            pair: {'ours': versions, 'public': {**versions, 'braintrace': f'{pair}.9'}}
            for pair in c.PAIRS
        },
        'sequences': [timed(c.SEQUENCES, *at) for at in main],
        'updates': [timed(c.UPDATES, *at) for at in main],
        'scaling': {
            axis: [timed(c.SCALING, (kind, 8, 8, 10, 2, 1)) for kind in ('rnn', 'lstm')]
            for axis in ('units', 'steps', 'batch', 'layers', 'cells')
        },
        'memory': [{'rule': 'd_rtrl', 'steps': 1000, 'peak': 2**20 * 400, 'seconds': 1.0}],
        'once': {
            'import': [{'brainstate': 1.0, 'braintrace': 0.1}],
            'first': [
                {
                    'spec': c.MAIN[0],
                    'pair': 'oldest',
                    'rule': 'd_rtrl',
                    'seconds': {
                        'd_rtrl trace': 1.0,
                        'public d_rtrl': 4.0,
                        'public d_rtrl 1 window': 2.0,
                    },
                }
            ],
        },
        'progress': [{'spec': c.MAIN[0], 'times': {'on': {'low': 1.0}, 'off': {'low': 1.0}}}],
        'precision': [{'spec': c.MAIN[0], 'errors': {'w0': 1e-3}}],
    }


def test_the_page_names_how_each_column_is_called_and_both_references(bench, found):
    page = bench.report.page(found, 'a machine')
    assert '{{' not in page and '| `brainstate.transform.jit` |' in page
    assert (
        '| ratio | JAX | by hand / scan | drop / scan | trace / scan | drop / by hand | trace / by '
        'hand |' in page
    )
    rows = [
        line
        for line in page.splitlines()
        if line.startswith('| public') or 'oldest.9, latest.9' in line
    ]
    assert len(rows) == len(peers(bench)) and all('brainstate.transform.jit' in row for row in rows)
    assert '| 1 | d_rtrl | 1 | oldest.9 | 2 | 0.5 |' in page  # the faster of its first calls


def test_the_peer_is_compared_by_its_fastest_column(bench, found):
    row = found['sequences'][0]
    row['times']['public d_rtrl 2 windows']['median'] = row['times']['d_rtrl trace']['median'] / 3
    assert bench.figures.ratio(row, ('d_rtrl trace',), bench.figures.WINDOWS) == pytest.approx(3)
    assert '| 3 |' in bench.report.peers(found)


def test_the_section_of_readme_is_made_of_the_results(bench, found):
    readme = bench.report.readme('# a\n\n## What it costs\n\nold\n\n## More\n', found, 'a machine')
    assert (
        'old' not in readme.split()
        and readme.startswith('# a\n\n## What it costs\n\nOn ')
        and readme.endswith('\n\n## More\n')
    )
    assert 'D_RTRL takes 3 times as long as `jax.grad`' in ' '.join(readme.split())


def test_readme_and_page_are_those_of_the_results_that_are_kept(bench):
    path = min((ROOT / 'benchmarks' / 'results').glob('*.json'))
    found = json.loads(path.read_text(encoding='utf-8'))
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert bench.report.readme(readme, found, path.stem) == readme, (
        'run python benchmarks/report.py'
    )
    assert bench.report.page(found, path.stem) == (ROOT / 'docs' / 'performance.md').read_text(
        encoding='utf-8'
    )
