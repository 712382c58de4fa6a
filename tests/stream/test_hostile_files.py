"""Whatever is in a file is refused, with the member, or loads the numbers that were saved."""

import io
import itertools
import json
import struct
import tracemalloc
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import functional
from braintrace.errors import StructureError
from tests.models.model import SEED

from .test_files import ES, made, members_of, zipped

TREE = {
    'a': np.arange(12, dtype=np.float32).reshape(3, 4),
    'b': -np.arange(12, dtype=np.float32).reshape(3, 4),
    'bits': np.array([True, False, True]),
    'brain': jnp.arange(6).astype(jnp.bfloat16),
    'count': np.int32(7),
    'empty': np.zeros((0, 3), np.float32),
    'key': jax.random.key(3),
    'v': jnp.ones(2) * u.mV,
}


def saved(tree=TREE) -> io.BytesIO:
    file = io.BytesIO()
    functional.save_state(file, tree)
    return file


def numbers(tree):
    tree = {**tree, 'key': jax.random.key_data(tree['key'])}
    return {name: np.asarray(u.get_magnitude(leaf)).tobytes() for name, leaf in tree.items()}


FILE, WANTED = saved(), numbers(TREE)
MEMBERS = members_of(FILE)


def refused(file: bytes | io.BytesIO) -> str | None:
    """The message; None where the numbers are those that were saved."""
    try:
        found = functional.load_state(io.BytesIO(file) if isinstance(file, bytes) else file, TREE)
    except StructureError as error:
        assert len(str(error)) < 2000
        return str(error)
    assert numbers(found) == WANTED
    return None


def npy(array, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def of(header: bytes) -> bytes:
    """An npy that begins so, of no numbers."""
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header


A = TREE['a']
OTHERS = {  # what may be in a member in the place of `a`
    'another shape': npy(A.T),
    'more': npy(np.ones((4, 4), np.float32)),
    'float64': npy(A.astype(float)),
    'int32': npy(A.astype(np.int32)),
    'float16': npy(A.astype(np.float16)),
    'complex': npy(A.astype(complex)),
    'bool': npy(A > 3),
    'empty': npy(A[:0]),
    'the other way round': npy(A.astype('>f4')),
    'Fortran': npy(np.asfortranarray(A)),
    'objects': npy(np.array([print]), allow_pickle=True),
    'a text': npy(np.array('a')),
    'a record': npy(np.zeros(3, 'f4,i4')),
    'huge': of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904,), }\n"),
    'negative': of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -4), }\n"),
    'deep': of(b'(' * 60000),
    'signs': of(b'-' * 9000 + b'1'),
    'no dict': of(b'[1, 2]'),
    'Python 2': of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L), }\n"),
    'version 3': b'\x93NUMPY\x03\x00' + MEMBERS['a.npy'][8:],
    'nothing': b'',
    'no npy': b'numbers',
    'too short': MEMBERS['a.npy'][:-1],
    'too long': MEMBERS['a.npy'] + b'\0',
}


@pytest.mark.parametrize('crc', ['old', 'new'])
def test_an_array_that_is_not_what_the_header_says_is_refused_by_name(crc):
    for name, content in OTHERS.items():
        members = {**MEMBERS, 'a.npy': content}
        if crc == 'new':  # a header that says that this was saved
            header = json.loads(members.pop('~format'))
            header['leaves']['a'][1] = zlib.crc32(content)
            members['~format'] = json.dumps(header)
        assert "no file of `save_state`, or it is torn: 'a': " in refused(
            zipped(members.items())
        ), name


def test_members_that_changed_names_are_refused():
    for one, other in itertools.permutations(MEMBERS, 2):
        members = {**MEMBERS, one: MEMBERS[other], other: MEMBERS[one]}
        assert refused(zipped(members.items())) is not None


def test_a_member_that_stands_twice_or_nobody_asked_for_changes_no_number():
    for name in MEMBERS:
        for content in (MEMBERS[name], MEMBERS['b.npy'], b''):
            for members in (
                [(name, content), *MEMBERS.items()],
                [*MEMBERS.items(), (name, content)],
            ):
                refused(zipped(members))
    refused(zipped([*MEMBERS.items(), ('c.npy', MEMBERS['a.npy'])]))
    for name in MEMBERS:
        left = [(k, x) for k, x in MEMBERS.items() if k != name]
        assert name.removesuffix('.npy') in refused(zipped(left))


def test_a_compressed_member_is_not_unpacked():
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        assert 'it is compressed' in refused(zipped(MEMBERS.items(), compression=kind))
        bomb = {**MEMBERS, 'a.npy': MEMBERS['a.npy'] + bytes(10**7)}
        assert 'it is compressed' in refused(zipped(bomb.items(), compression=kind))


def test_a_bool_is_true_or_false_whatever_its_byte():
    content = MEMBERS['bits.npy'][:-3] + b'\2\0\x80'
    header = json.loads(MEMBERS['~format'])
    header['leaves']['bits'][1] = zlib.crc32(content)
    file = zipped({**MEMBERS, 'bits.npy': content, '~format': json.dumps(header)}.items())
    assert (functional.load_state(file, TREE)['bits'] == TREE['bits']).all()


def test_a_text_is_no_longer_than_a_header():
    header = {'format': 3, 'leaves': {'fingerprint': ['uint8[99999999999999]', 0]}}
    file = zipped([('fingerprint.npy', b''), ('~format', json.dumps(header))])
    with pytest.raises(StructureError, match=r'fingerprint: uint8\[9+\] when saved'):
        functional.load_state(file, {'fingerprint': jnp.ones(3, jnp.uint8)})


