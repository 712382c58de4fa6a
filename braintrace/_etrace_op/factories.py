"""Whole ops from one function: primitive, rules and a callable for arrays and quantities."""
from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import EtpDtypeError, OptionError, RuleContractError
from . import einsums
from ._derive import output_trace, parameter_trace, vjp_of
from ._general import effective_rules, parameter_rules, places_of, position_rules, samples
from ._operands import (
    bias_operands,
    check_rank,
    check_shape,
    input_operand,
    proportional_product,
    shape_of,
    split,
    trainable_operand,
    with_unit,
)
from ._primitive import RULE_SLOTS, ETPPrimitive, check_callable
from ._spec import ETPPrimitiveSpec, all_or_none, get_primitive_spec, register_primitive_spec, whole_impl
from .conv import bind_conv, conv, register_conv

__all__ = ['EtpOp', 'make_conv_op', 'make_einsum_op', 'make_elementwise_op', 'make_linear_op', 'new_etp_primitive']

LAYOUTS = ('parameter', 'effective', 'position')
CONV_OPTIONS = tuple(name for name, p in inspect.signature(conv).parameters.items() if p.kind is p.KEYWORD_ONLY)


class EtpOp:
    """An ETP primitive as a function of arrays and quantities.

    ``op(x, *weights, bias=None, **static)`` where there is a bias. ``primitive`` is the form that a batch binds, or the only one;
    ``forms`` are all of them.
    """

    def __init__(self, name: str, call: Callable, forms: Sequence[ETPPrimitive]):
        self.name, self._call, self.forms = name, call, tuple(forms)
        for form in self.forms:
            form.op = self

    def __call__(self, *operands, **options):
        """Apply the op."""
        return self._call(*operands, **options)

    def __repr__(self) -> str:
        return f'EtpOp({"; ".join(map(repr, self.forms))})'

    @property
    def primitive(self) -> ETPPrimitive:
        return self.forms[0]

    @property
    def spec(self) -> ETPPrimitiveSpec:
        return get_primitive_spec(self.primitive)

    @property
    def lowering(self):
        """Platform -> function in the place of the implementation of the first form (see :class:`braintrace.ETPPrimitive`)."""
        return self.primitive.lowering

    @property
    def trace_kernel(self):
        """Platform -> fused update of the trace of the first form."""
        return self.primitive.trace_kernel

    @property
    def rules(self) -> dict[str, Callable]:
        """The rules of the first form, by slot."""
        return {slot: rule for slot in RULE_SLOTS if (rule := self.primitive.optional_rule(slot)) is not None}


def new_etp_primitive(spec: ETPPrimitiveSpec) -> EtpOp:
    """Register a primitive by its spec, with what the spec leaves out derived from ``impl``: ``op(*operands, **params)``.

    A spec without trace rules gets a trace of the derivative of every element of y, right for every op and large: ``(batch, *y, size of
    the trainable)``. The rules of a layout (``yw_to_w``, ``init_drtrl``, ``instant_drtrl``, ``solve_drtrl``) belong together: give those of
    your layout, or none. ``xy_to_dw`` defaults to the reverse rule of ``impl``, ``trainable_invars_fn`` to ``{'weight': 1}``.

    y has the product of the operands' units, and a trainable called ``bias`` y's. Raises ``RuleContractError`` for a part of a layout, a
    rule that is no function, a name that is taken; the op raises ``EtpUnitError`` for a unit of an operand to which it is not proportional.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> op = kit.new_etp_primitive(kit.ETPPrimitiveSpec('doc_cumulative', lambda x, w: jnp.cumsum(x * w, -1), batched=True))
    >>> op(jnp.ones((2, 3)), jnp.array([1., 2., 3.]))[0]
    Array([1., 3., 6.], dtype=float32)
    """
    if not isinstance(spec, ETPPrimitiveSpec):
        raise RuleContractError(f'expected an ETPPrimitiveSpec, found a {type(spec).__name__}.')
    invars = spec.trainable_invars_fn or (lambda params: {'weight': 0 if spec.x_invar_index is None else 1})
    of_weights = _of_weights(spec, invars)
    own = [slot for slot in ('yw_to_w', 'init_drtrl', 'instant_drtrl', 'solve_drtrl') if getattr(spec, slot) is not None]
    if own and not {'yw_to_w', 'init_drtrl'} <= set(own):
        raise RuleContractError(f'the spec of {spec.name!r} has {", ".join(own)} of a layout of its own, which needs yw_to_w and '
                                'init_drtrl together (and instant_drtrl and solve_drtrl where that is not the parameter\'s). Give all, or '
                                'none.')
    derived: dict[str, Any] = {} if own else position_rules(of_weights, spec.batched)

    def xy_to_dw(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: of_weights(x, w, **params), weights)
        return pull(hidden_dim.astype(y.dtype))[0]
    derived |= {'trainable_invars_fn': invars, 'xy_to_dw': spec.xy_to_dw or xy_to_dw, 'init_pp': spec.init_pp or output_trace}
    primitive = register_primitive_spec(dataclasses.replace(spec, **derived))

    def call(*operands, **params):
        _check_static(spec.name, params, params if spec.static is None else spec.static)
        bind = functools.partial(primitive.bind, **params)
        if not any(isinstance(operand, u.Quantity) for operand in operands):
            try:
                return bind(*operands)
            except (TypeError, ValueError):
                shape_of(spec.name, bind, *operands)
                raise
        values, units = zip(*(split(spec.name, f'operand {i}', operand) for i, operand in enumerate(operands)), strict=True)
        bias = invars(params).get('bias')
        shape_of(spec.name, bind, *values)
        unit = proportional_product(spec.name, primitive.impl_fn, values, units, params, bias)
        if bias is not None:
            values = (*values[:bias], *bias_operands(spec.name, operands[bias], values[bias].shape, unit), *values[bias + 1:])
        return jax.tree.map(lambda y: with_unit(y, unit), bind(*values))
    return EtpOp(spec.name, call, [primitive])


