"""The table of what JAX's primitives do: it is complete, what it says is so, and nothing else says
it.
"""

import ast
from pathlib import Path

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import _jax, functional, rules
from braintrace._compiler import primitives
from braintrace._compiler.equations import Equation, moved
from braintrace._compiler.primitives import NONE, TABLE

PACKAGE = Path(braintrace.__file__).parent
# Names that JAX has in no public list, and those that one of the JAX versions that we run on lacks.
ELSEWHERE = set(
    """call closed_call dce_sink eval_jaxpr log2 one_minus_square polynomial preduced pvary
    random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p reshard shard_map
    zeros_like""".split()
)
X = jnp.arange(1.0, 13).reshape(3, 4) / 13


def known_to_jax() -> set[str]:
    modules = jax.lax, jax.extend.core.primitives
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
    'reshape': lambda x: jax.lax.reshape(x, (2, 6)),
    'squeeze': lambda x: jax.lax.squeeze(x, (1,)),
    'copy': jax.lax.copy_p.bind,
    'transpose': lambda x: jax.lax.transpose(x, (1, 0)),
    'rev': lambda x: jax.lax.rev(x, (1,)),
    'slice': lambda x: jax.lax.slice(x, (0, 1), (3, 4), (2, 1)),
    'broadcast_in_dim': lambda x: jax.lax.broadcast_in_dim(x, (3, 2, 4), (0, 2)),
    'tile': lambda x: jax.lax.tile_p.bind(x, reps=(2, 1)),
    'pad': lambda x: jax.lax.pad(x, 0.0, [(1, -1, 0), (0, 2, 1)]),
    'concatenate': lambda x: jax.lax.concatenate([x, x], 1),
    'stack': lambda x: jax.lax.stack_p.bind(x, x, axis=1),
    'unstack': lambda x: jax.lax.unstack_p.bind(x, axis=1),
    'split': lambda x: jax.lax.split(x, (1, 3), 1),
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
    if eqn.does.moves.back is not None:
        shapes = [x.shape] * len(eqn.ins)
        for got in eqn.does.moves.back(found, eqn.params, shapes):
            np.testing.assert_array_equal(got, numbers)


def test_every_movement_without_indices_is_tried():
    assert {n for n, does in TABLE.items() if does.moves and does.moves.by} == set(MOVEMENTS)


LINEAR = {
    'neg': jnp.negative,
    'reduce_sum': lambda x: x.sum(0),
    'optimization_barrier': jax.lax.optimization_barrier,
    'sub': lambda x: x - 1,
    'add': lambda x: x + 1,
    'mul': lambda x: x * 3,
    'div': lambda x: x / 3,
    'select_n': lambda x: jax.lax.select_n(X > 0.5, x, X),
    'scatter-add': lambda x: x.at[0].add(2.0),
    'scatter-mul': lambda x: x.at[0].multiply(2.0),
    'scatter-sub': lambda x: x.at[0].subtract(2.0),
    'dynamic_slice': lambda x: jax.lax.dynamic_slice(x, (1, 1), (2, 2)),
    'dynamic_update_slice': lambda x: jax.lax.dynamic_update_slice(X, x[:1], (1, 0)),
    'gather': lambda x: x[jnp.array([2, 0])],
    'scatter': lambda x: X.at[jnp.array([1])].set(x[:1]),
    'real': lambda x: jax.lax.real(x + 1j * x),
    'imag': lambda x: jax.lax.imag(x + 1j * x),
    'conj': lambda x: jax.lax.conj(x + 1j * x).real,
    'complex': lambda x: jax.lax.complex(x, 2 * x).imag,
    **MOVEMENTS,
    'squeeze': lambda x: jax.lax.squeeze(x[:, :1], (1,)),
    'cumsum': lambda x: jnp.cumsum(x, 0),
    'dot_general': lambda x: jnp.ones((2, len(x))) @ x,
    'conv_general_dilated': lambda x: jnp.convolve(x[:, 0], jnp.arange(2.0)),
    'fft': lambda x: jnp.fft.fft(x).real,
    'reduce_window_sum': lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (2, 1), (1, 1), 'VALID'
    ),
    'select_and_scatter_add': lambda x: jax.vjp(
        lambda a: jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (2, 1), (1, 1), 'VALID'), X
    )[1](x[1:])[0],
    'triangular_solve': lambda x: jax.lax.linalg.triangular_solve(
        jnp.eye(len(x)) + 1.0, x, left_side=True
    ),
}
# the value itself, in another place or with another type
THE_SAME = set(
    """add_any convert_element_type device_put name pvary reduce_precision reshard
    sharding_constraint stage""".split()
)


def test_every_linear_row_is_tried():
    assert {n for n, does in TABLE.items() if does.linear} == {*LINEAR, *THE_SAME}


@pytest.mark.tier(quick=17)
@pytest.mark.parametrize('name', LINEAR)
def test_the_derivative_of_a_linear_primitive_is_the_same_everywhere(name):
    tangents = [jax.jvp(LINEAR[name], (at,), (X + 1,))[1] for at in (X, jnp.cos(X))]
    for a, b in zip(*map(jax.tree.leaves, tangents), strict=True):
        np.testing.assert_array_equal(a, b)


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


@pytest.mark.slow
def test_a_state_on_another_sharding_keeps_its_positions():
    def cell(spread):
        def step(w, h, x):
            new = jnp.tanh(0.5 * spread(h) + braintrace.matmul(x, w))
            return new, new

        return step

    def found(step):
        learner = functional.online(step, rules.d_rtrl())
        run = learner.sequence_grad(lambda out, _: (out**2).sum())
        xs = jnp.stack([X, X + 1, X**2])
        state = learner.init(jnp.eye(4), jnp.zeros((3, 4)), X)
        return learner.graph.mixing, run(jnp.eye(4), state, xs, xs)[0]

    mesh = jax.make_mesh((1,), ('a',), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        mixing, got = found(cell(lambda h: jax.sharding.reshard(h, jax.P(None, None))))
    assert not mixing
    np.testing.assert_allclose(got, found(cell(lambda h: h))[1], rtol=1e-12)


def literal_names(tree: ast.Module):
    """Line and names of each literal that holds several names of primitives, and no other words."""
    for node in ast.walk(tree):
        items = (
            node.elts
            if isinstance(node, ast.Set | ast.List | ast.Tuple)
            else node.keys
            if isinstance(node, ast.Dict)
            else ()
        )
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
    assert [words for _, words in literal_names(ast.parse(source))] == [
        ['add', 'mul'],
        ['cond', 'scan'],
    ]
