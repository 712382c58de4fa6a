"""The nodes of NIR: their arrays, and the formulas of layers; a graph without its subgraphs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import conv, element_wise, matmul
from ..errors import StructureError

# A node and its arrays. Weights have shapes of their own, all others that of the signal.
WEIGHTS = {'Linear': ('weight',)} | dict.fromkeys(
    ('Affine', 'Conv1d', 'Conv2d'), ('weight', 'bias')
)
NEURONS = {
    'I': ('r',),
    'IF': ('r', 'v_threshold', 'v_reset'),
    'LI': ('tau', 'r', 'v_leak'),
    'LIF': ('tau', 'r', 'v_leak', 'v_threshold', 'v_reset'),
    'CubaLI': ('tau_syn', 'tau_mem', 'r', 'v_leak', 'w_in'),
    'CubaLIF': ('tau_syn', 'tau_mem', 'r', 'v_leak', 'v_threshold', 'v_reset', 'w_in'),
}
OTHERS = {'Delay': ('delay',), 'Scale': ('scale',), 'Threshold': ('threshold',)}
ARRAYS = WEIGHTS | NEURONS | OTHERS
KNOWN = sorted([*ARRAYS, 'AvgPool2d', 'Flatten', 'Input', 'Output', 'SumPool2d'])
LEARNED = sorted({name for own in ARRAYS.values() for name in own} - {'delay'})
SPIKING = {kind for kind, own in NEURONS.items() if 'v_threshold' in own}


def flat(graph, prefix=''):
    """Nodes and edges, both in the order of names; nodes of subgraphs are ``outer.inner``."""
    nodes, edges, ends = {}, [], {}
    for name, node in graph.nodes.items():
        path = prefix + name
        inner, ends[name] = {path: node}, (path, path)
        if hasattr(node, 'nodes'):
            inner, more = flat(node, f'{path}.')
            edges += more
            found = [
                [n for n, own in inner.items() if type(own).__name__ == kind]
                for kind in ('Input', 'Output')
            ]
            if [len(own) for own in found] != [1, 1]:
                raise StructureError(f'the subgraph {path!r} has {found} for Input and Output.')
            ends[name] = found[0][0], found[1][0]
        if twice := sorted(inner.keys() & nodes):
            raise StructureError(f'two nodes are called {twice[0]!r}, one of them in a subgraph.')
        nodes |= inner
    for a, b in set(graph.edges):
        if strange := [prefix + end for end in (a, b) if end not in ends]:
            raise StructureError(
                f'the edge {a!r} -> {b!r} names {strange[0]!r}, which is no node; there are '
                f'{sorted(prefix + name for name in ends)}.'
            )
        edges.append((ends[a][1], ends[b][0]))
    for end in (end for pair in ends.values() if pair[0] != pair[1] for end in pair):
        del nodes[end]  # an end of a subgraph: what it takes goes on to what reads it
        sources, targets = ([edge[k] for edge in edges if edge[1 - k] == end] for k in (0, 1))
        edges = [edge for edge in edges if end not in edge]
        edges += [(a, b) for a in sources for b in targets]
    return dict(sorted(nodes.items())), sorted(edges)


def shape_of(said):
    """Of an Input or Output; None where it is missing."""
    return None if said is None else tuple(int(n) for n in np.ravel(said))


def _each(value, rank=2):
    """A number for each spatial axis."""
    return tuple(int(n) for n in np.broadcast_to(value, rank))


def _weighted(own, learned, op, plain, rank):
    """Weights by an op where they are learned; what is constant by plain operations."""
    weight, bias = own['weight'], own.get('bias')
    if learned >= own.keys():
        return op(weight, bias)
    y = op(weight, None) if 'weight' in learned else plain(jnp.asarray(weight, float))
    if bias is None:
        return y

    def along(bias):
        return jnp.broadcast_to(bias.reshape(-1, *[1] * rank), y.shape[-rank - 1 :])

    return y + (element_wise(bias, along) if 'bias' in learned else along(bias))


def _linear(node, own, x, batched, learned):
    def op(weight, bias):
        return matmul(x, weight.T, bias)

    return _weighted(own, learned, op, lambda weight: x @ weight.T, 0)


def _conv(node, own, x, batched, learned):
    rank = own['weight'].ndim - 2
    strides, padding = _each(node.stride, rank), node.padding
    if padding == 'same' and strides != (1,) * rank:
        raise ValueError(f"padding 'same' goes with a stride of 1, and the stride is {strides}")
    padding = (
        padding.upper() if isinstance(padding, str) else [(n, n) for n in _each(padding, rank)]
    )
    options = {'rhs_dilation': _each(node.dilation, rank), 'feature_group_count': int(node.groups)}
    x = x if batched else x[None]

    def op(weight, bias):
        return conv(x, weight, bias, strides=strides, padding=padding, **options)

    def plain(weight):
        return jax.lax.conv_general_dilated(x, weight, strides, padding, **options)

    y = _weighted(own, learned, op, plain, rank)
    return y if batched else y[0]


def _flatten(node, own, x, batched, learned):
    shape = x.shape[batched:]
    start, end = (range(len(shape))[int(d)] for d in (node.start_dim, node.end_dim))
    middle = math.prod(shape[start : end + 1])
    return x.reshape(*x.shape[:batched], *shape[:start], middle, *shape[end + 1 :])


def _sum_pool(node, own, x, batched, learned):
    """A sum of slices, so that an element reaches the windows that it is in, and no others."""
    size, stride, padding = (_each(v) for v in (node.kernel_size, node.stride, node.padding))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(n, n) for n in padding])
    last = [n - k for n, k in zip(x.shape[-2:], size)]
    if min(last) < 0:
        raise ValueError(f'its window {size} is larger than the signal')
    return sum(
        x[..., i : i + last[0] + 1 : stride[0], j : j + last[1] + 1 : stride[1]]
        for i in range(size[0])
        for j in range(size[1])
    )


def _avg_pool(node, own, x, batched, learned):
    return _sum_pool(node, own, x, batched, learned) / math.prod(_each(node.kernel_size))


LAYERS = {  # (node, its arrays, x, whether x has a batch, what is learned) -> y
    'Linear': _linear,
    'Affine': _linear,
    'Conv1d': _conv,
    'Conv2d': _conv,
    'Flatten': _flatten,
    'SumPool2d': _sum_pool,
    'AvgPool2d': _avg_pool,
}
