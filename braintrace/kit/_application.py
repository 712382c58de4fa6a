"""An ETP primitive applied to operands of given shapes, and its rules as an executor calls them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import ETP_PRIMITIVE_SPECS, ETP_PRIMITIVES, ETPPrimitive, is_etp_primitive
from ..errors import RuleContractError

STEPS = 5
CHEAP = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def compiled(fn: Callable) -> Callable:
    """``jax.jit`` without expensive optimisation, for small programs that run once."""
    return jax.jit(fn, compiler_options=CHEAP)


def is_inexact(a) -> bool:
    """Whether an array or its description has a floating or complex dtype."""
    return jnp.issubdtype(a.dtype, jnp.inexact)


def cast(aval, dtype) -> jax.ShapeDtypeStruct:
    """Replace the dtype of a description if it is a floating one."""
    return jax.ShapeDtypeStruct(
        aval.shape, dtype if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype
    )


def stack(trees: Sequence) -> Any:
    """Stack trees of one structure along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def values(rng: np.random.Generator, aval, below: int) -> jax.Array:
    """Draw normal numbers, or integers from 0 to ``below`` (excluded)."""
    if not is_inexact(aval):
        return jnp.asarray(rng.integers(0, max(below, 1), aval.shape), aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return jnp.asarray(
            rng.normal(size=aval.shape) + 1j * rng.normal(size=aval.shape), aval.dtype
        )
    return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


def equations(jaxpr) -> Iterator:
    """The equations of ETP primitives in a jaxpr and in the jaxprs inside it."""
    for eqn in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        if is_etp_primitive(eqn.primitive):
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, 'jaxpr', inner), 'eqns'):
                    yield from equations(inner)


