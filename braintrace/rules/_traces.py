"""Rules that keep a trace of each parameter, and the rule that keeps none."""

from __future__ import annotations

from numbers import Integral, Real

import jax.numpy as jnp

from .._errors import OptionError
from .._rules import DRTRL, ESDRTRL, MOST_PENDING, NoHistory, Rule, View
from .._signatures import refuses

CREDITS = ('cut', 'whole')
SCOPES = ('position', 'own')


def d_rtrl(
    trace_dtype=None,
    write_every: int | None = None,
    credit: str = 'cut',
    scope: str = 'position',
) -> Rule:
    r"""D-RTRL: one trace entry for each parameter entry, sample and hidden state.

    .. math:: e^t = D^t e^{t-1} + D_f^t \otimes x^t

    The gradient at t is the same-step gradient plus
    :math:`\langle dL^t/dh^{t-1},\, e^{t-1} \rangle`. Memory ``B * I * O * S`` numbers for a dense
    op.

    ``credit``: the signal ``dL^t/dh^{t-1}`` flows where the trace does (``'cut'``, the published
    rule), or along every path of the step (``'whole'``), at the same cost. With the same trace the
    second is nearer to the gradient of BPTT, since the last step of each path is then exact.

    ``scope``: what an element of y keeps a trace of. ``'position'``: its position, along
    position-wise paths. ``'own'``: also what that position reads of itself through the op, its own
    recurrent weight ``dy_q/dx_k`` in ``D`` (the trace of SnAp-1, see :func:`snap`); the size of the
    trace is the same, and no op may be non-linear in its input.

    ``trace_dtype`` is the dtype in which traces are stored, such as ``jnp.bfloat16`` for half the
    memory; sums are made in the dtype of the weights, and each write rounds. By default, and always
    for complex traces, it is the weights' own dtype, complex for a complex state. The state holds
    bfloat16 as its bits in uint16 arrays, which XLA reads faster; ``get_etrace_of`` shows the
    numbers.

    ``write_every`` is the number of single steps after which the trace is written; until then the
    state holds the steps' factors, and every gradient is the same. By default it is chosen from the
    shapes, 1 for a trace below 4 MiB. Raises :class:`braintrace.OptionError` for a dtype that is no
    float and for a wrong number of steps.

    Source: Wang et al. 2026, "Model-agnostic linear-memory online learning in spiking neural
    networks", Nat. Commun. 17:1745; the split into same-step and history part, and what ``credit``
    and ``scope`` change, are explained in ``docs/design.md``.

    >>> import braintrace
    >>> braintrace.rules.d_rtrl().name
    'D_RTRL'
    """
    if write_every is not None and (
        isinstance(write_every, bool)
        or not isinstance(write_every, Integral)
        or not 1 <= write_every <= MOST_PENDING
    ):
        raise OptionError(
            f'write_every is {write_every!r}; give a number of steps from 1 to {MOST_PENDING}.'
        )
    for name, value, allowed in (('credit', credit, CREDITS), ('scope', scope, SCOPES)):
        if value not in allowed:
            raise OptionError(f'{name} is {value!r}; choose {allowed[0]!r} or {allowed[1]!r}.')
    view = View(own=scope == 'own')
    if trace_dtype is None:
        return DRTRL(None, write_every, credit, view=view)
    try:
        dtype = jnp.dtype(trace_dtype)
    except TypeError as e:
        raise OptionError(
            f'trace_dtype is {trace_dtype!r}; give a dtype such as jax.numpy.bfloat16.'
        ) from e
    if not jnp.issubdtype(dtype, jnp.floating):
        raise OptionError(
            f'trace_dtype is {dtype}; give a float dtype, such as jax.numpy.bfloat16.'
        )
    return DRTRL(dtype, write_every, credit, view=view)


@refuses('es_d_rtrl', **ESDRTRL.refused)
def es_d_rtrl(decay_or_rank: float | int | tuple[float | int, float | int]) -> Rule:
    r"""ES-D-RTRL (pp-prop): a trace of the input's size and a trace of the output's size.

    .. math::
        e_x^t = a_x\, e_x^{t-1} + x^t \qquad
        e_f^t = a_f\, D^t e_f^{t-1} + (1 - a_f)\, D_f^t

    The gradient at t is :math:`\left(L^t \cdot e_f^t / (1 - a_f^{t+1})\right) \otimes e_x^t` plus
    the same-step part that does not pass the relation's groups, with :math:`L^t` the derivative of
    the loss by the new states. Memory ``B * (I + O * S)`` numbers for a dense op. At the first step
    after a reset it is the gradient of BPTT; from the second on it is an approximation. ``L^t``
    belongs to new states: history that reaches the loss from an old state directly (an output made
    of ``h^{t-1}``, a spike read before the reset) is left out.

    ``decay_or_rank``: a float is the decay ``a_x = a_f`` in [0, 1); an int is a rank ``r >= 1`` and
    means the decay ``(r - 1) / (r + 1)``; a pair ``(a_x, a_f)`` has a decay for each. With decay 0,
    rank 1, each gradient is the same-step gradient alone, without any history. Raises
    :class:`braintrace.OptionError` (a ``ValueError``) for other values.

    After Wang et al. 2026, the source of :func:`d_rtrl`; the same-step part is the split of
    ``docs/design.md``.

    >>> import braintrace
    >>> braintrace.rules.es_d_rtrl(19).decay
    0.9
    >>> braintrace.rules.es_d_rtrl((0.9, 0.5)).decay
    (0.9, 0.5)
    """
    if isinstance(decay_or_rank, tuple):
        return _of_pair(decay_or_rank)
    if isinstance(decay_or_rank, bool) or not isinstance(decay_or_rank, Real):
        raise OptionError(
            f'decay_or_rank is {decay_or_rank!r}; give a float decay in [0, 1), an int rank >= 1, '
            'or a pair (a_x, a_f) of decays.'
        )
    if isinstance(decay_or_rank, Integral):
        if decay_or_rank < 1:
            raise OptionError(
                f'rank is {decay_or_rank}; a rank is an int >= 1 (a decay is a float in [0, 1)).'
            )
        return ESDRTRL((int(decay_or_rank) - 1) / (int(decay_or_rank) + 1))
    if not 0 <= decay_or_rank < 1:
        raise OptionError(
            f'decay is {decay_or_rank}; a decay is a float in [0, 1) (a rank is an int >= 1).'
        )
    return ESDRTRL(float(decay_or_rank))


def _of_pair(decays: tuple) -> Rule:
    """ES-D-RTRL with two decays; equal ones are one."""
    numbers = all(isinstance(a, Real) and not isinstance(a, bool) for a in decays)
    if not numbers or len(decays) != 2 or not all(0 <= a < 1 for a in decays):
        raise OptionError(
            f'the decays are {decays!r}; give a pair (a_x, a_f) of numbers in [0, 1), that of the '
            'input and that of the output.'
        )
    a_x, a_f = map(float, decays)
    return ESDRTRL(a_x if a_x == a_f else (a_x, a_f))


def same_step() -> Rule:
    """No trace: every gradient holds the current step only, ``x (x) dy`` (SnAp-n with n = 0).

    The cheapest baseline: one reverse pass for each step and no memory. Source: Shalev Merin 2026,
    "Immediate derivatives suffice for online recurrent adaptation" (arXiv 2603.28750).

    >>> import braintrace
    >>> braintrace.rules.same_step().name
    'same_step'
    """
    return NoHistory()
