"""The static part of a sparse matrix: the rows and columns of its entries."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from .._errors import EtpDtypeError, EtpShapeError

__all__ = ['SparseStructure']


class SparseStructure:
    """Rows and columns of the entries of a sparse matrix ``(in, out)``, hashable by value; entries
    may repeat.

    ``live`` is False at entries that only pad the matrix (their index is the size of the axis),
    and None if no entry does.
    """

    __slots__ = ('rows', 'columns', 'shape', 'live', '_digest')

    def __init__(self, rows, columns, shape):
        self.shape = tuple(int(size) for size in shape)
        rows, columns = (
            _indices(name, index, size)
            for name, index, size in zip(('rows', 'columns'), (rows, columns), self.shape)
        )
        if rows.shape != columns.shape:
            raise EtpShapeError(
                f'sparse_mat has {rows.size} row and {columns.size} column indices, expected as '
                'many of each.'
            )
        live = (rows < self.shape[0]) & (columns < self.shape[1])
        self.live = None if live.all() else live
        self.rows, self.columns = (
            np.where(live, index, 0).astype(np.int32) for index in (rows, columns)
        )
        content = b''.join(array.tobytes() for array in (self.rows, self.columns, live))
        self._digest = hashlib.sha256(content).digest()

    @classmethod
    def of(cls, sparse_mat: Any) -> SparseStructure:
        """The structure of a CSR, CSC or COO matrix of ``saiunit.sparse`` or ``brainevent``."""
        if isinstance(sparse_mat, cls):
            return sparse_mat
        if hasattr(sparse_mat, 'row') and hasattr(sparse_mat, 'col'):
            return cls(sparse_mat.row, sparse_mat.col, sparse_mat.shape)
        layouts = {'CSR', 'CSC'} & {base.__name__ for base in type(sparse_mat).__mro__}
        if not layouts:
            raise EtpDtypeError(
                f'sparse_matmul: sparse_mat is a {type(sparse_mat).__name__}, expected a CSR, CSC '
                'or COO matrix of saiunit.sparse or brainevent; '
                '`saiunit.sparse.CSR.fromdense(mask)` makes one.'
            )
        by_column = 'CSC' in layouts
        major, minor = _decompress(sparse_mat, axis=int(by_column))
        rows, columns = (minor, major) if by_column else (major, minor)
        return cls(rows, columns, sparse_mat.shape)

    @property
    def size(self) -> int:
        """The number of stored entries."""
        return self.rows.size

    def __hash__(self) -> int:
        return hash((self.shape, self._digest))

    def __eq__(self, other) -> bool:
        return isinstance(other, SparseStructure) and (self.shape, self._digest) == (
            other.shape,
            other._digest,
        )

    def __repr__(self) -> str:
        return f'SparseStructure({self.shape[0]}x{self.shape[1]}, {self.size} entries)'


def _concrete(name: str, index) -> np.ndarray:
    try:
        return np.asarray(index)
    except jax.errors.TracerArrayConversionError as error:
        raise EtpDtypeError(
            f'sparse_matmul: the {name} of sparse_mat are traced, expected concrete indices; close '
            'over sparse_mat instead of passing its indices through jit, vmap or grad.'
        ) from error


def _indices(name: str, index, size: int) -> np.ndarray:
    index = _concrete(name, index)
    if index.ndim != 1 or (index.size and (index.min() < 0 or index.max() > size)):
        raise EtpShapeError(
            f'sparse_mat has {name} of shape {index.shape} that are not all in [0, {size}], '
            'expected one index for each entry.'
        )
    return index


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
    major = np.full(minor.shape, size)
    major[: indptr[-1]] = np.repeat(np.arange(size), np.diff(indptr))
    return major, minor
