"""ETP primitives, their rules, the functions that bind them, and the factories of new ones."""

from ._layouts import add_bias
from ._primitive import *
from ._primitive import __all__ as _primitive
from ._reverse import rule_reverse
from ._spec import *
from ._spec import __all__ as _spec
from .automatic import AUTOMATIC, at_positions
from .conv import conv, etp_conv_p
from .dense import (
    embedding,
    etp_embed_mm_p,
    etp_embed_mv_p,
    etp_lora_mm_p,
    etp_lora_mv_p,
    etp_mm_p,
    etp_mv_p,
    lora_matmul,
    matmul,
)
from .einsums import FORMS as EINSUM_FORMS
from .einsums import einsum, grouped_matmul
from .elemwise import element_wise, etp_elemwise_p
from .factories import (
    EtpOp,
    make_conv_op,
    make_einsum_op,
    make_elementwise_op,
    make_linear_op,
    new_etp_primitive,
)
from .sparse import (
    FUSED_LANES,
    SparseStructure,
    etp_sp_mm_p,
    etp_sp_mv_p,
    is_dense,
    sparse_matmul,
)
from .sparse import entries_p as sparse_entries

__all__ = [
    *_primitive,
    *_spec,
    'AUTOMATIC',
    'EINSUM_FORMS',
    'EtpOp',
    'FUSED_LANES',
    'SparseStructure',
    'add_bias',
    'at_positions',
    'conv',
    'einsum',
    'element_wise',
    'embedding',
    'etp_conv_p',
    'etp_elemwise_p',
    'etp_embed_mm_p',
    'etp_embed_mv_p',
    'etp_lora_mm_p',
    'etp_lora_mv_p',
    'etp_mm_p',
    'etp_mv_p',
    'etp_sp_mm_p',
    'etp_sp_mv_p',
    'grouped_matmul',
    'is_dense',
    'lora_matmul',
    'make_conv_op',
    'make_einsum_op',
    'make_elementwise_op',
    'make_linear_op',
    'matmul',
    'new_etp_primitive',
    'rule_reverse',
    'sparse_entries',
    'sparse_matmul',
]
