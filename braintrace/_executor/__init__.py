"""The executor: one compiled step as pure functions."""
from .executor import Executor, Factors, Probes, Signals, stopped
from .steps import TracedStep

__all__ = ['Executor', 'Factors', 'Probes', 'Signals', 'TracedStep', 'stopped']
