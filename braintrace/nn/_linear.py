"""Dense layers: a matrix over the last axis, as it is, with fixed signs, or standardised."""

from __future__ import annotations

import abc
import string
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._etrace_op import einsum, matmul
from .._signatures import ShowsArguments, is_int
from ..errors import OptionError
from ._arguments import (
    KAIMING,
    ZERO,
    Init,
    Size,
    axes_in_and_out,
    check_trailing,
    first_value,
    parameter,
)
from ._docs import Documented


def over_leading_axes(x: Any, shared: str, weight: Any, bias: Any) -> Any:
    """The einsum ``shared``, such as ``'i,io->o'``, for x with any axes before its own. The
    first one is the batch, so that each sample keeps a trace of its own.
    """
    own, others = shared.split(',')
    weights, result = others.split('->')
    free = (letter for letter in string.ascii_letters if letter not in own + weights)
    lead = ''.join(next(free) for _ in range(x.ndim - len(own)))
    return einsum(f'{lead}{own},{weights}->{lead}{result}', x, weight, bias)


class Dense(Documented, ShowsArguments, brainstate.nn.Module):
    """A matrix over the last axis: :meth:`applied` makes it of the parameter ``weight``."""

    shared_docs = r"""
    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Number of input features I and of output features O. A tuple has further sizes first, the
        same in both: the map is over the last axis.
    w_init : initializer, array or number
        Weight W, of shape (I, O).
    b_init : initializer, array, number or None
        Bias b, of shape (O,), in the unit of :math:`x W`; ``None`` leaves it out.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight`` and, with a bias, ``bias``.

    Raises
    ------
    OptionError
        A size is no positive int, the leading sizes differ, or a first value has another shape.
    EtpShapeError, EtpDtypeError, EtpUnitError
        The input is not an array of shape (..., I), or its unit does not fit the bias.
    """

    def __init__(self, in_size: Size, out_size: Size, name: str | None):
        super().__init__(name=name)
        self.in_size, self.out_size = axes_in_and_out(type(self).__name__, in_size, out_size)
        self.num_in, self.num_out = self.in_size[-1], self.out_size[-1]

    @abc.abstractmethod
    def applied(self) -> tuple[Any, Any]:
        """The matrix, of shape (I, O), and the bias, of shape (O,) or None."""

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape (..., I) to (..., O)."""
        check_trailing(type(self).__name__, x, (self.num_in,))
        weight, bias = self.applied()
        if x.ndim > 2:
            return over_leading_axes(x, 'i,io->o', weight, bias)
        return matmul(x, weight, bias)

    def _initial(self, name: str, value: Any, shape: tuple[int, ...]) -> Any:
        return first_value(type(self).__name__, name, value, shape)

    def _weight_and_bias(self, w_init: Any, b_init: Any) -> dict[str, Any]:
        values = {'weight': self._initial('w_init', w_init, (self.num_in, self.num_out))}
        if b_init is not None:
            values['bias'] = self._initial('b_init', b_init, (self.num_out,))
        return values

    def _mask(self, w_mask: Any) -> Any:
        if w_mask is None:
            return None
        shape = self.num_in, self.num_out
        return first_value(type(self).__name__, 'w_mask', w_mask, shape, spread=True)


class Linear(Dense):
    r"""A dense layer whose weight is applied by :func:`braintrace.matmul`.

    .. math:: y = x\,(W \odot M) + b

    Parameters
    ----------
    w_mask : initializer, array or None
        Mask M, which broadcasts to (I, O). The weight's gradient passes through the product.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Linear
    >>> layer = Linear(10, 5)
    >>> layer(jnp.ones(10)).shape, layer(jnp.ones((32, 7, 10))).shape
    ((5,), (32, 7, 5))
    >>> sorted(layer.weight.value)
    ['bias', 'weight']
    >>> Linear((7, 10), (7, 5)).out_size
    (7, 5)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        w_mask: Init | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        self.w_mask = self._mask(w_mask)
        self.weight = parameter('Linear', param_type, self._weight_and_bias(w_init, b_init))

    def applied(self) -> tuple[Any, Any]:
        """:math:`W \\odot M` and b."""
        value = self.weight.value
        return masked(value['weight'], self.w_mask), value.get('bias')


