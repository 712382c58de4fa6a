"""Several losses of one step, each with a gradient of its own: of the batch, or of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import describe_aval, is_inexact, path_key, path_name
from .._executor import spread, varying
from .._jax import is_key
from .._rules import counting, uncounted
from .._windows import Gradient, task_loss, total_loss, zero_gradient
from ..errors import OptionError, StructureError
from .saving import kind_of_key

# bounds of the numbers on which steps are compared: of floats, and of integers
DRAWN = (0.1, 0.9, 2), (-2.0, 2.0, 10), (-10.0, 10.0, 1000)


def pull_back(step: Callable, params, state, *rest):
    """``outputs, pull, state`` of ``step(params, state, *rest)``; see :meth:`OnlineLearner.vjp`."""
    params = spread(params, varying((params, state, rest)))
    outputs, pull, new = jax.vjp(lambda params: step(params, state, *rest), params, has_aux=True)
    return outputs, lambda cotangent: pull(cotangent)[0], new


def of_batch(compiled: Any, losses: tuple, params, state, inputs: tuple, targets) -> Gradient:
    """One pass forward by a compiled step, and one pull-back for each loss."""
    outputs, pull, new = pull_back(compiled.advance, params, state, inputs)
    values, grads = [], []
    for loss in losses:

        def total(outputs, loss=loss):
            value = loss(outputs, targets)
            return total_loss(value), task_loss(value)

        of_total, back, value = jax.vjp(total, outputs, has_aux=True)
        values.append(value)
        grads.append(pull(*back(jnp.ones_like(of_total))))
    return Gradient(tuple(grads), tuple(values), outputs, new)


def of_samples(
    whole: Any, one: Callable, losses: tuple, params, state, inputs, targets
) -> Gradient:
    """A map over the batch of steps of one sample each, whose arrays keep a batch axis of length 1:
    the state that comes back is that of the batch. ``one(carry, inputs)``: a sample's step.
    """
    lanes = whole.graph.lanes
    if not lanes:
        raise StructureError(
            'per_sample=True needs a batch, and this one is empty or the step has no batch axis '
            'that its ops share. For cells without one, `jax.vmap` the call over states and inputs.'
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(targets):
        if not hasattr(leaf, 'shape') or leaf.shape[:1] != (lanes,):
            found = describe_aval(leaf) if hasattr(leaf, 'shape') else repr(leaf)
            raise StructureError(
                f'per_sample=True: {path_name(("targets", *path_key(path)))} is {found}; give an '
                f'array whose axis 0 is the batch of {lanes}.'
            )
    if lanes == 1:
        grads, values, outputs, new = of_batch(whole, losses, params, state, inputs, targets)
        values, grads = jax.tree.map(lambda x: x[None], (values, grads))
        return Gradient(grads, values, outputs, new)
    # Pending steps are written first: each gradient takes a write's memory anyway.
    trace, count = uncounted(state.trace)
    trace = whole.written(jax.tree.leaves(params), trace, state.t)
    state = state.replace(trace=counting(trace, count))
    state_axes = _state_axes(whole, state)
    # Whether axis 0 of an input really is the batch is seen when both steps are compared.
    input_axes = [0 if x.shape[:1] == (lanes,) else None for x in jax.tree.leaves(inputs)]
    axes = [*state_axes, *input_axes, *[0] * len(jax.tree.leaves(targets))]
    leaves, treedef = jax.tree.flatten((state, inputs, targets))
    first = [
        x if a is None else jax.lax.slice_in_dim(x, 0, 1, axis=a) for x, a in zip(leaves, axes)
    ]
    of_first, first_inputs, _ = jax.tree.unflatten(treedef, first)
    try:
        single = one(of_first.carry, first_inputs)
    except StructureError as error:
        raise StructureError(
            'per_sample=True: the step does not compile for one sample, a batch of 1 in axis 0 of '
            f'inputs: {error}'
        ) from error
    out_axes = _output_axes(whole, single)
    carry_axes = state_axes[: len(jax.tree.leaves(state.carry))]
    _check_apart(whole, single, carry_axes, input_axes, out_axes)
    # The trace of one sample may lack an axis of length 1, so every array is reshaped.
    like = jax.eval_shape(lambda: single.rule.init(single.graph))
    like = single.state(of_first.carry, counting(like, count), of_first.t)
    shapes = [x.shape for x in (*jax.tree.leaves(like), *first[len(state_axes) :])]
    weights, of_params = jax.tree.flatten(params)
    learnt = [i for i, w in enumerate(weights) if is_inexact(w)]

    def sample(*leaves):
        full = [x.reshape(shape) for x, shape in zip(leaves, shapes, strict=True)]
        one, inputs, targets = jax.tree.unflatten(treedef, full)
        found = of_batch(single, losses, params, one, inputs, targets)
        grads = [[jax.tree.leaves(g)[i] for i in learnt] for g in found.grads]
        outputs = [x.squeeze(a) for x, a in zip(jax.tree.leaves(found.aux), out_axes)]
        new = [x.reshape(old.shape) for x, old in zip(jax.tree.leaves(found.state), leaves)]
        return found.losses, grads, outputs, new

    mapped = jax.vmap(sample, in_axes=axes, out_axes=(0, 0, out_axes, state_axes), axis_size=lanes)
    values, grads, outputs, new = mapped(*leaves)

    def tree(of_learnt: list):
        """The gradients of one head, with zeros of the kind that JAX gives for integers."""
        like = [jax.ShapeDtypeStruct((lanes, *jnp.shape(w)), jnp.result_type(w)) for w in weights]
        found = dict(zip(learnt, of_learnt))
        full = [found[i] if i in found else zero_gradient(w) for i, w in enumerate(like)]
        return jax.tree.unflatten(of_params, full)

    outputs = jax.tree.unflatten(whole.program.trees['outputs'], outputs)
    new = jax.tree.unflatten(jax.tree.structure(state), new)
    trace, count = uncounted(new.trace)
    trace = counting(whole.rule.carried(whole.graph, trace, new.t), count)
    return Gradient(tuple(map(tree, grads)), values, outputs, new.replace(trace=trace))


def _check_apart(whole: Any, single: Any, carry_axes, input_axes, out_axes) -> None:
    """Refuse a step whose samples depend on each other, on their number or on their place: on drawn
    numbers the step of the batch has to be the step of each sample. They are small and positive,
    then of both signs, then large: a step may do another thing behind a threshold.
    """
    if single.sample_of is whole:
        return
    program, lanes, rng = whole.program, whole.graph.lanes, np.random.default_rng(0)
    # the step of the batch beside the step of each sample, on the same drawn numbers
    in_axes = [*carry_axes, *input_axes]
    shapes = [*single.program.leaf_avals, *(single.program.avals[v] for v in single.program.inputs)]

    def drawn(aval, low: float, high: float, end: int):
        if is_key(aval):
            return jax.random.split(jax.random.key(0, impl=kind_of_key(aval)), aval.shape)
        values = (
            rng.uniform(low, high, aval.shape)
            if is_inexact(aval)
            else rng.integers(0, end, aval.shape)
        )
        return jnp.asarray(values).astype(aval.dtype)

    def of_one(params, *given):
        given = [x.reshape(like.shape) for x, like in zip(given, shapes, strict=True)]
        return single.run(params, given[: len(carry_axes)], given[len(carry_axes) :])

    def both(params, carry, inputs):
        """Pairs of what the batch gives, the samples in front, and what the samples give."""
        outputs, new = whole.run(params, carry, inputs)
        apart = jax.vmap(of_one, (None, *in_axes), axis_size=lanes)(params, *carry, *inputs)
        for x, y, axis in zip(
            (*outputs, *new), [*apart[0], *apart[1]], (*out_axes, *carry_axes), strict=True
        ):
            x = x[None] if axis is None else jnp.moveaxis(x, axis, 0)
            yield x, y.reshape(y.shape[:1] + x.shape[1:])

    names = [f'output {i}' for i in range(len(out_axes))]
    names += [path_name(key) for key in program.leaf_keys]
    found: list = []
    params, inputs = ([program.avals[v] for v in vs] for vs in (program.params, program.inputs))
    with jax.ensure_compile_time_eval(), jax.transfer_guard('allow'):
        compared = jax.jit(lambda *of: list(both(*of)))
        for bounds in DRAWN:
            parts = (params, program.leaf_avals, inputs)
            values, *given = ([drawn(aval, *bounds) for aval in part] for part in parts)
            found += zip(names, compared([*values, *whole.held], *given), strict=True)
    for name, (x, y) in found:
        if not _alike(x, y):
            raise StructureError(
                f'per_sample=True: {name} of a sample is another one in a batch of {lanes} than '
                'alone, so the samples depend on each other, on their number or on their place: '
                'by a mean over the batch, by numbers drawn for all of it from one key, or by an '
                'input that they share and that is as long as the batch. Take gradients of the '
                'batch, or let each sample stand for itself: with a key of its own, with the '
                'shared input closed over.'
            )
    single.sample_of = whole


def _alike(x, y) -> bool:
    """Whether two arrays differ by rounding alone."""
    if is_key(x) or not is_inexact(x):
        x, y = (np.asarray(jax.random.key_data(a) if is_key(a) else a) for a in (x, y))
        return bool((x == y).all())
    tolerance = min(10 * float(jnp.finfo(x.dtype).eps) ** 0.5, 0.1)
    x, y = (np.asarray(a).astype(complex) for a in (x, y))
    size = np.abs(x[np.isfinite(x)]).max(initial=1.0)
    return bool(np.isclose(x, y, rtol=0, atol=tolerance * size, equal_nan=True).all())


def _state_axes(whole: Any, state) -> list[int | None]:
    """The axis of the batch in each array of the state; an integer may have none, as a step count
    that all samples share.
    """
    (laned, lane_axes), axes = whole.lane_paths, []
    moved = dict(lane_axes)
    for part in ('carry', 'trace'):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part)):
            key = path_key(path)
            name = path_name((part, *key))
            axis = moved.get(name, 0 if name in laned else None)
            raw = part == 'carry' and key in state.raw_keys
            if axis is None and (jnp.ndim(leaf) or is_key(leaf) or is_inexact(leaf) or raw):
                remedy = (
                    'If axis 0 is the batch, say so: braintrace.Policy(batched=...). A key may be '
                    'one for each sample. Else map a learner of one sample by `jax.vmap`.'
                    if part == 'carry'
                    else f'Take a rule whose trace has the batch in front, not {whole.rule}.'
                )
                shown = path_name(key) if part == 'carry' else name  # as Policy takes it
                raise OptionError(
                    f'per_sample=True: {shown} ({describe_aval(leaf)}) is shared by the samples of '
                    f'the batch, or the step does not show that its axis 0 is the batch. {remedy}'
                )
            axes.append(axis)
    return [*axes, 0]  # and that of t


def _output_axes(whole: Any, single: Any) -> list[int]:
    """The axis of the batch in each output: that in which one sample differs from the batch."""
    lanes, axes = whole.graph.lanes, []
    for i, (v, w) in enumerate(zip(whole.program.outputs, single.program.outputs, strict=True)):
        shape, of_one = whole.program.avals[v].shape, single.program.avals[w].shape
        # the axis that one sample lacks
        found = [k for k in range(len(shape)) if (*of_one[:k], lanes, *of_one[k + 1 :]) == shape]
        if shape == of_one or not found:
            raise StructureError(
                f'per_sample=True: output {i} of the cell has the shape {list(shape)} for a batch '
                f'of {lanes} and {list(of_one)} for one sample. Return outputs with one axis of '
                'the batch.'
            )
        axes.append(found[0])
    return axes
