"""A parameter used element by element: ``y = fn(w)``.

The primitive is the identity on ``v = fn(w)``, so ``dy_i/dv_i = 1``: ``e_i = D_i e_i' + D_f,i`` is
the trace of v, and its gradient goes back through ``fn``: ``dL/dw_i = fn'(w_i) dL/dv_i``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._signatures import public
from ..errors import OptionError
from ._layouts import parameter_trace
from ._operands import trainable_operand, with_unit
from ._primitive import completed, register_primitive_spec
from ._spec import ETPPrimitiveSpec


def _identity(weight):
    return weight


etp_elemwise_p = register_primitive_spec(
    completed(
        ETPPrimitiveSpec(
            'etp_elemwise',
            _identity,
            yw_to_w=lambda hidden_dim, trace: {'weight': trace['weight'] * hidden_dim},
            xy_to_dw=lambda x, hidden_dim, weights: {'weight': hidden_dim},
            init_drtrl=parameter_trace(batched=False),
            x_invar_index=None,
            gradient_enabled=True,
        )
    )
)


@public('element_wise')
def element_wise(
    weight, fn: Callable[[Any], Any] = _identity, *, weight_fn: Callable[[Any], Any] = _identity
) -> jax.Array:
    """Use a traced parameter element by element: ``y = fn(weight)``.

    ``fn`` is any differentiable function of the weight, which may be a ``Quantity``; the gradient
    passes through ``fn``. y has the shape and the unit of ``fn(weight)``. ``weight_fn`` is another
    name for ``fn``.

    Raises ``EtpDtypeError`` if the weight or ``fn(weight)`` is no array of a floating dtype, and
    ``OptionError`` if ``fn`` is no function or has both names.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.element_wise(jnp.array([1., -2.]), fn=jnp.abs)
    Array([1., 2.], dtype=float32)
    """
    if weight_fn is not _identity:
        if fn is not _identity:
            raise OptionError('element_wise: weight_fn is another name for fn; give one of them.')
        fn = weight_fn
    if not callable(fn):
        raise OptionError(
            f'element_wise: fn is a {type(fn).__name__}, expected a function of the weight.'
        )
    trainable_operand('element_wise', 'weight', weight)
    y, unit = trainable_operand('element_wise', 'fn(weight)', fn(weight))
    return with_unit(etp_elemwise_p.bind(y), unit)
