"""A file says which learner it is of; what killed processes left goes; a path is what it is."""

import errno
import io
import json
import os
import platform
import stat
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import BraintraceWarning, OptionError, StructureError

B, I, N = 2, 2, 3  # noqa: E741


def leaky(decay=0.5, fn=jnp.tanh):
    def cell(p, h, x):
        h = decay * h + fn(braintrace.matmul(jnp.concatenate([x, h], -1), p['w']))
        return h, h

    return cell


cell, other_cell, faster = leaky(), leaky(fn=jnp.sin), leaky(0.4)


def made(rule, of=cell, dtype=jnp.float32, **options):
    learner = functional.online(of, rule, **options)
    p = {'w': jnp.ones((I + N, N), dtype)}
    return learner, learner.init(p, jnp.zeros((B, N), dtype), jnp.ones((B, I), dtype))


def in_memory(tree, learner=None) -> io.BytesIO:
    file = io.BytesIO()
    functional.save_state(file, tree, learner=learner)
    file.seek(0)
    return file


ES = rules.es_d_rtrl(0.9)


def test_a_file_of_the_same_learner_is_read_and_its_fingerprint_is_json():
    (learner, state), (again, like) = made(ES), made(ES)
    loaded = functional.load_state(in_memory(state, learner), like, learner=again)
    assert (loaded.carry == state.carry).all()
    text = learner.fingerprint()
    assert json.loads(json.dumps(text)) == text == again.fingerprint()
    assert text['carry'] == {'carry': 'float32[2, 3]'} and text['options'] == {}
    assert text['versions'] == {'braintrace': braintrace.__version__, 'jax': jax.__version__}


@pytest.mark.parametrize(
    'saved, here, line',
    [
        ((ES,), (rules.es_d_rtrl(0.5),), 'rule: es_d_rtrl(0.9) when saved, es_d_rtrl(0.5) here'),
        (
            (ES, cell),
            (ES, other_cell),
            'step/3: %3 float32[2, 3] = tanh(%2) when saved, %3 float32[2, 3] = sin(%2)',
        ),
        (
            (ES, cell),
            (ES, faster),
            'mul(0.5, carry) when saved, %0 float32[2, 3] = mul(0.4, carry)',
        ),
        (
            (rules.d_rtrl(trace_dtype=jnp.bfloat16),),
            (rules.d_rtrl(),),
            'trace/w/carry/weight/0: bfloat16[2, 5, 3] when saved, float32[2, 5, 3] here',
        ),
        (
            (ES, cell, jnp.bfloat16),
            (ES,),
            'parameters/w: bfloat16[5, 3] trace when saved, float32[5, 3] trace here',
        ),
        ((ES,), (rules.d_rtrl(),), 'rule: es_d_rtrl(0.9) when saved, d_rtrl() here'),
    ],
    ids=['decay', 'cell', 'constant', 'trace dtype', 'dtype', 'rule'],
)
def test_a_file_of_another_learner_is_refused(saved, here, line):
    (learner, state), (other, like) = made(*saved), made(*here)
    with pytest.raises(StructureError) as caught:
        functional.load_state(in_memory(state, learner), like, learner=other)
    assert line in str(caught.value) and 'another learner' in str(caught.value)
    lines = functional.structure_diff(learner.fingerprint(), other.fingerprint())
    assert all(line in str(caught.value) for line in lines) and any(line in x for x in lines)


def test_options_and_what_is_learned_are_part_of_it():
    plain, _ = made(ES)
    frozen, _ = made(ES, trainable=lambda path, leaf: False)
    loops, _ = made(ES, policy=braintrace.Policy(unroll=7, mark=lambda path, leaf: True))
    differ = [
        functional.structure_diff(plain.fingerprint(), x.fingerprint()) for x in (frozen, loops)
    ]
    assert 'parameters/w: float32[5, 3] trace when saved, float32[5, 3] frozen here' in differ[0]
    assert differ[1][0] == 'options/unroll: absent when saved, 7 here'
    assert ' at 0x' not in json.dumps(loops.fingerprint())  # it is alike in every process


def rewritten(file: io.BytesIO, change) -> io.BytesIO:
    """The file with another header."""
    entries = dict(np.load(file))
    header = json.loads(str(entries.pop('~format')))
    change(header)
    new = io.BytesIO()
    np.savez(new, **{'~format': np.array(json.dumps(header))}, **entries)
    new.seek(0)
    return new


def test_other_versions_warn_and_the_equations_are_not_compared_then():
    learner, state = made(ES)

    def older(header):
        header['fingerprint']['versions'] = {'braintrace': '0.0.1', 'jax': '0.4.1'}
        header['fingerprint']['step'] = ['written in another way']

    file = rewritten(in_memory(state, learner), older)
    with pytest.warns(BraintraceWarning, match='jax 0.4.1 there, '):
        functional.load_state(file, state, learner=learner)


def test_a_file_of_the_first_format_is_read_and_a_later_one_refused():
    learner, state = made(ES)

    def first(header):
        header['format'] = 1
        header.pop('fingerprint', None)

    file = rewritten(in_memory(state), first)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        functional.load_state(file, state)
    file.seek(0)
    with pytest.warns(BraintraceWarning, match='does not say which learner'):
        functional.load_state(file, state, learner=learner)
    later = rewritten(in_memory(state), lambda header: header.update(format=3))
    with pytest.raises(StructureError, match='format 3, of a later braintrace'):
        functional.load_state(later, state)


