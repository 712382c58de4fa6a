"""Steps of real learners, recorded and derived again."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import EtpDtypeError, NotSupportedError, OptionError, StructureError
from braintrace.receipts import Cell, Recorder, capture
from braintrace_receipts import ReceiptError, check, parse_run, reconcile_run
from tests.compare import assert_close
from tests.tiers import first, in_turn

B, I, N, O = 3, 2, 4, 2  # noqa: E741
LR = 0.05
ADAM = {'lr': LR, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8, 'eps_root': 0.0}
OPTIMIZERS = {
    'sgd': (optax.sgd(LR), {'lr': LR}),
    'momentum': (optax.sgd(LR, 0.9), {'lr': LR, 'momentum': 0.9, 'nesterov': False}),
    'adam': (optax.adam(LR), ADAM),
    'adamw': (optax.adamw(LR, weight_decay=0.1), {**ADAM, 'weight_decay': 0.1}),
}
STEEP = {'name': 'fast_sigmoid', 'parameters': {'slope': 2.0}}
CELLS = {
    'rnn': lambda **o: Cell.rnn(0.6, **o),
    'lif': lambda **o: Cell.lif(8.0, 0.4, **o),
    'alif': lambda **o: Cell.alif(8.0, 0.4, 30.0, 0.3, surrogate=STEEP, reset_gradient=True, **o),
}
RULES = {
    'cut': rules.d_rtrl(),
    'whole': rules.d_rtrl(credit='whole'),
    'one decay': rules.es_d_rtrl(0.8),
    'two decays': rules.es_d_rtrl((0.8, 0.6)),
    'e-prop': rules.e_prop(0.8, 'random'),
}


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), float)


def started(cell, rule, **options):
    """A recording, its parameters and its first state."""
    params = jax.tree.map(
        lambda p: p.astype(float), cell.init(jax.random.key(1), I, N, O, bias=True)
    )
    learner = functional.online(cell, rule)
    state = learner.init(params, cell.carry(params, B), drawn(B, I))
    return capture(learner, **options), params, state


@functools.cache
def plain():
    """The recording that most tests ask for, with its parameters and its first state."""
    return started(CELLS['rnn'](), RULES['cut'])


@functools.cache
def step_of(recording):
    """A step, compiled once for the tests that share a recording."""
    return jax.jit(recording.grad)


def recorder(recording, name='sgd', **options):
    file = io.BytesIO()
    optimizer = {'name': name, 'config': OPTIMIZERS[name][1]}
    return Recorder(file, recording, optimizer, run_id='test', **options), file


def judged(file, **options):
    """The verdict on a file, and its receipts."""
    receipts = parse_run(file.getvalue())
    assert not check(receipts[0], 'braintrace.receipt/1')
    return reconcile_run(receipts, **options), receipts


def assert_rederived(file, **options):
    found, receipts = judged(file, **options)
    assert found.verdict == 'rederived', found.failures[:3]
    return receipts


def trained(recording, params, state, steps=3, optimizer='sgd', rate=None):
    """A file of single steps; before the last one a lane starts again. ``rate``: a schedule."""
    transform = OPTIMIZERS[optimizer][0] if rate is None else optax.adam(rate)
    writer, file = recorder(recording, optimizer)
    opt, step = transform.init(params), step_of(recording)
    mask = jnp.array([1.0, 0.0, 2.0])
    for k in range(steps):
        given = {} if rate is None else {'lr': float(rate(k))}
        x, y = 2 * drawn(B, I, seed=k), jax.nn.softmax(drawn(B, O, seed=k))
        if k == steps - 1:
            initial = jax.tree.map(jnp.ones_like, state.carry)
            given |= {'reset': np.arange(B) == 1, 'initial': initial}
            state = functional.reset(state, given['reset'], initial)
        (grads, _, _, new), record = step(params, state, x, y, mask)
        updates, after = transform.update(grads, opt, params)
        changed = optax.apply_updates(params, updates)
        writer.write(params, state, x, y, record, updates, opt, after, changed, **given)
        params, state, opt = changed, new, after
    return file


DTYPES = 'float32', 'float64'


@in_turn(first('cut'), rule=RULES, cell=CELLS, optimizer=OPTIMIZERS, dtype=DTYPES)
def test_single_steps_are_derived_again(rule, cell, optimizer, dtype):
    with jax.enable_x64(dtype == 'float64'):
        leaky = {'tau_out': 4.0} if rule in ('e-prop', 'whole') else {}
        loss = 'softmax_ce' if optimizer == 'sgd' else 'half_mse'
        recording, params, state = started(CELLS[cell](**leaky), RULES[rule], loss=loss)
        receipts = assert_rederived(trained(recording, params, state, optimizer=optimizer))
    assert receipts[0]['numeric']['dtype'] == dtype
    assert [sum(r['reset']) for r in receipts] == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['grad', 'update'])
def test_sequences_are_derived_again(kind):
    with jax.enable_x64(True):
        recording, params, state = started(CELLS['lif'](tau_out=4.0), RULES['cut'])
        (writer, file), (transform, _) = recorder(recording, 'adam'), OPTIMIZERS['adam']
        xs, ys, opt = 2 * drawn(5, B, I), drawn(5, B, O), transform.init(params)
        mask = jnp.array([1.0, 0.0, 2.0, 1.0, 1.0])
        resets = (jnp.arange(5) == 2, jax.tree.map(jnp.ones_like, state.carry))
        learner = recording.learner
        args = (xs, ys, mask, resets)
        loss = lambda o, y: 0.5 * jnp.sum((o - y) ** 2) / B
        if kind == 'grad':
            got, run = jax.jit(recording.sequence_grad)(params, state, *args)
            want = jax.jit(learner.sequence_grad(loss))(params, state, *args)
            assert_close(got.grads, want.grads)
            assert_close(got.state.carry, want.state.carry)
            writer.write_sequence(params, run)
        else:
            got, blocks = recording.sequence_update(transform, 2)(params, opt, state, *args)
            learn = jax.jit(learner.sequence_update(loss, transform, update_every=2))
            assert_close(got.params, learn(params, opt, state, *args).params)
            for block in blocks:
                writer.write_sequence(*block)
    receipts = assert_rederived(file)
    windows = [2, 2, 2, 2, 1] if kind == 'update' else [5] * 5
    assert [r['window']['length'] for r in receipts] == windows


@pytest.mark.slow
def test_frozen_parameters_stay_as_they_are():
    cell, (transform, _) = CELLS['rnn'](), OPTIMIZERS['adamw']
    params = cell.init(jax.random.key(1), I, N, O)
    learner = functional.online(cell, trainable=lambda path, leaf: path[0] != 'W_out')
    xs, ys = (drawn(4, B, n).astype(jnp.float32) for n in (I, O))
    state = learner.init(params, cell.carry(params, B), xs[0])
    recording = capture(learner)
    (writer, file), update = recorder(recording, 'adamw'), recording.sequence_update(transform, 4)
    writer.write_sequence(*update(params, transform.init(params), state, xs, ys)[1][0])
    receipts = assert_rederived(file)
    assert receipts[-1]['params_after']['W_out'] == receipts[0]['params_before']['W_out']


def lstm(p, c, x):
    """The output reads the old states too, whose signals then pass no new one in part."""
    read = jnp.concatenate([x, c['h']], -1)
    i, f, g, o = (braintrace.matmul(read, p[k]) for k in 'ifgo')
    cell = jax.nn.sigmoid(f) * c['c'] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return braintrace.matmul(h + c['h'] + c['c'], p['out']), {'c': cell, 'h': h}


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['cut', 'two decays'])
def test_an_opaque_cell_is_consistent_at_most(rule):
    with jax.enable_x64(True):
        params = {k: drawn(I + N, N, seed=ord(k)) for k in 'ifgo'} | {'out': drawn(N, O)}
        learner = functional.online(lstm, RULES[rule])
        zeros = jnp.zeros((B, N))
        state = learner.init(params, {'c': zeros, 'h': zeros}, drawn(B, I))
        found, _ = judged(trained(capture(learner), params, state))
    assert found.verdict == 'consistent', found.failures[:3]


def own(p, c, x):
    """The same as a rnn cell, with other names."""
    y = braintrace.matmul(jnp.concatenate([x, c['state']], -1), p['cell']['w'])
    h = 0.6 * c['state'] + jnp.tanh(y)
    return braintrace.matmul(h, p['out']['w']), {'state': h}


def own_learner(rule):
    params = {'cell': {'w': drawn(I + N, N)}, 'out': {'w': drawn(N, O)}}
    learner = functional.online(own, rule)
    return learner, params, learner.init(params, {'state': jnp.zeros((B, N))}, drawn(B, I))


@pytest.mark.slow
def test_a_function_that_is_declared_to_be_a_known_cell_is_derived_again():
    names = {'recurrent': 'cell/w', 'readout': 'out/w', 'h': 'state'}
    with jax.enable_x64(True):
        learner, params, state = own_learner(RULES['cut'])
        right = capture(learner, cell=Cell.rnn(0.6), roles=names)
        receipts = assert_rederived(trained(right, params, state))
        wrong = capture(learner, cell=Cell.rnn(0.7), roles=names)
        assert judged(trained(wrong, params, state))[0].verdict == 'failed'
        with pytest.raises(StructureError, match='Name them in `roles`'):
            _ = capture(learner, cell=Cell.rnn(0.6)).topology
        with pytest.raises(StructureError, match='Map its names in `roles`'):
            _ = capture(learner, cell=Cell.rnn(), roles={**names, 'h': 'h'}).topology
    assert receipts[0]['topology']['relations'][0]['params'] == {'weight': 'cell/w'}


@pytest.mark.slow
def test_a_loss_and_an_optimizer_of_your_own_are_consistent_at_most():
    with jax.enable_x64(True):
        loss = {'loss': lambda out, y: jnp.mean(jnp.abs(out - y))}
        recording, params, state = started(CELLS['rnn'](), RULES['cut'], **loss)
        x, y, transform = drawn(B, I), drawn(B, O), optax.lion(LR)
        (grads, *_), record = jax.jit(recording.grad)(params, state, x, y)
        opt, file = transform.init(params), io.BytesIO()
        updates, after = transform.update(grads, opt, params)
        writer = Recorder(file, recording, {'name': 'lion', 'config': {'lr': LR}})
        new = optax.apply_updates(params, updates)
        writer.write(params, state, x, y, record, updates, opt, after, new)
    found, (receipt,) = judged(file)
    assert found.verdict == 'consistent', found.failures[:3]
    assert receipt['optimizer']['state_after'] == {'count': None, 'slots': {}}


@pytest.mark.slow
def test_a_narrow_trace_is_recorded_step_by_step():
    rule = rules.d_rtrl(trace_dtype=jnp.bfloat16)
    recording, params, state = started(CELLS['rnn'](), rule)
    assert_rederived(trained(recording, params, state), allow=('bf16',))
    with pytest.raises(NotSupportedError, match='Record single steps'):
        recording.sequence_grad(params, state, drawn(2, B, I), drawn(2, B, O))


@pytest.mark.slow
def test_large_arrays_go_to_a_file_or_are_sampled(tmp_path):
    cell, width = Cell.rnn(), 40
    params, x = cell.init(jax.random.key(0), I, width, O), drawn(B, I)
    learner = functional.online(cell)
    state = learner.init(params, cell.carry(params, B), x)
    nodes, (_, record) = {}, jax.jit(capture(learner).grad)(params, state, x, drawn(B, O))
    for arrays in ('npz', 'sample'):
        path = tmp_path / f'{arrays}.jsonl'
        writer = Recorder(path, capture(learner, arrays=arrays))
        for _ in range(2):
            writer.write(params, state, x, drawn(B, O), record)
        nodes[arrays], _ = parse_run(path.read_bytes())
    trace = nodes['npz']['traces_after'][0]['entries']['weight'][0]
    with np.load(tmp_path / trace['file'], allow_pickle=False) as saved:
        assert_close(saved[trace['key']], np.asarray(record.observed.after['W']['h']['weight'][0]))
    assert reconcile_run([nodes['sample']]).verdict == 'consistent'


@pytest.mark.slow
@pytest.mark.parametrize('model', ['GRUCell', 'MinGRUCell'])
def test_the_learner_of_a_model_is_recorded_by_its_pure_functions(model):
    model, x = getattr(braintrace.nn, model)(I, N), drawn(B, I).astype(jnp.float32)
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((B, I)), batch_size=B, seed=0)
    recording = capture(learner)
    online, params, carry = learner.pure()
    state = online.init(params, carry, x)
    out, file = jnp.zeros((B, N)), io.BytesIO()
    _, record = jax.jit(recording.grad)(params, state, x, out)
    Recorder(file, recording).write(params, state, x, out, record)
    found, _ = judged(file)
    assert found.verdict == 'consistent', found.failures[:3]


@pytest.mark.slow
def test_each_few_steps_are_written_and_a_donated_array_is_named():
    recording, params, state = started(CELLS['rnn'](), RULES['cut'])
    x, y, file = drawn(B, I), drawn(B, O), io.BytesIO()
    writer = Recorder(file, recording, record_every=2)
    step = jax.jit(recording.grad, donate_argnums=1)
    for k in range(3):
        held = state.replace(carry=jax.tree.map(np.array, state.carry))
        (*_, new), record = step(params, state, x, y)
        writer.write(params, held, x, y, record)
        if k == 2:
            jax.tree.map(lambda a: a.delete(), record.carry_after)
            with pytest.raises(StructureError, match='Copy what the step donates'):
                Recorder(io.BytesIO(), recording).write(params, held, x, y, record)
        state = new
    assert [r['step'] for r in parse_run(file.getvalue())] == [0, 2]


@pytest.mark.parametrize(
    ('name', 'value'),
    [('loss', 'mse'), ('reduction', 'none'), ('arrays', 'zip'), ('cell', 'lif')],
)
def test_a_bad_option_is_refused(name, value):
    with pytest.raises(OptionError, match=f"{name} is '{value}'"):
        capture(functional.online(Cell.rnn()), **{name: value})
    with pytest.raises(OptionError, match='learner is list'):
        capture([])


@pytest.mark.slow
def test_what_a_receipt_can_not_hold_is_refused(monkeypatch):
    for rule, said in ((rules.rtrl(), 'the rule is'), (rules.d_rtrl(scope='own'), "scope='own'")):
        with pytest.raises(NotSupportedError, match=said):
            capture(functional.online(Cell.rnn(), rule))
    recording, params, state = plain()
    x, y = drawn(B, I), drawn(B, O)
    with pytest.raises(StructureError, match='no array'):
        recording.grad(params, state, (x, x), y)
    with pytest.raises(StructureError, match='give the weights of the lanes'):
        recording.grad(params, state, x, y, jnp.ones(2))
    narrow = state.replace(carry=jax.tree.map(lambda a: a.astype(jnp.bfloat16), state.carry))
    with pytest.raises(EtpDtypeError, match='bfloat16'):
        recording.grad(params, narrow, x, y)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with pytest.raises(NotSupportedError, match='made in tf32 on this device'):
        recording.grad(params, state, x, y)
    allowed = capture(recording.learner, allow_tf32=True)
    _, record = jax.jit(allowed.grad)(params, state, x, y)
    with jax.default_matmul_precision('highest'):
        _, precise = jax.jit(recording.grad)(params, state, x, y)
    assert (int(record.precision), int(precise.precision)) == (1, 0)


@pytest.mark.slow
def test_adaptive_feedback_is_refused():
    rule = rules.e_prop(0.0, 'adaptive')
    recording, params, state = started(CELLS['rnn'](), rule)
    with pytest.raises(NotSupportedError, match="'adaptive' changes at every step"):
        _ = recording.topology


FUSED = """
import jax, numpy as np
from braintrace import functional, receipts, rules

