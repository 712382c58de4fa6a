"""Rules whose signal is filtered, or goes back through other weights."""

from __future__ import annotations

from .._errors import OptionError
from .._rules import Feedback, Rule
from ._traces import d_rtrl


def e_prop(kappa: float = 0.0, feedback: str | Feedback = 'symmetric') -> Rule:
    r"""e-prop: ``d_rtrl().filtered(kappa)``, with the error sent back as ``feedback`` says.

    .. math::
        e^t = D^t e^{t-1} + D_f^t \otimes x^t \qquad
        \bar e^t = \kappa\, \bar e^{t-1} + \frac{dz^t}{dw} \qquad
        \frac{dL}{dw} \approx \sum_t B^\top \frac{dL^t}{dy^t} \cdot \bar e^t

    with z what the readouts read and y their results. ``kappa`` is the leak of the readout,
    ``exp(-1 / tau)`` of a :class:`braintrace.nn.LeakyRateReadout`, and 0 without one or with a
    :class:`braintrace.nn.FilteredReadout`, which filters by itself. ``feedback``: ``'symmetric'``
    (B is the readout's W), ``'random'``, ``'adaptive'``, or a :class:`braintrace.Feedback`. Memory
    ``B * I * O * (S + 1)`` numbers for a dense op. Raises :class:`braintrace.OptionError` as the
    modifiers of a rule do.

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


def otpe(leak: float) -> Rule:
    """``d_rtrl().filtered(leak)``: the trace of each spike is filtered by the leak of the next
    layer.

    Exact for one hidden layer under a leaky readout. After Summe et al. 2023, "Estimating
    post-synaptic effects for online training of feed-forward SNNs" (arXiv 2311.16151), who estimate
    what a spike does to the next layer; this formula of it is the library's own, theirs may differ.

    >>> import braintrace
    >>> braintrace.rules.otpe(0.9) == braintrace.rules.d_rtrl().filtered(0.9)
    True
    """
    return d_rtrl().filtered(leak)
