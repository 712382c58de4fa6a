"""Factories of ETP primitives, and a checker of the laws that trace rules obey.

>>> import jax.numpy as jnp
>>> from braintrace import kit
>>> shape = jnp.zeros((2, 3)), jnp.zeros(3)
>>> squared = kit.make_elementwise_op('doc_squared', lambda x, w: x * w**2)
>>> kit.check(squared, cases=[(shape, {})]).ok
True
"""

from typing import TYPE_CHECKING

from .._etrace_op import (
    EtpOp,
    ETPPrimitiveSpec,
    make_conv_op,
    make_einsum_op,
    make_elementwise_op,
    make_linear_op,
    new_etp_primitive,
    rule_reverse,
)
from .._public_names import lacking as _lacking
from ._check import assert_conformant, check, describe, single_key
from ._registry import registry_report
from ._report import LAWS, ConformanceReport, Row

__all__ = [
    'ConformanceReport',
    'ETPPrimitiveSpec',
    'EtpOp',
    'LAWS',
    'Row',
    'assert_conformant',
    'check',
    'describe',
    'make_conv_op',
    'make_einsum_op',
    'make_elementwise_op',
    'make_linear_op',
    'new_etp_primitive',
    'registry_report',
    'rule_reverse',
    'single_key',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
