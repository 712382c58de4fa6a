"""Random programs: layers inside nested calls, branches, loops and maps. A plan is plain data that
is drawn from a seed and printed.

An update is ``fn(p, h, r, x) -> (new states, output)``; ops and mixing equations read ``r``. Each
construct makes an update of an update. Outputs are made of states before their reset, so that
nothing but the step after reads a new state inside a construct.
"""

import dataclasses
import math
import random

import jax
import numpy as np
from hypothesis import strategies as st

from tests.models.model import B, Model, O
from tests.models.spiking import fired

INPUTS, MEMBERS, SUM = 2, 2, '~sum'
KINDS = {'leaky': ('h',), 'gated': ('h',), 'lstm': ('c', 'h'), 'lif': ('v',), 'pair': ('a', 'b')}
WIDE = {'lstm': 4, 'pair': 2}  # results of their op for each position
TAILS = 'tanh flip gather reshape put pad relu eased spike cumsum softmax norm'.split()
KEEPS = 'leak flip gather stack custom roll cumsum mean while while_each'.split()
CALLS = ('jit', 'checkpoint', 'cond', 'cond_constant', 'switch', 'scan', 'scan_reverse', 'fori')
BRANCHING = ('cond_weights',)  # doubles the parameters: once in a layer
MAPS = ('vmap', 'vmap_weights')  # adds an axis: once in a layer


@dataclasses.dataclass(frozen=True)
class Layer:
    """One update and the constructs around it, the innermost first."""

    kind: str
    positions: int
    tail: str  # between y and the state
    keep: str  # from the old state to the new one
    wraps: tuple[str, ...]
    decay: bool  # learned, by `element_wise`

    @property
    def members(self):
        return any(w in MAPS for w in self.wraps)


@dataclasses.dataclass(frozen=True)
class Program:
    """Layers, the constructs around all of them, and how the library runs it."""

    layers: tuple[Layer, ...]
    outer: tuple[str, ...] = ()
    rule: str = 'd_rtrl'
    unroll: int = 8
    window: int | None = None
    seed: int | None = None


# -- drawing ---------------------------------------------------------------------------------------

# The cost of an oracle grows with these.
MOST_OPS = 8  # applications of ops in a step
MOST_NUMBERS = 80  # numbers in the parameters


def draw(seed: int) -> Program:
    """The program of a seed. (Hypothesis, left to draw each choice, makes most examples by
    repeating parts of others.)
    """
    rng = random.Random(seed)
    while True:
        layers = tuple(_layer(rng) for _ in range(rng.choice([1, 1, 2])))
        outer = tuple(rng.choices(CALLS, k=rng.choice([0, 1, 1])))
        program = Program(
            layers,
            outer,
            rng.choice(['d_rtrl', 'es_d_rtrl']),
            rng.choice([8, 0]),
            rng.choice([1, None]),
            seed,
        )
        if _ops(program) <= MOST_OPS and _numbers(program) <= MOST_NUMBERS:
            return program


def _layer(rng: random.Random) -> Layer:
    wraps, names = [], CALLS + BRANCHING + MAPS
    for wrap in rng.choices(names, k=rng.choice([1, 2, 2, 3])):
        if not any(
            wrap in family and not seen.isdisjoint(family)
            for family in (BRANCHING, MAPS)
            for seen in [set(wraps)]
        ):
            wraps.append(wrap)
    # `vmap_element_wise` has a decay for each member and position.
    decay = 'vmap_weights' not in wraps and rng.random() < 0.4
    return Layer(
        rng.choice(list(KINDS)),
        rng.choice([2, 3]),
        rng.choice(TAILS),
        rng.choice(KEEPS),
        tuple(wraps),
        decay,
    )


