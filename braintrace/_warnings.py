"""Warnings that point at the user's code, and lines that somebody may read."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import jax

from .errors import BraintraceWarning

# around what is written to stderr: there may be none, it may be closed, or its reader gone
if_read = contextlib.suppress(AttributeError, OSError, ValueError)

OTHERS = ('brainstate',)  # packages whose frames are skipped too, if they have been imported


def tell(text: str) -> None:
    """Give a :class:`braintrace.errors.BraintraceWarning` at the first frame outside of this
    package, JAX and brainstate.
    """
    files = [
        __file__,
        jax.__file__,
        *(sys.modules[name].__file__ for name in OTHERS if name in sys.modules),
    ]
    skipped = (
        *(os.path.dirname(os.path.abspath(f)) + os.sep for f in files if f),
        contextlib.__file__,
    )
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, BraintraceWarning, stacklevel=level)
