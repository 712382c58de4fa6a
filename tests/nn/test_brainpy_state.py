"""Neurons, synapses and projections of ``brainpy.state``, as they are, over our ``Linear``: their
gradients against reverse mode in float64.
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn, verify
from tests.compare import assert_close, assert_moves
from tests.nn.rows import bare
from tests.precision import float64_models as float64_models

BATCH, INPUTS, UNITS, STEPS = 2, 3, 4, 6
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def bp():
    return pytest.importorskip('brainpy.state', reason='the package brainpy is not installed')


class Weights(brainstate.nn.Module):
    """Our layer, with a unit behind it."""

    def __init__(self, num_in, unit, size=1.0):
        super().__init__()
        draw = brainstate.nn.init.Normal
        self.linear = nn.Linear(num_in, UNITS, w_init=draw(0.0, size), b_init=draw(0.0, 0.3 * size))
        self.in_size, self.out_size, self.unit = (num_in,), (UNITS,), unit

    def update(self, x):
        return self.linear(x) * self.unit


class Net(brainstate.nn.Module):
    """Neurons that read the input and, where they are recurrent, their own spikes: through weights,
    or through a projection, which drives them itself.
    """

    def __init__(self, neurons, recurrent, way):
        super().__init__()
        self.neurons, self.recurrent = neurons, recurrent
        self.way = way(INPUTS + (UNITS if recurrent else 0), neurons)

    def update(self, x):
        if self.recurrent:
            x = jnp.concatenate([x, self.neurons.get_spike()], -1)
        y = self.way(x)
        spikes = self.neurons(y) if isinstance(self.way, Weights) else self.neurons()
        return spikes + self.neurons.V.value / u.mV


def at(i):
    return brainstate.environ.context(t=i * 0.5 * u.ms)


def check(net, recurrent, states):
    """The gradients, and the number of states of the neurons' group."""
    rng = np.random.default_rng(0)
    xs, ys = rng.random((STEPS, BATCH, INPUTS)), rng.standard_normal((STEPS, BATCH, UNITS))
    loss = lambda output, target: 0.5 * ((output - target) ** 2).sum()
    with brainstate.environ.context(dt=0.5 * u.ms):
        brainstate.random.seed(1)
        model = net()
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        learner = braintrace.D_RTRL(model)
        with at(0):
            learner.compile_graph(xs[0])
        online, *start = learner.pure()
        steps, inputs = np.arange(STEPS), xs
        if learner.model.neurons.__class__.__name__.endswith('Ref'):  # which read the time
            inputs = xs, {'t': steps * 0.5 * u.ms}
        oracles = [
            verify.cut_bptt_gradients(online.cell, *start, inputs, ys, loss, graph=learner.graph)
        ]
        if not recurrent:
            oracles.append(verify.bptt_gradients(online.cell, *start, inputs, ys, loss))

        def step(i, x, y):
            with at(i):
                return loss(learner(x), y)

        grads = learner.etrace_grad(steps, xs, ys, step_fn=step, reduction='sum', window=3).grads
    assert_moves(bare(grads))
    for oracle in oracles:
        assert_close(bare(grads), bare(oracle), 1e-10)
    assert learner.report.exact == (not recurrent)
    assert states in [group.num_state for group in learner.graph.hidden_groups]


NEURONS = dict(IF=1, LIF=1, LIFRef=1, ALIF=2, ExpIF=1, AdExIF=2, Gif=4, GifRef=4)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', NEURONS)
def test_neurons_have_the_gradient_of_reverse_mode(bp, name):
    recurrent = name in ('LIF', 'AdExIF')
    weights = lambda n, neurons: Weights(n, 9.0 * u.mA)
    check(lambda: Net(getattr(bp, name)(UNITS), recurrent, weights), recurrent, NEURONS[name])


def refractory(bp):
    rest = dict(R=1 * u.ohm, V_th=1 * u.mV, V_reset=0 * u.mV, V_rest=0 * u.mV)
    zero = brainstate.nn.init.ZeroInit(unit=u.mV)
    cells = bp.LIFRef(UNITS, tau=5 * u.ms, tau_ref=3 * u.ms, V_initializer=zero, **rest)
    into = nn.Linear(INPUTS, UNITS, w_init=jnp.ones((INPUTS, UNITS)))
    return brainstate.nn.Sequential(into, lambda x: x * u.mA, cells)


@pytest.mark.nightly
def test_a_refractory_neuron_spikes_as_often_as_without_a_learner(bp):
    xs, steps = jnp.full((80, BATCH, INPUTS), 0.9), jnp.arange(80)
    with brainstate.environ.context(dt=0.5 * u.ms):
        model, want = refractory(bp), []
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        for i, x in enumerate(xs):
            with at(i):
                want.append(float(model(x).sum()))
        for call in (
            lambda learner, step: [step(i, x) for i, x in enumerate(xs)],
            lambda learner, step: learner.etrace_grad(steps, xs, step_fn=step).losses,
            lambda learner, step: learner.etrace_evolve(steps, xs, step_fn=step, trace=False),
            lambda learner, step: braintrace.evaluate(learner, xs, xs, lambda o, _: o.sum((1, 2))),
        ):
            with at(0):
                learner = braintrace.compile(refractory(bp), 'D_RTRL', xs[0], batch_size=BATCH)

            def step(i, x, learner=learner):
                with at(i):
                    return learner(x).sum()

            assert np.array_equal(np.asarray(call(learner, step)), want) and sum(want) > 40


def behind(synapses, output, in_front=lambda bp, n: ()):
    """The weights in front of the synapses."""
    return lambda bp, n, neurons: bp.AlignPostProj(
        *in_front(bp, n), comm=Weights(n, u.mS), syn=synapses(bp), out=output(bp), post=neurons
    )


expon, dual = lambda bp: bp.Expon.desc(UNITS, tau=5.0 * u.ms), lambda bp: bp.DualExpon.desc(UNITS)
cuba, coba = lambda bp: bp.CUBA.desc(scale=1.0 * u.volt), lambda bp: bp.COBA.desc(E=5.0 * u.volt)
# each way from the input to the neurons, whether it is recurrent, and the states of its group
PROJECTIONS = {
    'expon_cuba': (behind(expon, cuba), False, 2),
    'expon_coba': (behind(expon, coba), True, 2),
    'dual_cuba': (behind(dual, cuba), True, 3),
    'plastic': (behind(expon, coba, lambda bp, n: (bp.STP(n),)), False, 2),
    'delta': (lambda bp, n, post: bp.DeltaProj(comm=Weights(n, u.mV), post=post), True, 1),
    'current': (
        lambda bp, n, post: bp.CurrentProj(
            comm=Weights(n, u.mA), out=bp.CUBA(scale=1.0), post=post
        ),
        False,
        1,
    ),
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', PROJECTIONS)
def test_projections_have_the_gradient_of_reverse_mode(bp, name):
    way, recurrent, states = PROJECTIONS[name]
    project = lambda n, neurons: way(bp, n, neurons)
    check(lambda: Net(bp.LIF(UNITS), recurrent, project), recurrent, states)
