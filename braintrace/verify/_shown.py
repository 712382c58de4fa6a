"""How what was found is shown: as text, as tables in a notebook, as plain data, as a figure."""

from __future__ import annotations

import abc
import dataclasses
import io
import math
from typing import Any

from .._tables import Table, as_html, as_text
from ..errors import OptionError


class Shown(abc.ABC):
    """A base of dataclasses that print as ``_lines()`` with ``_tables()`` below them."""

    @abc.abstractmethod
    def _lines(self) -> list[str]: ...

    @abc.abstractmethod
    def _tables(self) -> list[Table]: ...

    def __str__(self) -> str:
        return as_text(self._lines(), self._tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._lines(), self._tables())

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as JSON has them; a number that is
        not finite, or not yet known, is None.
        """
        return fields_of(self)


def fields_of(value: Any) -> dict:
    """The fields of a dataclass as plain data."""
    return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def plain(value):
    """As JSON has it."""
    if hasattr(value, 'as_dict'):
        return value.as_dict()
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def empty_figure(**options):
    """A figure that a notebook shows without ``pyplot``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise OptionError(
            'a figure needs matplotlib. Install it: pip install matplotlib; or print the diagnosis.'
        ) from e

    class Drawn(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format='png')
            return file.getvalue()

    return Drawn(**options)
