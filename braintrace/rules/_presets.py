"""Published rules that are values of the others."""

from __future__ import annotations

from numbers import Real

from .._errors import OptionError
from .._rules import Rule
from ._influence import rtrl
from ._traces import d_rtrl, es_d_rtrl


def ottt(leak: float) -> Rule:
    r"""OTTT: the trace of the input with the leak of the membrane, times today's D_f.

    .. math:: e_x^t = \lambda\, e_x^{t-1} + x^t \qquad \Delta w^t = (L^t \cdot D_f^t) \otimes e_x^t

    It is ``es_d_rtrl((leak, 0.))``, with :math:`\lambda` the leak, :math:`\Delta w^t` the gradient
    at t and :math:`L^t` the derivative of the loss by the new states. Exact for the matrix of a
    feed-forward layer of leaky integrate-and-fire neurons whose loss reads the spike of the new
    potential and whose reset is detached; a bias gets the current step. Memory ``B * I`` numbers
    beside today's D_f. ``leak``, in [0, 1), is the factor of the membrane in one step. Raises
    :class:`braintrace.OptionError` for another value.

    Source: Xiao et al. 2022, "Online training through time for spiking neural networks" (NeurIPS,
    arXiv 2210.04195).

    >>> import braintrace
    >>> braintrace.rules.ottt(0.9).decay
    (0.9, 0.0)
    """
    if isinstance(leak, bool) or not isinstance(leak, Real) or not 0 <= leak < 1:
        raise OptionError(
            f'leak is {leak!r}; give the factor of the membrane in one step, in [0, 1).'
        )
    return es_d_rtrl((float(leak), 0.0))


def ostl(recurrent: bool = True) -> Rule:
    """OSTL: ``rtrl(layers='each')``, the whole derivative within each layer, and nothing of what a
    layer does to another layer's later steps; with ``recurrent=False`` ``d_rtrl()``, for layers
    without recurrent weights.

    Exact for one layer. Raises :class:`braintrace.OptionError` for another value.

    Source: Bohnstingl et al. 2020, "Online spatio-temporal learning in deep neural networks"
    (arXiv 2007.12723).

    >>> import braintrace
    >>> braintrace.rules.ostl(recurrent=False) == braintrace.rules.d_rtrl()
    True
    """
    if not isinstance(recurrent, bool):
        raise OptionError(f'recurrent is {recurrent!r}; give True or False.')
    return rtrl('each') if recurrent else d_rtrl()
