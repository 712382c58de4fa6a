"""Names and arguments of the public package ``braintrace`` 0.2, for its scripts.

``import braintrace.compat``, once and before anything else of a script, puts all of them where the
script looks: into ``braintrace`` and ``braintrace.nn``. ``D_RTRL``, ``compile`` and the others that
both packages have take its arguments too from then on; :doc:`/howto/migrate` says what each does.

>>> from braintrace import compat
>>> compat.pp_prop is compat.IODimVjpAlgorithm, compat.ValinaRNNCell.__name__
(True, 'VanillaRNNCell')
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from typing import TYPE_CHECKING

import braintrace as _braintrace

from .. import errors as _errors
from .. import nn as _nn
from .._public_names import lacking as _lacking
from ..nn._mini import MiniGRU, MiniLSTM
from ._configurations import ETraceConfig, FixedRandomFeedback, KappaFilter
from ._learners import (
    D_RTRL,
    DNI,
    ES_D_RTRL,
    UORO,
    EProp,
    ETraceAlgorithm,
    ETraceVjpAlgorithm,
    IODimVjpAlgorithm,
    MultiStepData,
    OSTLFeedforward,
    OSTLRecurrent,
    ParamDimVjpAlgorithm,
    RandomProjectionVjpAlgorithm,
    SingleStepData,
    SnAp,
    ThreeFactor,
    compile,
    compile_etrace_graph,
    pp_prop,
    register_primitive,
)
from ._parameters import load_public
from ._synthetic import SyntheticGradient, train_synthetic_gradient

CompilationError = _errors.CompileError
ValinaRNNCell = _nn.VanillaRNNCell
_LAYERS = ('MiniGRU', 'MiniLSTM', 'ValinaRNNCell', 'load_public')

__all__ = [
    'CompilationError',
    'DNI',
    'D_RTRL',
    'EProp',
    'ES_D_RTRL',
    'ETraceAlgorithm',
    'ETraceConfig',
    'ETraceVjpAlgorithm',
    'FixedRandomFeedback',
    'IODimVjpAlgorithm',
    'KappaFilter',
    'MiniGRU',
    'MiniLSTM',
    'MultiStepData',
    'OSTLFeedforward',
    'OSTLRecurrent',
    'ParamDimVjpAlgorithm',
    'RandomProjectionVjpAlgorithm',
    'SingleStepData',
    'SnAp',
    'SyntheticGradient',
    'ThreeFactor',
    'UORO',
    'ValinaRNNCell',
    'compile',
    'compile_etrace_graph',
    'load_public',
    'pp_prop',
    'register_primitive',
    'train_synthetic_gradient',
]


_before: dict = {}


def _install() -> None:
    """Put every name where a script of the public package looks for it."""
    found = {name: globals()[name] for name in __all__}
    for name, value in {**found, 'NotSupportedError': _errors.NotSupportedError}.items():
        home = _nn if name in _LAYERS else _braintrace
        _before[home, name] = vars(home).get(name)
        setattr(home, name, value)


def _remove() -> None:
    """Take them away again."""
    while _before:
        (home, name), old = _before.popitem()
        setattr(home, name, old) if old is not None else delattr(home, name)


_install()


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
