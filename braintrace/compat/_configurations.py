"""Rules, fixed feedback and a filter as the public package makes them."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import rules
from .._rules import Feedback, Rule
from .._windows import check_choice
from ..errors import OptionError

AXES = {
    'trace_factorization': ('per_param', 'io_factorized', 'random_projection'),
    'recurrence_scope': ('diagonal', 'coupled', 'sparse_n'),
    'learning_signal': ('symmetric', 'random_feedback', 'modulatory', 'bootstrapped'),
    'trace_filter': ('none', 'kappa'),
    'update_schedule': ('per_step', 'window', 'sequence_end'),
}
RECURSIONS = ('jacobian', 'scalar_leak', 'none')


def ETraceConfig(  # noqa: N802
    trace_factorization: str = 'per_param',
    temporal_recursion: str | tuple[str, str] = 'jacobian',
    recurrence_scope: str = 'diagonal',
    learning_signal: str = 'symmetric',
    trace_filter: str = 'none',
    update_schedule: str = 'per_step',
    decay: float | tuple[float, float] | None = None,
    kappa: float | None = None,
    sparse_n: int | None = None,
    window_size: int | None = None,
) -> Rule:
    """The rule on the six axes of the public package: a value of :mod:`braintrace.rules`.

    ``'per_param'`` with scope ``'diagonal'`` is ``d_rtrl()``, with ``'coupled'``
    ``d_rtrl(scope='own')``, with ``'sparse_n'`` ``snap(sparse_n)``, and with
    ``temporal_recursion='none'`` ``same_step()``; ``'io_factorized'`` is ``es_d_rtrl(decay)``, and
    with the recursions ``('scalar_leak', 'none')`` ``ottt(decay)``; ``'random_projection'`` is
    ``uoro()``. ``'random_feedback'`` adds ``.with_feedback(...)``, a kappa filter
    ``.filtered(kappa)``; for ``'modulatory'`` the loss is :func:`braintrace.modulated`. Raises
    :class:`braintrace.errors.OptionError`, which names the nearest value, for what has no
    counterpart.

    >>> from braintrace import compat, rules
    >>> compat.ETraceConfig('io_factorized', decay=0.9) == rules.es_d_rtrl(0.9)
    True
    """
    given = locals()
    for axis, allowed in AXES.items():
        check_choice(axis, given[axis], allowed)
    if update_schedule != 'per_step' or window_size is not None:
        raise OptionError(
            f'update_schedule is {update_schedule!r} and window_size {window_size}: no rule says '
            'when weights change. Give `update_every` to `learner.etrace_train`, or `window` to '
            '`etrace_grad`.'
        )
    if learning_signal == 'bootstrapped':
        raise OptionError(
            "learning_signal is 'bootstrapped', which is no rule: reverse mode in windows with a "
            'synthetic gradient at their ends. Use `braintrace.compat.DNI`.'
        )
    _without('kappa', kappa, 'trace_filter', trace_filter, 'kappa')
    _without('sparse_n', sparse_n, 'recurrence_scope', recurrence_scope, 'sparse_n')
    _without('decay', decay, 'trace_factorization', trace_factorization, 'io_factorized')
    rule = _of_trace(trace_factorization, temporal_recursion, recurrence_scope, decay, sparse_n)
    if learning_signal == 'random_feedback':
        rule = _position_wise(rule, 'learning_signal', learning_signal)
        rule = rule.with_feedback(Feedback('random'))
    if trace_filter == 'kappa':
        kappa = _given('kappa', kappa, "trace_filter='kappa'")
        return _position_wise(rule, 'trace_filter', trace_filter).filtered(kappa)
    return rule


def _position_wise(rule: Rule, axis: str, value: str) -> Any:
    _only(hasattr(rule, 'filtered'), axis, value, 'rules.d_rtrl()', rule.name)
    return rule


def _of_trace(factorization, recursion, scope, decay, n) -> Rule:
    """The rule with this trace, the signal and the filter aside."""
    sides = recursion if isinstance(recursion, tuple) else (recursion, recursion)
    for side in sides:
        check_choice('temporal_recursion', side, RECURSIONS)
    if factorization == 'io_factorized':
        return _factorized(recursion, sides, scope, decay)
    if factorization == 'random_projection':
        _only(scope == 'coupled', 'recurrence_scope', scope, 'rules.uoro()', factorization)
        _only(sides == ('jacobian',) * 2, 'temporal_recursion', recursion, 'rules.uoro()')
        return rules.uoro()
    if sides == ('none', 'none'):
        return rules.same_step()
    _only(sides == ('jacobian',) * 2, 'temporal_recursion', recursion, 'rules.d_rtrl()')
    if scope == 'sparse_n':
        return rules.snap(_given('sparse_n', n, "recurrence_scope='sparse_n'"))
    return rules.d_rtrl() if scope == 'diagonal' else rules.d_rtrl(scope='own')


def _factorized(recursion, sides, scope, decay) -> Rule:
    nearest = 'rules.es_d_rtrl(decay)'
    _only(scope == 'diagonal', 'recurrence_scope', scope, nearest, 'io_factorized')
    if sides == ('none', 'none'):
        return rules.same_step()
    rule = rules.es_d_rtrl(_given('decay', decay, "trace_factorization='io_factorized'"))
    of_x, of_f = decay if isinstance(decay, tuple) else (decay, decay)
    if sides[1] == 'scalar_leak':
        leak = 'rules.ottt(leak), which has no leak there, or rules.es_d_rtrl(decay), which has D'
        _only(False, 'temporal_recursion', recursion, leak)
    if 'none' not in sides:
        return rule
    return rules.es_d_rtrl(
        (0.0 if sides[0] == 'none' else of_x, 0.0 if sides[1] == 'none' else of_f)
    )


def _only(right: bool, axis: str, value, nearest: str, other: str = '') -> None:
    if not right:
        other = f' with {other!r}' if other else ''
        raise OptionError(
            f'{axis} is {value!r}{other}, which no rule has. The nearest is `braintrace.{nearest}`.'
        )


def _without(name: str, value, axis: str, found: str, reader: str) -> None:
    """Refuse a value that no axis reads."""
    if value is not None and found != reader:
        raise OptionError(
            f'{name} is {value!r} with {axis}={found!r}, which reads none: leave it out, or give '
            f'{axis}={reader!r}.'
        )


def _given(name: str, value, because: str):
    if value is None:
        raise OptionError(f'{name} is None with {because}; give its value.')
    return value


class FixedRandomFeedback:
    """A fixed random matrix ``B`` that takes an error of the outputs to the units of a layer.

    ``project(error)`` is ``error @ B``, which :func:`braintrace.modulated` takes as the signal of a
    layer. ``rules.rflo()`` and :class:`braintrace.Feedback` do it for the gradient of any loss.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace import compat
    >>> feedback = compat.FixedRandomFeedback(2, 5, jax.random.key(0))
    >>> feedback.project(jnp.ones((3, 2))).shape
    (3, 5)
    """

    def __init__(self, n_target: int, n_layer: int, key, init_scale: float = 0.1):
        self.n_target, self.n_layer = n_target, n_layer
        self.B = init_scale * jax.random.normal(key, (n_target, n_layer))

    def project(self, y_target) -> jax.Array:
        """``y_target @ B``, of shape ``(..., n_target)`` and ``(..., n_layer)``."""
        return jnp.asarray(y_target) @ self.B


class KappaFilter(brainstate.ShortTermState):
    """A low-pass filter as a state: ``update(x)`` returns ``kappa * old + (1 - kappa) * x``.

    >>> import jax.numpy as jnp
    >>> from braintrace import compat
    >>> trace = compat.KappaFilter(jnp.zeros(2), 0.75)
    >>> trace.update(jnp.ones(2)).tolist()
    [0.25, 0.25]
    """

    value: Any

    def __init__(self, init_value, kappa: float):
        super().__init__(init_value)
        self.kappa = kappa

    def update(self, x) -> jax.Array:
        """The filtered value, which is kept."""
        self.value = self.kappa * self.value + (1 - self.kappa) * x
        return self.value
