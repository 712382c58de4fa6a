"""Synapses and projections: what they refuse, their states, and the laws of their sources."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.errors import EtpShapeError, EtpUnitError, OptionError, StructureError
from tests.compare import assert_close


def started(module, batch_size=None):
    brainstate.nn.init_all_states(module, batch_size=batch_size)
    return module


def test_conductances_and_currents_are_not_added():
    synapses = started(nn.Expon(3, g_init=0 * u.mS))
    with pytest.raises(EtpUnitError, match='the input has the unit mA and the synapse mS'):
        synapses(jnp.ones(3) * u.mA)
    neurons = started(nn.LIF(3, R=1 * u.ohm, V_th=1 * u.mV, V_rest=0 * u.mV, V_reset=0 * u.mV))
    with pytest.raises(EtpUnitError, match='the current has the unit mS and R ohm'):
        neurons(nn.CUBA()(synapses(jnp.ones(3) * u.mS)))


@pytest.mark.parametrize('decay, rise', [(100.0, 20.0), (90.0, 60.0)])
def test_the_highest_conductance_after_one_spike_is_one(decay, rise):
    synapses, spikes = started(nn.DualExpon(1, decay, rise)), jnp.eye(400, 1)
    found = np.asarray(brainstate.transform.for_loop(synapses, spikes))[:, 0]
    assert found[0] == 0 and found.max() == pytest.approx(1, abs=1e-3)
    assert found.argmax() == pytest.approx(np.log(decay / rise) / (1 / rise - 1 / decay), abs=1)


def test_a_conductance_needs_a_reversal_potential_and_a_potential():
    missing = "missing a required argument: 'E'"
    with pytest.raises(OptionError, match=missing):
        nn.COBA()
    projection = started(nn.Projection(nn.Linear(2, 3), nn.Expon(3), nn.COBA(E=0 * u.mV)))
    with pytest.raises(StructureError, match='no potential is given'):
        projection(jnp.ones(2))
    with pytest.raises(EtpUnitError, match='E is 0. mV and the potential has the unit 1'):
        projection(jnp.ones(2), jnp.zeros(3))
    with pytest.raises(EtpShapeError, match=r'shape \(3,\) and the potential \(4,\)'):
        projection(jnp.ones(2), jnp.zeros(4) * u.mV)


@pytest.mark.parametrize(
    'make, error, message',
    [
        (lambda: nn.Expon(3, tau=0.0), OptionError, 'tau is 0.0; a time constant'),
        (lambda: nn.STP(3, tau_d=-1 * u.ms), OptionError, 'STP: tau_d is -1 ms'),
        (lambda: nn.Expon(3, tau=5 * u.mV), EtpUnitError, 'give a time'),
        (lambda: nn.Expon(3, tau=np.ones(4)), OptionError, r'shape \(4,\); give one'),
        (lambda: nn.Expon((3, 0)), OptionError, r'Expon: in_size is \(3, 0\)'),
        (lambda: nn.DualExpon(3, 2.0, 2.0), OptionError, 'the rise is faster'),
        (lambda: nn.DualExpon(3, 5 * u.ms, 2.0), EtpUnitError, 'both with a unit'),
        (lambda: nn.STP(3, tau_d=5 * u.ms), EtpUnitError, 'both with a unit'),
        (lambda: nn.STP(3, U=1.5), OptionError, 'U is 1.5'),
        (lambda: nn.STP(3, U=True), OptionError, 'U is True; give one number'),
        (lambda: nn.STP(3, U=None), OptionError, 'U is None; give one number'),
        (lambda: nn.STP(2, U=np.ones(2)), OptionError, r'U has shape \(2,\)'),
        (lambda: nn.STP(3, U=0.5 * u.mV), EtpUnitError, 'U is 0.5 mV; it has to be'),
        (lambda: nn.STP(3, tau_d=None), OptionError, 'tau_d is None; give one'),
        (lambda: nn.Expon(2, [5.0, 8.0]), OptionError, r'tau is \[5.0, 8.0\]; .*array'),
        (lambda: nn.Expon(2, '5'), OptionError, "tau is '5'; give one number"),
        (lambda: nn.Expon(2, 1j), OptionError, 'tau is 1j; give one number'),
        (lambda: nn.Expon(2, np.array([1, 1j])), OptionError, 'give one number'),
        (lambda: nn.Expon(2, True), OptionError, 'tau is True; give one number'),
        (lambda: nn.Expon(2, np.nan), OptionError, 'tau is nan; a time constant'),
        (lambda: nn.CUBA('x'), OptionError, "CUBA: scale is 'x'; give one number"),
        (lambda: nn.COBA('x'), OptionError, "COBA: E is 'x'; give one number"),
        (lambda: nn.COBA([1.0, 2.0]), OptionError, 'E is .*, or an array'),
        (lambda: nn.COBA(np.inf), OptionError, 'E is inf; give finite numbers'),
        (
            lambda: nn.Projection(nn.Linear(2, 3), nn.Expon(4)),
            EtpShapeError,
            r'comm \(Linear\) gives shape \(3,\), but syn \(Expon\) takes \(4,\)',
        ),
        (
            lambda: nn.Projection(nn.Linear(2, 3), nn.Expon(3), stp=nn.STP(3)),
            EtpShapeError,
            r'stp \(STP\) gives shape \(3,\), but comm \(Linear\) takes \(2,\)',
        ),
        (
            lambda: nn.Projection(nn.Linear(2, 3), nn.Expon),
            OptionError,
            r'give a module or a function, such as Expon\(100, tau=5.0\)',
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize('shape', [(2, 1), (1,), (3,), (2, 2, 2)])
def test_a_number_of_a_current_is_one_for_each_target(shape):
    g = V = jnp.ones((2, 2))
    for out in (nn.COBA(np.ones(shape)), nn.CUBA(np.ones(shape))):
        with pytest.raises(EtpShapeError, match='or an array of one for each target'):
            out(g, V)
    np.testing.assert_array_equal(nn.COBA(np.array([1.0, 3.0]))(g, V), [[0, 2], [0, 2]])
    np.testing.assert_array_equal(nn.CUBA(np.array([1.0, 3.0]))(g), [[1, 3], [1, 3]])


FIVE = np.array([5.0, 8.0, 3.0])
NARROW = {
    'Expon': lambda: nn.Expon(3, FIVE),
    'Expon one': lambda: nn.Expon(3, np.float64(5.0)),
    'Expon time': lambda: nn.Expon(3, np.float64(5.0) * u.ms),
    'DualExpon': lambda: nn.DualExpon(3, FIVE, FIVE / 2),
    'STP': lambda: nn.STP(3, np.float64(0.2), FIVE, FIVE),
    'Filtered': lambda: nn.FilteredReadout(3, 2, np.float64(5.0)),
    'Rate': lambda: nn.LeakyRateReadout(3, 3, FIVE * u.ms),
    'LIF': lambda: nn.LIF(3, FIVE * u.ms, R=np.float64(2.0)),
}


@pytest.mark.parametrize('name', NARROW)
def test_numbers_have_the_float_type_of_the_states(name):
    with brainstate.environ.context(precision='bf16', dt=np.float64(1.0) * u.ms):
        module = started(NARROW[name]())
        states = module.states(brainstate.HiddenState).values()
        before = {s.value.dtype for s in states}
        y = module(jnp.ones(3, 'bfloat16'))
    assert before == {s.value.dtype for s in states} == {y.dtype} == {jnp.dtype('bfloat16')}


def test_what_meets_at_a_step_has_to_fit():
    projection = started(nn.Projection(nn.Linear(2, 3), nn.Expon(3), nn.COBA(E=0.0)))
    neurons = started(nn.LIF(4))
    with pytest.raises(EtpShapeError, match=r'LIF: the input has shape \(3,\)'):
        neurons(projection(jnp.ones(2), jnp.zeros(3)))
    with pytest.raises(EtpUnitError, match='the spikes have the unit mV'):
        started(nn.STP(3))(jnp.ones(3) * u.mV)
    with pytest.raises(StructureError, match='has no state g yet'):
        nn.Expon(3)(jnp.ones(3))


def test_states_have_the_shape_of_the_population_and_go_back():
    synapses = started(nn.DualExpon((2, 3), g_init=0.5), batch_size=4)
    first = np.asarray(synapses.g_rise.value)
    assert first.shape == (4, 2, 3) and (first == 0.5).all()
    assert synapses(jnp.ones((4, 2, 3))).shape == (4, 2, 3)
    assert (np.asarray(synapses.g_rise.value) != 0.5).all()
    brainstate.nn.reset_all_states(synapses, batch_size=4)
    assert_close(np.asarray(synapses.g_rise.value), first)
    plastic = started(nn.STP(3, tau_f=None))
    assert set(plastic.states(brainstate.HiddenState)) == {('x',)}


def test_the_groups_of_a_projection_hold_synapses_and_targets():
    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.way = nn.Projection(nn.Linear(2, 3), nn.Expon(3), nn.COBA(E=3.0), nn.STP(2))
            self.neurons = nn.LIF(3)

        def update(self, x):
            return self.neurons(self.way(x, self.neurons.V.value))

    learner = braintrace.compile(Net(), 'D_RTRL', jnp.ones((1, 2)), batch_size=1)
    sizes = {group.num_state for group in learner.graph.hidden_groups}
    (relation,) = learner.graph.hidden_param_op_relations
    assert sizes <= {1, 2} and learner.report.exact
    assert [group.name for group in relation.groups] == ['neurons/V,way/syn/g']


class Doubled(brainstate.nn.Module):
    def update(self, x):
        return 2 * x


@pytest.mark.parametrize('comm', [lambda x: 2 * x, Doubled()])
def test_a_function_or_a_module_without_sizes_may_be_its_weights(comm):
    projection = nn.Projection(comm, nn.Expon(3))
    brainstate.nn.init_all_states(projection)
    np.testing.assert_allclose(projection(jnp.ones(3)), 2)


@pytest.mark.parametrize(
    'parts, found',
    [
        ((nn.Expon(3), nn.Expon(3)), 'comm is'),
        ((nn.Linear(3, 3), nn.COBA(E=0.0)), 'syn is'),
        ((nn.Linear(3, 3), nn.Expon(3), nn.Expon(3)), 'out is'),
        ((nn.Linear(3, 3), nn.Expon(3), None, nn.Expon(3)), 'stp is'),
    ],
)
def test_a_part_in_the_place_of_another_is_refused(parts, found):
    with pytest.raises(OptionError, match=f'Projection: {found}'):
        nn.Projection(*parts)


def test_a_negative_conductance_is_refused():
    inhibitory = nn.SignedWLinear(3, 3, w_sign=-1)
    with pytest.raises(OptionError, match='give inhibition an E below'):
        nn.Projection(inhibitory, nn.Expon(3), nn.COBA(E=-80.0))
    nn.Projection(inhibitory, nn.Expon(3), nn.CUBA())


@pytest.mark.parametrize('first', [0, 0 * u.mS, np.zeros(3, int), 0.5, np.float64(0.5)])
def test_a_first_value_of_any_kind_of_number_is_a_float(first):
    synapses = nn.Expon(3, g_init=first)
    for precision in (32, 'bf16'):
        with brainstate.environ.context(precision=precision):
            synapses.init_state()
            assert u.get_magnitude(synapses.g.value).dtype == brainstate.environ.dftype()


def test_regular_spikes_use_the_resources_of_the_source():
    """The stationary response R u of the paper's recursion, spikes every n steps."""
    n, U, tau_f, tau_d = 4, 0.3, 20.0, 40.0
    plastic, weighted = started(nn.STP(1, U=U, tau_f=tau_f, tau_d=tau_d)), []
    for t in range(400):
        weighted.append(float(plastic(jnp.array([float(t % n == 0)]))[0]))
    used = U / (1 - (1 - U) * np.exp(-n / tau_f))
    left = np.exp(-n / tau_d)
    resources = (1 - left) / (1 - (1 - used) * left)
    assert weighted[396] == pytest.approx(used * resources, rel=1e-5) and weighted[397] == 0
