"""Names, trees and kinds of parameters; what is refused; learners as values."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from braintrace import Policy, functional
from braintrace.errors import NotCompiledError, OptionError, StructureError
from tests.compare import assert_close
from tests.precision import float64 as float64

from .plain import D_RTRL, ES, carry, cell, data, loss, params, shapes_of, started


def renamed(p):
    """Parameters under names that are no identifiers."""
    return {'a/b': {'w~0': p['w'], 'k': (p['b'],)}, 'layers': {('l', 1): p['out']}}


def by_names(p, h, x):
    return cell({'w': p['a/b']['w~0'], 'b': p['a/b']['k'][0], 'out': p['layers'][('l', 1)]}, h, x)


@pytest.mark.slow
def test_any_tree_and_any_names_give_the_same_gradients():
    (xs, ys), p = data(), params()
    learner = functional.online(by_names, D_RTRL)
    state = learner.init(renamed(p), carry(), xs[0])
    assert set(learner.routes) == {'a~1b/w~00', 'a~1b/k/0', 'layers/l/1'}
    assert list(state.trace) == ['a~1b/w~00']
    got, *_ = jax.jit(learner.sequence_grad(loss))(renamed(p), state, xs, ys)
    plain, start = started()
    assert_close(got, renamed(jax.jit(plain.sequence_grad(loss))(p, start, xs, ys)[0]))


def test_names_flatten_to_tuples_and_back():
    tree = {'a/b': (1, {'~': 2}), '': [3, None], 'd': {('p', 'q'): 4}}
    flat = functional.flatten_paths(tree)
    assert flat == {('a/b', '0'): 1, ('a/b', '1', '~'): 2, ('', '0'): 3, ('d', 'p', 'q'): 4}
    assert functional.unflatten_paths(dict(reversed(flat.items())), tree) == tree
    with pytest.raises(StructureError, match=r"missing .*'a/b', '0'.* added .*'z'"):
        functional.unflatten_paths({('z',): 1}, tree)


def test_two_leaves_of_one_name_are_refused():
    twice = collections.OrderedDict([(1, jnp.ones(2)), ('1', jnp.ones(2))])
    with pytest.raises(StructureError, match='same path'):
        functional.flatten_paths(twice)
    with pytest.raises(StructureError, match=r"params have the same path: \['1'\]"):
        functional.online(cell, D_RTRL).init(twice, carry(), data()[0][0])


def test_relations_groups_and_routes_can_be_walked():
    learner, state = started()
    walked = [
        (relation.key, sorted(relation.paths), [group.name for group in relation.groups])
        for relation in learner.graph.hidden_param_op_relations
    ]
    assert walked == [('w', ['bias', 'weight'], ['carry'])] and list(state.trace) == ['w']
    kinds = {name: route.kind for name, route in learner.routes.items()}
    assert kinds == {'w': 'trace', 'b': 'trace', 'out': 'same-step'}
    report = str(learner.report)
    assert all(f'\n  {name} ' in report for name in learner.routes)


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda p, h, x: (p | {'w': p['w'].astype('float32')}, h, x), 'params w: .* float32.* now'),
        (lambda p, h, x: (p | {'b': p['b'][None]}, h, x), r'params b: .*\[4\] .*\[1, 4\] now'),
        (lambda p, h, x: (p | {'more': h}, h, x), r'params more: absent .*\[2, 4\] now'),
        (lambda p, h, x: (list(p.values()), h, x), 'params w: .* absent now'),
        (lambda p, h, x: (p, h[0], x), r'carry: .*\[2, 4\] .*\[4\] now'),
        (lambda p, h, x: (p, h, x[:1]), r'inputs 0: .*\[2, 3\] .*\[1, 3\] now'),
    ],
    ids=['dtype', 'rank', 'a leaf more', 'another tree', 'carry', 'batch'],
)
def test_a_step_on_another_structure_is_refused_and_says_how_to_compile(change, words):
    learner, state = started()
    p, h, x = change(params(), carry(), data()[0][0])
    with pytest.raises(StructureError, match=words) as caught:
        learner.step(p, state.replace(carry=h), x)
    text = str(caught.value)
    assert 'learner.init(params, carry, *inputs)' in text and 'brainstate' not in text


def test_a_state_of_another_rule_is_refused():
    """Also by a learner that has compiled nothing."""
    _, state = started(rule=ES)
    for learner in (started()[0], functional.online(cell, D_RTRL)):
        with pytest.raises(StructureError, match='does not belong to this learner'):
            learner.step(params(), state, data()[0][0])


@pytest.mark.parametrize(
    'fresh, words',
    [
        (lambda h: {'h': h}, r"missing \['carry'\], added \['h'\]"),
        (lambda h: h[:, :3], r'\[2, 4\], and carry0 has float64\[2, 3\]'),
        (lambda h: h.astype(complex), r'float64\[2, 4\], and carry0 has complex'),
    ],
    ids=['tree', 'shape', 'dtype'],
)
def test_a_reset_to_another_structure_is_refused(fresh, words):
    (xs, ys), (learner, state), fresh = data(), started(), fresh(carry())
    with pytest.raises(StructureError, match=words):
        functional.reset(state, jnp.zeros(2, bool), fresh)
    with pytest.raises(StructureError, match=words):
        reset = jnp.zeros(len(xs), bool), fresh
        learner.sequence_grad(loss)(params(), state, xs, ys, reset=reset)


def test_structure_comes_first_and_memory_later():
    args = params(), carry(), data()[0][0]
    learner = functional.online(cell, D_RTRL)
    shapes = jax.eval_shape(learner.init, *shapes_of(args))
    assert functional.online(cell, D_RTRL).init(*args).trace.keys() == shapes.trace.keys()
    state = learner.init(*args)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    assert shapes_of(state) == shapes_of(shapes)
    outputs, after = jax.eval_shape(learner.step, args[0], shapes, args[2])
    assert shapes_of(after) == shapes_of(shapes) and outputs.shape == (2, 2)
    losses = jax.eval_shape(learner.sequence_grad(loss), args[0], shapes, *shapes_of(data())).losses
    assert losses.shape == (5,)


def test_several_learners_share_the_parameters_they_are_given():
    p, (xs, ys) = params(), data()
    addresses = {name: a.unsafe_buffer_pointer() for name, a in p.items()}
    for rule in (D_RTRL, ES, None):
        learner, state = started(rule=rule)
        jax.jit(learner.sequence_grad(loss))(p, state, xs, ys)
        held = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state)]
        assert not set(addresses.values()).intersection(held)
    assert addresses == {name: a.unsafe_buffer_pointer() for name, a in p.items()}


def chosen(path, leaf) -> bool:
    return path != ('b',)


def test_a_learner_is_equal_to_itself_alone_since_what_it_compiled_is_its_own():
    (learner, _), other = started(), functional.online(cell, D_RTRL)
    assert learner == learner and learner != other and len({learner, other}) == 2
    with pytest.raises(NotCompiledError):
        _ = other.graph
    with pytest.raises(AttributeError):
        learner.rule = None


def test_a_learner_with_a_field_replaced_compiles_anew():
    (learner, state), args = started(), (params(), carry(), data()[0][0])
    other = dataclasses.replace(learner, rule=ES)
    assert 'not compiled' in repr(other)
    assert 'x' in other.init(*args).trace['w']['carry']
    assert jax.tree.structure(learner.init(*args)) == jax.tree.structure(state)


def test_a_learner_is_a_static_argument_of_jit():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(learner, p, h, xs, ys):
        traced.append(learner)
        return learner.sequence_grad(loss)(p, learner.init(p, h, xs[0]), xs, ys)[0]

    args = params(), carry(), *data()
    learner = functional.online(cell, D_RTRL)
    first = run(learner, *args)
    assert_close(run(learner, *args), first, 0)
    assert len(traced) == 1
    run(functional.online(cell, ES), *args)
    assert len(traced) == 2


def test_what_a_learner_shows_of_itself():
    learner = functional.online(cell, ES, trainable=chosen, policy=Policy(strict=True))
    shown = repr(learner)
    assert shown.startswith('OnlineLearner(cell (')
    for words in ('not compiled', 'plain.py:', 'Policy(strict=True)'):
        assert words in shown
    assert 'ES_D_RTRL(decay=0.7), trainable=chosen (' in shown
    learner.init(params(), carry(), data()[0][0])
    assert repr(learner).endswith('compiled; parameters: 1 frozen, 1 same-step, 1 trace')
    assert '\n' not in repr(learner) and ' at 0x' not in repr(learner)
    assert 'no rule' in repr(functional.online(functools.partial(cell), None))


@pytest.mark.parametrize('name', ['cell', 'trainable', 'hidden'])
def test_what_is_no_function_is_refused(name):
    with pytest.raises(OptionError, match=f"{name} is 'W'; give a function"):
        functional.online(**{'cell': cell, 'rule': D_RTRL, name: 'W'})
