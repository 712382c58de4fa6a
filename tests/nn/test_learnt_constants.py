"""Constants that learn: values, and gradients against reverse mode by the constants themselves."""

import copy
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn, verify
from braintrace.errors import OptionError
from tests.compare import assert_close, assert_moves
from tests.precision import float64_models as float64_models
from tests.tiers import slow

STEPS, BATCH, N = 7, 2, 3
TAUS = np.array([2.0, 3.5, 6.0])
VOLTS = {'V_th': -50 * u.mV, 'V_rest': -62 * u.mV, 'V_reset': -60 * u.mV, 'R': 9 * u.Mohm}
RATES = {'a': 0.05, 'b': 0.1, 'k1': 0.3, 'k2': 0.1, 'R1': 0.2, 'R2': 0.9, 'A1': 0.5, 'A2': -0.3}

exp, FORMS = jnp.exp, {'U': lambda raw: jax.nn.sigmoid(raw['U'])}  # how a constant follows
POSITIVE = 'tau', 'tau_a', 'tau_w', 'tau_q', 'tau_decay', 'tau_f', 'tau_d', 'b', 'k1', 'k2'
FORMS |= {name: lambda raw, name=name: exp(raw[name]) for name in POSITIVE}
FORMS['tau_rise'] = lambda raw: FORMS['tau_decay'](raw) * jax.nn.sigmoid(raw['tau_rise'])
for top in ('V_th', 'V_th_inf'):
    FORMS[top] = lambda raw, top=top: raw.get('V_reset', 0.0) + exp(raw[top])
FORMS['omega'] = lambda raw: exp(raw['tau']) * jax.nn.sigmoid(raw['omega'])
FORMS['adlif.b'] = lambda raw: raw['b']


class Driving(brainstate.nn.Module):
    """Synapses and a current into leaky units; the loss reads the potential."""

    def __init__(self, syn, out):
        super().__init__()
        self.part, self.out, self.unit = syn, out, nn.LIF(N, 5.0)

    def update(self, x):
        return self.unit(self.out(self.part(x), self.unit.V.value)) + self.unit.V.value


class Axons(brainstate.nn.Module):
    """Leaky units whose values come back late, each at a delay of its own."""

    def __init__(self):
        super().__init__()
        normal = brainstate.nn.init.Normal(scale=1.0, seed=4)
        self.front, self.back = nn.Linear(2, N, w_init=normal), nn.Linear(N, N, w_init=normal)
        self.unit = nn.Expon(N, 3.0)
        self.axon = nn.Delay(N, np.array([0.6, 1.3, 2.2]), 3, learn=True)

    def update(self, x):
        late = self.back(self.axon(self.unit.g.value))
        return self.unit(self.front(x) + jnp.tanh(late)).sum(-1)


class Net(brainstate.nn.Module):
    """Weights in front of a part, whose states are added to its output; ``own``: its spikes come
    back by other weights.
    """

    def __init__(self, part, own=False):
        super().__init__()
        normal = brainstate.nn.init.Normal(scale=1.0, seed=3)
        self.front, self.part = nn.Linear(2, N, w_init=normal), part
        self.back = nn.Linear(N, N, w_init=normal, b_init=None) if own else None

    def update(self, x):
        y = self.front(x)
        if self.back is not None:
            y = y + self.back(self.part.get_spike())
        y = self.part(y * u.nA if u.get_unit(getattr(self.part, 'R', 1.0)) != u.UNITLESS else y)
        states = self.part.states(brainstate.HiddenState).values()
        return y.sum(-1) + sum(u.get_magnitude(state.value).sum(-1) for state in states)


