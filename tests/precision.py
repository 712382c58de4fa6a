"""Fixtures for float64: a test file, or the conftest of a folder, imports one, and all its tests
have it.
"""

import brainstate
import jax
import pytest


@pytest.fixture(autouse=True)
def float64():
    """Arrays are float64 by default; the setting is as before afterwards."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def float64_models():
    """The same, and the initialisers of brainstate make float64."""
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        yield
