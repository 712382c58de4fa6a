"""Cases of ops: calls on operands of given shapes, and the table of cases for the library's ops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import (
    ETP_PRIMITIVE_SPECS,
    ETP_PRIMITIVES,
    EtpOp,
    ETPPrimitive,
    SparseStructure,
    conv,
    einsum,
    element_wise,
    embedding,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)
from ..errors import OptionError
from ._application import Application, equations, is_inexact, values


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call of an op: the shapes and dtypes of its arrays, by position (``'0'``, ``'1'``, ...) or
    keyword, and its static arguments; ``structure``: the structure operands of a bare primitive.
    """

    op: Callable
    arrays: dict[str, jax.ShapeDtypeStruct]
    static: dict[str, Any]
    structure: tuple = ()

    @property
    def is_bare(self) -> bool:
        """Whether the op is a primitive, without a function for quantities around it."""
        return isinstance(self.op, ETPPrimitive)

    def __str__(self) -> str:
        shapes = [
            f'{"" if key.isdigit() else f"{key}="}{a.dtype.name}{list(a.shape)}'
            for key, a in self.arrays.items()
        ]
        return ', '.join([*shapes, *(f'{name}={value!r}' for name, value in self.static.items())])

    def call(self, arrays: dict) -> Any:
        """The op on these arrays."""
        positions = sorted((key for key in arrays if key.isdigit()), key=int)
        keywords = {key: a for key, a in arrays.items() if not key.isdigit()}
        return self.op(*(arrays[key] for key in positions), **keywords, **self.static)

    def values(self, seed: int) -> dict:
        """Numbers for the arrays."""
        rng = np.random.default_rng(seed)
        return {key: values(rng, aval, below=1) for key, aval in self.arrays.items()}

    def role(self, key: str, invars: dict[str, int]) -> str:
        """The keyword of an array, or the name of the trainable at its position in the
        equation.
        """
        return {str(index): name for name, index in invars.items()}.get(key, key)

    def wide(self, x64: bool) -> Case:
        """With operands of float64, or at least float32."""
        least = jnp.float64 if x64 else jnp.float32
        return dataclasses.replace(
            self,
            arrays={
                key: jax.ShapeDtypeStruct(
                    a.shape, jnp.promote_types(a.dtype, least) if is_inexact(a) else a.dtype
                )
                for key, a in self.arrays.items()
            },
        )

    def applications(self) -> list[Application]:
        """The ETP equations that the call binds."""
        if isinstance(self.op, ETPPrimitive):
            operands = tuple(self.arrays.values())
            return [Application(self.op, self.static, operands, self.structure)]
        closed = jax.make_jaxpr(self.call)(self.arrays)
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return [
            Application(
                eqn.primitive,
                dict(eqn.params),
                tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars),
                tuple(constants[v] for v in structure_of(eqn.primitive, eqn.invars)),
            )
            for eqn in equations(closed)
        ]


def structure_of(op: Any, operands: Sequence) -> Sequence:
    """The operands that are the structure of a bare primitive."""
    return operands[len(operands) - len(getattr(op, 'structure', ())) :]


def made(op: Callable, case: Any) -> Case:
    """A pair ``(operands, params)`` as a case of ``op``; arrays may be in ``params`` too."""
    try:
        operands, params = case
        arrays = {
            str(i): jax.ShapeDtypeStruct(tuple(a.shape), jnp.dtype(a.dtype))
            for i, a in enumerate(operands)
        }
        is_array = lambda value: isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray)
        arrays |= {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype)
            for name, a in params.items()
            if is_array(a)
        }
        static = {name: value for name, value in params.items() if not is_array(value)}
        return Case(op, arrays, static, tuple(map(jnp.asarray, structure_of(op, operands))))
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f'check: a case is {case!r}; expected a pair (operands, params): operands with shape '
            'and dtype, and a dict of keyword arguments.'
        ) from error


# the cases of the library's ops -------------------------------------------------------------------


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _pattern(rows: int, columns: int, entries: int, repeated: bool = False) -> SparseStructure:
    at = np.random.default_rng(0).choice(rows * columns, entries, replace=repeated)
    return SparseStructure(*np.divmod(at, columns), (rows, columns))


def _einsum(equation: str, x: tuple, weight: tuple, *bias: tuple) -> tuple:
    arrays = dict(zip(('x', 'weight', 'bias'), (x, weight, *bias), strict=False))
    return (), {'equation': equation, **{name: shape(*sizes) for name, sizes in arrays.items()}}


