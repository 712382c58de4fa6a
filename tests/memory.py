"""A pytest plugin: the memory of a test process, which a laptop has to have for each of them.

JAX keeps every program that a run compiles, helpers of tests every learner, and the allocator of
glibc what these leave.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import re
import sys
from pathlib import Path

import jax
import pytest

MOST = 1.5 * 2**30  # bytes that a process may hold in `make test`
WITHIN = 1.2 * 2**30  # bytes at which programs are dropped between tests of a file
BETWEEN = 0.9 * 2**30  # and behind the last one
MAPPINGS = 32_000  # half of those that Linux gives a process; XLA ends where there are no more
PROC = Path('/proc/self')
_asked, _stays = itertools.count(), [0]


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell it by a file."""
    table = PROC / 'statm'
    return int(table.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE') if table.exists() else 0


def peak_bytes() -> int:
    """The most that this process has held since the last call; 0 where the system does not tell."""
    table = PROC / 'status'
    found = re.search(r'VmHWM:\s*(\d+) kB', table.read_text()) if table.exists() else None
    with contextlib.suppress(OSError):
        (PROC / 'clear_refs').write_text('5')
    return 1024 * int(found[1]) if found else 0


def drop() -> None:
    """Compiled programs, which tests make again where they need them; where much stays, also the
    cases and learners that helpers of tests keep by `functools.cache`, but for the ops of
    `tests/kit`: a name is registered once.
    """
    jax.clear_caches()
    _give_back()
    if resident_bytes() > BETWEEN:
        for name in [name for name in sys.modules if re.match(r'tests\.(?!kit\.)', name)]:
            for value in vars(sys.modules[name]).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        _give_back()


def _give_back() -> None:
    """What is garbage, and what the allocator of glibc keeps of it."""
    gc.collect()
    if sys.platform == 'linux' and hasattr(libc := ctypes.CDLL(None), 'malloc_trim'):
        libc.malloc_trim(0)


def make_room(enough: float) -> None:
    """Drop where this process holds more, or has many mappings, which each program adds to. What
    stays although it is dropped is not dropped again at once.
    """
    look = next(_asked) % 16 == 0 and (PROC / 'maps').exists()
    many = look and (PROC / 'maps').read_bytes().count(b'\n') > MAPPINGS
    if many or resident_bytes() > max(enough, _stays[0] + 2**27):
        drop()
        _stays[0] = resident_bytes()


def pytest_collection_finish() -> None:
    """What modules compiled at their import is of no use to most tests."""
    drop()
    peak_bytes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """A test of the gate that needs much by itself ends in an error, and those after it go on."""
    yield
    make_room(WITHIN if nextitem and nextitem.path == item.path else BETWEEN)
    most = peak_bytes()
    if most > MOST and not item.get_closest_marker('nightly') and jax.default_backend() == 'cpu':
        pytest.fail(
            f'{item.nodeid}: this process held {most / 2**30:.2f} GiB, and may hold '
            f'{MOST / 2**30}; {resident_bytes() / 2**30:.2f} GiB stay. Make that test smaller, run '
            'it in a process of its own, or look for what its file keeps.',
            pytrace=False,
        )