PARTS = {
    'if': lambda learn: nn.IF(N, TAUS, R=1.5, learn=learn),
    'lif': lambda learn: nn.LIF(N, TAUS, R=3.0, V_rest=0.1, V_reset=-0.2, learn=learn),
    'shared_hard': lambda learn: nn.LIF(N, 4.0, R=4.0, spk_reset='hard', learn=learn),
    'units': lambda learn: nn.LIF(N, 3 * u.ms, **VOLTS, learn=learn),
    'alif': lambda learn: nn.ALIF(N, TAUS, 9.0, 0.4, R=4.0, learn=learn),
    'adlif': lambda learn: nn.AdLIF(N, TAUS, 9.0, 0.8, 3.0, R=4.0, learn=learn),
    'brf': lambda learn: nn.BRF(N, TAUS, 0.3, 20.0, 5.0, R=8.0, learn=learn),
    'gif': lambda learn: nn.GIF(N, 4.0, R=3.0, V_th_reset=1.5, **RATES, learn=learn),
    'expon': lambda learn: Driving(nn.Expon(N, TAUS, learn=learn), nn.CUBA(2.0)),
    'dual': lambda learn: Driving(nn.DualExpon(N, 8.0, TAUS, learn=learn), nn.COBA(E=2.0)),
    'cuba': lambda learn: Driving(nn.Expon(N, TAUS), nn.CUBA(np.ones(N), learn=learn)),
    'coba': lambda learn: Driving(nn.Expon(N, TAUS), nn.COBA(np.array([2.0, 3, -1]), learn=learn)),
    'stp': lambda learn: nn.STP(N, U=0.4, tau_f=8.0, tau_d=TAUS, learn=learn),
    'filtered': lambda learn: nn.FilteredReadout(N, 2, tau=5.0, b_init=0.1, learn=learn),
    'leaky_rate': lambda learn: nn.LeakyRateReadout(N, 2, np.array([3.0, 5]), learn=learn),
    'leaky_spike': lambda learn: nn.LeakySpikeReadout(N, 2, 3.0, learn=learn),
}
QUICK = 'units', 'alif', 'dual', 'coba'
EACH = [pytest.param(k, id=k, marks=() if k in QUICK else slow) for k in PARTS]


def data():
    of_x, of_y = jax.random.split(jax.random.key(1))
    xs = 1.5 * jax.random.normal(of_x, (STEPS, BATCH, 2))
    return xs, jax.random.normal(of_y, (STEPS, BATCH))


def loss(y, target):
    return jnp.sum((y - target) ** 2)


@pytest.mark.parametrize('name', EACH)
def test_gradients_are_those_of_reverse_mode_by_the_constants(name):
    (xs, ys), make = data(), PARTS[name]
    with brainstate.environ.context(dt=0.5 * u.ms):
        net, fixed = Net(make(True)), Net(make(()))
        learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=BATCH)
        values = {path: state.value for path, state in learner.param_states.items()}
        got = learner.etrace_grad(
            xs, ys, step_fn=lambda x, y: loss(learner(x), y), reduction='sum'
        ).grads
        raw = {path: v for path, v in values.items() if path not in fixed.states()}
        assert raw
        owners = {}
        for path in raw:
            layer = functools.reduce(getattr, path[:-1], fixed)
            owners[path] = layer, getattr(layer, path[-1])

        def total(raw, weights):
            by_name = {path[-1]: value for path, value in raw.items()}
            for path, (layer, was) in owners.items():
                constant, unit = path[-1], u.get_unit(was)
                form = FORMS.get(f'{name}.{constant}', FORMS.get(constant))
                value = by_name[constant] if form is None else form(by_name)
                vars(layer)[constant] = value if unit == u.UNITLESS else value * unit
            with brainstate.StateTraceStack():
                for path, state in fixed.states(brainstate.ParamState).items():
                    state.restore_value(weights[path])
                brainstate.nn.init_all_states(fixed, batch_size=BATCH)
                of_step = lambda x, y: loss(fixed(x), y)
                return brainstate.transform.for_loop(of_step, xs, ys).sum()

        weights = {path: v for path, v in values.items() if path not in raw}
        want = jax.jit(jax.grad(total, (0, 1)))(raw, weights)
    want = {**want[0], **want[1]}
    if not learner.report.exact:  # a readout's weights cut off what is in front of them
        got, want = (
            {path: g for path, g in grads.items() if path[0] != 'front'} for grads in (got, want)
        )
    assert_close(got, want, 1e-10)
    assert_moves(want)


