"""What matrix cells refuse, and what their sizes mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import nn
from braintrace.errors import OptionError


@pytest.mark.parametrize(
    'options, found',
    [
        ({'heads': 3}, 'heads is 3; give a divisor of key_size=8 and of out_size=8'),
        ({'heads': 0}, 'heads is 0'),
        ({'heads': 4, 'key_size': 6}, 'give a divisor of key_size=6'),
        ({'decay': 1.5}, r'decay is 1.5; give a number in \(0, 1\]'),
        ({'decay': 0.0}, 'decay is 0.0'),
        ({'heads': 2, 'decay': [0.9, 0.9, 0.9]}, 'one for each of the 2 heads'),
        ({'key_size': 0}, 'key_size'),
    ],
)
def test_sizes_and_decays_that_do_not_fit_are_refused(options, found):
    with pytest.raises(OptionError, match=found):
        nn.GLACell(3, 8, **options)


def test_a_state_size_that_is_no_count_is_refused():
    with pytest.raises(OptionError, match='state_size'):
        nn.MambaCell(3, state_size=0)


def test_a_decay_of_one_is_linear_attention():
    cell = nn.GLACell(3, 4, decay=1)
    cell.init_state()
    xs = np.random.default_rng(0).normal(size=(5, 3)).astype('float32')
    q, k, v = (xs @ np.asarray(w.weight.value['weight']) for w in (cell.Wq, cell.Wk, cell.Wv))
    want = np.tril(q @ k.T) @ v
    got = [cell(jnp.asarray(x)) for x in xs]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))
