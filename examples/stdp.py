"""Three rules of spike timing as traces of one's own, and their windows beside the formulas.

A *tag* is a hidden state that is always 0, and whose derivative by a weight is the trace that a
rule needs: ``y - stop(y)`` adds the spikes of the inputs to it. ``modulated(m, tag)`` makes that
trace, times ``m``, a gradient, which is here the change of the weights itself.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from braintrace import functional, matmul, modulated, rules

stop = jax.lax.stop_gradient


def arrived(pre, params):
    """Nothing, whose derivative by a weight is the spike that came in through it."""
    y = matmul(pre, params['W'])
    return y - stop(y)


# Song, Miller & Abbott (2000), Nature Neuroscience 3:919; the window of Bi & Poo (1998)
UP, DOWN, TAU = 0.005, 0.00525, 20.0


def pair(params, carry, pre, post):
    """A post spike strengthens what came before it, a pre spike weakens what comes after."""
    decay = jnp.exp(-1 / TAU)
    before, after = decay * carry['before'], decay * carry['after']  # traces without this step
    new = arrived(pre, params)
    changes = (UP * post, before), (-DOWN * after, new)
    return changes, {'before': before + new, 'after': after + post}


def pair_window(gap):
    """By the time from the pre to the post spike."""
    return np.where(gap > 0, UP, -DOWN) * np.exp(-abs(gap) / TAU)


# Pfister & Gerstner (2006), Journal of Neuroscience 26:9673, eqs. 3 and 4
A2, A3 = (6.1e-3, 1.6e-3), (6.7e-3, 1.4e-3)  # up, down
PLUS, MINUS, SLOW_PRE, SLOW_POST = 16.8, 33.7, 946.0, 27.0


def triplet(params, carry, pre, post):
    """The pair rule, in which a spike counts more if its own neuron fired shortly before."""
    taus = {'r1': PLUS, 'o1': MINUS, 'r2': SLOW_PRE, 'o2': SLOW_POST}
    r1, o1, r2, o2 = (jnp.exp(-1 / tau) * carry[name] for name, tau in taus.items())
    new = arrived(pre, params)
    weakened = arrived(pre * (A2[1] + A3[1] * r2), params)
    changes = (post * (A2[0] + A3[0] * o2), r1), (-o1, weakened)
    return changes, {'r1': r1 + new, 'o1': o1 + post, 'r2': r2 + pre, 'o2': o2 + post}


def triplet_window(gap, then):
    """Post, ``gap`` later pre, ``then`` later post again."""
    first = -A2[1] * np.exp(-gap / MINUS)
    more = A3[0] * np.exp(-(gap + then) / SLOW_POST)
    return first + (A2[0] + more) * np.exp(-then / PLUS)


# Izhikevich (2007), Cerebral Cortex 17:2443
TAU_C = 1000.0


def rewarded(params, carry, pre, post, dopamine):
    """The pair rule writes a slow trace ``c`` of each synapse, which dopamine turns to a change."""
    changes, new = pair(params, {k: carry[k] for k in ('before', 'after')}, pre, post)
    c = jnp.exp(-1 / TAU_C) * carry['c'] + sum(m * tag for m, tag in changes)
    return ((dopamine, c),), {**new, 'c': c}


def rewarded_window(gap, wait):
    """Dopamine of 1 comes ``wait`` steps after the second spike."""
    return pair_window(gap) * np.exp(-wait / TAU_C)


# each pair of neurons on the diagonal has a timing of its own


def change(rule, names, *spikes):
    """What a rule changes each weight by, for spikes of shape (T, N) and weights (N, N)."""
    n = spikes[0].shape[1]
    learner = functional.online(rule, rules.d_rtrl())
    params, carry = {'W': jnp.zeros((n, n))}, {name: jnp.zeros(n) for name in names}
    first = [s[0] for s in spikes]
    state = learner.init(params, carry, *first)
    loss = lambda changes, _: sum(modulated(m, tag) for m, tag in changes)
    gradient = jax.jit(learner.sequence_grad(loss, reduction='sum'))
    grads = gradient(params, state, tuple(spikes), jnp.zeros(len(spikes[0]))).grads
    return np.diag(grads['W'])


def at(times, steps):
    """Spikes of shape (steps, N), one for each neuron at its time."""
    return jnp.asarray(np.arange(steps)[:, None] == np.asarray(times), float)


def windows():
    """Of each rule the timings, what it does there, and its formula."""
    gaps, steps = np.array([-60, -30, -10, -2, 2, 10, 30, 60]), 200
    pre, post = at(np.full(8, 70), steps), at(70 + gaps, steps)
    made = {'pair': (gaps, change(pair, ('before', 'after'), pre, post), pair_window)}
    thens, gap = np.array([2, 5, 10, 20, 40, 80]), 10
    last = 10 + gap + thens
    pre, post = at(np.full(6, 10 + gap), steps), at(np.full(6, 10), steps) + at(last, steps)
    found = change(triplet, ('r1', 'o1', 'r2', 'o2'), pre, post)
    made['triplet'] = thens, found, lambda then: triplet_window(gap, then)
    waits = np.array([0, 20, 40, 60, 80, 120])
    pre, post = at(np.full(6, 10), steps), at(np.full(6, 20), steps)
    found = change(rewarded, ('before', 'after', 'c'), pre, post, at(20 + waits, steps))
    made['rewarded'] = waits, found, lambda wait: rewarded_window(10, wait)
    return made


def main(path=Path(__file__).parent / 'output' / 'stdp.png'):
    """Draw the windows, and return the largest difference of each from its formula."""
    titles = {
        'pair': 'pre to post (steps)',
        'triplet': 'post, 10 steps, pre, then post after (steps)',
        'rewarded': 'pre, 10 steps, post, reward after (steps)',
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout='constrained')
    errors = {}
    with jax.enable_x64(True):
        made = windows()
    for axis, (name, (times, found, formula)) in zip(axes, made.items()):
        want, fine = formula(times), np.linspace(times[0], times[-1], 301)
        errors[name] = float(abs(found - want).max() / abs(want).max())
        axis.plot(fine, formula(fine), color='0.7', linewidth=4, label='formula')
        axis.plot(times, found, 'k.', label='rule')
        axis.set(title=name, xlabel=titles[name])
        axis.axhline(0, color='0.9', zorder=0)
    axes[0].set_ylabel('change of the weight')
    axes[0].legend(frameon=False)
    Path(path).parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    for name, error in errors.items():
        print(f'{name:9} all timings lie on the formula: {error < 1e-12}')
    return errors


if __name__ == '__main__':
    main()
