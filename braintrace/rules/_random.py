"""Rules whose trace is a random estimate without bias."""

from __future__ import annotations

from numbers import Integral

from .._errors import OptionError
from .._rules import UORO, Rule, Signs

__all__ = ['signs', 'uoro']


def signs(scope: str = 'position', seed: int = 0) -> Rule:
    """D_RTRL, or the whole past, on average: two factors, mixed by random signs (KF-RTRL).

    ``ex^t = s1 p ex^{t-1} + s2 r x^t``, ``ef^t = s1/p D^t ef^{t-1} + s2/r D_f^t`` with ``p^2 = |D
    ef|/|ex|`` and ``r^2 = |D_f|/|x|``, norms and signs for each lane and relation; the gradient at
    t is the same-step gradient plus ``ex^{t-1} (x) < dL^t/dh^{t-1}, ef^{t-1} >``. With constant
    weights its mean over the signs is the gradient of ``d_rtrl()``; one draw is noisy. Memory ``B *
    (I + O * S)`` numbers for a dense op.

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
    """UORO: real-time recurrent learning on average, by one random product of states and weights.

    ``s^t = r0 J^t s^{t-1} + r1 v^t``, ``m^t = m^{t-1}/r0 + (v^t D_f^t (x) x^t)/r1`` with ``J =
    dh/dh'`` of the whole step, random signs v, ``r0^2 = |m|/|J s|`` and ``r1^2 = |v D_f (x)
    x|/|v|``; the gradient at t is the same-step gradient plus ``< dL^t/dh^{t-1}, s^{t-1} >
    m^{t-1}``. With constant weights its mean over the signs is the gradient of BPTT for every op
    that reaches a hidden state; one draw is very noisy.

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
    return UORO(pair, _checked(seed))


def _checked(seed: int) -> int:
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not (whole and 0 <= seed < 2**32):  # JAX keeps 32 bits of it
        raise OptionError(f'seed is {seed!r}; give an int from 0 to 2**32 - 1.')
    return int(seed)
