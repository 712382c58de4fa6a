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
    """These modules, which import one another by their plain names; afterwards none is loaded.

    A folder of the repository may be loaded by the same name, as `receipts` is.
    """
    folder = ROOT / 'benchmarks'
    others = {path.stem: sys.modules.pop(path.stem, None) for path in folder.glob('*.py')}
    sys.path.insert(0, str(folder))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob('*.py'):
            sys.modules.pop(path.stem, None)
        sys.modules.update({name: module for name, module in others.items() if module is not None})
