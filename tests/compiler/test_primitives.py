"""The table of what JAX's primitives do: it is complete, what it says is so, and nothing else says
it.
"""

import ast
import itertools
from pathlib import Path

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import braintrace
from braintrace import _jax, functional, rules
from braintrace._compiler import primitives
from braintrace._compiler.equations import Equation, moved
from braintrace._compiler.primitives import NONE, TABLE
from tests.precision import float64 as float64

PACKAGE = Path(braintrace.__file__).parent
# Names that JAX has in no public list, and those that one of the JAX versions that we run on lacks.
ELSEWHERE = set(
    """call closed_call dce_sink eval_jaxpr log2 one_minus_square polynomial preduced pvary
    random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p reshard shard_map
    zeros_like""".split()
)
X = np.arange(1.0, 13).reshape(3, 4) / 13


def known_to_jax() -> set[str]:
    modules = lax, jax.extend.core.primitives
    return {getattr(m, n).name for m in modules for n in dir(m) if n.endswith('_p')}


def test_every_primitive_of_jax_has_a_row():
    missing = sorted(known_to_jax() - TABLE.keys())
    assert not missing, (
        f'{missing} have no row in _compiler/primitives.py. Give each the properties that it has, '
        'or name it where its own derivative rule tells'
    )


def test_every_row_is_a_primitive_of_jax():
    strangers = sorted(TABLE.keys() - known_to_jax() - ELSEWHERE)
    assert not strangers, f'{strangers} are no primitives of JAX'


def test_the_properties_of_a_row_fit_together():
    for name, does in TABLE.items():
        kinds = does.elementwise, does.passes, does.reduces, does.mixes, does.updates
        assert sum(kinds) <= 1, name
        assert does.moves or not (does.assembles or does.takes_part or does.repeats), name
        assert not (does.moves and any(kinds[1:])), name


def equation(fn, *args):
    (eqn,) = _jax.trace(fn, *args)[0].eqns
    return Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(range(len(eqn.invars))), (9,), ''), [
        a.val if isinstance(a, _jax.Literal) else None for a in eqn.invars
    ]


MOVEMENTS = {
    'reshape': lambda x: lax.reshape(x, (2, 6)),
    'squeeze': lambda x: lax.squeeze(x, (1,)),
    'copy': lax.copy_p.bind,
    'transpose': lambda x: lax.transpose(x, (1, 0)),
    'rev': lambda x: lax.rev(x, (1,)),
    'slice': lambda x: lax.slice(x, (0, 1), (3, 4), (2, 1)),
    'broadcast_in_dim': lambda x: lax.broadcast_in_dim(x, (3, 2, 4), (0, 2)),
    'tile': lambda x: lax.tile_p.bind(x, reps=(2, 1)),
    'pad': lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 2, 1)]),
    'concatenate': lambda x: lax.concatenate([x, x], 1),
    'stack': lambda x: lax.stack_p.bind(x, x, axis=1),
    'unstack': lambda x: lax.unstack_p.bind(x, axis=1),
    'split': lambda x: lax.split(x, (1, 3), 1),
}


@pytest.mark.parametrize('name', MOVEMENTS)
def test_arrays_are_moved_as_the_primitive_moves_elements(name):
    x = X[:, :1] if name == 'squeeze' else X
    fn = MOVEMENTS[name]
    eqn, _ = equation(fn, x)
    assert eqn.primitive.name == name
    numbers = np.arange(x.size).reshape(x.shape)
    found = moved(eqn, [numbers] * len(eqn.ins), [None] * len(eqn.ins))
    values = np.append(x.reshape(-1), 0.0)
    for got, want in zip(found, jax.tree.leaves(fn(x)), strict=True):
        np.testing.assert_array_equal(np.where(got == NONE, 0.0, values[got]), want)


def test_every_movement_without_indices_is_tried():
    assert {n for n, does in TABLE.items() if does.moves and does.moves.by} == set(MOVEMENTS)


