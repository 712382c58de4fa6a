"""What a projection takes for its parts."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn


class Doubled(brainstate.nn.Module):
    def update(self, x):
        return 2 * x


@pytest.mark.parametrize('comm', [lambda x: 2 * x, Doubled()])
def test_a_function_or_a_module_without_sizes_may_be_its_weights(comm):
    projection = nn.Projection(comm, nn.Expon(3))
    brainstate.nn.init_all_states(projection)
    np.testing.assert_allclose(projection(jnp.ones(3)), 2)


@pytest.mark.parametrize(
    'parts, found',
    [
        ((nn.Expon(3), nn.Expon(3)), 'comm is'),
        ((nn.Linear(3, 3), nn.COBA(E=0.0)), 'syn is'),
        ((nn.Linear(3, 3), nn.Expon(3), nn.Expon(3)), 'out is'),
        ((nn.Linear(3, 3), nn.Expon(3), None, nn.Expon(3)), 'stp is'),
    ],
)
def test_a_part_in_the_place_of_another_is_refused(parts, found):
    with pytest.raises(braintrace.errors.OptionError, match=f'Projection: {found}'):
        nn.Projection(*parts)


def test_a_negative_conductance_is_refused():
    inhibitory = nn.SignedWLinear(3, 3, w_sign=-1)
    with pytest.raises(braintrace.errors.OptionError, match='give inhibition an E below'):
        nn.Projection(inhibitory, nn.Expon(3), nn.COBA(E=-80.0))
    nn.Projection(inhibitory, nn.Expon(3), nn.CUBA())


@pytest.mark.parametrize('first', [0, 0 * u.mS, np.zeros(3, int), 0.5, np.float64(0.5)])
def test_a_first_value_of_any_kind_of_number_is_a_float(first):
    synapses = nn.Expon(3, g_init=first)
    for precision in (32, 'bf16'):
        with brainstate.environ.context(precision=precision):
            synapses.init_state()
            assert u.get_magnitude(synapses.g.value).dtype == brainstate.environ.dftype()
