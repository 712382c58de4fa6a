"""ETP primitives, their rules, the functions that bind them, and the factories of new ones."""

from ._layouts import add_bias
from ._operands import each_axis
from ._primitive import (
    BATCHED_PRIMITIVES,
    ETP_PRIMITIVE_SPECS,
    ETP_PRIMITIVES,
    ETP_RULES_INIT_DRTRL,
    ETP_RULES_INIT_PP,
    ETP_RULES_XY_TO_DW,
    ETP_RULES_YW_TO_W,
    RULE_SLOTS,
    ETPPrimitive,
    get_primitive_spec,
    is_etp_primitive,
    register_primitive,
    register_primitive_spec,
)
from ._reverse import rule_reverse
from ._spec import REQUIRED_SLOTS, ETPPrimitiveSpec, whole_impl
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
    FUSED_SAMPLES,
    SparseStructure,
    etp_sp_mm_p,
    etp_sp_mv_p,
    is_dense,
    sparse_matmul,
)
from .sparse import entries_p as sparse_entries
