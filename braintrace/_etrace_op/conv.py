"""Convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._signatures import refuses
from ..errors import EtpShapeError, NotSupportedError, OptionError
from ._operands import (
    bias_operands,
    check_shape,
    input_operand,
    trainable_operand,
    unit_product,
    with_unit,
)
from ._primitive import ETPPrimitive
from ._rule_parts import bias_at, output_trace, vjp_of, zeros_trace
from ._spec import ETPPrimitiveSpec, register_primitive_spec

# receptive fields ---------------------------------------------------------------------------------
#
# The receptive field of each output of a convolution, gathered by static indices.
#
# Every option of a convolution is a choice of these indices, so the result is exact for all of
# them.


def conv_layout(dimension_numbers, rank: int) -> jax.lax.ConvDimensionNumbers:
    """Where batch, channel and spatial axes stand in x, kernel and y of this rank."""
    return jax.lax.conv_dimension_numbers((1,) * rank, (1,) * rank, dimension_numbers)


def _sources(
    size: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    window_dilation: int,
):
    """Indices ``(outputs, window)`` along one axis of x: the element that each output reads at each
    tap. ``size`` stands for padding.
    """
    dilated = (size - 1) * dilation + 1 if size else 0
    reach = (window - 1) * window_dilation + 1
    outputs = max(0, (dilated + sum(padding) - reach) // stride + 1)
    at = np.arange(outputs)[:, None] * stride + np.arange(window) * window_dilation - padding[0]
    return np.where((at >= 0) & (at < dilated) & (at % dilation == 0), at // dilation, size)


def _explicit(padding, sizes, windows, strides, window_dilations) -> list[tuple[int, int]]:
    if not isinstance(padding, str):
        return [(int(low), int(high)) for low, high in padding]
    reaches = [(window - 1) * dilation + 1 for window, dilation in zip(windows, window_dilations)]
    return jax.lax.padtype_to_pads(sizes, reaches, strides, padding)


def _all_sources(x, windows, *, strides, padding, lhs_dilation, rhs_dilation) -> list:
    """:func:`_sources` of each spatial axis of x, which has axes ``(batch, channel, *spatial)``."""
    sizes, ones = x.shape[2:], (1,) * len(windows)
    dilations, window_dilations = lhs_dilation or ones, rhs_dilation or ones
    pads = _explicit(padding, sizes, windows, strides, window_dilations)
    return list(map(_sources, sizes, windows, strides, pads, dilations, window_dilations))


def patches(x, windows, **options):
    """Gather ``(batch, channel, *outputs, *window)`` from x of axes ``(batch, channel,
    *spatial)``.
    """
    for axis, sources in enumerate(_all_sources(x, windows, **options)):
        x = jnp.take(x, sources, axis=2 + 2 * axis, mode='fill', fill_value=0)
    taps = range(2, x.ndim, 2)
    return jnp.transpose(x, (0, 1, *taps, *(tap + 1 for tap in taps)))


def spread(x, kernel_shape, hidden_dim, layout, *, feature_group_count: int, **window):
    """``hidden_dim`` times the derivative of each y with respect to the kernel entries that it
    reads: ``(*y_sample, *patch)``, summed over samples.

    ``y_sample`` are y's axes without the batch, ``patch`` the kernel's axes without the output
    channel, in the order that ``layout`` says.
    """
    kernel = [kernel_shape[axis] for axis in layout.rhs_spec]
    x, d = jnp.transpose(x, layout.lhs_spec), jnp.transpose(hidden_dim, layout.out_spec)
    samples, spatial, rank = x.shape[0], d.shape[2:], len(kernel) - 2
    groups = samples, feature_group_count
    taps = jnp.moveaxis(
        patches(x, kernel[2:], **window).reshape(*groups, 1, kernel[1], *spatial, *kernel[2:]),
        3,
        3 + rank,
    )
    grouped = d.reshape(*groups, kernel[0] // feature_group_count, *spatial, *(1,) * (1 + rank))
    entry = (grouped * taps).sum(0).reshape(kernel[0], *spatial, *kernel[1:])
    sample_axes, patch_axes = _without_first(layout.out_spec), _without_first(layout.rhs_spec)
    return jnp.transpose(entry, (*np.argsort(sample_axes), *(np.argsort(patch_axes) + 1 + rank)))


def by_group(number: int, x, kernel_shape, d, layout, *, feature_group_count: int, **window):
    """``sum d y`` differentiated by the kernel, of so many groups of samples apart: ``(number,
    *kernel)``, a product of matrices for each tap.
    """
    kernel = [kernel_shape[axis] for axis in layout.rhs_spec]
    x, d = jnp.transpose(x, layout.lhs_spec), jnp.transpose(d, layout.out_spec)
    sources = _all_sources(x, kernel[2:], **window)

    def split(a, channels: int):
        return a.reshape(number, -1, feature_group_count, channels, math.prod(a.shape[2:]))

    def of_tap(*tap):
        part = x
        for axis, k in enumerate(tap):
            part = jnp.take(part, sources[axis][:, k], 2 + axis, mode='fill', fill_value=0)
        sent = split(d, kernel[0] // feature_group_count)
        return jnp.einsum('gnfcs,gnfos->gfoc', split(part, kernel[1]), sent)

    taps = [of_tap(*tap) for tap in np.ndindex(*kernel[2:])]
    found = jnp.stack(taps, -1).reshape(number, *kernel)
    return jnp.transpose(found, (0, *(np.argsort(layout.rhs_spec) + 1)))


def _without_first(spec) -> list[int]:
    """The axes of a layout behind its first, numbered as if the first did not exist."""
    return [axis - (axis > spec[0]) for axis in spec[1:]]


# the op -------------------------------------------------------------------------------------------
#
# Convolution: ``y = conv(x, kernel) (+ b)``.
#
# ``y[o, p] = sum_ck x[c, s(p, k)] W[o, c, k] + b[o]``, where tap k at position p reads x at s(p,
# k): ``dy[o, p]/dW[o, c, k] = x[c, s(p, k)]``. One kernel entry feeds many positions, and at each
# of them the state has a ``D`` of its own. So the trace holds, for each element of y, an entry for
# each kernel entry that it reads, ``(batch, *y_sample, *patch)``: ``e[o, p, c, k] = D[o, p] e' +
# D_f[o, p] x[c, s(p, k)]``. The gradient sums over positions: ``dL/dW[o, c, k] = sum_p g[o, p] e[o,
# p, c, k]``.


def _impl(
    x,
    kernel,
    *bias,
    has_bias: bool = False,
    strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers=None,
    **product,
):
    dtype = jnp.result_type(x, kernel)
    y = jax.lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        window_strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        dimension_numbers=dimension_numbers,
        **product,
    )
    return y + _along_channel(bias[0], y.ndim, dimension_numbers) if has_bias else y


def _along_channel(bias, rank: int, dimension_numbers):
    channel = conv_layout(dimension_numbers, rank).out_spec[1]
    return jnp.expand_dims(bias, [axis for axis in range(rank) if axis != channel])


def _yw_to_w(hidden_dim, trace, *, strides, **_):
    patch = range(-1 - len(strides), 0)
    return {
        name: value * (hidden_dim if name == 'bias' else jnp.expand_dims(hidden_dim, patch))
        for name, value in trace.items()
    }


def _instant(
    x,
    hidden_dim,
    weights,
    *,
    has_bias: bool = False,
    strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers=None,
    **product,
):
    _refuse_batch_groups(batch_group_count)
    layout, kernel = conv_layout(dimension_numbers, x.ndim), weights['weight']
    entry = {
        'weight': spread(
            x,
            kernel.shape,
            hidden_dim,
            layout,
            feature_group_count=feature_group_count,
            strides=strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
        )
    }
    entry |= {'bias': hidden_dim.sum(layout.out_spec[0])} if has_bias else {}
    return {name: value.astype(weights[name].dtype) for name, value in entry.items()}


def _solve(signal, trace, weights, *, dimension_numbers=None, **params):
    layout = conv_layout(dimension_numbers, signal.ndim)
    others = tuple(axis for axis in range(signal.ndim) if axis != layout.out_spec[1])
    summed = {name: value.sum(others) for name, value in _yw_to_w(signal, trace, **params).items()}
    return {**summed, 'weight': jnp.moveaxis(summed['weight'], 0, layout.rhs_spec[0])}


def _gradient_by_group(
    number,
    x,
    d,
    weights,
    *,
    has_bias: bool = False,
    strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    feature_group_count: int = 1,
    dimension_numbers=None,
    **_,
):
    """XLA gathers the operands of a convolution that is mapped over groups of samples."""
    layout = conv_layout(dimension_numbers, x.ndim)
    window = dict(strides=strides, padding=padding)
    window |= dict(lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    shape, features = weights['weight'].shape, feature_group_count
    weight = by_group(number, x, shape, d, layout, feature_group_count=features, **window)
    found = {'weight': weight}
    if has_bias:
        d = jnp.transpose(d, layout.out_spec)
        d = d.reshape(number, -1, *d.shape[1:])
        found['bias'] = d.sum((1, *range(3, d.ndim)))
    return {name: value.astype(weights[name].dtype) for name, value in found.items()}


def _init_drtrl(
    x_var,
    y_var,
    weight_vars,
    num_hidden_state,
    *,
    batch_group_count: int = 1,
    dimension_numbers=None,
    **_,
):
    _refuse_batch_groups(batch_group_count)
    y, rank = y_var.aval.shape, len(x_var.aval.shape)
    kernel, layout = weight_vars['weight'].aval.shape[-rank:], conv_layout(dimension_numbers, rank)
    if layout.lhs_spec[0] or layout.out_spec[0]:
        raise NotSupportedError(
            f'etp_conv: dimension_numbers {dimension_numbers} put the batch behind another axis, '
            'where a trace can not follow; `braintrace.conv` moves it to the front.'
        )
    patch = tuple(size for axis, size in enumerate(kernel) if axis != layout.rhs_spec[0])
    return {
        name: zeros_trace(y if name == 'bias' else y + patch, var, num_hidden_state)
        for name, var in weight_vars.items()
    }


def _refuse_batch_groups(batch_group_count: int) -> None:
    if batch_group_count != 1:
        raise NotSupportedError(
            f'etp_conv: batch_group_count={batch_group_count} mixes samples, so there is no trace '
            'for each sample; use feature_group_count, or exclude this op by calling jax.lax '
            'directly.'
        )


def _fold_axes(params: dict) -> tuple[int, int] | None:
    if params.get('batch_group_count', 1) != 1:
        return None
    layout = conv_layout(params.get('dimension_numbers'), len(params['strides']) + 2)
    return layout.lhs_spec[0], layout.out_spec[0]


def register_conv(name: str, cases: Sequence[tuple] = ()) -> ETPPrimitive:
    trainable_invars = bias_at(2, weight=1)
    primitive = register_primitive_spec(
        ETPPrimitiveSpec(
            name,
            _impl,
            _yw_to_w,
            vjp_of(_impl, trainable_invars),
            _init_drtrl,
            output_trace,
            trainable_invars,
            batched=True,
            instant_drtrl=_instant,
            solve_drtrl=_solve,
            cases=tuple(cases),
        )
    )
    primitive.fold_axes = _fold_axes
    primitive.gradient_by_group = _gradient_by_group
    return primitive


etp_conv_p = register_conv('etp_conv')


@refuses(
    'conv',
    kernel_fn='Write `conv(x, fn(kernel), bias)`.',
    weight_fn='Write `conv(x, fn(kernel), bias)`.',
    bias_fn='Write `conv(x, kernel, fn(bias))`.',
)
def conv(
    x,
    kernel,
    bias=None,
    *,
    strides: int | Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = 'SAME',
    lhs_dilation: int | Sequence[int] | None = None,
    rhs_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: Any = None,
) -> jax.Array:
    """Convolve with a traced kernel: ``y = conv(x, kernel) (+ bias)``, as
    ``jax.lax.conv_general_dilated``.

    y has the unit of x times the unit of the kernel.

    Parameters
    ----------
    x, kernel : array or Quantity
        x has a batch and a channel axis, the kernel two channel axes, both as many spatial ones.
    bias : array or Quantity, optional
        Of shape (out,), in the unit of y.
    strides, lhs_dilation, rhs_dilation : int or one int for each spatial axis
        The step of the window, the dilation of x and that of the kernel; one by default.
    padding : str or a pair (before, behind) for each spatial axis
        ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'``, or numbers of zeros (for ``lhs_dilation``).
    feature_group_count, batch_group_count : int
        Numbers of groups into which the channels, or the samples, are divided.
    dimension_numbers : three strings
        Where the axes stand; by default ``'NCHW', 'OIHW', 'NCHW'`` and its kin.

    Raises
    ------
    EtpShapeError, EtpDtypeError, EtpUnitError
        An operand does not fit.
    OptionError
        An option does not fit.

    Examples
    --------

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> x, kernel = jnp.ones((2, 16, 3)), jnp.ones((4, 3, 8))
    >>> layout = 'NWC', 'WIO', 'NWC'
    >>> braintrace.conv(x, kernel, strides=2, padding='VALID', dimension_numbers=layout).shape
    (2, 7, 8)
    """
    return bind_conv(
        etp_conv_p,
        'conv',
        x,
        kernel,
        bias,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        dimension_numbers=dimension_numbers,
    )


def bind_conv(
    primitive: ETPPrimitive,
    op: str,
    x,
    kernel,
    bias=None,
    *,
    strides=None,
    padding='SAME',
    lhs_dilation=None,
    rhs_dilation=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers=None,
    **product,
):
    """Check and bind the operands of a convolution.

    ``product``: ``precision`` and ``preferred_element_type`` of ``jax.lax.conv_general_dilated``.
    """
    kernel, kernel_unit = trainable_operand(op, 'kernel', kernel)
    x, x_unit = input_operand(op, 'x', x, kernel.dtype)
    layout = _checked_layout(x, kernel, dimension_numbers, feature_group_count, batch_group_count)
    rank, unit = x.ndim - 2, unit_product(x_unit, kernel_unit)
    lhs_dilation = _each_axis('lhs_dilation', lhs_dilation, rank)
    batch_first = layout.lhs_spec[0] == layout.out_spec[0] == 0
    bias = bias_operands(op, bias, (kernel.shape[layout.rhs_spec[0]],), unit)
    if batch_first:
        dimension_numbers = _hashable(dimension_numbers)
    else:
        x = jnp.moveaxis(x, layout.lhs_spec[0], 0)
        dimension_numbers = jax.lax.ConvDimensionNumbers(
            _batch_first(layout.lhs_spec), layout.rhs_spec, _batch_first(layout.out_spec)
        )
    y = primitive.bind(
        x,
        kernel,
        *bias,
        has_bias=bool(bias),
        strides=_each_axis('strides', strides, rank) or (1,) * rank,
        padding=_checked_padding(padding, rank, lhs_dilation),
        lhs_dilation=lhs_dilation,
        rhs_dilation=_each_axis('rhs_dilation', rhs_dilation, rank),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        dimension_numbers=dimension_numbers,
        **product,
    )
    return with_unit(y if batch_first else jnp.moveaxis(y, 0, layout.out_spec[0]), unit)


def _checked_layout(
    x, kernel, dimension_numbers, feature_groups, batch_groups
) -> jax.lax.ConvDimensionNumbers:
    """The axes of x, kernel and y, after the operands are checked."""
    if kernel.ndim < 3 or x.ndim != kernel.ndim:
        hint = (
            'Add the batch axis: `x[None]`.'
            if x.ndim == kernel.ndim - 1
            else 'The kernel tells how many axes.'
        )
        raise EtpShapeError(
            f'conv: x has shape {x.shape} and kernel {kernel.shape}, expected (batch, channel, '
            '*spatial) and (out, in, *spatial) of one rank >= 3, in the order of '
            f'dimension_numbers. {hint}'
        )
    try:
        layout = conv_layout(dimension_numbers, x.ndim)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f'conv: dimension_numbers {dimension_numbers!r} do not fit operands of rank {x.ndim}; '
            f"expected three strings like ('NHWC', 'HWIO', 'NHWC'). {error}"
        ) from error
    _check_groups(x.shape, kernel.shape, layout, feature_groups, batch_groups)
    return layout


def _check_groups(x, kernel, layout, feature_groups, batch_groups) -> None:
    """Refuse shapes of x and kernel that do not divide into these groups."""
    counts = {'feature_group_count': feature_groups, 'batch_group_count': batch_groups}
    for name, groups in counts.items():
        if not _is_count(groups):
            raise OptionError(f'conv: {name} is {groups!r}, expected an integer >= 1.')
    batch, channels = (x[axis] for axis in layout.lhs_spec[:2])
    expected = list(kernel)
    expected[layout.rhs_spec[1]] = channels // feature_groups
    why = (
        f'x of shape {x} has {channels} channels in {feature_groups} group(s), in the order of '
        'dimension_numbers'
    )
    check_shape('conv', 'kernel', kernel, expected, why)
    out = kernel[layout.rhs_spec[0]]
    for name, size, groups in (
        ('output channels', out, feature_groups),
        ('output channels', out, batch_groups),
        ('channels', channels, feature_groups),
        ('samples', batch, batch_groups),
    ):
        if size % groups:
            raise EtpShapeError(f'conv: {size} {name} do not divide into {groups} groups.')


def _is_count(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _each_axis(name: str, value, rank: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    sizes = (value,) * rank if np.ndim(value) == 0 else tuple(value)
    if len(sizes) != rank or not all(_is_count(size) for size in sizes):
        raise OptionError(
            f'conv: {name} is {value!r}, expected an integer >= 1, or {rank} of them, one for a '
            'spatial axis.'
        )
    return tuple(int(size) for size in sizes)


def _checked_padding(padding, rank: int, lhs_dilation) -> str | tuple[tuple[int, int], ...]:
    if isinstance(padding, str) and any(size != 1 for size in lhs_dilation or ()):
        raise OptionError(
            f'conv: padding is {padding!r} and lhs_dilation {lhs_dilation}; where x is dilated, '
            f'give {rank} pair(s) of ints.'
        )
    if isinstance(padding, str) and padding.upper() in ('SAME', 'SAME_LOWER', 'VALID'):
        return padding.upper()
    try:
        pairs = tuple((int(low), int(high)) for low, high in padding)
    except (TypeError, ValueError):
        pairs = ()
    if isinstance(padding, str) or len(pairs) != rank:
        raise OptionError(
            f"conv: padding is {padding!r}, expected 'SAME', 'SAME_LOWER', 'VALID' or {rank} "
            'pair(s) of ints.'
        )
    return pairs


def _hashable(dimension_numbers):
    return tuple(dimension_numbers) if isinstance(dimension_numbers, list) else dimension_numbers


def _batch_first(spec) -> tuple[int, ...]:
    """The axes of a layout once its batch axis is moved to the front."""
    return (0, *(axis + (axis < spec[0]) for axis in spec[1:]))
