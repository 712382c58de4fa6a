"""The static parameters of an op, as far as the verifier's formulas need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ['options_of']


def options_of(
    primitive: str, params: Mapping[str, Any], x: tuple | None, weights: Mapping[str, tuple]
) -> dict[str, Any]:
    """The ``options`` of a relation; ``params`` with the arrays of the structure, ``x`` and
    ``weights`` are shapes.

    >>> options_of('etp_lora_mm', {'alpha': 2.0, 'has_bias': False}, (4, 3), {})
    {'alpha': 2.0}
    """
    if primitive == 'etp_conv' and x is not None:
        return _conv(params, x, weights['weight'])
    if primitive in ('etp_sp_mm', 'etp_sp_mv'):
        indices = {name: np.asarray(params[name]).tolist() for name in ('rows', 'columns')}
        return {**indices, 'shape': list(params['shape'])}
    found = {name: params[name] for name in ('alpha', 'equation') if name in params}
    return {name: value for name, value in found.items() if isinstance(value, float | str)}


def _conv(params: Mapping[str, Any], x: tuple, kernel: tuple) -> dict[str, Any]:
    """With each default and each name of a padding or of a layout spelled out."""
    layout = jax.lax.conv_dimension_numbers(x, kernel, params['dimension_numbers'])
    window = [kernel[axis] for axis in layout.rhs_spec[2:]]
    strides, ones = params['strides'], (1,) * len(window)
    apart, taps = (params[name] or ones for name in ('lhs_dilation', 'rhs_dilation'))
    padding = params['padding']
    if isinstance(padding, str):
        sizes = [x[axis] for axis in layout.lhs_spec[2:]]
        reach = [(n - 1) * step + 1 for n, step in zip(window, taps, strict=True)]
        padding = jax.lax.padtype_to_pads(sizes, reach, strides, padding)
    return {
        'strides': list(strides),
        'padding': [[int(low), int(high)] for low, high in padding],
        'lhs_dilation': list(apart),
        'rhs_dilation': list(taps),
        'feature_group_count': params['feature_group_count'],
        'batch_group_count': params['batch_group_count'],
        'dimension_numbers': [list(axes) for axes in layout],
    }
