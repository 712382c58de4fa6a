"""Every error that braintrace raises on purpose.

A message says what was found, where (parameter path, file and line), and what to do.

>>> import braintrace
>>> issubclass(braintrace.errors.OptionError, ValueError)
True
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ._public_names import lacking as _lacking

__all__ = [
    'BraintraceError',
    'BraintraceWarning',
    'CompileError',
    'EtpDtypeError',
    'EtpShapeError',
    'EtpUnitError',
    'MissingRuleError',
    'NotCompiledError',
    'NotFiniteError',
    'NotSupportedError',
    'OptionError',
    'RuleContractError',
    'StepFunctionError',
    'StructureError',
    'UntracedParameterError',
]


NUMBERS = re.compile(r'\[[\[\]\d\s.,+\-einfa]{120,}\]')  # of an array that a message shows


def _shortened(numbers: re.Match) -> str:
    """The first and the last numbers of an array."""
    start, end = numbers[0][:40].split(), numbers[0][-20:].split()
    return ' '.join([*start[:-1], '...', *end[1:]])


class BraintraceError(Exception):
    """Base of every error raised by braintrace.

    >>> import braintrace
    >>> try:
    ...     braintrace.rules.d_rtrl(credit='all')
    ... except braintrace.errors.BraintraceError as error:
    ...     print(type(error).__name__, '-', error)
    OptionError - credit is 'all'; choose 'cut' or 'whole'.
    """

    def __init__(self, message: str = ''):
        super().__init__(NUMBERS.sub(_shortened, message))


class BraintraceWarning(UserWarning):
    """The gradient degrades for a reason that the user can remove.

    Each is told once, at the user's line. A filter makes an error of it, or hides it:

    >>> import warnings, braintrace
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter('error', braintrace.errors.BraintraceWarning)
    """


class EtpShapeError(BraintraceError, ValueError):
    """An operand of an ETP op has a wrong rank or shape.

    >>> import braintrace, jax.numpy as jnp
    >>> braintrace.matmul(jnp.ones((2, 3)), jnp.ones((4, 2)))
    Traceback (most recent call last):
    braintrace.errors.EtpShapeError: matmul: weight has shape (4, 2), expected (3, 2): x of ...
    """


class EtpDtypeError(BraintraceError, TypeError):
    """An operand of an ETP op has a wrong dtype or is not an array.

    >>> import braintrace, jax.numpy as jnp
    >>> braintrace.embedding(jnp.ones(2), jnp.ones((4, 2)))
    Traceback (most recent call last):
    braintrace.errors.EtpDtypeError: embedding: indices have dtype float32 and unit 1, expected ...
    """


class EtpUnitError(BraintraceError, ValueError):
    """An operand of an ETP op has a physical unit that does not fit the others.

    >>> import braintrace, jax.numpy as jnp, saiunit as u
    >>> braintrace.matmul(jnp.ones(3) * u.mV, jnp.ones((3, 2)), jnp.ones(2) * u.mA)
    Traceback (most recent call last):
    braintrace.errors.EtpUnitError: matmul: bias has unit mA, expected a unit like mV, ...
    """


class RuleContractError(BraintraceError, ValueError):
    """An ETP rule or a primitive's description breaks its contract.

    >>> import braintrace
    >>> braintrace.get_primitive_spec('gain')
    Traceback (most recent call last):
    braintrace.errors.RuleContractError: 'gain' is not an ETP primitive; ...
    """


class MissingRuleError(BraintraceError, NotImplementedError):
    """A primitive lacks a rule that an algorithm needs.

    Attributes: ``op`` (the primitive's name), ``rule`` (the missing slot), ``algorithm`` (who needs
    it).

    >>> import braintrace
    >>> bare = braintrace.register_primitive('doc_bare', lambda x, w: x * w)
    >>> bare.rule('yw_to_w')
    Traceback (most recent call last):
    braintrace.errors.MissingRuleError: primitive 'doc_bare' has no rule 'yw_to_w', which ...
    """

    def __init__(self, op: str, rule: str, algorithm: str):
        self.op, self.rule, self.algorithm = op, rule, algorithm
        super().__init__(
            f'primitive {op!r} has no rule {rule!r}, which {algorithm} needs. Register it with '
            f'`primitive.register_{rule}(fn)` or `primitive.register_etp_rules({rule}=fn)`.'
        )


class CompileError(BraintraceError, ValueError):
    """The model's step can not be compiled for online learning.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> params, h, x = {'W': jnp.ones((2, 2))}, jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> cell = lambda p, h, x: (h, jnp.tanh(x @ p['W'] + h))
    >>> braintrace.functional.online(cell).init(params, h, x)
    Traceback (most recent call last):
    braintrace.errors.CompileError: the step applies no ETP op. Mark trainable operations: ...
    """


class NotSupportedError(BraintraceError, NotImplementedError):
    """The model's step uses a construct that the compiler does not handle.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> params, h, x = {'W': jnp.ones((2, 2))}, jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> def cell(p, h, x):
    ...     drive = jax.lax.cond(x.sum() > 0, lambda: braintrace.matmul(x, p['W']), lambda: x)
    ...     return h, drive + h
    >>> policy = braintrace.Policy(refuse=('cond',))
    >>> braintrace.functional.online(cell, policy=policy).init(params, h, x)
    Traceback (most recent call last):
    braintrace.errors.NotSupportedError: ...cond holds an ETP op or lies between hidden states, ...
    """


class UntracedParameterError(BraintraceError, ValueError):
    """The policy is strict, and a parameter or a path between hidden states has no trace.

    >>> import braintrace, jax.numpy as jnp
    >>> params = {'W': jnp.ones((2, 2)), 'decay': jnp.ones(2)}
    >>> cell = lambda p, h, x: (h, h * p['decay'] + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell, policy=braintrace.Policy(strict=True))
    >>> learner.init(params, jnp.zeros((1, 2)), jnp.ones((1, 2)))
    Traceback (most recent call last):
    braintrace.errors.UntracedParameterError: the policy is strict, and the history of these ...
    """


class NotCompiledError(BraintraceError, RuntimeError):
    """A learner was used before its graph was compiled.

    >>> import braintrace, jax.numpy as jnp
    >>> learner = braintrace.D_RTRL(braintrace.nn.GRUCell(2, 4))
    >>> learner(jnp.ones((1, 2)))
    Traceback (most recent call last):
    braintrace.errors.NotCompiledError: this D_RTRL is not compiled. Call ...
    """


class StructureError(BraintraceError, ValueError):
    """States, parameters or inputs have another structure, shape or dtype than when compiled.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((1, 2)), batch_size=1)
    >>> learner(jnp.zeros((1, 3)))
    Traceback (most recent call last):
    braintrace.errors.StructureError: these arguments are not those that were compiled:
      inputs 0: float32[1, 2] when compiled, float32[1, 3] now
    ...
    """


class StepFunctionError(BraintraceError, ValueError):
    """A ``step_fn`` breaks its contract: one learner call, a scalar loss.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((1, 2)), batch_size=1)
    >>> learner.etrace_grad(jnp.zeros((5, 1, 2)), step_fn=lambda x: learner(x))
    Traceback (most recent call last):
    braintrace.errors.StepFunctionError: step_fn returned float32[1, 4]; return one real ...
    """


class NotFiniteError(BraintraceError, FloatingPointError):
    """Learning met numbers that are not finite, and was asked to raise.

    ``so_far`` is what the call returns: what was learnt without the updates that hold them.

    >>> import braintrace, jax.numpy as jnp, optax
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner, optimizer = braintrace.functional.online(cell), optax.sgd(0.1)
    >>> params, h, xs = {'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((5, 3, 2))
    >>> loss = lambda h, y: jnp.mean((h - y) ** 2)
    >>> learn = learner.sequence_update(loss, optimizer, not_finite='raise')
    >>> given = params, optimizer.init(params), learner.init(params, h, xs[0])
    >>> learn(*given, xs.at[2, 1].set(jnp.nan), jnp.ones((5, 3, 4)), reset=(None, h))
    Traceback (most recent call last):
    braintrace.errors.NotFiniteError: 1 update(s) were not finite and were left out; ...
    """


class OptionError(BraintraceError, ValueError):
    """An option has a value outside its set.

    >>> import braintrace
    >>> braintrace.rules.d_rtrl(credit='all')
    Traceback (most recent call last):
    braintrace.errors.OptionError: credit is 'all'; choose 'cut' or 'whole'.
    """


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
