"""The places of the entries of a sparse matrix, as a pytree of index arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._errors import EtpDtypeError, EtpShapeError


@jax.tree_util.register_pytree_node_class
class SparseStructure:
    """Where the entries of a sparse ``(in, out)`` matrix stand: entry k in row ``rows[k]`` and
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
        self.rows, self.columns = (
            _indices(name, index, size)
            for name, index, size in zip(('rows', 'columns'), (rows, columns), self.shape)
        )
        if self.rows.shape != self.columns.shape:
            raise EtpShapeError(
                f'sparse_mat has {self.rows.size} row and {self.columns.size} column indices, '
                'expected as many of each.'
            )
        self.padded = any(
            bool(index.size and index.max() == size)
            for index, size in zip((self.rows, self.columns), self.shape)
        )
        self.pointers = _pointers(self.rows, self.shape[0], self.padded)

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
            major, minor = _decompress(sparse_mat, axis=int(by_column))
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


def _indices(name: str, index, size: int) -> np.ndarray:
    index = _concrete(name, index)
    if index.ndim != 1 or (index.size and (index.min() < 0 or index.max() > size)):
        raise EtpShapeError(
            f'sparse_mat has {name} of shape {index.shape} that are not all in [0, {size}], '
            'expected one index for each entry.'
        )
    return index.astype(np.int32, copy=False)


def _pointers(rows: np.ndarray, size: int, padded: bool) -> np.ndarray:
    """The first entry of each row, and their number; empty where rows are not in order."""
    if padded or bool((rows[1:] < rows[:-1]).any()):
        return np.zeros(0, np.int32)
    return np.searchsorted(rows, np.arange(size + 1, dtype=np.int32)).astype(np.int32)


def _decompress(sparse_mat, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The compressed and the stored index of each entry; entries behind the last pointer are
    padding.
    """
    indptr, minor = _concrete('indptr', sparse_mat.indptr), _concrete('indices', sparse_mat.indices)
    size = sparse_mat.shape[axis]
    if indptr.shape != (size + 1,):
        raise EtpShapeError(
            f'sparse_mat has shape {tuple(sparse_mat.shape)} and {indptr.size} pointers, expected '
            f'{size + 1}.'
        )
    major = np.full(minor.shape, size, np.int32)
    major[: indptr[-1]] = np.repeat(np.arange(size, dtype=np.int32), np.diff(indptr))
    return major, minor
