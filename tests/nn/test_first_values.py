"""Mean and deviation of what each parameter is drawn from, against the formula of its layer."""

from collections.abc import Callable
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import compat, nn
from tests.nn.rows import values

IN, OUT, READ = 96, 128, 96 + 128  # features of x, of h, and of [x, h]


class Draw(NamedTuple):
    """Mean and deviation of ``of(parameter)``."""

    mean: float
    deviation: float
    of: Callable = lambda value: value


def uniform(low: float, high: float, of: Callable) -> Draw:
    return Draw((low + high) / 2, (high - low) / np.sqrt(12), of)


def deviation(size: float) -> Draw:
    return Draw(0.0, size)


def kaiming(num_in: int) -> Draw:
    return deviation(np.sqrt(2 / num_in))


def lecun(num_in: int) -> Draw:
    return deviation(np.sqrt(1 / num_in))


def xavier(num_in: int, num_out: int = OUT) -> Draw:
    return deviation(np.sqrt(2 / (num_in + num_out)))


def orthogonal(num_in: int, num_out: int = OUT) -> Draw:
    return deviation(1 / np.sqrt(max(num_in, num_out)))


ONE, NONE = Draw(1.0, 0.0), Draw(0.0, 0.0)


def linear(bias: Draw | None = NONE, **weights: Draw) -> dict[str, Draw]:
    """Rows of maps by their names."""
    found = {f'{name}.weight.weight': draw for name, draw in weights.items()}
    return found | ({f'{name}.weight.bias': bias for name in weights} if bias else {})


def in_ring(low: float, high: float, largest: float) -> dict[str, Draw]:
    """Complex numbers of radii from low to high, uniform over the area, of angles up to largest."""
    return {
        'nu_log': uniform(low**2, high**2, lambda nu: np.exp(-2 * np.exp(nu))),
        'theta_log': uniform(0, largest, np.exp),
    }


def conv(make: Callable, *window: int) -> tuple:
    """A convolution of two groups: a kernel reads a half of the channels."""
    places = int(np.prod(window))
    size = (*(8 for _ in window), 2 * IN)
    weight = xavier(places * IN, places * OUT)
    return lambda: make(size, OUT, window, groups=2), {'weight.weight': weight}