def _of_weights(spec: ETPPrimitiveSpec, invars: Callable) -> Callable:
    """``impl`` as ``(x, weights, **params) -> y``."""
    impl = whole_impl(spec)

    def of_weights(x, weights, **params):
        operands = {} if spec.x_invar_index is None else {spec.x_invar_index: x}
        operands |= {index: weights[name] for name, index in invars(params).items()}
        out = impl(*(operands[i] for i in sorted(operands)), **params)
        return out[spec.y_outvar_index] if isinstance(out, tuple | list) else out
    return of_weights


def make_linear_op(name: str, fn: Callable, *, x: int = 0, trainable: Mapping[str, int] | None = None, trace: str = 'parameter',
                   static: Sequence[str] = (), rank: int = 1, cases: Sequence[tuple] = ()) -> EtpOp:
    """An op from ``fn``, which maps one sample and is linear in x and in each trainable: ``op(x, *weights, bias=None, **static)``.

    ``x`` and ``trainable`` (default ``{'weight': 1}``) are positions of arguments of ``fn``, ``static`` its hashable keyword arguments,
    ``rank`` the number of axes of one sample of x; one axis more is a batch. ``bias`` has the shape of one sample of y. ``cases``: pairs
    (operands of the op, static parameters) on which ``kit.check`` tries the laws.
    ``trace``: ``'parameter'`` where each entry of a trainable feeds one element of y per sample, as in a dense product;
    ``'effective'`` keeps a trace of the matrix from x to y that the trainables make, as for low rank (pulled back through the trainables
    as they are when the gradient is asked for); ``'position'`` one of every entry at every element of y, right for all.

    y has the product of the operands' units. Raises ``RuleContractError`` at the first call where ``fn`` is not linear in x or
    ``'parameter'`` is not exact, and the errors of the other ops for operands that do not fit.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> low_rank = kit.make_linear_op('doc_low_rank', lambda x, b, a: x @ b @ a, trainable={'b': 1, 'a': 2}, trace='effective')
    >>> low_rank(jnp.ones((5, 3)), jnp.ones((3, 2)), jnp.ones((2, 4)), bias=jnp.ones(4)).shape
    (5, 4)
    """
    check_callable(f'fn of {name!r}', fn)
    is_number = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    if isinstance(static, str) or not isinstance(trainable, Mapping | None) or not is_number:
        raise OptionError(f'make_linear_op: static={static!r}, trainable={trainable!r}, rank={rank!r}; expected a tuple of names, a dict '
                          'of name -> position of an argument of fn, and a number of axes.')
    trainable, static = dict(trainable or {'weight': 1}), tuple(static)
    if trace not in LAYOUTS:
        raise OptionError(f'make_linear_op: trace is {trace!r}; choose one of {LAYOUTS}.')
    if sorted([x, *trainable.values()]) != list(range(1 + len(trainable))) or 'bias' in trainable:
        raise OptionError(f'make_linear_op: x={x} and trainable={trainable} are not the positions 0 to {len(trainable)} of the arguments '
                          "of fn, each once, with names other than 'bias'.")
    names = tuple(sorted(trainable, key=trainable.__getitem__))
    order = sorted(('x', *names), key={**trainable, 'x': x}.__getitem__)

    def of_sample(x_value, *weights, places, has_bias=False, **params):
        args = dict(zip((trainable[n] for n in names), weights, strict=False)) | {x: x_value}
        y = fn(*(args[i] for i in sorted(args)), **params)
        return y + weights[len(names)] if has_bias else y

    def invars(params: dict) -> dict[str, int]:
        return {n: 1 + i for i, n in enumerate((*names, 'bias') if params.get('has_bias') else names)}

    def plain(x_value, *weights, **params):
        return of_sample(x_value, *weights, places=None, **params)

    def register(batched: bool) -> ETPPrimitive:
        impl = samples(of_sample, 0) if batched else of_sample

        def of_weights(x_value, weights, **params):
            return impl(x_value, *(weights[n] for n in invars(params)), **params)
        rules: dict[str, Any] = {
            'parameter': lambda: {**parameter_rules(), 'init_drtrl': parameter_trace(batched)},
            'effective': lambda: effective_rules(_without_flag(plain), lambda weights: [weights[n] for n in names], batched),
            'position': lambda: position_rules(of_weights, batched)}[trace]()
        return register_primitive_spec(ETPPrimitiveSpec(
            name if batched else f'{name}_sample', impl, xy_to_dw=vjp_of(impl, invars), init_pp=output_trace, trainable_invars_fn=invars,
            batched=batched, cases=tuple(cases), **rules))
    forms = _both_forms(register)

    def call(*operands, bias=None, **params):
        if len(operands) != 1 + len(names):
            raise OptionError(f'{name}: {len(operands)} operands given, expected {1 + len(names)} by position: '
                              f'{", ".join(order)}.')
        _check_static(name, params, static)
        weights, units = zip(*(trainable_operand(name, n, operands[trainable[n]]) for n in names), strict=True)
        value, unit = input_operand(name, 'x', operands[x], jnp.result_type(*weights))
        check_rank(name, 'x', value.shape, {rank: f'{rank} axes', rank + 1: f'a batch and {rank} axes'}, 'Map others with `jax.vmap`.')
        batched = value.ndim > rank
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (value[0] if batched and len(value) else value, *weights)]
        avals[0] = jax.ShapeDtypeStruct(value.shape[batched:], value.dtype)
        places = places_of(name, plain, names, avals[0], tuple(avals[1:]), tuple(sorted(params.items())), trace == 'parameter')
        unit = proportional_product(name, plain, avals, [unit, *units], params)
        bias = bias_operands(name, bias, places.y, unit)
        return with_unit(forms[not batched].bind(value, *weights, *bias, places=places, has_bias=bool(bias), **params), unit)
    return EtpOp(name, call, forms)


