"""Sparse products on a CPU by kernels, compiled by ``numba`` where it is installed: what the
primitives run there in place of XLA's code, and how they read and write a trace.

XLA calls them through its foreign function interface: a kernel gets the address of a call frame, of
which it reads and writes single words.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import FUSED_SAMPLES, add_bias, etp_sp_mm_p, etp_sp_mv_p, is_dense, sparse_entries

DTYPES = ('float32', 'float64')

unsigned = np.uint64

# Places of 8-byte words in the structs of xla/ffi/api/c_api.h. A call frame: its extension, the
# interface, the stage, the addresses of the arguments and of the results. A buffer: the addresses
# of its numbers and of its shape. An extension asks for the version: the address of the answer, and
# the place of the version there and in the interface.
EXTENSION, INTERFACE, STAGE, ARGUMENTS, RESULTS = 1, 2, 4, 9, 14
NUMBERS, SHAPE = 3, 5
ANSWER, ANSWERED, VERSION = 3, 3, 4
KEEP, CLEAR = 1, 2  # what to do with a lane of a trace; 0: nothing
EXECUTE = 3  # the stage in which a kernel runs


def kernel(name: str, *dtypes) -> Callable | None:
    """``fn(*arrays, results, onto)``: arrays of these shapes, ``onto`` for each the place of the
    array that is overwritten; None where there is no kernel for arrays of these dtypes.
    """
    (dtype, *others) = {jnp.dtype(each).name for each in dtypes}
    if others or dtype not in DTYPES or not _has_numba():
        return None

    def call(*arrays, results: Sequence[tuple], onto: Sequence[int] = ()):
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape in results]
        aliases = {place: i for i, place in enumerate(onto)}
        kinds = {'i': jnp.int32, 'f': dtype}  # a kernel takes no other
        arrays = tuple(a.astype(kinds[a.dtype.kind]) for a in arrays)
        return jax.ffi.ffi_call(
            _registered(name, dtype), made, vmap_method='sequential', input_output_aliases=aliases
        )(*arrays)

    return call


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec('numba') is not None


KEPT: list[Any] = []  # compiled functions: XLA has their addresses


@functools.cache
def _registered(name: str, dtype: str) -> str:
    """Compile a kernel and register it with XLA under the name that is returned."""
    target = f'braintrace_{name}_{dtype}'
    handler = _handler(KERNELS[name](np.dtype(dtype).type))
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.ctypes), platform='cpu')
    KEPT.append(handler)
    return target


# Each makes ``body(given, made)`` of the addresses of the arrays and of the results. No index is
# negative: a loop that would end there reads its numbers one by one, which is twice as fast as the
# instruction that gathers several, and an unsigned one is not asked whether it counts from the end.


def _product(dtype: type):
    """``y[column] += x[row] w`` for x ``(in, lanes)`` and y ``(out, lanes)``. Where the entries are
    sorted by row, those of a row whose x is zero are not read.
    """
    import numba

    index, vector, matrix = _array(1, np.int32), _array(1, dtype), _array(2, dtype)

    @numba.njit(fastmath={'contract'})
    def body(given, made):
        x, w, y = matrix(given[0]), vector(given[1]), matrix(made[0])
        rows, columns, pointers = index(given[2]), index(given[3]), index(given[4])
        y[:] = 0
        if pointers.shape[0]:
            for i in range(x.shape[0]):
                for b in range(x.shape[1]):
                    if x[i, b] != 0:
                        for k in range(unsigned(pointers[i]), unsigned(pointers[i + 1])):
                            y[columns[k], b] += x[i, b] * w[k]
        else:
            for k in range(w.shape[0]):
                for b in range(x.shape[1]):
                    y[columns[k], b] += x[rows[k], b] * w[k]

    return body


def _entries(dtype: type):
    """``g = sum_t x_t[row] d_t[column]`` for x ``(t, in)`` and d ``(t, out)``. Where the entries
    are sorted by row, nothing is read for an x of zero.
    """
    import numba

    index, vector, matrix = _array(1, np.int32), _array(1, dtype), _array(2, dtype)

    @numba.njit(fastmath={'contract'})
    def body(given, made):
        x, d, g = matrix(given[0]), matrix(given[1]), vector(made[0])
        rows, columns, pointers = index(given[2]), index(given[3]), index(given[4])
        if pointers.shape[0] == 0:
            for k in range(g.shape[0]):
                if columns[k] < 0:
                    break
                g[k] = x[0, rows[k]] * d[0, columns[k]]
                for t in range(1, x.shape[0]):
                    g[k] += x[t, rows[k]] * d[t, columns[k]]
            return
        for i in range(x.shape[1]):
            first, last = unsigned(pointers[i]), unsigned(pointers[i + 1])
            written = False
            for t in range(x.shape[0]):
                there = x[t, i]
                if there != 0 and not written:
                    written = True
                    for k in range(first, last):
                        j = columns[k]
                        if j < 0:
                            break
                        g[k] = there * d[t, j]
                elif there != 0:
                    for k in range(first, last):
                        j = columns[k]
                        if j < 0:
                            break
                        g[k] += there * d[t, j]
            if not written:
                g[first:last] = 0

    return body


def _dots(dtype: type):
    """``g = sum over blocks and lanes of x[row] d[column]`` for x ``(blocks, in, lanes)`` and d
    ``(blocks, out, lanes)``: the lanes of a block lie together, so that an entry reads one piece.
    """
    import numba

    index, vector, cube = _array(1, np.int32), _array(1, dtype), _array(3, dtype)

    @numba.njit(fastmath={'contract', 'reassoc', 'nsz'})
    def body(given, made):
        x, d, g = cube(given[0]), cube(given[1]), vector(made[0])
        rows, columns = index(given[2]), index(given[3])
        g[:] = 0
        for b in range(x.shape[0]):
            for k in range(g.shape[0]):
                i, j = rows[k], columns[k]
                if i < 0 or j < 0:
                    break
                total = dtype(0)
                for t in range(x.shape[2]):
                    total += x[b, i, t] * d[b, j, t]
                g[k] += total

    return body


def _rows(dtype: type):
    """``e += sum_t x_t[row] q_t[column]`` for x ``(t, lanes, in)``, q ``(t, lanes, out)`` and e
    ``(lanes, entries)``, in lanes with something to do. Where the entries are sorted by row,
    nothing is read for an x of zero.
    """
    import numba

    index, cube, laned = _array(1, np.int32), _array(3, dtype), _laned(dtype)

    @numba.njit(fastmath={'contract'})
    def body(given, made):
        x, q, todo = cube(given[0]), cube(given[1]), index(given[5])
        rows, columns, pointers = index(given[2]), index(given[3]), index(given[4])
        e = laned(made[0], todo, columns)
        for b in range(e.shape[0]):
            if not todo[b]:
                continue
            if pointers.shape[0] == 0:
                for t in range(x.shape[0]):
                    for k in range(e.shape[1]):
                        j = columns[k]
                        if j < 0:
                            break
                        e[b, k] += x[t, b, rows[k]] * q[t, b, j]
                continue
            for i in range(x.shape[2]):
                for t in range(x.shape[0]):
                    there = x[t, b, i]
                    if there != 0:
                        for k in range(unsigned(pointers[i]), unsigned(pointers[i + 1])):
                            j = columns[k]
                            if j < 0:
                                break
                            e[b, k] += there * q[t, b, j]

    return body


def _read(states: int, dtype: type):
    """``g += sum over lanes and states s of lam_s[column] e_s`` where a lane's flag is set, for lam
    ``(lanes, out, states)`` and one or two e ``(lanes, entries)``.
    """
    import numba

    index, vector = _array(1, np.int32), _array(1, dtype)
    cube, laned = _array(3, dtype), _laned(dtype)

    @numba.njit(fastmath={'contract'})
    def body(given, made):
        flags, columns, lam = index(given[0]), index(given[1]), cube(given[2])
        # of one state the first is the last
        e, f = laned(given[3], flags, columns), laned(given[2 + states], flags, columns)
        g = vector(made[0])
        for b in range(e.shape[0]):
            if flags[b]:
                for k in range(g.shape[0]):
                    j = columns[k]
                    if j < 0:
                        break
                    if states == 1:
                        g[k] += lam[b, j, 0] * e[b, k]
                    else:
                        g[k] += lam[b, j, 0] * e[b, k] + lam[b, j, 1] * f[b, k]

    return body


def _move(states: int, dtype: type):
    """``e_s <- sum over states r of p_sr[column] e_r`` in lanes to keep and zero in lanes to clear,
    for one or two e ``(lanes, entries)`` and p ``(lanes, out, states^2)``, a matrix at each
    position.
    """
    import numba

    index, cube, laned = _array(1, np.int32), _array(3, dtype), _laned(dtype)

    @numba.njit(fastmath={'contract'})
    def body(given, made):
        todo, columns, p = index(given[0]), index(given[1]), cube(given[2])
        e, f = laned(made[0], todo, columns), laned(made[states - 1], todo, columns)
        for b in range(e.shape[0]):
            if todo[b] == CLEAR:
                e[b], f[b] = 0, 0
            if todo[b] != KEEP:
                continue
            for k in range(e.shape[1]):
                j = columns[k]
                if j < 0:
                    break
                if states == 1:
                    e[b, k] *= p[b, j, 0]
                else:
                    u, v = e[b, k], f[b, k]
                    e[b, k] = p[b, j, 0] * u + p[b, j, 1] * v
                    f[b, k] = p[b, j, 2] * u + p[b, j, 3] * v

    return body


KERNELS: dict[str, Callable] = {
    'product': _product,
    'entries': _entries,
    'dots': _dots,
    'rows': _rows,
    'read 1': functools.partial(_read, 1),
    'read 2': functools.partial(_read, 2),
    'move 1': functools.partial(_move, 1),
    'move 2': functools.partial(_move, 2),
}


def _handler(body: Callable):
    """A C function for XLA that calls ``body``."""
    import numba

    words = _words()

    @numba.cfunc(numba.types.int64(numba.types.int64))
    def handler(frame):
        call = words(frame)
        if call[EXTENSION] != 0:
            words(words(call[EXTENSION])[ANSWER])[ANSWERED] = words(call[INTERFACE])[VERSION]
        elif call[STAGE] & 0xFFFFFFFF == EXECUTE:
            body(words(call[ARGUMENTS]), words(call[RESULTS]))
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
    """A compiled function from an address to the words that are there."""
    import numba

    pointer = _pointer()

    @numba.njit
    def words(address):
        return numba.carray(pointer(address), 16, np.int64)

    return words


@functools.cache
def _array(rank: int, dtype: type):
    """A compiled function from the address of a buffer to its array."""
    import numba
    from numba.np.unsafe.ndarray import to_fixed_tuple

    pointer, words = _pointer(), _words()

    @numba.njit
    def array(address):
        buffer = words(address)
        shape = to_fixed_tuple(words(buffer[SHAPE]), rank)
        return numba.carray(pointer(buffer[NUMBERS]), shape, dtype)

    return array


@functools.cache
def _laned(dtype: type):
    """A compiled function from the address of a trace, with or without an axis of lanes, to its
    array ``(lanes, entries)``.
    """
    import numba

    pointer, words = _pointer(), _words()

    @numba.njit
    def laned(address, lanes, entries):
        shape = lanes.shape[0], entries.shape[0]
        return numba.carray(pointer(words(address)[NUMBERS]), shape, dtype)

    return laned


# the primitives on a CPU --------------------------------------------------------------------------


FEW = 0.25  # the share of x that is not zero, below which a kernel that skips zeros is faster


def _on_cpu(x, data, *others, shape, padded, has_bias: bool = False):
    """The product by a kernel, where there is one for this dtype and the entries are few."""
    *bias, rows, columns, pointers = others
    plain = functools.partial(etp_sp_mm_p.impl_fn, shape=shape, padded=padded, has_bias=has_bias)
    lanes = len(x) if x.ndim == 2 else 1
    found = None if padded or not lanes else kernel('product', x.dtype, data.dtype)
    if found is None or is_dense(lanes, len(rows), shape):
        return plain(x, data, *others)
    columns_of_x = x.T if x.ndim == 2 else x[:, None]
    results = [(shape[1], lanes)]
    (y,) = found(columns_of_x, data, rows, columns, pointers, results=results)
    y = y.T if x.ndim == 2 else y[:, 0]
    return add_bias(y, bias[0]) if has_bias else y


def _entries_on_cpu(x, d, rows, columns, pointers, *, shape):
    """The same by a kernel, where there is one for this dtype and the entries are few."""
    by_row = pointers.shape[0] > 0  # else XLA is as fast for several lanes
    found = kernel('entries', x.dtype, d.dtype) if len(x) == 1 or (by_row and len(x)) else None
    if found is None or is_dense(len(x), len(rows), shape):
        return sparse_entries.impl_fn(x, d, rows, columns, pointers, shape=shape)

    def by_kernel(*operands):
        return found(*operands, results=[rows.shape])[0]

    def by_blocks(x, d, rows, columns, pointers):
        if len(x) < FUSED_SAMPLES:
            return sparse_entries.impl_fn(x, d, rows, columns, pointers, shape=shape)
        dots = kernel('dots', x.dtype)
        return dots(_blocks(x), _blocks(d), rows, columns, results=[rows.shape])[0]

    operands = x, d, rows, columns, pointers
    if len(x) == 1:
        return by_kernel(*operands)
    return jax.lax.cond((x != 0).mean() < FEW, by_kernel, by_blocks, *operands)


def _blocks(a):
    """``(lanes, size)`` as ``(blocks, size, FUSED_SAMPLES)``, filled up with zeros."""
    a = jnp.pad(a, ((0, -len(a) % FUSED_SAMPLES), (0, 0)))
    return a.reshape(-1, FUSED_SAMPLES, a.shape[1]).swapaxes(1, 2)


def _at_y(vector, lanes: int):
    """Values of some states at y as ``(lanes, out, states)``."""
    return jnp.stack([x.reshape(lanes, -1) for x in vector], -1)


def _read_on_cpu(onto, signal, trace, alive, *, columns, shape, padded, **params):
    """``onto + sum over states and lanes of signal[column] e`` for the entries, by kernels for two
    states each; nothing where there are none.
    """
    arrays, total = trace['weight'], onto['weight']
    there = [(lam, e) for lam, e in zip(signal, arrays, strict=True) if lam is not None]
    dtypes = {total.dtype, *(a.dtype for pair in there for a in pair)}
    if padded or not arrays[0].size or kernel('read 1', *dtypes) is None:
        return {}
    lanes = arrays[0].size // len(columns)
    flags = jnp.broadcast_to(alive, lanes).astype(columns.dtype)
    for start in range(0, len(there), 2):
        few = there[start : start + 2]
        lam = _at_y([lam for lam, _ in few], lanes)
        read = kernel(f'read {len(few)}', total.dtype)
        operands = flags, columns, lam, *(e for _, e in few), total
        (total,) = read(*operands, results=[total.shape], onto=[len(operands) - 1])
    return {'weight': total}


def _write_on_cpu(p, blocks, trace, alive, *, rows, columns, pointers, shape, padded, **params):
    """The entries of one or two states after a change, in place by kernels; nothing where there are
    none.
    """
    arrays = trace['weight']
    dtypes = {a.dtype for a in jax.tree.leaves((p, blocks, arrays))}
    if padded or not arrays[0].size or len(arrays) > 2 or kernel('rows', *dtypes) is None:
        return {}
    (dtype,), entry, lanes = dtypes, list(arrays), arrays[0].size // len(columns)
    todo = jnp.where(alive, KEEP, CLEAR).astype(columns.dtype)
    todo = jnp.broadcast_to(todo, lanes)
    wide = [jnp.zeros(()) if v is None else v for row in p for v in row]
    moves = _at_y([jnp.broadcast_to(v, (lanes, shape[1])).astype(dtype) for v in wide], lanes)
    move, where = kernel(f'move {len(entry)}', dtype), [3 + s for s in range(len(entry))]
    shapes = [e.shape for e in entry]
    entry = list(move(todo, columns, moves, *entry, results=shapes, onto=where))
    add, todo = kernel('rows', dtype), jnp.minimum(todo, KEEP)
    for x, vector in blocks:
        for s, q in enumerate(vector):
            if q is not None:
                of_lanes = (a.reshape(len(q), lanes, -1) for a in (x, q))
                operands = *of_lanes, rows, columns, pointers, todo, entry[s]
                (entry[s],) = add(*operands, results=[entry[s].shape], onto=[6])
    return {'weight': tuple(entry)}


sparse_entries.lowering['cpu'] = _entries_on_cpu
for primitive in (etp_sp_mm_p, etp_sp_mv_p):
    primitive.lowering['cpu'] = _on_cpu
    primitive.trace_reader['cpu'], primitive.trace_writer['cpu'] = _read_on_cpu, _write_on_cpu
