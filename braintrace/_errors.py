"""Every error that braintrace raises on purpose; all are exported from ``braintrace``.

A message says what was found, where (parameter path, file and line), and what to do.
"""

from __future__ import annotations

__all__ = [
    'BraintraceError',
    'BraintraceWarning',
    'CompilationError',
    'CompileError',
    'EtpDtypeError',
    'EtpShapeError',
    'EtpUnitError',
    'MissingRuleError',
    'NotCompiledError',
    'NotSupportedError',
    'OptionError',
    'RuleContractError',
    'StepFunctionError',
    'StructureError',
    'UntracedParameterError',
]


class BraintraceError(Exception):
    """Base of every error raised by braintrace."""


class BraintraceWarning(UserWarning):
    """The gradient degrades for a reason that the user can remove."""


class EtpShapeError(BraintraceError, ValueError):
    """An operand of an ETP op has a wrong rank or shape."""


class EtpDtypeError(BraintraceError, TypeError):
    """An operand of an ETP op has a wrong dtype or is not an array."""


class EtpUnitError(BraintraceError, ValueError):
    """An operand of an ETP op has a physical unit that does not fit the others."""


class RuleContractError(BraintraceError, ValueError):
    """An ETP rule or a primitive's description breaks its contract."""


class MissingRuleError(BraintraceError, NotImplementedError):
    """A primitive lacks a rule that an algorithm needs.

    Attributes: ``op`` (the primitive's name), ``rule`` (the missing slot), ``algorithm`` (who needs
    it).
    """

    def __init__(self, op: str, rule: str, algorithm: str):
        self.op, self.rule, self.algorithm = op, rule, algorithm
        super().__init__(
            f'primitive {op!r} has no rule {rule!r}, which {algorithm} needs. Register it with '
            f'`primitive.register_{rule}(fn)` or `primitive.register_etp_rules({rule}=fn)`.'
        )


class CompileError(BraintraceError, ValueError):
    """The model's step can not be compiled for online learning."""


CompilationError = CompileError  # the public package's name


class NotSupportedError(BraintraceError, NotImplementedError):
    """The model's step uses a construct that the compiler does not handle."""


class UntracedParameterError(BraintraceError, ValueError):
    """The policy is strict, and a parameter or a path between hidden states has no trace."""


class NotCompiledError(BraintraceError, RuntimeError):
    """A learner was used before its graph was compiled."""


class StructureError(BraintraceError, ValueError):
    """States, parameters or inputs have another structure, shape or dtype than when compiled."""


class StepFunctionError(BraintraceError, ValueError):
    """A ``step_fn`` breaks its contract: one learner call, a scalar loss."""


class OptionError(BraintraceError, ValueError):
    """An option has a value outside its set."""