def _arrays(*shapes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]


def _without_flag(fn: Callable) -> Callable:
    def call(*operands, has_bias=False, **params):
        return fn(*operands, **params)
    return call


def _both_forms(register: Callable[[bool], ETPPrimitive]) -> tuple[ETPPrimitive, ETPPrimitive]:
    """The batched form and that of one sample, known to each other."""
    with all_or_none():
        batched, single = register(True), register(False)
    batched.fold_axes = lambda params: (0, 0)
    single.batched_form = batched
    return batched, single


def _check_static(name: str, params: dict, static: Sequence[str]) -> None:
    if set(params) != set(static):
        raise OptionError(f'{name}: static parameters {sorted(params)} given, expected {sorted(static)}.')
    for key, value in params.items():
        try:
            hash(value)
        except TypeError as error:
            raise EtpDtypeError(f'{name}: static parameter {key!r} is a {type(value).__name__}, which has no hash. Pass arrays as '
                                'operands, and lists as tuples.') from error


def make_einsum_op(name: str, equation: str, bias: bool = False) -> EtpOp:
    """An op of a fixed equation (see :func:`braintrace.einsum`): ``op(x, weight)``, or ``op(x, weight, bias)`` with ``bias=True``.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> heads = kit.make_einsum_op('doc_heads', 'bhi,hio->bho', bias=True)
    >>> heads(jnp.ones((2, 4, 3)), jnp.ones((4, 3, 5)), jnp.ones((4, 5))).shape
    (2, 4, 5)
    """
    letters, batched = einsums.parsed(name, equation)
    sizes = {axis: 2 + i for i, axis in enumerate(dict.fromkeys(equation.replace(' ', '').partition('->')[0].replace(',', '')))}
    x_axes = equation.replace(' ', '').partition(',')[0]
    shapes = [x_axes, letters.weight, *([letters.bias] if bias else [])]
    cases, wanted = [(_arrays(*([sizes[a] for a in axes] for axes in shapes)), {})], ((True,) if batched else (True, False))
    forms = einsums.register_forms(name, cases, [(lanes, bool(letters.others)) for lanes in wanted])

    has_bias = bias

    def call(x, weight, bias=None):
        if (bias is not None) != has_bias:
            raise OptionError(f'{name}: a bias is {"expected" if has_bias else "not expected"}; the op was made with bias={has_bias}.')
        return einsums.bound(name, forms, equation, x, weight, bias)
    return EtpOp(name, call, list(forms.values()))