# -- what a row says, by numbers -------------------------------------------------------------------

Y, Z = X[::-1, ::-1] + 0.1, 0.3 * X + 0.4
POSITIONS = np.array([2, 0])
COMPLEX = X + 1j * Y
BITS = np.arange(12, dtype=np.int32).reshape(3, 4)
PRIMITIVES = {
    p.name: p
    for m in (lax, jax.extend.core.primitives)
    for p in vars(m).values()
    if isinstance(p, _jax.Primitive)
}


def bound(name, **params):
    return lambda *args: PRIMITIVES[name].bind(*args, **params)


def on(*args, names, **params):
    """The same operands for each of these primitives, by the function of ``lax``, if it has
    one.
    """
    return {
        name: (getattr(lax, name, None) or bound(name, **params), *args) for name in names.split()
    }


# name -> a function with one equation of this primitive, and its arguments
INSTANCES = {
    **{name: (fn, X[:, :1] if name == 'squeeze' else X) for name, fn in MOVEMENTS.items()},
    **on(
        X,
        names="""abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh
        digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg
        one_minus_square round rsqrt sign sin sinh sqrt square tan tanh zeros_like""",
    ),
    **on(
        X,
        Y,
        names="""add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne
        nextafter pow rem sub zeta""",
    ),
    **on(X, Y, names='eq_to le_to lt_to add_any'),
    **on(COMPLEX, names='conj imag real'),
    **on(BITS, names='clz not population_count'),
    **on(BITS, BITS[::-1], names='mulhi'),
    'and': (lax.bitwise_and, BITS, BITS[::-1]),
    'or': (lax.bitwise_or, BITS, BITS[::-1]),
    'xor': (lax.bitwise_xor, BITS, BITS[::-1]),
    'not': (lax.bitwise_not, BITS),
    **on(BITS, BITS % 3, names='shift_left shift_right_arithmetic shift_right_logical'),
    'acosh': (lax.acosh, 1 + X),
    'polygamma': (lax.polygamma, np.ones_like(X), X),
    'zeta': (lax.zeta, 2 + X, Y),
    'polynomial': (bound('polynomial'), X, Y, Z),
    'regularized_incomplete_beta': (lax.betainc, X, Y, Z),
    'integer_pow': (lambda x: lax.integer_pow(x, 3), X),
    'clamp': (lax.clamp, Z, X, Y),
    'select_n': (lax.select_n, X > 0.5, X, Y),
    'convert_element_type': (lambda x: x.astype(jnp.float64), X.astype(np.float32)),
    'reduce_precision': (lambda x: lax.reduce_precision(x, 5, 2), X),
    'stop_gradient': (bound('stop_gradient'), X),
    'name': (lambda x: checkpoint_name(x, 'x'), X),
    'device_put': (lambda x: jax.device_put(x, jax.devices()[0]), X),
    'optimization_barrier': (lambda x, y: lax.optimization_barrier((x, y)), X, Y),
    **{
        f'reduce_{kind}': (lambda x, kind=kind: getattr(x, kind)(0), X)
        for kind in ('sum', 'max', 'min', 'prod')
    },
    'argmax': (lambda x: jnp.argmax(x, 0), X),
    'argmin': (lambda x: jnp.argmin(x, 0), X),
    **{
        f'reduce_{kind}': (lambda x, kind=kind: getattr(lax, f'reduce_{kind}')(x, (0,)), BITS)
        for kind in ('and', 'or', 'xor')
    },
    'scatter': (lambda x, u: x.at[POSITIONS].set(u), X, Y[:2]),
    **{
        f'scatter-{kind}': (lambda x, u, how=how: getattr(x.at[POSITIONS], how)(u), X, Y[:2])
        for kind, how in {
            'add': 'add',
            'sub': 'subtract',
            'mul': 'multiply',
            'max': 'max',
            'min': 'min',
        }.items()
    },
    'gather': (lambda x: x[POSITIONS], X),
    'dynamic_slice': (lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)), X),
    'dynamic_update_slice': (lambda x, u: lax.dynamic_update_slice(x, u, (1, 0)), X, Y[:1]),
    'dot_general': (jnp.matmul, X, Y[0]),
    'conv_general_dilated': (lambda x, k: jnp.convolve(x, k), X[0], Y[0, :2]),
    'cumsum': (lambda x: lax.cumsum(x, 0), X),
    'fft': (jnp.fft.fft, COMPLEX),
    'reduce_window_sum': (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), 'VALID'), X),
    'select_and_scatter_add': (
        lambda g: jax.vjp(
            lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (2, 1), (1, 1), 'VALID'), X
        )[1](g)[0],
        Y[1:],
    ),
    'triangular_solve': (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        np.eye(3) + 1.0,
        X,
    ),
}
# they say where on a mesh the same value stands, or leave no equation here
OF_A_MESH = set(
    """preduced pvary reduced_vary_cast reduced_vary_cast_p reshard sharding_constraint
    stage""".split()
)
# what is known of numbers
BY_NUMBERS = 'linear elementwise passes reduces updates takes_part sums finite rounds retypes'


