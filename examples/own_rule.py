"""A learning rule of your own in five steps: copy this file.

1. Copy it, and name the class; the numbers of the rule are its fields.
2. `start`: the empty trace of one op, arrays by names of yours, the batch in front.
3. `step`: the trace after a step, of the one before and what the step gives.
4. `read`: the gradient of each weight, of the trace and the loss's derivative by the states.
5. Write the formula a second time in `by_hand`, and run the file: it compares the two.

The rule here is D-RTRL with an eligibility that decays: e' = decay (D e) + D_f x.

    python examples/own_rule.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import functional, rules

DECAY = 0.8


@dataclasses.dataclass(frozen=True, repr=False)
class Decaying(rules.StepRule):
    """``d_rtrl()`` whose trace decays by a factor of its own in each step."""

    decay: float = DECAY
    name = 'DECAYING'
    approximation = 'what was long ago, by a decay of the trace'

    def start(self, pair):
        states = pair.group.num_state  # 1 of a plain unit, 2 of an LSTM: the last axis everywhere
        batch, units = pair.op.y_aval.shape
        weights = pair.op.weight_avals  # a layer has a bias too
        shapes = {'weight': (batch, pair.op.x_aval.shape[-1], units), 'bias': (batch, units)}
        return {name: jnp.zeros((*shapes[name], states)) for name in weights}

    def step(self, pair, e, x, d, df):
        # d (B, O, S, S): new states by old ones; df (B, O, S): by the op's result; x (B, I)
        new = {'weight': x[:, :, None, None] * df[:, None], 'bias': df}
        moved = {name: jnp.einsum('bosr,b...or->b...os', d, old) for name, old in e.items()}
        return {name: self.decay * moved[name] + new[name] for name in e}

    def read(self, pair, e, lam):
        # lam (B, O, S): the derivative of the loss by the states that the trace belongs to
        return {name: jnp.einsum('bos,b...os->...o', lam, entry) for name, entry in e.items()}


def cell(params, h, x):
    """Leaky units: where the formula is known by hand, so that it shows a wrong rule."""
    h = 0.9 * h + braintrace.matmul(x, params['weight'], params['bias'])
    return h, h


def loss(h, target):
    """The loss of a step."""
    return jnp.sum((h - target) ** 2)


def by_hand(params, xs, ys):
    """The gradient once more in NumPy, of the loss at all steps."""
    weight, bias = np.asarray(params['weight']), np.asarray(params['bias'])
    h, e, e_bias = np.zeros(ys.shape[1:]), np.zeros((xs.shape[1], *weight.shape)), 0.0
    grads = {'weight': np.zeros(weight.shape), 'bias': np.zeros(bias.shape)}
    for x, y in zip(np.asarray(xs), np.asarray(ys)):
        h = 0.9 * h + x @ weight + bias
        to_h = 2 * (h - y)
        # the loss of a step reads the trace before it through D = 0.9, and what the step adds
        grads['weight'] += np.einsum('bo,bio->io', to_h, 0.9 * e + x[:, :, None])
        grads['bias'] += (to_h * (0.9 * e_bias + 1)).sum(0)
        e, e_bias = DECAY * 0.9 * e + x[:, :, None], DECAY * 0.9 * e_bias + 1
    return grads


def main() -> dict[str, float]:
    """How far the rule is from other gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {'weight': jax.random.normal(keys[0], (3, 4)), 'bias': jnp.zeros(4)}
    xs, ys = jax.random.normal(keys[1], (20, 2, 3)), jax.random.normal(keys[2], (20, 2, 4))

    def gradient(rule):
        learner = functional.online(cell, rule)
        state = learner.init(params, jnp.zeros((2, 4)), xs[0])
        return learner.sequence_grad(loss, reduction='sum')(params, state, xs, ys).grads

    def error(got, wanted):
        return max(float(abs(got[n] - wanted[n]).max() / abs(wanted[n]).max()) for n in wanted)

    errors = {
        'the formula by hand': error(gradient(Decaying()), by_hand(params, xs, ys)),
        'd_rtrl(), without decay': error(gradient(Decaying(1.0)), gradient(rules.d_rtrl())),
        'd_rtrl(), with it': error(gradient(Decaying()), gradient(rules.d_rtrl())),
    }
    for other, found in errors.items():
        print(f'beside {other}: off by {found:.0e}')
    return errors


if __name__ == '__main__':
    main()
