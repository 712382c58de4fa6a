"""Convolution."""

from __future__ import annotations

import inspect
import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jax import platform_here
from .._signatures import is_int, refuses
from ..errors import EtpShapeError, NotSupportedError, OptionError
from ._layouts import bias_at, zeros_trace
from ._operands import (
    bias_operands,
    check_shape,
    each_axis,
    input_operand,
    trainable_operand,
    with_unit,
)
from ._primitive import ETPPrimitive, completed, register_primitive_spec
from ._spec import ETPPrimitiveSpec

# receptive fields ---------------------------------------------------------------------------------
#
# The receptive field of each output of a convolution, gathered by static indices. Every option of a
# convolution is a choice of these indices, so the result is exact for all of them.


def conv_layout(dimension_numbers, rank: int) -> jax.lax.ConvDimensionNumbers:
    """Where batch, channel and spatial axes are in x, kernel and y of this rank."""
    return jax.lax.conv_dimension_numbers((1,) * rank, (1,) * rank, dimension_numbers)


def _sources(
    x, windows, *, strides, padding, lhs_dilation=None, rhs_dilation=None, **_
) -> list[np.ndarray]:
    """Indices ``(outputs, window)`` along each spatial axis of x, which has axes ``(batch, channel,
    *spatial)``: the element that each output reads at each tap. The axis' size means padding.
    """
    sizes, ones = x.shape[2:], (1,) * len(windows)
    dilations, window_dilations = lhs_dilation or ones, rhs_dilation or ones
    reaches = [(window - 1) * dilation + 1 for window, dilation in zip(windows, window_dilations)]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(sizes, reaches, strides, padding)
    found = []
    for axis, (size, (low, high)) in enumerate(zip(sizes, padding)):
        stride, dilation = strides[axis], dilations[axis]
        dilated = (size - 1) * dilation + 1 if size else 0
        outputs = max(0, (dilated + int(low) + int(high) - reaches[axis]) // stride + 1)
        taps = np.arange(windows[axis]) * window_dilations[axis] - int(low)
        at = np.arange(outputs)[:, None] * stride + taps
        # between the elements of a dilated x, and outside of it, is padding
        inside = (at >= 0) & (at < dilated) & (at % dilation == 0)
        found.append(np.where(inside, at // dilation, size))
    return found


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


def _impl(x, kernel, *bias, has_bias: bool = False, strides, dimension_numbers=None, **options):
    layout, options = conv_layout(dimension_numbers, x.ndim), options | {'window_strides': strides}
    dtype = jnp.result_type(x, kernel)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    if platform_here() == 'cpu':
        x, kernel = jnp.transpose(x, layout.lhs_spec), jnp.transpose(kernel, layout.rhs_spec)
        y = jnp.transpose(_convolved(x, kernel, options), np.argsort(layout.out_spec).tolist())
    else:
        y = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **options)
    if not has_bias:
        return y
    channel = layout.out_spec[1]
    return y + jnp.expand_dims(bias[0], [axis for axis in range(y.ndim) if axis != channel])


# For a CPU, XLA has a fast convolution where the axes have the order of ``VALUES``. In the entry of
# a program it moves them there, in a loop it does not, and the derivatives of ``VALUES`` have other
# orders: in a loop they take up to 17 times as long (docs/performance.md). So each of them is that
# of an order whose reverse rule has the order of ``VALUES``; forward mode there takes up to 53
# times as long instead.
VALUES = 'N{}C', '{}IO', 'N{}C'
BY_X = 'N{}C', '{}OI', 'N{}C'
BY_KERNEL = 'C{}N', 'I{}O', '{}NC'


def _convolved(x, kernel, options: dict):
    """The convolution of ``(batch, channel, *spatial)`` and ``(out, in, *spatial)``."""
    spatial = string.ascii_lowercase[: x.ndim - 2]

    def by(order: tuple[str, str, str], x, kernel):
        layout = conv_layout(tuple(axes.format(spatial) for axes in order), x.ndim)
        x = jnp.transpose(x, np.argsort(layout.lhs_spec).tolist())
        kernel = jnp.transpose(kernel, np.argsort(layout.rhs_spec).tolist())
        y = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **options)
        return jnp.transpose(y, layout.out_spec)

    def tangent(operands, tangents):
        (x, kernel), (dx, dk) = operands, tangents
        y = by(VALUES, x, kernel)
        # a product with a zero tangent would read its other operand, which nothing depends on
        terms = [] if isinstance(dx, SymbolicZero) else [by(BY_X, dx, kernel)]
        terms += [] if isinstance(dk, SymbolicZero) else [by(BY_KERNEL, x, dk)]
        return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)

    convolve = jax.custom_jvp(partial(by, VALUES))
    convolve.defjvp(tangent, symbolic_zeros=True)
    return convolve(x, kernel)


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
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers=None,
    **window,
):
    """``hidden_dim`` times the derivative of each y with respect to the kernel entries that it
    reads: ``(*y_sample, *patch)``, summed over samples.

    ``y_sample`` are y's axes without the batch, ``patch`` the kernel's axes without the output
    channel, in the order that the layout says.
    """
    _refuse_batch_groups(batch_group_count)
    layout = conv_layout(dimension_numbers, x.ndim)
    kernel = [weights['weight'].shape[axis] for axis in layout.rhs_spec]
    x, d = jnp.transpose(x, layout.lhs_spec), jnp.transpose(hidden_dim, layout.out_spec)
    samples, spatial, rank = x.shape[0], d.shape[2:], len(kernel) - 2
    # gather what each output reads: (batch, channel, *outputs, *window)
    taps = x
    for axis, sources in enumerate(_sources(x, kernel[2:], **window)):
        taps = jnp.take(taps, sources, axis=2 + 2 * axis, mode='fill', fill_value=0)
    outputs = range(2, taps.ndim, 2)
    taps = jnp.transpose(taps, (0, 1, *outputs, *(axis + 1 for axis in outputs)))
    # split channels into groups, and let each output channel of a group meet each input channel
    groups = samples, feature_group_count
    taps = taps.reshape(*groups, 1, kernel[1], *spatial, *kernel[2:])
    taps = jnp.moveaxis(taps, 3, 3 + rank)
    grouped = d.reshape(*groups, kernel[0] // feature_group_count, *spatial, *(1,) * (1 + rank))
    weight = (grouped * taps).sum(0).reshape(kernel[0], *spatial, *kernel[1:])
    # y's axes without the batch and the kernel's without the output channel, numbered again, go to
    # where the layout has them
    y_sample, patch = (
        np.argsort([axis - (axis > spec[0]) for axis in spec[1:]])
        for spec in (layout.out_spec, layout.rhs_spec)
    )
    entry = {'weight': jnp.transpose(weight, (*y_sample, *(patch + 1 + rank)))}
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
    feature_group_count: int = 1,
    dimension_numbers=None,
    **window,
):
    """``xy_to_dw`` of so many groups of samples apart: ``(number, *kernel)``. It is a product of
    matrices for each tap, as XLA gathers the operands of a convolution that is mapped over groups.
    """
    layout = conv_layout(dimension_numbers, x.ndim)
    kernel = [weights['weight'].shape[axis] for axis in layout.rhs_spec]
    x, d = jnp.transpose(x, layout.lhs_spec), jnp.transpose(d, layout.out_spec)
    sources = _sources(x, kernel[2:], **window)

    def split(a, channels: int):
        return a.reshape(number, -1, feature_group_count, channels, math.prod(a.shape[2:]))

    def of_tap(*tap):
        part = x
        for axis, k in enumerate(tap):
            part = jnp.take(part, sources[axis][:, k], 2 + axis, mode='fill', fill_value=0)
        sent = split(d, kernel[0] // feature_group_count)
        return jnp.einsum('gnfcs,gnfos->gfoc', split(part, kernel[1]), sent)

    taps = [of_tap(*tap) for tap in np.ndindex(*kernel[2:])]
    weight = jnp.stack(taps, -1).reshape(number, *kernel)
    found = {'weight': jnp.transpose(weight, (0, *(np.argsort(layout.rhs_spec) + 1)))}
    if has_bias:
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
            f'etp_conv: dimension_numbers {dimension_numbers} put the batch after another axis, '
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


def register_conv(name: str, cases: Sequence[tuple] = ()) -> ETPPrimitive:
    def fold_axes(params: dict) -> tuple[int, int] | None:
        if params.get('batch_group_count', 1) != 1:
            return None
        layout = conv_layout(params.get('dimension_numbers'), len(params['strides']) + 2)
        return layout.lhs_spec[0], layout.out_spec[0]

    spec = ETPPrimitiveSpec(
        name,
        _impl,
        yw_to_w=_yw_to_w,
        init_drtrl=_init_drtrl,
        trainable_invars_fn=bias_at(2, weight=1),
        batched=True,
        instant_drtrl=_instant,
        solve_drtrl=_solve,
        cases=tuple(cases),
    )
    primitive = register_primitive_spec(completed(spec))
    primitive.fold_axes = fold_axes
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
        The order of the axes; by default ``'NCHW', 'OIHW', 'NCHW'`` and its kin.

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


DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(conv).parameters.items()
    if option.kind is option.KEYWORD_ONLY
}


