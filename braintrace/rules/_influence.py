"""Rules whose trace follows what one position reads of another."""

from __future__ import annotations

from numbers import Integral

from .._errors import OptionError
from .._rules import EveryPath, Reach, Rule
from ._traces import d_rtrl

LAYERS = ('joint', 'each')


def rtrl(layers: str = 'joint', keep: int | None = None, seed: int = 0) -> Rule:
    r"""Real-time recurrent learning: the gradient of BPTT, online.

    .. math:: e^t = J^t e^{t-1} + D_f^t \otimes x^t \qquad J^t = \frac{dh^t}{dh^{t-1}}

    with the whole derivative J of a step, of all N hidden numbers of a lane; the gradient at t is
    the same-step gradient plus :math:`\langle dL^t/dh^{t-1},\, e^{t-1} \rangle`. Ops behind other
    ops, behind norms and in other layers have a trace too. Memory ``B * N * I * O`` numbers for a
    dense op and N times the work of D-RTRL, and N reverse passes for each step: for N up to about
    100, and to judge other rules by. Plain recurrent weights (``h @ U`` beside an op) are followed,
    and keep their same-step gradient.

    ``layers='each'`` keeps of each op only the hidden numbers of the groups that it reaches by a
    path through no other group's new state: smaller, and without what a layer does to another
    layer's later steps. ``keep=k``: of each row of J only k entries, drawn once by ``seed``, carry
    the trace on; biased, and exact where k is N.

    Raises :class:`braintrace.OptionError` for other values, and
    :class:`braintrace.NotSupportedError` when a step is compiled with complex hidden states, ops in
    a loop that is not unrolled, or lanes that read one another.

    Source: Williams and Zipser 1989, "A learning algorithm for continually running fully recurrent
    neural networks", Neural Computation 1:270. ``keep`` is after Shalev Merin 2026, "Massive
    redundancy in gradient transport enables sparse online learning" (arXiv 2603.15195).

    >>> import jax, jax.numpy as jnp, braintrace
    >>> def cell(params, h, x):
    ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    ...     return h, h
    >>> learner = braintrace.functional.online(cell, braintrace.rules.rtrl())
    >>> state = learner.init({'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3)), jnp.ones((1, 2)))
    >>> state.trace['W']['carry']['weight'].shape  # (B, N, I, O)
    (1, 3, 5, 3)
    """
    if layers not in LAYERS:
        raise OptionError(f"layers is {layers!r}; give 'joint' or 'each'.")
    if keep is not None and not (_is_int(keep) and keep >= 1):
        raise OptionError(
            f'keep is {keep!r}; give an int from 1 to the number of hidden numbers in a lane, or '
            'None for all.'
        )
    if not (_is_int(seed) and seed >= 0):
        raise OptionError(f'seed is {seed!r}; give an int >= 0.')
    return EveryPath(layers, None if keep is None else int(keep), int(seed))


def snap(n: int, credit: str = 'whole') -> Rule:
    r"""SnAp-n: an element of an op's result keeps what it changes within n steps.

    .. math:: e_q^t = J^t_{N_q, N_q}\, e_q^{t-1} + D^t_{f,\,N_q, q} \otimes x^t

    for element q, where the K_q hidden numbers N_q are those that q reaches within n steps by the
    structure of the cell (zeros of constant masks and sparse ops count), inside its own group of
    hidden states. Memory ``B * I * sum_q K_q``
    numbers for a dense op. Equal to BPTT within a layer where N_q is all that q ever reaches: for a
    dense layer from n = 2 on, and for a sparse layer the error falls with each n.

    ``snap(1)`` is ``d_rtrl(credit='whole', scope='own')``, in the size of D-RTRL's trace.

    Source: Menick et al. 2021, "Practical real time recurrent learning with a sparse approximation"
    (ICLR, arXiv 2006.07232). Here N_q stays inside the group, and the signal ``dL/dh'`` flows along
    every path of the step, which makes gradients one exact step nearer to BPTT.

    Raises :class:`braintrace.OptionError` for other values, and
    :class:`braintrace.NotSupportedError` as :func:`rtrl` does.

    >>> import braintrace
    >>> braintrace.rules.snap(2).name
    'SnAp'
    """
    if not _is_int(n) or n < 1:
        raise OptionError(f'n is {n!r}; give an int >= 1 (same_step() is SnAp-0).')
    if credit != 'whole':
        raise OptionError(f"credit is {credit!r}; snap(n) has credit='whole'.")
    if n == 1:
        return d_rtrl(credit='whole', scope='own')
    return Reach(int(n))


def _is_int(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