@pytest.mark.parametrize(
    'leaf, words',
    [
        (np.int64(2**40), "the leaf 'w' holds numbers that int32 has not"),
        (2**40, "the leaf 'w' of a state is no array of JAX: OverflowError"),
        (np.ones(2, '>f4'), "the leaf 'w' of a state is no array of JAX: TypeError"),
        (np.array(['a']), "the leaf 'w' of a state is no array of JAX: TypeError"),
    ],
)
def test_what_could_not_come_back_is_not_saved(leaf, words):
    with pytest.raises(StructureError, match=words):
        functional.save_state(io.BytesIO(), {'w': leaf})


def test_what_like_is_said_to_be_has_to_be_arrays():
    with pytest.raises(StructureError, match="the leaf 'w' of `like` is no array"):
        functional.load_state(io.BytesIO(), {'w': 'text'})


def test_names_that_mean_something_in_a_fingerprint_are_names_as_all():
    file = saved({'versions': jnp.ones(2), 'step': jnp.ones(1)})
    with pytest.raises(
        StructureError, match=r'step: float32\[1\] when(?s:.*)versions: float32\[2\]'
    ):
        functional.load_state(file, {'versions': jnp.ones(3), 'step': jnp.ones(4)})


HEADER = json.loads(MEMBERS['~format'])
WRONG = (None, 0, -1, 1e300, True, '', 'x', [], [1], {}, {'a': 1}, [['float32[3, 4]', 0]])


def test_a_header_of_any_kind_is_refused():
    texts = [b'', b'\xff', b'{', b'[' * 100000, b'{"a":' * 100000, b'NaN', b'9' * 10000]
    texts += [json.dumps(x).encode() for x in WRONG]
    for key, value in itertools.product(HEADER, WRONG):
        texts.append(json.dumps({**HEADER, key: value}).encode())
    for name, value in itertools.product(HEADER['leaves'], WRONG):
        for row in (value, [value, HEADER['leaves'][name][1]], [HEADER['leaves'][name][0], value]):
            leaves = {**HEADER['leaves'], name: row}
            texts.append(json.dumps({**HEADER, 'leaves': leaves}).encode())
    for text in texts:
        assert refused(zipped({**MEMBERS, '~format': text}.items())) is not None, text[:200]


def test_a_fingerprint_of_any_kind_is_refused():
    learner, _ = made(ES)
    deep = []
    for _ in range(500):
        deep = [deep]
    right = learner.fingerprint()
    found = [x for x in WRONG if x is not None] + [deep, {'a': deep}]
    found += [{**right, k: x} for k in right for x in [*WRONG, deep] if x != right[k]]
    found = [x for x in found if not (isinstance(x, dict) and isinstance(x.get('versions'), dict))]
    for fingerprint in found:
        text = json.dumps({**HEADER, 'fingerprint': fingerprint})
        file = zipped({**MEMBERS, '~format': text}.items())
        with pytest.raises(StructureError, match='of another learner|fingerprint can not be read'):
            functional.load_state(file, TREE, learner=learner)


def damaged(rng: np.random.Generator) -> bytes:
    """The file with a fault."""
    whole = bytearray(FILE.getvalue())
    at, n = rng.integers(len(whole)), int(rng.integers(1, 64))
    match rng.integers(7):
        case 0 | 1:
            whole[at] ^= 1 << rng.integers(8)
        case 2:
            del whole[at:]
        case 3:
            whole[at : at + n] = bytes(n)
        case 4:
            whole[at:at] = rng.bytes(n)
        case 5:
            del whole[at : at + n]
        case 6:
            other = rng.integers(len(whole))
            whole[at : at + n] = whole[other : other + n]
    return bytes(whole)


@pytest.mark.drawn
def test_a_damaged_file_is_refused_or_loads_what_was_saved():
    rng = np.random.default_rng([SEED, 7])
    found = [refused(damaged(rng)) for _ in range(300)]
    assert sum(x is not None for x in found) > 200  # else nothing was damaged


@pytest.mark.slow
def test_no_file_costs_much_memory(tmp_path):
    def header(**leaves) -> bytes:
        return json.dumps({'format': 3, 'leaves': leaves}).encode()

    start = of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (25000000,), }\n")
    packed = {'compression': zipfile.ZIP_DEFLATED, 'compresslevel': 1}
    large = {'w.npy': start + bytes(10**8), '~format': header(w=['float32[2]', 0])}
    files = {
        'bomb': zipped(large.items(), **packed).getvalue(),
        'a header as bomb': zipped([('~format', bytes(10**8))], **packed).getvalue(),
        'a large header': zipped([('~format', b'[' + b'{},' * 1399000)]).getvalue(),
        'the largest header': zipped([('~format', b'[' + b'{},' * 1398000 + b'{}]')]).getvalue(),
        'members': zipped([(f'{k}', b'') for k in range(10000)]).getvalue(),
        # a list of members that is said to be as large as the file
        'holes': struct.pack('<4s4H2LH', b'PK\5\6', 0, 0, 9, 9, 2**32 - 64, 0, 0),
    }
    for name, content in files.items():
        with (tmp_path / name).open('wb') as file:
            if name == 'holes':
                file.seek(2**32 - 64)
            file.write(content)
    for name in files:
        tracemalloc.start()
        with pytest.raises(StructureError):
            functional.load_state(tmp_path / name, {'w': jnp.ones(2)})
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < (1.5e8 if name == 'the largest header' else 5e7), name


def test_a_header_that_could_not_be_read_is_not_written(tmp_path):
    path = tmp_path / 'run.npz'
    functional.save_state(path, {'w': jnp.ones(2)})
    with pytest.raises(StructureError, match='more than 4194304. Save without `learner=`'):
        functional.save_state(path, {'w' * 60000 + str(k): jnp.ones(3) for k in range(80)})
    assert functional.load_state(path, {'w': jnp.ones(2)})['w'].shape == (2,)
