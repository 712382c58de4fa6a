"""Help and completion show the arguments of every layer, on one line."""

import inspect
import pydoc
import re

import pytest

from braintrace import nn


@pytest.mark.parametrize('name', [n for n in nn.__all__ if inspect.isclass(getattr(nn, n))])
def test_help_shows_the_arguments_of_the_constructor(name):
    cls = getattr(nn, name)
    shown, own = inspect.signature(cls), inspect.signature(cls.__init__)
    assert list(shown.parameters.values()) == list(own.parameters.values())[1:]
    assert '\n' not in str(shown)
    helped = re.sub(r'[\s|]+', '', pydoc.plain(pydoc.render_doc(cls)))
    first, second, *_ = shown.parameters.values()
    assert re.sub(r'[\s|]+', '', f'{cls.__name__}({first},{second}') in helped


def test_a_subclass_shows_its_own_arguments():
    class Own(nn.GRUCell):
        def __init__(self, units: int):
            super().__init__(units, units)

    assert str(inspect.signature(Own)) == '(units: int)' and Own(3).num_out == 3
    assert inspect.signature(type('Same', (nn.Linear,), {})) == inspect.signature(nn.Linear)
