"""The rules of the loss of one step: its value, its derivative, and how lanes are reduced."""

from __future__ import annotations

import numpy as np

from .bounds import Num, constant
from .checks import Check, Gated
from .losses import LOSSES, divisor_of, softmax
from .record import Record, once


def _loss(r: Record):
    name = r.raw['loss']['name']
    if name not in LOSSES:
        raise Gated(f'no formula for the loss {name}')
    return LOSSES[name]


def reduction(r: Record, c: Check) -> None:
    """The divisor is the sum of the mask, or 1."""
    _loss(r)
    mask, loss = r.num('loss/mask'), r.raw['loss']
    c.true('loss/mask', bool(np.all(mask.value >= 0)), 'a negative weight', 'weights >= 0')
    want = divisor_of(mask, loss['reduction'])
    c.close('loss/divisor', r['loss/divisor'], want, ('loss/mask', 'loss/reduction'))


def probabilities(r: Record, c: Check) -> None:
    """The probabilities are the softmax of the outputs."""
    if r.raw['loss']['name'] != 'softmax_ce':
        raise Gated('the loss uses no probabilities')
    stored = r.num('loss/probabilities')
    c.close('loss/probabilities', np.ones(stored.shape[:-1]), stored.sum(-1))
    c.close('loss/probabilities', stored.value, softmax(r.num('outputs')), ('outputs',))


def loss_value(r: Record, c: Check) -> None:
    """The loss of each lane and in total."""
    per_lane = _loss(r).per_lane(r.num('outputs'), r.num('targets'))
    c.close('loss/per_lane', r['loss/per_lane'], per_lane, ('outputs', 'targets'))
    stored = r.num('loss/per_lane')
    value = (r.num('loss/mask') * stored).sum() / constant(r['loss/divisor'], r.floor)
    c.close('loss/value', r['loss/value'], value, ('loss/per_lane', 'loss/mask', 'loss/divisor'))


def error(r: Record, c: Check) -> None:
    """The derivative of the loss by the outputs."""
    c.close('signals/err', r['signals/err'], _error(r), ('outputs', 'targets', 'loss'))


@once
def _error(r: Record) -> Num:
    slope = _loss(r).slope(r.num('outputs'), r.num('targets'))
    weight = r.num('loss/mask') / constant(r['loss/divisor'], r.floor)
    return slope * weight.reshape((-1, 1))


def stored_error(r: Record) -> Num:
    """The error as stored, with the terms of its formula: a step may make it once more."""
    stored = r.num('signals/err')
    known = r.raw['loss']['name'] in LOSSES
    return Num(stored.value, _error(r).terms if known else np.abs(stored.value), stored.floor)
