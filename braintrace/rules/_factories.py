"""The rules by name: functions that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Literal, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from .._rules import (
    DRTRL,
    ESDRTRL,
    ByPart,
    Feedback,
    NoHistory,
    Parts,
    Rule,
    View,
    checked,
    in_text,
)
from .._signatures import public, refuses
from ..errors import OptionError
from ..extra._wide import EveryPath, OneProduct, Reach, Signs

Args = ParamSpec('Args')


def _preset(make: Callable[Args, Rule]) -> Callable[Args, Rule]:
    """A factory of values of other rules, which are shown as the call that was written."""
    signature = inspect.signature(make)

    @wraps(make)
    def made(*args: Args.args, **kwargs: Args.kwargs) -> Rule:
        rule, given = make(*args, **kwargs), []
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            default, value = signature.parameters[name].default, in_text(value)
            if default is inspect.Parameter.empty:
                given.append(repr(value))
            elif value != default:
                given.append(f'{name}={value!r}')
        return rule.called(f'{make.__name__}({", ".join(given)})')

    return made


# traces -------------------------------------------------------------------------------------------
#
# Rules that keep a trace of each parameter, and the rule that keeps none.


CREDITS = ('cut', 'whole')
SCOPES = ('position', 'own')


@public('braintrace.rules.d_rtrl')
def d_rtrl(
    trace_dtype=None,
    credit: Literal['cut', 'whole'] = 'cut',
    scope: Literal['position', 'own'] = 'position',
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
    memory; sums are made in single precision at least, and each write rounds. In 16 bits it rounds
    up or down by chance, which is the same in every run: a slow trace is right on average, and a
    number of it off by some percent, as the report says. By default, and always for complex traces,
    it is the wider dtype of the parameters and the states, complex for a complex state, also where
    products are made in fewer bits. The state holds bfloat16 as its bits in uint16 arrays, which
    XLA reads faster; ``get_etrace_of`` shows the numbers.

    Entries are kept of the states that an op reaches and that something reads one step later: of
    an LSTM's c, not of its h. Where an op reaches others too, and where the trace takes 4 MiB or
    more, the state holds the factors of the newest step beside it, which the next step writes.
    Raises :class:`braintrace.errors.OptionError` for a dtype that is no float.

    Source: Wang et al. 2026, "Model-agnostic linear-memory online learning in spiking neural
    networks", Nat. Commun. 17:1745; the split into same-step and history part, and what ``credit``
    and ``scope`` change, are explained in ``docs/design.md``.

    >>> import braintrace
    >>> braintrace.rules.d_rtrl().name
    'D_RTRL'
    """
    for name, value, allowed in (('credit', credit, CREDITS), ('scope', scope, SCOPES)):
        if value not in allowed:
            raise OptionError(f'{name} is {value!r}; choose {allowed[0]!r} or {allowed[1]!r}.')
    view = View(scope)
    if trace_dtype is None:
        return DRTRL(None, credit, view=view)
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
    return DRTRL(dtype, credit, view=view)


