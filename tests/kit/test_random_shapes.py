"""Every law on shapes drawn at random (empty, a batch of one, in != out) of the ops with the most
of them, and of linear ops of the factories; the cases of all others are those of `kit._cases` and
of `tests/etrace_op/cases.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import braintrace
from braintrace import kit
from braintrace._etrace_op import SparseStructure

sizes = st.integers(0, 5)
channels = st.integers(1, 3)
batches = st.sampled_from([(), (1,), (2,), (3,)])


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def with_bias(draw, options, shape):
    return options | ({'bias': array(*shape)} if draw(st.booleans()) else {})


@st.composite
def dense(draw):
    batch, n, m = draw(batches), draw(sizes), draw(sizes)
    return [array(*batch, n), array(n, m)], with_bias(draw, {}, (m,))


@st.composite
def low_rank(draw):
    batch, n, r, m = draw(batches), draw(sizes), draw(channels), draw(sizes)
    options = with_bias(draw, {'alpha': draw(st.floats(-2, 2))}, (m,))
    return [array(*batch, n), array(n, r), array(r, m)], options


@st.composite
def sparse(draw):
    batch, n, m = draw(batches), draw(channels), draw(channels)
    at = draw(st.lists(st.integers(0, n * m - 1), min_size=0, max_size=8))
    structure = SparseStructure(*np.divmod(np.array(at, int), m), (n, m))
    return [array(*batch, n), array(len(at))], with_bias(draw, {'sparse_mat': structure}, (m,))


@st.composite
def convolution(draw):
    groups, dims = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    spatial = draw(st.tuples(*[st.integers(1, 5)] * dims))
    window = draw(st.tuples(*[st.integers(1, 3)] * dims))
    inputs, outputs = groups * draw(channels), groups * draw(channels)
    options = {
        'strides': draw(st.tuples(*[st.integers(1, 2)] * dims)),
        'padding': draw(st.sampled_from(['SAME', ((1, 2),) * dims])),
        'rhs_dilation': draw(st.tuples(*[st.integers(1, 2)] * dims)),
        'feature_group_count': groups,
    }
    x = array(draw(st.integers(1, 2)), inputs, *spatial)
    kernel = array(outputs, inputs // groups, *window)
    return [x, kernel], with_bias(draw, options, (outputs,))


@st.composite
def product(draw):
    """An equation whose letters are shared, summed or one operand's alone, in any order."""
    kinds = draw(
        st.lists(st.sampled_from(['x', 'both', 'both summed', 'weight']), min_size=1, max_size=4)
    )
    letters = 'ijkl'[: len(kinds)]
    named = list(zip(letters, kinds, strict=True))
    chosen = lambda *wanted: [letter for letter, kind in named if kind in wanted]
    x = chosen('x', 'both', 'both summed')
    weight = chosen('both', 'both summed', 'weight')
    y = chosen('x', 'both', 'weight')
    batch = draw(st.booleans())
    x, weight, y = (draw(st.permutations(axes)) for axes in (x, weight, y))
    size = {letter: draw(st.integers(1, 3)) for letter in letters} | {'b': draw(st.integers(1, 3))}
    x, y = (['b', *axes] if batch else axes for axes in (x, y))
    shape = lambda axes: array(*(size[a] for a in axes))
    equation = f'{"".join(x)},{"".join(weight)}->{"".join(y)}'
    return [], {'equation': equation, 'x': shape(x), 'weight': shape(weight)}


def linear(name, fn, **options):
    return lambda: kit.make_linear_op(name, fn, **options)


LOW_RANK = dict(trainable={'b': 1, 'a': 2}, trace='effective', static=('alpha',))
OPS = {
    'sparse_matmul': (lambda: braintrace.sparse_matmul, sparse()),
    'conv': (lambda: braintrace.conv, convolution()),
    'einsum': (lambda: braintrace.einsum, product()),
    'linear': (linear('t_linear', lambda x, w: x @ w), dense()),
    'position': (linear('t_position', lambda x, w: x @ w, trace='position'), dense()),
    'effective': (
        linear('t_effective', lambda x, b, a, *, alpha: alpha * (x @ b @ a), **LOW_RANK),
        low_rank(),
    ),
}


@pytest.mark.usefixtures('registries_are_restored')
@pytest.mark.drawn
@pytest.mark.parametrize(
    'number', [pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize('name', OPS)
def test_every_law_holds_on_random_shapes(name, number):
    make, cases = OPS[name]
    op = make()

    @settings(max_examples=number, phases=[Phase.generate])
    @given(cases)
    def run(case):
        kit.assert_conformant(op, [case])

    run()
