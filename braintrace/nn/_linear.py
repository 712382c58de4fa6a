"""The dense layer."""

from __future__ import annotations

from typing import Any

import brainstate
from brainstate.nn import init

from .._etrace_op import matmul
from .._signatures import ShowsArguments
from ._arguments import KAIMING, ZERO, Init, Size, check_input, features

__all__ = ['Linear']


class Linear(ShowsArguments, brainstate.nn.Module):
    r"""A dense layer whose weight is applied by :func:`braintrace.matmul`.

    .. math:: y = x\,(W \odot M) + b

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of output features O.
    w_init : initializer or array
        Weight W, of shape (I, O).
    b_init : initializer, array or None
        Bias b, of shape (O,); ``None`` leaves it out.
    w_mask : initializer, array or None
        Mask M, of shape (I, O). The weight's gradient passes through the product.
    name : str, optional
        Name of the module.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight`` and, with a bias, ``bias``.

    Raises
    ------
    OptionError
        A size is not one positive int.
    EtpShapeError, EtpDtypeError
        The input is not an array of shape (I,) or (B, I).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Linear
    >>> layer = Linear(10, 5)
    >>> layer(jnp.ones(10)).shape, layer(jnp.ones((32, 10))).shape
    ((5,), (32, 5))
    >>> sorted(layer.weight.value)
    ['bias', 'weight']
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        w_mask: Init | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.num_in = features(in_size, 'Linear: in_size')
        self.num_out = features(out_size, 'Linear: out_size')
        self.in_size, self.out_size = (self.num_in,), (self.num_out,)
        shape = self.num_in, self.num_out
        self.w_mask = init.param(w_mask, shape)
        parameters = {'weight': init.param(w_init, shape, allow_none=False, allow_scalar=False)}
        if b_init is not None:
            parameters['bias'] = init.param(b_init, (self.num_out,), allow_scalar=False)
        self.weight = brainstate.ParamState(parameters)

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape (I,) or (B, I) to (O,) or (B, O)."""
        check_input('Linear', x, self.num_in)
        weight = self.weight.value['weight']
        masked = weight if self.w_mask is None else weight * self.w_mask
        return matmul(x, masked, self.weight.value.get('bias'))
