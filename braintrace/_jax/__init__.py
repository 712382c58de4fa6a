"""The only door to JAX's internals, pinned by ``tests/test_jax_contract.py``."""

from jax.core import Tracer
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from .control_flow import *
from .control_flow import __all__ as _control_flow
from .evaluation import *
from .evaluation import __all__ as _evaluation
from .places import *
from .places import __all__ as _places
from .platforms import *
from .platforms import __all__ as _platforms
from .shards import *
from .shards import __all__ as _shards

__all__ = [
    'Literal',
    'Primitive',
    'Tracer',
    'ad',
    'batching',
    'mlir',
    *_control_flow,
    *_evaluation,
    *_places,
    *_platforms,
    *_shards,
]
