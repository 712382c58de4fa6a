"""Factories of ops: they make of a plain function or a description a primitive, its rules, and a
function of arrays and quantities.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from .._signatures import is_int
from ..errors import EtpDtypeError, OptionError, RuleContractError
from . import einsums
from ._jax_rules import of_weights
from ._layouts import (
    at_places,
    effective_rules,
    parameter_trace,
    places_of,
    position_rules,
    samples,
)
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
from ._primitive import (
    RULE_SLOTS,
    ETPPrimitive,
    completed,
    get_primitive_spec,
    register_both_forms,
    register_primitive_spec,
)
from ._spec import ETPPrimitiveSpec, check_callable, whole_impl
from .conv import DEFAULTS, bind_conv, register_conv


class EtpOp:
    """An ETP primitive as a function of arrays and quantities.

    ``op(x, *weights, bias=None, **static)``, which is ``call``, where there is a bias. ``forms``
    are all primitives of the op; ``primitive`` is the form that a batch binds, or the only form.
    ``spec`` raises ``RuleContractError`` where there is none.

    >>> import jax.numpy as jnp
    >>> from braintrace import kit
    >>> op = kit.make_elementwise_op('doc_scale', lambda x, w: x * w)
    >>> type(op).__name__, op(jnp.ones((2, 3)), jnp.ones(3)).shape, sorted(op.rules)[:2]
    ('EtpOp', (2, 3), ['init_drtrl', 'init_pp'])
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
        """The first form."""
        return self.forms[0]

    @property
    def spec(self) -> ETPPrimitiveSpec:
        """The description that the first form was registered with."""
        return get_primitive_spec(self.primitive)

    @property
    def lowering(self):
        """Platform -> function that replaces the implementation of the first form (see
        :class:`braintrace.ETPPrimitive`).
        """
        return self.primitive.lowering

    @property
    def trace_kernel(self):
        """Platform -> fused update of the trace of the first form."""
        return self.primitive.trace_kernel

    @property
    def rules(self) -> dict[str, Callable]:
        """The rules of the first form, by slot."""
        return {
            slot: rule
            for slot in RULE_SLOTS
            if (rule := self.primitive.optional_rule(slot)) is not None
        }


def check_static(name: str, params: dict, static: Sequence[str]) -> None:
    """Refuse static parameters with other names, and values that have no hash."""
    if set(params) != set(static):
        raise OptionError(
            f'{name}: static parameters {sorted(params)} given, expected {sorted(static)}.'
        )
    for key, value in params.items():
        try:
            hash(value)
        except TypeError as error:
            raise EtpDtypeError(
                f'{name}: static parameter {key!r} is a {type(value).__name__}, which has no hash. '
                'Pass arrays as operands, and lists as tuples.'
            ) from error


def arrays(*shapes) -> list[jax.ShapeDtypeStruct]:
    """Operands of these shapes in float32, for the cases of a spec."""
    return [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]


