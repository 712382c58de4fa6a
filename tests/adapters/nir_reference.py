"""NIR's equations in NumPy, sample by sample, and random graphs to try them on.

A graph is evaluated backwards from its output, each node when its value is asked for.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def flattened(graph, prefix=''):
    """Nodes by their path, and node -> those that it reads; ends of subgraphs stay."""
    nodes, reads = {}, {}
    for name, node in graph.nodes.items():
        if type(node).__name__ == 'NIRGraph':
            inner, theirs = flattened(node, f'{prefix}{name}.')
            nodes |= inner
            reads |= theirs
        else:
            nodes[prefix + name] = node

    def end(name, kind):
        node = graph.nodes[name]
        if type(node).__name__ != 'NIRGraph':
            return prefix + name
        (found,) = (n for n, own in node.nodes.items() if type(own).__name__ == kind)
        return f'{prefix}{name}.{found}'

    for a, b in graph.edges:
        reads.setdefault(end(b, 'Input'), []).append(end(a, 'Output'))
    return nodes, reads


def flat(windows, spatial):
    """The taps of windows along one axis."""
    return windows.reshape(*windows.shape[:-spatial], -1)


def convolved(x, weight, bias, stride, padding, dilation, groups):
    """Every output entry is a sum over its window."""
    spatial = weight.ndim - 2
    each = lambda v: [int(n) for n in np.broadcast_to(v, spatial)]
    stride, dilation, axes = each(stride), each(dilation), range(1, spatial + 1)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
    if isinstance(padding, str):
        around = [(r // 2, r - r // 2) if padding == 'same' else (0, 0) for r in reach]
    else:
        around = [(p, p) for p in each(padding)]
    steps = (slice(None), *(slice(None, None, n) for n in (*stride, *dilation)))
    windows = sliding_window_view(np.pad(x, [(0, 0), *around]), [r + 1 for r in reach], axes)[steps]
    parts = zip(np.split(windows, groups), np.split(weight, groups))
    y = [np.einsum('c...t,oct->o...', flat(w, spatial), flat(k, spatial)) for w, k in parts]
    return np.concatenate(y) + bias.reshape(-1, *[1] * spatial)


def pooled(x, node, average):
    (k, m), (s, t), (p, q) = (
        [int(n) for n in np.broadcast_to(v, 2)]
        for v in (node.kernel_size, node.stride, node.padding)
    )
    x = np.pad(x, [(0, 0), (p, p), (q, q)])
    windows = sliding_window_view(x, (k, m), (1, 2))[:, ::s, ::t]
    return windows.mean((3, 4)) if average else windows.sum((3, 4))


class Run:
    """One sample; ``late``: edges that carry the value of the step before."""

    def __init__(self, graph, late, dt, reset, scheme):
        self.nodes, self.reads = flattened(graph)
        self.late, self.dt, self.reset, self.scheme = late, dt, reset, scheme
        self.state = {name: self.at_rest(node) for name, node in self.nodes.items()}
        self.past = {name: [] for name in self.nodes}
        self.before = {  # no spike, and the potential at rest
            name: 0 * own['v'] if hasattr(self.nodes[name], 'v_threshold') else own['v']
            for name, own in self.state.items()
        }

    def at_rest(self, node):
        zeros = np.zeros(np.shape(getattr(node, 'r', 0.0)))
        return {'v': zeros + getattr(node, 'v_leak', 0.0), 'i': zeros}

    def step(self, x):
        self.x, self.now = x, {}
        read = {name for names in self.reads.values() for name in names}
        outputs = {name for name, node in self.nodes.items() if type(node).__name__ == 'Output'}
        (last,) = outputs - read
        y = self.value(last)
        for name, node in self.nodes.items():
            self.value(name)
            if type(node).__name__ == 'Delay':
                self.past[name].append(self.taken(name))
        self.before = self.now
        return y

    def value(self, name):
        if name not in self.now:
            self.now[name] = self.formula(name, self.nodes[name])
        return self.now[name]

    def taken(self, name):
        if not self.reads.get(name):
            return self.x
        return sum(
            self.before[a] if (a, name) in self.late else self.value(a) for a in self.reads[name]
        )

    def formula(self, name, node):
        kind = type(node).__name__
        if kind == 'Delay':
            return self.delayed(name, np.rint(node.delay / self.dt).astype(int))
        x = self.taken(name)
        match kind:
            case 'Linear':
                return np.einsum('oi,i->o', node.weight, x)
            case 'Affine':
                return np.einsum('oi,i->o', node.weight, x) + node.bias
            case 'Conv1d' | 'Conv2d':
                options = node.stride, node.padding, node.dilation, node.groups
                return convolved(x, node.weight, node.bias, *options)
            case 'SumPool2d' | 'AvgPool2d':
                return pooled(x, node, kind == 'AvgPool2d')
            case 'Flatten':
                end = node.end_dim % x.ndim
                return x.reshape(x.shape[: node.start_dim] + (-1,) + x.shape[end + 1 :])
            case 'Scale':
                return node.scale * x
            case 'Threshold':
                return np.where(x > node.threshold, 1.0, 0.0)
            case 'Input' | 'Output':
                return x
        return self.neuron(node, kind, x, self.state[name])

    def delayed(self, name, steps):
        here = self.taken(name) if (steps == 0).any() else np.zeros(steps.shape)
        y, past = np.zeros(steps.shape), self.past[name]
        for at in np.ndindex(steps.shape):
            k = steps[at]
            y[at] = here[at] if k == 0 else past[-k][at] if k <= len(past) else 0.0
        return y

    def neuron(self, node, kind, x, state):
        relax = lambda tau: (
            self.dt / tau if self.scheme == 'euler' else 1.0 - np.exp(-self.dt / tau)
        )
        if kind.startswith('Cuba'):
            k = relax(node.tau_syn)
            x = state['i'] = (1 - k) * state['i'] + k * node.w_in * x
        if kind in ('I', 'IF'):
            v = state['v'] + self.dt * node.r * x
        else:
            k = relax(node.tau_mem if kind.startswith('Cuba') else node.tau)
            v = (1 - k) * state['v'] + k * (node.v_leak + node.r * x)
        if not kind.endswith('F'):
            state['v'] = v
            return v
        fires = v > node.v_threshold
        down = v - (node.v_threshold - node.v_reset) if self.reset == 'subtract' else node.v_reset
        state['v'] = np.where(fires, down, v)
        return fires.astype(float)


def simulated(graph, late, xs, dt, reset, scheme):
    """Outputs of shape (time, batch, ...), and node -> potentials at the end, (batch, ...)."""
    outputs, potentials = [], []
    for sample in range(xs.shape[1]):
        run = Run(graph, late, dt, reset, scheme)
        outputs.append([run.step(x) for x in xs[:, sample]])
        potentials.append({name: state['v'] for name, state in run.state.items()})
    nodes = potentials[0]
    return np.stack(outputs, 1), {name: np.stack([p[name] for p in potentials]) for name in nodes}


# ---- random graphs -------------------------------------------------------------------------------

DT = 1e-3


class Drawn:
    """A graph of random nodes, size and depth; ``late`` has its edges that go back in time."""

    def __init__(self, nir, seed):
        self.nir, self.rng = nir, np.random.default_rng(seed)
        self.nodes, self.edges, self.late = {}, [], set()
        self.last, self.shape = 'input', ()
        self.enter(self.pick([(4,), (2, 6), (2, 7, 6)]))
        for depth in range(self.rng.integers(1, 4)):
            self.layer(depth)
        self.add('output', nir.Output(np.array(self.shape)), self.shape)
        self.graph = nir.NIRGraph(self.nodes, self.edges, type_check=False)

    def pick(self, options):
        return options[self.rng.integers(len(options))]

    def normal(self, *shape):
        return self.rng.normal(size=shape)

    def between(self, low, high):
        return self.rng.uniform(low, high, self.shape)

    def enter(self, shape):
        self.shape = shape
        self.nodes['input'] = self.nir.Input(np.array(shape))

    def add(self, name, node, shape):
        self.nodes[name] = node
        self.edges.append((self.last, name))
        self.last, self.shape = name, tuple(int(n) for n in shape)

    def layer(self, depth):
        nir = self.nir
        if len(self.shape) > 1 and self.rng.random() < 0.4:
            start = self.rng.integers(len(self.shape) - 1) if len(self.shape) > 2 else 0
            node = nir.Flatten({'input': np.array(self.shape)}, int(start), -1)
            self.add(f'flat{depth}', node, node.output_type['output'])
        (self.dense if len(self.shape) == 1 else self.conv)(f'w{depth}')
        if len(self.shape) == 3 and self.rng.random() < 0.5:
            self.pool(f'p{depth}')
        for kind, way in (('Scale', 0.3), ('Threshold', 0.15), ('Delay', 0.3)):
            if self.rng.random() < way:
                self.plain(kind, f'{kind.lower()}{depth}')
        self.neuron(f'n{depth}')

    def dense(self, name):
        n = int(self.rng.integers(2, 6))
        weight = 1.5 * self.normal(n, self.shape[0])
        affine = self.rng.random() < 0.5
        node = self.nir.Affine(weight, self.normal(n)) if affine else self.nir.Linear(weight)
        self.add(name, node, (n,))

    def options(self, rank, channels):
        groups = self.pick([1, channels])
        kernel = (2 * groups, channels // groups, *self.rng.integers(1, 4, rank))
        stride, dilation = (tuple(map(int, self.rng.integers(1, 3, rank))) for _ in range(2))
        padding = self.pick(['same', 'valid', tuple(map(int, self.rng.integers(0, 3, rank)))])
        if isinstance(padding, tuple):
            padding = tuple(max(p, d) for p, d in zip(padding, dilation))
        padding = padding if all(n > 4 for n in self.shape[1:]) else 'same'
        stride = (1,) * rank if padding == 'same' else stride
        return self.normal(*kernel), stride, padding, dilation, groups

    def conv(self, name):
        rank = len(self.shape) - 1
        weight, *options = self.options(rank, self.shape[0])
        bias = self.normal(len(weight))
        shape = convolved(np.zeros(self.shape), weight, bias, *options).shape
        make, size = self.nir.Conv2d, self.shape[1:]
        if rank == 1:
            make, size = self.nir.Conv1d, self.shape[1]
            options = [v[0] if isinstance(v, tuple) else v for v in options]
        self.add(name, make(size, weight, *options, bias), shape)

    def pool(self, name):
        size = self.rng.integers(1, np.minimum(self.shape[1:], 3) + 1)
        padding = np.minimum(self.rng.integers(0, 2, 2), size // 2)
        stride = self.rng.integers(1, 3, 2)
        node = self.pick([self.nir.SumPool2d, self.nir.AvgPool2d])(size, stride, padding)
        rest = (np.array(self.shape[1:]) + 2 * padding - size) // stride + 1
        self.add(name, node, (self.shape[0], *rest))

    def plain(self, kind, name):
        make = {
            'Scale': lambda: self.between(-2, 2),
            'Threshold': lambda: self.between(-0.5, 0.5),
            'Delay': lambda: (
                DT * self.pick([self.rng.integers(0, 4, self.shape), np.full(self.shape, 2)])
            ),
        }
        self.add(name, getattr(self.nir, kind)(make[kind]()), self.shape)

    def neuron(self, name):
        kind = self.pick(['I', 'IF', 'LI', 'LIF', 'CubaLI', 'CubaLIF'])
        ranges = dict.fromkeys(('tau', 'tau_syn', 'tau_mem'), (2e-3, 2e-2))
        ranges |= dict(v_threshold=(0.1, 0.6), v_reset=(-0.3, 0.05), w_in=(0.5, 2.0))
        ranges['v_leak'] = (-0.2, 0.3)
        ranges['r'] = (100, 400) if kind in ('I', 'IF') else (0.5, 3.0)
        node = getattr(self.nir, kind)
        names = [n for n in node.__dataclass_fields__ if n in ranges]
        node = node(**{n: self.between(*ranges[n]) for n in names})
        recurrent = len(self.shape) == 1 and self.rng.random() < 0.6
        if not recurrent:
            return self.add(name, node, self.shape)
        n, size = self.shape[0], np.array(self.shape)
        weights = self.nir.Affine(0.5 * self.normal(n, n), 0.2 * self.normal(n))
        if self.rng.random() < 0.5:  # in a subgraph
            ends = {'input': self.nir.Input(size), 'output': self.nir.Output(size)}
            loop = [('input', 'unit'), ('unit', 'back'), ('back', 'unit'), ('unit', 'output')]
            inner = {**ends, 'unit': node, 'back': weights}
            node = self.nir.NIRGraph(inner, loop, type_check=False)
            self.late.add((f'{name}.unit', f'{name}.back'))
            return self.add(name, node, self.shape)
        self.add(name, node, self.shape)
        self.nodes[f'{name}_back'] = weights
        self.edges += [(name, f'{name}_back'), (f'{name}_back', name)]
        self.late.add((name, f'{name}_back'))
