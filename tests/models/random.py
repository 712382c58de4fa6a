"""Random models: a plan is plain data that hypothesis draws and prints, ``build`` makes a row of
the table from it.
"""

import dataclasses

from hypothesis import strategies as st

from tests.models.model import B, I, Model, O

TAILS = ('identity', 'tanh', 'sigmoid', 'softplus', 'spike', 'flip')
OUTPUTS = ('new', 'old', 'before')


@dataclasses.dataclass(frozen=True)
class Layer:
    """``s_i = decay s_i' + couple s_{i-1}' + relay s_{i-1} + gate * tail(y_i)``, and what the next
    layer reads of it.
    """

    states: int
    positions: int
    tails: tuple[str, ...]  # one for each state
    relay: bool  # state i reads the new state i - 1
    couple: bool  # state i reads the old state i - 1, state 0 the old last one
    gated: bool  # a second op gates all tails
    fused: bool  # one op for all states, then a split
    learned_decay: bool  # decay of state 0 from `element_wise`
    output: str  # the new last state, the old one, or the new one before its reset

    @property
    def names(self):
        return [f's{i}' for i in range(self.states)]


layers = st.integers(1, 3).flatmap(
    lambda n: st.builds(
        Layer,
        states=st.just(n),
        positions=st.integers(2, 4),
        tails=st.tuples(*[st.sampled_from(TAILS)] * n),
        relay=st.booleans(),
        couple=st.booleans(),
        gated=st.booleans(),
        fused=st.booleans(),
        learned_decay=st.booleans(),
        output=st.sampled_from(OUTPUTS),
    )
)
plans = st.lists(layers, min_size=1, max_size=3).map(tuple)


def tail(ops, name, y):
    return y if name == 'identity' else getattr(ops, name)(y)


def drives(ops, layer, p, read):
    """One ``y`` for each state of the layer."""
    if layer.fused:
        return ops.split(ops.matmul(read, p['w'], p['b']), layer.states)
    return [ops.matmul(read, p[f'w{i}']) for i in range(layer.states)]


def layer_cell(ops, layer, prefix, p, old, x):
    """New states of a layer, by name, and its output. All states of a layer are read by its ops:
    they are cut there.
    """
    cut = [ops.cut(old[name]) for name in layer.names]
    read = ops.concatenate([x, ops.tanh(sum(cut))])
    gate = ops.sigmoid(ops.matmul(read, p['gate'])) if layer.gated else 1.0
    decay = ops.element_wise(p['decay'], ops.sigmoid) if layer.learned_decay else 0.7
    new, before = {}, None
    for i, (name, y) in enumerate(zip(layer.names, drives(ops, layer, p, read), strict=True)):
        before = (decay if i == 0 else 0.6) * old[name] + gate * tail(ops, layer.tails[i], y)
        if layer.states > 1 and (layer.couple or i > 0):
            # This term keeps the states of a layer one group.
            before = before - 0.2 * ops.tanh(old[layer.names[i - 1]])
        kept = before
        if layer.relay and i > 0:
            before, alone = before + 0.4 * new[layer.names[i - 1]], before
            kept = ops.within(prefix + layer.names[i - 1], before, without=alone)
        new[name] = ops.new(prefix + name, kept - 0.3 * ops.sigmoid(kept))
    last = layer.names[-1]
    return new, {'new': new[last], 'old': old[last], 'before': before}[layer.output]


def build(plan: tuple[Layer, ...]) -> Model:
    """A model of these layers with a plain readout of the last one, and of the first one's last new
    state.
    """

    def cell(ops, p, c, x):
        carry, first = {}, None
        for k, layer in enumerate(plan):
            prefix = f'l{k}_'
            old = {name: c[prefix + name] for name in layer.names}
            new, x = layer_cell(ops, layer, prefix, p[f'l{k}'], old, x)
            carry |= {prefix + name: value for name, value in new.items()}
            first = new[layer.names[-1]] if first is None else first
        return ops.dot(x, p['out']) + ops.dot(first, p['first']), carry

    params, carry, inputs = {}, {}, I
    for k, layer in enumerate(plan):
        params[f'l{k}'] = layer_params(layer, inputs)
        carry |= {f'l{k}_{name}': (B, layer.positions) for name in layer.names}
        inputs = layer.positions
    params |= {'out': (inputs, O), 'first': (plan[0].positions, O)}
    groups = tuple(tuple(f'l{k}_{name}' for name in layer.names) for k, layer in enumerate(plan))
    return Model(repr(plan), cell, params, carry, groups=groups)


def layer_params(layer: Layer, inputs: int) -> dict:
    n = layer.positions
    params = {f'w{i}': (inputs + n, n) for i in range(layer.states)}
    if layer.fused:
        params = {'w': (inputs + n, n * layer.states), 'b': (n * layer.states,)}
    if layer.gated:
        params['gate'] = (inputs + n, n)
    if layer.learned_decay:
        params['decay'] = (n,)
    return params