RECURRENT = {
    'alif': lambda: Net(PARTS['alif'](True), own=True),
    'delay': Axons,
    'ctrnn': lambda: Net(nn.CTRNNCell(N, N, TAUS, learn=True)),
}


@pytest.mark.parametrize('name', RECURRENT)
def test_recurrence_is_cut_as_for_weights(name):
    xs, ys = data()
    learner = braintrace.compile(RECURRENT[name](), 'd_rtrl', xs[0], batch_size=2)
    got = learner.etrace_grad(xs, ys, step_fn=lambda x, y: loss(learner(x), y), reduction='sum')
    learner.reset_state()
    online, *start = learner.pure()
    want = verify.cut_bptt_gradients(online.cell, *start, xs, ys, loss, graph=learner.graph)
    assert_close(got.grads, want, 1e-10)


def test_a_constant_is_shown_and_set_as_it_was_given():
    with brainstate.environ.context(dt=1 * u.ms):
        units = nn.LIF(4, 10 * u.ms, **VOLTS, learn=('tau', 'V_th'))
        assert u.get_unit(units.tau) == u.ms and units.V_rest == VOLTS['V_rest']
        assert_close(units.V_th.to_decimal(u.mV), np.full(4, -50.0))
        units.tau, units.V_th = 0.02 * u.second, -55 * u.mV
        assert_close(units.tau.to_decimal(u.ms), np.full(4, 20.0))
        other = copy.deepcopy(units)
        other.tau = 5 * u.ms
        assert_close(units.tau.to_decimal(u.ms), np.full(4, 20.0))
        assert units.states(brainstate.ParamState).keys() == {('tau',), ('V_th',)}
        plain = nn.LIF(4, 20 * u.ms, **{**VOLTS, 'V_th': -55 * u.mV})
        for module in units, plain:
            module.init_state()
        for x in 8 * u.nA * np.linspace(0, 1, 12).reshape(3, 4):
            assert_close(units(x), plain(x))
        assert_close(units.V.value.to_decimal(u.mV), plain.V.value.to_decimal(u.mV))


def test_first_values_are_drawn():
    brainstate.random.seed(0)
    gamma = lambda shape: brainstate.random.gamma(3.0, size=shape) * 5 * u.ms
    for layer in nn.LIF(500, gamma, learn='tau'), nn.LIF(500, gamma):
        taus = layer.tau.to_decimal(u.ms)
        assert taus.shape == (500,) and abs(taus.mean() - 15) < 1.5 and taus.std() > 5


BAD = {
    'names what is no constant': (lambda: nn.LIF(3, learn='taus'), "Did you mean 'tau'"),
    'a time that is rounded': (lambda: nn.LIF(3, tau_ref=2.0, learn='tau_ref'), 'no derivative'),
    'no names': (lambda: nn.LIF(3, learn=3), 'learn is 3'),
    'the border': (lambda: nn.STP(3, U=1.0, learn='U'), 'at the border'),
    'infinite': (lambda: nn.Expon(3, np.inf, learn='tau'), 'at the border'),
    'not there': (lambda: nn.STP(3, tau_f=None, learn='tau_f'), r"\['U', 'tau_d'\]"),
    'no size': (lambda: nn.COBA(2.0, learn='E'), 'one for each target'),
    'set outside': (lambda: setattr(nn.LIF(3, learn='tau'), 'tau', -1.0), 'at the border'),
    'threshold under reset': (lambda: setattr(nn.LIF(3, learn=True), 'V_th', -1.0), 'border'),
    'a state': (lambda: nn.LIF(3, brainstate.ParamState(jnp.ones(3))), "learn='tau'"),
}


@pytest.mark.parametrize('make, says', [pytest.param(*bad, id=k) for k, bad in BAD.items()])
def test_what_can_not_learn_is_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()
