"""The known cells once more, in plain NumPy and complex numbers: nothing is shared with the engine.

A derivative is an imaginary part: a number ``a + ib`` stands for a value and how it moves with one
direction, to first order. A spike moves by its surrogate, and what is cut drops its imaginary part.
"""

from __future__ import annotations

import math

import numpy as np

STEP = 1e-30  # so small that its square is nothing


def surrogate(name, parameters, u):
    """The slope at ``u``, in the format that ``u`` has."""
    number = type(u)
    p, pi = {key: number(value) for key, value in parameters.items()}, number(math.pi)
    if name == 'sigmoid':
        low = np.exp(-np.abs(p['slope'] * u))
        return p['slope'] * low / (1 + low) ** 2
    if name == 'fast_sigmoid':
        return 1 / (1 + p['slope'] * np.abs(u)) ** 2
    if name == 'arctan':
        return p['slope'] / 2 / (1 + (pi / 2 * p['slope'] * u) ** 2)
    if name == 'triangle':
        return p['height'] * np.maximum(0, 1 - np.abs(u) / p['width'])

    def gauss(mean, deviation):
        top = np.exp(-((u - mean) ** 2) / (2 * deviation**2))
        return top / (deviation * np.sqrt(2 * pi))

    w, s, h = p['width'], p['scale'], p['height']
    return (1 + h) * gauss(0, w) - h * (gauss(w, s * w) + gauss(-w, s * w))


def spike(constants, distance):
    """``H(distance)``, whose derivative is the surrogate's at ``distance / theta``."""
    out, theta = np.zeros(distance.shape, complex), constants['theta']
    for at, d in np.ndenumerate(distance):
        slope = surrogate(**constants['surrogate'], u=d.real / theta) / theta
        out[at] = (1.0 if d.real > 0 else 0.0) + 1j * slope * d.imag
    return out


def values(tree):
    return {k: np.array(v['data'], complex).reshape(v['shape']) for k, v in tree.items()}


def numbers(node):
    return np.array(node['data'], float).reshape(node['shape'])


def old_output(record, carry):
    """z' as a function of the potential and the adaptation before; of an rnn h'."""
    c, cell = record['topology']['constants'], record['topology']['cell']
    if cell == 'rnn':
        return carry['h']
    high = carry['V'] - c['theta'] - (c['beta'] * carry['a'] if cell == 'alif' else 0)
    made = spike(c, high)
    return carry['z'].real + 1j * made.imag


def cell_step(record, carry, y):
    """New states out of old ones and ``y``; ``carry`` has no imaginary part at z."""
    c, cell = record['topology']['constants'], record['topology']['cell']
    if cell == 'rnn':
        return {'h': c['leak'] * carry['h'] + np.tanh(y)}
    z = old_output(record, carry)
    reset = z if c['reset_gradient'] else z.real
    new = {'V': c['alpha'] * carry['V'] + y - c['theta'] * reset}
    high = new['V'] - c['theta']
    if cell == 'alif':
        new['a'] = c['rho'] * carry['a'] + z
        high = high - c['beta'] * new['a']
    new['z'] = spike(c, high)
    return new


def step(record, params, carry, *, whole=False, r=None):
    """One step: the new carry, outputs, what leaves the cell, and the filter's derivative.

    ``r``: the derivative that a filter remembers of the cell's output.
    """
    topology, x_in = record['topology'], numbers(record['inputs'])
    back = old_output(record, carry)
    back = back if whole else back.real
    x = np.concatenate([x_in, back], 1)
    new = cell_step(record, carry, x @ params['W'] + params['b'])
    sent = new['h'] if topology['cell'] == 'rnn' else new['z']
    kappa = record['algorithm']['kappa']
    if kappa:
        r = kappa * (0 if r is None else r) + sent.imag
        read = sent.real + 1j * r
    else:
        read = sent
    outputs = read @ params['W_out'] + params['b_out']
    if topology['readout'] == 'leaky':
        outputs = topology['constants']['kappa_out'] * carry['o'] + outputs
        new['o'] = outputs
    return new, outputs, read, r


