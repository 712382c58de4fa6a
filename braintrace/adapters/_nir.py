"""NIR graphs (PyPI ``nir``), which simulators of spiking networks exchange."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from os import PathLike

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import element_wise
from .._warnings import tell
from ..errors import BraintraceError, OptionError, StructureError
from ._nir_graph import (
    ARRAYS,
    KNOWN,
    LAYERS,
    LEARNED,
    NEURONS,
    SPIKING,
    WEIGHTS,
    flat,
    shape_of,
)
from ._step import missing_framework


def from_nir(
    graph,
    *,
    dt=None,
    reset=None,
    scheme='euler',
    batch_size=None,
    learn=('weight', 'bias'),
    surrogate='triangle',
) -> tuple[Callable, dict, dict]:
    r"""``(cell, params, carry)`` of a NIR graph: a ``nir.NIRGraph``, or the path of its file.

    ``params`` and ``carry`` are dicts node -> name -> array, so that reports speak of
    ``fc1/weight`` and ``lif1/v``; the node ``inner`` of a subgraph ``outer`` is ``outer.inner``.
    Potentials start at ``v_leak`` (0 without one), all else at 0. :func:`to_nir` puts params back.

    NIR describes a network in continuous time. These arguments say what it leaves open:

    - ``dt``: the length of a step, in the unit of the graph's time constants (seconds).
    - ``reset``: what a spike does to the potential, ``'zero'`` (:math:`v \leftarrow v_{reset}`) or
      ``'subtract'`` (:math:`v \leftarrow v - (v_{threshold} - v_{reset})`).
    - ``scheme``: ``'euler'``, :math:`v \leftarrow v + \frac{dt}{\tau}(v_{leak} + r x - v)`, or
      ``'exact'``, :math:`1 - e^{-dt/\tau}` in the place of :math:`\frac{dt}{\tau}`. Of a neuron
      the current comes first, then the potential, which reads the new current, then the spike.

    ``batch_size``: x is ``(batch_size, *shape)``; without it one sample. ``learn``: the names of
    the arrays that are parameters, for instance ``('weight', 'bias', 'tau_mem')``. ``surrogate``:
    the name or a value of a function of :mod:`braintrace.nn.surrogate`.

    A signal passes the whole graph within a step. A cycle is opened where it leaves a neuron, of
    its neurons the one that is farthest from the input: there the output of the step before
    arrives (``cell.late`` has these edges). A Delay of a step or more opens its cycle by itself.
    Delays are rounded to steps. AvgPool2d counts the zeros of its padding.

    Raises :class:`braintrace.errors.OptionError` for an argument and
    :class:`braintrace.errors.StructureError` for a graph that has no such step; they name the
    nodes.

    >>> import braintrace, jax.numpy as jnp, nir, numpy as np
    >>> ones = np.ones(3)
    >>> neurons = nir.LIF(tau=0.02 * ones, r=ones, v_leak=0 * ones, v_threshold=ones)
    >>> graph = nir.NIRGraph.from_list(nir.Linear(2 * np.ones((3, 2))), neurons)
    >>> cell, params, carry = braintrace.adapters.from_nir(graph, dt=1e-3, reset='zero')
    >>> outputs, carry = cell(params, carry, jnp.ones(2))
    >>> outputs.tolist(), carry['lif']['v'].round(3).tolist()
    ([0.0, 0.0, 0.0], [0.2..., 0.2..., 0.2...])
    """
    from ..nn import spike_function

    if scheme not in ('euler', 'exact'):
        raise OptionError(f"scheme is {scheme!r}; choose 'euler' or 'exact'.")
    if reset not in (None, 'zero', 'subtract'):
        raise OptionError(f"reset is {reset!r}; choose 'zero' or 'subtract'.")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise OptionError(f'batch_size is {batch_size!r}; give a whole number above 0, or None.')
    learn = {learn} if isinstance(learn, str) else {*learn}
    if strange := sorted(map(str, learn - {*LEARNED})):
        raise OptionError(f'learn has {strange}; what may be learned is {", ".join(LEARNED)}.')
    spike = spike_function('from_nir', surrogate, 'surrogate')
    batch = () if batch_size is None else (batch_size,)
    cell = Cell(_read(graph), dt, reset, scheme, batch, spike)
    return cell, cell.params(learn), cell.start()


def to_nir(graph, params):
    """The NIR graph with the numbers of ``params``; ``nir.write(path, ...)`` makes a file of it.

    ``graph``: the ``nir.NIRGraph`` that :func:`from_nir` took, or ``cell.graph``, or its path; it
    is not changed. ``params``: a dict node -> name -> array, as ``from_nir`` returns and training
    changes it. Names, edges, metadata, and the dtype of each array stay as they are, and so do
    arrays that params does not have and entries that it has unchanged. A single number of the
    graph becomes an array where it, or another number of its node, was learned for each element.

    Raises :class:`braintrace.errors.StructureError` for params that do not fit the graph.

    >>> import braintrace, nir, numpy as np
    >>> graph = nir.NIRGraph.from_list(nir.Linear(np.ones((3, 2))))
    >>> new = braintrace.adapters.to_nir(graph, {'linear': {'weight': np.zeros((3, 2))}})
    >>> new.nodes['linear'].weight.max(), graph.nodes['linear'].weight.max()
    (np.float64(0.0), np.float64(1.0))
    """
    graph = _read(graph)
    nodes, _ = flat(graph)
    arrays = {f'{n}/{w}' for n, node in nodes.items() for w in ARRAYS.get(type(node).__name__, ())}
    if not isinstance(params, dict) or not all(isinstance(own, dict) for own in params.values()):
        raise StructureError('params are no dict node -> name -> array, as from_nir returns.')
    if strange := sorted({f'{n}/{w}' for n, own in params.items() for w in own} - arrays):
        raise StructureError(f'the graph has no arrays {strange}; it has {sorted(arrays)}.')

    def written(node, path):
        if hasattr(node, 'nodes'):
            new, prefix = copy.copy(node), f'{path}.' if path else ''
            new.nodes = {name: written(own, prefix + name) for name, own in node.nodes.items()}
            new.edges, new.metadata = copy.deepcopy((node.edges, node.metadata))
            return new
        new = copy.deepcopy(node)  # each by itself: one object may have two names
        for what, value in params.get(path, {}).items():
            setattr(new, what, _written(f'{path}/{what}', getattr(node, what), np.asarray(value)))
        if params.get(path) and type(node).__name__ not in WEIGHTS:
            _spread(new)
        return new

    return written(graph, '')


def _written(path, old, value):
    """``value`` in the dtype of ``old``, with all digits of the entries that are as they were."""
    old = np.asarray(old)
    if old.shape != value.shape and old.size != 1:
        raise StructureError(f'{path} has shape {value.shape}, and {old.shape} in the graph.')
    new = value.astype(old.dtype)
    if not np.issubdtype(old.dtype, np.floating) and (new != value).any():
        raise StructureError(
            f'{path} is of {old.dtype} in the graph, and not all of its new numbers are: round '
            'them, or give a graph in which it is of floats.'
        )
    return np.where(old.astype(value.dtype) == value, old, new)


def _spread(node) -> None:
    """Single numbers of a node next to arrays for each element, which NIR asks for of all or none:
    as such arrays.
    """
    own = {what: np.asarray(getattr(node, what)) for what in ARRAYS[type(node).__name__]}
    shape = max((a.shape for a in own.values()), key=lambda shape: (math.prod(shape), len(shape)))
    for what, array in own.items():
        if array.size == 1:
            setattr(node, what, np.full(shape, array.ravel()[0]))
    node.__post_init__()  # what it says of its shape


def _shapes(params) -> dict[str, tuple]:
    return {f'{n}/{what}': np.shape(a) for n, own in params.items() for what, a in own.items()}


def _read(graph):
    """The graph itself, or that of a file."""
    try:
        import nir
    except ImportError as e:
        raise missing_framework('nir', e, 'nir') from e
    if isinstance(graph, nir.NIRGraph):
        return graph
    if not isinstance(graph, str | PathLike):
        raise OptionError(
            f'graph is {type(graph).__name__}; give a nir.NIRGraph, or the path of its file.'
        )
    try:
        return nir.read(graph, type_check=False)
    except FileNotFoundError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, AssertionError) as e:
        raise OptionError(
            f'{graph} is no file of HDF5 with a NIR graph of known nodes, as nir.write makes it '
            f'({type(e).__name__}: {e}).'
        ) from e


class Cell:
    """One step of a NIR graph, ``cell(params, carry, x) -> (outputs, carry)``.

    ``graph`` is the ``nir.NIRGraph``; ``late`` has the edges whose signal arrives one step late.
    """

    def __init__(self, graph, dt, reset, scheme, batch, spike):
        self.graph, self._dt, self._reset, self._scheme = graph, dt, reset, scheme
        self._batch, self._spike = batch, spike
        self._nodes, self._edges = flat(graph)
        self._kinds = {name: type(node).__name__ for name, node in self._nodes.items()}
        self._start, self._end = self._ends()
        self._arrays: dict[str, dict] = {}
        self._broadcast: list[str] = []
        self._given = self._shapes()
        self._check_time()
        self._delays = {
            name: np.rint(own['delay'] / dt).astype(int)
            for name, own in self._arrays.items()
            if 'delay' in own
        }
        self.late, self._order = self._ordered()

    def _ends(self):
        """The input and the output."""
        if strange := [(name, kind) for name, kind in self._kinds.items() if kind not in KNOWN]:
            raise StructureError(
                '{!r} is of type {}, which has no formula; '.format(*strange[0])
                + f'these have one: {", ".join(KNOWN)}.'
            )
        ends = [[n for n, k in self._kinds.items() if k == kind] for kind in ('Input', 'Output')]
        for kind, found in zip(('Input', 'Output'), ends):
            if len(found) != 1:
                raise StructureError(f'the graph has {found} for {kind}; a cell has one. Cut it.')
        if any(b == ends[0][0] for _, b in self._edges):
            raise StructureError(f'an edge leads into the input {ends[0][0]!r}.')
        return ends[0][0], ends[1][0]

    def _shapes(self):
        """What each node gives, in the order of the distance to the input; arrays are taken up."""
        given = {self._start: shape_of(self._nodes[self._start].input_type['input'])}
        if given[self._start] is None:
            raise StructureError(
                f'{self._start!r} has no shape; give it: nir.Input(np.array([9])).'
            )
        source, queue = {}, [self._start]
        for name in queue:
            for after in (b for a, b in self._edges if a == name):
                if after not in given:
                    given[after] = self._entered(name, given[name], after)
                    source[after] = name
                    queue.append(after)
                elif given[name] != given[other := source[after]]:
                    raise StructureError(
                        f'{after!r} takes the sum of {other!r}, which gives {given[other]}, and '
                        f'{name!r}, which gives {given[name]}.'
                    )
        if apart := sorted(self._nodes.keys() - given):
            raise StructureError(f'no way leads from the input {self._start!r} to {apart}.')
        if self._broadcast:
            tell(
                f'the NIR graph has a single number at {", ".join(self._broadcast)}, where one '
                'for each element is asked: it holds for all of them.'
            )
        return given

    def _entered(self, before, shape, name):
        """What a node gives for the shape that it takes; its arrays are taken up."""
        node, kind = self._nodes[name], self._kinds[name]
        own = {what: np.asarray(getattr(node, what), float) for what in ARRAYS.get(kind, ())}
        sizes = ''.join(f', {what} {a.shape}' for what, a in own.items())
        misfit = f'{before!r} gives {shape} to {name!r} ({kind}{sizes}), which does not take it'
        for what, array in own.items():
            asked = own['weight'].shape[:1] if kind in WEIGHTS else shape
            if what != 'weight' and array.shape != asked:
                if array.size != 1:
                    raise StructureError(f'{misfit}: {what} has one number for each element.')
                self._broadcast.append(f'{name}/{what}')
                own[what] = np.broadcast_to(array.ravel()[0], asked)
        self._arrays[name] = own
        if kind == 'Output' and shape_of(node.output_type['output']) not in (None, shape):
            raise StructureError(f'{misfit}: its shape is {shape_of(node.output_type["output"])}.')
        if kind not in LAYERS:
            return shape
        try:
            x = jax.ShapeDtypeStruct((1, *shape), jnp.result_type(float))
            return jax.eval_shape(lambda x: LAYERS[kind](node, own, x, True, own.keys()), x).shape[
                1:
            ]
        except (BraintraceError, TypeError, ValueError, IndexError) as e:
            raise StructureError(f'{misfit}: {e}') from e

    def _check_time(self):
        """Refuse a step that is not said, or that the neurons do not bear."""
        dt = self._dt
        timed = [n for n, kind in self._kinds.items() if kind in NEURONS or kind == 'Delay']
        if timed and not (isinstance(dt, int | float | np.number) and 0 < dt < math.inf):
            raise OptionError(
                f'dt is {dt!r}, and {timed} need it: give the length of a step in the unit of '
                'their time constants (seconds), such as dt=1e-4.'
            )
        if self._reset is None and SPIKING & {*self._kinds.values()}:
            raise OptionError(
                "a graph does not say what a spike does: give reset='zero' (the potential goes to "
                "v_reset) or 'subtract' (it falls by v_threshold - v_reset), as it was trained."
            )
        for name, what, array in (
            (n, w, a) for n, own in self._arrays.items() for w, a in own.items()
        ):
            least = np.min(array, initial=math.inf)
            if what.startswith('tau') and not least > 0 or what == 'delay' and least < 0:
                raise StructureError(f'{name!r} has a {what} of {least}.')
            if what.startswith('tau') and self._scheme == 'euler' and dt > 2 * least:
                raise OptionError(
                    f'dt={dt} is more than twice the {what} of {name!r}, {least:.3g}: steps of '
                    "Euler grow without bound. Take a smaller dt, or scheme='exact'."
                )

    def _ordered(self):
        """The edges that carry what was one step before, and the nodes in an order of evaluation.

        A cycle is opened at an edge that leaves a neuron, so that spikes wait, and biases do not.
        """
        late, rank = set(), [*self._given]
        while True:
            waits = {b: [a for a, c in self._edges if c == b and (a, b) not in late] for b in rank}
            # a delay of a step or more needs none of its input within the step
            waits |= {name: [] for name, steps in self._delays.items() if steps.min(initial=1) > 0}
            try:
                return frozenset(late), [*TopologicalSorter(waits).static_order()]
            except CycleError as e:
                way = e.args[1]
            leaving = [edge for edge in zip(way, way[1:]) if self._kinds[edge[0]] in NEURONS]
            if not leaving:
                raise StructureError(
                    f'the cycle {" -> ".join(way)} has no neuron and no delay of a step or more, '
                    'so its nodes have no order.'
                )
            late.add(max(leaving, key=lambda edge: rank.index(edge[0])))

    def params(self, learn: set) -> dict:
        """Those arrays of the graph that are learned."""
        there = {what for own in self._arrays.values() for what in own}
        if strange := sorted(learn - there - {'weight', 'bias'}):
            raise OptionError(f'learn has {strange}, but the graph has only {sorted(there)}.')
        found = {
            name: {what: jnp.asarray(a, float) for what, a in own.items() if what in learn}
            for name, own in self._arrays.items()
        }
        self._learned = _shapes(found)
        return {name: found[name] for name in self._nodes if found.get(name)}

    def start(self) -> dict:
        """The carry before the first step."""
        carry: dict[str, dict] = {}
        for name, kind in self._kinds.items():
            zeros = jnp.zeros((*self._batch, *self._given[name]))
            if kind in NEURONS:
                carry[name] = {'v': zeros + self._arrays[name].get('v_leak', 0)}
            if kind in ('CubaLI', 'CubaLIF'):
                carry[name]['i'] = zeros
            if kind in SPIKING and any(a == name for a, _ in self.late):
                carry[name]['z'] = zeros
            if kind == 'Delay' and (steps := self._delays[name].max(initial=0)):
                carry[name] = {'line': jnp.stack([zeros] * steps, len(self._batch))}
        return carry

    def __call__(self, params, carry, x):
        """One step: what the graph gives, and the new carry."""
        x, axis, out, new = jnp.asarray(x, float), len(self._batch), {}, {}
        if x.shape != (asked := (*self._batch, *self._given[self._start])):
            raise StructureError(f'x has shape {x.shape}; the node {self._start!r} takes {asked}.')
        if other := sorted(p for p, _ in _shapes(params).items() ^ self._learned.items()):
            raise StructureError(f'params are not those of this cell: {sorted(set(other))} differ.')

        def taken(name):
            given = [
                carry[a].get('z', carry[a]['v']) if (a, name) in self.late else out[a]
                for a, b in self._edges
                if b == name
            ]
            return sum(given[1:], given[0]) if given else x

        for name in self._order:
            kind, own, learned = self._kinds[name], self._arrays.get(name, {}), params.get(name, {})
            if kind in LAYERS:
                own, layer = {**own, **learned}, LAYERS[kind]
                out[name] = layer(self._nodes[name], own, taken(name), axis, learned.keys())
                continue
            own = own | {what: element_wise(a) for what, a in learned.items()}
            if kind in NEURONS:
                out[name], new[name] = self._neuron(kind, own, carry[name], taken(name))
                new[name] |= {'z': out[name]} if 'z' in carry[name] else {}
            elif kind == 'Delay':
                for k in np.unique(steps := self._delays[name]):
                    y = carry[name]['line'].take(k - 1, axis) if k else taken(name)
                    out[name] = jnp.where(steps == k, y, out[name]) if name in out else y
            elif kind == 'Scale':
                out[name] = own['scale'] * taken(name)
            elif kind == 'Threshold':
                out[name] = self._fire(taken(name), own['threshold'], 0.0)
            else:
                out[name] = taken(name)
        for name in self._delays.keys() & carry.keys():
            line = jnp.expand_dims(taken(name), axis), carry[name]['line']
            new[name] = {'line': jnp.delete(jnp.concatenate(line, axis), -1, axis)}
        return out[self._end], new

    def _neuron(self, kind, own, old, x):
        """What a neuron gives, and its states after the step."""

        def towards(v, goal, tau):
            share = self._dt / tau
            return v + (share if self._scheme == 'euler' else -jnp.expm1(-share)) * (goal - v)

        new = {}
        if 'tau_syn' in own:
            x = new['i'] = towards(old['i'], own['w_in'] * x, own['tau_syn'])
        if 'v_leak' in own:
            tau = own['tau_mem'] if 'tau_syn' in own else own['tau']
            v = towards(old['v'], own['v_leak'] + own['r'] * x, tau)
        else:
            v = old['v'] + self._dt * own['r'] * x
        if kind not in SPIKING:
            return v, {**new, 'v': v}
        threshold, low = own['v_threshold'], own['v_reset']
        z = self._fire(v, threshold, low)
        return z, {**new, 'v': v - z * ((threshold if self._reset == 'subtract' else v) - low)}

    def _fire(self, v, threshold, low):
        """1 above the threshold; slopes are over the distance as a share of threshold - low."""
        gap = jnp.abs(threshold - low)
        return self._spike((v - threshold) / jnp.where(gap == 0, 1, gap))
