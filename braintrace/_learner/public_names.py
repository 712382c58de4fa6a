"""What learners answer to because the public package ``braintrace`` calls it so."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._windows import length_of


class StepData:
    """Inputs of a learner that say how they lie in time; a pytree with the leaves of ``data``."""

    def __init__(self, data: Any):
        self.data = data

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(
            cls, lambda wrapped: ((wrapped.data,), None), lambda _, children: cls(*children)
        )

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.data!r})'


class SingleStepData(StepData):
    """Inputs of one step, or the same in every step beside a :class:`MultiStepData`.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
    >>> learner(braintrace.SingleStepData(x)).shape
    (3, 4)
    """


class MultiStepData(StepData):
    """Inputs of several steps, with time in axis 0: ``learner(MultiStepData(xs))`` is a loop of
    calls, and returns its outputs stacked over time.

    A gradient around it is that of the loop, the online gradient in memory that grows with the
    steps; :meth:`ETraceLearner.etrace_grad` takes the same in constant memory.

    >>> import braintrace, jax.numpy as jnp
    >>> x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
    >>> learner(braintrace.MultiStepData(jnp.zeros((5, 3, 2)))).shape
    (5, 3, 4)
    """


class PublicNames:
    """Methods and attributes that scripts for the public package call."""

    def __call__(self: Any, *inputs):
        """One step of the model, or a loop of them for :class:`MultiStepData`."""
        if not any(isinstance(x, StepData) for x in inputs):
            return self.update(*inputs)
        moving = [x.data for x in inputs if isinstance(x, MultiStepData)]
        plain = [x.data if isinstance(x, StepData) else x for x in inputs]
        if not moving:
            return self.update(*plain)
        length_of(*moving)

        def step(slices):
            rest = iter(slices)
            each = zip(inputs, plain, strict=True)
            return self.update(
                *(next(rest) if isinstance(x, MultiStepData) else p for x, p in each)
            )

        return brainstate.transform.for_loop(step, moving)

    @property
    def module(self: Any):
        """This learner: ``compile(vmap=True)`` of the public package wraps it."""
        return self

    @property
    def is_compiled(self: Any) -> bool:
        """Whether the graph is compiled."""
        return self._own() is not None

    @property
    def hidden_states(self: Any):
        """The model's hidden states: a dict path -> ``HiddenState``."""
        return self.model.states(brainstate.HiddenState)

    def show_graph(self: Any, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the report, where ``verbose``; return its text, where ``return_msg``."""
        text = str(self.report)
        if verbose:
            print(text)
        return text if return_msg else None
