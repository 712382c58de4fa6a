"""What an op adds to a trace: ``x (x) d`` in closed form, for each primitive that has one here."""

from __future__ import annotations

from collections.abc import Callable

from .bounds import Num

__all__ = ['FORMULAS']


def _dense(x: Num, d: Num) -> dict[str, Num]:
    """``y = x @ W + b``: ``x_i d_o`` and ``d_o`` for each lane."""
    return {'weight': x[..., :, None] * d[..., None, :], 'bias': d}


# primitive -> (x, d) -> an array for each trainable, lanes in front
FORMULAS: dict[str, Callable[[Num, Num], dict[str, Num]]] = {'etp_mm': _dense}
