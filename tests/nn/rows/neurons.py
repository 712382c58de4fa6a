"""Spiking neurons behind a layer, with recurrence or without, and readouts behind neurons."""

import brainstate
import numpy as np
import saiunit as u

from braintrace import nn
from tests.models.ops import _spike_jvp
from tests.nn.rows.cells import affine
from tests.nn.rows.row import BATCH, Row

BIAS, FIRST = brainstate.nn.init.Normal(scale=0.3), brainstate.nn.init.Normal(scale=0.5)
OWN = {'spk_fun': _spike_jvp}  # the slope that ``ops.spike`` has
TAUS = np.array([2.0, 3.0, 4.0, 5.0, 6.0])
VOLTS = {'V_th': -50 * u.mV, 'V_rest': -62 * u.mV, 'V_reset': -0.06 * u.volt}
DT = {'dt': 0.5 * u.ms}


class Net(brainstate.nn.Module):
    """Neurons driven by inputs and, if that is asked for, by their own spikes."""

    def __init__(self, neuron, unit=u.UNITLESS, recurrent=True):
        super().__init__()
        self.inp = nn.Linear(3, 5, w_init=brainstate.nn.init.Normal(scale=0.6), b_init=BIAS)
        if recurrent:
            self.rec = nn.Linear(5, 5, b_init=None)
        self.neuron, self.unit, self.recurrent = neuron, unit, recurrent

    def update(self, x):
        current = self.inp(u.maybe_decimal(x / (1 * self.unit)))
        if self.recurrent:
            current = current + self.rec(self.neuron.get_spike())
        spikes = self.neuron(current if self.unit == u.UNITLESS else current * self.unit)
        voltage = u.get_magnitude(self.neuron.V.value)
        return u.math.concatenate([spikes, 0.3 * voltage], axis=-1)


class Behind(brainstate.nn.Module):
    """A readout behind neurons."""

    def __init__(self, readout):
        super().__init__()
        self.inp, self.neuron = nn.Linear(3, 5, b_init=BIAS), nn.LIF(5, tau=4.0, R=3.0, **OWN)
        self.readout = readout

    def update(self, x):
        return self.readout(self.neuron(self.inp(x)))


# -- formulas --------------------------------------------------------------------------------------


def driven(ops, p, x, spikes):
    """What a unit of ``Net`` receives."""
    current = affine(ops, p['inp.weight'], x)
    return current + affine(ops, p['rec.weight'], ops.cut(spikes)) if 'rec.weight' in p else current


def output(ops, spikes, v):
    return ops.concatenate([spikes, 0.3 * v])


def integrate_and_fire(ops, p, s, x):
    spikes = ops.spike(s['neuron.V'] - 1)
    v = ops.new('neuron.V', s['neuron.V'] - spikes + 1.5 / 2 * driven(ops, p, x, spikes))
    return output(ops, ops.spike(v - 1), v), {'neuron.V': v}


def leaky(ops, p, s, x):
    """A soft reset by 1.2, rest 0.1, R 3."""
    spikes, a = ops.spike((s['neuron.V'] - 1) / 1.2), np.exp(-1 / TAUS)
    v = 0.1 + (s['neuron.V'] - 1.2 * spikes - 0.1) * a
    v = ops.new('neuron.V', v + (1 - a) * 3 * driven(ops, p, x, spikes))
    return output(ops, ops.spike((v - 1) / 1.2), v), {'neuron.V': v}


def leaky_hard(ops, p, s, x):
    """A reset to -0.5."""
    spikes, a = ops.spike((s['neuron.V'] - 1) / 1.5), np.exp(-1 / 4)
    v = s['neuron.V'] * (1 - spikes) - 0.5 * spikes
    v = ops.new('neuron.V', v * a + (1 - a) * 4 * driven(ops, p, x, spikes))
    return output(ops, ops.spike((v - 1) / 1.5), v), {'neuron.V': v}


