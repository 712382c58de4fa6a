"""Online learning of recurrent and spiking networks by eligibility traces, in JAX."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from . import errors, functional, rules
from ._compiler import Diagnostic, ETraceGraph, HiddenGroup, Policy, Relation, Route
from ._etrace_op import (
    ETPPrimitive,
    ETPPrimitiveSpec,
    SparseStructure,
    conv,
    einsum,
    element_wise,
    embedding,
    get_primitive_spec,
    grouped_matmul,
    lora_matmul,
    matmul,
    register_primitive,
    register_primitive_spec,
    sparse_matmul,
)
from ._public_names import instead_of as _instead_of
from ._public_names import lacking as _lacking
from ._report import Report, report
from ._rules import Feedback
from ._version import __version__ as __version__
from ._version import __version_info__ as __version_info__
from ._warnings import tell as _tell
from ._windows import Penalised, modulated
from .extra import _filter as _filter  # registers what `kappa` is to the view of a rule
from .extra import _own_diagonal as _own_diagonal  # registers the scope 'own' of that view
from .extra import _sparse_cpu as _sparse_cpu  # registers the kernels of sparse primitives
from .extra import _unshard as _unshard  # registers what a `shard_map` is to the compiler

if TYPE_CHECKING:  # the names of _LAZY, for type checkers, which do not run __getattr__
    from . import adapters, nn, receipts, tasks, verify
    from . import kit as kit
    from ._learner import (
        D_RTRL,
        ES_D_RTRL,
        ETraceLearner,
        compile,
        compile_etrace_graph,
        evaluate,
    )

__all__ = [
    'D_RTRL',
    'Diagnostic',
    'ES_D_RTRL',
    'ETPPrimitive',
    'ETPPrimitiveSpec',
    'ETraceGraph',
    'ETraceLearner',
    'Feedback',
    'HiddenGroup',
    'Penalised',
    'Policy',
    'Relation',
    'Report',
    'Route',
    'SparseStructure',
    'adapters',
    'compile',
    'compile_etrace_graph',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'errors',
    'evaluate',
    'functional',
    'get_primitive_spec',
    'grouped_matmul',
    'lora_matmul',
    'matmul',
    'modulated',
    'nn',
    'receipts',
    'register_primitive',
    'register_primitive_spec',
    'report',
    'rules',
    'sparse_matmul',
    'tasks',
    'verify',
]

# Imported on first use: nn and the learners need brainstate, which nothing else here does; the
# adapters, verify, the kit and the tasks are no part of a training step.
_LAZY = {
    'adapters': '.adapters',
    'nn': '.nn',
    'receipts': '.receipts',
    'tasks': '.tasks',
    'verify': '.verify',
    'kit': '.kit',
    'D_RTRL': '._learner',
    'ES_D_RTRL': '._learner',
    'ETraceLearner': '._learner',
    'compile': '._learner',
    'compile_etrace_graph': '._learner',
    'evaluate': '._learner',
}


# `braintrace` on the package index is another one, whose files have the same names: where both are
# installed, each may be half of the other after an upgrade.
for _other in _Path(__file__).parents[1].glob('braintrace-[0-9]*.dist-info'):
    _tell(
        f'{_other.name.removesuffix(".dist-info")} is installed in the same folder as '
        'braintrace-online, and each overwrites files of the other: uninstall both, then install '
        'the one that you want.'
    )


def _elsewhere(name: str) -> str:
    places = {
        known.lower(): f' It is `{module.__name__}.{known}`.'
        for module in (rules, functional, errors)
        for known in module.__all__
    }
    return _instead_of(name) or places.get(name.lower(), '')


def _lazy(name: str):
    if name not in _LAZY:
        _lacking(__name__, [*__all__, *_LAZY], _elsewhere)(name)
    module = _import_module(_LAZY[name], __name__)
    found = module if _LAZY[name] == f'.{name}' else getattr(module, name)
    globals()[name] = found
    return found


if not TYPE_CHECKING:
    __getattr__ = _lazy


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, *(name for name in globals() if name.startswith('__'))})
