"""Models of ``tests.models`` as modules; a group's states are kept in one value or in several."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from tests import models
from tests.models.library import LibraryOps

slow = pytest.mark.slow


class Tree(brainstate.HiddenState):
    """A hidden state whose value is any pytree."""

    def _check_value(self, value):
        pass


class Separate:
    """A ``HiddenState`` for each of ``names``; ``column`` gives its path in the compiler."""

    def __init__(self, names):
        self.names = names

    def make(self, module, values):
        for name in self.names:
            setattr(module, name, brainstate.HiddenState(values[name]))

    def get(self, module):
        return {name: getattr(module, name).value for name in self.names}

    def set(self, module, values):
        for name in self.names:
            getattr(module, name).value = values[name]

    def column(self, name):
        return name


class Together(Separate):
    """All in one state, which ``new`` makes; it is called after the first of them."""

    def state(self, module):
        return getattr(module, f'{self.names[0]}_states')

    def make(self, module, values):
        setattr(module, f'{self.names[0]}_states', self.new([values[name] for name in self.names]))

    def column(self, name):
        return f'{self.names[0]}_states/{self.names.index(name)}'


class Group(Together):
    """A ``HiddenGroupState``, read and written through its methods."""

    def new(self, values):
        return brainstate.HiddenGroupState(jnp.stack(values, -1))

    def get(self, module):
        return {name: self.state(module).get_value(k) for k, name in enumerate(self.names)}

    def set(self, module, values):
        self.state(module).set_value([values[name] for name in self.names])


class OneByOne(Group):
    def set(self, module, values):
        for k, name in enumerate(self.names):
            self.state(module).set_value({str(k): values[name]})


class Stacked(Group):
    """A ``HiddenGroupState``, read and written as the array that it stores."""

    def get(self, module):
        return dict(zip(self.names, jnp.moveaxis(self.state(module).value, -1, 0)))

    def set(self, module, values):
        self.state(module).value = jnp.stack([values[name] for name in self.names], -1)


class Named(Group):
    """A ``HiddenTreeState``."""

    def new(self, values):
        return brainstate.HiddenTreeState(dict(zip(self.names, values)))

    def get(self, module):
        return {name: self.state(module).get_value(name) for name in self.names}

    def set(self, module, values):
        self.state(module).set_value(values)

    def column(self, name):
        return f'{self.names[0]}_states/{name}'


class AsDict(Named):
    """A ``HiddenState`` that holds a dict."""

    def new(self, values):
        return Tree(dict(zip(self.names, values)))

    def get(self, module):
        return self.state(module).value

    def set(self, module, values):
        self.state(module).value = {name: values[name] for name in self.names}


class AsTuple(Together):
    def new(self, values):
        return Tree(tuple(values))

    def get(self, module):
        return dict(zip(self.names, self.state(module).value))

    def set(self, module, values):
        self.state(module).value = tuple(values[name] for name in self.names)


class Table(brainstate.nn.Module):
    """A model of ``tests.models`` with a parameter for each entry, and groups kept as ``form``.

    ``lane``: without the batch axis, the states those of the first lane.
    """

    def __init__(self, case, form, lane=False):
        super().__init__()
        self.case, self.lane = case, lane
        self.forms = [(form if len(g) > 1 else Separate)(g) for g in case.model.groups]
        for name, value in case.params.items():
            setattr(self, name, brainstate.ParamState(jax.tree.map(jnp.asarray, value)))

    def init_state(self, batch_size=None, **_):
        for form in self.forms:
            form.make(
                self,
                {
                    k: jnp.asarray(self.case.carry[k][0] if self.lane else self.case.carry[k])
                    for k in form.names
                },
            )

    def update(self, x):
        params = {name: getattr(self, name).value for name in self.case.params}
        carry = {k: v for form in self.forms for k, v in form.get(self).items()}
        output, new = self.case.run(LibraryOps(), params, carry, x)
        for form in self.forms:
            form.set(self, {k: new[k] for k in form.names})
        return output


def learner_of(name, form, rule):
    case = models.case(name)
    return braintrace.compile(Table(case, form), rule, case.xs[0])


def gradient(learner, xs, ys, **options):
    """The gradient of squared errors, by ``etrace_grad``; a top parameter has its bare name."""

    def step_fn(x, y):
        return models.squared(learner(x), y)

    grads = learner.etrace_grad(
        xs, ys, step_fn=step_fn, **{'reduction': 'sum', 'window': 3, **options}
    ).grads
    return {k[0] if isinstance(k, tuple) and len(k) == 1 else k: g for k, g in grads.items()}
