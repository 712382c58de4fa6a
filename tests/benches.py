"""The modules of benchmarks/, for tests."""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def modules(*names: str) -> Iterator[types.SimpleNamespace]:
    """These modules, which import one another by their plain names; afterwards none is loaded."""
    folder = ROOT / 'benchmarks'
    sys.path.insert(0, str(folder))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob('*.py'):
            sys.modules.pop(path.stem, None)
