"""Where the arrays of a state lie on a mesh, by where the parameters lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._compiler import HiddenGroup, Relation, abstract, path_key, path_name
from .._jax import Tracer
from .._report import Share
from ..errors import OptionError, StructureError

Axis = Any  # an entry of a PartitionSpec: None, the name of an axis of the mesh, or several


def state_specs(compiled: Any, state, param_specs, batch_axis, mesh=None, batch_size=None):
    """The ``OnlineState`` of ``PartitionSpec`` (see ``OnlineLearner.partition_specs``);
    ``batch_size``: of the lanes that a mesh has to divide, by default as compiled.
    """
    if batch_axis is not None and not isinstance(batch_axis, str):
        raise OptionError(f'batch_axis is {batch_axis!r}; give the name of an axis of the mesh.')
    if batch_axis is not None and compiled.graph.lanes is None:
        raise OptionError(
            f'batch_axis is {batch_axis!r}, but the step does not show which axis of its states is '
            'the batch. Name the states whose axis 0 it is: braintrace.Policy(batched=...), or '
            'leave batch_axis out.'
        )
    of_params = param_axes(compiled, param_specs)
    if mesh is not None:
        lanes = compiled.graph.lanes if batch_size is None else batch_size
        _check_mesh(compiled.program, of_params, (lanes, batch_axis), mesh)
    specs = _Specs(compiled, of_params, batch_axis)
    lanes = _lanes_in(state)

    def each(what: str, spec: Callable, tree):
        def leaf(path, x):
            key = path_key(path)
            return spec(key, x, lanes.get(path_name((what, *key))))

        return jax.tree_util.tree_map_with_path(leaf, tree)

    return state.replace(
        carry=each('carry', specs.of_carry, state.carry),
        trace=each('trace', specs.of_trace, state.trace),
        t=specs.placed(state.t, 0),
    )


def _lanes_in(state) -> dict[str, int]:
    """Path -> axis of the lanes, of the arrays of a state that have one."""
    return {**dict.fromkeys(state.laned, 0), **dict(state.lane_axes)}


def param_axes(compiled: Any, param_specs) -> dict[int, tuple[Axis, ...]]:
    """Value number of each parameter -> the entries of its spec, one for each of its axes."""
    program, names = compiled.program, compiled.program.trees['params']
    if param_specs is None:
        param_specs = jax.tree.unflatten(names, [PartitionSpec()] * len(program.params))
    try:
        specs = names.flatten_up_to(param_specs)
    except ValueError as error:
        raise StructureError(
            f'param_specs has another structure than params: {str(error).rstrip(".")}. Give a tree '
            'like params, of PartitionSpec, or None where a leaf is replicated.'
        ) from error
    found = {}
    for place, (v, spec) in enumerate(zip(program.params, specs, strict=True)):
        ndim = program.avals[v].ndim
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise OptionError(
                f'param_specs has {spec!r} for leaf {place} of params; give a PartitionSpec, or '
                'None where it is replicated.'
            )
        entries = tuple(spec or ())
        if len(entries) > ndim:
            raise OptionError(f'{spec} has more entries than its parameter has axes ({ndim}).')
        found[v] = entries + (None,) * (ndim - len(entries))
    return found


def _check_mesh(program: Any, of_params: dict, lanes: tuple, mesh) -> None:
    """Refuse an axis that the mesh has not, and an axis of an array that it does not divide;
    ``lanes``: their number and axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise OptionError(
            f'mesh is {mesh!r}; give a `jax.sharding.Mesh`, such as '
            '`jax.make_mesh((8,), ("data",))`, or an `AbstractMesh`.'
        )
    rows = [('batch_axis', 'the lanes', *lanes)]
    for name, v in zip(program.param_names, program.params, strict=True):
        sizes = zip(program.avals[v].shape, of_params[v], strict=True)
        rows += [('param_specs', f'axis {k} of {name}', *at) for k, at in enumerate(sizes)]
    for where, what, size, axis in rows:
        wrong = [name for name in _names(axis) if name not in mesh.shape]
        if wrong:
            raise OptionError(
                f'{where} has {wrong[0]!r} for {what}, an axis that the mesh has not: its axes are '
                f'{dict(mesh.shape)}.'
            )
        parts = math.prod(mesh.shape[name] for name in _names(axis))
        if size is not None and size % parts:
            raise OptionError(
                f'{where} cuts {what} ({size}) along {axis!r} into {parts} parts, which do not '
                'have one size. Give a multiple, or another mesh.'
            )


