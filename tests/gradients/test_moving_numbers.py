"""Numbers of a rule as arrays: mapped, differentiated, moved from step to step, and saved."""

import dataclasses
import io
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import Feedback, functional, rules
from braintrace.errors import NotSupportedError, OptionError, StructureError
from tests.compare import assert_close

D = 0.8  # what is left of the hidden state after a step


def leaky(p, c, x):
    """A recurrent layer in front of a readout that leaks."""
    h = D * c['h'] + jnp.tanh(braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w']))
    r = 0.7 * c['r'] + braintrace.matmul(h, p['out'])
    return r, {'h': h, 'r': r}


def linear(p, h, x):
    h = D * h + braintrace.matmul(x, p['w'])
    return h, h


def squared(out, y):
    return ((out - y) ** 2).sum()


@cache
def data(steps=4):
    """Params, carry and a sequence for :func:`leaky`."""
    rng = np.random.default_rng(3)
    params = {'w': rng.standard_normal((5, 3)) / 2, 'out': rng.standard_normal((3, 2))}
    carry = {'h': np.zeros((2, 3)), 'r': np.zeros((2, 2))}
    xs, ys = rng.standard_normal((2, steps, 2, 2))
    return params, carry, xs, ys


def total(tree):
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(tree))


def of_gradient(rule, **options):
    """A number that all gradients of a sequence make."""
    params, carry, xs, ys = data()
    learner = functional.online(leaky, rule)
    gradient = learner.sequence_grad(squared, **options)
    return total(gradient(params, learner.init(params, carry, xs[0]), xs, ys).grads)


def of_updates(rule, **options):
    """A number that all parameters after two updates make."""
    (params, carry, xs, ys), optimizer = data(), optax.sgd(0.3)
    learner = functional.online(leaky, rule)
    update = learner.sequence_update(squared, optimizer, update_every=2, **options)
    state = learner.init(params, carry, xs[0])
    return total(update(params, optimizer.init(params), state, xs, ys).params)


def exact(rule):
    return of_gradient(rule, window=2, inside='exact')


@dataclasses.dataclass(frozen=True, repr=False)
class LeakyTrace(rules.StepRule):
    leak: float | jax.Array = 0.9
    name, approximation = 'LEAKY', 'every state forgets at one rate'

    def start(self, pair):
        return {'e': jnp.zeros((*pair.op.x_aval.shape, pair.op.y_aval.shape[-1]))}

    def step(self, pair, e, x, d, df):
        return {'e': self.leak * e['e'] + jnp.einsum('bi,bj->bij', x, df[..., 0])}

    def read(self, pair, e, lam):
        return {'weight': jnp.einsum('bij,bj->ij', e['e'], lam[..., 0])}


RULES = {
    'es_d_rtrl': rules.es_d_rtrl,
    'a_f': lambda a: rules.es_d_rtrl((0.5, a)),
    'ottt': rules.ottt,
    'otpe': rules.otpe,
    'e_prop': lambda a: rules.e_prop(a, 'random'),
    'own': lambda a: rules.d_rtrl(scope='own', credit='whole').filtered(a),
    'feedback': lambda a: rules.d_rtrl().with_feedback(Feedback('adaptive', decay=a)),
    'scale': lambda a: rules.rflo().with_feedback(Feedback('random', scale=a)),
    'by_part': lambda a: rules.by_part({'out': rules.same_step()}, rules.es_d_rtrl(a)),
    'own rule': LeakyTrace,
}
IGNORED = pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')


@IGNORED
@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'name, value',
    [
        *((name, of_gradient) for name in RULES),
        pytest.param('es_d_rtrl', of_updates, marks=pytest.mark.nightly),
        pytest.param('e_prop', of_updates, marks=pytest.mark.nightly),
        ('es_d_rtrl', exact),
        pytest.param('e_prop', exact, marks=pytest.mark.nightly),
        pytest.param('scale', exact, marks=pytest.mark.nightly),
    ],
)
def test_mapped_numbers_are_those_of_single_rules_and_have_their_derivative(name, value):
    """The last of four numbers by a rule with a fixed one, the derivative by the others."""
    step = 1e-5
    each = jax.value_and_grad(lambda a: value(RULES[name](a)))
    values, slopes = jax.jit(jax.vmap(each))(jnp.array([0.5 - step, 0.5, 0.5 + step, 0.2]))
    assert_close(values[3], jax.jit(lambda: value(RULES[name](0.2)))())
    by_differences = (values[2] - values[0]) / (2 * step)
    assert abs(by_differences) > 1e-3
    np.testing.assert_allclose(slopes[1], by_differences, rtol=1e-6)


