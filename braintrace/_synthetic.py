"""A linear model of the credit that later steps give to a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .errors import OptionError


class SyntheticGradient:
    """The synthetic gradient of decoupled neural interfaces: for each group of states a linear map
    ``s(h) = h @ w + b`` to the credit of ``h``, the derivative of later losses by it.

    ``group_shapes``: group -> shape ``(*shape, S)``, the states of a group in the last axis.
    ``scale``: standard deviation of the first ``w`` times the square root of its rows, by default
    zero, no credit; ``seed`` draws it. ``lanes``: whether axis 0 is the batch, whose samples the
    map does not mix; by default so where there are three axes or more. Its ``apply`` is a
    ``synthesizer`` of ``sequence_grad`` and ``sequence_update``. Raises
    :class:`braintrace.errors.OptionError` for shapes that are none.

    Source: Jaderberg et al. 2017, "Decoupled neural interfaces using synthetic gradients" (ICML,
    arXiv 1608.05343).

    >>> import braintrace, jax.numpy as jnp
    >>> synthetic = braintrace.SyntheticGradient({'h': (3, 4, 1)})
    >>> params = synthetic.param_values()
    >>> params['h']['w'].shape, synthetic.apply(params, {'h': jnp.ones((3, 4, 1))})['h'].shape
    ((4, 4), (3, 4, 1))
    """

    def __init__(
        self,
        group_shapes: Mapping[Any, tuple[int, ...]],
        *,
        scale: float = 0.0,
        seed: int = 0,
        lanes: bool | None = None,
    ):
        for name, shape in group_shapes.items():
            if not (isinstance(shape, tuple) and shape and all(isinstance(n, int) for n in shape)):
                raise OptionError(
                    f'the shape of group {name!r} is {shape!r}; give a tuple of ints, the states '
                    'in the last axis, as `learner.group_signal_shapes()` does.'
                )
        self.group_shapes = dict(group_shapes)
        self.scale, self.seed, self.lanes = scale, seed, lanes

    def _rows(self, shape: tuple[int, ...]) -> int:
        lanes = len(shape) > 2 if self.lanes is None else self.lanes
        return math.prod(shape[1:] if lanes else shape)

    def param_values(self) -> dict[Any, dict[str, jax.Array]]:
        """The first parameters: group -> ``w`` and ``b``."""
        keys = jax.random.split(jax.random.key(self.seed), max(len(self.group_shapes), 1))
        params = {}
        for key, (name, shape) in zip(keys, self.group_shapes.items(), strict=False):
            n = self._rows(shape)
            w = jnp.zeros((n, n))
            if self.scale:
                w = self.scale / math.sqrt(n) * jax.random.normal(key, (n, n))
            params[name] = {'w': w, 'b': jnp.zeros(n)}
        return params

    def apply(self, params, states) -> dict[Any, jax.Array]:
        """The credit of each group of states, arrays of the same shapes."""

        def of(p, h):
            return (h.reshape(-1, p['b'].shape[0]) @ p['w'] + p['b']).reshape(h.shape)

        return {name: of(params[name], h) for name, h in states.items()}
