"""Primitives that are wrong in one way each, and the laws that they break."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace
from braintrace import _etrace_op as ops
from braintrace import kit


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]


DENSE = [(shapes((4, 3), (3, 5)), {})]
WITH_BIAS = [(shapes((4, 3), (3, 5), (5,)), {'has_bias': True})]


def product(x, weight, *bias, has_bias=False):
    return x @ weight + (bias[0] if has_bias else 0)


def reverse_of(impl, names=('weight', 'bias')):
    def xy_to_dw(x, d, weights, **params):
        run = lambda w: impl(x, *(w[n] for n in names if n in w), **params)
        return jax.vjp(run, weights)[1](d)[0]

    return xy_to_dw


def carried(d, trace, **params):
    return {n: e * (d if n == 'bias' else jnp.expand_dims(d, -2)) for n, e in trace.items()}


def entry_zeros(x, y, weights, states):
    return {
        n: jnp.zeros((*x.aval.shape[:1], *w.aval.shape, states), w.aval.dtype)
        for n, w in weights.items()
    }


def output_zeros(x, y, weights, states):
    return jnp.zeros((*y.aval.shape, states), y.aval.dtype)


def layout(params):
    return {'weight': 1} | ({'bias': 2} if params.get('has_bias') else {})


def dense(**changes):
    """The dense product, right but for the changes."""
    impl = changes.get('impl', product)
    fields = dict(
        impl=impl,
        yw_to_w=carried,
        xy_to_dw=reverse_of(impl),
        init_drtrl=entry_zeros,
        init_pp=output_zeros,
        batched=True,
        trainable_invars_fn=layout,
        cases=DENSE,
    )
    return ops.register_primitive_spec(ops.ETPPrimitiveSpec('etp_bad', **(fields | changes)))


# the published ones -------------------------------------------------------------------------------


def scaled():
    """The scaled product of the published page: its ``yw_to_w`` multiplies by a scale that the
    entry carries.
    """

    def impl(x, weight, *, scale):
        return scale * (x @ weight)

    def yw_to_w(d, trace, *, scale):
        return {'weight': trace['weight'] * d[..., None, :] * scale}

    return dense(impl=impl, yw_to_w=yw_to_w, cases=[(DENSE[0][0], {'scale': 2.0})])


def bare_arrays():
    """The short example of the published page."""

    def impl(x, weight, *, scale=1.0):
        return scale * (x @ weight)

    primitive = braintrace.register_primitive('etp_bad', impl, batched=True)
    primitive.register_yw_to_w(lambda hidden, trace, **params: trace * hidden[None, :])
    reverse = reverse_of(impl)
    primitive.register_xy_to_dw(lambda *args, **params: reverse(*args, **params)['weight'])
    primitive.register_init_drtrl(
        lambda x, y, w, states: jnp.zeros((1, *w['weight'].value.shape, states))
    )
    primitive.register_init_pp(lambda x, y, w, states: jnp.zeros((1, *y.aval.shape, states)))
    return primitive


# traces that are not exact ------------------------------------------------------------------------


def lora_in_parameters():
    """The trace of B is passed on as it is, though B reaches every output."""

    def impl(x, b, a):
        return x @ b @ a

    def yw_to_w(d, trace):
        return {'b': trace['b'], 'a': trace['a'] * d[..., None, :]}

    return dense(
        impl=impl,
        yw_to_w=yw_to_w,
        xy_to_dw=reverse_of(impl, ('b', 'a')),
        trainable_invars_fn=lambda params: {'b': 1, 'a': 2},
        cases=[(shapes((4, 3), (3, 2), (2, 5)), {})],
    )


def conv_in_kernel():
    """One kernel for each sample, whose entries feed many positions."""

    def impl(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), 'SAME')

    def yw_to_w(d, trace):
        return {'weight': trace['weight'] * d.mean(-1)[..., None, None]}

    return dense(impl=impl, yw_to_w=yw_to_w, cases=[(shapes((2, 3, 7), (4, 3, 3)), {})])


# rules --------------------------------------------------------------------------------------------


def without_a_rule():
    primitive = dense()
    del primitive.own_rules['init_pp']
    return primitive


def batch_summed_twice():
    def solve(signal, trace, weights):
        return {n: e.sum(0).sum(0) for n, e in carried(signal, trace).items()}

    return dense(solve_drtrl=solve)


# functions ----------------------------------------------------------------------------------------


def quadratic():
    return dense(impl=lambda x, weight: (x * x) @ weight)


def any_unit():
    """A bias is added whatever its unit is."""
    primitive = dense()

    def op(x, weight, bias):
        y = primitive(*map(u.get_mantissa, (x, weight, bias)), has_bias=True)
        return u.maybe_decimal(u.Quantity(y, unit=u.get_unit(x) * u.get_unit(weight)))

    return op


def lambda_as_static():
    primitive = dense(impl=lambda x, weight, fn: fn(x @ weight))
    return lambda x, weight: primitive(x, weight, fn=lambda y: y)


def on_cpu(lowering=None, trace_kernel=None):
    """The dense product with this lowering, and this fused update of its trace."""
    primitive = dense()
    for table, own in (('lowering', lowering), ('trace_kernel', trace_kernel)):
        getattr(primitive, table).update({} if own is None else {'cpu': own})
    return primitive


def of_one_state(d, trace, d_f, x, weights):
    """A kernel that leaves out what one state does to another."""
    kept = jnp.einsum('boss,bios->bios', d, trace['weight'])
    return {'weight': kept + jnp.einsum('bos,bi->bios', d_f, x)}


def reversed_by(impl=product, **forms):
    """The dense product with this reverse rule."""
    rule = kit.rule_reverse(**forms)
    return dense(impl=impl, reverse=rule, xy_to_dw=reverse_of(product))


def twice_forward(inputs, params):
    """It keeps x from the forward pass, and the product twice."""
    x, weight = inputs
    return 2 * (x @ weight), lambda _x, _y, d, *more: [d @ weight.T, x.T @ d]


def twice_backward(inputs, outputs, grads, params, required):
    return [grads @ inputs[1].T, 2 * (inputs[0].T @ grads)]


def backward_of_y(inputs, outputs, grads, params, required):
    """Of two results."""
    x, weight = inputs
    return [grads[0] @ weight.T, x.T @ grads[0]]


def and_its_sine(x, weight):
    return x @ weight, jnp.sin(x @ weight)


class Bad(NamedTuple):
    """How to make it, the laws that name the fault, and others that can not hold then."""

    make: Callable
    laws: set[str]
    others: Collection[str] = ()
    cases: list | None = None


def wrong(laws, others=(), **fields):
    """The dense product with these fields, of which one is wrong."""
    return Bad(lambda: dense(**fields), laws, others)


CARRIES = {'L3', 'L4', 'L6', 'L7', 'L9', 'L11', 'L15'}  # laws that call yw_to_w
BAD = {
    'scaled': Bad(scaled, {'L3', 'L9'}, {'L6'}),
    'bare arrays': Bad(bare_arrays, {'L0', 'L5'}, CARRIES | {'L2', 'L8'}, DENSE),
    'lora in parameters': Bad(lora_in_parameters, {'L3'}, {'L4', 'L6', 'L9'}),
    'conv in kernel': Bad(conv_in_kernel, {'L3', 'L6'}, {'L9'}),
    'without bias key': wrong(
        {'L0'},
        CARRIES,
        yw_to_w=lambda d, trace, **params: {'weight': trace['weight'] * d[..., None, :]},
        cases=WITH_BIAS,
    ),
    'without a rule': Bad(without_a_rule, {'L0'}),
    'nonzero trace': wrong(
        {'L5'}, init_drtrl=lambda *args: {n: e + 1 for n, e in entry_zeros(*args).items()}
    ),
    'batch summed twice': Bad(batch_summed_twice, {'L6'}, {'L9', 'L15'}),
    'factor two': wrong(
        {'L2'}, {'L6', 'L9'}, xy_to_dw=lambda x, d, weights: {'weight': 2 * x.T @ d}
    ),
    'squared factor': wrong(
        {'L4'},
        {'L3', 'L6', 'L9'},
        yw_to_w=lambda d, trace: {'weight': trace['weight'] * d[..., None, :] ** 2},
    ),
    'bound to the batch': wrong(
        {'L7'}, yw_to_w=lambda d, trace: {'weight': trace['weight'] * d[:, None, :]}
    ),
    'flagged as identity': wrong({'L10'}, gradient_enabled=True),
    'random numbers': wrong(
        {'L1'},
        {'L7', 'L9'},
        impl=lambda x, weight: x @ weight + np.random.normal(),
        xy_to_dw=reverse_of(product),
    ),
    'quadratic': Bad(quadratic, {'L8'}),
    'divided by the batch': wrong(
        {'L15'},
        impl=lambda x, weight: x @ weight * (len(x) / len(x)),
        xy_to_dw=reverse_of(product),
    ),
    'any unit': Bad(any_unit, {'L11'}, cases=[(shapes((4, 3), (3, 5), (5,)), {})]),
    'lambda as static': Bad(lambda_as_static, {'L12'}, cases=DENSE),
    'other numbers on cpu': Bad(
        lambda: on_cpu(lambda x, weight: 2 * (x @ weight)), {'L13'}, {'L1', 'L9'}
    ),
    'kernel of one state': Bad(lambda: on_cpu(trace_kernel=of_one_state), {'L13'}),
    'wrong forward': Bad(lambda: reversed_by(forward=twice_forward), {'L14'}),
    'wrong backward': Bad(lambda: reversed_by(backward=twice_backward), {'L14'}),
    'backward of y alone': Bad(lambda: reversed_by(and_its_sine, backward=backward_of_y), {'L14'}),
}
