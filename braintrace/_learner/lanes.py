"""A model of one sample, run for each lane of a batch."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp

from .._errors import OptionError

LANE = 'a lane of a batch'  # the tag of states that have one


class Lanes(brainstate.nn.Module):
    """``module`` for each lane of a batch of ``size``: its step sees one sample, and the states
    that its ``init_state`` makes have the lanes in axis 0. Parameters are shared, random numbers
    are drawn for each lane; paths of states are those of the module.
    """

    def __init__(self, module: brainstate.nn.Module, size: int):
        super().__init__()
        self.module, self.size = module, size

    # After the module's own, which make states of one sample.
    @brainstate.nn.call_order(8)
    def init_state(self, *args, **kwargs) -> None:
        """The module's states anew, for each lane."""

        @brainstate.transform.vmap_new_states(state_tag=LANE, axis_size=self.size)
        def make():
            brainstate.nn.init_all_states(self.module)

        make()

    def update(self, *inputs):
        """One step of every lane; axis 0 of inputs and outputs is the lane."""
        lanes = brainstate.nn.Vmap(self.module, vmap_states=LANE, axis_size=self.size)
        return lanes(*inputs)

    def states(self, *filters):
        """The states of the module."""
        return self.module.states(*filters)


def lanes_of(model: brainstate.nn.Module, inputs: tuple, batch_size: int | None) -> Lanes:
    """The model in lanes, for inputs with the batch in axis 0."""
    if batch_size is None:
        raise OptionError(
            'vmap=True runs the model for each sample of a batch: give batch_size too, or drop '
            'vmap for a model that takes a batch itself.'
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]:
        shape = jnp.shape(leaf)
        if shape[:1] != (batch_size,):
            raise OptionError(
                f'vmap=True with batch_size {batch_size}, but input {jax.tree_util.keystr(path)} '
                f'has shape {list(shape)}. Give inputs with the batch in axis 0; the model sees '
                'one sample of it.'
            )
    return Lanes(model, batch_size)
