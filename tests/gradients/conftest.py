"""Every test here runs in float64."""

import jax
import pytest

from tests.registries import registries_are_restored as registries_are_restored


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.jax_enable_x64
    jax.config.update('jax_enable_x64', True)
    yield
    jax.config.update('jax_enable_x64', before)