def refractory(ops, p, s, x):
    """In mV: held for two steps."""
    v, count = s['neuron.V'], s['neuron.refractory']
    spikes = ops.where(count > 0, 0.0, ops.spike((v + 50) / 10))
    held = v - 10 * spikes
    a = np.exp(-0.5 / 4)
    moved = -62 + (held + 62) * a + (1 - a) * 20 * driven(ops, p, x, spikes)
    count = ops.where(spikes > 0, 2, count - (count > 0))
    v = ops.new('neuron.V', ops.where(count > 0, held, moved))
    after = ops.where(count > 0, 0.0, ops.spike((v + 50) / 10))
    return output(ops, after, v), {'neuron.V': v, 'neuron.refractory': count}


def adaptive(hard):
    def step(ops, p, s, x):
        v, b, a = s['neuron.V'], s['neuron.a'], np.exp(-1 / 4)
        spikes = ops.spike(v - 1 - 0.4 * b)
        v = v * (1 - spikes) if hard else v - spikes
        v = ops.new('neuron.V', v * a + (1 - a) * 4 * driven(ops, p, x, spikes))
        b = ops.new('neuron.a', np.exp(-1 / 10) * b + spikes)
        return output(ops, ops.spike(v - 1 - 0.4 * b), v), {'neuron.V': v, 'neuron.a': b}

    return step


def symplectic(hard, rest=0.0, top=1.0, reset=0.0, r=4.0, dt=1.0, b=3.0):
    """Baronig et al. in the order of the paper, where w follows V in each step: tau 4, tau_w 8 and
    a 1.2. The state holds the w of the step before.
    """

    def step(ops, p, s, x):
        v, w = s['neuron.V'], s['neuron.w']
        alpha, beta = np.exp(-dt / 4), np.exp(-dt / 8)
        spikes = ops.spike((v - top) / (top - reset))
        v = v * (1 - spikes) + reset * spikes if hard else v - (top - reset) * spikes
        w = ops.new('neuron.w', beta * w + (1 - beta) * (1.2 * (v - rest) + b * spikes))
        drive = r * driven(ops, p, x, spikes) - ops.within('neuron.w', w)
        v = ops.new('neuron.V', rest + alpha * (v - rest) + (1 - alpha) * drive)
        return output(ops, ops.spike((v - top) / (top - reset)), v), {'neuron.V': v, 'neuron.w': w}

    return step


def resonate(top=1.0, r=9.0, delta=1 / 8):
    """Higuchi et al. as complex numbers would have it: omega from 1 to 5, b 0.4, tau_q 5."""

    def step(ops, p, s, x):
        re, im, q = (s[f'neuron.{name}'] for name in ('V', 'V_im', 'q'))
        omega = np.linspace(1, 5, 5)
        spikes = ops.spike(re / top - 1 - q)
        q = ops.new('neuron.q', np.exp(-8 * delta / 5) * q + spikes)
        damping = (-1 + np.sqrt(1 - (delta * omega) ** 2)) / delta - 0.4 - ops.within('neuron.q', q)
        current = r * driven(ops, p, x, spikes)
        slope_re, slope_im = damping * re - omega * im + current, omega * re + damping * im
        re = ops.new('neuron.V', re + delta * slope_re)
        im = ops.new('neuron.V_im', im + delta * slope_im)
        new = {'neuron.V': re, 'neuron.V_im': im, 'neuron.q': q}
        return output(ops, ops.spike(re / top - 1 - q), re), new

    return step


