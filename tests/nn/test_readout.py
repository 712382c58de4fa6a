"""What readouts have beyond the other cells: a time constant, and what a filter keeps."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.nn import LIF, FilteredReadout, LeakyRateReadout, LeakySpikeReadout, Linear


def decay_of(readout):
    readout.init_state()
    readout.f.value = jnp.ones(3)
    readout(jnp.zeros(3))
    return np.asarray(readout.f.value)


@pytest.mark.parametrize('tau', [0.5, 5.0, 40])
def test_a_number_counts_steps(tau):
    np.testing.assert_allclose(
        decay_of(FilteredReadout(3, 2, tau=tau)), np.exp(-1 / tau), rtol=1e-6
    )


def test_a_time_is_measured_against_dt():
    readout = FilteredReadout(3, 2, tau=0.01 * u.second)
    with brainstate.environ.context(dt=2 * u.ms):
        np.testing.assert_allclose(decay_of(readout), np.exp(-0.2), rtol=1e-6)


def test_filtering_before_the_weights_is_filtering_behind_them():
    brainstate.random.seed(1)
    readout = FilteredReadout(3, 2, tau=4 * u.ms, b_init=brainstate.nn.init.Normal(scale=0.3))
    readout.init_state(batch_size=2)
    weight, bias = (np.asarray(readout.W.weight.value[n], float) for n in ('weight', 'bias'))
    r = np.zeros((2, 2))
    for step, x in enumerate(np.random.default_rng(0).normal(size=(5, 2, 3))):
        with brainstate.environ.context(dt=(1 + step) * u.ms):
            got = readout(jnp.asarray(x, 'float32'))
        r = np.exp(-(1 + step) / 4) * r + x @ weight + bias
        np.testing.assert_allclose(got, r, rtol=0, atol=2e-6)


class Net(brainstate.nn.Module):
    def __init__(self, readout):
        super().__init__()
        self.layer, self.neurons = Linear(2, 3), LIF(3, tau=5.0, R=5.0)
        self.readout = readout

    def update(self, x):
        return self.readout(self.neurons(self.layer(x)))


@pytest.mark.slow
def test_what_the_loss_reads_through_the_filter_keeps_the_history_of_the_layer_in_front():
    """The loss is that of the last step alone, which reads the past through the filter."""
    readout = FilteredReadout(3, 2, tau=5.0, b_init=brainstate.nn.init.Normal(scale=0.3))
    learner = braintrace.compile(Net(readout), 'D_RTRL', jnp.zeros((2, 2)), batch_size=2, seed=0)
    online, params, carry = learner.pure()
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2, 2)), 'float32')
    last = jnp.arange(12) == 11

    def loss(output, weight):
        return weight * jnp.sum((output - 1) ** 2)

    state = online.init(params, carry, xs[0])
    got = online.sequence_grad(loss, reduction='sum')(params, state, xs, last)[0]
    wanted = braintrace.verify.bptt_gradients(online.cell, params, carry, xs, last, loss)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        assert np.abs(leaf).max() > 0.1, path
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))
    assert learner.report.exact


@pytest.mark.parametrize('context', [{}, {'dt': 0.1}, {'dt': 1 * u.mV}])
def test_a_time_without_a_dt_in_time_is_refused(context):
    with (
        brainstate.environ.context(**context),
        pytest.raises(braintrace.errors.EtpUnitError, match='brainstate.environ.set'),
    ):
        decay_of(FilteredReadout(3, 2, tau=5 * u.ms))


def test_a_tau_of_another_dimension_is_refused():
    with pytest.raises(braintrace.errors.EtpUnitError, match='give a time'):
        FilteredReadout(3, 2, tau=5 * u.mV)


@pytest.mark.parametrize('tau', [0.0, -1.0, 0 * u.ms])
def test_a_tau_that_is_not_positive_is_refused(tau):
    with pytest.raises(braintrace.errors.OptionError, match='larger than 0'):
        FilteredReadout(3, 2, tau=tau)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: FilteredReadout(3, 2, tau=[1.0, 2.0]), 'tau is .*; give one number'),
        (lambda: FilteredReadout(3, 2, tau=np.ones(3)), r'tau has shape \(3,\); give one number'),
        (lambda: LeakyRateReadout(3, 2, tau=np.ones((2, 1))), r'tau has shape \(2, 1\)'),
        (lambda: LeakyRateReadout(3, 2, w_init=np.ones((2, 3))), r'w_init has shape \(2, 3\)'),
        (lambda: LeakyRateReadout(3, 2, w_init=None), 'LeakyRate.*w_init is a NoneType'),
        (lambda: LeakySpikeReadout(3, 2, w_init=np.ones((2, 3))), r'w_init has shape \(2, 3\)'),
    ],
)
def test_arguments_of_another_shape_are_refused(make, message):
    with pytest.raises(braintrace.errors.OptionError, match=message):
        make()


def test_each_output_may_leak_by_itself():
    readout = LeakyRateReadout(3, 2, tau=np.array([1.0, 4.0]), w_init=0.0, r_init=1.0)
    readout.init_state()
    np.testing.assert_allclose(readout(jnp.ones(3)), np.exp([-1.0, -0.25]), rtol=1e-6)


def test_a_filter_behind_the_weights_cuts_that_history_and_the_report_says_so():
    net = Net(LeakyRateReadout(3, 2, tau=5.0))
    learner = braintrace.compile(net, 'D_RTRL', jnp.zeros((2, 2)), batch_size=2)
    assert not learner.report.exact
    assert 'readout/r' in str(learner.report)


def test_both_leaky_readouts_have_the_same_outputs():
    brainstate.random.seed(1)
    before, behind = FilteredReadout(3, 2, tau=4 * u.ms), LeakyRateReadout(3, 2, tau=4 * u.ms)
    behind.W.value = before.W.weight.value['weight']
    for readout in (before, behind):
        readout.init_state(batch_size=2)
    with brainstate.environ.context(dt=1 * u.ms):
        for x in np.random.default_rng(0).normal(size=(5, 2, 3)).astype('float32'):
            np.testing.assert_allclose(before(x), behind(x), rtol=0, atol=2e-6)


PUBLIC = [
    [0.6593654155731201, -0.25623077154159546],
    [0.7898427844047546, 0.35271596908569336],
    [0.8966686129570007, 0.8512793779373169],
]


def test_the_leaky_readout_is_that_of_the_public_package():
    """Its parameter, its state, and numbers that braintrace 0.2.8 of PyPI printed."""
    weight, first = jnp.arange(6.0).reshape(3, 2) / 8 - 0.25, jnp.array([0.5, -1.0])
    readout = LeakyRateReadout(3, 2, w_init=weight, r_init=first)
    readout.init_state()
    assert [(*path, value.value.shape) for path, value in readout.states().items()] == [
        ('W', (3, 2)),
        ('r', (2,)),
    ]
    with brainstate.environ.context(dt=1 * u.ms):
        got = [readout(jnp.array([1.0, -0.5, 2.0])) for _ in range(3)]
    np.testing.assert_allclose(got, PUBLIC, rtol=1e-6)


def test_a_spiking_readout_is_leaky_neurons_behind_weights():
    readout = LeakySpikeReadout(2, 1, tau=5.0, w_init=jnp.array([[5.0], [-1.0]]))
    brainstate.nn.init_all_states(readout)
    spikes = [float(readout(jnp.array([0.5, 0.5]))[0]) for _ in range(4)]
    np.testing.assert_array_equal(spikes, readout_by_hand(2.0))
    np.testing.assert_array_equal(readout.get_spike(), spikes[-1:])


def readout_by_hand(current):
    v, fired, left = 0.0, [], np.exp(-1 / 5)
    for _ in range(4):
        v = (v - (v > 1)) * left + (1 - left) * current
        fired.append(float(v > 1))
    return fired


@pytest.mark.parametrize('cls', [FilteredReadout, LeakyRateReadout])
def test_a_state_of_another_unit_than_its_input_is_refused(cls):
    readout = cls(3, 2, tau=5.0)
    readout.init_state()
    with pytest.raises(
        braintrace.errors.EtpUnitError, match=r'has the unit 1.*adds to it has mA.*_init'
    ):
        readout(jnp.ones(3) * u.mA)


@pytest.mark.parametrize('cls', [FilteredReadout, LeakyRateReadout, LeakySpikeReadout])
def test_a_size_that_is_not_one_positive_int_is_refused(cls):
    for size in (0, 2.5, (2, 3)):
        with pytest.raises(braintrace.errors.OptionError, match=f'{cls.__name__}: out_size is'):
            cls(3, size)
    readout = cls(3, 2, tau=5.0)
    brainstate.nn.init_all_states(readout)
    with pytest.raises(braintrace.errors.EtpShapeError, match=r'shape \(4,\); expected \(3,\)'):
        readout(jnp.ones(4))
