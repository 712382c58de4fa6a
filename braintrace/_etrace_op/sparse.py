"""Sparse products: ``y = x @ M (+ b)`` with a static structure and trained entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._operands import (
    bias_operands,
    check_shape,
    input_operand,
    trainable_operand,
    unit_product,
    with_unit,
)
from ._primitive import ETPPrimitive
from ._rule_parts import add_bias, bias_at, output_trace, parameter_trace, vjp_of
from ._sparsity import SparseStructure
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec
from .dense import check_features

__all__ = ['etp_sp_mm_p', 'etp_sp_mv_p', 'sparse_matmul']

# From this many gathered entries (batch x stored entries) for each number of the dense matrix,
# scattering the entries into a matrix and a dense product are faster on XLA's CPU than a gather and
# a segment sum (forward and backward, 500 to 2000 wide). The matrix is then smaller than the
# gathered array would be.
DENSE_FROM = 2


def _product(x, data, structure: SparseStructure):
    """``x @ M`` for x of shape ``(batch, in)``."""
    rows, columns, (inputs, outputs) = structure.rows, structure.columns, structure.shape
    if structure.live is not None:
        data = jnp.where(structure.live, data, 0)
    if x.shape[0] * structure.size >= DENSE_FROM * inputs * outputs:
        return x @ jnp.zeros((inputs, outputs), data.dtype).at[rows, columns].add(data)
    return jax.ops.segment_sum(x.T[rows] * data[:, None], columns, outputs).T


def _impl(x, data, *bias, sparse_mat, has_bias: bool = False):
    structure = SparseStructure.of(sparse_mat)
    y = _product(x, data, structure) if x.ndim == 2 else _product(x[None], data, structure)[0]
    return add_bias(y, bias[0]) if has_bias else y


def _yw_to_w(hidden_dim, trace, *, sparse_mat, has_bias: bool = False):
    at_entry = hidden_dim[..., SparseStructure.of(sparse_mat).columns]
    return {
        name: value * (hidden_dim if name == 'bias' else at_entry) for name, value in trace.items()
    }


def _register(batched: bool) -> ETPPrimitive:
    trainable_invars = bias_at(2, weight=1)
    return register_primitive_spec(
        ETPPrimitiveSpec(
            'etp_sp_mm' if batched else 'etp_sp_mv',
            _impl,
            _yw_to_w,
            vjp_of(_impl, trainable_invars),
            parameter_trace(batched),
            output_trace,
            trainable_invars,
            batched=batched,
        )
    )


etp_sp_mm_p, etp_sp_mv_p = register_both_forms(_register)


def sparse_matmul(x, weight_data, *, sparse_mat, bias=None):
    """Multiply by a sparse matrix whose entries are traced: ``y = x @ M (+ bias)``, where
    ``M[row_k, col_k] += weight_data[k]``.

    ``x`` is ``(in,)`` or ``(batch, in)``; ``sparse_mat`` gives only the places of the entries: a
    concrete ``(in, out)`` CSR, CSC or COO matrix of ``saiunit.sparse`` or ``brainevent``, or a
    ``SparseStructure`` made of one. ``weight_data`` is ``(entries,)`` in the order of
    ``sparse_mat.data`` and ``bias`` ``(out,)``. y has the unit of x times the unit of the data.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import saiunit
    >>> import braintrace
    >>> mask = saiunit.sparse.CSR.fromdense(jnp.array([[1., 0.], [1., 1.]]))
    >>> braintrace.sparse_matmul(jnp.array([1., 10.]), jnp.array([1., 2., 3.]), sparse_mat=mask)
    Array([21., 30.], dtype=float32)
    """
    op = 'sparse_matmul'
    structure = SparseStructure.of(sparse_mat)
    data, data_unit = trainable_operand(op, 'weight_data', weight_data)
    x, x_unit = input_operand(op, 'x', x, data.dtype)
    check_features(op, x)
    expected = (*x.shape[:-1], structure.shape[0])
    check_shape(op, 'x', x.shape, expected, f'sparse_mat has shape {structure.shape}')
    why = (
        f'one number for each of the {structure.size} entries of sparse_mat; repeat a shared '
        'number with `jax.numpy.full`'
    )
    check_shape(op, 'weight_data', data.shape, (structure.size,), why)
    unit = unit_product(x_unit, data_unit)
    bias = bias_operands(op, bias, structure.shape[1:], unit)
    primitive = etp_sp_mm_p if x.ndim == 2 else etp_sp_mv_p
    return with_unit(
        primitive.bind(x, data, *bias, sparse_mat=structure, has_bias=bool(bias)), unit
    )
