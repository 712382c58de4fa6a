"""The observer in PyTorch, on a real training."""

from __future__ import annotations

import io

import numpy as np
import pytest

from braintrace_receipts import parse_run, reconcile_run

torch = pytest.importorskip('torch')
import receipts_torch_eprop as example  # noqa: E402
from receipts_observer import of_torch, torch_optimizer, torch_slots  # noqa: E402


def trained(make=None, **options):
    file = io.BytesIO()
    losses = example.train(file, optimizer=make, **options)
    return parse_run(file.getvalue()) if file.getvalue() else [], losses


OPTIMIZERS = {
    'sgd': lambda p: torch.optim.SGD(p, lr=0.05),
    'coupled sgd': lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    'momentum': lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    'nesterov': lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    'adam': lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    'adamw': lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_each_step_of_a_training_is_derived_again(name):
    receipts, losses = trained(OPTIMIZERS[name])
    result = reconcile_run(receipts)
    assert (result.verdict, result.failures) == ('rederived', ())
    assert len(receipts) == len(losses) == 8
    assert {r['optimizer']['name'] for r in receipts} == {
        {'coupled sgd': 'sgd', 'nesterov': 'momentum'}.get(name, name)
    }
    assert any(any(r['carry_after']['z']['data']) for r in receipts)
    assert [r['t'][0] for r in receipts] == [0, 1, 2, 3] * 2


def test_some_steps_of_a_training_are_derived_again():
    receipts, _ = trained(every=3)
    result = reconcile_run(receipts)
    assert (result.verdict, result.failures) == ('rederived', ())
    assert [(r['step'], r['t'][0]) for r in receipts] == [(0, 0), (3, 3), (6, 2)]


@pytest.mark.slow
def test_training_learns():
    make = lambda p: torch.optim.Adam(p, lr=2e-3)
    _, losses = trained(make, sequences=60, length=10, every=1000)
    assert np.mean(losses[-10:]) < 0.6  # 0.75 for an output of zero


def test_a_wrong_sign_of_momentum_is_found():
    receipts, _ = trained(OPTIMIZERS['momentum'], sequences=1)
    for receipt in receipts:
        for when in ('state_before', 'state_after'):
            for slots in receipt['optimizer'][when]['slots'].values():
                slots['trace']['data'] = [-number for number in slots['trace']['data']]
    result = reconcile_run(receipts)
    assert result.verdict == 'failed' and result.failures[0].rule == 21


def two():
    return {'w': torch.nn.Parameter(torch.ones(2, 3)), 'out': torch.nn.Parameter(torch.ones(1, 2))}


def test_copies_share_no_storage():
    tensor = torch.ones(2, requires_grad=True)
    found = example.array(tensor)
    with torch.no_grad():
        tensor.mul_(2)
    assert found.tolist() == [1, 1]


def test_slots_are_those_of_their_parameters():
    named = two()
    optimizer = torch.optim.Adam([{'params': [named['out']]}, {'params': [named['w']]}])
    assert torch_slots(optimizer, named)[0] == 0
    for p in named.values():
        p.grad = torch.full_like(p, float(p.shape[0]))
    optimizer.step()
    count, slots = torch_slots(optimizer, named)
    assert count == 1 and list(slots) == ['mu', 'nu']
    assert all(slots['mu'][name].shape == p.shape for name, p in named.items())


def test_what_has_no_formula_is_refused():
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    for make, said in (
        (lambda p: adam(p, amsgrad=True), 'amsgrad=True has no formula'),
        (lambda p: sgd(p, lr=0.1, momentum=0.9, dampening=0.5), 'dampening=0.5'),
        (lambda p: torch.optim.RMSprop(p), 'RMSprop: SGD, Adam and AdamW are observed'),
        (lambda p: sgd([{'params': p[:1], 'lr': 0.1}, {'params': p[1:]}], lr=1.0), 'different'),
    ):
        with pytest.raises(ValueError, match=said):
            torch_optimizer(make([*two().values()]))
    named = two()
    with pytest.raises(ValueError, match='moves 1 parameters and 2 are named'):
        torch_slots(sgd([named['w']], lr=0.1), named)


def test_tf32_is_refused_unless_it_is_allowed():
    before, weight = torch.get_float32_matmul_precision(), two()['w']
    try:
        torch.set_float32_matmul_precision('high')
        with pytest.raises(ValueError, match='as TF32 with 11 bits'):
            of_torch(weight)
        assert of_torch(weight, allow_tf32=True)['matmul_precision'] == 'tf32'
    finally:
        torch.set_float32_matmul_precision(before)
