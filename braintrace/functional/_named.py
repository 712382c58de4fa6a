"""A rule by its name."""

from __future__ import annotations

import inspect

from .. import rules
from .._public_names import nearest
from ..errors import OptionError

NAMES = [name for name in rules.__all__ if not name.endswith('Rule')]


def named(name: str) -> rules.Rule:
    """What the factory of :mod:`braintrace.rules` with this name makes without arguments; in any
    case of letters, with underscores or not.
    """
    plain = {each.replace('_', ''): each for each in NAMES}
    found = plain.get(name.lower().replace('_', ''))
    if found is None:
        near = nearest(name, NAMES)
        meant = f' Did you mean {near!r}?' if near else ''
        raise OptionError(
            f'rule is {name!r}; give a value of braintrace.rules, or one of the names '
            f'{NAMES}.{meant}'
        )
    make = getattr(rules, found)
    takes = inspect.signature(make).parameters.values()
    needed = [p.name for p in takes if p.default is p.empty]
    if needed:
        raise OptionError(
            f'rule is {name!r}, which needs {", ".join(needed)}: give '
            f'braintrace.rules.{found}({", ".join(needed)}).'
        )
    return make()
