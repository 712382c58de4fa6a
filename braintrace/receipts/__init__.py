"""Receipts of learning steps: what a step was made of, written down so that someone else can check it."""

from ._capture import Block, Record, Recording, Run, capture
from ._cells import Cell

__all__ = ['Block', 'Cell', 'Record', 'Recording', 'Run', 'capture']
