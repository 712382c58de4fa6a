"""brainstate modules."""

from __future__ import annotations

from collections.abc import Callable

from ._step import check_inputs


def from_brainstate(model, *inputs) -> tuple[Callable, dict, dict]:
    """``(cell, params, carry)`` of a brainstate module that is called as ``model(*inputs)``.

    The states must be initialised (``brainstate.nn.init_all_states(model, batch_size=16)``);
    ``inputs`` are those of one step. ``params`` and ``carry`` are dicts path -> value with the
    values that the states have now, of every ``ParamState`` and of every other state. Gradients are
    such dicts, so for ``path, state in model.states(brainstate.ParamState).items()`` the assignment
    ``state.value = params[path]`` puts values back. ``cell`` leaves the model's states as they
    were. Raises :class:`braintrace.errors.CompileError` for states that are not initialised, a call
    that fails, and a step that writes parameters.

    The learners (``braintrace.D_RTRL(model, mark='auto')``) take a module without this. They count
    only a ``HiddenState`` as hidden; here every leaf of the carry that is no PRNG key is, unless
    ``functional.online(cell, rule, hidden=...)`` says otherwise.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = brainstate.nn.GRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> cell, params, carry = braintrace.adapters.from_brainstate(model, jnp.ones((3, 2)))
    >>> outputs, carry = cell(params, carry, jnp.ones((3, 2)))
    >>> {'/'.join(path): h.shape for path, h in carry.items()}
    {'h': (3, 4)}
    """
    from .._learner import ModelStates, check_model

    check_model(model)
    check_inputs(inputs)
    states = ModelStates(model, inputs)
    return states.cell(), *states.values()