def says_something(does) -> bool:
    numbers = any(getattr(does, name) for name in BY_NUMBERS.split())
    return numbers or does.neutral is not None or does.zeros in ('same', 'first', 'sum')


class Instance:
    """An equation of a primitive with its operands."""

    def __init__(self, name):
        fn, *args = INSTANCES[name]
        self.found = None

        def step(eqn, ins):
            if eqn.primitive.name == name:
                self.found = eqn, [jnp.asarray(x) for x in ins]
            return _jax.bind(eqn, *ins)

        jaxpr, consts, _ = _jax.opened(fn, args)
        _jax.walk(jaxpr, consts, args, step)
        assert self.found, f'the instance of {name} has no such equation: {jaxpr}'
        self.eqn, self.operands = self.found
        self.does = TABLE[name]
        # operands that can vary
        self.smooth = [
            k for k, x in enumerate(self.operands) if jnp.issubdtype(x.dtype, jnp.inexact)
        ]

    def __call__(self, *operands):
        return [np.asarray(x) for x in _jax.bind(self.eqn, *operands)]

    def others(self, k, seed=0):
        """Other numbers for an operand."""
        x, rng = self.operands[k], np.random.default_rng([seed, k])
        numbers = rng.normal(size=x.shape)
        if jnp.iscomplexobj(x):
            numbers = numbers + 1j * rng.normal(size=x.shape)
        return jnp.asarray(numbers, x.dtype)

    def with_others(self, chosen, make):
        return [make(k) if k in chosen else x for k, x in enumerate(self.operands)]


def assert_linear(at: Instance):
    """``f(a x + b y) = a f(x) + b f(y)`` in the largest sets of operands that are linear together,
    and that of differences in smaller ones, to which the others are added.
    """
    sets = [
        set(chosen)
        for number in range(1, len(at.smooth) + 1)
        for chosen in itertools.combinations(at.smooth, number)
        if at.does.linear([k in chosen for k in range(len(at.operands))])
    ]
    assert sets
    for chosen in sets:
        whole = not any(chosen < other for other in sets)
        x, y = ([at.others(k, seed) for k in range(len(at.operands))] for seed in (0, 1))
        first = at(*at.with_others(chosen, lambda k: 0 * at.operands[k]))
        both = at(*at.with_others(chosen, lambda k: 0.5 * x[k] - 2 * y[k]))
        fx, fy = (at(*at.with_others(chosen, v.__getitem__)) for v in (x, y))
        for zero, got, u, v in zip(first, both, fx, fy, strict=True):
            assert not (whole and zero.any())
            np.testing.assert_allclose(got - zero, 0.5 * (u - zero) - 2 * (v - zero), atol=1e-12)


