"""e-prop on brainstate models: spiking layers under a leaky readout, with units."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from tests.compare import assert_close

TAU, DT = 5 * u.ms, 1 * u.ms
KAPPA = float(np.exp(-DT / TAU))
RNG = np.random.default_rng(0)
XS, YS = RNG.random((8, 2, 3)), RNG.standard_normal((8, 2, 2))
WEIGHTS = [1.5 * RNG.random(shape) for shape in ((8, 3), (8, 2), (5, 2))]
stop = jax.lax.stop_gradient


class Filters(brainstate.nn.Module):
    """The same readout, which filters each layer's spikes in front of its weights; the error goes
    back through B.
    """

    def __init__(self, in_size, out_size, tau, w_init):
        super().__init__()
        self.W = nn.Linear(in_size, out_size, w_init=w_init, b_init=None)
        self.B = w_init

    def init_state(self, batch_size):
        self.first = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
        self.second = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, first, second):
        self.first.value = KAPPA * self.first.value + first
        self.second.value = KAPPA * self.second.value + second
        f = jnp.concatenate([self.first.value, self.second.value], -1)
        return self.W(stop(f)) + (f @ self.B - stop(f @ self.B))


class Net(brainstate.nn.Module):
    """Leaky and adaptive units that read each other's old spikes, as a constant."""

    def __init__(self, readout):
        super().__init__()
        first, second, last = WEIGHTS
        self.plain, self.adaptive = (
            nn.LIF(3, tau=8 * u.ms),
            nn.ALIF(2, tau=8 * u.ms, tau_a=30 * u.ms),
        )
        self.to_plain = nn.Linear(8, 3, w_init=first, b_init=None)
        self.to_adaptive = nn.Linear(8, 2, w_init=second, b_init=None)
        self.readout = readout(5, 2, tau=TAU, w_init=last)

    def update(self, x):
        old = stop(jnp.concatenate([self.plain.get_spike(), self.adaptive.get_spike()], -1))
        read = jnp.concatenate([x, old], -1)
        z = self.plain(self.to_plain(read)), self.adaptive(self.to_adaptive(read))
        if isinstance(self.readout, Filters):
            return self.readout(*z)
        return self.readout(jnp.concatenate(z, -1))


def learner_of(readout, rule):
    return braintrace.compile(Net(readout), rule, XS[0], batch_size=2)


def gradient(learner, **options):
    def loss(x, y):
        return 0.5 * ((learner(x) - y) ** 2).sum()

    return learner.etrace_grad(XS, YS, step_fn=loss, reduction='sum', **options).grads


@pytest.fixture(autouse=True)
def _steps_of_a_millisecond():
    with brainstate.environ.context(dt=DT):
        yield


def check(got, want):
    """Paths of the readouts' weights differ."""
    assert len(got) == len(want) == 3
    for path, grads in got.items():
        found = [path] if path in want else [p for p in want if p[0] == path[0] == 'readout']
        (got_leaf,), (want_leaf,) = jax.tree.leaves(grads), jax.tree.leaves(want[found[0]])
        assert_close(got_leaf, want_leaf, 1e-5)


@pytest.mark.slow
def test_a_leaky_readout_with_kappa_is_one_that_filters_in_front_of_its_weights():
    learner = learner_of(nn.LeakyRateReadout, braintrace.rules.e_prop(KAPPA))
    want = gradient(learner_of(Filters, braintrace.rules.d_rtrl()))
    check(gradient(learner), want)
    (found,) = [line for line in str(learner.report).splitlines() if ' at readout' in line]
    assert found.split() == f'kappa {KAPPA:g} at readout/W[0], readout/W[1]'.split()


@pytest.mark.slow
def test_adaptive_feedback_counts_every_step_of_a_learner():
    rule = braintrace.rules.e_prop(KAPPA, braintrace.Feedback('adaptive', decay=0.01))
    learner = learner_of(nn.LeakyRateReadout, rule)

    def loss(x, y):
        return 0.5 * ((learner(x) - y) ** 2).sum()

    def counted():
        return int(learner.etrace.value['trace']['(feedback)'])

    learner(XS[0])
    gradient(learner, window=3)
    learner.reset_state()
    learner.reset_state(lanes=np.array([True, False]))
    learner.etrace_train(XS, YS, step_fn=loss, optimizer=optax.sgd(1e-3))
    assert counted() == 1 + 2 * len(XS)
    saved = learner.save()
    learner(XS[0])
    learner.restore(saved)
    assert counted() == 1 + 2 * len(XS)
    (trace,) = learner.get_etrace_of(learner.model.to_plain.weight).values()
    assert trace['weight'].shape == (2, 8, 3, 2)
