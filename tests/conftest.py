"""Set before any test module is imported."""
import pytest

from tests import xla

xla.compile_quickly()


def pytest_collection_modifyitems(items):
    """Processes that share the tests out must name them alike, and an address in a name is another one in each of them."""
    named_by_address = [item.nodeid for item in items if ' at 0x' in item.nodeid]
    if named_by_address:
        raise pytest.UsageError('give these parameters ids of their own: ' + ', '.join(named_by_address))