def generalised(rest, top, floor, reset, r, dt):
    """Mihalas and Niebur with tau 4, a 0.05, b 0.1, k1 0.3, k2 0.1, R1 0.2, R2 0.9."""

    def step(ops, p, s, x):
        v, th, i1, i2 = (s[f'neuron.{name}'] for name in ('V', 'V_th', 'I1', 'I2'))
        spikes = ops.spike((v - th) / (top - reset))
        v = v + spikes * (reset - v)
        th = th + spikes * (ops.where(th > floor, th, floor) - th)
        i1, i2 = i1 + spikes * (0.2 * i1 + 0.5 - i1), i2 + spikes * (0.9 * i2 - 0.3 - i2)
        goal = rest + r * (driven(ops, p, x, spikes) + i1 + i2)
        goal_th = top + 0.05 / 0.1 * (v - rest)
        v = goal + (v - goal) * np.exp(-dt / 4)
        th = goal_th + (th - goal_th) * np.exp(-0.1 * dt)
        i1, i2 = np.exp(-0.3 * dt) * i1, np.exp(-0.1 * dt) * i2
        new = {'neuron.V': v, 'neuron.V_th': th, 'neuron.I1': i1, 'neuron.I2': i2}
        v, th = (ops.new(k, a) for k, a in list(new.items())[:2])
        return output(ops, ops.spike((v - th) / (top - reset)), v), new

    return step


def in_front(ops, p, s, x):
    """The neurons of ``Behind``."""
    v, a = s['neuron.V'], np.exp(-1 / 4)
    v = (v - ops.spike(v - 1)) * a + (1 - a) * 3 * affine(ops, p['inp.weight'], x)
    return ops.new('neuron.V', v)


def filtered(ops, p, s, x):
    v, d = in_front(ops, p, s, x), np.exp(-1 / 5)
    f = ops.new('readout.f', d * s['readout.f'] + ops.spike(v - 1))
    g, w = d * s['readout.g'] + 1, p['readout.W.weight']
    r = ops.matmul(f, w['weight']) + g * ops.element_wise(w['bias'], lambda b: b)
    return r, {'neuron.V': v, 'readout.f': f, 'readout.g': g}


def leaky_rate(ops, p, s, x):
    v = in_front(ops, p, s, x)
    new = np.exp(-0.5 / 5) * s['readout.r'] + ops.matmul(ops.spike(v - 1), p['readout.W'])
    r = ops.new('readout.r', new)
    return r, {'neuron.V': v, 'readout.r': r}


def leaky_spike(ops, p, s, x):
    v, r, a = in_front(ops, p, s, x), s['readout.neuron.V'], np.exp(-0.5 / 5)
    current = ops.matmul(ops.spike(v - 1), p['readout.W'])
    r = (r - 0.7 * ops.spike((r - 0.7) / 0.7)) * a + (1 - a) * 2 * current
    r = ops.new('readout.neuron.V', r)
    return ops.spike((r - 0.7) / 0.7), {'neuron.V': v, 'readout.neuron.V': r}


# -- rows ------------------------------------------------------------------------------------------

GIF_RATES = {'a': 0.05, 'b': 0.1, 'k1': 0.3, 'k2': 0.1, 'R1': 0.2, 'R2': 0.9}
ADLIF = {'tau': 4.0, 'tau_w': 8.0, 'a': 1.2}
ADLIF_MS = {'tau': 4 * u.ms, 'tau_w': 8 * u.ms, 'a': 1.2, 'spk_reset': 'soft'}
BRF_MS = (8 * u.ms, 5 * u.ms)
GIF_PLAIN = {'tau': 4.0, 'R': 3.0, 'V_th_reset': 0.8, 'A1': 0.5, 'A2': -0.3} | GIF_RATES

ALONE = {'batches': (BATCH,)}  # the class has another row without a batch


def gif_with_units():
    rates = {k: v / u.ms if k in 'abk1k2' else v for k, v in GIF_RATES.items()}
    volts = {'V_th_inf': -50 * u.mV, 'V_th_reset': -55 * u.mV, 'V_rest': -62 * u.mV}
    currents = {'A1': 0.5 * u.nA, 'A2': -300 * u.pA, 'V_reset': -60 * u.mV}
    neuron = nn.GIF(5, 4 * u.ms, R=20 * u.Mohm, **volts, **currents, **rates, **OWN)
    return Net(neuron, u.nA)


