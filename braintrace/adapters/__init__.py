"""Models of other frameworks, as they are, as ``(cell, params, carry)`` for
:func:`braintrace.functional.online`.

Each function imports its framework itself and changes no arithmetic. ``params`` and the gradients
have the framework's own form and names, so its optimisers and updates take them as they are; a
``carry`` has the shapes of the framework. With ``mark='auto'`` the weights of a stock cell get
traces:

>>> import braintrace, equinox as eqx, jax, jax.numpy as jnp
>>> x = jnp.ones(2)
>>> model = eqx.nn.GRUCell(2, 4, key=jax.random.key(0))
>>> cell, params, carry = braintrace.adapters.from_equinox(model, x)
>>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
>>> state = learner.init(params, carry, x)
>>> learner.routes['weight_hh'].kind
'trace'

Flax linen and Haiku keep parameters apart from the model already, so a line makes the cell:

>>> import flax.linen as nn
>>> module, carry = nn.GRUCell(4), jnp.zeros(4)
>>> params = module.init(jax.random.key(0), carry, x)
>>> cell = lambda params, carry, x: module.apply(params, carry, x)[::-1]  # gives (carry, outputs)
>>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
>>> state = learner.init(params, carry, x)
>>> learner.routes['params/hn/kernel'].kind
'trace'

>>> import haiku as hk
>>> run = hk.without_apply_rng(hk.transform(lambda x, carry: hk.GRU(4)(x, carry)))
>>> params = run.init(jax.random.key(0), x, carry)
>>> cell = lambda params, carry, x: run.apply(params, x, carry)
>>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
>>> state = learner.init(params, carry, x)
>>> learner.routes['gru/w_h'].kind
'trace'
"""

from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking
from ._blox import from_blox, to_blox
from ._brainstate import from_brainstate
from ._equinox import from_equinox
from ._nir import from_nir, to_nir
from ._nnx import from_nnx

__all__ = [
    'from_blox',
    'from_brainstate',
    'from_equinox',
    'from_nir',
    'from_nnx',
    'to_blox',
    'to_nir',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
