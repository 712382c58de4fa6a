"""Gradients of `D_RTRL` beside backpropagation through time, in whichever braintrace is installed.

The names that this program uses are those of the public package too, so it runs unchanged in an
environment that has one of its versions: `python benchmarks/public_faults.py`. For each weight it
prints the length of the gradient of a sequence, in units of the gradient by backpropagation, and
the cosine between the two: 1.00 and 1.000 where they are the same. `docs/howto/migrate.md` has
the table.
"""

from __future__ import annotations

import warnings

warnings.filterwarnings('ignore')  # the weights that a package itself warns of are in the table too

import brainstate  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import braintrace  # noqa: E402

STEPS, BATCH, INPUTS, UNITS = 8, 3, 3, 4
MASK = np.random.RandomState(5).rand(INPUTS, UNITS) > 0.4


class Model(brainstate.nn.Module):
    """Weights by name, hidden states `h` and `c`, and a step."""

    rows: dict[str, tuple[int, ...]] = {}

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(0)
        for name, shape in self.rows.items():
            setattr(self, name, brainstate.ParamState(jnp.asarray(0.5 * random.randn(*shape))))

    def init_state(self, batch_size=None, **kwargs):
        for name in ('h', 'c'):
            setattr(self, name, brainstate.HiddenState(jnp.zeros((batch_size, UNITS))))

    def leak(self, y):
        self.h.value = 0.9 * self.h.value + y
        return self.h.value


def both(x, h):
    return jnp.concatenate([x, h], axis=-1)


class Readout(Model):
    """A readout after a leaky layer, applied by an op."""

    rows = {'W': (INPUTS, UNITS), 'readout': (UNITS, 2)}

    def update(self, x):
        h = self.leak(braintrace.matmul(x, self.W.value))
        return braintrace.matmul(jnp.tanh(h), self.readout.value)


class LSTM(Model):
    """A weight for each gate."""

    rows = dict.fromkeys(('Wi', 'Wf', 'Wg', 'Wo'), (INPUTS + UNITS, UNITS))

    def gates(self, xh):
        weights = (self.Wi, self.Wf, self.Wg, self.Wo)
        return [braintrace.matmul(xh, w.value) for w in weights]

    def update(self, x):
        i, f, g, o = self.gates(both(x, self.h.value))
        c = jax.nn.sigmoid(f) * self.c.value + jax.nn.sigmoid(i) * jnp.tanh(g)
        self.c.value = c
        self.h.value = jax.nn.sigmoid(o) * jnp.tanh(c)
        return self.h.value


class FusedLSTM(LSTM):
    """One weight for all gates, and a leaky state beside it."""

    rows = {'W': (INPUTS + UNITS, 4 * UNITS), 'V': (INPUTS, UNITS)}

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.slow = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def gates(self, xh):
        return jnp.split(braintrace.matmul(xh, self.W.value), 4, axis=-1)

    def update(self, x):
        self.slow.value = 0.9 * self.slow.value + braintrace.matmul(x, self.V.value)
        return super().update(x) + self.slow.value


class Synapse(Model):
    """A membrane that reads the new current of its synapse."""

    rows = {'W': (INPUTS, UNITS)}

    def update(self, x):
        self.c.value = 0.8 * self.c.value + braintrace.matmul(x, self.W.value)
        return self.leak(self.c.value)


class GRU(Model):
    rows = dict.fromkeys(('Wz', 'Wr', 'Wh'), (INPUTS + UNITS, UNITS))

    def update(self, x):
        h = self.h.value
        z = jax.nn.sigmoid(braintrace.matmul(both(x, h), self.Wz.value))
        r = jax.nn.sigmoid(braintrace.matmul(both(x, h), self.Wr.value))
        new = jnp.tanh(braintrace.matmul(both(x, r * h), self.Wh.value))
        self.h.value = (1 - z) * h + z * new
        return self.h.value