def changed_by(at: Instance, k: int) -> list[np.ndarray]:
    """For each element of operand k, the elements of the result that change with it."""
    before, x, found = at(*at.operands), np.asarray(at.operands[k]), []
    for n in range(x.size):
        moved = x.reshape(-1).copy()
        moved[n] = ~moved[n] if moved.dtype == bool else moved[n] + x.dtype.type(3)
        operands = [*at.operands]
        operands[k] = jnp.asarray(moved.reshape(x.shape))
        same = np.isclose(at(*operands)[0], before[0], rtol=1e-9, atol=0, equal_nan=True)
        found.append(np.flatnonzero(~same))
    return found


def assert_local(at: Instance):
    """Each element of an operand changes the elements of the result that the row allows."""
    does, shape = at.does, at(*at.operands)[0].shape
    if does.elementwise:
        for k, x in enumerate(at.operands):
            assert x.shape != shape or all(
                set(at_) <= {n} for n, at_ in enumerate(changed_by(at, k))
            )
    if does.reduces:
        kept = np.expand_dims(np.arange(np.prod(shape)).reshape(shape), at.eqn.params['axes'])
        places = np.broadcast_to(kept, at.operands[0].shape).reshape(-1)
        assert all(set(found) <= {n} for n, found in zip(places, changed_by(at, 0), strict=True))
    if does.updates:
        own, rows = changed_by(at, 0), set(POSITIONS.tolist())
        assert all(set(found) <= {n} for n, found in enumerate(own))
        assert {n // shape[1] for found in changed_by(at, 2) for n in found} <= rows


def assert_values(at: Instance):
    does, outs = at.does, at(*at.operands)
    if does.passes or does.retypes:
        for x, out in zip(at.operands, outs, strict=True):
            np.testing.assert_array_equal(x, out)
    if does.takes_part:
        assert set(outs[0].reshape(-1).tolist()) <= set(
            np.asarray(at.operands[0]).reshape(-1).tolist()
        )
    if does.sums:
        np.testing.assert_array_equal(outs[0], at.operands[0] + at.operands[1])
    if does.neutral is not None:
        x = at.operands[0]
        for pair in (x, jnp.full_like(x, does.neutral)), (jnp.full_like(x, does.neutral), x):
            np.testing.assert_array_equal(at(*pair)[0], x)
    if does.zeros in ('same', 'first', 'sum'):
        number = len(at.operands) if does.zeros == 'sum' else 1
        zeros = [0 * x if k < number else x for k, x in enumerate(at.operands)]
        assert not at(*zeros)[0].any()


def assert_derivatives(at: Instance):
    """Finite at all numbers, the same along ``i``, or none, as the row says."""
    does = at.does

    def along(primals, tangents):
        def of_smooth(*chosen):
            it = iter(chosen)
            ins = [next(it) if k in at.smooth else x for k, x in enumerate(at.operands)]
            return [x for x in _jax.bind(at.eqn, *ins) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return [np.asarray(x) for x in jax.jvp(of_smooth, primals, tangents)[1]]

    smooth = [at.operands[k] for k in at.smooth]
    ones = [jnp.ones_like(x) for x in smooth]
    if not does.gradient:
        assert not any(x.any() for x in along(smooth, ones))
    if does.finite and does.elementwise:
        for number in (0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 0.5, -20.0, 20.0):
            primals = [jnp.full_like(x, number) for x in smooth]
            assert all(np.isfinite(x).all() for x in along(primals, ones)), number
    if does.holomorphic and does.elementwise and does.gradient and does.axes:
        try:
            turned = [jnp.asarray(at.others(k) + 0.3j, complex) for k in at.smooth]
            one = along(turned, [jnp.ones_like(x) for x in turned])
        except (TypeError, NotImplementedError):  # it has no complex numbers
            return
        many = along(turned, [1j * jnp.ones_like(x) for x in turned])
        # that it makes real numbers is asked apart
        for a, b in zip(one, many, strict=True) if all(map(np.iscomplexobj, one)) else ():
            np.testing.assert_allclose(b, 1j * a, rtol=1e-10, atol=1e-12)


def test_every_row_that_says_something_of_numbers_is_tried():
    rows = {name for name, does in TABLE.items() if says_something(does)}
    there = set(INSTANCES) | OF_A_MESH | {'custom_jvp_call', 'custom_vjp_call'}
    assert rows == there


@pytest.mark.tier(quick=12)
@pytest.mark.parametrize('name', INSTANCES)
def test_what_the_table_says_of_a_primitive_holds_for_its_numbers(name):
    if name in ELSEWHERE - PRIMITIVES.keys():
        pytest.skip('this JAX lacks it')
    at = Instance(name)
    if at.does.linear is not None:
        assert_linear(at)
    assert_local(at)
    assert_values(at)
    if at.smooth:
        assert_derivatives(at)


@pytest.mark.parametrize(
    'fn, rounds',
    [
        (lambda x: lax.reduce_precision(x, 5, 2), True),
        (lambda x: lax.reduce_precision(x, 8, 7), False),
        (lambda x: x.astype(jnp.float8_e4m3fn), True),
        (lambda x: x.astype(jnp.bfloat16), False),
        (lambda x: x.astype(int), False),
    ],
)
def test_few_bits_are_fewer_than_those_of_bfloat16(fn, rounds):
    (eqn,) = _jax.trace(fn, X)[0].eqns
    does = TABLE[eqn.primitive.name]
    assert does.rounds(eqn.params) == rounds


def test_a_primitive_without_a_row_is_cut_by_its_name():
    stranger = _jax.Primitive('stranger')
    stranger.def_impl(lambda x: x[::-1])
    stranger.def_abstract_eval(lambda x: x)
    _jax.ad.deflinear2(stranger, lambda t, x: [stranger.bind(t)])
    assert primitives.TABLE['stranger'] == primitives.BY_ITS_OWN_RULE

    def cell(w, h, x):
        new = jnp.tanh(stranger.bind(h) + braintrace.matmul(x, w))
        return new, new

    learner = functional.online(cell, rules.d_rtrl())
    jax.eval_shape(learner.init, jnp.ones((4, 4)), X, X)
    (note,) = [d for d in learner.report.diagnostics if d.kind == 'mixing']
    assert 'stranger merges positions of a hidden state' in note.message


def literal_names(tree: ast.Module):
    """Line and names of each literal that holds several names of primitives, and no other words."""
    for node in ast.walk(tree):
        kept = 'keys' if isinstance(node, ast.Dict) else 'elts'
        items = getattr(node, kept, ())
        words = [item.value for item in items if isinstance(item, ast.Constant)]
        if len(words) > 1 and len(words) == len(items) and set(words) <= TABLE.keys():
            yield node.lineno, words


def test_no_other_file_of_the_compiler_and_the_executor_lists_primitives():
    found = [
        f'{path.relative_to(PACKAGE)}:{line}: {words}'
        for floor in ('_compiler', '_executor')
        for path in sorted((PACKAGE / floor).rglob('*.py'))
        if path.name != 'primitives.py'
        for line, words in literal_names(ast.parse(path.read_text(encoding='utf-8')))
    ]
    assert not found, 'ask _compiler/primitives.py for a property instead:\n' + '\n'.join(found)


def test_a_literal_that_lists_primitives_is_found():
    source = "A = {'add', 'mul'}\nif name in ('cond', 'scan'): pass\nB = {'add': 1, 'other': 2}"
    found = [words for _, words in literal_names(ast.parse(source))]
    assert found == [['add', 'mul'], ['cond', 'scan']]
