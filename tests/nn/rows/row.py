"""A row of the table of modules: a module of ``braintrace.nn`` and its formula."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from tests.models.model import Case, Model, squared
from tests.models.ops import NumpyOps

BATCH, STEPS = 2, 6


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A module with hidden states, and one step of it written again.

    ``make()`` builds the module. ``formula(ops, params, states, x) -> (output, new states)`` is one
    step in the language of :mod:`tests.models.ops`: NumPy reads it for the values, and every oracle
    of :mod:`tests.oracles` for the gradient. ``params`` and ``states`` are the module's own values
    without units, by the path of the state joined by dots.
    """

    name: str
    make: Callable[[], Any]
    formula: Callable
    x: tuple = (3,)  # the shape of one sample
    unit: Any = u.UNITLESS  # of the input
    draw: Callable = lambda rng, shape: 1.5 * rng.standard_normal(shape)  # an input
    cut_bptt: bool = True  # as in tests.models.Model; else the oracle takes two passes
    exact: bool = False  # the gradient is that of plain BPTT, and the report says so
    groups: tuple = ()  # names of the states of each group; (): all states, one group
    owner: Mapping = dataclasses.field(default_factory=dict)  # as in tests.models.Model
    batches: tuple = (BATCH, None)  # the batch sizes that it is tried with
    context: Mapping = dataclasses.field(default_factory=dict)  # of brainstate.environ

    def given(self, xs):
        """Inputs as the module gets them: arrays of JAX, with the unit."""
        xs = jnp.asarray(xs)
        return xs if self.unit == u.UNITLESS else xs * self.unit


def bare(tree):
    """A tree of arrays without their units."""
    return jax.tree.map(u.get_magnitude, tree, is_leaf=lambda leaf: isinstance(leaf, u.Quantity))


def plain(tree):
    """The same as arrays of NumPy."""
    return jax.tree.map(np.asarray, bare(tree))


def values(module, kind) -> dict:
    """The values of a module's states of one kind, by dotted path, without units."""
    return {'.'.join(map(str, path)): plain(s.value) for path, s in module.states(kind).items()}


def built(row: Row, batch_size: int | None):
    """The module of a row with drawn first values."""
    brainstate.random.seed(7)
    module = row.make()
    brainstate.nn.init_all_states(module, batch_size=batch_size)
    return module


def inputs(row: Row, batch_size: int | None, steps: int = STEPS):
    rng = np.random.default_rng(3)
    lead = (steps,) if batch_size is None else (steps, batch_size)
    return row.draw(rng, (*lead, *row.x))


def case_of(row: Row, module, batch_size: int | None) -> Case:
    """The row as a case of the oracles, with the module's own numbers and a random target."""
    params, carry = values(module, brainstate.ParamState), values(module, brainstate.HiddenState)
    xs = inputs(row, batch_size)
    model = Model(
        row.name,
        row.formula,
        jax.tree.map(np.shape, params),
        jax.tree.map(np.shape, carry),
        groups=row.groups,
        owner=row.owner,
        exact=row.exact,
    )
    output, _ = row.formula(NumpyOps(), params, carry, xs[0])
    ys = np.random.default_rng(5).standard_normal((len(xs), *np.shape(output)))
    return Case(model, params, carry, xs, ys, squared)