def sharding_of(leaf):
    """The sharding of an array over several devices, of a traced one where its type tells it."""
    if not isinstance(leaf, jax.Array):
        return None
    traced = isinstance(leaf, Tracer)
    own = jax.typeof(leaf).sharding if traced else leaf.sharding
    known = isinstance(own, jax.NamedSharding) and own.mesh.size > 1
    return own if known and (own.mesh.explicit_axes or not traced) else None


def placed(compiled: Any, state, params):
    """The state of ``init``, its trace and t on the devices where params and the carry lie."""
    found = jax.tree.map(sharding_of, (params, state.carry), is_leaf=lambda x: x is None)
    meshes = {s.mesh for s in jax.tree.leaves(found)}
    if len(meshes) != 1:
        return state
    (mesh,), (of_params, of_carry) = meshes, found
    lanes = _lanes_in(state)
    axes = set()
    for path, sharding in jax.tree_util.tree_leaves_with_path(of_carry):
        at = lanes.get(path_name(('carry', *path_key(path))))
        axes |= set() if at is None else {(*sharding.spec, *[None] * (at + 1))[at]}
    batch = axes.pop() if len(axes) == 1 else None
    specs = jax.tree.map(lambda _, s: s and s.spec, params, of_params, is_leaf=lambda x: x is None)
    batch = batch if isinstance(batch, str) else None
    specs = state_specs(compiled, state, specs, batch)

    def put(x, spec):
        place = jax.NamedSharding(mesh, spec)
        traced = isinstance(x, Tracer)
        return jax.sharding.reshard(x, place) if traced else jax.device_put(x, place)

    trace = jax.tree.map(put, state.trace, specs.trace)
    return state.replace(trace=trace, t=put(state.t, specs.t))


def share_of(compiled: Any, state, batch_size: int, param_specs, batch_axis, mesh) -> Share:
    """What a device holds and sends where arrays lie so; ``state``: that of the compiled step, of
    shapes.
    """
    program, lanes = compiled.program, compiled.graph.lanes
    specs = state_specs(compiled, state, param_specs, batch_axis, mesh, batch_size)
    laned = {**_lanes_in(state), 't': 0}

    def sized(path, x):
        axis = laned.get(path_name(path_key(path)))
        if axis is None or lanes is None:
            return x
        shape = *x.shape[:axis], batch_size, *x.shape[axis + 1 :]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    shapes = jax.tree_util.tree_map_with_path(sized, state)
    params = [abstract(program.avals[v]) for v in program.params]
    of_params = [PartitionSpec(*axes) for axes in param_axes(compiled, param_specs).values()]
    weights = shard_bytes(of_params, params, mesh)
    shared = batch_axis is not None and mesh.shape[batch_axis] > 1
    held = weights + shard_bytes(specs, shapes, mesh)
    apart = weights < shard_bytes([PartitionSpec()] * len(params), params, mesh)
    return Share(mesh.size, held, weights if shared else 0, apart)


def shard_bytes(specs, shapes, mesh) -> int:
    """The bytes of a tree's arrays that one device holds."""

    def one(spec, x) -> int:
        parts = math.prod(mesh.shape[name] for axis in spec or () for name in _names(axis))
        return math.prod(x.shape) * x.dtype.itemsize // parts

    leaves = jax.tree.leaves(shapes)
    of_leaves = jax.tree.flatten(specs, is_leaf=lambda s: s is None)[0]
    return sum(map(one, of_leaves, leaves))


def _names(axis: Axis) -> tuple[str, ...]:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


