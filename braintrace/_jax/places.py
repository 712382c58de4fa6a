"""Where in the user's code an equation was made.

A place is a line of the user, not of the package. An equation of a cell of ``braintrace.nn`` is
placed at the call of the cell; where only the package calls it, as in a learner of this cell alone,
at the line of the cell.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from jax._src import source_info_util as _source

PACKAGE = Path(__file__).absolute().parent.parent
CELLS = PACKAGE / 'nn'
PARTS_OF_CELLS = ('_base.py', '_linear.py')  # a line there says less than the cell's
NOTEBOOK = re.compile(r'.*[/\\]ipykernel_\d+[/\\]\d+\.py')  # the file that stands for a cell of it


def hide_from_locations(path: str) -> None:
    _source.register_exclusion(path)


def hidden_files() -> list[Path]:
    """Everything in the package but the cells."""
    others = [path for path in sorted(PACKAGE.iterdir()) if path != CELLS]
    return [*others, *(CELLS / name for name in PARTS_OF_CELLS)]


for _path in hidden_files():
    hide_from_locations(str(_path))


@functools.lru_cache(maxsize=4096)
def _describe(traceback) -> str:
    frames, cells = list(_source.user_frames(traceback)), f'{CELLS}{os.sep}'
    outside = (f for f in frames if not f.file_name.startswith(cells))
    frame = next(outside, frames[0] if frames else None)
    if frame is None:
        return ''
    return f'{_shown(frame.file_name)}:{frame.start_line} ({frame.function_name})'


def _shown(file: str) -> str:
    """The name of a file, which in a notebook would say nothing."""
    return 'notebook cell' if NOTEBOOK.fullmatch(file) else file


def location(source_info) -> str:
    """``file:line (function)`` of the user's code that made an equation, empty if unknown."""
    return _describe(source_info.traceback)


def at_location(source_info):
    """The context in which new equations get this place."""
    return _source.user_context(source_info.traceback)
