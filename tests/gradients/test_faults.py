"""Silent faults A to K of the public package, which must not come back.

Rows of ``test_rules.py`` hold most of them, with both rules:

* a: readouts, plain weights and reset gates (``plain_input gru lru op_readout encoder``), and an
  output that does not read the new state (``old_output bypass``);
* b: the function between a parameter and its op (``masked transposed absolute doubled reshaped
  normalised``), and the test below;
* c: a state that reads another new state counts once (``lstm lstm_fused lstm_reading_cell
  synapse``);
* d: a tail that moves positions (``tail_flip tail_swap tail_cumsum tail_norm``);
* e: recurrence by data movement is cut, and not summed into the diagonal (``roll mean``);
* f: two parameters that are added in front of one op both learn (``added``, and below);
* g: two hidden states may be added directly (``state_sum``);
* j: a weight reaches h directly and through an op (``mgu minimal_rnn op_between_states``, whose
  first step ``test_es_d_rtrl.py`` compares with reverse mode);
* k: the bias correction counts steps of the trace, not calls, and a reset starts it again: a later
  call and resets.

Of the others: h, a loss over a loop in one gradient, is in ``functional/test_online.py``; i, an
exception while tracing, in ``functional/test_purity.py``.
"""

import numpy as np

from braintrace import rules
from tests import models, oracles
from tests.compare import assert_close, assert_moves
from tests.gradients.harness import over_sequence


def gradient(case):
    """The library's gradient, which equals the oracle's and leaves no parameter without one."""
    grads, *_ = over_sequence(case, rules.d_rtrl(), 2)
    assert_close(grads, oracles.total(oracles.dense_recursion(case)))
    assert_moves(grads)
    return grads


def test_fault_b_a_masked_entry_gets_exactly_nothing():
    grads = gradient(models.case('masked'))
    np.testing.assert_array_equal(grads['w'] != 0.0, models.weights.MASK)


def test_fault_f_two_parameters_added_before_one_op_both_learn():
    grads = gradient(models.case('added', models.cubic))
    np.testing.assert_array_equal(grads['w1'], grads['w2'])
