import signal

import pytest

from tests.precision import float64_models as float64_models


@pytest.fixture
def interruptible():
    """SIGINT interrupts: a shell that starts the tests in the background lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