def _ops(program: Program) -> int:
    """How many applications of ops one step records."""

    def times(wraps):
        return 2 ** sum(
            w.startswith(('scan', 'fori', 'switch', 'vmap', 'cond_weights')) for w in wraps
        )

    return times(program.outer) * sum(
        times(la.wraps) * ({'gated': 3, 'lstm': 2}.get(la.kind, 1) + la.decay)
        for la in program.layers
    )


def _numbers(program: Program) -> int:
    return sum(
        math.prod(shape)
        for shape in jax.tree.leaves(
            dict(build(program).params), is_leaf=lambda node: isinstance(node, tuple)
        )
    )


seeds = st.integers(0, 2**32 - 1)
programs = seeds.map(draw)


def simpler(program: Program):
    """Programs with one thing less."""
    change = dataclasses.replace
    for i in range(len(program.outer)):
        yield change(program, outer=program.outer[:i] + program.outer[i + 1 :])
    for k, layer in enumerate(program.layers):
        before, after = program.layers[:k], program.layers[k + 1 :]
        if before or after:
            yield change(program, layers=before + after)
        plain = Layer(layer.kind, 2, 'tanh', 'leak', layer.wraps, False)
        fields = [{f.name: getattr(plain, f.name)} for f in dataclasses.fields(Layer)]
        fields += [
            {'wraps': layer.wraps[:i] + layer.wraps[i + 1 :]} for i in range(len(layer.wraps))
        ]
        for field in [*fields, {'kind': 'leaky'}]:
            if change(layer, **field) != layer:
                yield change(program, layers=(*before, change(layer, **field), *after))


def smallest(program, fails, simpler=simpler):
    """The last of ever simpler programs that still ``fails``."""
    for other in simpler(program):
        if fails(other):
            return smallest(other, fails, simpler)
    return program


# -- updates ---------------------------------------------------------------------------------------


def tail(ops, name, y):
    n = y.shape[-1]
    edges = ((0, 0),) * (y.ndim - 1) + ((1, 2),)
    moved = {
        'gather': lambda: y[..., np.arange(n) - n + 1],
        'reshape': lambda: y.reshape(-1).reshape(y.shape),
        'flip': lambda: ops.flip(y),
        'put': lambda: ops.put(y, np.index_exp[..., -1], 0.2),
        'pad': lambda: ops.pad(y, edges)[..., 1:-2],
        'cumsum': lambda: ops.cumsum(y),
        'softmax': lambda: ops.softmax(y, y),
        'norm': lambda: y / (0.5 + ops.norm(y + 0.3)),
    }
    if name in moved:
        return ops.tanh(moved[name]())
    return getattr(ops, name)(y)


def keep(ops, name, decay, h, r):
    """``decay * h`` on a detour, or with something mixed in, or after a loop whose length depends
    on the numbers.
    """
    n = h.shape[-1]
    order = np.roll(np.arange(n), 1)
    if name == 'while':
        h = ops.while_loop(lambda h: (ops.abs(h.real) > 0.8).any(), lambda h: 0.5 * h, h, 12)
    if name == 'while_each':
        h = ops.while_loop(
            lambda h: (ops.abs(h.real) > 0.8).any(),
            lambda h: ops.where(ops.abs(h.real) > 0.8, 0.6 * h - 0.1 * ops.sin(h), h),
            h,
            12,
        )
    kinds = {
        'flip': lambda: decay * ops.flip(ops.sin(ops.flip(h))),
        'stack': lambda: ops.stack([decay * h, h**2], 0)[0],
        'gather': lambda: decay * ops.sin(h[..., order])[..., np.argsort(order)],
        'custom': lambda: ops.custom(ops.sin)(decay * h),
        'roll': lambda: decay * h + 0.2 * ops.roll(r, 1),
        'cumsum': lambda: decay * h + 0.2 * ops.cumsum(r),
        'mean': lambda: decay * h - 0.2 * ops.mean(r),
    }
    return kinds.get(name, lambda: decay * h)()