def make_elementwise_op(name: str, fn: Callable) -> EtpOp:
    """An op of ``fn(x, weight)``, element by element and linear in x: ``op(x, weight)``, x with or without a batch axis in front.

    One sample of x, the weight and y have one shape. y has the product of the units; a weight to which ``fn`` is not proportional has none.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> gain = kit.make_elementwise_op('doc_gain', lambda x, w: x * jnp.tanh(w))
    >>> gain(jnp.ones((2, 3)), jnp.zeros(3)).shape
    (2, 3)
    """
    check_callable(f'fn of {name!r}', fn)

    def yw_to_w(hidden_dim, trace):
        return {'weight': trace['weight'] * hidden_dim}

    def register(batched: bool) -> ETPPrimitive:
        impl = samples(fn, 0) if batched else fn
        return register_primitive_spec(ETPPrimitiveSpec(
            name if batched else f'{name}_sample', impl, yw_to_w, vjp_of(impl, lambda params: {'weight': 1}), parameter_trace(batched),
            output_trace, lambda params: {'weight': 1}, batched=batched,
            cases=((_arrays((2, 3), (3,)), {}), (_arrays((4,), (4,)), {}))))
    forms = _both_forms(register)

    def call(x, weight):
        weight, weight_unit = trainable_operand(name, 'weight', weight)
        x, x_unit = input_operand(name, 'x', x, weight.dtype)
        batched = x.ndim > weight.ndim
        check_shape(name, 'x', x.shape[batched:], weight.shape, 'one sample of x has the shape of the weight')
        sample = jax.ShapeDtypeStruct(weight.shape, x.dtype)
        y = shape_of(name, fn, sample, weight)
        check_shape(name, 'y', y.shape, weight.shape, 'fn works element by element')
        (_, _, places), = places_of(name, fn, ('weight',), sample, (jax.ShapeDtypeStruct(weight.shape, weight.dtype),), (), True).at
        if weight.size and places != tuple(range(weight.ndim)):
            raise RuleContractError(f'{name}: fn moves elements of the weight to other places. Make the op with `kit.make_linear_op`.')
        unit = proportional_product(name, fn, [sample, weight], [x_unit, weight_unit], {})
        return with_unit(forms[not batched].bind(x, weight), unit)
    return EtpOp(name, call, forms)


def make_conv_op(name: str, dims: int) -> EtpOp:
    """A convolution over ``dims`` spatial axes: ``op(x, kernel, bias=None, **options)`` with the options of :func:`braintrace.conv`.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> conv1d = kit.make_conv_op('doc_conv1d', 1)
    >>> conv1d(jnp.ones((2, 3, 16)), jnp.ones((4, 3, 5)), padding='VALID').shape
    (2, 4, 12)
    """
    if isinstance(dims, bool) or not isinstance(dims, int) or dims < 1:
        raise OptionError(f'make_conv_op: dims is {dims!r}; give the number of spatial axes, an int >= 1.')
    spatial = (5, 4, 3, *(3,) * dims)[:dims]
    primitive = register_conv(name, [(_arrays((2, 3, *spatial), (4, 3, *(2,) * dims), (4,)), {})])

    def call(x, kernel, bias=None, **options):
        check_rank(name, 'kernel', getattr(kernel, 'shape', ()), {dims + 2: f'(out, in) and {dims} spatial axes'}, 'It is made for these.')
        unknown = [option for option in options if option not in CONV_OPTIONS]
        if unknown:
            raise OptionError(f'{name}: there is no option {", ".join(unknown)}; those of a convolution are {", ".join(CONV_OPTIONS)}.')
        return bind_conv(primitive, name, x, kernel, bias, **options)
    return EtpOp(name, call, [primitive])

