"""Complex hidden states: D_RTRL is BPTT where nothing is cut, ES_D_RTRL is its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import functional, rules
from tests import oracles
from tests.compare import added, assert_close, assert_moves, assert_same_kinds
from tests.gradients.harness import FLAGS, MASK, learn_by_steps, quick, updated_by_time
from tests.late import LATE
from tests.models.complex_states import CASES, XS, YS, B, H, I, N, decay, drive, readout
from tests.models.library import LibraryOps
from tests.models.model import squared as loss
from tests.models.ops import JaxOps

slow = pytest.mark.slow
D_RTRL, LATE = rules.d_rtrl(), LATE
FRESH = 0.3 * H[::-1]


def bptt(case, weights=None, reset=None):
    data = case.params, case.carry, XS, YS, loss
    return oracles.by_time(case.run(JaxOps()), *data, weights, reset)


def online(case, rule=D_RTRL):
    learner = functional.online(case.run(LibraryOps()), rule)
    return learner, learner.init(case.params, case.carry, XS[0])


def over_sequence(case, rule=D_RTRL, window=None, **given):
    learner, state = online(case, rule)
    run = quick(learner.sequence_grad(loss, window=window, reduction='sum'))
    return run(case.params, state, XS, YS, **given)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', CASES)
def test_windows_give_the_gradient_of_backpropagation(name):
    case = CASES[name]
    learner, state = online(case)
    run, found = quick(learner.sequence_grad(loss, window=None, reduction='sum')), []
    for steps in (slice(0, 3), slice(3, 6)):
        grads, _, _, state = run(case.params, state, XS[steps], YS[steps])
        found.append(grads)
    assert_moves(added(found))
    assert_close(added(found), want := bptt(case))
    assert_same_kinds(found[0], want)
    (group,) = learner.graph.hidden_groups
    assert group.num_state == case.states
    kinds = {e.dtype for e in jax.tree.leaves(state.trace)}
    assert case.trace is None or kinds == {np.dtype(case.trace)}
    assert {r.kind for p, r in learner.routes.items() if p[0] in 'nlg' or 'b_' in p} == {'trace'}


@slow
@pytest.mark.parametrize(
    'name, rule', [('natural', D_RTRL), ('complex_op', LATE), ('conjugate', D_RTRL)]
)
def test_single_steps_give_the_gradient_of_backpropagation(name, rule):
    case = CASES[name]
    data = case.params, case.carry, XS, YS, loss
    assert_close(learn_by_steps(online(case, rule)[0], *data), bptt(case))


@slow
@pytest.mark.parametrize('name', ['natural', 'modulus'])
def test_resets_and_masks(name):
    grads = over_sequence(CASES[name], window=3, mask=MASK, reset=(FLAGS, FRESH))[0]
    assert_close(grads, bptt(CASES[name], MASK, (FLAGS, FRESH)))


@slow
@pytest.mark.parametrize('every, rule', [(1, LATE), (2, LATE), (3, D_RTRL)])
def test_updates_inside_a_sequence(every, rule):
    """Every gradient is that of the weights at all earlier steps, moved together."""
    case = CASES['natural']
    learner, state = online(case, rule)
    optimizer = optax.sgd(0.02)
    run = quick(learner.sequence_update(loss, optimizer, every, 'sum'))
    got, *_ = run(case.params, optimizer.init(case.params), state, XS, YS)
    data = case.params, case.carry, XS, YS
    assert_close(got, updated_by_time(case.run(JaxOps()), *data, 0.02, every=every))


@slow
def test_es_d_rtrl_is_its_formula():
    case, a = CASES['natural'], 0.7
    assert_close(over_sequence(case, rules.es_d_rtrl(a), 3)[0], es_formula(case.params, a))


def es_formula(p, a):
    """In NumPy: the credit of a real y is ``Re(dL/dh ef)``, with the cotangent of a complex h."""
    nu, theta, gamma = np.exp(p['nu']), np.exp(p['theta']), np.exp(p['gamma'])
    lam, c = np.exp(-nu + 1j * theta), p['c_re'] + 1j * p['c_im']
    traced = ('nu', 'theta', 'gamma', 'b_re', 'b_im')
    h, ex, ef = H, np.zeros((B, I)), {name: np.zeros((B, N), complex) for name in traced}
    grads = {name: np.zeros_like(value) for name, value in p.items()}
    for t, (x, y) in enumerate(zip(XS, YS, strict=True)):
        u = x @ p['b_re'] + 1j * x @ p['b_im']
        of_y = {'nu': -nu * lam * h, 'theta': 1j * theta * lam * h, 'gamma': gamma * u}
        of_y |= {'b_re': gamma + 0j, 'b_im': 1j * gamma}
        h = lam * h + gamma * u
        error = (h @ c).real + x @ p['d'] - y
        ex = a * ex + x
        for name in traced:
            ef[name] = a * lam * ef[name] + (1 - a) * of_y[name]
            credit = ((error @ c.T) * ef[name]).real / (1 - a ** (t + 1))
            grads[name] += ex.T @ credit if name in ('b_re', 'b_im') else credit.sum(0)
        readout = h.T @ error
        for name, g in (('c_re', readout.real), ('c_im', -readout.imag), ('d', x.T @ error)):
            grads[name] += g
    return grads


@slow
def test_a_while_loop_without_a_complex_derivative():
    def cell(ops, p, h, x):
        h = decay(ops, p) * h + drive(ops, p, x)
        if isinstance(ops, LibraryOps):
            _, h = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, turn(c[1])), (0, h))
        else:
            h = turn(turn(turn(h)))
        return readout(p, h, x), h

    def turn(h):
        return (0.6 + 0.5j) * jnp.conj(h) + 0.1 * h

    case = CASES['modulus']._replace(cell=cell)
    assert_close(over_sequence(case)[0], bptt(case))


@slow
def test_weights_of_lower_precision_than_the_state():
    case = CASES['natural']
    few = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), case.params)
    case = case._replace(params=few)  # computed in float64, but for what reads weights alone
    grads = over_sequence(case)[0]
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(jnp.bfloat16)}
    assert_close(grads, bptt(case), 0.03)
