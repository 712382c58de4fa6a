"""Every test here runs in float64, brainstate's initialisers included."""
import brainstate
import jax
import pytest


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        yield
