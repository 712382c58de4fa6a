"""Set before any test module is imported."""

import contextlib
import gc
import sys

import hypothesis
import pytest

from tests import costs, memory, tiers, xla

xla.compile_quickly()

collect_ignore_glob = ['typed/*']  # of `test_typing.py`

SPARSE_KERNELS = 'braintrace.extra._sparse_cpu'

# The same examples in every run of the gate; `make test-nightly` has others, by --hypothesis-seed.
hypothesis.settings.register_profile(
    'gate', derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.register_profile(
    'fresh', hypothesis.settings.get_profile('gate'), derandomize=False, database=None
)
hypothesis.settings.load_profile('gate')


def pytest_addoption(parser):
    costs.pytest_addoption(parser)
    about = "trace the programs of the tests as for this platform, as 'cuda'; they run here"
    parser.addoption('--as-if-on', metavar='PLATFORM', help=about)


def pytest_configure(config):
    costs.pytest_configure(config)
    config.pluginmanager.register(memory, 'memory')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Processes that share the tests out must name them alike: an address in a name differs."""
    by_address = [item.nodeid for item in items if ' at 0x' in item.nodeid]
    if by_address:
        raise pytest.UsageError('give these parameters ids of their own: ' + ', '.join(by_address))
    tiers.assign(items, {} if config.getoption('--all-slow') else tiers.of_the_night())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """As on another platform, if asked for; the package is imported behind the flags of XLA."""
    from braintrace import _jax

    platform = item.config.getoption('--as-if-on')
    with _jax.as_if_on(platform) if platform else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """What is there now stays, but for the names that `braintrace.compat` put into the package:
    garbage is looked for among what the tests make, and less often. Kernels of sparse products take
    a second each to compile, so in the gate they are of `tests/gradients/test_sparse_structures.py`
    alone.
    """
    if compat := sys.modules.get('braintrace.compat'):
        compat._remove()
    if session.config.option.markexpr and (kernels := sys.modules.get(SPARSE_KERNELS)):
        kernels._has_numba = lambda: False
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
