"""Products with sparse matrices."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._signatures import refuses
from ..errors import EtpDtypeError, EtpShapeError
from ._layouts import add_bias, bias_at, parameter_trace
from ._operands import product_operands, with_unit
from ._primitive import ETPPrimitive, register_both_forms
from ._spec import ETPPrimitiveSpec
from .dense import FEATURES

# patterns -----------------------------------------------------------------------------------------
#
# The places of the entries of a sparse matrix, as a pytree of index arrays.


@jax.tree_util.register_pytree_node_class
class SparseStructure:
    """Where the entries of a sparse ``(in, out)`` matrix are: entry k in row ``rows[k]`` and
    column ``columns[k]``; places may repeat.

    The index arrays, int32 ``(entries,)``, are leaves of a pytree: passed to a jitted function they
    are its arguments, so that one program serves every structure of this shape, this number of
    entries and this order. They are checked here, once; a structure is made outside of ``jit``.

    Entries that are sorted by row suit spikes: with ``numba`` installed, a product on a CPU then
    reads the rows of neurons that spike, and no others, and D_RTRL adds only theirs to its trace.
    Entries sorted by column suit products with dense inputs.

    Raises ``EtpShapeError`` for indices outside of the shape and ``EtpDtypeError`` for traced ones.
    An index that is the size of its axis marks an entry that only pads the matrix.

    >>> import braintrace
    >>> braintrace.SparseStructure([0, 0, 2], [1, 3, 0], (3, 4))
    SparseStructure(3x4, 3 entries, by row)
    """

    __slots__ = ('rows', 'columns', 'pointers', 'shape', 'padded')

    def __init__(self, rows, columns, shape):
        self.shape = tuple(int(size) for size in shape)
        checked = []
        for name, index, size in zip(('rows', 'columns'), (rows, columns), self.shape):
            index = _concrete(name, index)
            if index.ndim != 1 or (index.size and (index.min() < 0 or index.max() > size)):
                raise EtpShapeError(
                    f'sparse_mat has {name} of shape {index.shape} that are not all in '
                    f'[0, {size}], expected one index for each entry.'
                )
            checked.append(index.astype(np.int32, copy=False))
        self.rows, self.columns = checked
        if self.rows.shape != self.columns.shape:
            raise EtpShapeError(
                f'sparse_mat has {self.rows.size} row and {self.columns.size} column indices, '
                'expected as many of each.'
            )
        self.padded = any(
            bool(index.size and index.max() == size)
            for index, size in zip((self.rows, self.columns), self.shape)
        )
        # the first entry of each row, and their number; empty where rows are not in order
        self.pointers = np.zeros(0, np.int32)
        if not self.padded and not (self.rows[1:] < self.rows[:-1]).any():
            starts = np.arange(self.shape[0] + 1, dtype=np.int32)
            self.pointers = np.searchsorted(self.rows, starts).astype(np.int32)

    def tree_flatten(self):
        """The index arrays, and what is static."""
        return (self.rows, self.columns, self.pointers), (self.shape, self.padded)

    @classmethod
    def tree_unflatten(cls, static, leaves) -> SparseStructure:
        """A structure of indices that were checked before."""
        self = object.__new__(cls)
        self.rows, self.columns, self.pointers = leaves
        self.shape, self.padded = static
        return self

    @classmethod
    def of(cls, sparse_mat: Any) -> SparseStructure:
        """The structure of a CSR, CSC or COO matrix of ``saiunit.sparse`` or ``brainevent``, or of
        a matrix that has ``tocoo``.
        """
        if isinstance(sparse_mat, cls):
            return sparse_mat
        if hasattr(sparse_mat, 'row') and hasattr(sparse_mat, 'col'):
            return cls(sparse_mat.row, sparse_mat.col, sparse_mat.shape)
        layouts = {'CSR', 'CSC'} & {base.__name__ for base in type(sparse_mat).__mro__}
        if layouts:
            by_column = 'CSC' in layouts
            indptr = _concrete('indptr', sparse_mat.indptr)
            minor, size = _concrete('indices', sparse_mat.indices), sparse_mat.shape[by_column]
            if indptr.shape != (size + 1,):
                raise EtpShapeError(
                    f'sparse_mat has shape {tuple(sparse_mat.shape)} and {indptr.size} pointers, '
                    f'expected {size + 1}.'
                )
            # entries after the last pointer are padding, whatever is stored there
            major = np.full(minor.shape, size, np.int32)
            major[: indptr[-1]] = np.repeat(np.arange(size, dtype=np.int32), np.diff(indptr))
            minor = np.where(major == size, 0, minor)
            rows, columns = (minor, major) if by_column else (major, minor)
            return cls(rows, columns, sparse_mat.shape)
        if callable(getattr(sparse_mat, 'tocoo', None)):
            return cls.of(sparse_mat.tocoo())
        raise EtpDtypeError(
            f'sparse_matmul: sparse_mat is a {type(sparse_mat).__name__}, expected a CSR, CSC '
            'or COO matrix of saiunit.sparse or brainevent; '
            '`saiunit.sparse.CSR.fromdense(mask)` makes one.'
        )

    @property
    def size(self) -> int:
        """The number of stored entries."""
        return self.rows.shape[0]

    def __repr__(self) -> str:
        order = ', by row' if getattr(self.pointers, 'shape', (0,))[0] else ''
        size = getattr(self.rows, 'shape', ('?',))[0]
        return f'SparseStructure({self.shape[0]}x{self.shape[1]}, {size} entries{order})'


def _concrete(name: str, index) -> np.ndarray:
    try:
        return np.asarray(index)
    except jax.errors.TracerArrayConversionError as error:
        raise EtpDtypeError(
            f'sparse_matmul: the {name} of sparse_mat are traced, expected concrete indices. Make '
            'a `braintrace.SparseStructure` of sparse_mat outside of jit, vmap or grad, and pass '
            'that.'
        ) from error


# the op -------------------------------------------------------------------------------------------
#
# Sparse products: ``y = x @ M (+ b)`` with places of entries that stay and trained entries.
#
# ``M[row_k, col_k] += w_k``, so ``dy_j/dw_k = x[row_k]`` for ``j = col_k`` and 0 elsewhere: one
# number for each stored entry. ``e_k = D[col_k] e_k' + D_f[col_k] x[row_k]``, and ``dL/dw_k`` sums
# ``x[row_k] g[col_k]`` over samples.


# From this many gathered entries (batch x stored entries) for each number of the dense matrix,
# scattering the entries into a matrix and a dense product are faster on XLA's CPU than a gather and
# a segment sum (forward and backward, 500 to 2000 wide). The matrix is then smaller than the
# gathered array would be.
DENSE_FROM = 2
FUSED_SAMPLES = 8  # samples whose products at an entry are summed in one pass over the entries


# indices that were checked
IN_BOUNDS: dict[str, Any] = {'mode': 'promise_in_bounds', 'wrap_negative_indices': False}


def is_dense(samples: int, entries: int, shape: tuple[int, int]) -> bool:
    return samples * entries >= DENSE_FROM * shape[0] * shape[1]


def _places(rows, columns, shape, padded: bool):
    """Rows and columns, and where an entry counts (None: everywhere); one that only pads the matrix
    is put at its corner.
    """
    if not padded:
        return rows, columns, None
    live = (rows < shape[0]) & (columns < shape[1])
    return jnp.where(live, rows, 0), jnp.where(live, columns, 0), live


# the product --------------------------------------------------------------------------------------


def _product(x, data, rows, columns, shape):
    """``x @ M`` for x of shape ``(batch, in)``."""
    if is_dense(len(x), len(rows), shape):
        return x @ jnp.zeros(shape, data.dtype).at[rows, columns].add(data, **IN_BOUNDS)
    products = x.T.at[rows].get(**IN_BOUNDS) * data[:, None]
    return jnp.zeros((shape[1], len(x)), products.dtype).at[columns].add(products, **IN_BOUNDS).T


def _impl(x, data, *others, shape, padded, has_bias: bool = False):
    *bias, rows, columns, _ = others
    rows, columns, live = _places(rows, columns, shape, padded)
    if live is not None:
        data = jnp.where(live, data, 0)
    y = _product(x if x.ndim == 2 else x[None], data, rows, columns, shape)
    y = y if x.ndim == 2 else y[0]
    return add_bias(y, bias[0]) if has_bias else y


# the gradient of the entries ----------------------------------------------------------------------


def _entries(x, d, rows, columns, pointers, *, shape):
    """``sum_t x_t[row] d_t[column]`` of each entry, for x ``(t, in)`` and d ``(t, out)``."""
    if is_dense(len(x), len(rows), shape):
        return (x.T @ d).at[rows, columns].get(**IN_BOUNDS)
    dtype = jnp.result_type(x, d)

    def block(x, d):
        # without the barrier XLA may compute what made x and d once more for each entry
        x, d = jax.lax.optimization_barrier((x, d))
        at = lambda a, index: a.at[index].get(**IN_BOUNDS)
        products = (at(x[t], rows) * at(d[t], columns) for t in range(len(x)))
        return functools.reduce(operator.add, products)

    whole, rest = divmod(len(x), FUSED_SAMPLES)
    total = block(x[-rest:], d[-rest:]) if rest else jnp.zeros(rows.shape, dtype)
    if not whole:
        return total
    blocks = jax.tree.map(
        lambda a: a[: whole * FUSED_SAMPLES].reshape(whole, FUSED_SAMPLES, -1), (x, d)
    )
    return jax.lax.scan(lambda total, at: (total + block(*at), None), total, blocks)[0]


# Not registered: no trainable of its own. A primitive, so that a platform may have a kernel for it.
entries_p = ETPPrimitive(ETPPrimitiveSpec('sp_entries', _entries))


def _xy_to_dw(x, hidden_dim, weights, *, rows, columns, pointers, shape, padded, has_bias=False):
    rows, columns, live = _places(rows, columns, shape, padded)
    x, d = (a if a.ndim == 2 else a[None] for a in (x, hidden_dim))
    dw = entries_p.bind(x, d, rows, columns, pointers, shape=shape)
    if live is not None:
        dw = jnp.where(live, dw, 0)
    found = {'weight': dw} | ({'bias': d.sum(0)} if has_bias else {})
    is_complex = lambda name: jnp.issubdtype(weights[name].dtype, jnp.complexfloating)
    return {
        name: (g if is_complex(name) else g.real).astype(weights[name].dtype)
        for name, g in found.items()
    }


def _yw_to_w(hidden_dim, trace, *, columns, shape, padded, **params):
    if padded:
        columns = jnp.minimum(columns, shape[1] - 1)
    at_entry = hidden_dim.at[..., columns].get(**IN_BOUNDS)
    return {
        name: value * (hidden_dim if name == 'bias' else at_entry) for name, value in trace.items()
    }


# the primitives -----------------------------------------------------------------------------------


etp_sp_mm_p, etp_sp_mv_p = register_both_forms(
    lambda batched: ETPPrimitiveSpec(
        'etp_sp_mm' if batched else 'etp_sp_mv',
        _impl,
        yw_to_w=_yw_to_w,
        xy_to_dw=_xy_to_dw,
        init_drtrl=parameter_trace(batched),
        trainable_invars_fn=bias_at(2, weight=1),
        batched=batched,
        structure=('rows', 'columns', 'pointers'),
    )
)


@refuses(
    'sparse_matmul',
    weight='Its name is weight_data: write `sparse_matmul(x, weight_data, sparse_mat=...)`.',
    weight_fn='Write `sparse_matmul(x, fn(weight_data), sparse_mat=...)`.',
    bias_fn='Write `sparse_matmul(x, weight_data, sparse_mat=..., bias=fn(bias))`.',
)
def sparse_matmul(x, weight_data, *, sparse_mat, bias=None) -> jax.Array:
    """Multiply by a sparse matrix whose entries are traced: ``y = x @ M (+ bias)``, where
    ``M[row_k, col_k] += weight_data[k]``.

    ``x`` is ``(in,)`` or ``(batch, in)``; ``sparse_mat`` gives only the places of the entries: a
    :class:`braintrace.SparseStructure`, or a concrete ``(in, out)`` CSR, CSC or COO matrix of
    ``saiunit.sparse`` or ``brainevent``, of which one is made at each trace. ``weight_data`` is
    ``(entries,)`` in the order of ``sparse_mat.data`` and ``bias`` ``(out,)``. y has the unit of x
    times the unit of the data.

    With ``numba`` installed, float32 and float64 run as kernels on a CPU. An x of zero may then add
    nothing where XLA adds ``0 * inf``, not a number.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import saiunit
    >>> import braintrace
    >>> mask = saiunit.sparse.CSR.fromdense(jnp.array([[1., 0.], [1., 1.]]))
    >>> braintrace.sparse_matmul(jnp.array([1., 10.]), jnp.array([1., 2., 3.]), sparse_mat=mask)
    Array([21., 30.], dtype=float32)
    """
    structure = SparseStructure.of(sparse_mat)
    shape, number = structure.shape, structure.size
    known = {axis: (n, f'sparse_mat has shape {shape}') for axis, n in zip(('in', 'out'), shape)}
    repeat = 'one number for each entry of sparse_mat; repeat a shared one with `jax.numpy.full`'
    own, known['entries'] = {'weight_data': (weight_data, 'entries')}, (number, repeat)
    x, weights, bias, unit = product_operands(
        'sparse_matmul', x, FEATURES, own, bias, 'out', known=known
    )
    primitive = etp_sp_mm_p if x.ndim == 2 else etp_sp_mv_p
    places, (shape, padded) = structure.tree_flatten()
    y = primitive.bind(x, *weights, *bias, *places, shape=shape, padded=padded, has_bias=bool(bias))
    return with_unit(y, unit)