@refuses('es_d_rtrl', **ESDRTRL.refused)
@public('braintrace.rules.es_d_rtrl')
def es_d_rtrl(
    decay_or_rank: float | int | jax.Array | tuple[float | jax.Array, float | jax.Array],
) -> Rule:
    r"""ES-D-RTRL (pp-prop): a trace of the input's size and a trace of the output's size.

    .. math::
        e_x^t = a_x\, e_x^{t-1} + x^t \qquad
        e_f^t = a_f\, D^t e_f^{t-1} + (1 - a_f)\, D_f^t

    The gradient at t is :math:`\left(L^t \cdot e_f^t / (1 - a_f^{t+1})\right) \otimes e_x^t` plus
    the same-step part that does not pass the relation's groups, with :math:`L^t` the derivative of
    the loss by the new states. Memory ``B * (I + O * S)`` numbers for a dense op. At the first step
    after a reset it is the gradient of BPTT; from the second on it is an approximation. ``L^t``
    belongs to new states: history that reaches the loss from an old state directly (an output made
    of ``h^{t-1}``, a spike read before the reset) is left out, but for one that moves on to be the
    new value of another state, as in a delay line.

    ``decay_or_rank``: a float is the decay ``a_x = a_f`` in [0, 1); an int is a rank ``r >= 1`` and
    means the decay ``(r - 1) / (r + 1)``; a pair ``(a_x, a_f)`` has a decay for each. With decay 0,
    rank 1, each gradient is the same-step gradient alone, without any history.

    A decay may be a float array of shape (), which ``jax.vmap`` maps over and ``jax.grad`` follows,
    and may differ from step to step, also in :math:`1 - a_f^{t+1}`: make the rule where the number
    is known. Two such rules are equal where they are one, and a saved state goes on under any
    number. A traced array is not checked. Raises :class:`braintrace.errors.OptionError` (a
    ``ValueError``) for other values.

    After Wang et al. 2026, the source of :func:`d_rtrl`; the same-step part is the split of
    ``docs/design.md``.

    >>> import braintrace
    >>> braintrace.rules.es_d_rtrl(19).decay
    0.9
    >>> braintrace.rules.es_d_rtrl((0.9, 0.5)).decay
    (0.9, 0.5)
    >>> import jax.numpy as jnp
    >>> braintrace.rules.es_d_rtrl(jnp.array(0.9))
    es_d_rtrl(moving)
    """
    if isinstance(decay_or_rank, tuple):
        return _of_pair(decay_or_rank)
    number = isinstance(decay_or_rank, Real | jax.Array | np.ndarray)
    if isinstance(decay_or_rank, bool) or not number:
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
    if (decay := checked('decay', decay_or_rank)) is None:
        raise OptionError(
            f'decay is {decay_or_rank}; a decay is a float in [0, 1) (a rank is an int >= 1).'
        )
    return ESDRTRL(decay)


def _of_pair(decays: tuple) -> Rule:
    """ES-D-RTRL with two decays; equal ones are one."""
    found = [a for each in decays if (a := checked('decay', each)) is not None]
    if not len(found) == len(decays) == 2:
        raise OptionError(
            f'the decays are {decays!r}; give a pair (a_x, a_f) of numbers in [0, 1), that of the '
            'input and that of the output.'
        )
    a_x, a_f = found
    return ESDRTRL(a_x if a_x == a_f else (a_x, a_f))


@public('braintrace.rules.same_step')
def same_step() -> Rule:
    """No trace: every gradient holds the current step only, ``x (x) dy`` (SnAp-n with n = 0).

    The cheapest baseline: one reverse pass for each step and no memory. Source: Shalev Merin 2026,
    "Immediate derivatives suffice for online recurrent adaptation" (arXiv 2603.28750).

    >>> import braintrace
    >>> braintrace.rules.same_step().name
    'same_step'
    """
    return NoHistory()


# feedback -----------------------------------------------------------------------------------------
#
# Rules whose signal is filtered, or goes back through other weights.


@public('braintrace.rules.e_prop')
@_preset
def e_prop(
    kappa: float | jax.Array | Literal['auto'] = 0.0,
    feedback: Literal['symmetric', 'random', 'adaptive'] | Feedback = 'symmetric',
) -> Rule:
    r"""e-prop: ``d_rtrl().filtered(kappa)``, with the error sent back as ``feedback`` says.

    .. math::
        e^t = D^t e^{t-1} + D_f^t \otimes x^t \qquad
        \bar e^t = \kappa\, \bar e^{t-1} + \frac{dz^t}{dw} \qquad
        \frac{dL}{dw} \approx \sum_t B^\top \frac{dL^t}{dy^t} \cdot \bar e^t

    with z what the readouts read and y their results. ``kappa`` is the leak of the readout,
    ``exp(-dt / tau)`` of a :class:`braintrace.nn.LeakyRateReadout`, and 0 without one or with a
    :class:`braintrace.nn.FilteredReadout`, which filters by itself; ``'auto'`` finds it, and it
    may be an array as in :func:`es_d_rtrl`.
    ``feedback``: ``'symmetric'`` (B is the readout's W), ``'random'``, ``'adaptive'``, or a
    :class:`braintrace.Feedback`. Memory ``B * I * O * (S + 1)`` numbers for a dense op. Raises
    :class:`braintrace.errors.OptionError` as the modifiers of a rule do.

    Source: Bellec et al. 2020, "A solution to the learning dilemma for recurrent networks of
    spiking neurons", Nat. Commun. 11:3625.

    >>> import braintrace
    >>> rule = braintrace.rules.e_prop(0.9, 'random')
    >>> rule.view.kappa, rule.view.feedback.kind
    (0.9, 'random')
    """
    rule = d_rtrl().filtered(kappa)
    if feedback == 'symmetric':
        return rule
    if isinstance(feedback, str):
        feedback = Feedback(feedback)
    if not isinstance(feedback, Feedback):
        raise OptionError(
            f"feedback is {feedback!r}; choose 'symmetric', 'random' or 'adaptive', or give a "
            'braintrace.Feedback.'
        )
    return rule.with_feedback(feedback)


