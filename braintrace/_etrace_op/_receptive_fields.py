"""The receptive field of each output of a convolution, gathered by static indices.

Every option of a convolution is a choice of these indices, so the result is exact for all of them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


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