def bind_conv(primitive: ETPPrimitive, op: str, x, kernel, bias=None, **options):
    """Check and bind the operands of a convolution, by the options of :func:`conv`, and
    ``precision`` and ``preferred_element_type`` of ``jax.lax.conv_general_dilated``.
    """
    options = DEFAULTS | options
    kernel, kernel_unit = trainable_operand(op, 'kernel', kernel)
    x, x_unit = input_operand(op, 'x', x, kernel.dtype)
    numbers = options['dimension_numbers']
    layout = _checked_layout(x, kernel, options)
    rank, unit = x.ndim - 2, x_unit * kernel_unit
    bias = bias_operands(op, bias, (kernel.shape[layout.rhs_spec[0]],), unit)
    options['strides'] = 1 if options['strides'] is None else options['strides']
    for name in ('strides', 'lhs_dilation', 'rhs_dilation'):
        if options[name] is not None:
            options[name] = each_axis('conv', name, options[name], rank)
    options['padding'] = _checked_padding(options['padding'], rank, options['lhs_dilation'])
    # Rules want the batch in front: where the layout has it elsewhere, x and y are moved.
    batch_first = layout.lhs_spec[0] == layout.out_spec[0] == 0
    options['dimension_numbers'] = tuple(numbers) if isinstance(numbers, list) else numbers
    if not batch_first:
        x = jnp.moveaxis(x, layout.lhs_spec[0], 0)
        lhs, out = (
            (0, *(axis + (axis < spec[0]) for axis in spec[1:]))
            for spec in (layout.lhs_spec, layout.out_spec)
        )
        options['dimension_numbers'] = jax.lax.ConvDimensionNumbers(lhs, layout.rhs_spec, out)
    y = primitive.bind(x, kernel, *bias, has_bias=bool(bias), **options)
    return with_unit(y if batch_first else jnp.moveaxis(y, 0, layout.out_spec[0]), unit)


