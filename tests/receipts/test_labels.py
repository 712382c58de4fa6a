"""Labels, notes and provenance decide nothing: the verdict is the same whatever they say."""

from __future__ import annotations

import copy

import pytest

from braintrace.receipts.verifier.canonical import emit, parse
from braintrace.receipts.verifier.golden import generate
from braintrace.receipts.verifier.reconcile import reconcile
from braintrace.receipts.verifier.sidecar import import_sidecar
from tests.receipts.foreign import Foreign

NOTES = {
    'labels': {'verdict': 'rederived', 'skip': 'opaque_cell', 'level': 'engine'},
    'helper': {'rule 4': 'gated off', 'k': '1e9', 'note': 'trusted'},
    'source': {'framework': 'anything', 'version': '0'},
    'import_provenance': {'source_hash': f'sha256:{"0" * 64}', 'format': 'x', 'importer': 'y'},
}


def honest():
    return parse(generate('lif', 1))


def dishonest():
    value = honest()
    value['gradients']['W']['data'][3] += 0.5
    return value


@pytest.mark.parametrize('make', [honest, dishonest])
@pytest.mark.parametrize('name', NOTES)
def test_a_note_changes_nothing(make, name):
    bare = reconcile(make())
    assert reconcile({**make(), name: NOTES[name]}) == bare
    assert bare.verdict == ('rederived' if make is honest else 'failed')


def test_an_import_is_derived_again_with_and_without_its_provenance():
    (line,) = Foreign(cell='alif').steps(1)
    receipt, result = import_sidecar(emit(line), 'pytorch')
    for name in ('source', 'import_provenance'):
        stripped = copy.deepcopy(receipt)
        del stripped[name]
        assert reconcile(parse(emit(stripped))) == result
        wrong = copy.deepcopy(stripped)
        wrong['outputs']['data'][0] += 0.1
        assert reconcile(parse(emit({**wrong, **NOTES}))).verdict == 'failed'


def test_a_claimed_skip_does_not_switch_the_engine_off():
    bases = ('nondeterministic_hardware', 'third_party', 'distributed_field')
    for basis in bases:
        result = reconcile({**dishonest(), 'skip': {'basis': basis}})
        assert result.verdict == 'failed' and 14 in result.rules_evaluated
