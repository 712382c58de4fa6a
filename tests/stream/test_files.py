"""A file says which learner it is of; what killed processes left goes; a path is what it is."""

import errno
import fcntl
import io
import json
import os
import platform
import re
import stat
import subprocess
import sys
import threading
import time
import warnings
import zipfile
import zlib

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


SHORT = rules.d_rtrl(trace_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    'saved, here, line',
    [
        ((ES,), (rules.es_d_rtrl(0.5),), 'rule: es_d_rtrl(0.9) when saved, es_d_rtrl(0.5) here'),
        ((ES,), (ES, other_cell), 'step/3: %3 float32[2, 3] = tanh(%2) when saved, %3 float32'),
        ((ES,), (ES, faster), 'mul(0.5, carry) when saved, %0 float32[2, 3] = mul(0.4, carry)'),
        ((SHORT,), (rules.d_rtrl(),), 'trace/w/carry/weight/0: bfloat16[2, 5, 3] when saved'),
        ((ES, cell, jnp.bfloat16), (ES,), 'parameters/w: bfloat16[5, 3] trace when saved, float32'),
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
    assert functional.structure_diff({'ops': {'w': 'etp_mm'}}, {'ops': 'none'}) == [
        "ops: {'w': 'etp_mm'} when saved, none here"
    ]


def members_of(file: io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members, **options) -> io.BytesIO:
    """A file with these members, (name, bytes), in this order."""
    new = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(new, 'w', **options) as archive:
        warnings.simplefilter('ignore')  # of names that are twice
        for name, content in members:
            archive.writestr(name, content)
    new.seek(0)
    return new


def rewritten(file: io.BytesIO, change) -> io.BytesIO:
    """The file with another header."""
    members = members_of(file)
    header = json.loads(members['~format'])
    change(header)
    return zipped({**members, '~format': json.dumps(header)}.items())


def test_other_versions_warn_and_the_equations_are_not_compared_then():
    learner, state = made(ES)

    def older(header):
        header['fingerprint']['versions'] = {'braintrace': '0.0.1', 'jax': '0.4.1'}
        header['fingerprint']['step'] = ['written in another way']

    file = rewritten(in_memory(state, learner), older)
    with pytest.warns(BraintraceWarning, match='jax 0.4.1 there, '):
        functional.load_state(file, state, learner=learner)


def test_a_file_without_a_fingerprint_is_told_and_another_format_refused():
    learner, state = made(ES)
    file = in_memory(state)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        functional.load_state(file, state)
    file.seek(0)
    with pytest.warns(BraintraceWarning, match='does not say which learner'):
        functional.load_state(file, state, learner=learner)
    for found in (2, 4, 'x' * 99):
        other = rewritten(in_memory(state), lambda header, n=found: header.update(format=n))
        with pytest.raises(StructureError, match='format .{1,20}, of another braintrace; .* 3'):
            functional.load_state(other, state)
    earlier = io.BytesIO()
    np.savez(earlier, **{'~format': np.array('{"format": 2, "leaves": {}}'), 't': state.t})
    with pytest.raises(StructureError, match="or of an earlier braintrace: it has no '~format'"):
        functional.load_state(earlier, state)


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
    tree.pop('fingerprint')  # for its parameters alone
    other.restore(tree)


@pytest.mark.slow
def test_a_file_of_a_saved_learner_is_read_without_and_with_its_fingerprint():
    learner, like = compiled(), compiled().save()
    whole = learner.save()
    text = jax.eval_shape(lambda: {**like, 'fingerprint': jnp.zeros(5, jnp.uint8)})  # of any length
    loaded = functional.load_state(in_memory(whole), text, learner=None)
    compiled().restore(loaded)
    with pytest.raises(StructureError, match=r'fingerprint: float32\[2\] when saved, uint8'):
        functional.load_state(in_memory({**whole, 'fingerprint': jnp.ones(2)}), text)
    functional.load_state(in_memory(whole, learner), like, learner=compiled())


# paths ----------------------------------------------------------------------------------------


def left(path, name=None, host='', age=0):
    """What a killed process left: a part of `path`, or a file of this name beside it."""
    if name is None:
        host = (host or re.sub(r'[^A-Za-z0-9.]', '_', platform.node()))[-24:]
        tag = f'{zlib.crc32(path.name.encode()):08x}0123abcd'
        name = f'{path.name[:50]}.{host}-{tag}.part'
    part = path.with_name(name)
    part.write_bytes(b'torn')
    os.utime(part, (time.time() - age,) * 2)
    return part


def test_parts_of_processes_that_are_gone_go_at_once_and_files_of_others_stay(tmp_path):
    path = tmp_path / 'run[1].npz'
    goes = [left(path), left(path, host='far', age=7200)]
    names = 'run[1].npz.mine', 'run[1].npz.download.part', 'run[1].npz.0123abcd.part'
    stays = [left(path, name, age=7200) for name in names]
    stays += [left(tmp_path / 'run1.npz'), left(path, host='faraway')]
    functional.save_state(path, {'w': jnp.ones(2)})
    assert not any(x.exists() for x in goes) and all(x.exists() for x in stays)
    assert len(os.listdir(tmp_path)) == len(stays) + 1


def test_a_part_that_is_written_stays_whichever_process_writes_it(tmp_path):
    path = tmp_path / 'run.npz'
    part = left(path, age=7200)
    code = 'import fcntl, sys; f = open(sys.argv[1], "r+b"); fcntl.flock(f, 2); print(); input()'
    other = [sys.executable, '-c', code, str(part)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        functional.save_state(path, {'w': jnp.ones(2)})
        assert part.exists()
        process.communicate(b'\n')
    functional.save_state(path, {'w': jnp.ones(2)})
    assert os.listdir(tmp_path) == ['run.npz']


def test_a_part_that_another_process_takes_for_a_leftover_is_begun_anew(tmp_path, monkeypatch):
    path, lock, taken = tmp_path / 'run.npz', fcntl.flock, []

    def late(stream, how):
        if not taken:
            taken.append(os.listdir(tmp_path)[0])
            os.unlink(tmp_path / taken[0])
        lock(stream, how)

    monkeypatch.setattr(fcntl, 'flock', late)
    functional.save_state(path, {'w': jnp.ones(2)})
    assert taken and os.listdir(tmp_path) == ['run.npz']


def test_many_threads_save_one_file(tmp_path):
    path, errors = tmp_path / 'run.npz', []

    def save(k):
        try:
            for _ in range(5):
                functional.save_state(path, {'w': np.full(9, k)})
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and os.listdir(tmp_path) == ['run.npz']
    assert len(set(functional.load_state(path, {'w': jnp.zeros(9, int)})['w'].tolist())) == 1


def test_the_mode_of_a_file_stays_and_nobody_else_reads_its_part(tmp_path, monkeypatch):
    path, flush, modes = tmp_path / 'run.npz', os.fsync, []

    def watched(descriptor):
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        flush(descriptor)

    functional.save_state(path, {'w': jnp.ones(2)})
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    for mode in (0o600, 0o640, 0o664):
        path.chmod(mode)
        with monkeypatch.context() as patch:
            patch.setattr(os, 'fsync', watched)
            functional.save_state(path, {'w': jnp.ones(2)})
        assert stat.S_IMODE(path.stat().st_mode) == mode and modes[::2] == [0o600]
        modes.clear()


@pytest.mark.parametrize('name', ['n' * 229, 'n' * 255, 'ä' * 127, '\U0001f40d' * 63])
def test_every_name_that_a_folder_takes_can_be_saved(name, tmp_path):
    left(tmp_path / name)
    functional.save_state(tmp_path / name, {'w': jnp.ones(2)})
    assert os.listdir(tmp_path) == [name]
    assert functional.load_state(tmp_path / name, {'w': jnp.ones(2)})['w'].tolist() == [1, 1]


def test_what_is_no_path_is_refused(tmp_path):
    class Bytes:
        def __fspath__(self):
            return b'run.npz'

    for file in (b'run.npz', None, 3, f'{tmp_path}/a\0b', Bytes()):
        for call in (functional.save_state, functional.load_state):
            with pytest.raises(OptionError, match='give a path without NUL, or an open binary fi'):
                call(file, {'w': jnp.ones(2)})
    assert not os.listdir(tmp_path)


def test_a_folder_that_can_not_be_flushed_or_listed_keeps_what_was_saved(tmp_path, monkeypatch):
    flush = os.fsync

    def strict(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    def unlisted(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, 'fsync', strict)
    monkeypatch.setattr(os, 'listdir', unlisted)
    functional.save_state(tmp_path / 'run.npz', {'w': jnp.ones(2)})
    assert functional.load_state(tmp_path / 'run.npz', {'w': jnp.ones(2)})['w'].shape == (2,)


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
    for path in (tmp_path / 'pipe', tmp_path, '/dev/null', '/dev/zero'):
        with pytest.raises(OptionError, match='no regular file'):
            functional.load_state(path, {'w': jnp.ones(2)})
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
