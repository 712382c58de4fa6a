"""Convolutions over one, two or three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import brainstate
import jax
import numpy as np

from .._etrace_op import conv, each_axis
from .._signatures import ShowsArguments, is_int
from ..errors import OptionError
from ._arguments import XAVIER, Init, axes, check_input, counted, first_value, parameter
from ._docs import Documented

Sizes = int | Sequence[int]
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]


class Conv(Documented, ShowsArguments, brainstate.nn.Module):
    """A convolution over ``rank`` spatial axes."""

    shared_docs = r"""
    Parameters
    ----------
    in_size : tuple of int
        Shape of a sample: the spatial axes and the channels I, which come first with
        ``channel_first``.
    out_channels : int
        Number of output channels O.
    kernel_size, stride, lhs_dilation, rhs_dilation : int or one int for each spatial axis
        Size of the window, its step, and the dilations of input and kernel. With
        ``lhs_dilation``, which puts zeros between the positions of x, ``padding`` is numbers, not a
        name.
    padding : str, int, or an int or a pair (before, behind) for each spatial axis
        ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'``, or the number of zeros.
    groups : int
        Number of groups of channels; an output channel reads one of them.
    w_init : initializer, array or number
        Kernel W, of shape (\*kernel_size, I / groups, O).
    b_init : initializer, array, number or None
        Bias b, of shape (O,), in the unit of :math:`x W`; left out by default. It is stored with
        an axis of size 1 for each spatial one: (1, O) over one axis, (1, O, 1) with
        ``channel_first``.
    w_mask : initializer, array or None
        Mask M, which broadcasts to the kernel's shape.
    channel_first : bool
        Whether the channels come before the spatial axes.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight`` and, with a bias, ``bias``.
    out_size : tuple of int
        Shape of a sample of y.

    Raises
    ------
    OptionError
        A size, ``groups`` or ``padding`` does not fit, ``channel_first`` is no bool, or the result
        would be empty.
    EtpShapeError, EtpDtypeError, EtpUnitError
        The input is not an array of shape ``in_size`` or (B, \*in_size), or its unit does not fit
        the bias.
    """
    rank: ClassVar[int]

    def __init__(
        self,
        in_size: Sequence[int],
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 'SAME',
        lhs_dilation: Sizes = 1,
        rhs_dilation: Sizes = 1,
        groups: int = 1,
        w_init: Init = XAVIER,
        b_init: Init | None = None,
        w_mask: Init | None = None,
        channel_first: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        owner = type(self).__name__
        if not isinstance(channel_first, bool | np.bool_):
            raise OptionError(f'{owner}: channel_first is {channel_first!r}; give True or False.')
        self.in_size, self.channel_first = axes(in_size, f'{owner}: in_size'), bool(channel_first)
        self.in_channels = self._channels(groups)
        (self.out_channels,) = counted(owner, out_channels=out_channels)
        self.options = {
            'strides': each_axis(owner, 'stride', stride, self.rank),
            'padding': self._padding(padding),
            'lhs_dilation': each_axis(owner, 'lhs_dilation', lhs_dilation, self.rank),
            'rhs_dilation': each_axis(owner, 'rhs_dilation', rhs_dilation, self.rank),
            'feature_group_count': groups,
            'dimension_numbers': layout(self.rank, self.channel_first),
        }
        window = each_axis(owner, 'kernel_size', kernel_size, self.rank)
        shape = (*window, self.in_channels // groups, self.out_channels)
        masked = w_mask is not None
        self.w_mask = first_value(owner, 'w_mask', w_mask, shape, spread=True) if masked else None
        values = {'weight': first_value(owner, 'w_init', w_init, shape)}
        if b_init is not None:
            bias = first_value(owner, 'b_init', b_init, (self.out_channels,))
            ones = (1,) * self.rank  # a bias is stored so that it broadcasts to y
            stored = (1, -1, *ones) if self.channel_first else (*ones, -1)
            values['bias'] = bias.reshape(stored)
        self.weight = parameter(owner, param_type, values)
        self.out_size = self._result_shape(values['weight'])

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape ``in_size`` or (B, \\*in_size) to ``out_size`` or (B, \\*out_size)."""
        check_input(type(self).__name__, x, self.in_size)
        lead = x.ndim - len(self.in_size)
        weight, bias = self.weight.value['weight'], self.weight.value.get('bias')
        kernel = weight if self.w_mask is None else weight * self.w_mask
        bias = None if bias is None else bias.reshape((self.out_channels,))
        y = conv(x if lead else x[None], kernel, bias, **self.options)
        return y if lead else y[0]

    def _channels(self, groups: Any) -> int:
        owner, size = type(self).__name__, self.in_size
        if len(size) != self.rank + 1:
            order = 'channels, *spatial' if self.channel_first else '*spatial, channels'
            raise OptionError(
                f'{owner}: in_size is {size}; give {self.rank + 1} sizes in the order ({order}).'
            )
        channels = size[0 if self.channel_first else -1]
        if channels % counted(owner, groups=groups)[0]:
            raise OptionError(
                f'{owner}: {channels} input channels do not divide into {groups} groups.'
            )
        return channels

    def _padding(self, padding: Any) -> Any:
        """A name, or a pair for each spatial axis."""
        if isinstance(padding, str):
            return padding
        given = list(padding) if isinstance(padding, Sequence) else [padding] * self.rank
        if self.rank == 1 and len(given) == 2:
            given = [given]
        pairs = [(each, each) if is_int(each, 0) else each for each in given]
        if len(pairs) != self.rank or not all(
            isinstance(pair, Sequence) and len(pair) == 2 and all(is_int(n, 0) for n in pair)
            for pair in pairs
        ):
            raise OptionError(
                f"{type(self).__name__}: padding is {padding!r}; give 'SAME', 'SAME_LOWER', "
                "'VALID', an int from 0 up, or an int or a pair (before, behind) for each spatial "
                f'axis ({self.rank}).'
            )
        return tuple((int(low), int(high)) for low, high in pairs)

    def _result_shape(self, kernel: Any) -> tuple[int, ...]:
        x = jax.ShapeDtypeStruct((1, *self.in_size), np.float32)
        kernel = jax.ShapeDtypeStruct(kernel.shape, np.float32)
        shape = jax.eval_shape(lambda x, w: conv(x, w, **self.options), x, kernel).shape[1:]
        if 0 in shape:
            raise OptionError(
                f'{type(self).__name__}: in_size {self.in_size} gives a result of shape {shape}, '
                'which is empty. Give a smaller kernel, or more padding.'
            )
        return shape