def lane_losses(record, outputs):
    targets, found = numbers(record['targets']), []
    for out, target in zip(outputs, targets):
        if record['loss']['name'] == 'half_mse':
            found.append(0.5 * sum((o - t) ** 2 for o, t in zip(out, target)))
        else:
            log = np.log(sum(np.exp(o) for o in out))
            found.append(-sum(t * (o - log) for o, t in zip(out, target)))
    return np.array(found)


def loss(record, outputs):
    mask = numbers(record['loss']['mask'])
    divisor = mask.sum() if record['loss']['reduction'] == 'mean' else 1.0
    return (mask * lane_losses(record, outputs)).sum() / divisor


def error(record, outputs):
    """dL/doutputs, one output after the other."""
    found = np.zeros(outputs.shape)
    for at in np.ndindex(*outputs.shape):
        moved = outputs.real.astype(complex)
        moved[at] += 1j * STEP
        found[at] = loss(record, moved).imag / STEP
    return found


def derivative(record, outputs, read, mine):
    """How the loss moves; parameters of the cell (``mine``) may see another signal."""
    feedback = record['algorithm']['feedback']
    if not mine or feedback is None:
        return loss(record, outputs).imag / STEP
    array = numbers(feedback['array'])
    signal = array if feedback['kind'] == 'modulator' else error(record, outputs) @ array.T
    return (signal * read.imag).sum() / STEP


def directions(params):
    """``(path, index, parameters moved in it)``."""
    for path in params:
        for at in np.ndindex(*params[path].shape):
            moved = {name: value.astype(complex) for name, value in params.items()}
            moved[path][at] += 1j * STEP
            yield path, at, moved


def unrolled(records):
    """The gradient of the sum of the losses of a run with constant weights, with the cut: between
    two steps it goes along positions alone, neither through the recurrent op nor, from a leaky
    readout's old state, through the readout.
    """
    params = values(records[0]['params_before'])
    grads = {path: np.zeros(value.shape) for path, value in params.items()}
    for path, at, moved in directions(params):
        carry, r = values(records[0]['carry_before']), None
        for record in records:
            carry, outputs, read, r = step(record, moved, carry, r=r)
            grads[path][at] += derivative(record, outputs, read, path in ('W', 'b'))
            if 'o' in carry and path in ('W', 'b'):
                carry['o'] = carry['o'].real
    return grads


def traces_of(records):
    """The true derivative of the states after a run with constant weights, with the cut:
    ``{(state, path): (lanes, states' positions, parameter)}``.
    """
    params, found = values(records[0]['params_before']), {}
    for path, at, moved in directions(params):
        carry, r = values(records[0]['carry_before']), None
        for record in records:
            carry, _, _, r = step(record, moved, carry, r=r)
        for state, value in {**carry, '(filter)': r}.items():
            if value is not None:
                shape = (*value.shape, *params[path].shape)
                own = found.setdefault((state, path), np.zeros(shape))
                slot = value.imag if state != '(filter)' else value
                own[(slice(None), slice(None), *at)] = slot / STEP
    return found


def jacobian(record):
    """``D[s][r]`` and ``D_f[s]`` of the cell's group at each position, by moving one thing."""
    topology, carry = record['topology'], values(record['carry_before'])
    states = [s for s in topology['groups'][0]['states'] if s != '(filter)']
    x = np.concatenate([numbers(record['inputs']), old_output(record, carry).real], 1)
    params = values(record['params_before'])
    y = x @ params['W'] + params['b']

    def moved_by(carry, y):
        new = cell_step(record, carry, y)
        return [new[s].imag / STEP for s in states]

    columns = [moved_by({**carry, r: carry[r] + 1j * STEP}, y) for r in states]
    D = [[columns[r][s] for r in range(len(states))] for s in range(len(states))]
    return D, moved_by(carry, y + 1j * STEP)