class Transformed(Model):
    """`matmul(x, 2 * tanh(W) * mask)` into a leaky state."""

    rows = {'W': (INPUTS, UNITS)}

    def update(self, x):
        return self.leak(braintrace.matmul(x, 2 * jnp.tanh(self.W.value) * MASK))


class Added(Model):
    """Two parameters that are added before one op."""

    rows = {'W': (INPUTS, UNITS), 'V': (INPUTS, UNITS)}

    def update(self, x):
        return self.leak(braintrace.matmul(x, self.W.value + self.V.value))


class Checkpointed(Model):
    """An op inside `jax.checkpoint`."""

    rows = {'W': (INPUTS, UNITS)}

    def update(self, x):
        return self.leak(jax.checkpoint(braintrace.matmul)(x, self.W.value))


class Leaky(Model):
    """A leaky state, for which D_RTRL has no approximation."""

    rows = {'W': (INPUTS, UNITS)}

    def update(self, x):
        return self.leak(braintrace.matmul(x, self.W.value))


def sequence():
    random = np.random.RandomState(1)
    return jnp.asarray(random.randn(STEPS, BATCH, INPUTS)), random.randn(BATCH, UNITS)[:, :2]


def loss(y, target):
    return jnp.sum((y[:, :2] - target) ** 2)


def initialised(model):
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    return model


def summed(call, xs, target):
    return sum(loss(call(x), target) for x in xs)


def backpropagation(kind):
    model, (xs, target) = initialised(kind()), sequence()
    weights = model.states(brainstate.ParamState)
    return brainstate.transform.grad(lambda: summed(model, xs, target), weights)()


def by_steps(kind):
    """One gradient for each step, summed."""
    model, (xs, target) = kind(), sequence()
    learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=BATCH)
    weights = model.states(brainstate.ParamState)
    total = None
    for x in xs:
        got = brainstate.transform.grad(lambda x=x: loss(learner(x), target), weights)()
        total = got if total is None else jax.tree.map(jnp.add, total, got)
    return total


def by_one_gradient(kind):
    """One gradient around the loop over the steps."""
    model, (xs, target) = kind(), sequence()
    learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=BATCH)
    weights = model.states(brainstate.ParamState)
    return brainstate.transform.grad(lambda: summed(learner, xs, target), weights)()


CASES = [
    ('readout after a leaky state', Readout, by_steps),
    ('LSTM, a weight for each gate', LSTM, by_steps),
    ('LSTM of one weight, leaky state', FusedLSTM, by_steps),
    ('synapse and membrane', Synapse, by_steps),
    ('GRU', GRU, by_steps),
    ('`matmul(x, 2 * tanh(W) * mask)`', Transformed, by_steps),
    ('`matmul(x, W + V)`', Added, by_steps),
    ('`jax.checkpoint(matmul)(x, W)`', Checkpointed, by_steps),
    ('one gradient around a loop of calls', Leaky, by_one_gradient),
]


def measure(kind, gradient):
    """Weight -> the length of its gradient and its cosine with backpropagation; a text where there
    is none.
    """
    want = backpropagation(kind)
    try:
        got = gradient(kind)
    except Exception as error:  # of any kind: it stands in the table
        return {'/'.join(map(str, path)): type(error).__name__ for path in want}
    return {
        '/'.join(map(str, path)): compared(np.ravel(got[path]), np.ravel(value))
        for path, value in want.items()
    }


def compared(got, want) -> str:
    length, unit = np.linalg.norm(got), np.linalg.norm(want)
    return f'{length / unit:.2f}, {got @ want / length / unit:.3f}' if length else 'zero'


def main():
    jax.config.update('jax_enable_x64', True)
    brainstate.environ.set(precision=64)
    print(f'braintrace {braintrace.__version__}, jax {jax.__version__}')
    for title, kind, gradient in CASES:
        for weight, found in measure(kind, gradient).items():
            print(f'{title:36} {weight:8} {found}')


if __name__ == '__main__':
    main()