@public('braintrace.rules.rflo')
@_preset
def rflo() -> Rule:
    """Random-feedback local online learning: ``d_rtrl()`` with random feedback at the readouts.

    On ``h^t = a h^{t-1} + (1 - a) tanh(y^t)`` D is the leak a, and this is the published rule; on a
    cell without a leak it is the same-step gradient. Source: Murray 2019, "Local online learning in
    recurrent networks with random feedback", eLife 8:e43299.

    >>> import braintrace
    >>> braintrace.rules.rflo() == braintrace.rules.e_prop(feedback='random')
    True
    """
    return d_rtrl().with_feedback(Feedback('random'))


@public('braintrace.rules.otpe')
@_preset
def otpe(leak: float | jax.Array) -> Rule:
    """``d_rtrl().filtered(leak)``: the trace of each spike is filtered by the leak of the next
    layer.

    Exact for one hidden layer under a leaky readout. After Summe et al. 2023, "Estimating
    post-synaptic effects for online training of feed-forward SNNs" (arXiv 2311.16151), who estimate
    what a spike does to the next layer; this formula of it is the library's own, theirs may differ.
    ``leak`` may be an array as in :func:`es_d_rtrl`. Raises
    :class:`braintrace.errors.OptionError` for one outside [0, 1).

    >>> import braintrace
    >>> braintrace.rules.otpe(0.9) == braintrace.rules.d_rtrl().filtered(0.9)
    True
    """
    return d_rtrl().filtered(leak)


# influence of wider scope -------------------------------------------------------------------------
#
# Rules whose trace follows what one position reads of another.


LAYERS = ('joint', 'each')


@public('braintrace.rules.rtrl')
def rtrl(
    layers: Literal['joint', 'each'] = 'joint', keep: int | None = None, seed: int = 0
) -> Rule:
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

    Raises :class:`braintrace.errors.OptionError` for other values, and
    :class:`braintrace.errors.NotSupportedError` when a step is compiled with complex hidden states,
    ops in a loop that is not unrolled, or lanes that read one another.

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


