"""The benchmarks compare like with like, and the pages say what the results say."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.benches import modules

ROOT = Path(__file__).resolve().parent.parent
KEPT = min((ROOT / 'benchmarks' / 'results').glob('*-cores*.json'))
TINY = ('rnn', 3, 2, 4, 2)
MODULES = (
    *('columns', 'cells', 'by_hand', 'worker', 'once', 'performance', 'figures'),
    *('performance_page', 'accelerator', 'brain_scale', 'receipts', 'runner'),
)


@pytest.fixture(scope='module')
def bench():
    """The modules of benchmarks/, which import one another by their plain names."""
    with modules(*MODULES) as found:
        yield found


class TracesAtEachCall:
    """A learner that runs its step function in Python at each call: it compiles nothing."""

    def __init__(self, model, *args, **options):
        self.model, self.states, self.reset_state = model, model.states, lambda: None

    def compile_graph(self, x):
        pass

    def __call__(self, x):
        return self.model(x)

    def etrace_grad(self, *sequences, step_fn, chunk_size=None):
        return step_fn(*[s[:chunk_size] if chunk_size else s[0] for s in sequences])


def columns_of(bench):
    c = bench.columns
    return [*c.SEQUENCES, *c.UPDATES, *c.OF_CELLS, c.EAGER, *c.windows_of(100)]


def test_a_column_is_compiled_by_jit_or_by_its_own_call(bench):
    alone = {'grad', 'train', 'evolve', 'read_and_write', 'product', 'eager'}
    for column in columns_of(bench):
        assert column.call != 'as it is' or column.task in alone, column.name
        assert column.task in bench.worker.TASKS and column.call in bench.worker.CALLS
        assert set(column.kinds) <= set(bench.cells.CELLS), column.name


def test_a_call_outside_of_jit_is_refused_and_not_timed(bench, monkeypatch):
    package = types.SimpleNamespace(D_RTRL=TracesAtEachCall)
    monkeypatch.setattr(bench.worker, 'braintrace', package)
    column, answers = bench.columns.named('public d_rtrl'), []
    for call in ('as it is', column.call):
        ask, runs = {'make': 'it', 'task': column.task, 'call': call, 'spec': TINY}, {}
        bench.worker.answer(ask | column.arguments, runs)
        answers.append(bench.worker.answer({'time': 'it'}, runs))
    assert 'wrap the call in jit' in answers[0]['error'] and answers[1].keys() == {'seconds'}


class TeachesNothing(TracesAtEachCall):
    """A learner whose gradient is zero for all but the readout."""

    def etrace_grad(self, *sequences, step_fn, chunk_size=None):
        return {('w0',): jnp.zeros(3), ('out',): jnp.ones(2)}


def test_a_gradient_of_zeros_is_refused_and_not_timed(bench, monkeypatch):
    package = types.SimpleNamespace(D_RTRL=TeachesNothing)
    monkeypatch.setattr(bench.worker, 'braintrace', package)
    column, runs = bench.columns.named('public d_rtrl'), {}
    ask = {'make': 'it', 'task': column.task, 'call': column.call, 'spec': TINY}
    answer = bench.worker.answer(ask | column.arguments, runs)
    assert "('w0',)" in answer['error'] and 'out' not in answer['error']


def test_the_public_package_gets_a_model_that_it_learns(bench):
    public, own = (bench.columns.named(name) for name in ('public d_rtrl', 'd_rtrl trace'))
    assert public.network(('lstm', 4, 3, 2)) == ('lstm_apart', 4, 3, 2)
    assert own.network(('lstm', 4, 3, 2)) == ('lstm', 4, 3, 2)


def in_float64(arrays, add=0.0):
    return jax.tree.map(
        lambda a: jnp.asarray(a, jnp.complex128 if jnp.iscomplexobj(a) else jnp.float64) + add,
        arrays,
    )


BY_HAND = [(kind, False) for kind in ('rnn', 'gru', 'lstm', 'conv_lstm', 'alif', 'alif3')]
BY_HAND += [(kind, False) for kind in ('lif_syn', 'lru', 'lru_complex', 'mingru')]
BY_HAND += [(kind, True) for kind in ('lru', 'lru_complex', 'mingru')]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(('kind', 'associative'), BY_HAND)
def test_bptt_by_hand_is_the_gradient_of_the_scan(bench, kind, associative):
    of_pictures = kind == 'conv_lstm'
    spec = bench.cells.Spec(kind, 6, 784 if of_pictures else 2, 12, 4, 1 if of_pictures else 2)
    with jax.enable_x64(True):
        params, hidden = map(in_float64, bench.cells.initial(spec))
        hidden = {name: h + 0.4 * (1 + i) for i, (name, h) in enumerate(hidden.items())}
        xs, ys = in_float64(bench.cells.data(spec))
        oracle, _ = bench.worker.bptt(spec)
        gradient, _ = bench.worker.by_hand(spec, associative)
        at = params, hidden, 3 * xs, ys
        wanted, found = jax.jit(lambda *at: (oracle(*at), gradient(*at)))(*at)
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        size = np.linalg.norm(exact)
        assert exact.dtype in (np.float64, np.complex128) and size > 1e-6, name
        assert np.linalg.norm(found[name] - exact) < 1e-10 * size, name


def test_every_cell_measured_has_a_kind_and_a_gradient_by_hand(bench):
    rows, by_hand = bench.columns, {kind for kind, _ in BY_HAND}
    assert {spec[0] for spec in (*rows.MAIN, *rows.CELLS, *rows.CORNERS)} <= by_hand
    assert set(bench.cells.CELLS) == by_hand | set(rows.AS_PUBLIC.values())
    assert set(bench.by_hand.LINEAR) == set(rows.LINEAR)


@pytest.fixture
def found():
    """The results that are kept."""
    return json.loads(KEPT.read_text(encoding='utf-8'))


def test_the_peer_is_compared_by_its_fastest_column(bench, found):
    row = found['sequences'][0]
    row['times']['public d_rtrl 2 windows']['median'] = row['times']['d_rtrl trace']['median'] / 3
    assert bench.figures.ratio(row, ('d_rtrl trace',), bench.figures.WINDOWS) == pytest.approx(3)
    assert '| 3 |' in bench.performance_page.peers(found)


def test_auto_is_compared_with_the_fastest_fixed_window(bench, found):
    row = found['windows'][0]
    row['chosen']['trace'] = 32
    row['times']['trace 16']['median'] = row['times']['trace auto']['median'] / 2
    assert bench.performance_page.auto(row, 'trace') == pytest.approx(2)
    row['chosen']['trace'] = 16  # the same program: what is measured is the machine
    assert bench.performance_page.auto(row, 'trace') == 1


def test_the_page_says_whether_its_parts_are_of_one_run(bench, found):
    found['runs'] = {part: {'run': 'monday'} for part in found.keys() - {'environments', 'runs'}}
    assert bench.figures.runs(found) == 'All figures are of one run.'
    del found['runs']['windows']
    assert 'earlier: windows; monday: cells' in bench.figures.runs(found)


def test_an_aim_says_how_many_rows_reach_it(bench, found):
    rows = [row for row in found['cells'] if row['pair'] == 'oldest']
    for row in rows:
        row['times']['d_rtrl drop']['median'] = 0.7 * row['times']['bptt']['median']
    lru = next(row for row in rows if tuple(row['spec']) == ('lru', 128, 10, 70))
    lru['times']['d_rtrl drop']['median'] *= 2
    aim = next(line for line in bench.performance_page.aims(found).splitlines() if '0.80' in line)
    assert '| 0.80 | 0.7 to 1.4 | 6 of 7 |' in aim


def test_readme_and_page_are_those_of_the_results_that_are_kept(bench, found):
    readme, page = (
        (ROOT / name).read_text(encoding='utf-8') for name in ('README.md', 'docs/performance.md')
    )
    told = 'run python benchmarks/performance_page.py'
    assert bench.performance_page.readme(readme, found, KEPT.stem) == readme, told
    assert bench.performance_page.page(found, KEPT.stem) == page, told
    costs = bench.receipts.PAGE.read_text(encoding='utf-8')
    kept = bench.runner.kept(bench.receipts.PATH)
    assert bench.receipts.page(costs, kept) == costs, 'run python benchmarks/receipts.py page'


@pytest.mark.nightly
def test_the_network_at_brain_scale_is_measured_in_a_small_form(bench):
    turns = bench.brain_scale.turns(1000, types.SimpleNamespace(turns=1))
    memory = {'peak': 2048, 'arrays': 512}
    rows = {
        f'1000 memory {way}': {**times, 'memory': memory, 'built': memory}
        for way, times in turns.items()
    }
    table = bench.performance_page.brain_scale({'rows': {'1000 turns': turns, **rows}})
    lines = table.splitlines()[2:]
    assert len(lines) == len(bench.brain_scale.WAYS) and '| 2 | 2 | 0.5 |' in lines[0]
    assert all(0 < way['cpu ms'] for way in turns.values())