def behind(name, make, formula, state, **options):
    groups = (('neuron.V',), (state,))
    options = {'groups': groups, 'owner': {'readout.W': 1}, 'context': DT} | options
    return Row(name, lambda: Behind(make()), formula, **options)


ROWS = [
    Row('if', lambda: Net(nn.IF(5, 2.0, R=1.5, V_init=FIRST, **OWN)), integrate_and_fire),
    Row(
        'lif',
        lambda: Net(nn.LIF(5, TAUS, R=3.0, V_rest=0.1, V_reset=-0.2, V_init=FIRST, **OWN)),
        leaky,
    ),
    Row(
        'lif_hard',
        lambda: Net(nn.LIF(5, 4.0, R=4.0, V_reset=-0.5, spk_reset='hard', **OWN), recurrent=False),
        leaky_hard,
        **ALONE,
        exact=True,
    ),
    Row(
        'lif_refractory',
        lambda: Net(nn.LIF(5, 4 * u.ms, R=20 * u.Mohm, **VOLTS, tau_ref=1 * u.ms, **OWN), u.nA),
        refractory,
        unit=u.nA,
        context=DT,
    ),
    Row('alif', lambda: Net(nn.ALIF(5, 4.0, 10.0, 0.4, R=4.0, **OWN)), adaptive(False)),
    Row(
        'alif_hard',
        lambda: Net(nn.ALIF(5, 4.0, 10.0, 0.4, R=4.0, spk_reset='hard', **OWN), recurrent=False),
        adaptive(True),
        **ALONE,
        exact=True,
    ),
    Row('adlif', lambda: Net(nn.AdLIF(5, **ADLIF, R=4.0, b=3.0, **OWN)), symplectic(True)),
    Row(
        'adlif_units',
        lambda: Net(
            nn.AdLIF(5, **ADLIF_MS, R=20 * u.Mohm, b=20 * u.mV, **VOLTS, **OWN),
            u.nA,
            recurrent=False,
        ),
        symplectic(False, -62, -50, -60, 20, 0.5, 20),
        **ALONE,
        unit=u.nA,
        context=DT,
        exact=True,
    ),
    Row(
        'brf',
        lambda: Net(nn.BRF(5, np.linspace(1, 5, 5), 0.4, 8.0, 5.0, R=9.0, V_init=FIRST, **OWN)),
        resonate(),
    ),
    Row(
        'brf_units',
        lambda: Net(
            nn.BRF(5, np.linspace(1, 5, 5), 0.4, *BRF_MS, R=90 * u.Mohm, V_th=9 * u.mV, **OWN),
            u.nA,
            recurrent=False,
        ),
        resonate(9, 90, 1 / 16),
        **ALONE,
        unit=u.nA,
        context=DT,
        exact=True,
    ),
    Row(
        'gif',
        lambda: Net(nn.GIF(5, **GIF_PLAIN, **OWN), recurrent=False),
        generalised(0, 1, 0.8, 0, 3, 1),
        exact=True,
    ),
    Row(
        'gif_units',
        gif_with_units,
        generalised(-62, -50, -55, -60, 20, 0.5),
        **ALONE,
        unit=u.nA,
        context=DT,
    ),
    behind(
        'filtered',
        lambda: nn.FilteredReadout(5, 2, b_init=BIAS),
        filtered,
        'readout.f',
        groups=(('neuron.V', 'readout.f'),),
        owner={'readout.W.weight': None},
        exact=True,
    ),
    behind('leaky_rate', lambda: nn.LeakyRateReadout(5, 2), leaky_rate, 'readout.r'),
    behind(
        'leaky_spike',
        lambda: nn.LeakySpikeReadout(5, 2, R=2.0, V_th=0.7, **OWN),
        leaky_spike,
        'readout.neuron.V',
    ),
]
