"""Models of ``tests.models`` as modules; a group's states are kept in one value or in several."""

from collections.abc import Callable
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp

import braintrace
from tests import models
from tests.models.library import LibraryOps


class Tree(brainstate.HiddenState):
    """A hidden state whose value is any pytree."""

    def _check_value(self, value):
        pass


class Form(NamedTuple):
    """A way to keep several states in one; ``values`` are those by name, in one order."""

    new: Callable  # values -> state
    get: Callable  # (state, names) -> values
    set: Callable  # (state, values)
    named: bool = False  # whether the compiler calls them by name and not by number


def stacked(values):
    return jnp.stack(list(values.values()), -1)


def new_group(values):
    return brainstate.HiddenGroupState(stacked(values))


def columns(state, names):
    return {name: state.get_value(k) for k, name in enumerate(names)}


def one_by_one(state, values):
    for k, value in enumerate(values.values()):
        state.set_value({str(k): value})


def write(state, value):
    state.value = value


FORMS = {
    'a group': Form(new_group, columns, lambda s, values: s.set_value(list(values.values()))),
    'a named tree': Form(
        brainstate.HiddenTreeState,
        lambda s, names: {name: s.get_value(name) for name in names},
        lambda s, values: s.set_value(values),
        named=True,
    ),
    'a group, one by one': Form(new_group, columns, one_by_one),
    'the array of a group': Form(
        new_group,
        lambda s, names: dict(zip(names, jnp.moveaxis(s.value, -1, 0))),
        lambda s, values: write(s, stacked(values)),
    ),
    'a tuple': Form(
        lambda values: Tree(tuple(values.values())),
        lambda s, names: dict(zip(names, s.value)),
        lambda s, values: write(s, tuple(values.values())),
    ),
    'a dict': Form(Tree, lambda s, names: s.value, write, named=True),
}


class Table(brainstate.nn.Module):
    """A model of ``tests.models`` with a parameter for each entry, and groups of several states
    kept in one of ``FORMS``, called after the first of them; with ``form=None`` each by itself.

    ``lane``: without the batch axis, the states those of the first lane.
    """

    def __init__(self, case, form, lane=False):
        super().__init__()
        self.case, self.form, self.lane = case, FORMS.get(form), lane
        self.together = [g for g in case.model.groups if form and len(g) > 1]
        self.alone = [name for name in case.carry if not any(name in g for g in self.together)]
        for name, value in case.params.items():
            setattr(self, name, brainstate.ParamState(jax.tree.map(jnp.asarray, value)))

    def init_state(self, batch_size=None, **_):
        values = {k: jnp.asarray(h[0] if self.lane else h) for k, h in self.case.carry.items()}
        for name in self.alone:
            setattr(self, name, brainstate.HiddenState(values[name]))
        for names in self.together:
            setattr(self, f'{names[0]}_states', self.form.new({k: values[k] for k in names}))

    def state_of(self, names):
        return getattr(self, f'{names[0]}_states')

    def path(self, name):
        """What the compiler calls a state."""
        for names in self.together:
            if name in names:
                return f'{names[0]}_states/{name if self.form.named else names.index(name)}'
        return name

    def update(self, x):
        params = {name: getattr(self, name).value for name in self.case.params}
        carry = {name: getattr(self, name).value for name in self.alone}
        for names in self.together:
            carry |= self.form.get(self.state_of(names), names)
        output, new = self.case.run(LibraryOps(), params, carry, x)
        for name in self.alone:
            getattr(self, name).value = new[name]
        for names in self.together:
            self.form.set(self.state_of(names), {k: new[k] for k in names})
        return output


def learner_of(name, form, rule):
    case = models.case(name)
    return braintrace.compile(Table(case, form), rule, case.xs[0])


def gradient(learner, xs, ys, **options):
    """The gradient of squared errors, by ``etrace_grad``; a top parameter has its bare name."""

    def step_fn(x, y):
        return models.squared(learner(x), y)

    options = {'reduction': 'sum', 'window': 3, **options}
    grads = learner.etrace_grad(xs, ys, step_fn=step_fn, **options).grads
    return {k[0] if isinstance(k, tuple) and len(k) == 1 else k: g for k, g in grads.items()}
