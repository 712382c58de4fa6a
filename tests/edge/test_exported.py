"""A step that leaves: what its program holds, and that it goes on as its learner does."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import NotSupportedError, OptionError, StructureError
from tests.edge.text import faults
from tests.nn.rows import ROWS, bare, built, inputs, layers
from tests.tiers import in_turn, none

ROOT = Path(__file__).resolve().parents[2]
RULES = {'d_rtrl': rules.d_rtrl(), 'es_d_rtrl': rules.es_d_rtrl(0.9)}
CALLS = {'update': optax.adam(1e-2), 'gradient': None}
CELLS = [name for name in ROWS if name not in {row.name for row in layers.ROWS}]


def squared(output, target):
    return sum(jnp.sum((leaf - target) ** 2) for leaf in jax.tree.leaves(bare(output)))


def exported_row(name: str, rule, optimizer):
    row = ROWS[name]
    with brainstate.environ.context(**row.context):
        learner = braintrace.ETraceLearner(built(row, row.batches[0]), rule)
        first = inputs(row, row.batches[0], 1)[0]
        x = row.given(jnp.asarray(first, jnp.int32 if first.dtype.kind == 'i' else jnp.float32))
        learner.compile_graph(x)
        return learner.export(squared, x, jnp.zeros(()), optimizer=optimizer)


def check_row(name: str, rule, call: str):
    step = exported_row(name, rule, CALLS[call])
    assert not faults(step.text)
    results = {row['name'] for row in step.manifest['results']}
    assert set(step.arrays) - {n for n in step.arrays if n.startswith('params')} <= results


@in_turn(none, name=CELLS, rule=RULES, call=CALLS)
def test_no_cell_asks_more_of_a_runtime_than_numbers(name, rule, call):
    check_row(name, RULES[rule], call)


SPIKING = 'lif', 'alif', 'lif_refractory', 'gif_units', 'leaky_rate', 'leaky_spike'


@in_turn(none, name=SPIKING, call=CALLS)
def test_nor_does_a_neuron_by_e_prop(name, call):
    check_row(name, rules.e_prop(), call)


@pytest.mark.nightly
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize(
    'row', [r for r in layers.ROWS if not r.name.startswith('sparse')], ids=lambda r: r.name
)
def test_nor_does_a_layer(row, rule, monkeypatch):
    check_row(row.name, RULES[rule], 'update')


def test_a_product_of_a_bool_is_seen_and_a_spike_of_ours_is_none():
    def text(spike):
        program = jax.export.export(jax.jit(lambda v, w: spike(v) @ w))
        return program(jnp.ones((1, 4)), jnp.ones((4, 4))).mlir_module()

    assert faults(text(lambda v: (v > 0).astype(v.dtype)))[0].startswith('product of a bool')
    assert not faults(text(nn.surrogate.triangle()))
    wide = 'func.func\n%0 = stablehlo.add %a, %b : tensor<3xf64>'
    assert faults(wide) and faults('%0 = stablehlo.custom_call @f(%a) : tensor<3xf32>')
    assert faults('%0 = stablehlo.add %a, %b : tensor<?x3xf32>')


# a small learner --------------------------------------------------------------------------------


def cell(params, carry, x):
    h, key = carry
    key, now = jax.random.split(key)
    kept = jax.random.bernoulli(now, 0.8, h.shape)
    h = jnp.tanh(0.9 * h + braintrace.matmul(jnp.where(kept, h, 0), params['r']) + x @ params['i'])
    return h @ params['o'], (h, key)


def loss(output, target):
    return jnp.mean((output - target) ** 2)


def small(rule=None, units=5, lanes=2):
    learner = functional.online(cell, rule or rules.d_rtrl())
    draw = jax.random.normal(jax.random.key(0), (units, units + 4)) / 2
    params = {'r': draw[:, :units], 'i': draw[:3, :units], 'o': draw[:, -2:]}
    carry = jnp.zeros((lanes, units)), jax.random.key(1)
    x, y = jnp.zeros((lanes, 3)), jnp.zeros((lanes, 2))
    return learner, params, learner.init(params, carry, x), x, y


def schedule():
    rate = optax.cosine_decay_schedule(1e-2, 50)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))


def stream(steps, lanes=2):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(steps, lanes, n)).astype(np.float32) for n in (3, 2))


def by_hand(learner, params, state, optimizer, xs, ys):
    """Losses and parameters of the learner itself, in the loop that a user writes."""

    @jax.jit
    def step(params, opt, state, x, y):
        found = learner.grad(loss)(params, state, x, y)
        updates, opt = optimizer.update(found.grads, opt, params)
        return optax.apply_updates(params, updates), opt, found.state, found.loss

    opt, losses = optimizer.init(params), []
    for x, y in zip(xs, ys, strict=True):
        params, opt, state, value = step(params, opt, state, x, y)
        losses.append(value)
    return params, np.array(losses)


def loader() -> str:
    page = (ROOT / 'docs/howto/learning_without_python.md').read_text(encoding='utf-8')
    return re.search(r'```python\n(# load_step\.py\n.*?)```', page, re.DOTALL)[1]


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('braintrace', 'brainstate', 'saiunit', 'optax', 'brainunit'):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import jax, numpy as np
jax.config.update('jax_disable_most_optimizations', sys.argv[2] == 'True')
from load_step import load_step
step, arrays = load_step(sys.argv[1] + '/step')
data, losses = np.load(sys.argv[1] + '/data.npz'), []
for x, y in zip(data['xs'], data['ys']):
    arrays, results = step(arrays, x=x, y=y)
    losses.append(results['loss'])
np.savez(sys.argv[1] + '/found.npz', losses=np.array(losses), **arrays)
"""


