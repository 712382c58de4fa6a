"""Optimisers by name, for one parameter: its new slots and its update, what is added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .bounds import Num, constant, warm_up


class Optimizer(NamedTuple):
    """``slots`` names its arrays; ``needs`` and ``may`` the numbers of its configuration.

    ``step(config, count, slots, gradient, parameter) -> (slots, update)``; ``count``: steps before.
    """

    slots: tuple[str, ...]
    needs: tuple[str, ...]
    may: tuple[str, ...]
    step: Callable[[Mapping, int, Mapping, Num, Num], tuple[dict[str, Num], Num]]
    decoupled: bool = False


def _number(config: Mapping, name: str, floor: float) -> Num:
    return constant(config[name], floor)


def _decayed(config: Mapping, gradient: Num, parameter: Num) -> Num:
    """Coupled L2: the decay is part of the gradient."""
    if not config.get('weight_decay'):
        return gradient
    return gradient + _number(config, 'weight_decay', gradient.floor) * parameter


def _sgd(config, count, slots, gradient, parameter):
    gradient = _decayed(config, gradient, parameter)
    return {}, -(_number(config, 'lr', gradient.floor) * gradient)


def _momentum(config, count, slots, gradient, parameter):
    gradient, floor = _decayed(config, gradient, parameter), gradient.floor
    keep = _number(config, 'momentum', floor)
    trace = gradient + keep * slots['trace']
    direction = gradient + keep * trace if config.get('nesterov') else trace
    return {'trace': trace}, -(_number(config, 'lr', floor) * direction)


def _direction(config, count, slots, gradient):
    """``mean / (root of the square + eps)``, each corrected for its start at zero."""
    floor, moments = gradient.floor, {}
    powers = {'mu': ('b1', gradient), 'nu': ('b2', gradient * gradient)}
    for slot, (name, new) in powers.items():
        keep = config[name]
        old = constant(keep, floor) * slots[slot]
        moments[slot] = old + constant(1 - keep, floor) * new
    mean, square = (
        moments[slot] / warm_up(config[name], count + 1, floor)
        for slot, (name, _) in powers.items()
    )
    square = square + _number(config, 'eps_root', floor) if config.get('eps_root') else square
    return moments, mean / (square.sqrt() + _number(config, 'eps', floor))


def _adam(config, count, slots, gradient, parameter):
    gradient = _decayed(config, gradient, parameter)
    slots, direction = _direction(config, count, slots, gradient)
    return slots, -(_number(config, 'lr', gradient.floor) * direction)


def _adamw(config, count, slots, gradient, parameter):
    slots, direction = _direction(config, count, slots, gradient)
    decay = _number(config, 'weight_decay', gradient.floor) * parameter
    return slots, -(_number(config, 'lr', gradient.floor) * (direction + decay))


ADAM = ('b1', 'b2', 'eps')
OPTIMIZERS = {
    'sgd': Optimizer((), ('lr',), ('weight_decay',), _sgd),
    'momentum': Optimizer(('trace',), ('lr', 'momentum'), ('nesterov', 'weight_decay'), _momentum),
    'adam': Optimizer(('mu', 'nu'), ('lr', *ADAM), ('eps_root', 'weight_decay'), _adam),
    'adamw': Optimizer(('mu', 'nu'), ('lr', *ADAM, 'weight_decay'), ('eps_root',), _adamw, True),
}
