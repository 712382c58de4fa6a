"""What the adapters share: a step is tried on shapes before it is handed out."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..errors import BraintraceError, CompileError, OptionError, StructureError


def missing_framework(package: str, error: ImportError, extra: str = 'adapters') -> ImportError:
    """The error for a framework that is not installed."""
    return ImportError(
        f'{package} is not installed ({error}). Install it: '
        f'pip install "braintrace-online[{extra}]".'
    )


def missing_carry(model, how: str) -> OptionError:
    """The error for a model that does not say how its carry starts."""
    return OptionError(
        f'{type(model).__name__} does not say how its carry starts: {how}. Give carry=, the state '
        'that the model takes before its first step.'
    )


def check_inputs(inputs: tuple) -> None:
    """Refuse to adapt a model without an example of its inputs."""
    if not inputs:
        raise OptionError('give an example of the inputs of one step after the model.')


def check_carry(model, call: str, old, new) -> None:
    """Refuse a new carry whose tree or shapes are not those of the old one."""
    before, after = (jax.tree.map(jnp.shape, tree) for tree in (old, new))
    if before != after:
        raise StructureError(
            f'{type(model).__name__} took a carry of shapes {before} and returned one of shapes '
            f'{after}. One step is the call {call}: return the new carry in its place, and give '
            'inputs of one step, not of a sequence.'
        )


def check_step(model, call: str, step: Callable, *args) -> None:
    """Run ``step`` on the shapes of ``args``; ``call`` says how it calls the model."""
    try:
        jax.eval_shape(step, *args)
    except BraintraceError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        raise CompileError(
            f'{type(model).__name__} failed on the example inputs: {e}\nOne step is the call '
            f'{call}. Adapt the layer that takes one step, and give inputs and carry of one step.'
        ) from e
