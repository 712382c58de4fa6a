"""Automatic marking: which equations become which ops, what is left and how it is told, errors."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace import Policy, functional, rules
from braintrace.errors import BraintraceWarning, CompileError, OptionError, UntracedParameterError
from tests.compiler.degraded import product

B, I, N = 2, 3, 4
P = {'w': (I, N), 'u': (N, N), 'b': (N,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in P.items()}
H, X = jax.ShapeDtypeStruct((B, N), jnp.float32), jax.ShapeDtypeStruct((B, I), jnp.float32)
D_RTRL = rules.d_rtrl()


def compiled(new_state, mark='auto', x=X, **options):
    """The learner of a cell whose new state and output are this function."""

    def cell(p, h, x):
        h = new_state(p, h, x)
        return h, h

    learner = functional.online(cell, D_RTRL, mark=mark, **options)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        jax.eval_shape(learner.init, PARAMS, H, x)
    return learner


def told(learner, kind):
    return {d.path: d for d in learner.report.diagnostics if d.kind == kind}


def line_of(text):
    """The place of the line of this file that holds a text after ``# ``."""
    lines = open(__file__).read().splitlines()
    (at,) = [k for k, line in enumerate(lines, 1) if line.endswith(f'# {text}')]
    return f'{__file__}:{at} ('


# what an equation is, and what it becomes
ROWS = {
    'product': ('dot_general', 'etp_einsum_mm', lambda p, h, x: h + (p['w'].T @ x.T).T),
    'convolution': (
        *('conv_general_dilated', 'etp_conv'),
        lambda p, h, x: 0.9 * h + lax.conv(h[:, None], p['w'][None, :1], (1,), 'SAME')[:, 0],
    ),
    'lookup': ('gather', 'etp_embed_mm', lambda p, h, x: h + p['w'][x[:, 0].astype(int)]),
    'lookup of one': (
        *('dynamic_slice', 'etp_embed_mv'),
        lambda p, h, x: 0.9 * h + p['w'][x[0, 0].astype(int)],
    ),
}
ELEMENTWISE = {
    'bias': ('add', lambda p, h, x: 0.9 * h + p['b']),
    'decay': ('mul', lambda p, h, x: jnp.exp(-(p['b'] ** 2)) * h),
    'quotient': ('div', lambda p, h, x: h / p['b']),
    'threshold': ('max', lambda p, h, x: jnp.maximum(h, p['b'])),
    'choice': ('select_n', lambda p, h, x: jnp.where(h > 0, p['b'], h)),
    'joined': (
        'concatenate',
        lambda p, h, x: h + jnp.concatenate([x[:, :1], jnp.tile(p['b'][1:], (B, 1))], -1),
    ),
    'written': ('scatter', lambda p, h, x: h.at[0].set(p['b'])),
}
ROWS |= {name: (was, 'etp_elemwise', fn) for name, (was, fn) in ELEMENTWISE.items()}


@pytest.mark.parametrize('row', ROWS)
def test_an_equation_becomes_the_op_that_does_the_same(row):
    (was, became, new_state), path = ROWS[row], 'b' if row in ELEMENTWISE else 'w'
    learner = compiled(new_state)
    assert [(op.primitive.name, op.owned) for op in learner.graph.ops] == [(became, True)]
    assert learner.routes[path].kind == 'trace'
    found = told(learner, 'marked')[path]
    assert found.level == 'info'
    assert f'{was} with parameter {path} became {became}, with a trace to' in found.message


def test_a_mark_keeps_the_line_of_the_user():
    def new_state(p, h, x):
        h = 0.9 * h
        h = h + x @ p['w']  # a product
        return h + p['b']  # a bias

    learner = compiled(new_state)
    places = {path: d.location for path, d in told(learner, 'marked').items()}
    assert places['w'].startswith(line_of('a product'))
    assert places['b'].startswith(line_of('a bias'))
    assert learner.routes['b'].location == places['b']


def test_a_product_keeps_its_precision_and_its_type():
    x = jax.ShapeDtypeStruct((B, I), jnp.bfloat16)

    def new_state(p, h, x):
        w = p['w'].astype(x.dtype)
        return h + lax.dot(x, w, precision='highest', preferred_element_type=jnp.float32)

    (op,) = compiled(new_state, x=x).graph.ops
    assert op.params['precision'] == (lax.Precision.HIGHEST,) * 2
    assert op.params['preferred_element_type'] == op.y_aval.dtype == jnp.float32
    assert op.weight_avals['weight'].dtype == jnp.bfloat16


def test_a_predicate_chooses_by_path_and_leaf():
    seen = []

    def matrices(path, leaf):
        seen.append((path, leaf.shape))
        return leaf.ndim == 2

    learner = compiled(lambda p, h, x: 0.9 * h + x @ p['w'] + p['b'], matrices)
    assert set(seen) == {((name,), shape) for name, shape in P.items()}
    assert set(told(learner, 'marked')) == {'w'}
    assert learner.routes['b'].reason == 'not_etp_op'


