"""One word for each idea: no public signature has a word that `docs/reference/conventions.md` has
another one for.
"""

import pytest

from tests.docs.test_docstrings import PUBLIC, parameters

ELSEWHERE = {  # a word -> the one to use
    'batch': 'batch_size',
    'every': 'update_every, write_every, record_every',
    'loss': 'loss_fn',
    'key_seed': 'seed',
    'lr': 'optimizer',
    'n_steps': 'steps',
    'opt': 'optimizer',
    'params_': 'params',
    'rng': 'key',
    'sequence': 'xs, ys',
    'time_constant': 'tau',
}
KNOWN = {  # what a word means in a class or function that has it for another idea
    'braintrace.Penalised': {'loss'},  # its value
    'braintrace.train_synthetic_gradient': {'lr'},  # of the optimiser that it makes
    'braintrace.receipts.capture': {'loss'},  # a name too
    'braintrace.receipts.audit': {'loss'},
    'braintrace.receipts.Recording': {'loss'},
    'braintrace.receipts.Record': {'loss'},
    'braintrace.tasks.Task': {'loss'},
}


@pytest.mark.parametrize('word', ELSEWHERE)
def test_no_signature_has_a_word_that_has_another_one(word):
    found = {
        name
        for name, value in PUBLIC.items()
        if word in parameters(value) and word not in KNOWN.get(name, ())
    }
    assert not found, f'it is called {ELSEWHERE[word]}'