cell, lanes, steps = receipts.Cell.lif(reset_gradient=True), 7, 25
learner = functional.online(cell, rules.es_d_rtrl(0.9))
params = cell.init(jax.random.key(0), 5, 19, 3)
xs = 1.5 * (jax.random.uniform(jax.random.key(1), (steps, lanes, 5)) < 0.3)
ys = jax.random.normal(jax.random.key(2), (steps, lanes, 3))
state = learner.init(params, cell.carry(params, lanes), xs[0])
run = jax.jit(receipts.capture(learner).sequence_grad)(params, state, xs, ys)[1]
seen = jax.tree.map(np.asarray, run.steps.observed)
jax.tree.map(lambda b, a: np.testing.assert_array_equal(b[1:], a[:-1]), seen.before, seen.after)
"""


@pytest.mark.nightly
def test_traces_of_neighbours_agree_to_the_bit_where_the_compiler_fuses():
    """Tests compile without fusion, so this is a process of its own."""
    own = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
    done = subprocess.run([sys.executable, '-c', FUSED], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-600:]


def test_a_learner_of_another_batch_size_is_refused_before_it_is_recorded():
    recording, params, _ = plain()
    wide, carry = jnp.ones((5, I)), CELLS['rnn']().carry(params, 5)
    state = recording.learner.init(params, carry, wide)
    with pytest.raises(StructureError, match='5 lanes, and the learner was compiled for 3 first'):
        recording.grad(params, state, wide, jnp.ones((5, O)))


def test_a_slow_decay_is_corrected_as_the_step_rounds_it():
    """Near 1 few digits of ``1 - a^(t+1)`` are left in float32."""
    recording, params, state = started(CELLS['lif'](), rules.es_d_rtrl(0.9999))
    receipts = assert_rederived(trained(recording, params, state))
    for one in receipts:
        array = one['gradients']['W']
        array['data'] = [1.05 * float(value) for value in array['data']]
        assert reconcile_run([one]).failures[0].rule == 4


def test_a_slope_that_is_rounded_to_zero_may_be_made_anew_where_a_trace_uses_it():
    recording, params, state = plain()
    writer, file = recorder(recording)
    for size in (0.1, 100.0):
        x, y = jnp.full((B, I), size), drawn(B, O)
        (*_, new), record = step_of(recording)(params, state, x, y)
        writer.write(params, state, x, y, record)
        state = new
    last = assert_rederived(file)[-1]
    slope = np.reshape(last['factors'][0]['D_f'][0]['data'], (B, N))
    node = last['traces_after'][0]['entries']['weight'][0]
    trace = np.reshape(node['data'], node['shape'])
    at = 0, 0, int(np.argmin(abs(slope[0])))
    assert slope[0][at[2]] == 0 != trace[at]
    for off, verdict in ((2e-5, 'rederived'), (1e-2, 'failed')):
        trace[at] += off
        node['data'] = [float(str(v)) for v in trace.astype(np.float32).reshape(-1)]
        assert reconcile_run([last]).verdict == verdict


def test_a_step_that_is_not_finite_leaves_nothing_and_the_next_replaces_the_file(tmp_path):
    recording, params, state = plain()
    path = tmp_path / 'run.jsonl'
    path.write_bytes(b'old\n')
    writer = Recorder(path, capture(recording.learner, arrays='npz'))
    x, y = drawn(B, I), drawn(B, O)
    _, record = step_of(recording)(params, state, x, y)
    with pytest.raises(ReceiptError, match=r'outputs.*not finite'):
        writer.write(params, state, x, y, record._replace(outputs=record.outputs * jnp.nan))
    assert [one.name for one in tmp_path.iterdir()] == ['run.jsonl']
    writer.write(params, state, x, y, record)
    assert len(parse_run(path.read_bytes())) == 1


def test_what_is_no_recording_no_record_or_no_number_is_named():
    recording, params, state = plain()
    x, file = drawn(B, I), io.BytesIO()
    writer, lr = Recorder(file, recording), {'lr': 0.1}
    optimizers = {
        'optimizer is': {'name': 'sgd'},
        'no lr': {'name': 'a', 'config': {}},
        'name is int': {'name': 1, 'config': lr},
        'lr of .* is function': {'name': 'sgd', 'config': {'lr': lambda step: 0.1}},
        "did you mean 'adam'": {'name': 'Adam', 'config': lr},
        'momentum has no momentum': {'name': 'momentum', 'config': lr},
        'adamw has no weight_decay': {'name': 'adamw', 'config': lr},
    }
    make = functools.partial(Recorder, file)
    calls = {said: functools.partial(make, recording, one) for said, one in optimizers.items()}
    calls |= {
        'recording is OnlineLearner': lambda: make(recording.learner),
        'every is 0': lambda: make(recording, record_every=0),
        'run_id is int': lambda: make(recording, run_id=3),
        'record is NoneType': lambda: writer.write(params, state, x, x, None),
        'run is NoneType': lambda: writer.write_sequence(params, None),
    }
    for said, call in calls.items():
        with pytest.raises(OptionError, match=said):
            call()
    assert not file.getvalue()


# what a user may do otherwise


def test_the_rate_of_a_schedule_goes_to_each_write():
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    receipts = assert_rederived(trained(*plain(), optimizer='adam', rate=schedule))
    rates = [one['optimizer']['config']['lr'] for one in receipts]
    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_a_sequence_is_written_whole_or_not_at_all():
    recording, params, state = plain()
    file, xs, ys = io.BytesIO(), drawn(3, B, I), drawn(3, B, O)
    (grads, *_), run = jax.jit(recording.sequence_grad)(params, state, xs, ys)
    writer = Recorder(file, recording)
    with pytest.raises(OptionError, match='knows no optimizer'):
        writer.write_sequence(params, run, grads)
    assert not file.getvalue() and writer.step == 0
    writer.write_sequence(params, run)
    records = assert_rederived(file)
    assert 'ends after 2 of 3' in reconcile_run(records[:2]).disclosures['window']


def test_a_negative_mask_is_refused():
    recording, params, state = plain()
    x, y = drawn(B, I), drawn(B, O)
    _, record = step_of(recording)(params, state, x, y, -jnp.ones(B))
    with pytest.raises(OptionError, match='negative weight'):
        Recorder(io.BytesIO(), recording).write(params, state, x, y, record)


@pytest.mark.parametrize('part', ['op', 'parameter'])
def test_a_declared_cell_has_no_other_ops_and_parameters(part):
    def cell(params, carry, x):
        more = params['b'] if part == 'parameter' else braintrace.matmul(x, params['b'])
        read = jnp.concatenate([x, carry['h']], -1)
        h = 0.9 * carry['h'] + jnp.tanh(braintrace.matmul(read, params['W']) + more)
        return braintrace.matmul(h, params['W_out']), {'h': h}

    own = CELLS['rnn']().init(jax.random.key(0), I, N, O, bias=False)
    own['b'] = jnp.zeros(N) if part == 'parameter' else jnp.ones((I, N))
    learner, x = functional.online(cell), drawn(B, I)
    state = learner.init(own, {'h': jnp.zeros((B, N))}, x)
    recording = capture(learner, cell=Cell.rnn(0.9))
    _, record = jax.jit(recording.grad)(own, state, x, drawn(B, O))
    with pytest.raises(StructureError, match=r"'b'\].* no part of a cell"):
        Recorder(io.BytesIO(), recording).write(own, state, x, drawn(B, O), record)