class Draw(NamedTuple):
    """Random values for one application: its operands, another x, and arrays of y's shape."""

    operands: tuple
    other_x: Any
    tangents: tuple
    many: tuple  # operands with a leading axis of three
    d: jax.Array
    e: jax.Array
    signals: jax.Array  # two states
    h: jax.Array
    xs: Any  # x at each step
    targets: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """A primitive, static parameters, and the shapes and dtypes of its operands; ``structure``: the
    last operands, which are given and not drawn.
    """

    primitive: ETPPrimitive
    params: dict[str, Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    structure: tuple = ()

    @functools.cached_property
    def invars(self) -> dict[str, int]:
        """Trainable name -> operand index. Raises ``RuleContractError`` for an index that is x's or
        beyond the operands.
        """
        found, x = self.primitive.trainable_invars(self.params), self.primitive.x_invar_index
        wrong = [
            f'{name!r} at {i}'
            for name, i in {**found, 'x': x}.items()
            if i is not None and i >= len(self.avals)
        ]
        wrong += [f'{name!r} at {i}, where x is' for name, i in found.items() if i == x]
        if wrong:
            raise RuleContractError(
                f'{self.primitive.name!r} has {len(self.avals)} operands, and its layout says '
                f'{", ".join(wrong)}.'
            )
        return found

    @property
    def batched(self) -> bool:
        return self.primitive.batched

    @property
    def x_aval(self) -> jax.ShapeDtypeStruct | None:
        return self.x(self.avals)

    @functools.cached_property
    def y_aval(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(self.impl, self.avals)

    @functools.cached_property
    def single(self) -> Application | None:
        """One sample of a batched application, if its primitive has a form for one sample."""
        form = next((p for p in ETP_PRIMITIVES if p.batched_form is self.primitive), None)
        x = self.x_aval
        return None if form is None or x is None else self._like(form, x, x.shape[1:])

    @functools.cached_property
    def several(self) -> Application | None:
        """Three samples of this application, if its primitive has a form for a batch."""
        form = self.primitive.batched_form
        x = self.x_aval
        return None if form is None or x is None else self._like(form, x, (3, *x.shape))

    def with_batch(self, size: int) -> Application:
        """The same application with another number of samples."""
        x = self.x_aval
        return self if x is None else self._like(self.primitive, x, (size, *x.shape[1:]))

    def _like(self, primitive, x_aval: jax.ShapeDtypeStruct, shape) -> Application:
        x = jax.ShapeDtypeStruct(shape, x_aval.dtype)
        return dataclasses.replace(
            self, primitive=primitive, avals=tuple(self.place(self.avals, x=x))
        )

    def cast(self, dtype) -> Application:
        """The same application with operands of another floating dtype."""
        return dataclasses.replace(self, avals=tuple(cast(a, dtype) for a in self.avals))

    # operands -------------------------------------------------------------------------------------

    def x(self, operands: Sequence) -> Any:
        index = self.primitive.x_invar_index
        return None if index is None else operands[index]

    def weights(self, operands: Sequence) -> dict[str, Any]:
        return {name: operands[index] for name, index in self.invars.items()}

    def place(self, operands: Sequence, x: Any = None, weights: dict | None = None) -> list:
        """Replace x or some weights among the operands."""
        placed = list(operands)
        if x is not None and self.primitive.x_invar_index is not None:
            placed[self.primitive.x_invar_index] = x
        for name, value in (weights or {}).items():
            placed[self.invars[name]] = value
        return placed

    def draw(self, seed: int) -> Draw:
        rng, y = np.random.default_rng(seed), self.y_aval
        rows = min((a.shape[0] for a in self.weights(self.avals).values() if a.shape), default=2)
        new = functools.partial(values, rng, below=rows)
        drawn = self.avals[: len(self.avals) - len(self.structure)]
        operands = lambda: (*map(new, drawn), *map(jnp.asarray, self.structure))
        x = lambda: None if self.x_aval is None else new(self.x_aval)
        ys = lambda *more: values(rng, jax.ShapeDtypeStruct((*more, *y.shape), y.dtype), below=2)
        return Draw(
            operands(),
            x(),
            operands(),
            stack([operands() for _ in range(3)]),
            ys(),
            ys(),
            jnp.stack([ys(), ys()], -1),
            ys(),
            jnp.zeros(STEPS) if self.x_aval is None else stack([x() for _ in range(STEPS)]),
            ys(STEPS),
        )

    # the function ---------------------------------------------------------------------------------

    def impl(self, operands: Sequence) -> jax.Array:
        """y by the plain implementation."""
        return self._y(plain(self.primitive)(*operands, **self.params))

    def bind(self, operands: Sequence) -> jax.Array:
        """y by the primitive."""
        return self._y(self.primitive.bind(*operands, **self.params))

    def _y(self, out) -> jax.Array:
        return out[self.primitive.y_outvar_index] if isinstance(out, tuple | list) else out

    def of_weights(self, operands: Sequence) -> Callable:
        """The implementation as a function of the trainables."""
        return lambda weights: self.impl(self.place(operands, weights=weights))

    def vjp(self, operands: Sequence, d: jax.Array) -> dict[str, jax.Array]:
        """The reverse rule of the implementation over all trainables."""
        return jax.vjp(self.of_weights(operands), self.weights(operands))[1](d)[0]

    # the rules ------------------------------------------------------------------------------------

    @property
    def rule_params(self) -> dict[str, Any]:
        """The parameters as rules get them, with the structure."""
        return {**self.params, **dict(zip(self.primitive.structure, self.structure, strict=True))}

    def rule(self, slot: str) -> Callable:
        return self.primitive.bound_rule(slot, self.rule_params, 'kit.check')

    def gradient(self, operands: Sequence, d: jax.Array, x: Any = None) -> dict[str, jax.Array]:
        return self.rule('xy_to_dw')(
            self.x(operands) if x is None else x, d, self.weights(operands)
        )

    def entry(self, operands: Sequence, d: jax.Array) -> dict[str, jax.Array]:
        """One step's trace entry, sample by sample."""
        root = self.primitive.root
        slot = 'xy_to_dw' if root.optional_rule('instant_drtrl') is None else 'instant_drtrl'
        rule = root.bound_rule(slot, self.rule_params, 'kit.check')
        one = self.primitive.by_sample(rule, self.rule_params)
        return one(self.x(operands), d, self.weights(operands))

    def carried(self, d: jax.Array, trace: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return self.rule('yw_to_w')(d, trace)

    def solved(
        self, signal: jax.Array, trace: dict[str, jax.Array], operands: Sequence
    ) -> dict[str, jax.Array]:
        if self.primitive.optional_rule('solve_drtrl') is not None:
            return self.rule('solve_drtrl')(signal, trace, self.weights(operands))
        return {
            name: e.sum(0) if self.batched else e for name, e in self.carried(signal, trace).items()
        }

    def empty(self, slot: str, states: int) -> Any:
        """The zeros of ``init_drtrl`` or ``init_pp``."""
        x = None if self.x_aval is None else variable(self.x_aval)
        weights = {name: variable(aval) for name, aval in self.weights(self.avals).items()}
        return self.rule(slot)(x, variable(self.y_aval), weights, states)


def plain(primitive: ETPPrimitive) -> Callable:
    """The implementation as the user gave it, without its reverse rule or a platform's lowering."""
    if primitive.original is not None:
        one = plain(primitive.original)
        return lambda *operands, **params: jax.vmap(
            functools.partial(one, **params), in_axes=primitive.axes
        )(*operands)
    spec = ETP_PRIMITIVE_SPECS.get(primitive)
    return primitive.impl_fn if spec is None else spec.impl


def variable(aval) -> SimpleNamespace:
    """The form in which ``init_*`` rules get an array: an object with ``aval``."""
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(aval.shape, aval.dtype))