def test_a_trace_in_bfloat16_is_called_so():
    (_, state), (_, like) = made(rules.d_rtrl(trace_dtype=jnp.bfloat16)), made(rules.d_rtrl())
    for tree, pattern in (({'state': state}, {'state': like}), (state, like)):
        with pytest.raises(StructureError, match=r'weight/0: bfloat16\[2, 5, 3\] when'):
            functional.load_state(in_memory(tree), pattern)


# modules --------------------------------------------------------------------------------------


def compiled(**changes):
    model = braintrace.nn.GRUCell(2, 4, **changes)
    return braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)


@pytest.mark.slow
def test_a_saved_learner_knows_its_model():
    learner, other = compiled(), compiled(activation=jnp.sin)
    tree = learner.save()
    with pytest.raises(StructureError, match=r'tanh\(.* when saved, .*sin\('):
        other.restore(tree)
    compiled().restore(tree)
    tree.pop('fingerprint')  # as an earlier version wrote it
    other.restore(tree)


@pytest.mark.slow
def test_a_file_of_a_saved_learner_is_read_without_and_with_its_fingerprint():
    learner, like = compiled(), compiled().save()
    whole = learner.save()
    text = jax.eval_shape(lambda: {**like, 'fingerprint': jnp.zeros(5, jnp.uint8)})  # of any length
    loaded = functional.load_state(in_memory(whole), text, learner=None)
    compiled().restore(loaded)
    older = {k: x for k, x in whole.items() if k != 'fingerprint'}
    compiled().restore(functional.load_state(in_memory(older), like))
    functional.load_state(in_memory(whole, learner), like, learner=compiled())


# paths ----------------------------------------------------------------------------------------


def part(path, pid: int, token: str = '0123abcd4567', host: str = platform.node(), age: float = 0):
    left = path.with_name(f'{path.name}.{host}-{pid}-{token}.part')
    left.write_bytes(b'torn')
    os.utime(left, (time.time() - age,) * 2)
    return left


def test_parts_of_processes_that_are_gone_go_at_once(tmp_path):
    path = tmp_path / 'run[1].npz'
    gone = max(int(x) for x in (*os.listdir('/proc'), '1') if x.isdigit()) + 10**6
    goes = [part(path, gone), part(path, os.getpid()), part(path, 1, host='far', age=7200)]
    goes.append(path.with_name('run[1].npz.0123abcd.part'))  # of an earlier version
    goes[-1].write_bytes(b'')
    os.utime(goes[-1], (time.time() - 7200,) * 2)
    stays = [part(path, os.getppid()), part(path, gone, host='far')]
    stays += [part(tmp_path / 'run1.npz', gone), path.with_name('run[1].npz.mine')]
    stays[-1].write_bytes(b'')
    functional.save_state(path, {'w': jnp.ones(2)})
    assert not any(x.exists() for x in goes) and all(x.exists() for x in stays)
    assert len(os.listdir(tmp_path)) == len(stays) + 1


def test_of_a_link_the_target_is_replaced(tmp_path):
    target, link = tmp_path / 'disk' / 'run.npz', tmp_path / 'run.npz'
    target.parent.mkdir()
    link.symlink_to(target)
    for n in (1, 2):
        functional.save_state(link, {'w': jnp.ones(n)})
        assert link.is_symlink() and np.load(target)['w'].shape == (n,)
    assert os.listdir(target.parent) == ['run.npz'] and os.listdir(tmp_path).count('run.npz') == 1


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    for path in (tmp_path / 'pipe', tmp_path, '/dev/null'):
        before = os.stat(path).st_mode
        with pytest.raises(OptionError, match='no regular file'):
            functional.save_state(path, {'w': jnp.ones(2)})
        assert os.stat(path).st_mode == before and not stat.S_ISREG(before)


def test_a_folder_that_is_not_there_or_not_writable_and_a_full_disk_say_so(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r'nothing was saved.*The folder .*none is not there'
    ):
        functional.save_state(tmp_path / 'none' / 'run.npz', {'w': jnp.ones(2)})
    path = tmp_path / 'run.npz'
    functional.save_state(path, {'w': jnp.ones(2)})
    for code, kind in ((errno.ENOSPC, OSError), (errno.EACCES, PermissionError)):

        def full(descriptor, code=code):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, 'fsync', full)
        with pytest.raises(kind, match='nothing was saved, an earlier file is as it was') as caught:
            functional.save_state(path, {'w': jnp.ones(3)})
        assert caught.value.errno == code and caught.value.filename == str(path)
    assert np.load(path)['w'].shape == (2,) and os.listdir(tmp_path) == ['run.npz']


def test_a_state_that_was_given_away_is_named():
    learner, state = made(rules.d_rtrl())
    p, x = {'w': jnp.ones((I + N, N))}, jnp.ones((4, B, I))
    optimizer = optax.sgd(0.1)
    learn = learner.sequence_update(lambda h, y: jnp.mean((h - y) ** 2), optimizer)
    given = p, optimizer.init(p), state, x, jnp.ones((4, B, N))
    jax.jit(learn, donate_argnums=2)(*given)
    for call in (lambda: learn(*given), lambda: learner.step(p, state, x[0])):
        with pytest.raises(StructureError, match='was given away to a call before'):
            call()
    with pytest.raises(StructureError, match="the state leaf 'state/t' was given away"):
        functional.save_state(io.BytesIO(), {'state': {'t': state.t}})
