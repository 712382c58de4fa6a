import jax
import pytest

from tests.registries import registries_are_restored as registries_are_restored


@pytest.fixture(autouse=True)
def float64():
    """Every test of the ops runs in float64, and leaves the setting as it was."""
    with jax.enable_x64(True):
        yield