def layout(rank: int, channel_first: bool) -> tuple[str, str, str]:
    """The ``dimension_numbers`` of ``braintrace.conv``; kernels have their channels last."""
    spatial = 'DHW'[-rank:]
    data = f'NC{spatial}' if channel_first else f'N{spatial}C'
    return data, f'{spatial}IO', data


class Conv1d(Conv):
    r"""A convolution over one axis (LeCun et al., 1989, Neural Computation 1:541), applied by
    :func:`braintrace.conv`.

    .. math:: y_{p,o} = \sum_{k,i} x_{s p + d k - l,\, i}\,(W \odot M)_{k,i,o} + b_o

    with stride s, dilation d of the kernel, and l zeros before x. As everywhere in machine
    learning the kernel is not reversed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Conv1d
    >>> layer = Conv1d((16, 3), 8, kernel_size=4, stride=2)
    >>> layer.out_size, layer(jnp.ones((16, 3))).shape, layer(jnp.ones((2, 16, 3))).shape
    ((8, 8), (8, 8), (2, 8, 8))
    """

    rank = 1


class Conv2d(Conv):
    r"""A convolution over two axes, as :class:`Conv1d` over one.

    .. math:: y_{p,q,o} = \sum_{k,l,i} x_{s_1 p + k,\, s_2 q + l,\, i}\,(W \odot M)_{k,l,i,o} + b_o

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Conv2d
    >>> layer = Conv2d((3, 28, 28), 8, kernel_size=5, padding=1, channel_first=True)
    >>> layer.out_size, layer(jnp.ones((2, 3, 28, 28))).shape
    ((8, 26, 26), (2, 8, 26, 26))
    """

    rank = 2


class Conv3d(Conv):
    r"""A convolution over three axes, as :class:`Conv1d` over one.

    .. math:: y_{p,q,r,o} = \sum_{k,l,m,i} x_{s_1 p + k,\, s_2 q + l,\, s_3 r + m,\, i}\,
        (W \odot M)_{k,l,m,i,o} + b_o

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Conv3d
    >>> layer = Conv3d((4, 8, 8, 2), 3, kernel_size=(1, 3, 3), padding='VALID')
    >>> layer.out_size, layer(jnp.ones((4, 8, 8, 2))).shape
    ((4, 6, 6, 3), (4, 6, 6, 3))
    """

    rank = 3