def check_alone(steps, folder, rule):
    learner, params, state, x, y = small(rule)
    xs, ys = stream(steps)
    optimizer = schedule()
    step = functional.export_step(learner, loss, params, state, x, y, optimizer=optimizer)
    step.save(folder / 'step')
    (folder / 'load_step.py').write_text(loader())
    np.savez(folder / 'data.npz', xs=xs, ys=ys)
    quick = str(jax.config.read('jax_disable_most_optimizations'))
    environment = {**os.environ, 'PYTHONPATH': '', 'JAX_PLATFORMS': 'cpu'}
    subprocess.run([sys.executable, '-c', ALONE, folder, quick], check=True, env=environment)
    found = np.load(folder / 'found.npz')
    after, losses = by_hand(learner, params, state, optimizer, xs, ys)
    np.testing.assert_array_equal(found['losses'], losses)
    for name, value in after.items():
        np.testing.assert_array_equal(found[f'params/{name}'], value)
    assert len(set(losses)) > steps / 2 and (after['r'] != params['r']).any()


@pytest.mark.slow
def test_the_loader_of_the_page_goes_on_bit_by_bit_where_this_package_is_not(tmp_path):
    check_alone(100, tmp_path, rules.d_rtrl(trace_dtype=jnp.bfloat16))


@pytest.mark.nightly
@pytest.mark.parametrize('rule', RULES)
def test_it_does_for_ten_thousand_steps(tmp_path, rule):
    jax.config.update('jax_disable_most_optimizations', False)
    try:
        check_alone(10_000, tmp_path, RULES[rule])
    finally:
        jax.config.update('jax_disable_most_optimizations', True)


