"""Sidecars: another framework's step becomes a receipt that the engine derives again."""

from __future__ import annotations

import copy
import hashlib
import random

import pytest

from braintrace_receipts import schema
from braintrace_receipts.canonical import ReceiptError, array_of, emit, parse
from braintrace_receipts.reconciler import reconcile, reconcile_run
from braintrace_receipts.sidecar import import_run, import_sidecar
from foreign import KAPPA_OUT, Foreign
from test_schema import JUNK, changed, places


def lines(count=4, **options):
    return [emit(line) for line in Foreign(**options).steps(count, restart=2)]


TRAININGS = [
    ('pytorch', dict(dtype='float32', kappa=KAPPA_OUT, fixed=True)),
    ('jax', dict(cell='alif', kappa=0.9, reset_gradient=True, tells_updates=True)),
    ('tensorflow', dict(cell='rnn', readout='linear', layout='in_out', split=False)),
    ('pytorch', dict(cell='alif', dtype='float32', optimizer='momentum')),
    ('jax', dict(readout='linear', reset_gradient=True, optimizer='adamw')),
    ('tensorflow', dict(cell='rnn', kappa=0.5, optimizer='sgd', loss='softmax_ce')),
]


@pytest.mark.parametrize(('framework', 'options'), TRAININGS)
def test_honest_training_is_derived_again(framework, options):
    raw = b''.join(lines(framework=framework, **options))
    receipts, result = import_run(raw, framework)
    assert (result.ok, result.verdict, result.failures) == (True, 'rederived', ())
    for receipt in receipts:
        assert schema.check(receipt, receipt['schema']) == []
    assert reconcile_run([parse(emit(receipt)) for receipt in receipts]).verdict == 'rederived'
    assert receipts[0]['source'] == {'framework': framework, 'version': '1.0'}


def test_the_raw_bytes_are_hashed():
    (raw, *_) = lines(1)
    spaced = raw.replace(b',', b', ', 5)
    for one in (raw, spaced):
        receipt, result = import_sidecar(one, 'pytorch')
        assert result.verdict == 'rederived'
        want = f'sha256:{hashlib.sha256(one).hexdigest()}'
        assert receipt['import_provenance']['source_hash'] == want


def test_the_layout_of_weights_changes_nothing():
    turned, straight = (
        import_sidecar(lines(1, layout=layout)[0], 'pytorch')[0] for layout in ('out_in', 'in_out')
    )
    for receipt in (turned, straight):
        receipt.pop('import_provenance')
    assert emit(turned) == emit(straight)


WRONG = [  # a place of a parameter, and the rules one of which sees it first
    (('gradient', 'data', 1), {4}),
    (('after', 'data', 0), {6}),
    (('traces_after', 'V', 'data', 5), {30}),
    (('slots_after', 'mu', 'data', 2), {22}),
    (('slots_after', 'nu', 'data', 2), {23}),
    (('x', 'data', 0), {8}),
]


@pytest.mark.parametrize(('path', 'rules'), WRONG)
def test_a_wrong_number_fails_and_the_receipt_is_made_all_the_same(path, rules):
    value = Foreign(cell='alif').steps(2)[1]
    value = parse(emit(value))
    at = ('parameters', 0, *path)
    old = value
    for key in at:
        old = old[key]
    receipt, result = import_sidecar(emit(changed(value, at, old * 1.05 + 1e-3)), 'pytorch')
    assert result.verdict == 'failed' and result.failures[0].rule in rules
    assert schema.check(receipt, receipt['schema']) == []


def test_a_readout_trace_that_decays_as_the_membrane_is_found(monkeypatch):
    """The readout's trace of another simulator was filtered with tau_mem in place of tau_out."""
    foreign = Foreign()
    step = foreign.cell_step

    def wrong(x):
        foreign.e = {**foreign.e, 'w_out': {'o': foreign.e['w_out']['o'] * 0.9}}
        return step(x)

    monkeypatch.setattr(foreign, 'cell_step', wrong)
    _, result = import_sidecar(emit(foreign.steps(3)[2]), 'pytorch')
    assert result.verdict == 'failed' and result.failures[0].rule in {27, 30}


