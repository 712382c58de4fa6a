"""Factories of primitives."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from ..errors import OptionError, RuleContractError
from . import einsums
from ._layouts import effective_rules, parameter_rules, position_rules, samples
from ._op import EtpOp, arrays, check_static
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
from ._primitive import ETPPrimitive, check_callable
from ._rule_parts import output_trace, parameter_trace, vjp_of
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec, whole_impl
from .automatic import places_of
from .conv import bind_conv, conv, register_conv

# linear ops ---------------------------------------------------------------------------------------
#
# Whole ops from a function of one sample that is linear in its input and in its weights.


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

    ``bias`` has the shape of one sample of y, and y the product of the operands' units.

    Parameters
    ----------
    x, trainable : int, dict
        Positions of arguments of ``fn``; ``{'weight': 1}`` by default.
    trace : str
        The layout. ``'parameter'`` has an entry for each entry of a trainable; each of these must
        feed one element of y per sample, as in a dense product. ``'effective'`` has the matrix from
        x to y that the trainables make, as for low rank; the gradient is pulled back through the
        trainables of the step that asks for it. ``'position'`` has an entry for each entry of a
        trainable at each element of y, and is exact for all.
    static : names
        The hashable keyword arguments of ``fn``.
    rank : int
        The number of axes of one sample of x; one axis more is a batch.
    cases : pairs (operands of the op, static parameters)
        On which ``kit.check`` tries the laws.

    Raises
    ------
    OptionError
        An argument has another value, or the op is called with other static parameters.
    RuleContractError
        The name is taken, or at the first call ``fn`` is not linear in x or ``'parameter'`` not
        exact.
    EtpShapeError, EtpDtypeError, EtpUnitError
        The op is called with operands that do not fit.

    Examples
    --------
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


# mapped and grouped ops ---------------------------------------------------------------------------
#
# Whole ops from one function or one description: primitive, rules, and a callable for arrays and
# quantities.


CONV_OPTIONS = tuple(
    name for name, p in inspect.signature(conv).parameters.items() if p.kind is p.KEYWORD_ONLY
)

# any function, from a spec ------------------------------------------------------------------------


def new_etp_primitive(spec: ETPPrimitiveSpec) -> EtpOp:
    """Register a primitive by its spec, and derive from ``impl`` what the spec leaves out:
    ``op(*operands, **params)``.

    Without trace rules the op gets a trace of the derivative of every element of y. It is exact for
    every op and large: ``(batch, *y, size of the trainable)``. The rules of a layout (``yw_to_w``,
    ``init_drtrl``, ``instant_drtrl``, ``solve_drtrl``) belong together: give all that your layout
    needs, or none. ``xy_to_dw`` defaults to the reverse rule of ``impl``, ``trainable_invars_fn``
    to ``{'weight': 1}``.

    y has the product of the operands' units, and a trainable called ``bias`` has y's unit. Raises
    ``RuleContractError`` for a part of a layout, a rule that is no function, a name that is taken;
    the op raises ``EtpUnitError`` for an operand with a unit to which it is not proportional.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> op = kit.new_etp_primitive(kit.ETPPrimitiveSpec(
    ...     'doc_cumulative', lambda x, w: jnp.cumsum(x * w, -1), batched=True))
    >>> op(jnp.ones((2, 3)), jnp.array([1., 2., 3.]))[0]
    Array([1., 3., 6.], dtype=float32)
    """
    if not isinstance(spec, ETPPrimitiveSpec):
        raise RuleContractError(f'expected an ETPPrimitiveSpec, found a {type(spec).__name__}.')
    whole = _completed(spec)
    primitive = register_primitive_spec(whole)
    return EtpOp(spec.name, functools.partial(_bind_spec, whole, primitive), [primitive])


def _completed(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """The spec with every rule that it leaves out."""
    invars = spec.trainable_invars_fn or (
        lambda params: {'weight': 0 if spec.x_invar_index is None else 1}
    )
    of_weights = _of_weights(spec, invars)
    layout = ('yw_to_w', 'init_drtrl', 'instant_drtrl', 'solve_drtrl')
    own = [slot for slot in layout if getattr(spec, slot) is not None]
    if own and not {'yw_to_w', 'init_drtrl'} <= set(own):
        raise RuleContractError(
            f'the spec of {spec.name!r} has {", ".join(own)} of a layout of its own, which needs '
            'yw_to_w and init_drtrl together (and instant_drtrl and solve_drtrl where that is not '
            "the parameter's). Give all, or none."
        )

    def xy_to_dw(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: of_weights(x, w, **params), weights)
        return pull(hidden_dim.astype(y.dtype))[0]

    derived: dict[str, Any] = {} if own else position_rules(of_weights, spec.batched)
    return dataclasses.replace(
        spec,
        trainable_invars_fn=invars,
        xy_to_dw=spec.xy_to_dw or xy_to_dw,
        init_pp=spec.init_pp or output_trace,
        **derived,
    )


def _of_weights(spec: ETPPrimitiveSpec, invars: Callable) -> Callable:
    """``impl`` as ``(x, weights, **params) -> y``."""
    impl = whole_impl(spec)

    def of_weights(x, weights, **params):
        operands = {} if spec.x_invar_index is None else {spec.x_invar_index: x}
        operands |= {index: weights[name] for name, index in invars(params).items()}
        static = dict(params)
        structure = [static.pop(name) for name in spec.structure]
        out = impl(*(operands[i] for i in sorted(operands)), *structure, **static)
        return out[spec.y_outvar_index] if isinstance(out, tuple | list) else out

    return of_weights


def _bind_spec(spec: ETPPrimitiveSpec, primitive: ETPPrimitive, /, *operands, **params):
    """Bind the primitive on arrays or quantities."""
    check_static(spec.name, params, list(params) if spec.static is None else spec.static)
    bind = functools.partial(primitive.bind, **params)
    if not any(isinstance(operand, u.Quantity) for operand in operands):
        try:
            return bind(*operands)
        except (TypeError, ValueError):
            shape_of(spec.name, bind, *operands)  # explains operands that do not fit
            raise
    named = [split(spec.name, f'operand {i}', operand) for i, operand in enumerate(operands)]
    values, units = zip(*named, strict=True)
    bias = spec.resolve_trainable_invars(params).get('bias')
    shape_of(spec.name, bind, *values)
    unit = proportional_product(spec.name, primitive.impl_fn, values, units, params, bias)
    if bias is not None:  # rescaled to y's unit
        own = bias_operands(spec.name, operands[bias], values[bias].shape, unit)
        values = (*values[:bias], *own, *values[bias + 1 :])
    return jax.tree.map(lambda y: with_unit(y, unit), bind(*values))


# an equation, an element-wise product, a convolution ----------------------------------------------


def make_einsum_op(name: str, equation: str, bias: bool = False) -> EtpOp:
    """Make an op of a fixed equation (see :func:`braintrace.einsum`): ``op(x, weight)``, or ``op(x,
    weight, bias)`` with ``bias=True``.

    Raises ``OptionError`` for an ``equation`` of another form and for a bias that is missing or not
    asked for, ``RuleContractError`` for a ``name`` that is taken; the op raises as
    :func:`braintrace.einsum` does.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> heads = kit.make_einsum_op('doc_heads', 'bhi,hio->bho', bias=True)
    >>> heads(jnp.ones((2, 4, 3)), jnp.ones((4, 3, 5)), jnp.ones((4, 5))).shape
    (2, 4, 5)
    """
    letters, batched = einsums.parsed(name, equation)
    x_axes, weight_axes = equation.replace(' ', '').partition('->')[0].split(',')
    sizes = {axis: 2 + i for i, axis in enumerate(dict.fromkeys(x_axes + weight_axes))}
    operands = [x_axes, weight_axes, *([letters.bias] if bias else [])]
    case = arrays(*([sizes[axis] for axis in axes] for axes in operands)), {}
    wanted = [(lanes, bool(letters.others)) for lanes in ((True,) if batched else (True, False))]
    forms = einsums.register_forms(name, [case], wanted)

    has_bias = bias

    def call(x, weight, bias=None):
        if (bias is not None) != has_bias:
            raise OptionError(
                f'{name}: a bias is {"expected" if has_bias else "not expected"}; the op was made '
                f'with bias={has_bias}.'
            )
        return einsums.bound(name, forms, equation, x, weight, bias)

    return EtpOp(name, call, list(forms.values()))


def make_elementwise_op(name: str, fn: Callable) -> EtpOp:
    """Make an op of ``fn(x, weight)``, which works element by element and is linear in x: ``op(x,
    weight)``, x with or without a batch axis in front.

    One sample of x, the weight and y have one shape. y has the product of the units; a weight to
    which ``fn`` is not proportional has none. Raises ``RuleContractError`` for a ``name`` that is
    taken and an ``fn`` that is no function or, at a call, not linear; the op raises
    ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not fit.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> gain = kit.make_elementwise_op('doc_gain', lambda x, w: x * jnp.tanh(w))
    >>> gain(jnp.ones((2, 3)), jnp.zeros(3)).shape
    (2, 3)
    """
    check_callable(f'fn of {name!r}', fn)
    forms = register_both_forms(lambda batched: _register_elementwise(name, fn, batched))

    def call(x, weight):
        weight, weight_unit = trainable_operand(name, 'weight', weight)
        x, x_unit = input_operand(name, 'x', x, weight.dtype)
        batched = x.ndim > weight.ndim
        sample = x.shape[batched:]
        why = 'one sample of x has the shape of the weight'
        check_shape(name, 'x', sample, weight.shape, why)
        avals = [jax.ShapeDtypeStruct(sample, a.dtype) for a in (x, weight)]
        _check_elementwise(name, fn, *avals)
        unit = proportional_product(name, fn, avals, [x_unit, weight_unit], {})
        form = forms[0] if batched else forms[1]
        return with_unit(form.bind(x, weight), unit)

    return EtpOp(name, call, forms)


def _register_elementwise(name: str, fn: Callable, batched: bool) -> ETPPrimitive:
    impl, invars = samples(fn, 0) if batched else fn, lambda params: {'weight': 1}

    def yw_to_w(hidden_dim, trace):
        return {'weight': trace['weight'] * hidden_dim}

    return register_primitive_spec(
        ETPPrimitiveSpec(
            name if batched else f'{name}_sample',
            impl,
            yw_to_w,
            vjp_of(impl, invars),
            parameter_trace(batched),
            output_trace,
            invars,
            batched=batched,
            cases=((arrays((2, 3), (3,)), {}), (arrays((4,), (4,)), {})),
        )
    )


def _check_elementwise(name: str, fn: Callable, x, weight) -> None:
    """Refuse a function that moves elements of the weight to other places of y."""
    y = shape_of(name, fn, x, weight)
    check_shape(name, 'y', y.shape, weight.shape, 'fn works element by element')
    ((_, shape, where),) = places_of(name, fn, x, (('weight', weight),), (), True).at
    if weight.size and where != tuple(range(len(shape))):
        raise RuleContractError(
            f'{name}: fn moves elements of the weight to other places. Make the op with '
            '`kit.make_linear_op`.'
        )


def make_conv_op(name: str, dims: int) -> EtpOp:
    """Make a convolution over ``dims`` spatial axes: ``op(x, kernel, bias=None, **options)`` with
    the options of :func:`braintrace.conv`, whose errors it raises.

    Raises ``OptionError`` unless ``dims`` is an int above 0, ``RuleContractError`` for a ``name``
    that is taken.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> conv1d = kit.make_conv_op('doc_conv1d', 1)
    >>> conv1d(jnp.ones((2, 3, 16)), jnp.ones((4, 3, 5)), padding='VALID').shape
    (2, 4, 12)
    """
    if isinstance(dims, bool) or not isinstance(dims, int) or dims < 1:
        raise OptionError(
            f'make_conv_op: dims is {dims!r}; give the number of spatial axes, an int >= 1.'
        )
    spatial = (5, 4, 3, *(3,) * dims)[:dims]
    primitive = register_conv(name, [(arrays((2, 3, *spatial), (4, 3, *(2,) * dims), (4,)), {})])

    def call(x, kernel, bias=None, **options):
        layouts = {dims + 2: f'(out, in) and {dims} spatial axes'}
        shape = getattr(kernel, 'shape', ())
        check_rank(name, 'kernel', shape, layouts, 'It is made for these.')
        unknown = [option for option in options if option not in CONV_OPTIONS]
        if unknown:
            raise OptionError(
                f'{name}: there is no option {", ".join(unknown)}; those of a convolution are '
                f'{", ".join(CONV_OPTIONS)}.'
            )
        return bind_conv(primitive, name, x, kernel, bias, **options)

    return EtpOp(name, call, [primitive])