@pytest.mark.slow
def test_what_is_saved_is_read_again_and_a_torn_or_foreign_file_is_refused(tmp_path):
    learner, params, state, x, y = small()
    step = functional.export_step(learner, loss, params, state, x, y, reset=True)
    step.save(tmp_path)
    again = functional.load_exported(tmp_path)
    assert again.manifest == json.loads(json.dumps(step.manifest)) and repr(again) == repr(step)
    assert (tmp_path / 'step.mlir').read_text() == step.text and '/tests/' not in step.text
    off = np.zeros(2, bool)
    xs, ys = stream(1)
    one, two = (s(s.arrays, x=xs[0], y=ys[0], reset=off) for s in (step, again))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    grads = learner.grad(loss)(params, state, xs[0], ys[0]).grads
    np.testing.assert_allclose(one[1]['grads/r'], grads['r'], rtol=1e-5, atol=1e-7)

    of_memory = {k: n for k, n in step.manifest['bytes'].items() if k in ('carry', 'trace', 't')}
    assert sum(of_memory.values()) == learner.memory().total
    for name, change in {
        'step.jax': lambda b: b[:-1],
        'state.npz': lambda b: b + b'.',
        'manifest.json': lambda b: b.replace(b'"format": 1', b'"format": 9'),
    }.items():
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(change(content))
        with pytest.raises(StructureError, match='no whole step'):
            functional.load_exported(tmp_path)
        (tmp_path / name).write_bytes(content)
    (tmp_path / 'manifest.json').unlink()
    with pytest.raises(StructureError, match='no whole step'):
        functional.load_exported(tmp_path)
    step.save(tmp_path)
    with pytest.raises(TypeError):  # it stops on its way, and leaves no old manifest to new arrays
        replace(step, manifest={**step.manifest, 'versions': object()}).save(tmp_path)
    with pytest.raises(StructureError, match='no whole step'):
        functional.load_exported(tmp_path)
    with pytest.raises(OSError, match='step.jax'):
        step.save(tmp_path / 'step.jax')
    for given, match in (
        ({'x': xs[0]}, r'reset is missing, and has to be bool\[2\]; y is missing'),
        ({'x': xs[0], 'y': ys[0], 'reset': off, 'z': 1}, r'z is int32\[\], and has to be left out'),
        ({'x': xs[0][:1], 'y': ys[0], 'reset': off}, r'x is float32\[1, 3\], .* float32\[2, 3\]'),
        ({'x': xs[0], 'y': ys[0].T[0], 'reset': off}, r'y is float32\[2\], .* float32\[2, 2\]'),
        ({'x': xs[0], 'y': ys[0], 'reset': off.astype('i4')}, 'reset is int32'),
        ({'x': xs[0] * u.mV, 'y': ys[0], 'reset': off}, r'x is float32\[2, 3\] mV, and has'),
        ({'x': list(xs[0]), 'y': ys[0], 'reset': off}, "'x' of the call is no array"),
    ):
        with pytest.raises(StructureError, match=match):
            step(step.arrays, **given)


