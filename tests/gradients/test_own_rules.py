"""A rule of one's own: three functions of arrays, run wherever a rule runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import rules, verify
from braintrace.errors import RuleContractError
from braintrace.functional import online
from tests.compare import assert_close
from tests.gradients.harness import quick, updated_by_time

T, B, IN, N = 7, 3, 2, 4
RNG = np.random.default_rng(0)
XS, YS = RNG.normal(size=(T, B, IN)), RNG.normal(size=(T, B, N))


@dataclasses.dataclass(frozen=True, repr=False)
class LastSteps(rules.StepRule):
    """The rule of the tutorial, with a bias."""

    k: int = T
    name = 'LAST_STEPS'
    approximation = 'steps that are longer ago than k'

    def start(self, pair):
        x, y = pair.op.x_aval, pair.op.y_aval
        return {
            'x': jnp.zeros((B, self.k, x.shape[-1])),
            'q': jnp.zeros((B, self.k, y.shape[-1], pair.group.num_state)),
        }

    def step(self, pair, e, x, d, df):
        moved = jnp.einsum('bjsr,bkjr->bkjs', d, e['q'])
        put_first = lambda new, old: jnp.concatenate([new[:, None], old[:, :-1]], 1)
        return {'x': put_first(x, e['x']), 'q': put_first(df, moved)}

    def read(self, pair, e, lam):
        owed = jnp.einsum('bjs,bkjs->bkj', lam, e['q'])
        grads = {'weight': jnp.einsum('bki,bkj->ij', e['x'], owed), 'bias': owed.sum((0, 1))}
        return {name: grads[name] for name in pair.op.weight_avals}


def lif(p, carry, x):
    """Two states at each position, and two ops of which one has a bias."""
    v, a = carry
    drive = braintrace.matmul(x, p['W'], p['b']) + braintrace.matmul(jnp.tanh(v), p['R'])
    v, a = 0.8 * v - 0.3 * a + drive, 0.9 * a + 0.2 * jnp.tanh(v)
    return v + a, (v, a)


PARAMS = {k: RNG.normal(size=s) / 2 for k, s in {'W': (IN, N), 'b': (N,), 'R': (N, N)}.items()}
CARRY = tuple(RNG.normal(size=(2, B, N)))


def loss(out, y):
    return jnp.mean((out - y) ** 2)


def gradient(rule, mask=None, reset=None, **options):
    learner = online(lif, rule)
    state = learner.init(PARAMS, CARRY, XS[0])
    return quick(learner.sequence_grad(loss, **options))(PARAMS, state, XS, YS, mask, reset)


FLAGS = jnp.arange(T)[:, None] == jnp.array([2, 4, 9])
CALLS = {
    'one window': {},
    'windows': {'window': 2},
    'exact windows': {'window': 3, 'inside': 'exact'},
    'a mask': {'mask': jnp.arange(T) % 3},
    'resets of single lanes': {'reset': (FLAGS, CARRY)},
    'the trace is dropped': {'keep_trace': False},
}


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('call', CALLS)
def test_what_forgets_nothing_is_d_rtrl(call):
    assert_close(*(gradient(rule, **CALLS[call]).grads for rule in (LastSteps(), rules.d_rtrl())))


def test_single_steps_and_updates_are_those_of_d_rtrl():
    def trained(rule):
        learner = online(lif, rule)
        state = learner.init(PARAMS, CARRY, XS[0])
        train = learner.sequence_update(loss, optimizer := optax.sgd(0.1), update_every=2)
        after = quick(train)(PARAMS, optimizer.init(PARAMS), state, XS, YS)
        step = quick(learner.grad(loss))
        grads = []
        for x, y in zip(XS, YS, strict=True):
            found, *_, state = step(PARAMS, state, x, y)
            grads.append(found)
        return after.params, after.losses, grads

    assert_close(trained(LastSteps()), trained(rules.d_rtrl()))


def test_the_report_and_the_fingerprint_name_it():
    learner = online(lif, LastSteps(4))
    jax.eval_shape(learner.init, PARAMS, CARRY, XS[0])
    assert 'steps that are longer ago than k' in str(learner.report)
    assert learner.fingerprint()['rule'] == 'LastSteps(k=4)'


NOTHING = jnp.zeros(N)
BROKEN = {
    'start': (lambda self, pair: NOTHING, r'start, for W .etp_mm. and .*a dict of arrays is due'),
    'step': (
        lambda self, pair, e, x, d, df: {'x': e['x'], 'q': e['q'][:1]},
        r"step, for W .*'q': \(1, .*, where .*'q': \(3, .* is due",
    ),
    'read': (
        lambda self, pair, e, lam: {'weight': NOTHING, 'bias': NOTHING},
        r"read, for W .*'weight': \(4,\).*, where .* is due",
    ),
    'read, a weight': (
        lambda self, pair, e, lam: {'weight': jnp.zeros((IN, N))},
        r"read, for W .*left out \['bias'\].*pair.op.weight_avals, zeros",
    ),
    'read, a mistake': (
        lambda self, pair, e, lam: e['missing'],
        r"read, for W .*, raised KeyError: 'missing'",
    ),
}


@pytest.mark.parametrize('method', BROKEN)
def test_what_does_not_fit_is_refused(method, monkeypatch):
    broken, message = BROKEN[method]
    monkeypatch.setattr(LastSteps, method.split(',')[0], broken)
    with pytest.raises(RuleContractError, match=f'LastSteps.{message}'):
        online(lif, LastSteps()).init(PARAMS, CARRY, XS[0])


def test_an_op_without_an_input_is_named_where_a_rule_reads_one():
    def leaky(params, h, x):
        h = braintrace.element_wise(params['keep']) * h + braintrace.matmul(x, params['W'])
        return h, h

    params = {'keep': np.linspace(0.2, 0.9, N), 'W': PARAMS['W']}
    with pytest.raises(RuleContractError, match='LastSteps.start, for keep .*This op has no input'):
        online(leaky, LastSteps()).init(params, CARRY[0], XS[0])


def test_it_is_reverse_mode_with_cuts():
    exact = verify.cut_bptt_gradients(lif, PARAMS, CARRY, XS, YS, loss)
    assert_close(gradient(LastSteps(), reduction='sum').grads, exact)


@dataclasses.dataclass(frozen=True, repr=False)
class AnyOp(rules.StepRule):
    """D-RTRL of one state, for any op: the derivative of y by each weight, from the op itself."""

    name = 'ANY_OP'
    approximation = ''

    def start(self, pair):
        # where samples share a weight, an axis for them is in front of those of y
        avals = pair.op.weight_avals.items()
        return {name: jnp.zeros((*pair.coords.shape, *a.shape)) for name, a in avals}

    def step(self, pair, e, x, d, df):
        made = jax.jacrev(lambda weights: pair.op.impl(x, weights))(pair.weights)

        def times(a, n, entry):
            return a.reshape(a.shape + (1,) * pair.weights[n].ndim) * entry

        return {n: times(d[..., 0, 0], n, e[n]) + times(df[..., 0], n, made[n]) for n in e}

    def read(self, pair, e, lam):
        return {n: jnp.tensordot(lam[..., 0], a, lam.ndim - 1) for n, a in e.items()}


def test_a_rule_that_sees_the_weights_is_exact_for_ops_whose_entries_are_made_with_them():
    """Also while they change: each gradient is that of the weights at all steps, moved together."""
    params = {'B': RNG.normal(size=(IN, 2)), 'A': RNG.normal(size=(2, N)), 'b': RNG.normal(size=N)}
    h, optimizer = RNG.normal(size=(B, N)), optax.sgd(0.1)

    def cell(p, h, x):
        y = braintrace.lora_matmul(x, p['B'], p['A']) + braintrace.element_wise(p['b'])
        return (h := 0.8 * h + jnp.tanh(y)), h

    now = updated_by_time(cell, params, h, XS, YS, 0.1, loss)
    learner = online(cell, AnyOp())
    update = quick(learner.sequence_update(loss, optimizer))
    state = learner.init(params, h, XS[0])
    assert_close(update(params, optimizer.init(params), state, XS, YS).params, now)
