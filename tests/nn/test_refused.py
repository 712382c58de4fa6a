"""What layers, cells, neurons, synapses and readouts refuse: the error says what was found, and
where.
"""

import re

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.errors import BraintraceError, OptionError

ones = jnp.ones
VOLTAGES = brainstate.nn.init.Normal(unit=u.mV)
PLACES = np.array([0, 0, 2], np.int32), np.array([1, 4, 3], np.int32)
SIGNS = np.array([[1], [-1]])
STRUCTURE = braintrace.SparseStructure(*PLACES, (3, 5))
LONG = np.linspace(-1, 3, 9) * u.ms


def sparse(data=(1.0, 2.0, 3.0)):
    return u.sparse.COO((jnp.asarray(data), *PLACES), shape=(3, 5))


EYE = u.sparse.COO.fromdense(jnp.array([[-1.0, 0.0], [0.0, -1.0]]))


def signed(w_sign=None, **options):
    return lambda: nn.SignedWLinear(2, 3, w_sign=w_sign, **options)


def timed(timescale):
    return lambda: nn.GRUCell(2, 3, timescale=timescale)


def attention(**options):
    return lambda: nn.GLACell(3, 8, **options)


def of_kind(kind, **options):
    return lambda: kind(2, **options)


def stepped(module, *inputs):
    brainstate.nn.init_all_states(module)
    return module(*inputs)


def fed(kind, *sizes, **options):
    """A step with three numbers."""
    return lambda: stepped(kind(*sizes, **options), ones(3))


def lora(size, **options):
    base = nn.Linear(3, size, b_init=None)
    return lambda: nn.LoRA(3, 2, 4, base_module=base, **options)(ones(3))


def conv(in_size, **options):
    return lambda: nn.Conv1d(in_size, 4, 3, **options)


def projected(**parts):
    return lambda: nn.Projection(**{'comm': nn.Linear(2, 3), 'syn': nn.Expon(3)} | parts)


def conducted(*inputs):
    return lambda: stepped(projected(out=nn.COBA(E=0 * u.mV))(), *inputs)