@pytest.mark.slow
def test_a_flagged_sample_starts_anew_and_inference_walks_the_same_carry():
    learner, params, state, x, y = small(rules.es_d_rtrl(0.9))
    xs, ys = stream(3)
    step = functional.export_step(learner, loss, params, state, x, y, reset=True)
    plain = functional.export_step(learner, None, params, state, x)
    arrays, walked, wanted = step.arrays, plain.arrays, state
    for k, flags in enumerate(([False, False], [False, False], [True, False])):
        wanted = functional.reset(wanted, jnp.array(flags), state.carry)
        wanted = learner.grad(loss)(params, wanted, xs[k], ys[k]).state
        arrays, found = step(arrays, x=xs[k], y=ys[k], reset=np.array(flags))
        if k < 2:
            walked, results = plain(walked, x=xs[k])
            np.testing.assert_allclose(results['outputs'], found['outputs'], rtol=1e-6, atol=1e-7)
            np.testing.assert_array_equal(walked['carry/1'], arrays['carry/1'])
    assert arrays['t'].tolist() == [1, 3]
    np.testing.assert_allclose(arrays['carry/0'], wanted.carry[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(arrays['carry/1'], jax.random.key_data(wanted.carry[1]))


@pytest.mark.slow
def test_a_module_goes_on_where_training_left_it():
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(nn.Linear(3, 6), nn.LIF(6, 5.0), nn.Linear(6, 2))
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((2, 3)), batch_size=2)
    optimizer, (xs, ys) = optax.adam(1e-2), stream(20)

    how = {'step_fn': lambda x, y: loss(learner(x), y), 'optimizer': optimizer}
    half = learner.etrace_train(xs[:10], ys[:10], **how)
    step = learner.export(loss, xs[0], ys[0], optimizer=optimizer, opt_state=half.opt_state)
    fresh = learner.export(loss, xs[0], ys[0], optimizer=optimizer, reset=True)
    arrays, losses = step.arrays, []
    for x, y in zip(xs[10:], ys[10:], strict=True):
        arrays, results = step(arrays, x=x, y=y)
        losses.append(results['loss'])
    rest = learner.etrace_train(xs[10:], ys[10:], **how, opt_state=half.opt_state)
    np.testing.assert_allclose(losses, rest.losses, rtol=1e-4)
    assert int(arrays['optimizer/0/count']) == 20
    # a flagged sample goes back to the states of the compilation, not to those of the export
    arrays, results = fresh(fresh.arrays, x=xs[0], y=ys[0], reset=np.ones(2, bool))
    learner.restore(learner.save())
    assert arrays['t'].tolist() == [1, 1] and fresh.arrays['t'].tolist() == [10, 10]
    other = braintrace.compile(model, 'D_RTRL', jnp.zeros((2, 3)), batch_size=2)
    for path, state in other.param_states.items():
        name = '/'.join(map(str, path))
        for leaf in state.value:
            kept = fresh.arrays[f'params/{name}/{leaf}']
            state.value = {**state.value, leaf: jnp.asarray(kept)}
    np.testing.assert_allclose(results['outputs'], other(xs[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_constants_of_a_neuron_that_learn_do_so_in_the_program():
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(nn.Linear(3, 6), nn.LIF(6, 5.0, R=8.0, learn=('tau', 'V_th')))
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((2, 3)), batch_size=2)
    xs, sgd = next(stream(10)), optax.sgd(1e-2)
    step = learner.export(squared, xs[0], jnp.zeros(()), optimizer=sgd)
    arrays = step.arrays
    for x in xs:
        arrays, _ = step(arrays, x=x, y=0.0)
    learner.etrace_train(xs, step_fn=lambda x: squared(learner(x), 0), optimizer=sgd)
    own = {n: a for n, a in learner.export(None, xs[0]).arrays.items() if n.startswith('params')}
    assert sum(name.endswith(('tau', 'V_th')) for name in own) == 2, list(own)
    for name, array in own.items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
        assert (array != step.arrays[name]).any(), name


def rate(params, h, x):
    drive = braintrace.matmul(h, params['r']) + braintrace.matmul(x, params['a/b'])
    h = jnp.tanh(0.9 * h + drive).astype(h.dtype)
    return h, h


def in_mv(params, carry, x):
    h = rate(params, carry.to_decimal(u.mV), x.to_decimal(u.mV))[0]
    return h, h * u.mV


def counted(params, carry, x):
    h, count, *empty = carry
    h = rate(params, h, x['in'])[0] * jnp.where(count % 2, 1.0, 0.5)
    return (h, 3), (h, count + 1, *empty)


def upright(params, h, x):
    h = rate(params, h.T, x)[0].T
    return h, h


H, X = jnp.zeros((2, 5)), jnp.ones((2, 3))
ODD = {  # a cell, its carry, x, and a dtype of all; arrays of NumPy have 64 bits
    'half': (rate, H, X, jnp.float16),
    'bfloat16': (rate, H, X, jnp.bfloat16),
    'units': (in_mv, H * u.mV, X * u.mV, jnp.float32),
    'trees, integers, nothing': (counted, (H, 0, (), {'a': None}), {'in': X}, jnp.float32),
    'batch behind': (upright, H.T, X, jnp.float32),
    'no batch': (rate, H[0], X[0], jnp.float32),
    'NumPy': (rate, H, X, np.float64),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', ODD)
def test_odd_trees_and_dtypes_go_on_as_the_learner_does(name, tmp_path):
    run, carry, x, dtype = ODD[name]
    draw = np.random.default_rng(0).normal(size=(8, 5)) / 2
    params = {'r': draw[:5], 'a/b': draw[5:]}
    if dtype is not np.float64:
        params, carry, x = jax.tree.map(
            lambda a: a if isinstance(a, int) else jnp.asarray(a, dtype), (params, carry, x)
        )
    learner, sgd, y = functional.online(run), optax.sgd(0.1), jnp.zeros(())
    state = learner.init(params, carry, x)
    functional.export_step(learner, squared, params, state, x, y, optimizer=sgd).save(tmp_path)
    step = functional.load_exported(tmp_path)
    arrays, given = step.arrays, {'x/in': X} if isinstance(x, dict) else {'x': u.get_magnitude(x)}
    for _ in range(3):
        arrays, results = step(arrays, **given, y=y)
        grads, value, _, state = learner.grad(squared)(params, state, x, y)
        params = jax.tree.map(lambda p, g: jnp.asarray(p - 0.1 * g, p.dtype), params, grads)
    rtol = 1e-5 if dtype in (jnp.float32, np.float64) else 2e-2
    np.testing.assert_allclose(results['loss'], np.asarray(value, 'f8'), rtol=rtol)
    for leaf, path in (('r', 'params/r'), ('a/b', 'params/a~1b')):
        assert (arrays[path] != step.arrays[path]).any()
        want = np.asarray(params[leaf], 'f8')
        np.testing.assert_allclose(np.asarray(arrays[path], 'f8'), want, rtol=rtol, atol=rtol)


@pytest.mark.slow
def test_a_program_of_64_bits_says_what_it_needs(tmp_path):
    with jax.enable_x64(True):
        learner, params, state, x, y = small()
        functional.export_step(learner, loss, params, state, x, y).save(tmp_path)
    assert x.dtype == jnp.float64
    step = functional.load_exported(tmp_path)
    with pytest.raises(StructureError, match="carry/0 is float32.*'jax_enable_x64', True"):
        step(step.arrays, x=x, y=y)
    with jax.enable_x64(True):
        assert step(step.arrays, x=x, y=y)[1]['loss'].dtype == jnp.float64


def test_a_program_of_several_platforms_has_the_text_of_the_first():
    learner, params, state, x, _ = small()
    one, two = (
        functional.export_step(learner, None, params, state, x, platforms=names)
        for names in (('cpu',), ['cpu', 'cuda'])
    )
    assert one.text == two.text and two.program.platforms == ('cpu', 'cuda')


# bad input --------------------------------------------------------------------------------------


def counting(made):
    """An optimiser whose rate is counted in Python."""
    count = iter(range(100))

    def update(grads, state, params=None):
        rate = made(next(count))
        return jax.tree.map(lambda g: -rate * g, grads), state

    return optax.GradientTransformation(lambda params: (), update)


def in_numpy(number):
    return np.full(1, number, 'f4')  # an array is no part of the text of a jaxpr


def counting_loss():
    count = iter(range(100))
    return lambda output, target: next(count) * loss(output, target)


def printing(output, target):
    jax.debug.print('{}', output[0, 0])
    return loss(output, target)


BAD = {
    'a learner': (dict(learner='no'), OptionError, 'functional.online'),
    'a target': (dict(y=None), OptionError, 'a target y'),
    'platforms': (dict(platforms='cpu'), OptionError, 'several of'),
    'no platform': (dict(platforms=()), OptionError, 'several of'),
    'reset': (dict(reset=jnp.zeros(3)), StructureError, 'carry0 has another structure'),
    'optimizer': (dict(optimizer=counting(float)), OptionError, 'counts in Python'),
    'an array': (dict(optimizer=counting(in_numpy)), OptionError, 'counts in Python'),
    'counting loss': (dict(loss_fn=counting_loss()), OptionError, 'counts in Python'),
    'opt_state': (
        *(dict(optimizer=optax.sgd(0.1), opt_state=(1, 2, 3)), StructureError),
        'opt_state does not belong',
    ),
    'callback': (dict(loss_fn=printing), NotSupportedError, 'jax.debug.print'),
    'x': (dict(x=jnp.zeros((2, 4))), StructureError, r'\[2, 4\]'),
    'a list': (dict(y='text'), StructureError, 'y is no array of JAX: .* .text. of type'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', BAD)
def test_bad_input_is_told(name):
    change, kind, match = BAD[name]
    learner, params, state, x, y = small()
    given = dict(learner=learner, loss_fn=loss, params=params, state=state, x=x, y=y) | change
    with pytest.raises(kind, match=match):
        functional.export_step(**given)


@pytest.mark.slow
def test_states_that_have_walked_are_shapes_or_are_traced_are_told():
    learner, params, state, x, y = small()
    walked = learner.step(params, state, x)[1]
    with pytest.raises(OptionError, match='reset=carry0'):
        functional.export_step(learner, loss, params, walked, x, y, reset=True)
    shapes = jax.eval_shape(learner.init, params, state.carry, x)
    with pytest.raises(OptionError, match='without eval_shape'):
        functional.export_step(learner, loss, params, shapes, x, y)

    def traced(params):
        functional.export_step(learner, loss, params, state, x, y)

    with pytest.raises(OptionError, match='outside of jit'):
        jax.jit(traced)(params)
    keyed = {**params, 'k': jax.random.key(2)}
    new = learner.init(keyed, state.carry, x)
    with pytest.raises(StructureError, match='parameter k is key<fry>'):
        functional.export_step(learner, loss, keyed, new, x, y, optimizer=optax.sgd(0.1))
    grows = optax.GradientTransformation(
        lambda params: jnp.zeros(2), lambda g, s, p=None: (g, jnp.zeros(3))
    )
    with pytest.raises(StructureError, match='can not go on from its own'):
        functional.export_step(learner, loss, params, state, x, y, optimizer=grows)