def _checked_layout(x, kernel, options: dict) -> jax.lax.ConvDimensionNumbers:
    """The order of the axes, once x and kernel are of one rank and divide into the groups."""
    if kernel.ndim < 3 or x.ndim != kernel.ndim:
        hint = 'The kernel tells how many axes.'
        if x.ndim == kernel.ndim - 1:
            hint = 'Add the batch axis: `x[None]`.'
        raise EtpShapeError(
            f'conv: x has shape {x.shape} and kernel {kernel.shape}, expected (batch, channel, '
            '*spatial) and (out, in, *spatial) of one rank >= 3, in the order of '
            f'dimension_numbers. {hint}'
        )
    try:
        layout = conv_layout(options['dimension_numbers'], x.ndim)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f'conv: dimension_numbers {options["dimension_numbers"]!r} do not fit operands of rank '
            f"{x.ndim}; expected three strings like ('NHWC', 'HWIO', 'NHWC'). {error}"
        ) from error
    for name in ('feature_group_count', 'batch_group_count'):
        if not is_int(options[name], 1):
            raise OptionError(f'conv: {name} is {options[name]!r}, expected an integer >= 1.')
    feature_groups, batch_groups = options['feature_group_count'], options['batch_group_count']
    batch, channels = (x.shape[axis] for axis in layout.lhs_spec[:2])
    expected = list(kernel.shape)
    expected[layout.rhs_spec[1]] = channels // feature_groups
    why = (
        f'x of shape {x.shape} has {channels} channels in {feature_groups} group(s), in the order '
        'of dimension_numbers'
    )
    check_shape('conv', 'kernel', kernel.shape, expected, why)
    out = kernel.shape[layout.rhs_spec[0]]
    for name, size, groups in (
        ('output channels', out, feature_groups),
        ('output channels', out, batch_groups),
        ('channels', channels, feature_groups),
        ('samples', batch, batch_groups),
    ):
        if size % groups:
            raise EtpShapeError(f'conv: {size} {name} do not divide into {groups} groups.')
    return layout


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