WITH_BIAS = {'weight.bias': NONE}
MATRIX = np.random.default_rng(0).normal(3.0, 0.5, (IN, OUT))
MAMBA_STEPS = uniform(np.log(1e-3), np.log(1e-1), lambda b: np.log(np.log1p(np.exp(b))))
LRU = {
    **in_ring(0.5, 0.9, 3.0),
    'gamma_log': uniform(1 - 0.9**2, 1 - 0.5**2, lambda gamma: np.exp(2 * gamma)),
    **linear(None, B_re=lecun(2 * IN), B_im=lecun(2 * IN), C_re=lecun(OUT), C_im=lecun(OUT)),
    'D': deviation(1.0),
}
FREQUENCIES = 2 * OUT**3 - (16 * OUT**2 - 1) / 12  # the mean square: HiPPO's entries, squared
S5 = {
    'A_log': Draw(np.log(0.5), 0.0),
    'A_im': Draw(FREQUENCIES, np.nan, np.square),
    'step_log': uniform(np.log(0.01), np.log(0.2), lambda step: step),
    **linear(None, B=lecun(2 * IN), C=kaiming(OUT)),
    'D': deviation(1.0),
}
RING = 0.5, 0.9, 3.0
GATES = dict.fromkeys(('Wz', 'Wr', 'Wh'), orthogonal(READ))
HEADS = dict.fromkeys(('Wq', 'Wk', 'Wv'), kaiming(IN))
SPREAD = uniform(1 / OUT, 1 - 1 / OUT, lambda b: 1 / (1 + np.exp(-b)))  # of the gates of a UR-LSTM
# the draws of a layer that is made of IN and OUT, or how another one is made in front of them
ROWS: dict[str, dict[str, Draw] | tuple[Callable, dict[str, Draw]]] = {
    'Linear': {'weight.weight': kaiming(IN), **WITH_BIAS},
    'SignedWLinear': {'weight': kaiming(IN)},
    'ScaledWSLinear': {'weight.weight': kaiming(IN), 'weight.gain': ONE, **WITH_BIAS},
    'SparseLinear': (
        lambda: nn.SparseLinear(u.sparse.CSR.fromdense(jnp.asarray(MATRIX))),
        {'weight.weight': Draw(MATRIX.mean(), MATRIX.std())},
    ),
    'LoRA': (lambda: nn.LoRA(IN, 64, OUT), {'weight.lora_a': lecun(IN), 'weight.lora_b': NONE}),
    'GroupedLinear': (
        lambda: nn.GroupedLinear(3, IN, OUT),
        {'weight.weight': kaiming(IN), **WITH_BIAS},
    ),
    'Embedding': {'weight': lecun(IN)},
    'Conv1d': conv(nn.Conv1d, 3),
    'Conv2d': conv(nn.Conv2d, 3, 2),
    'Conv3d': conv(nn.Conv3d, 1, 3, 2),
    'VanillaRNNCell': linear(W=xavier(READ)),
    'GRUCell': linear(**GATES),
    'MGUCell': linear(Wf=orthogonal(READ), Wh=orthogonal(READ)),
    'CFNCell': linear(Wf=orthogonal(READ), Wi=orthogonal(READ), Wh=orthogonal(IN)),
    'MinimalRNNCell': linear(W_u=orthogonal(2 * OUT), phi=orthogonal(IN)),
    'MiniGRU': linear(W_z=orthogonal(READ), W_x=orthogonal(IN)),
    'MiniLSTM': linear(W_f=orthogonal(READ), W_i=orthogonal(READ), W_x=orthogonal(IN)),
    'LSTMCell': linear(W=xavier(READ)),
    'URLSTMCell': {
        **linear(None, **dict.fromkeys(('Wf', 'Wr', 'Wu', 'Wo'), xavier(READ))),
        'bias': SPREAD,
    },
    'MinGRUCell': linear(W=xavier(IN)),
    'MinLSTMCell': linear(W=xavier(IN)),
    'ELSTMCell': linear(W=xavier(IN), Wo=xavier(READ)) | {'w_f': NONE, 'w_z': NONE},
    'CTRNNCell': linear(W=xavier(READ)),
    'LTCCell': linear(W=xavier(READ)) | {'tau_log': Draw(np.log(10), 0.0), 'A': deviation(1.0)},
    'LMUCell': (
        lambda: nn.LMUCell(IN, OUT, 8, 50.0, 16),
        linear(None, Ex=lecun(IN), Eh=lecun(OUT), Em=NONE) | linear(W=xavier(IN + OUT + 16 * 8)),
    ),
    'LRUCell': (lambda: nn.LRUCell(IN, OUT, *RING), LRU),
    'S5Cell': (lambda: nn.S5Cell(IN, OUT, 0.01, 0.2), S5),
    'RTUCell': (
        lambda: nn.RTUCell(IN, OUT, 'relu', *RING),
        in_ring(*RING) | linear(None, W=xavier(IN)),
    ),
    'GLACell': linear(None, **HEADS) | linear(Wa=kaiming(IN)),
    'DeltaNetCell': (
        lambda: nn.DeltaNetCell(IN, OUT, heads=16),
        linear(None, **HEADS) | linear(Wb=kaiming(IN)),
    ),
    'MambaCell': (
        lambda: nn.MambaCell(IN, 128),
        linear(None, WB=kaiming(IN), WC=kaiming(IN))
        | linear(MAMBA_STEPS, Wd=kaiming(IN))
        | {'A_log': Draw(0.0, 0.0, lambda a: np.exp(a) / np.arange(1, 129) - 1), 'D': ONE},
    ),
    'FilteredReadout': (lambda: nn.FilteredReadout(IN, OUT, b_init=0.0), linear(W=kaiming(IN))),
    'LeakyRateReadout': {'W': kaiming(IN)},
    'LeakySpikeReadout': {'W': kaiming(IN)},
    'Projection': (
        lambda: nn.Projection(nn.Linear(IN, OUT, b_init=None), nn.Expon(OUT)),
        {'comm.weight.weight': kaiming(IN)},
    ),
}
# They draw no parameter.
NOTHING = 'IF LIF ALIF AdLIF BRF GIF Expon DualExpon STP COBA CUBA Delay'.split()


def test_each_layer_and_cell_has_a_row():
    public = {kind for kind in (getattr(nn, name) for name in nn.__all__) if isinstance(kind, type)}
    named = {*(kind.__name__ for kind in public), 'MiniGRU', 'MiniLSTM'}
    assert named == {*ROWS, *NOTHING}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ROWS)
def test_first_values_have_the_mean_and_the_deviation_of_their_formula(name):
    """Within five deviations of the estimate; where nothing is drawn, within rounding."""
    brainstate.random.seed(3)
    row, drawn = ROWS[name], {}
    kind = getattr(nn, name, None) or getattr(compat, name)
    make, want = row if isinstance(row, tuple) else (lambda: kind(IN, OUT), row)
    for path, value in values(make(), brainstate.ParamState).items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value):
            drawn['.'.join([path, *(key.key for key in keys)])] = np.asarray(leaf, float)
    assert set(drawn) == set(want)
    for path, draw in want.items():
        found = draw.of(drawn[path])
        error = 5 * np.nan_to_num(draw.deviation) / np.sqrt(found.size)
        rounding = 1e-5 * max(abs(draw.mean), 1)
        np.testing.assert_allclose(found.mean(), draw.mean, atol=error + rounding, err_msg=path)
        if not np.isnan(draw.deviation):
            np.testing.assert_allclose(
                found.std(), draw.deviation, atol=error + rounding, err_msg=path
            )
