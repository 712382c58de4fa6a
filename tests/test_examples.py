"""The examples run at night, and show what README says of them; the gate runs one that is short,
and looks at the names of all.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from tests import names

EXAMPLES = Path(__file__).resolve().parent.parent / 'examples'


def load(name, *needed):
    for package in needed:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f'examples_{name}', EXAMPLES / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def digits():
    return load('digits', 'matplotlib', 'tqdm')


@pytest.fixture
def optimised():
    jax.config.update('jax_disable_most_optimizations', False)
    yield
    jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture
def drawn(tmp_path):
    """Where an example draws; it has to."""
    yield tmp_path / 'drawn.png'
    assert (tmp_path / 'drawn.png').stat().st_size > 10_000


@pytest.mark.parametrize('path', sorted(EXAMPLES.glob('*.py')), ids=lambda path: path.stem)
def test_every_example_names_what_is_there(path):
    assert not names.lost(path.read_text(encoding='utf-8'))


@pytest.mark.nightly
def test_the_demonstration_prints_its_table_and_draws_its_curves(digits, drawn, capsys):
    asked = '--epochs 1 --seeds 1 --no-stream --output'
    results = digits.main([*asked.split(), str(drawn)])
    printed = capsys.readouterr().out
    assert set(results) == set(digits.METHODS) and all(f'| {name} |' in printed for name in results)


@pytest.mark.slow
def test_the_rule_to_copy_is_its_formula():
    errors = list(load('own_rule').main().values())
    assert max(errors[:2]) < 1e-5 < 1e-2 < errors[2]


def test_rules_of_spike_timing_are_their_published_windows(tmp_path):
    errors = load('stdp', 'matplotlib').main(tmp_path / 'stdp.png')
    assert errors.keys() == {'pair', 'triplet', 'rewarded'} and max(errors.values()) < 1e-13


FRAMEWORKS = {
    'functional_plain': ('jax', 0.85),
    'nnx_online': ('flax', 0.85),
    'equinox_stream': ('equinox', 0.1),
    'linen': ('flax', 0.1),
    'haiku_online': ('haiku', 0.1),
    'blox_online': ('blox', 0.3),
    'ensemble_vmap': ('jax', 0.1),
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', FRAMEWORKS)
def test_a_model_of_another_framework_learns(name, capsys):
    """Without learning, a tenth of the digits is right, and the error is the targets' variance 1;
    without memory, half of the digits, and the same error.
    """
    package, limit = FRAMEWORKS[name]
    figure = load(name, 'sklearn', package).main()
    assert capsys.readouterr().out
    assert figure >= limit if name in ('functional_plain', 'nnx_online') else figure <= limit


@pytest.mark.nightly
def test_spiking_neurons_learn_to_remember_a_cue(drawn, capsys):
    first, last = load('spikes', 'matplotlib').main(drawn)
    assert first < 0.5 and last >= 0.9  # a quarter is right by chance
    told = f'{first:.0%} of the answers are right at first, {last:.0%} at last\n'
    assert capsys.readouterr().out == told


@pytest.mark.nightly
@pytest.mark.usefixtures('optimised')
def test_a_sparse_spiking_network_learns_to_fire_in_turn(drawn, capsys):
    before, after = load('brain_scale', 'matplotlib').main(5000, 600, drawn)
    assert after < 0.6 * before and after < 0.09  # a constant rate for each group: above 0.14
    out, err = capsys.readouterr()
    assert out.startswith('5,000 neurons: ') and '600/600 steps' in err


@pytest.mark.nightly
def test_excitatory_and_inhibitory_neurons_learn_and_keep_their_law(drawn):
    example = load('ei_network', 'matplotlib')
    share, held = example.main(40, 16, drawn)
    assert share > 0.75 and held  # a half is right by chance
    model = example.Network(1)
    model.recurrent.weight.value = {'weight': -model.recurrent.weight.value['weight']}
    assert example.keeps_its_law(model)  # whatever an update makes of a weight
    model.wires = model.wires[1:]
    assert not example.keeps_its_law(model)


TRAINED = {  # arguments in a small form, and whether the figure is good enough
    'evidence': ((40, 16), lambda share: share > 0.7),
    'pixels': ((40, 25), lambda share: share > 0.3),
    'copy_memory': ((5, 60), lambda error: error['D_RTRL'] < error['same_step'] < 1),
    'drifting_stream': ((20_000,), lambda error: error['D_RTRL'] < 0.5),
}


@pytest.mark.nightly
@pytest.mark.parametrize('name', TRAINED)
def test_a_task_is_learnt_and_drawn(name, drawn, capsys):
    arguments, good = TRAINED[name]
    assert good(load(name, 'matplotlib', 'sklearn').main(*arguments, drawn))
    out, err = capsys.readouterr()
    assert 'floor' in out and 'loss' in err


@pytest.mark.nightly
def test_an_agent_remembers_and_its_curve_is_drawn(drawn, capsys):
    asked = '--length 4 --steps 20000 --seeds 2 --agent actor_critic --batch 4 --cell RTU'
    curves = load('agents', 'matplotlib', 'optax').main(asked.split(), drawn)
    assert (curves[:, -4:].mean(1) > 0.8).all() and curves.shape == (2, 40)
    assert 'chain 4: actor_critic, RTU, d_rtrl' in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.usefixtures('optimised')
def test_a_network_that_moves_by_nir_learns_on_until_half_of_its_loss_is_back(capsys):
    before, moved, after, same_step = load('nir_moves', 'nir', 'optax').main()
    assert before > 0.8 and moved < before - 0.2
    assert after - moved >= (before - moved) / 2
    assert f'| moved, 300 updates of same_step | {same_step:.1%} |' in capsys.readouterr().out


SPOKEN = '--units 4 --groups 10 --steps 60 --samples 60 --batch 20 --rule e_prop --epochs'


@pytest.mark.nightly
def test_spoken_words_are_learnt_by_a_run_that_goes_on(tmp_path, capsys, monkeypatch):
    shd, titles = load('shd', 'matplotlib', 'h5py'), []
    monkeypatch.setattr(shd.plt, 'close', lambda figure: titles.append(figure.get_suptitle()))
    whole = shd.main([*SPOKEN.split(), '2', '--output', str(tmp_path / 'whole')])
    shd.main([*SPOKEN.split(), '1', '--output', str(tmp_path / 'cut')])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == shd.MADE and titles[0] == f'e_prop: {shd.MADE}'
    given = [f'--{part}={tmp_path / "cut" / f"made_{part}.h5"}' for part in ('train', 'test')]
    again = ['--go-on', '--output', str(tmp_path / 'cut')]
    assert shd.main([*SPOKEN.split(), '2', *given, *again]) == whole
    assert (tmp_path / 'cut' / 'shd.png').stat().st_size > 10_000
    out = capsys.readouterr().out
    assert 'SHA-256' in out and 'epoch 2' in out and 'epoch 1' not in out and shd.MADE not in out


@pytest.mark.nightly
@pytest.mark.usefixtures('optimised')
def test_online_learning_comes_close_to_backpropagation(digits, tmp_path):
    results = digits.main(['--no-stream', '--output', str(tmp_path / 'curves.png')])
    mean = {name: result.final.mean() for name, result in results.items()}
    memoryless = digits.Data.load().memoryless
    assert mean['LRU, BPTT'] >= 0.95 and mean['GRU, BPTT'] >= 0.95 and memoryless <= 0.6, (
        'the task needs memory, and the networks can do it'
    )
    assert abs(mean['LRU, D_RTRL'] - mean['LRU, BPTT']) <= 0.01
    assert mean['GRU, D_RTRL'] >= 0.90
    cosine = {name: min(result.cosine) for name, result in results.items()}
    assert cosine['LRU, D_RTRL'] > 0.999 > cosine['GRU, D_RTRL'] > 0
    long = {name: result.memory[digits.LONG] for name, result in results.items()}
    assert 20 * long['LRU, D_RTRL'] <= long['LRU, BPTT']