def update_of(ops, layer: Layer):
    """``fn(p, h, r, x)`` of one layer; states are dicts."""

    def leak(p):
        return ops.element_wise(p['decay'], ops.sigmoid) if layer.decay else 0.7

    def drive(p, r, x, name='w'):
        return ops.matmul(ops.concatenate([x, r]), p[name], p.get('b' + name))

    def leaky(p, h, r, x):
        before = keep(ops, layer.keep, leak(p), h['h'], r['h']) + tail(
            ops, layer.tail, drive(p, r['h'], x)
        )
        return {'h': before - 0.3 * ops.sigmoid(before)}, ops.tanh(before)

    def gated(p, h, r, x):
        z, s = ops.sigmoid(drive(p, r['h'], x, 'z')), ops.sigmoid(drive(p, r['h'], x, 's'))
        before = (1.0 - z) * keep(ops, layer.keep, leak(p), h['h'], r['h']) + z * tail(
            ops, layer.tail, drive(p, s * r['h'], x)
        )
        return {'h': before - 0.3 * ops.sigmoid(before)}, ops.tanh(before)

    def lstm(p, h, r, x):
        i, f, o, g = ops.split(drive(p, r['h'], x), 4)
        c = ops.sigmoid(f) * keep(ops, layer.keep, leak(p), h['c'], r['c']) + ops.sigmoid(i) * tail(
            ops, layer.tail, g
        )
        z = ops.sigmoid(o) * ops.tanh(c)
        return {'c': c - 0.1 * ops.sin(c), 'h': 0.9 * z + 0.1 * h['h']}, z**2 + z

    def lif(p, h, r, x):
        v = keep(ops, layer.keep, leak(p), h['v'], r['v']) + tail(
            ops, layer.tail, drive(p, fired(ops, r['v']), x)
        )
        z = fired(ops, v)
        return {'v': v - z}, z

    def pair(p, h, r, x):
        """The second state reads the new first one, which reads the old second one."""
        one, other = ops.split(drive(p, ops.tanh(r['a'] + r['b']), x), 2)
        a = keep(ops, layer.keep, leak(p), h['a'], r['a']) - 0.2 * ops.tanh(h['b'])
        a = a + tail(ops, layer.tail, one)
        b = 0.6 * h['b'] - 0.2 * ops.tanh(h['a']) + 0.4 * a + ops.tanh(other)
        return {'a': a - 0.3 * ops.sigmoid(a), 'b': b - 0.1 * ops.sin(b)}, ops.tanh(b)

    return locals()[layer.kind]


def layer_params(layer: Layer, inputs: int) -> dict:
    n = layer.positions
    params = {'w': (inputs + n, n * WIDE.get(layer.kind, 1))}
    params |= {'decay': (n,)} if layer.decay else {}
    if layer.kind == 'gated':
        params |= {'z': (inputs + n, n), 's': (inputs + n, n), 'bs': (n,)}
    for wrap in layer.wraps:
        if wrap == 'cond_weights':
            params = {'yes': params, 'no': params}
        if wrap == 'vmap_weights':
            params = jax.tree.map(
                lambda shape: (MEMBERS, *shape),
                params,
                is_leaf=lambda node: isinstance(node, tuple),
            )
    return params


# -- constructs ------------------------------------------------------------------------------------

FACTORS = np.array([1.0, -0.6])  # the input of each turn of an inner loop