class SignedWLinear(Dense):
    r"""A dense layer whose synapses are excitatory or inhibitory for good (Dale's law, as in Song,
    Yang & Wang, 2016, PLOS Computational Biology 12:e1004792, with :math:`|W|` for their
    rectified weight).

    .. math:: y = x\,(|W| \odot S \odot M) \qquad S_{ij} \in \{+1, -1\}

    No update changes a sign: a W that steps through zero comes back as a larger :math:`|W|`. At
    zero :math:`|W|` has the slope +1, so that an entry of 0 can learn.

    Parameters
    ----------
    w_init : initializer, array or number
        W, of shape (I, O). The signs that an initializer draws do not count; an array must have
        those of S.
    w_sign : array or None
        S, which broadcasts to (I, O): shape (I, 1) gives all synapses of an input one sign. By
        default all are +1.
    w_mask : initializer, array or None
        Mask M, which broadcasts to (I, O): which synapses there are. Where it is 0 nothing grows;
        a W that is 0 elsewhere is a synapse that can. (:class:`SparseLinear` with ``w_sign`` stores
        and traces the synapses alone.)

    Attributes
    ----------
    weight : brainstate.ParamState
        W, an array.

    Raises
    ------
    OptionError
        ``w_sign`` has an entry other than +1 and -1 or does not broadcast to (I, O), or an array
        ``w_init`` has an entry of the other sign.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import SignedWLinear
    >>> layer = SignedWLinear(2, 3, w_sign=jnp.array([[1], [-1]]))
    >>> bool((layer(jnp.array([1., 0.])) > 0).all()), bool((layer(jnp.array([0., 1.])) < 0).all())
    (True, True)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        w_sign: Any = None,
        w_mask: Init | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        self.w_mask = self._mask(w_mask)
        weight = self._initial('w_init', w_init, (self.num_in, self.num_out))
        if w_sign is not None and np.shape(w_sign) == weight.shape[:1] != weight.shape[1:]:
            raise OptionError(
                f'SignedWLinear: w_sign has shape {np.shape(w_sign)}; give the shape '
                f'{(self.num_in, 1)} for one sign of each input.'
            )
        self.w_sign = None
        if w_sign is not None:
            self.w_sign = checked_signs('SignedWLinear', w_sign, weight.shape)
        if not callable(w_init):
            check_signs_of('SignedWLinear', 'w_init', u.get_magnitude(weight), self.w_sign)
        self.weight = parameter('SignedWLinear', param_type, weight)

    def applied(self) -> tuple[Any, Any]:
        """:math:`|W| \\odot S \\odot M`, and no bias."""
        return masked(signed(self.weight.value, self.w_sign), self.w_mask), None


def masked(weight: Any, mask: Any) -> Any:
    """``weight * mask`` in the type of the weight."""
    return weight if mask is None else weight * mask.astype(u.get_magnitude(weight).dtype)


def signed(weight: Any, sign: Any) -> Any:
    """The size of a weight, with the slope +1 at 0, times its sign."""
    return masked(u.math.where(u.get_magnitude(weight) < 0, -weight, weight), sign)


def checked_signs(owner: str, w_sign: Any, shape: tuple[int, ...]) -> jax.Array:
    """``w_sign`` as an array of +1 and -1 that broadcasts to ``shape``."""
    found = np.asarray(first_value(owner, 'w_sign', w_sign, shape, spread=True))
    if len(wrong := np.argwhere(np.abs(found) != 1)):
        at = tuple(wrong[0].tolist())
        raise OptionError(
            f'{owner}: w_sign is {found[at]:g} at {at} of the weight; each sign is +1 or -1.'
        )
    return jnp.asarray(found, jnp.int8)


def check_signs_of(owner: str, name: str, weight: Any, sign: Any) -> None:
    """Refuse a weight with an entry of the other sign."""
    wrong = np.argwhere(np.asarray(weight) * (1 if sign is None else np.asarray(sign)) < 0)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        due = 1 if sign is None else int(sign[at])
        raise OptionError(
            f'{owner}: {name} is {weight[at]} at {at}, where w_sign is {due:+d}. Give weights of '
            f'that sign, `jax.numpy.abs({name}) * w_sign`, or w_sign=-1 for inhibition.'
        )


class ScaledWSLinear(Dense):
    r"""A dense layer with a standardised weight (Qiao et al., 2019, arXiv:1903.10520), scaled by
    the fan-in and with a gain (Brock et al., 2021, arXiv:2101.08692).

    .. math::
        y = x\,(\hat W \odot M) + b \qquad
        \hat W_{ij} = g_j\, \frac{W_{ij} - \mu_j}{\sqrt{\max(I\,\sigma_j^2, \epsilon)}}

    with the mean :math:`\mu_j` and the variance :math:`\sigma_j^2` of the I weights of output j. So
    they have mean 0 and variance :math:`g_j^2 / I`, in the unit of W.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Number of input features I, at least 2, and of output features O, as of :class:`Linear`.
    w_init : initializer, array or number
        W, of shape (I, O).
    w_mask : initializer, array or None
        Mask M, which broadcasts to (I, O); it counts after the standardisation.
    ws_gain : bool
        Whether g, of shape (1, O) and 1 at first, is trained; without it g is 1.
    eps : float
        :math:`\epsilon`, in the squared unit of W.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight``, with a bias ``bias`` and with a gain ``gain``.

    Raises
    ------
    OptionError
        There is one input, whose standardised weight would be 0, or ``eps`` is not positive.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import ScaledWSLinear
    >>> layer = ScaledWSLinear(10, 5)
    >>> layer(jnp.ones((32, 10))).shape, sorted(layer.weight.value)
    ((32, 5), ['bias', 'gain', 'weight'])
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        w_mask: Init | None = None,
        ws_gain: bool = True,
        eps: float = 1e-4,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        if not is_int(self.num_in, 2):
            raise OptionError(
                'ScaledWSLinear: in_size is 1; a standardised weight of one input is always 0. '
                'Give at least 2 inputs, or use Linear.'
            )
        if not (isinstance(eps, int | float) and eps > 0):
            raise OptionError(f'ScaledWSLinear: eps is {eps!r}; give a number larger than 0.')
        self.eps, self.w_mask = eps, self._mask(w_mask)
        values = self._weight_and_bias(w_init, b_init)
        if ws_gain:
            values['gain'] = self._initial('gain', 1.0, (1, self.num_out))
        self.weight = parameter('ScaledWSLinear', param_type, values)

    def applied(self) -> tuple[Any, Any]:
        """:math:`\\hat W \\odot M` and b."""
        value = self.weight.value
        weight, unit = u.split_mantissa_unit(value['weight'])
        centred = weight - weight.mean(0, keepdims=True)
        scale = jnp.sqrt(
            jnp.maximum(self.num_in * jnp.square(centred).mean(0, keepdims=True), self.eps)
        )
        weight = value.get('gain', 1.0) * centred / scale
        weight = weight if unit == u.UNITLESS else u.Quantity(weight, unit=unit)
        return masked(weight, self.w_mask), value.get('bias')