def test_what_is_used_twice_element_by_element_is_one_op():
    learner = compiled(lambda p, h, x: (1 - p['b']) * h + (1 - p['b']) * x[:, :1])
    assert len(learner.graph.ops) == 1


def test_by_default_nothing_is_marked():
    assert Policy().mark is None
    with pytest.raises(CompileError, match="applies no ETP op.*mark='auto'"):
        compiled(lambda p, h, x: 0.9 * h + x @ p['w'], None)


def in_a_while(p, h, x):
    add = lambda c: (c[0] + 1, c[1] + p['b'])
    return lax.while_loop(lambda c: c[0] < 3, add, (0, h))[1] + x @ p['w']  # left


def in_a_solver(p, h, x):
    y = jax.scipy.linalg.solve_triangular(p['u'], h.T).T  # solved
    return 0.9 * h + y + x @ p['w']


def by_columns(p, h, x):
    return 0.9 * h + p['u'][:, x[:, 0].astype(int)].T + x @ p['w']  # columns


LEFT = {
    in_a_while: ('b', ('loop of unknown length', 'lax.fori_loop'), 'left'),
    in_a_solver: ('u', ('triangular_solve', 'no op does that'), 'solved'),
    by_columns: ('u', ('gather', 'whole rows'), 'columns'),
}


@pytest.mark.parametrize('new_state', LEFT, ids=lambda fn: fn.__name__)
def test_what_no_op_can_do_is_named_and_refused_if_strict(new_state):
    path, words, line = LEFT[new_state]
    learner = compiled(new_state)
    found = told(learner, 'unmarked')
    assert list(found) == [path] and found[path].level == 'warning'
    assert found[path].location.startswith(line_of(line))
    assert all(word in found[path].message for word in (*words, f'parameter {path}', 'current'))
    assert learner.routes[path].reason == 'not_etp_op' and not told(learner, 'not-etp-op')
    assert learner.routes['w'].kind == 'trace'
    with pytest.raises(UntracedParameterError) as caught:
        compiled(new_state, policy=braintrace.Policy(strict=True))
    assert found[path].message in str(caught.value) and line_of(line) in str(caught.value)


def test_strict_accepts_what_is_marked_as_a_whole():
    strict = braintrace.Policy(strict=True)
    compiled(lambda p, h, x: p['b'] * h + x @ (p['w'] @ p['u']) + p['u'][0], policy=strict)


def test_a_weight_that_the_cell_closes_over_is_named_where_nothing_else_could_be_marked():
    closed = np.ones((I, N), np.float32)
    with pytest.raises(CompileError, match='nothing could be marked') as caught:
        compiled(lambda p, h, x: 0.9 * h + x @ closed)
    text = str(caught.value)
    assert "['b', 'u', 'w']" in text and 'a constant in dot_general' in text


def test_parameters_that_reach_no_state_are_told():
    def cell(p, h, x):
        h = 0.9 * h
        return h @ p['u'] + p['b'], h

    learner = functional.online(cell, D_RTRL, mark='auto')
    with pytest.warns(BraintraceWarning, match='nothing has a trace'):
        jax.eval_shape(learner.init, PARAMS, H, X)
    assert {learner.routes[path].reason for path in 'ub'} == {'no_hidden_state'}
    assert 'without a trace' in told(learner, 'marked')['u'].message


def test_an_opaque_op_alone_is_an_error_with_its_place():
    with pytest.raises(CompileError, match='parameter u in custom_vjp_call') as caught:
        compiled(lambda p, h, x: 0.9 * h + product(h, p['u']))  # alone
    assert line_of('alone') in str(caught.value)


def test_a_predicate_that_chooses_nothing_is_an_error():
    with pytest.raises(CompileError, match=r"chooses none .*\['b', 'u', 'w'\]"):
        compiled(lambda p, h, x: 0.9 * h + x @ p['w'], lambda path, leaf: False)


def test_another_mark_is_refused():
    for mark in ('all', True, 3, ('w',)):
        with pytest.raises(OptionError, match=r"mark is .*None, 'auto', or a function"):
            Policy(mark=mark)
    with pytest.raises(OptionError, match='mark is'):
        functional.online(lambda p, h, x: (h, h), D_RTRL, mark='all')


def test_every_learner_takes_mark():
    x, weights = jnp.ones((B, I)), lambda path, leaf: path[-1] == 'weight'

    def plain():
        layers = brainstate.nn.Linear(I, N), braintrace.nn.LIF(N)
        return brainstate.nn.init_all_states(brainstate.nn.Sequential(*layers), batch_size=B)

    for learner in (
        braintrace.ES_D_RTRL(plain(), 0.9, mark='auto'),
        braintrace.D_RTRL(plain(), policy=Policy(mark='auto')),
        braintrace.compile(plain(), 'D_RTRL', x, batch_size=B, mark='auto'),
        braintrace.compile(plain(), D_RTRL, x, batch_size=B, mark=weights),
    ):
        graph = learner.compile_graph(x)
        kinds = {path.split('/')[-1]: route.kind for path, route in graph.routes.items()}
        assert kinds['weight'] == 'trace' and learner(x).shape == (B, N)
