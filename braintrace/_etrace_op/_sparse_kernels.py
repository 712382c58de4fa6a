"""Kernels for sparse products on a CPU, compiled by ``numba`` where it is installed.

XLA calls them through its foreign function interface: a kernel gets the address of a call frame, of
which it reads and writes single words.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['kernel']

DTYPES = ('float32', 'float64')

# Places of 8-byte words in the structs of xla/ffi/api/c_api.h. A call frame: its extension, the
# interface, the stage, the addresses of the arguments and of the results. A buffer: the addresses
# of its numbers and of its shape. An extension asks for the version: the address of the answer, and
# the place of the version there and in the interface.
EXTENSION, INTERFACE, STAGE, ARGUMENTS, RESULTS = 1, 2, 4, 9, 14
NUMBERS, SHAPE = 3, 5
ANSWER, ANSWERED, VERSION = 3, 3, 4
EXECUTE = 3  # the stage in which a kernel runs


def kernel(name: str, *dtypes) -> Callable | None:
    """``fn(a, b, rows, columns, pointers, shape)``, whose result has this shape; None where there
    is no kernel for arrays of these dtypes.
    """
    (dtype, *others) = {jnp.dtype(each).name for each in dtypes}
    if others or dtype not in DTYPES or not _has_numba():
        return None

    def call(*operands):
        *arrays, shape = operands
        result = jax.ShapeDtypeStruct(shape, dtype)
        return jax.ffi.ffi_call(_registered(name, dtype), result, vmap_method='sequential')(*arrays)

    return call


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec('numba') is not None


KEPT: list[Any] = []  # compiled functions: XLA has their addresses


@functools.cache
def _registered(name: str, dtype: str) -> str:
    """Compile a kernel and register it with XLA under the name that is returned."""
    target = f'braintrace_{name}_{dtype}'
    handler = {'product': _product, 'entries': _entries}[name](np.dtype(dtype))
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.ctypes), platform='cpu')
    KEPT.append(handler)
    return target


def _product(dtype: np.dtype):
    """``y[column] += x[row] w`` for x ``(in, lanes)`` and y ``(out, lanes)``. Where the entries are
    sorted by row, those of a row whose x is zero are not read.
    """
    import numba

    @numba.njit(fastmath={'contract'})
    def body(x, w, rows, columns, pointers, y):
        y[:] = 0
        if pointers.shape[0]:
            for i in range(x.shape[0]):
                for b in range(x.shape[1]):
                    if x[i, b] != 0:
                        for k in range(pointers[i], pointers[i + 1]):
                            y[columns[k], b] += x[i, b] * w[k]
        else:
            for k in range(w.shape[0]):
                for b in range(x.shape[1]):
                    y[columns[k], b] += x[rows[k], b] * w[k]

    return _handler(body, (2, 1, 2), dtype)


def _entries(dtype: np.dtype):
    """``g = x[row] d[column]`` for x ``(in,)`` and d ``(out,)``."""
    import numba

    @numba.njit(fastmath={'contract'})
    def body(x, d, rows, columns, pointers, g):
        for k in range(g.shape[0]):
            g[k] = x[rows[k]] * d[columns[k]]

    return _handler(body, (1, 1, 1), dtype)


def _handler(body: Callable, ranks: tuple[int, int, int], dtype: np.dtype):
    """A C function for XLA that calls ``body(a, b, rows, columns, pointers, result)``; ``ranks`` of
    a, b and the result.
    """
    import numba

    a, b, result = (_array(rank, dtype.type) for rank in ranks)
    words, index = _words(), _array(1, np.int32)

    @numba.cfunc(numba.types.int64(numba.types.int64))
    def handler(frame):
        call = words(frame)
        if call[EXTENSION] != 0:
            words(words(call[EXTENSION])[ANSWER])[ANSWERED] = words(call[INTERFACE])[VERSION]
        elif call[STAGE] & 0xFFFFFFFF == EXECUTE:
            given, made = words(call[ARGUMENTS]), words(call[RESULTS])
            body(
                a(given[0]),
                b(given[1]),
                index(given[2]),
                index(given[3]),
                index(given[4]),
                result(made[0]),
            )
        return 0

    return handler


@functools.cache
def _pointer():
    """A compiled function from an address to a pointer."""
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    @intrinsic
    def pointer(context, address):
        def code(context, builder, signature, args):
            return builder.inttoptr(args[0], cgutils.voidptr_t)

        return types.voidptr(types.int64), code

    return pointer


@functools.cache
def _words():
    """A compiled function from an address to the words that stand there."""
    import numba

    pointer = _pointer()

    @numba.njit
    def words(address):
        return numba.carray(pointer(address), 16, np.int64)

    return words


def _array(rank: int, dtype: type):
    """A compiled function from the address of a buffer to its array."""
    import numba

    pointer, words = _pointer(), _words()

    @numba.njit
    def vector(address):
        buffer = words(address)
        return numba.carray(pointer(buffer[NUMBERS]), (words(buffer[SHAPE])[0],), dtype)

    @numba.njit
    def matrix(address):
        buffer = words(address)
        shape = words(buffer[SHAPE])
        return numba.carray(pointer(buffer[NUMBERS]), (shape[0], shape[1]), dtype)

    return vector if rank == 1 else matrix