def wrapped(ops, fn, wraps, x0, silent, groups=None):
    """``fn`` inside these constructs; the step's input ``x0`` decides on branches, ``silent(h)`` is
    an output of zeros.
    """
    for depth, name in enumerate(wraps):
        fn = _construct(ops, name, fn, x0[depth % B, (depth // B) % INPUTS], silent, groups)
    return fn


def _construct(ops, name, fn, level, silent, groups):
    def idle(p, h, r, x):
        """Another branch: no op."""
        return {k: 0.4 * v for k, v in h.items()}, silent(h)

    def scan(p, h, r, x, reverse=False):
        new, zs = ops.loop(
            lambda h, r, k: fn(p, h, r, k * x), h, r, FACTORS, groups=groups, reverse=reverse
        )
        return new, zs.sum(0)

    def fori(p, h, r, x):
        """The sum of the outputs is carried beside the states."""

        def body(i, live, read):
            new, z = fn(
                p,
                *({k: v for k, v in states.items() if k != SUM} for states in (live, read)),
                (0.5 - i) * x,
            )
            return new | {SUM: live[SUM] + z}

        start = [states | {SUM: silent(states)} for states in (h, r)]
        new = ops.for_loop(2, body, *start, groups if groups is None else [*groups, (SUM,)])
        return {k: new[k] for k in h}, new[SUM]

    def vmap(weights):
        return lambda *args: ops.vmap(fn, (weights, 0, 0, None))(*args)

    return {
        'jit': lambda: ops.jit(fn),
        'checkpoint': lambda: ops.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable),
        'cond': lambda: lambda *args: ops.cond(level > 0.0, fn, idle, *args),
        'cond_constant': lambda: lambda *args: ops.cond(True, fn, idle, *args),
        'cond_weights': lambda: (
            lambda p, *args: ops.cond(
                level > 0.0, lambda *a: fn(p['yes'], *a), lambda *a: fn(p['no'], *a), *args
            )
        ),
        'switch': lambda: (
            lambda *args: ops.switch(
                1 * (level > -0.8) + 1 * (level > 0.8), [idle, fn, ops.checkpoint(fn)], *args
            )
        ),
        'scan': lambda: scan,
        'scan_reverse': lambda: lambda *args: scan(*args, reverse=True),
        'fori': lambda: fori,
        'vmap': lambda: vmap(None),
        'vmap_weights': lambda: vmap(0),
    }[name]()


def build(program: Program) -> Model:
    """A model whose output reads the last layer's output and the first layer's new states, by plain
    readouts.
    """
    names = [
        tuple(f'l{k}_{s}' for s in KINDS[layer.kind]) for k, layer in enumerate(program.layers)
    ]

    def cell(ops, p, c, x0):
        def silent(h, layer=program.layers[-1]):
            zeros = ops.zeros_like(h[names[-1][-1]])
            return zeros[0] if layer.members else zeros

        def stack(p, h, r, x):
            new, z = {}, x
            for k, layer in enumerate(program.layers):
                own = [
                    {s: states[n] for s, n in zip(KINDS[layer.kind], names[k], strict=True)}
                    for states in (h, r)
                ]
                states, z = wrapped(
                    ops, update_of(ops, layer), layer.wraps, x0, lambda h: ops.zeros_like(h[max(h)])
                )(p[f'l{k}'], *own, z)
                new |= {n: states[s] for s, n in zip(KINDS[layer.kind], names[k], strict=True)}
                z = z.sum(0) if layer.members else z
            return new, z

        new, z = wrapped(ops, stack, program.outer, x0[:, ::-1], silent, names)(
            p, c, {k: ops.cut(v) for k, v in c.items()}, x0
        )
        new = {k: ops.new(k, v) for k, v in new.items()}
        first = sum(ops.dot(new[n], p['first']) for n in names[0])
        return ops.dot(z, p['out']) + (first.sum(0) if program.layers[0].members else first), new

    params, carry, inputs = {}, {}, INPUTS
    for k, layer in enumerate(program.layers):
        params[f'l{k}'] = layer_params(layer, inputs)
        shape = (B, layer.positions)
        carry |= dict.fromkeys(names[k], (MEMBERS, *shape) if layer.members else shape)
        inputs = layer.positions
    params |= {'out': (inputs, O), 'first': (program.layers[0].positions, O)}
    return Model(
        repr((program.layers, program.outer)), cell, params, carry, (B, INPUTS), groups=tuple(names)
    )
