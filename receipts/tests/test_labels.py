"""What a receipt says about itself in words decides nothing."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

import making
from braintrace_receipts import reconcile, reconcile_run
from making import get, put

WORDS = st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=4)
SOURCE = {'framework': 'pytorch', 'version': '2'}
IMPORT = {'source_hash': 'sha256:' + 'a' * 64, 'format': 'sidecar/1', 'importer': 'pytorch'}
CLAIMS = {'title': 'verified', 'verdict': 'rederived', 'rule 4': 'passed', 'k': '1e9'}
NOTES = {'source': SOURCE, 'import_provenance': IMPORT, 'helper': CLAIMS, 'labels': CLAIMS}


def bad(records):
    """A run with a flipped gradient."""
    at = (1, 'gradients', 'W', 'data')
    return put(records, at, [-g for g in get(records, at)])


def judged(records):
    run, last = reconcile_run(records), reconcile(records[-1])
    return [(one.verdict, one.failures, one.rules_evaluated, one.ties) for one in (run, last)]


@pytest.fixture(scope='module')
def runs():
    good = making.run('lif')
    return [good, bad(good), making.opaque(good), bad(making.opaque(good))]


@pytest.mark.slow
@hypothesis.given(WORDS, WORDS)
@hypothesis.settings(max_examples=15)
def test_any_words_leave_the_verdict(runs, labels, helper):
    for run in runs:
        noted = [{**record, 'labels': labels, 'helper': helper} for record in run]
        assert judged(noted) == judged(run)


@pytest.mark.slow
def test_claims_and_provenance_leave_the_verdict_and_so_does_stripping_them(runs):
    verdicts = [judged(run)[0][0] for run in runs]
    assert verdicts == ['rederived', 'failed', 'consistent', 'failed']
    for run in runs:
        noted = [{**record, **NOTES} for record in run]
        for key in NOTES:
            stripped = [{k: v for k, v in record.items() if k != key} for record in noted]
            assert judged(noted) == judged(stripped) == judged(run)


def test_a_skip_does_not_switch_derivation_off(runs):
    def skipped(run, basis):
        return reconcile_run([{**record, 'skip': {'basis': basis}} for record in run])

    for basis in ('third_party', 'nondeterministic_hardware', 'distributed_field'):
        found = skipped(runs[1], basis)
        assert found.verdict == 'failed' and 14 in found.rules_evaluated
        assert {4, 14} <= {failure.rule for failure in found.failures}
        assert skipped(runs[0], basis).verdict == 'rederived'
    opaque = skipped(runs[2], 'third_party')
    assert opaque.verdict == 'skipped' and not opaque.ok


def test_an_unknown_loss_or_optimiser_leaves_the_rest_to_derivation():
    for change, fine in (('loss', 'gradients'), ('optimizer', 'carry_after')):
        run = making.run('lif')
        for record in run:
            record[change]['name'] = 'another'
        found = reconcile_run(run)
        assert found.verdict == 'consistent' and 14 in found.rules_evaluated
        assert 'no formula' in found.disclosures['rule 14 in part']
        node = run[1][fine]['W' if fine == 'gradients' else 'V']
        node['data'][0] += 0.01
        assert 14 in {failure.rule for failure in reconcile_run(run).failures}


def test_a_key_asks_for_a_signature():
    run = making.run('rnn', sealed=True)
    assert reconcile_run(run).verdict == 'rederived'
    found = reconcile_run(run, key=b'secret')
    assert {failure.rule for failure in found.failures} == {16}
    bare = making.run('rnn')
    assert {failure.rule for failure in reconcile_run(bare, key=b'secret').failures} == {16, 17}


KEY = b'secret'


def resealed(records):
    """What someone without the key can do: other roots beside the signatures that are there."""
    sealed = zip(records, making.seal(records), strict=True)
    return [
        {**new, 'digests': {**new['digests'], 'signature': old['digests']['signature']}}
        for old, new in sealed
    ]


def without(record, name):
    digests = {key: value for key, value in record['digests'].items() if key != name}
    return {**record, 'digests': digests}


# What somebody does to a signed run, and the rules that refuse it; none where it is a doubt.
SIGNED = {
    'nothing': (lambda run: run, set()),
    'the roots are taken away': (lambda run: [without(one, 'root') for one in run], {16, 17}),
    'the beginning is cut, with new roots': (lambda run: resealed(run[1:]), {16}),
    'the beginning is cut': (lambda run: run[1:], set()),
    'the end is cut': (lambda run: run[:-1], set()),
    'a signed end is in between': (lambda run: making.seal(run[:2], KEY) + run[2:], {17}),
    'a record is left out': (lambda run: run[:1] + run[2:], {10, 17}),
}


@pytest.mark.parametrize('done', SIGNED)
def test_a_signature_holds_a_record_at_its_place(done):
    change, rules = SIGNED[done]
    run = change(making.seal(making.run('rnn', steps=3, optimizer='none'), KEY))
    found = reconcile_run(run, key=KEY)
    assert {failure.rule for failure in found.failures} == rules
    if not rules:
        told = {'the beginning is cut': ('a start at step 1, t = 1',)}
        told['the end is cut'] = ('an end that is not signed',)
        assert found.doubts == told.get(done, ())


def test_gradients_of_a_window_are_derived_only_beside_its_steps():
    run = making.run('rnn', window=2)
    assert reconcile_run(run).verdict == 'rederived'
    assert reconcile(run[0]).verdict == 'rederived'
    for alone in (reconcile(run[1]), reconcile_run(run[1:])):
        assert alone.verdict == 'consistent'
        assert 'window' in alone.disclosures['rule 14 in part']


def renamed(value, names):
    """A record in which names stand for others, as keys and as values."""
    if isinstance(value, dict):
        return {names.get(k, k): renamed(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def with_names(value, names):
    """A record or a configuration with other names of what is no key of the format."""
    old = value['topology']
    topology = {key: renamed(one, names) for key, one in old.items()}
    topology['roles'] = {role: names.get(own, own) for role, own in old['roles'].items()}
    return {**renamed(value, names), 'topology': topology}


def test_names_may_have_slashes_unless_two_fields_have_one_path():
    names = {'W': 'net/W', 'W_out': 'net/out/W', 'hidden': 'net/cell', 'recurrent': 'net/W'}
    run = making.steps(with_names(making.first('lif', optimizer='momentum'), names), 2)
    assert reconcile_run(run).verdict == 'rederived'
    names = {'recurrent': 'a', 'hidden': 'b/c', 'readout': 'a/b', 'output': 'c'}
    (record,) = making.run('lif', steps=1)
    (first, *_) = reconcile(with_names(record, names)).failures
    assert first.rule == 0 and 'two names that make one path' in first.hint