# linear ops: from a function of one sample that is linear in its input and in its weights ---------


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
    if isinstance(static, str) or not isinstance(trainable, Mapping | None) or not is_int(rank, 0):
        raise OptionError(
            f'make_linear_op: static={static!r}, trainable={trainable!r}, rank={rank!r}; expected '
            'a tuple of names, a dict of name -> position of an argument of fn, and a number of '
            'axes.'
        )
    trainable, static = dict(trainable or {'weight': 1}), tuple(static)
    if trace not in LAYOUTS:
        raise OptionError(f'make_linear_op: trace is {trace!r}; choose one of {LAYOUTS}.')
    if sorted([x, *trainable.values()]) != list(range(1 + len(trainable))) or 'bias' in trainable:
        raise OptionError(
            f'make_linear_op: x={x} and trainable={trainable} are not the positions 0 to '
            f"{len(trainable)} of the arguments of fn, each once, with names other than 'bias'."
        )
    # the trainables in the order in which the primitive takes them, between x and a bias
    names = sorted(trainable, key=trainable.__getitem__)
    places_in_fn = [x, *(trainable[n] for n in names)]

    def invars(params: dict) -> dict[str, int]:
        wanted = [*names, 'bias'] if params.get('has_bias') else names
        return {n: 1 + i for i, n in enumerate(wanted)}

    def product(*operands, has_bias: bool = False, **params):
        """One sample of y without the bias."""
        args = dict(zip(places_in_fn, operands, strict=True))
        return fn(*(args[i] for i in sorted(args)), **params)

    def of_sample(x, /, *operands, places, has_bias: bool = False, **params):
        y = product(x, *operands[: len(names)], **params)
        return y + operands[-1] if has_bias else y

    def spec_of(batched: bool) -> ETPPrimitiveSpec:
        spec = ETPPrimitiveSpec(
            name if batched else f'{name}_sample',
            samples(of_sample) if batched else of_sample,
            trainable_invars_fn=invars,
            batched=batched,
            cases=tuple(cases),
        )
        rules: dict[str, Any] = {'yw_to_w': at_places, 'init_drtrl': parameter_trace(batched)}
        if trace == 'effective':
            rules = effective_rules(product, lambda weights: [weights[n] for n in names], batched)
        if trace == 'position':
            rules = position_rules(of_weights(spec, spec.impl), batched)
        return dataclasses.replace(spec, **rules)

    forms = register_both_forms(spec_of)

    def call(*operands, bias=None, **params):
        if len(operands) != 1 + len(names):
            order = dict(sorted(zip(places_in_fn, ('x', *names))))
            raise OptionError(
                f'{name}: {len(operands)} operands given, expected {1 + len(names)} by position: '
                f'{", ".join(order.values())}.'
            )
        check_static(name, params, static)
        value, *values = (operands[i] for i in places_in_fn)
        weights, units = zip(*map(functools.partial(trainable_operand, name), names, values))
        value, x_unit = input_operand(name, 'x', value, jnp.result_type(*weights))
        layouts = {rank: f'{rank} axes', rank + 1: f'a batch and {rank} axes'}
        check_rank(name, 'x', value.shape, layouts, 'Map others with `jax.vmap`.')
        batched = value.ndim > rank
        # the function of one sample is tried at these shapes: is it linear in x, which element of y
        # does an entry feed, and what is the unit of y
        sample = jax.ShapeDtypeStruct(value.shape[batched:], value.dtype)
        avals = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
        rows, sorted_params = tuple(zip(names, avals)), tuple(sorted(params.items()))
        places = places_of(name, product, sample, rows, sorted_params, trace == 'parameter')
        unit = proportional_product(name, product, [sample, *avals], [x_unit, *units], params)
        bias = bias_operands(name, bias, places.y, unit)
        form = forms[0] if batched else forms[1]
        y = form.bind(value, *weights, *bias, places=places, has_bias=bool(bias), **params)
        return with_unit(y, unit)

    return EtpOp(name, call, forms)


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
    layout = ('yw_to_w', 'init_drtrl', 'instant_drtrl', 'solve_drtrl')
    own = [slot for slot in layout if getattr(spec, slot) is not None]
    if own and not {'yw_to_w', 'init_drtrl'} <= set(own):
        raise RuleContractError(
            f'the spec of {spec.name!r} has {", ".join(own)} of a layout of its own, which needs '
            'yw_to_w and init_drtrl together (and instant_drtrl and solve_drtrl where that is not '
            "the parameter's). Give all, or none."
        )
    spec = completed(spec)
    # without a layout of its own the op has the one that is right for every function
    if not own:
        rules = position_rules(of_weights(spec, whole_impl(spec)), spec.batched)
        spec = dataclasses.replace(spec, **rules)
    primitive = register_primitive_spec(spec)

    def call(*operands, **params):
        check_static(spec.name, params, list(params) if spec.static is None else spec.static)
        bind = functools.partial(primitive.bind, **params)
        if not any(isinstance(operand, u.Quantity) for operand in operands):
            try:
                return bind(*operands)
            except (TypeError, ValueError):
                # this explains operands that do not fit; another error goes on as it is
                shape_of(spec.name, bind, *operands)
                raise
        named = [split(spec.name, f'operand {i}', operand) for i, operand in enumerate(operands)]
        values, units = zip(*named, strict=True)
        bias = spec.resolve_trainable_invars(params).get('bias')
        shape_of(spec.name, bind, *values)
        unit = proportional_product(spec.name, primitive.impl_fn, values, units, params, bias)
        if bias is not None:
            # a sum needs one unit: the bias is rescaled to y's
            rescaled = bias_operands(spec.name, operands[bias], values[bias].shape, unit)
            values = (*values[:bias], *rescaled, *values[bias + 1 :])
        return jax.tree.map(lambda y: with_unit(y, unit), bind(*values))

    return EtpOp(spec.name, call, [primitive])


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
    # an equation with a batch has one form; one without has that of a batch too, for vmap
    letters, batched = einsums.parsed(name, equation)
    x_axes, weight_axes = equation.replace(' ', '').partition('->')[0].split(',')
    sizes = {axis: 2 + i for i, axis in enumerate(dict.fromkeys(x_axes + weight_axes))}
    operands = [x_axes, weight_axes, *([letters.bias] if bias else [])]
    case = arrays(*([sizes[axis] for axis in axes] for axes in operands)), {}
    forms = einsums.register_forms(name, bool(letters.others), [case], both=not batched)

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
    forms = register_both_forms(
        lambda batched: ETPPrimitiveSpec(
            name if batched else f'{name}_sample',
            samples(fn) if batched else fn,
            yw_to_w=lambda hidden_dim, trace: {'weight': trace['weight'] * hidden_dim},
            init_drtrl=parameter_trace(batched),
            batched=batched,
            cases=((arrays((2, 3), (3,)), {}), (arrays((4,), (4,)), {})),
        )
    )

    def call(x, weight):
        weight, weight_unit = trainable_operand(name, 'weight', weight)
        x, x_unit = input_operand(name, 'x', x, weight.dtype)
        batched = x.ndim > weight.ndim
        sample = x.shape[batched:]
        check_shape(name, 'x', sample, weight.shape, 'one sample of x has the shape of the weight')
        avals = [jax.ShapeDtypeStruct(sample, a.dtype) for a in (x, weight)]
        # each entry of the weight must feed the element of y at its own place
        y = shape_of(name, fn, *avals)
        check_shape(name, 'y', y.shape, weight.shape, 'fn works element by element')
        ((_, shape, where),) = places_of(name, fn, avals[0], (('weight', avals[1]),), (), True).at
        if weight.size and where != tuple(range(len(shape))):
            raise RuleContractError(
                f'{name}: fn moves elements of the weight to other places. Make the op with '
                '`kit.make_linear_op`.'
            )
        unit = proportional_product(name, fn, avals, [x_unit, weight_unit], {})
        form = forms[0] if batched else forms[1]
        return with_unit(form.bind(x, weight), unit)

    return EtpOp(name, call, forms)


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
    if not is_int(dims, 1):
        raise OptionError(
            f'make_conv_op: dims is {dims!r}; give the number of spatial axes, an int >= 1.'
        )
    spatial = (5, 4, 3, *(3,) * dims)[:dims]
    primitive = register_conv(name, [(arrays((2, 3, *spatial), (4, 3, *(2,) * dims), (4,)), {})])

    def call(x, kernel, bias=None, **options):
        layouts = {dims + 2: f'(out, in) and {dims} spatial axes'}
        shape = getattr(kernel, 'shape', ())
        check_rank(name, 'kernel', shape, layouts, 'It is made for these.')
        unknown = [option for option in options if option not in DEFAULTS]
        if unknown:
            raise OptionError(
                f'{name}: there is no option {", ".join(unknown)}; those of a convolution are '
                f'{", ".join(DEFAULTS)}.'
            )
        return bind_conv(primitive, name, x, kernel, bias, **options)

    return EtpOp(name, call, [primitive])