BUILT_IN: dict[Callable, list[tuple]] = {
    matmul: [
        ([shape(4, 3), shape(3, 5), shape(5)], {}),
        ([shape(1, 2), shape(2, 3)], {}),
        ([shape(2, 0), shape(0, 5)], {}),
        ([shape(3), shape(3, 5), shape(5)], {}),
    ],
    element_wise: [([shape(3, 2)], {}), ([shape()], {})],
    sparse_matmul: [
        ([shape(2, 6), shape(7)], {'sparse_mat': _pattern(6, 5, 7)}),
        (
            [shape(3, 4), shape(20)],
            {'sparse_mat': _pattern(4, 3, 20, repeated=True), 'bias': shape(3)},
        ),
        ([shape(6), shape(7)], {'sparse_mat': _pattern(6, 5, 7), 'bias': shape(5)}),
    ],
    lora_matmul: [
        ([shape(4, 3), shape(3, 2), shape(2, 5)], {'alpha': 1.5, 'bias': shape(5)}),
        ([shape(1, 6), shape(6, 2), shape(2, 3)], {'alpha': -0.5}),
        ([shape(3), shape(3, 2), shape(2, 5)], {'alpha': 1.5}),
    ],
    conv: [
        ([shape(2, 3, 9), shape(4, 3, 3), shape(4)], {}),
        (
            [shape(1, 9, 3), shape(4, 3, 5)],
            {'padding': 'VALID', 'dimension_numbers': ('NWC', 'WIO', 'NWC')},
        ),
        (
            [shape(2, 4, 6, 5), shape(6, 2, 3, 2), shape(6)],
            {
                'strides': (2, 1),
                'padding': ((1, 2), (0, 3)),
                'lhs_dilation': (1, 2),
                'rhs_dilation': (2, 1),
                'feature_group_count': 2,
            },
        ),
    ],
    einsum: [
        _einsum('bhi,hio->boh', (2, 3, 4), (3, 4, 2)),
        _einsum('bi,i->bi', (3, 4), (4,), (4,)),
        _einsum('bi,io->bi', (3, 4), (4, 2)),
        _einsum('gi,gio->go', (2, 3), (2, 3, 5), (2, 5)),
        _einsum('bti,io->bto', (2, 4, 3), (3, 5), (5,)),
        _einsum('ti,io->ot', (4, 3), (3, 5), (5,)),
    ],
    grouped_matmul: [([shape(4, 2, 3), shape(2, 3, 5), shape(2, 5)], {})],
    embedding: [
        ([shape(3, dtype=jnp.int32), shape(7, 4)], {}),
        ([shape(dtype=jnp.int32), shape(7, 4)], {}),
    ],
}


@functools.cache
def _built_in() -> list[Case]:
    """The cases of the library's functions."""
    return [made(op, case) for op, cases in BUILT_IN.items() for case in cases]


def registered() -> dict[str, Callable]:
    """Every registered op by its name: each ``EtpOp``, and each primitive that belongs to none."""
    owners = [(getattr(primitive, 'op', None) or primitive) for primitive in ETP_PRIMITIVES]
    return {op.name: op for op in sorted(owners, key=lambda op: op.name)}


def subject(op: Any) -> tuple[str, Any]:
    """The name of an op in a report, and the op; a string is the name of a registered one."""
    if isinstance(op, str):
        every = {primitive.name: primitive for primitive in ETP_PRIMITIVES} | registered()
        if op not in every:
            raise OptionError(
                f'no ETP primitive is called {op!r}. Registered: {", ".join(registered())}.'
            )
        return op, every[op]
    if not callable(op):
        raise OptionError(
            f'op is a {type(op).__name__}; give an EtpOp, an ETPPrimitive, a function that binds '
            'one, or a registered name.'
        )
    return getattr(op, 'name', None) or getattr(op, '__name__', None) or type(op).__name__, op


def cases_of(op: Callable, given: Sequence | None) -> list[Case]:
    """The given cases, or the cases that come with the op."""
    if given is not None:
        return [made(op, case) for case in given]
    if isinstance(op, EtpOp):
        return [made(op, case) for case in op.spec.cases]
    if not isinstance(op, ETPPrimitive):
        return [case for case in _built_in() if case.op is op]
    owner, spec = getattr(op, 'op', None), ETP_PRIMITIVE_SPECS.get(op)
    if owner is None and spec is not None and spec.cases:
        return [made(op, case) for case in spec.cases]
    # A form of an op, or a primitive of the library: the cases of functions that bind it.
    every = _built_in() if owner is None else cases_of(owner, None)
    return [case for case in every if op in [app.primitive for app in case.applications()]]
