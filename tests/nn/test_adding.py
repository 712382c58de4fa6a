"""What a time scale is for: the adding problem over 200 steps."""

import brainstate
import optax
import pytest

from braintrace import nn, rules, tasks

STEPS, LANES, UNITS, UPDATES = 200, 32, 64, 400


class Net(brainstate.nn.Module):
    def __init__(self, timescale):
        super().__init__()
        self.cell = nn.MinGRUCell(2, UNITS, timescale=timescale)
        self.out = nn.Linear(UNITS, 1)

    def update(self, x):
        return self.out(self.cell(x))


def error_after_learning(timescale):
    """The mean squared error of the last 50 updates; the variance of the sum is 1 / 6."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    task, model = tasks.adding(STEPS), lambda seed: Net(timescale)
    found = tasks.run(task, model, rules.d_rtrl(), optimizer, UPDATES, batch_size=LANES)
    return found.losses[0, -50:].mean()


@pytest.mark.nightly
def test_a_timescale_learns_what_the_default_does_not():
    assert error_after_learning((1, STEPS)) < 0.03
    assert error_after_learning(None) > 0.12
