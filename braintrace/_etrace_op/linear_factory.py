"""Whole ops from a function of one sample that is linear in its input and in its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import OptionError
from ._layouts import effective_rules, parameter_rules, position_rules, samples
from ._op import EtpOp, check_static
from ._operands import (
    bias_operands,
    check_rank,
    input_operand,
    proportional_product,
    trainable_operand,
    with_unit,
)
from ._places import places_of
from ._primitive import ETPPrimitive, check_callable
from ._rule_parts import output_trace, parameter_trace, vjp_of
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec

LAYOUTS = ('parameter', 'effective', 'position')


def make_linear_op(
    name: str,
    fn: Callable,
    *,
    x: int = 0,
    trainable: Mapping[str, int] | None = None,
    trace: str = 'parameter',
    static: Sequence[str] = (),
    rank: int = 1,
    cases: Sequence[tuple] = (),
) -> EtpOp:
    """Make an op of ``fn``, which maps one sample and is linear in x and in each trainable: ``op(x,
    *weights, bias=None, **static)``.

    ``x`` and ``trainable`` (default ``{'weight': 1}``) are positions of arguments of ``fn``,
    ``static`` its hashable keyword arguments, ``rank`` the number of axes of one sample of x; one
    axis more is a batch. ``bias`` has the shape of one sample of y. ``cases`` are pairs (operands
    of the op, static parameters) on which ``kit.check`` tries the laws.

    ``trace`` chooses the layout. ``'parameter'`` has an entry for each entry of a trainable; each
    of these must feed one element of y per sample, as in a dense product. ``'effective'`` has the
    matrix from x to y that the trainables make, as for low rank; the gradient is pulled back
    through the trainables of the step that asks for it. ``'position'`` has an entry for each entry
    of a trainable at each element of y, and is exact for all.

    y has the product of the operands' units. Raises ``RuleContractError`` at the first call where
    ``fn`` is not linear in x or ``'parameter'`` is not exact, and the errors of the other ops for
    operands that do not fit.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> low_rank = kit.make_linear_op('doc_low_rank', lambda x, b, a: x @ b @ a,
    ...                               trainable={'b': 1, 'a': 2}, trace='effective')
    >>> low_rank(jnp.ones((5, 3)), jnp.ones((3, 2)), jnp.ones((2, 4)), bias=jnp.ones(4)).shape
    (5, 4)
    """
    check_callable(f'fn of {name!r}', fn)
    is_number = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    if isinstance(static, str) or not isinstance(trainable, Mapping | None) or not is_number:
        raise OptionError(
            f'make_linear_op: static={static!r}, trainable={trainable!r}, rank={rank!r}; expected '
            'a tuple of names, a dict of name -> position of an argument of fn, and a number of '
            'axes.'
        )
    trainable = dict(trainable or {'weight': 1})
    if trace not in LAYOUTS:
        raise OptionError(f'make_linear_op: trace is {trace!r}; choose one of {LAYOUTS}.')
    if sorted([x, *trainable.values()]) != list(range(1 + len(trainable))) or 'bias' in trainable:
        raise OptionError(
            f'make_linear_op: x={x} and trainable={trainable} are not the positions 0 to '
            f"{len(trainable)} of the arguments of fn, each once, with names other than 'bias'."
        )
    op = LinearFunction(name, fn, x, trainable, trace, tuple(static), rank)
    forms = register_both_forms(lambda batched: op.register(batched, tuple(cases)))

    def call(*operands, bias=None, **params):
        return op.bind(forms, operands, bias, params)

    return EtpOp(name, call, forms)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearFunction:
    """The function that :func:`make_linear_op` was given and the places of its arguments."""

    name: str
    fn: Callable
    x: int
    trainable: dict[str, int]
    trace: str
    static: tuple[str, ...]
    rank: int

    @property
    def names(self) -> list[str]:
        """The trainables in the order in which the primitive takes them."""
        return sorted(self.trainable, key=self.trainable.__getitem__)

    def invars(self, params: dict) -> dict[str, int]:
        """``trainable_invars_fn`` of both forms: x comes first, a bias last."""
        names = [*self.names, 'bias'] if params.get('has_bias') else self.names
        return {name: 1 + i for i, name in enumerate(names)}

    def product(self, x, /, *weights, has_bias: bool = False, **params):
        """One sample of y without the bias; the weights are in the order of ``names``."""
        args = {self.x: x} | dict(zip(sorted(self.trainable.values()), weights, strict=True))
        return self.fn(*(args[i] for i in sorted(args)), **params)

    def of_sample(self, x, /, *operands, places, has_bias: bool = False, **params):
        """The implementation for one sample: the product, and the bias behind the weights."""
        count = len(self.trainable)
        y = self.product(x, *operands[:count], **params)
        return y + operands[count] if has_bias else y

    def register(self, batched: bool, cases: tuple) -> ETPPrimitive:
        impl = samples(self.of_sample, 0) if batched else self.of_sample
        return register_primitive_spec(
            ETPPrimitiveSpec(
                self.name if batched else f'{self.name}_sample',
                impl,
                xy_to_dw=vjp_of(impl, self.invars),
                init_pp=output_trace,
                trainable_invars_fn=self.invars,
                batched=batched,
                cases=cases,
                **self._trace_rules(impl, batched),
            )
        )

    def _trace_rules(self, impl: Callable, batched: bool) -> dict[str, Any]:
        """The rules of the chosen layout."""
        if self.trace == 'parameter':
            return {**parameter_rules(), 'init_drtrl': parameter_trace(batched)}
        if self.trace == 'effective':
            ordered = lambda weights: [weights[name] for name in self.names]
            return effective_rules(self.product, ordered, batched)

        def of_weights(x, weights, **params):
            return impl(x, *(weights[name] for name in self.invars(params)), **params)

        return position_rules(of_weights, batched)

    def bind(self, forms: Sequence[ETPPrimitive], operands: tuple, bias, params: dict):
        """Check the operands and bind the form that fits x."""
        name, names = self.name, self.names
        if len(operands) != 1 + len(names):
            order = sorted(('x', *names), key={**self.trainable, 'x': self.x}.__getitem__)
            raise OptionError(
                f'{name}: {len(operands)} operands given, expected {1 + len(names)} by position: '
                f'{", ".join(order)}.'
            )
        check_static(name, params, self.static)
        weights, units = zip(
            *(trainable_operand(name, n, operands[self.trainable[n]]) for n in names), strict=True
        )
        x, x_unit = input_operand(name, 'x', operands[self.x], jnp.result_type(*weights))
        layouts = {self.rank: f'{self.rank} axes', self.rank + 1: f'a batch and {self.rank} axes'}
        check_rank(name, 'x', x.shape, layouts, 'Map others with `jax.vmap`.')
        batched = x.ndim > self.rank
        sample = jax.ShapeDtypeStruct(x.shape[batched:], x.dtype)
        avals = tuple((n, jax.ShapeDtypeStruct(w.shape, w.dtype)) for n, w in zip(names, weights))
        static = tuple(sorted(params.items()))
        places = places_of(name, self.product, sample, avals, static, self.trace == 'parameter')
        values = [sample, *(aval for _, aval in avals)]
        unit = proportional_product(name, self.product, values, [x_unit, *units], params)
        bias = bias_operands(name, bias, places.y, unit)
        form = forms[0] if batched else forms[1]
        y = form.bind(x, *weights, *bias, places=places, has_bias=bool(bias), **params)
        return with_unit(y, unit)