@public('braintrace.rules.snap')
def snap(n: int) -> Rule:
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

    Raises :class:`braintrace.errors.OptionError` for other values, and
    :class:`braintrace.errors.NotSupportedError` as :func:`rtrl` does.

    >>> import braintrace
    >>> braintrace.rules.snap(2).name
    'SnAp'
    """
    if not _is_int(n) or n < 1:
        raise OptionError(f'n is {n!r}; give an int >= 1 (same_step() is SnAp-0).')
    if n == 1:
        return d_rtrl(credit='whole', scope='own')
    return Reach(int(n))


def _is_int(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# random projections -------------------------------------------------------------------------------
#
# Rules whose trace is a random estimate without bias.


@public('braintrace.rules.signs')
def signs(scope: Literal['position', 'all'] = 'position', seed: int = 0) -> Rule:
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
    :class:`braintrace.errors.OptionError` for other values.

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


@public('braintrace.rules.uoro')
def uoro(pair: Literal['sample', 'batch'] = 'sample', seed: int = 0) -> Rule:
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
    :class:`braintrace.errors.OptionError` for other values, and
    :class:`braintrace.errors.NotSupportedError` for complex hidden states.

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


# presets ------------------------------------------------------------------------------------------
#
# Published rules that are values of the others.


@public('braintrace.rules.ottt')
@_preset
def ottt(leak: float | jax.Array) -> Rule:
    r"""OTTT: the trace of the input with the leak of the membrane, times today's D_f.

    .. math:: e_x^t = \lambda\, e_x^{t-1} + x^t \qquad \Delta w^t = (L^t \cdot D_f^t) \otimes e_x^t

    It is ``es_d_rtrl((leak, 0.))``, with :math:`\lambda` the leak, :math:`\Delta w^t` the gradient
    at t and :math:`L^t` the derivative of the loss by the new states. Exact for the matrix of a
    feed-forward layer of leaky integrate-and-fire neurons whose loss reads the spike of the new
    potential and whose reset is detached; a bias gets the current step. Memory ``B * I`` numbers
    beside today's D_f. ``leak``, in [0, 1), is the factor of the membrane in one step; an array as
    in :func:`es_d_rtrl`. Raises :class:`braintrace.errors.OptionError` for another value.

    Source: Xiao et al. 2022, "Online training through time for spiking neural networks" (NeurIPS,
    arXiv 2210.04195).

    >>> import braintrace
    >>> braintrace.rules.ottt(0.9).decay
    (0.9, 0.0)
    """
    if checked('leak', leak) is None:
        raise OptionError(
            f'leak is {leak!r}; give the factor of the membrane in one step, in [0, 1).'
        )
    return es_d_rtrl((leak, 0.0))


@public('braintrace.rules.ostl')
@_preset
def ostl(recurrent: bool = True) -> Rule:
    """OSTL: ``rtrl(layers='each')``, the whole derivative within each layer, and nothing of what a
    layer does to another layer's later steps; with ``recurrent=False`` ``d_rtrl()``, for layers
    without recurrent weights.

    Exact for one layer. Raises :class:`braintrace.errors.OptionError` for another value.

    Source: Bohnstingl et al. 2020, "Online spatio-temporal learning in deep neural networks"
    (arXiv 2007.12723).

    >>> import braintrace
    >>> braintrace.rules.ostl(recurrent=False) == braintrace.rules.d_rtrl()
    True
    """
    if not isinstance(recurrent, bool):
        raise OptionError(f'recurrent is {recurrent!r}; give True or False.')
    return rtrl('each') if recurrent else d_rtrl()


# several rules ------------------------------------------------------------------------------------
#
# Another rule for another part of a network.


@public('braintrace.rules.by_part')
def by_part(parts: Mapping[str, Rule], default: Rule) -> Rule:
    r"""Another rule for another part of the network: each op's gradient is that of its own rule.

    .. math:: \left(\frac{dL}{dw}\right)_{\text{by\_part}} =
        \left(\frac{dL}{dw}\right)_{\text{rule of } w\text{'s op}}

    as if the whole network learned by that rule alone. ``parts``: pattern -> rule. A pattern is the
    key of an op as the report has it, the path of a parameter, or the name of a hidden group, which
    means all ops that feed it. ``'layer'`` also means all below, ``'layer/...'``; ``*`` stands for
    any text. Where several match, the first one counts. ``default``: the rule of all other ops.

    The rules are :func:`d_rtrl`, :func:`es_d_rtrl`, :func:`ottt` and :func:`same_step`; those that
    keep a trace have one ``scope`` and one ``credit``, since parts share the signal and the D of a
    step. Memory is the sum over the parts, and each :func:`d_rtrl` with options of its own walks
    back through a window once more. ``with_feedback`` is for the whole.

    Raises :class:`braintrace.errors.OptionError` for other rules and for a part with a filter or a
    feedback, and, when a step is compiled, for a pattern that matches nothing, or only what
    patterns in front of it have.

    >>> import braintrace, jax.numpy as jnp
    >>> rules = braintrace.rules
    >>> rule = rules.by_part({'Wz': rules.es_d_rtrl(0.9)}, default=rules.d_rtrl())
    >>> model, x = braintrace.nn.GRUCell(2, 4), jnp.zeros((3, 2))
    >>> learner = braintrace.compile(model, rule, x, batch_size=3)
    >>> learner.report.axes
    ('Wz/weight/weight by es_d_rtrl(0.9)', 'Wr/weight/weight, Wh/weight/weight by d_rtrl()')
    """
    if not isinstance(parts, Mapping) or not parts:
        raise OptionError(
            f'parts is {parts!r}; give a dict pattern -> rule, such as '
            "{'readout': braintrace.rules.same_step()}."
        )
    for pattern in parts:
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(
                f'a pattern of by_part is {pattern!r}; give the key of an op, the path of a '
                "parameter or the name of a hidden group, such as 'readout/weight'."
            )
    return ByPart(Parts(parts.items()), default)