LAYERS = {
    r'Linear: in_size .* and out_size \(5, 4\); .*=\(6, 4\)': lambda: nn.Linear((6, 3), (5, 4)),
    'OptionError: .*number of features': lambda: nn.Linear(None, 4),
    r'w_mask has shape \(3, 3\)': lambda: nn.Linear(3, 4, w_mask=ones((3, 3))),
    r'w_init has shape \(4,\), expected': lambda: nn.Linear(3, 4, w_init=ones(4)),
    r'EtpShapeError: Linear.*expected \(..., 3\)': lambda: nn.Linear(3, 4)(ones((2, 2, 4))),
    'at least 2 inputs': lambda: nn.ScaledWSLinear((4, 1), (4, 2)),
    'OptionError: ScaledWSLinear: eps is 0': lambda: nn.ScaledWSLinear(3, 2, eps=0),
    'EtpDtypeError: .*fromdense': lambda: nn.SparseLinear(np.ones((3, 5))),
    'EtpDtypeError: .*spar_mat, a SparseStructure': lambda: nn.SparseLinear(STRUCTURE),
    'EtpDtypeError: .*have dtype int32': lambda: nn.SparseLinear(sparse([1, 2, 3])),
    'reads 3 features': lambda: nn.SparseLinear(sparse(), in_size=(3, 4)),
    'OptionError: LoRA: lora_rank is 0': lambda: nn.LoRA(3, 0, 4),
    'base_module is a': lambda: nn.LoRA(3, 2, 4, base_module=jnp.sin),
    r'EtpShapeError: LoRA: base_module gives shape \(1,\) and the product \(4,\)': lora(1),
    'EtpUnitError: LoRA: base_module gives unit 1 and the product mV': lora(
        4, lora_b_init=VOLTAGES
    ),
    'num_groups is 2.0': lambda: nn.GroupedLinear(2.0, 3, 4),
    r'EtpShapeError: .*expected \(..., 2, 3\)': lambda: nn.GroupedLinear(2, 3, 4)(ones(6)),
    'give a row from 0 to 5': lambda: nn.Embedding(6, 3, padding_idx=6),
    "freeze is 'no'; give True": lambda: nn.Embedding(6, 3, freeze='no'),
    'no argument max_norm. Leave it out': lambda: nn.Embedding(6, 3, max_norm=1.0),
    'EtpDtypeError: .*float32; give integers': lambda: nn.Embedding(6, 3)(ones(2)),
    'EtpShapeError: .*rows 0 to 5': lambda: nn.Embedding(6, 3)(jnp.array(6)),
    r'3 sizes in the order \(\*spatial': lambda: nn.Conv2d((8, 3), 4, 3),
    '3 input channels do not': conv((8, 3), groups=2),
    'EtpShapeError: .*3 output channels do not': lambda: nn.Conv1d((8, 4), 3, 3, groups=2),
    r'kernel_size is \(3, 3\)': lambda: nn.Conv1d((8, 3), 4, (3, 3)),
    "Conv1d: channel_first is 'no'; give True": conv((8, 3), channel_first='no'),
    'stride is 0; give an int': lambda: nn.Conv2d((8, 8, 3), 4, 3, stride=0),
    r'padding is \(1, 2, 3\)': lambda: nn.Conv2d((8, 8, 3), 4, 3, padding=(1, 2, 3)),
    "padding is 'FULL'": conv((8, 3), padding='FULL'),
    r"'SAME' and lhs_dilation \(2,\); .*give 1 pair": conv((8, 3), lhs_dilation=2),
    r'Conv1d: in_size .* gives a result of shape \(0, 4\)': conv((2, 3), padding='VALID'),
    r'EtpShapeError: Conv1d: .*\(9, 3\); expected \(8, 3\) or \(batch, 8, 3\)': (
        lambda: conv((8, 3))()(ones((9, 3)))
    ),
}
SIGNED = {
    r'w_sign is 0 at \(0, 2\) of the weight': signed(np.array([[1, 1, 0], [1, 2, 1]])),
    r'w_sign has shape \(2,\); give the shape \(2, 1\)': signed(np.ones(2)),
    'w_sign is a str': signed('minus'),
    r'-5.0 at \(1, 1\), where w_sign is \+': signed(w_init=np.array([[1.0, 2, 3], [4, -5, -6]])),
    r'w_init is 1.0 at \(1, 0\), where w_sign is -1. Give weights of that sign': signed(
        SIGNS, w_init=np.ones((2, 3)) * u.siemens
    ),
}
CELLS = {
    "GRUCell: activation is 'none'": of_kind(nn.GRUCell, out_size=3, activation='none'),
    'positional': lambda: nn.VanillaRNNCell(3, 5, brainstate.nn.init.ZeroInit()),
    **{
        f'GRUCell: timescale is {re.escape(repr(range))}': timed(range)
        for range in ((1, 1.5), (0, 5), (5, 1), 7, (1, 2, 3), ('1', '9'), (1, np.inf), (True, 9))
    },
    'b_init is None': lambda: nn.MinGRUCell(2, 3, b_init=None, timescale=(1, 9)),
    "phi is 'tanh'": lambda: nn.MinimalRNNCell(3, 5, phi='tanh'),
    r'EtpShapeError: .*phi made \(3,\)': fed(nn.MinimalRNNCell, 3, 5, phi=jnp.tanh),
    'CTRNNCell: tau is 0.0; a time': lambda: nn.CTRNNCell(3, 5, 0.0),
    r'CTRNNCell: tau has shape \(3,\)': lambda: nn.CTRNNCell(3, 5, np.ones(3)),
    'EtpUnitError: LTCCell: tau is .*without a unit': lambda: nn.LTCCell(3, 5, 5 * u.ms),
    'LMUCell: order is 0': lambda: nn.LMUCell(3, 5, 0, 9.0),
    'LMUCell: memories is 1.5': lambda: nn.LMUCell(3, 5, 2, 9.0, 1.5),
    'LRUCell: r_min is 0.9 and r_max 0.5': lambda: nn.LRUCell(2, 3, r_min=0.9, r_max=0.5),
    'RTUCell: r_min is -0.1': lambda: nn.RTUCell(2, 3, r_min=-0.1),
    'max_phase is 0': lambda: nn.LRUCell(2, 3, max_phase=0),
    'dt_min is 0.1 and dt_max 0.01': lambda: nn.S5Cell(2, 3, dt_min=0.1, dt_max=0.01),
    'S5Cell: d_hidden is 0': lambda: nn.S5Cell(2, 0),
    'heads is 3; give a divisor of key_size=8 and of out_size=8': attention(heads=3),
    r'decay is 1.5; give a number in \(0, 1\]': attention(decay=1.5),
    'one for each of the 2 heads': attention(heads=2, decay=[0.9, 0.9, 0.9]),
    'DeltaNetCell: heads is 3; give a divisor': lambda: nn.DeltaNetCell(2, 8, heads=3),
    'state_size': lambda: nn.MambaCell(3, state_size=0),
}
NEURONS = {
    'IF: .*a number of features, or a shape': lambda: nn.IF(0),
    r'LIF: .*a number of features, or a shape': lambda: nn.LIF((2, -1)),
    'IF: .*tau.*larger than 0': of_kind(nn.IF, tau=0.0),
    "LIF: tau is 'slow'; give one number, or an array": of_kind(nn.LIF, tau='slow'),
    'ALIF: tau is inf; give finite numbers': of_kind(nn.ALIF, tau=np.inf),
    'EtpUnitError: AdLIF: .*give a time': of_kind(nn.AdLIF, tau=5 * u.mV),
    'GIF: .*tau_ref.*larger than 0': of_kind(nn.GIF, tau_ref=-1.0),
    'EtpUnitError: ALIF: .*tau_ref.*give a time': of_kind(nn.ALIF, tau_ref=5 * u.mV),
    'LIF: R is .*nan.*; give finite numbers': of_kind(nn.LIF, R=np.array([1.0, np.nan])),
    r'GIF: R has shape \(3,\); give .* of shape \(2,\)': of_kind(nn.GIF, R=np.ones(3)),
    "AdLIF: .*give 'soft' or 'hard'": of_kind(nn.AdLIF, spk_reset='Soft'),
    'IF: .*which is no spike function': of_kind(nn.IF, spk_fun=None),
    'LIF: .*the threshold lies above the reset': of_kind(nn.LIF, V_reset=1.0),
    'IF: V_reset is -inf; give finite numbers': of_kind(nn.IF, V_reset=-np.inf),
    'EtpUnitError: ALIF: V_reset has the unit mV, but': of_kind(nn.ALIF, V_reset=0 * u.mV),
    'EtpUnitError: GIF: V_init has the unit mV, but': of_kind(nn.GIF, V_init=0 * u.mV),
    'StructureError: LIF has no state V': lambda: nn.LIF(3).get_spike(),
    'BRF: omega . dt / tau is 1.0.*longer tau': lambda: stepped(nn.BRF(2, omega=100.0), ones(2)),
    'GIF: k1 is 0.0; a rate is larger than 0': of_kind(nn.GIF, k1=0.0),
    'EtpUnitError: GIF: b has the unit ms; give a rate': of_kind(nn.GIF, b=5 * u.ms),
    'EtpUnitError: GIF: a / b is .*without a unit': of_kind(nn.GIF, a=1 / u.ms),
    'EtpUnitError: GIF: .*current has the unit mA and R 1': of_kind(nn.GIF, A2=1 * u.mA),
    'EtpUnitError: GIF: tau is 20.* ms and 1 / b is 100.0': of_kind(nn.GIF, tau=20 * u.ms),
    'EtpUnitError: LIF: tau is 20.* and tau_ref is 2': of_kind(nn.LIF, tau=20 * u.ms, tau_ref=2),
    'EtpUnitError: ALIF: tau is 20.* ms and tau_a is 200.0': of_kind(nn.ALIF, tau=20 * u.ms),
    'LIF: .*V_initializer. It is called V_init': of_kind(nn.LIF, V_initializer=0.0),
}
SYNAPSES = {
    'tau is 0.0; a time constant': lambda: nn.Expon(3, tau=0.0),
    r'tau is an array of shape \(9,\) from -1 to 3 ms; a time': lambda: nn.Expon(9, LONG),
    'EtpUnitError: Expon: .*give a time': lambda: nn.Expon(3, tau=5 * u.mV),
    r'Expon: .*shape \(4,\); give one': lambda: nn.Expon(3, tau=np.ones(4)),
    'the rise is faster': lambda: nn.DualExpon(3, 2.0, 2.0),
    'EtpUnitError: DualExpon: .*both with a unit': lambda: nn.DualExpon(3, 5 * u.ms, 2.0),
    'SparseLinear: data is -1.0 at': lambda: nn.SparseLinear(EYE, w_sign=np.array([[1], [-1]])),
    r'SparseLinear: w_sign has shape \(3,\)': lambda: nn.SparseLinear(EYE, w_sign=np.ones(3)),
    'SparseLinear: w_sign is 0.5': lambda: nn.SparseLinear(EYE, w_sign=np.full(2, 0.5)),
    'U is 1.5': lambda: nn.STP(3, U=1.5),
    'U is None; give one number': lambda: nn.STP(3, U=None),
    'EtpUnitError: STP: U is 0.5 mV; it has to be': lambda: nn.STP(3, U=0.5 * u.mV),
    'tau_d is None; give one': lambda: nn.STP(3, tau_d=None),
    r'tau is \[5.0, 8.0\]; .*array': of_kind(nn.Expon, tau=[5.0, 8.0]),
    r'Expon: tau is array.*\+1.j.*; give one number': of_kind(nn.Expon, tau=np.array([1, 1j])),
    "CUBA: scale is 'x'; give one number": lambda: nn.CUBA('x'),
    'E is .*, or an array': lambda: nn.COBA([1.0, 2.0]),
    "missing a required argument: 'E'": nn.COBA,
    'StructureError: .*no potential is given': conducted(ones(2)),
    'EtpUnitError: .*E is 0. mV and the potential has the unit 1': conducted(ones(2), ones(3)),
    r'EtpShapeError: .*shape \(3,\) and the potential \(4,\)': conducted(ones(2), ones(4) * u.mV),
    'EtpUnitError: .*the spikes have the unit mV': lambda: stepped(nn.STP(3), ones(3) * u.mV),
    'StructureError: .*has no state g yet': lambda: nn.Expon(3)(ones(3)),
}
DELAYS = {
    'delay is 9.0; give delays from 0 to .*, 8.0': lambda: nn.Delay(3, 9, 8),
    'delay is -1.0; give delays': lambda: nn.Delay(3, -1, 8),
    r'delay is .*; give delays from 0': lambda: nn.Delay(3, np.array([0, 9, -1])),
    'delay is 9.* ms; give delays': lambda: nn.Delay(3, 9 * u.ms, 0.008 * u.second),
    'delay is 2.5, which is .2.5. steps; give whole': lambda: stepped(nn.Delay(3, 2.5), ones(3)),
    r'delay has shape \(2,\)': lambda: nn.Delay(3, np.ones(2)),
    'Delay: give longest': lambda: nn.Delay(3, 2.5, learn=True),
    'delay is 8.0, which is at the border': lambda: nn.Delay(3, 8, 8, learn='delay'),
    'width is 0.0; give a positive': lambda: nn.Delay(3, 2, 8, width=0.0, learn=True),
    'classes is 0; give an int': lambda: nn.Delay(3, 2, classes=0),
    'learn names .longest.': lambda: nn.Delay(3, 2, 8, learn='longest'),
    'EtpUnitError: Delay: delay is 5.* mV; give a time': lambda: nn.Delay(3, 5 * u.mV),
    'EtpUnitError: Delay: delay is 5.* and longest is 8': lambda: nn.Delay(3, 5, 8 * u.ms),
    'EtpUnitError: Delay: longest is 5.* dt is None': fed(nn.Delay, 3, 5 * u.ms),
    'EtpUnitError: .*the line has the unit 1': lambda: stepped(nn.Delay(3, 2), ones(3) * u.mV),
    'StructureError: .*has no state line yet': lambda: nn.Delay(3, 2)(ones(3)),
}
PROJECTIONS = {
    r'EtpShapeError: .*comm .Linear. gives shape \(3,\), but syn \(Expon\) takes \(4,\)': (
        projected(syn=nn.Expon(4))
    ),
    r'EtpShapeError: .*stp .STP. gives shape \(3,\), but comm \(Linear\) takes \(2,\)': (
        projected(stp=nn.STP(3))
    ),
    r'a module or a function, such as Expon\(100, tau=5.0\)': projected(syn=nn.Expon),
    'Projection: comm is': projected(comm=nn.Expon(3)),
    'Projection: syn is': projected(syn=nn.COBA(E=0.0)),
    'Projection: out is': projected(out=nn.Expon(3)),
    'Projection: stp is': projected(stp=nn.Expon(3)),
    'give inhibition an E below': projected(
        comm=nn.SignedWLinear(3, 3, w_sign=-1), out=nn.COBA(E=-80.0)
    ),
}
READOUTS = {
    r'EtpShapeError: LeakySpike.*shape \(3,\); expected \(4,\)': fed(nn.LeakySpikeReadout, 4, 2),
    'FilteredReadout: tau is 0.0.*larger than 0': lambda: nn.FilteredReadout(3, 2, tau=0.0),
    'EtpUnitError: FilteredReadout: .*give a time': lambda: nn.FilteredReadout(3, 2, tau=5 * u.mV),
    r'tau has shape \(2, 1\)': lambda: nn.LeakyRateReadout(3, 2, tau=np.ones((2, 1))),
    r'LeakyRate.*w_init has shape \(2, 3\)': lambda: nn.LeakyRateReadout(3, 2, w_init=ones((2, 3))),
}
REFUSED = LAYERS | SIGNED | CELLS | NEURONS | SYNAPSES | DELAYS | PROJECTIONS | READOUTS


@pytest.mark.tier(quick=24)
@pytest.mark.parametrize('words', REFUSED)
def test_it_is_refused_with_what_was_found(words):
    """By an ``OptionError``, unless the words begin with another one."""
    with pytest.raises(BraintraceError if 'Error: ' in words else OptionError) as error:
        REFUSED[words]()
    text = f'{type(error.value).__name__}: {error.value}'
    assert re.search(words, text), text