@IGNORED
@pytest.mark.slow
def test_weights_that_a_number_moved_are_refused_in_exact_windows():
    with pytest.raises(NotSupportedError, match='online gradient .* first derivatives only'):
        jax.grad(lambda a: of_updates(rules.es_d_rtrl(a), inside='exact'))(0.5)


def scheduled(xs, ys, w, decays):
    """The gradients of steps with a decay of their own, by the published recursion in NumPy."""
    h, ex, ef, grads = np.zeros((2, 3)), np.zeros((2, 2)), np.zeros((2, 3)), []
    for t, (x, y, a) in enumerate(zip(xs, ys, decays, strict=True)):
        h = D * h + x @ w
        ex = a * ex + x
        ef = a * D * ef + (1 - a)
        signal = 2 * (h - y) * ef / (1 - a ** (t + 1))
        grads.append(np.einsum('bi,bj->ij', ex, signal))
    return np.array(grads)


def test_a_number_may_be_another_at_each_step():
    (_, _, xs, _), rng = data(6), np.random.default_rng(5)
    w, ys = rng.standard_normal((2, 3)), rng.standard_normal((6, 2, 3))
    decays = jnp.linspace(0.9, 0.1, 6)
    params = {'w': jnp.asarray(w)}
    start = functional.online(linear, rules.es_d_rtrl(0.5)).init(params, jnp.zeros((2, 3)), xs[0])

    @jax.jit
    def run(state, decays):
        def step(state, at):
            decay, x, y = at
            learner = functional.online(linear, rules.es_d_rtrl(decay))
            found = learner.grad(squared)(params, state, x, y)
            return found.state, found.grads['w']

        return jax.lax.scan(step, state, (decays, xs, jnp.asarray(ys)))[1]

    wanted = scheduled(np.asarray(xs), ys, w, np.asarray(decays))
    np.testing.assert_allclose(run(start, decays), wanted, rtol=1e-12, atol=1e-14)
    other = scheduled(np.asarray(xs), ys, w, np.asarray(decays)[::-1])
    np.testing.assert_allclose(run(start, decays[::-1]), other, rtol=1e-12, atol=1e-14)
    assert run._cache_size() == 1


def test_an_array_is_no_part_of_what_a_rule_is_and_a_fixed_number_is():
    rule, other = rules.es_d_rtrl(jnp.array(0.9)), rules.es_d_rtrl(np.array(0.2))
    assert repr(rule) == repr(other) == 'es_d_rtrl(moving)'
    assert rule == rule and rule != other and len({rule, other}) == 2
    assert rules.es_d_rtrl(jnp.array(0.0)).remembers and not rules.es_d_rtrl(0.0).remembers
    assert repr(LeakyTrace(jnp.array(0.5))) == 'LeakyTrace(leak=moving)'
    assert repr(rules.e_prop(jnp.array(0.5))) == 'e_prop(kappa=moving)'
    # a NumPy scalar is a number like Python's
    assert rules.es_d_rtrl(np.float32(0.5)) == rules.es_d_rtrl(0.5)


@IGNORED
@pytest.mark.slow
def test_a_state_goes_on_under_another_number_and_a_fixed_one_is_told():
    params, carry, xs, _ = data()
    moving, other, fixed = (
        functional.online(leaky, rules.es_d_rtrl(a)) for a in (jnp.array(0.9), jnp.array(0.3), 0.9)
    )
    state, like, of_fixed = (one.init(params, carry, xs[0]) for one in (moving, other, fixed))
    file = io.BytesIO()
    functional.save_state(file, state, learner=moving)
    file.seek(0)
    functional.load_state(file, like, learner=other)
    file.seek(0)
    with pytest.raises(StructureError, match=r'\(moving\) when saved, .*\(0.9\) he'):
        functional.load_state(file, of_fixed, learner=fixed)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: rules.es_d_rtrl(jnp.array(1.5)), r'decay is 1.5; a decay is a float in \[0, 1\)'),
        (lambda: rules.ottt(jnp.array(-0.5)), r'leak is .*; give the factor of the membrane'),
        (lambda: rules.e_prop(np.array(1.0)), r'kappa is .*; give a number in \[0, 1\)'),
        (lambda: rules.es_d_rtrl(jnp.array(3)), r'decay is int\d+\[\]; .* a float of shape \(\)'),
        (lambda: rules.es_d_rtrl((jnp.ones(3) / 2, 0.5)), r'decay is float\d+\[3\]; .*jax.vmap'),
        (lambda: Feedback('random', scale=jnp.array(0.0)), 'scale is .*; give a standard dev'),
        (lambda: Feedback('adaptive', decay=jnp.array(2.0)), r'decay is .*; give a number in'),
    ],
)
def test_an_array_that_is_known_is_checked(make, message):
    with pytest.raises(OptionError, match=message):
        make()