class _Specs:
    """Specs of the arrays of one compiled step."""

    def __init__(self, compiled: Any, of_params: dict, batch_axis: str | None):
        self.compiled, self.of_params, self.batch_axis = compiled, of_params, batch_axis
        self.makers = {v: e for e in compiled.program.equations for v in e.outs}
        self.relations = {r.key: r for r in compiled.graph.hidden_param_op_relations}

    def weight(self, relation: Relation, slot: str) -> tuple[Axis, ...] | None:
        """The entries of a weight: those of the parameter that it is, element by element, a
        function of. None: there is no such parameter.
        """
        program, v = self.compiled.program, relation.op.trainable[slot]
        shape = program.avals[v].shape
        like = (p for p in self._read_elementwise(v) if program.avals[p].shape == shape)
        return next(map(self.of_params.get, like), None)

    def _read_elementwise(self, v: int) -> Iterator[int]:
        """The parameters that a value is made of by equations that act element by element."""
        waiting, seen = [v], set()
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self.of_params:
                yield v
            made = self.makers.get(v)
            if made is not None and (made.does.elementwise or made.does.passes):
                waiting.extend(made.ins)

    def units(self, group: HiddenGroup) -> Axis:
        """The axis of the mesh along the group's last axis, if all ops that say one agree."""
        found: set[Axis] = set()
        for relation in self.relations.values():
            for other, coords in zip(relation.groups, relation.coordinates, strict=True):
                if other is not group or coords.shape != group.shape:
                    continue
                for slot, weight in relation.op.weight_avals.items():
                    entries = self.weight(relation, slot)
                    if entries and weight.shape[-1] == group.shape[-1]:
                        found.add(entries[-1])
        found.discard(None)
        return found.pop() if len(found) == 1 else None

    def placed(self, x, lanes: int | None, *last: Axis) -> PartitionSpec:
        """The batch along the axis ``lanes`` of x, and ``last`` along its last axes: an axis of the
        mesh once, the batch first.
        """
        entries: list[Axis] = [None] * x.ndim
        order = [x.ndim - len(last) + i for i in range(len(last))]
        wanted = dict(zip(order, last, strict=True))
        if lanes is not None and lanes < x.ndim:
            wanted, order = {**wanted, lanes: self.batch_axis}, [lanes, *order]
        used: set[str] = set()
        for i in order:
            names = _names(wanted[i])
            if entries[i] is None and used.isdisjoint(names):
                entries[i] = wanted[i]
                used.update(names)
        return PartitionSpec(*entries)

    def of_carry(self, key, x, lanes: int | None) -> PartitionSpec:
        pieces = self.compiled.program.pieces(self.compiled.program.leaf_keys.index(key))
        groups = self.compiled.graph.hidden_groups
        own = next((g for g in groups if not set(pieces).isdisjoint(g.carried)), None)
        if own is not None and x.shape == own.shape and x.ndim > 0:
            return self.placed(x, lanes, self.units(own))
        return self.placed(x, lanes)

    def of_trace(self, key, x, lanes: int | None) -> PartitionSpec:
        name, *rest = key
        if name not in self.relations:
            return self.placed(x, self._lanes_beside(x))
        relation, (of_group, slot, *_) = self.relations[name], rest
        if slot in relation.op.slots:
            shape, entries = relation.op.weight_avals[slot].shape, self.weight(relation, slot)
            own = x.shape if lanes is None else x.shape[1:]
            if entries is not None and own[len(own) - len(shape) :] == shape:
                return self.placed(x, lanes, *entries)
            return self.placed(x, lanes)
        if slot == 'f':  # the factor of the output, states in the last axis
            group = next(g for g in relation.groups if g.name == of_group)
            same = x.ndim > 1 and x.shape[-2] == group.shape[-1]
            return self.placed(x, lanes, self.units(group) if same else None, None)
        return self.placed(x, lanes, self._input(relation, x))

    def _input(self, relation: Relation, x) -> Axis:
        """The axis of the mesh along the last axis of the op's input."""
        for slot, weight in relation.op.weight_avals.items():
            entries = self.weight(relation, slot)
            if entries and weight.ndim == 2 and weight.shape[0] == x.shape[-1]:
                return entries[0]
        return None

    def _lanes_beside(self, x) -> int | None:
        """The axis of the lanes in what a rule keeps beside the trace: steps that are pending. It
        is known where all ops are batched.
        """
        graph = self.compiled.graph
        laned = all(
            laned
            and (relation.op.x is None or relation.op.primitive.batched)
            and not relation.op.repeats
            for relation, _, _, _, laned, _ in graph.pairs
        )
        return 0 if laned and x.shape[:1] == (graph.lanes,) else None
