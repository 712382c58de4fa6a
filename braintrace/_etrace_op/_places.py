"""The element of y that each entry of a trainable feeds, found from an op's function alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import RuleContractError
from ._operands import drawn, shape_of

# Factors of the random weights at which an op is tried. An op that clips its weights, or takes one
# sign of them alone, has a derivative of zero at some weights; another scale may show the entry.
SCALES = (1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 10.0, -10.0)


@dataclasses.dataclass(frozen=True)
class Places:
    """The shapes of one sample of x and of y, and the element of y that each entry of a trainable
    feeds; hashable by value.

    ``at`` has a row for each trainable: its name, its shape, and either the axes of the trainable
    that are y's axes, in y's order, or the flat indices into y as bytes.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    at: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | bytes], ...] = ()

    def spread(self, name: str, d: jax.Array) -> jax.Array:
        """Turn factors at y, with any axes in front, into factors at the entries of a trainable."""
        lead = d.ndim - len(self.y)
        _, shape, where = next(row for row in self.at if row[0] == name)
        if isinstance(where, bytes):
            return d.reshape(*d.shape[:lead], math.prod(self.y))[
                ..., np.frombuffer(where, np.int32).reshape(shape)
            ]
        d = jnp.transpose(d, (*range(lead), *(lead + int(i) for i in np.argsort(where))))
        return jnp.expand_dims(d, [lead + axis for axis in range(len(shape)) if axis not in where])


@functools.lru_cache(maxsize=256)
def places_of(
    op: str, fn: Callable, x, weights: tuple[tuple[str, jax.ShapeDtypeStruct], ...], params, find
) -> Places:
    """The places of ``fn(x, *weights, **params)`` for one sample of these shapes.

    ``weights`` are pairs (name, shape and dtype). Where ``find`` is False, ``at`` stays empty.
    Raises ``RuleContractError`` if ``fn`` is not linear in x, or if an entry of a trainable feeds
    several elements of y.
    """
    call, avals = functools.partial(fn, **dict(params)), [aval for _, aval in weights]
    y = shape_of(op, call, x, *avals)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise RuleContractError(f'{op}: fn returned a {type(y).__name__}, expected one array.')
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        if not _is_linear_in_x(call, rng, x, avals):
            raise RuleContractError(
                f'{op}: fn is not linear in x, so its traces are not those of a product. Make the '
                'op of its impl with `kit.new_etp_primitive`, whose trace is right for any '
                'function.'
            )
        if not find:
            return Places(tuple(x.shape), tuple(y.shape))
        # The integers name the elements of y. The random numbers tell one element from several.
        names = 1.0 + np.arange(math.prod(y.shape)).reshape(y.shape)
        probes = [np.ones(y.shape), names, rng.normal(size=y.shape)]
        responses = _responses(call, rng, x, avals, probes)
    rows = []
    for (name, _), response in zip(weights, responses, strict=True):
        index = _index_of(op, name, response, probes[-1])
        axes = _axes(index, y.shape)
        rows.append((name, index.shape, index.astype(np.int32).tobytes() if axes is None else axes))
    return Places(tuple(x.shape), tuple(y.shape), tuple(rows))


def _is_linear_in_x(call: Callable, rng: np.random.Generator, x, avals: list) -> bool:
    """Whether ``call(2 a - 3 b) == 2 call(a) - 3 call(b)`` for two random x."""
    one, another, *values = (drawn(rng, aval) for aval in (x, x, *avals))
    together = call(2 * one - 3 * another, *values)
    apart = 2 * call(one, *values) - 3 * call(another, *values)
    return bool(_close(together, apart, 1e-4).all())


def _responses(
    call: Callable, rng: np.random.Generator, x, avals: list, probes: list[np.ndarray]
) -> list[np.ndarray]:
    """The gradient of each weight for each probe as y's cotangent: arrays ``(probes, *weight)``.

    A gradient that is zero for the first probe is taken from the first scale of the weights at
    which it is not.
    """
    value, *values = (drawn(rng, aval) for aval in (x, *avals))

    def at_scale(scale: float) -> list[np.ndarray]:
        y, pull = jax.vjp(lambda ws: call(value, *ws), [scale * w for w in values])
        pulled = [pull(jnp.asarray(probe, y.dtype))[0] for probe in probes]
        return [np.stack([np.asarray(g) for g in gs]) for gs in zip(*pulled, strict=True)]

    found = at_scale(SCALES[0])
    for scale in SCALES[1:]:
        if all((response[0] != 0).all() for response in found):
            break
        found = [
            np.where((old[0] == 0) & np.isfinite(new), new, old)
            for new, old in zip(at_scale(scale), found, strict=True)
        ]
    return found


def _index_of(op: str, name: str, response: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The flat index into y of each entry of a weight, from its response to the three probes.

    An entry that feeds the element k alone answers the probes with ``g``, ``g (k + 1)`` and ``g
    random[k]``. So the ratio of the first two is the integer k + 1, to within one rounding, and the
    third confirms it: an entry that feeds several elements gives a mean of integers, at whose place
    the random number is another one. An entry that feeds nothing gets the index 0.
    """
    ones, named, other = response
    ratio = np.divide(named, ones, out=np.ones_like(ones), where=ones != 0)
    index = np.clip(np.rint(np.real(ratio)).astype(int) - 1, 0, max(random.size - 1, 0))
    expected = ones * random.ravel()[index] if random.size else ones
    wrong = np.argwhere(~_close(other, expected, 1e-8))
    if len(wrong):
        raise RuleContractError(
            f'{op}: entry {[int(k) for k in wrong[0]]} of {name!r} feeds several elements of y, so '
            "a trace of the parameter's shape is not exact. Make the op with trace='position' or, "
            "if it is a product, trace='effective'."
        )
    return index


def _close(a, b, tolerance: float) -> np.ndarray:
    """Where two arrays agree, relative to the largest number in them."""
    largest = np.abs(np.stack([a, b])).max(initial=0)
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * largest)


def _axes(index: np.ndarray, y: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a weight that are y's axes, in y's order, if its index array says no more."""
    # An axis along which the index moves is one of y's; an axis of size 1 may stand for one of y's.
    moving = [
        a for a in range(index.ndim) if index.shape[a] > 1 and (index != index.take([0], a)).any()
    ]
    ones = [a for a in range(index.ndim) if index.shape[a] == 1]
    for extra in itertools.combinations(ones, max(0, len(y) - len(moving))):
        for axes in itertools.permutations([*moving, *extra]):
            if tuple(index.shape[a] for a in axes) == y:
                flat = np.arange(math.prod(y)).reshape(y).transpose(np.argsort(axes))
                others = [a for a in range(index.ndim) if a not in axes]
                if (index == np.expand_dims(flat, others)).all():
                    return tuple(axes)
    return None
