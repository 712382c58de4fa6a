"""The user functions: values, units, dtypes, and what they refuse with which words."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import lax

from braintrace import _etrace_op as ops
from braintrace.errors import EtpDtypeError, EtpShapeError, EtpUnitError, OptionError
from tests.compare import assert_close

from . import cases

RNG = np.random.default_rng(0)
X, W, B = RNG.normal(size=(2, 3)), RNG.normal(size=(3, 5)), RNG.normal(size=5)
LB, LA = RNG.normal(size=(3, 2)), RNG.normal(size=(2, 5))
IMAGE, KERNEL, KB = RNG.normal(size=(2, 3, 9)), RNG.normal(size=(4, 3, 3)), RNG.normal(size=4)
LAST = 'NHWC', 'HWIO', 'NHWC'
MASK = np.where(RNG.random((3, 5)) < 0.6, RNG.normal(size=(3, 5)), 0.0)


def sparse_mat(kind='CSR'):
    return getattr(u.sparse, kind).fromdense(jnp.asarray(MASK))


ENTRIES = MASK[MASK != 0]


def sparse(x, w, bias=None):
    return ops.sparse_matmul(x, w, sparse_mat=sparse_mat(), bias=bias)


def lora(x, w, bias=None):
    return ops.lora_matmul(x, w, LA, alpha=2.0, bias=bias)


# Each op as a function of x, one trainable and a bias, with plain numbers that fit.
PRODUCTS = {
    'matmul': (ops.matmul, X, W, B),
    'matmul of a vector': (ops.matmul, X[0], W, B),
    'conv': (ops.conv, IMAGE, KERNEL, KB),
    'sparse_matmul': (sparse, X, ENTRIES, B),
    'lora_matmul': (lora, X, LB, B),
}
every_product = pytest.mark.parametrize('name', PRODUCTS)


def test_values_are_those_of_numpy():
    assert_close(ops.matmul(X, W, B), X @ W + B)
    assert_close(ops.matmul(X[0], W), X[0] @ W)
    assert_close(ops.lora_matmul(X, LB, LA, alpha=2.0, bias=B), 2 * X @ LB @ LA + B)
    assert_close(ops.lora_matmul(X[0], LB, LA), X[0] @ LB @ LA)
    assert_close(ops.element_wise(W, jnp.exp), np.exp(W))
    assert_close(ops.element_wise(W), W)
    same = np.pad(IMAGE, ((0, 0), (0, 0), (1, 1)))
    taps = [np.einsum('bci,oc->boi', same[..., k : k + 9], KERNEL[..., k]) for k in range(3)]
    assert_close(ops.conv(IMAGE, KERNEL, KB), sum(taps) + KB[:, None])


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('kind', ['CSR', 'CSC', 'COO'])
@pytest.mark.parametrize('padding', [0, 3])
def test_every_sparse_layout_multiplies_by_its_matrix(kind, padding):
    mat = getattr(u.sparse, kind).fromdense(jnp.asarray(MASK), nse=ENTRIES.size + padding)
    assert_close(ops.sparse_matmul(X, mat.data, sparse_mat=mat, bias=B), X @ MASK + B)
    assert_close(ops.sparse_matmul(X[0], 2 * mat.data, sparse_mat=mat), 2 * X[0] @ MASK)
    jitted = jax.jit(lambda x, mat: ops.sparse_matmul(x, mat.data, sparse_mat=mat))
    assert_close(jitted(X, mat), X @ MASK)


@pytest.mark.parametrize('kind', ['CSR', 'CSC'])
def test_matrices_of_brainevent_are_taken_where_it_is_installed(kind):
    brainevent = pytest.importorskip('brainevent')
    mat = getattr(brainevent, kind).fromdense(jnp.asarray(MASK))
    assert_close(ops.sparse_matmul(X, mat.data, sparse_mat=mat), X @ MASK)


def test_repeated_coordinates_add_up():
    at = jnp.array([0, 0, 2]), jnp.array([1, 1, 0])
    mat = u.sparse.COO((jnp.array([1.0, 2.0, 4.0]), *at), shape=(3, 5))
    dense = np.zeros((3, 5))
    dense[0, 1], dense[2, 0] = 3, 4
    assert_close(ops.sparse_matmul(X, mat.data, sparse_mat=mat), X @ dense)
    got = jax.grad(lambda data: ops.sparse_matmul(X, data, sparse_mat=mat).sum())(mat.data)
    assert_close(got, X.sum(0)[np.array([0, 0, 2])])


def test_padding_entries_of_a_sparse_matrix_get_no_gradient():
    """What is at the padding is another number on each platform."""
    mat = u.sparse.CSR.fromdense(jnp.asarray(MASK))
    more = [jnp.append(a, jnp.asarray([7, -3], a.dtype)) for a in (mat.data, mat.indices)]
    mat = u.sparse.CSR((*more, mat.indptr), shape=mat.shape)
    assert ops.SparseStructure.of(mat).padded
    summed = lambda data: ops.sparse_matmul(X, data, sparse_mat=mat).sum()
    got = jax.grad(summed)(jnp.ones(mat.data.shape))
    assert not got[-2:].any() and got[:-2].all()


@pytest.mark.parametrize(
    'dimension_numbers',
    [('HCNW', 'OIHW', 'WCHN'), ('NCHW', 'OIHW', 'CNHW'), ('HWNC', 'HWIO', 'NHWC')],
)
def test_a_batch_axis_anywhere_is_moved_to_the_front_of_the_primitive(dimension_numbers):
    spec = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, dimension_numbers)
    x = jnp.asarray(RNG.normal(size=np.array([2, 3, 7, 6])[np.argsort(spec.lhs_spec)]))
    kernel = jnp.asarray(RNG.normal(size=np.array([4, 3, 2, 3])[np.argsort(spec.rhs_spec)]))
    bias = jnp.arange(4.0)
    options = dict(padding='VALID', dimension_numbers=dimension_numbers)
    call = lambda x: ops.conv(x, kernel, bias, strides=(1, 2), **options)
    plain = lax.conv_general_dilated(x, kernel, (1, 2), **options)
    shape = [1] * 4
    shape[spec.out_spec[1]] = 4
    assert_close(call(x), plain + bias.reshape(shape))
    jaxpr = jax.make_jaxpr(call)(x)
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is ops.etp_conv_p]
    numbers = eqn.params['dimension_numbers']
    assert numbers.lhs_spec[0] == numbers.out_spec[0] == 0


@pytest.mark.parametrize(
    'x, kernel, options',
    [
        ((2, 3, 7), (4, 3, 2), {}),
        ((2, 7, 6, 4), (3, 2, 2, 6), {'dimension_numbers': LAST, 'feature_group_count': 2}),
        ((7, 2, 6, 3), (3, 4, 2, 3), {'dimension_numbers': ('WNHC', 'IOHW', 'HNWC')}),
        ((4, 2, 3, 4, 2), (2, 2, 2, 1, 2), {'padding': 'SAME_LOWER', 'rhs_dilation': (2, 1, 2)}),
        ((2, 3, 4), (4, 3, 2), {'padding': ((2, -1),), 'lhs_dilation': (3,)}),
    ],
    ids=['1-D', 'groups', 'odd', '3-D dilated', 'cropped'],
)
def test_all_derivatives_of_a_convolution_are_those_of_jax(x, kernel, options):
    """The first one in both directions and the second one; each is in an order of its own."""
    options, strides = {'padding': 'VALID'} | options, (2, *(1,) * (len(x) - 3))
    rng = np.random.default_rng(0)
    at, along = (tuple(jnp.asarray(rng.normal(size=s)) for s in (x, kernel)) for _ in range(2))

    def derivatives(call, at, along):
        loss = lambda *operands: jnp.sin(call(*operands)).sum()
        gradient = jax.grad(loss, (0, 1))
        return call(*at), jax.jvp(call, at, along), gradient(*at), jax.jvp(gradient, at, along)

    calls = (
        partial(ops.conv, strides=strides, **options),
        partial(lax.conv_general_dilated, window_strides=strides, **options),
    )
    run = cases.compiled(lambda *given: [derivatives(call, *given) for call in calls])
    assert_close(*run(at, along))


def test_the_derivative_of_fn_counts():
    got = jax.grad(lambda w: jnp.sum(ops.element_wise(w, jnp.tanh)))(jnp.asarray(W))
    assert_close(got, 1 - np.tanh(W) ** 2)
    assert ops.element_wise(W, lambda w: w.sum(0)).shape == (5,)


@every_product
def test_units_multiply_and_a_bias_is_rescaled_into_the_product(name):
    fn, x, w, b = PRODUCTS[name]
    plain = fn(x, w, b)
    y = fn(x * u.mV, w * u.siemens, (b * 1e-3) * u.amp)
    assert u.get_unit(y).has_same_dim(u.amp)
    assert_close(y.to_decimal(u.mA), plain)
    assert_close(fn(x, w * u.mV, (b * 1e-3) * u.volt).to_decimal(u.mV), plain)
    assert_close(fn(x * u.mV, w / u.volt, b * 1e-3), plain * 1e-3)


@every_product
def test_a_gradient_of_a_quantity_is_that_of_its_mantissa(name):
    fn, x, w, b = PRODUCTS[name]
    got = jax.grad(lambda w: u.get_mantissa(fn(x * u.mV, w * u.mS)).sum())(jnp.asarray(w))
    assert_close(got, jax.grad(lambda w: fn(x, w).sum())(jnp.asarray(w)))


@every_product
def test_a_bias_of_another_dimension_is_refused(name):
    fn, x, w, b = PRODUCTS[name]
    for operands, words in (
        ((x * u.mV, w * u.siemens, b * u.volt), 'bias has unit V, expected a unit like mA'),
        ((x, w * u.mV, b), 'bias has unit 1, expected a unit like mV'),
        ((x, w, b * u.mV), 'bias has unit mV, expected a unit like 1'),
    ):
        with pytest.raises(EtpUnitError, match=words):
            fn(*operands)


def test_fn_takes_and_returns_quantities():
    y = ops.element_wise(W * u.mV, lambda w: w**2)
    assert u.get_unit(y).has_same_dim(u.volt**2)
    assert_close(y.to_decimal(u.mV**2), W**2)
    assert_close(ops.element_wise(W * u.mV, lambda w: w / u.volt), W * 1e-3)


@pytest.mark.tier(quick=4)
@every_product
def test_a_spike_of_booleans_or_integers_is_cast_to_the_weights(name):
    fn, x, w, b = PRODUCTS[name]
    spikes = x > 0
    w32 = jnp.asarray(w, jnp.float32)
    lora = name.startswith('lora')
    for cast in (bool, np.int32, np.uint8):
        y = fn(spikes.astype(cast), w32)
        assert y.dtype == (jnp.float64 if lora else jnp.float32)
        np.testing.assert_allclose(y, fn(spikes.astype(float), w), rtol=1e-5, atol=1e-5)


@every_product
@pytest.mark.parametrize('dtype', [np.int32, bool])
def test_a_weight_or_bias_of_integers_is_refused(name, dtype):
    fn, x, w, b = PRODUCTS[name]
    found = np.dtype(dtype).name
    with pytest.raises(EtpDtypeError, match=f'has dtype {found}, which can not be trained.*astype'):
        fn(x, w.astype(dtype))
    with pytest.raises(EtpDtypeError, match=f'bias has dtype {found}, which can not be trained'):
        fn(x, w, b.astype(dtype))


@every_product
def test_what_is_no_array_is_refused(name):
    fn, x, w, _ = PRODUCTS[name]
    for operands, words in (
        ((x.tolist(), w), r'x is a list, expected an array.*jax.numpy.asarray\(x\)'),
        ((x, None), 'is a NoneType, expected an array'),
        ((x, w, 1.0), 'bias is a float, expected an array'),
        ((np.full(x.shape, 'a'), w), 'x has dtype .*, expected numbers'),
        ((x, jax.random.split(jax.random.key(0), w.shape)), 'expected numbers'),
    ):
        with pytest.raises(EtpDtypeError, match=words):
            fn(*operands)


def test_a_state_is_refused_with_a_hint_and_an_array_like_is_taken():
    with pytest.raises(EtpDtypeError, match='weight is a SimpleNamespace.*pass `weight.value`'):
        ops.matmul(X, SimpleNamespace(value=W))
    box = type('Box', (), {'__jax_array__': lambda self: jnp.asarray(W)})()
    assert_close(ops.matmul(X, box), X @ W)


def bad_pointers():
    mat = u.sparse.CSR((np.ones(2), np.zeros(2, int), np.array([0, 2])), shape=(2, 3))
    return ops.SparseStructure.of(mat)


SEQUENCE, STRUCTURE = np.ones((1, 2, 3)), ops.SparseStructure
OF_SEQUENCE = r'x has shape \(1, 2, 3\) of rank 3, expected \(in,\) or \(batch, in\)\. '
OF_SEQUENCE += 'Of a whole sequence.*jax.vmap.*reshape'
# a function, its operands, and what it says
WRONG_SHAPES = [
    (ops.matmul, (SEQUENCE, W), f'matmul: {OF_SEQUENCE}'),
    (ops.matmul, (np.ones(()), W), r'x has shape \(\) of rank 0'),
    (ops.matmul, (X, np.ones(3)), r'weight has shape \(3,\) of rank 1, expected \(in, out\)'),
    (
        *(ops.matmul, (X, W.T)),
        r'weight has shape \(5, 3\), expected \(3, 3\): x of shape \(2, 3\) has 3 entries along',
    ),
    (
        *(ops.matmul, (X, W, np.ones(3))),
        r'bias has shape \(3,\), expected \(5,\): one number for each output',
    ),
    (ops.matmul, (X, W, np.ones(())), r'bias has shape \(\), expected \(5,\)'),
    (ops.lora_matmul, (SEQUENCE, LB, LA), 'lora_matmul: x has shape .* of rank 3.*vmap'),
    (ops.lora_matmul, (X, LB[0], LA), r'B has shape \(2,\) of rank 1, expected \(in, rank\)'),
    (ops.lora_matmul, (X, LB, LA[0]), r'A has shape \(5,\) of rank 1, expected \(rank, out\)'),
    (ops.lora_matmul, (X, LB[:2], LA), r'B has shape \(2, 2\), expected \(3, 2\)'),
    (
        ops.lora_matmul,
        (X, LB, LA[:1]),
        r'A has shape \(1, 5\), expected .*: B of shape .* has 2 entries along',
    ),
    (lora, (X, LB, np.ones(2)), 'bias has shape'),
    (sparse, (SEQUENCE, ENTRIES), 'sparse_matmul: x .* rank 3.*vmap'),
    (sparse, (np.ones((2, 4)), ENTRIES), r'expected \(2, 3\): sparse_mat has shape \(3, 5\)'),
    (sparse, (X, ENTRIES[:2]), r'weight_data has shape \(2,\).*jax.numpy.full'),
    (sparse, (X, ENTRIES, np.ones(3)), 'bias has shape'),
    (STRUCTURE, ([0, 1], [0], (2, 2)), '2 row and 1 column indices'),
    (STRUCTURE, ([0, 5], [0, 0], (2, 2)), r'rows of shape \(2,\) that are not all in \[0, 2\]'),
    (STRUCTURE, ([0, -1], [0, 0], (2, 2)), r'not all in \[0, 2\]'),
    (bad_pointers, (), '2 pointers, expected 3'),
    (ops.conv, (IMAGE[0], KERNEL), r'Add the batch axis: `x\[None\]`'),
    (ops.conv, (X, W), r'one rank >= 3'),
    (
        *(ops.conv, (IMAGE, KERNEL[:, :2])),
        r'kernel has shape \(4, 2, 3\), expected \(4, 3, 3\): x of shape .* 3 channels in 1 group',
    ),
    (ops.conv, (IMAGE, KERNEL, np.ones(3)), r'bias has shape \(3,\), expected \(4,\)'),
    (
        *(partial(ops.conv, feature_group_count=3), (IMAGE, KERNEL[:, :1])),
        '4 output channels do not divide into 3 groups',
    ),
    (
        *(partial(ops.conv, batch_group_count=3), (IMAGE, KERNEL[:3])),
        '2 samples do not divide into 3 groups',
    ),
]


@pytest.mark.parametrize(('call', 'operands', 'message'), WRONG_SHAPES)
def test_a_wrong_shape_is_refused_with_what_was_found_and_expected(call, operands, message):
    with pytest.raises(EtpShapeError, match=message):
        call(*operands)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'strides': (1, 1)}, r'strides is \(1, 1\); give an int of at least 1, or one for each'),
        ({'strides': 0}, 'strides is 0'),
        ({'strides': 1.5}, 'strides is 1.5'),
        ({'strides': True}, 'strides is True'),
        ({'rhs_dilation': (0,)}, 'rhs_dilation is'),
        ({'lhs_dilation': 'SAME'}, 'lhs_dilation is'),
        ({'padding': 'REFLECT'}, "is 'REFLECT', expected 'SAME', 'SAME_LOWER', 'VALID' or 1 pair"),
        ({'padding': 1}, 'padding is 1'),
        ({'padding': ((1, 1), (1, 1))}, 'padding is'),
        ({'dimension_numbers': LAST}, 'do not fit operands of rank 3'),
        ({'dimension_numbers': 3}, 'dimension_numbers 3'),
        ({'feature_group_count': 0}, 'feature_group_count is 0, expected an integer >= 1'),
        ({'batch_group_count': 1.0}, 'batch_group_count is 1.0'),
    ],
)
def test_a_wrong_option_of_conv_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        ops.conv(IMAGE, KERNEL, **options)


def test_options_of_conv_are_taken_in_every_usual_form():
    expected = lax.conv_general_dilated(IMAGE, KERNEL, (2,), ((1, 2),), rhs_dilation=(2,))
    assert_close(ops.conv(IMAGE, KERNEL, strides=2, padding=[[1, 2]], rhs_dilation=[2]), expected)
    options = dict(strides=np.int64(2), padding=((1, 2),), rhs_dilation=np.array([2]))
    assert_close(ops.conv(IMAGE, KERNEL, **options), expected)
    same = ops.conv(IMAGE, KERNEL, padding='same', dimension_numbers=['NCH', 'OIH', 'NCH'])
    assert_close(same, ops.conv(IMAGE, KERNEL))


def test_other_wrong_operands_are_refused():
    mat = sparse_mat()
    with pytest.raises(EtpDtypeError, match='sparse_mat is a ndarray, expected a CSR, CSC or COO'):
        ops.sparse_matmul(X, ENTRIES, sparse_mat=MASK)
    traced = lambda index: u.sparse.CSR((mat.data, index, mat.indptr), shape=mat.shape)
    with pytest.raises(EtpDtypeError, match='(indices|columns) of sparse_mat are traced'):
        jax.jit(lambda at: ops.sparse_matmul(X, mat.data, sparse_mat=traced(at)))(mat.indices)
    with pytest.raises(EtpDtypeError, match='alpha is a str, expected a Python number'):
        ops.lora_matmul(X, LB, LA, alpha='a')
    with pytest.raises(EtpDtypeError, match='alpha is a .*Tracer, expected a Python number'):
        jax.jit(lambda alpha: ops.lora_matmul(X, LB, LA, alpha=alpha))(2.0)
    with pytest.raises(EtpDtypeError, match='weight has dtype int'):
        ops.element_wise(np.arange(3))
    with pytest.raises(EtpDtypeError, match=r'fn\(weight\) has dtype bool'):
        ops.element_wise(W, lambda w: w > 0)
    with pytest.raises(OptionError, match='fn is a float, expected a function'):
        ops.element_wise(W, 2.0)


def test_alpha_may_be_any_concrete_number():
    expected = ops.lora_matmul(X, LB, LA, alpha=2.0)
    for alpha in (2, np.float32(2), np.array(2.0), jnp.asarray(2.0)):
        assert_close(ops.lora_matmul(X, LB, LA, alpha=alpha), expected)


# Arguments of other packages: the words are the line to write here.
ELSEWHERE = [
    (ops.matmul, 'weight_fn', '`matmul(x, fn(weight), bias)`'),
    (ops.matmul, 'bias_fn', '`matmul(x, weight, fn(bias))`'),
    (ops.grouped_matmul, 'weight_fn', '`grouped_matmul(x, fn(weight), bias)`'),
    (ops.einsum, 'weight_fn', '`einsum(equation, x, fn(weight))`'),
    (ops.embedding, 'weight_fn', '`embedding(indices, fn(weight))`'),
    (ops.conv, 'kernel_fn', '`conv(x, fn(kernel), bias)`'),
    (ops.lora_matmul, 'b_fn', '`lora_matmul(x, fn(B), A)`'),
    (ops.lora_matmul, 'bias_fn', '`lora_matmul(x, B, A, bias=fn(bias))`'),
    (ops.sparse_matmul, 'weight', '`sparse_matmul(x, weight_data, sparse_mat=...)`'),
    (ops.sparse_matmul, 'weight_fn', '`sparse_matmul(x, fn(weight_data), sparse_mat=...)`'),
]


@pytest.mark.parametrize('op, name, line', ELSEWHERE)
def test_an_argument_of_other_packages_is_refused_with_the_line_to_write(op, name, line):
    with pytest.raises(OptionError) as error:
        op(X, W, **{name: jnp.abs})
    text = str(error.value)
    assert text.startswith(f'{op.__name__}: there is no argument {name}.') and line in text
    assert name not in inspect.signature(op).parameters


def test_the_function_of_element_wise_has_two_names():
    assert_close(ops.element_wise(W, weight_fn=jnp.exp), np.exp(W))
    with pytest.raises(OptionError, match='weight_fn is another name for fn; give one'):
        ops.element_wise(W, jnp.exp, weight_fn=jnp.exp)
    with pytest.raises(OptionError, match='fn is a int, expected a function'):
        ops.element_wise(W, weight_fn=3)
