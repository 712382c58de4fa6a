"""Rules whose trace is a random estimate without bias."""

from __future__ import annotations

from numbers import Integral

from .._errors import OptionError
from .._rules import OneProduct, Rule, Signs


def signs(scope: str = 'position', seed: int = 0) -> Rule:
    r"""D_RTRL, or the whole past, on average: two factors, mixed by random signs (KF-RTRL).

    .. math::
        e_x^t = s_1 p\, e_x^{t-1} + s_2 r\, x^t \qquad
        e_f^t = \frac{s_1}{p} D^t e_f^{t-1} + \frac{s_2}{r} D_f^t \qquad
        p^2 = \frac{|D^t e_f^{t-1}|}{|e_x^{t-1}|} \quad r^2 = \frac{|D_f^t|}{|x^t|}

    with norms and random signs s for each lane and relation; the gradient at t is the same-step
    gradient plus :math:`\langle dL^t/dh^{t-1},\, e_f^{t-1} \rangle \otimes e_x^{t-1}`. With
    constant weights its mean over the signs is the gradient of ``d_rtrl()``; one draw is noisy.
    Memory ``B * (I + O * S)`` numbers for a dense op.

    ``scope``: ``'position'``, the paths of D, or ``'all'``, KF-RTRL as published: D and D_f are the
    whole derivative of a step, between all N hidden numbers of a sample, the mean is the gradient
    of BPTT for every op that reaches a hidden state, in memory ``B * (I + O * N)``, and what
    ``rtrl()`` refuses is refused. ``seed``, an int, is that of the random key in the
    trace, which goes on at each step and over resets; equal seeds give equal numbers, by single
    steps and in every window. States that ``vmap`` makes share the key. Raises
    :class:`braintrace.OptionError` for other values.

    Source: Mujika et al. 2018, "Approximating real-time recurrent learning with random Kronecker
    factors" (NeurIPS, arXiv 1805.10842), with D in place of the whole Jacobian where
    ``scope='position'``.

    >>> import braintrace
    >>> braintrace.rules.signs(seed=3).seed
    3
    """
    if scope not in ('position', 'all'):
        raise OptionError(f"scope is {scope!r}; choose 'position' or 'all'.")
    return Signs(scope, _checked(seed))


def uoro(pair: str = 'sample', seed: int = 0) -> Rule:
    r"""UORO: real-time recurrent learning on average, by one random product of states and weights.

    .. math::
        s^t = r_0 J^t s^{t-1} + r_1 v^t \qquad
        m^t = \frac{m^{t-1}}{r_0} + \frac{v^t D_f^t \otimes x^t}{r_1} \qquad
        r_0^2 = \frac{|m^{t-1}|}{|J^t s^{t-1}|} \quad r_1^2 = \frac{|v^t D_f^t \otimes x^t|}{|v^t|}

    with the derivative J of the whole step and random signs v; the gradient at t is the same-step
    gradient plus :math:`\langle dL^t/dh^{t-1},\, s^{t-1} \rangle\, m^{t-1}`. With constant weights
    its mean over the signs is the gradient of BPTT for every op that reaches a hidden state; one
    draw is very noisy.

    ``pair``: ``'sample'``, a pair (s, m) for each sample, in memory ``B`` times that of the
    weights, or ``'batch'``, one for all samples, with more noise. ``seed``, an int, is that of the
    random key in the trace, which goes on at each step and over resets; equal seeds give equal
    numbers, by single steps and in every window. States that ``vmap`` makes share the key. Raises
    :class:`braintrace.OptionError` for other values, and :class:`braintrace.NotSupportedError` for
    complex hidden states.

    Source: Tallec and Ollivier 2018, "Unbiased online recurrent optimization" (ICLR, arXiv
    1702.05043).

    >>> import braintrace
    >>> braintrace.rules.uoro().name
    'UORO'
    """
    if pair not in ('sample', 'batch'):
        raise OptionError(f"pair is {pair!r}; choose 'sample' or 'batch'.")
    return OneProduct(pair, _checked(seed))


def _checked(seed: int) -> int:
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not (whole and 0 <= seed < 2**32):  # JAX keeps 32 bits of it
        raise OptionError(f'seed is {seed!r}; give an int from 0 to 2**32 - 1.')
    return int(seed)