def test_without_its_source_a_receipt_is_judged_the_same():
    value = parse(emit(Foreign().steps(1)[0]))
    value['parameters'][0]['gradient']['data'][0] += 0.1
    receipt, result = import_sidecar(emit(value), 'pytorch')
    bare = {k: v for k, v in receipt.items() if k not in ('source', 'import_provenance')}
    assert reconcile(bare) == result and result.verdict == 'failed'


def test_a_sidecar_of_another_framework_is_refused():
    (raw, *_) = lines(1, framework='jax')
    with pytest.raises(ReceiptError, match='a sidecar of jax') as found:
        import_sidecar(raw, 'pytorch')
    assert (found.value.code, found.value.hint) == ('framework', 'import it as jax')
    with pytest.raises(ReceiptError, match="'caffe'; known are pytorch, jax, tensorflow"):
        import_sidecar(raw, 'caffe')


def test_a_run_names_the_line_that_is_refused():
    raw = b''.join(lines(2))
    for wrong, message in ((raw + b'\n', 'line 3: nothing to read'), (b'', 'nothing to read')):
        with pytest.raises(ReceiptError, match=message):
            import_run(wrong, 'pytorch')
    receipts, _ = import_run(raw, 'pytorch')
    alone = [import_sidecar(line + b'\n', 'pytorch')[0] for line in raw.splitlines()]
    assert [*map(emit, receipts)] == [*map(emit, alone)]


def removed(value, *path):
    value = copy.deepcopy(value)
    part = value
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return value


def test_parts_that_make_no_step_are_named():
    value = parse(emit(Foreign(cell='alif', optimizer='adam').steps(1)[0]))
    other = changed(value, ('optimizer', 'name'), 'lion')
    cases = [
        (removed(value, 'signals'), 'schema', 'signals: is missing'),
        (removed(value, 'psi', 'before'), 'sidecar', 'psi.before: is missing: D of this alif'),
        (removed(value, 'parameters', 1), 'sidecar', 'none is recurrent'),
        (removed(value, 'parameters', 0, 'x'), 'sidecar', 'x is missing'),
        (removed(value, 'parameters', 0, 'traces_after', 'a'), 'sidecar', 'a is missing'),
        (removed(value, 'constants', 'rho'), 'sidecar', "the parts make no step: KeyError: 'rho'"),
        (changed(value, ('parameters', 0, 'role'), 'recurrent'), 'sidecar', 'a role stands twice'),
        (other, 'sidecar', "no update, and no formula for 'lion'"),
        ({**value, 'passed': True}, 'schema', 'passed: is no key of the schema'),
    ]
    for wrong, code, message in cases:
        with pytest.raises(ReceiptError) as found:
            import_sidecar(emit(wrong), 'pytorch')
        assert found.value.code == code and message in str(found.value), found.value


def test_an_optimizer_without_a_formula_is_consistent_at_most():
    value = parse(emit(Foreign(tells_updates=True).steps(1)[0]))
    receipt, result = import_sidecar(emit(changed(value, ('optimizer', 'name'), 'lion')), 'pytorch')
    assert (result.verdict, receipt['optimizer']['name']) == ('consistent', 'lion')


def test_junk_in_a_sidecar_is_refused_or_judged():
    value = parse(emit(Foreign().steps(1)[0]))
    spots = list(places(value))
    draw = random.Random(1)
    for _ in range(150):
        wrong = changed(value, draw.choice(spots), draw.choice(JUNK[:14]))
        try:
            emit(import_sidecar(emit(wrong), 'pytorch')[0])
        except ReceiptError as error:
            assert error.code and error.message


def test_repeated_axes_stand_for_the_same_numbers():
    value = parse(emit(Foreign(layout='in_out').steps(2)[1]))
    short = copy.deepcopy(value)
    for part in short['parameters']:
        for when in ('traces_before', 'traces_after'):
            for name, trace in part[when].items():
                first = array_of(trace)[..., :1]
                part[when][name] = {**trace, 'shape': list(first.shape), 'data': first}
    whole, repeated = (import_sidecar(emit(one), 'pytorch')[0] for one in (value, short))
    assert whole['traces_after'] and emit({**whole, 'import_provenance': {}}) == emit(
        {**repeated, 'import_provenance': {}}
    )
