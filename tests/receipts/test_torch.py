"""The observer in PyTorch, on a real training."""

from __future__ import annotations

import importlib.util
import io
import json

import numpy as np
import pytest

from braintrace_receipts.canonical import array_of, parse
from braintrace_receipts.sidecar import import_run
from tests.sources import ROOT

torch = pytest.importorskip('torch')
from observers.torch_eprop import TraceDumper, copy, encoded  # noqa: E402


@pytest.fixture(scope='module')
def example():
    path = ROOT / 'examples' / 'receipts_torch_eprop.py'
    spec = importlib.util.spec_from_file_location('receipts_torch_eprop', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(example, make=None, **options):
    file = io.StringIO()
    losses = example.train(file, optimizer=make, **options)
    return file.getvalue().encode(), losses


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
def test_each_step_of_a_training_is_derived_again(example, name):
    raw, losses = trained(example, OPTIMIZERS[name])
    receipts, result = import_run(raw, 'pytorch')
    assert (result.verdict, result.failures) == ('rederived', ())
    assert len(receipts) == len(losses) == 8
    assert {r['optimizer']['name'] for r in receipts} == {
        {'coupled sgd': 'sgd', 'nesterov': 'momentum'}.get(name, name)
    }
    assert any(array_of(r['carry_after']['z']).any() for r in receipts)
    assert [r['t'][0] for r in receipts] == [0, 1, 2, 3] * 2


def test_some_steps_of_a_training_are_derived_again(example):
    raw, losses = trained(example, every=3)
    receipts, result = import_run(raw, 'pytorch')
    assert (result.verdict, result.failures) == ('rederived', ())
    assert [(r['step'], r['t'][0]) for r in receipts] == [(0, 0), (3, 3), (6, 2)]


@pytest.mark.slow
def test_training_learns(example):
    make = lambda p: torch.optim.Adam(p, lr=2e-3)
    _, losses = trained(example, make, sequences=60, length=10, every=1000)
    assert np.mean(losses[-10:]) < 0.6  # 0.75 for an output of zero


def test_a_wrong_sign_of_momentum_is_found(example):
    raw, _ = trained(example, OPTIMIZERS['momentum'], sequences=1)
    lines = []
    for line in raw.splitlines():
        value = parse(line)
        for part in value['parameters']:
            for when in ('slots_before', 'slots_after'):
                trace = part[when]['trace']
                trace['data'] = [-number for number in trace['data']]
        lines.append(json.dumps(value).encode())
    _, result = import_run(b'\n'.join(lines), 'pytorch')
    assert result.verdict == 'failed' and result.failures[0].rule == 21


def small(make=None, **options):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    out = torch.nn.Parameter(torch.ones(1, 2))
    optimizer = (make or OPTIMIZERS['adam'])([weight, out])
    parameters = {'w': (weight, 'recurrent'), 'out': (out, 'readout')}
    given = dict(parameters=parameters, cell='rnn', readout='linear', constants={'leak': 0.5})
    return TraceDumper(io.StringIO(), optimizer, **(given | options)), optimizer, weight, out


def test_copies_share_no_storage():
    tensor = torch.ones(2, requires_grad=True)
    found = copy(tensor)
    with torch.no_grad():
        tensor.mul_(2)
    assert found.tolist() == [1, 1] and not found.requires_grad
    dumper, optimizer, weight, _ = small()
    dumper.before(torch.ones(1, 1), torch.ones(1, 1), {'h': torch.zeros(1, 2)}, {})
    with torch.no_grad():
        weight.mul_(2)
    assert dumper.seen['before']['w'].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_parameters_are_walked_in_the_order_of_the_groups():
    dumper, optimizer, weight, out = small(
        lambda p: torch.optim.Adam([{'params': p[1:]}, {'params': p[:1]}])
    )
    for p in (weight, out):
        p.grad = torch.full_like(p, float(p.shape[0]))
    optimizer.step()
    items = list(optimizer.state.items())
    optimizer.state.clear()
    optimizer.state.update(items[::-1])
    assert [name for name, _ in dumper.walk] == ['out', 'w']
    slots = dumper.state('after', {})['slots_after']
    assert list(slots) == ['out', 'w']
    assert slots['w']['mu'].shape == weight.shape and slots['out']['mu'].shape == out.shape


def test_float32_comes_back_from_its_decimals():
    tensor = torch.tensor([0.1, -0.0, 1e-45, 3.4e38])
    node = json.loads(json.dumps(encoded(tensor)))
    back = np.array(node['data'], np.float32)
    np.testing.assert_array_equal(back, tensor.numpy())
    assert np.signbit(back[1]) and node['data'][0] == 0.1


def test_a_number_that_is_not_finite_is_named():
    for value in (float('nan'), torch.tensor([1.0, float('inf')])):
        with pytest.raises(ValueError, match=r'parameters\[0\]\.after is not finite'):
            encoded({'parameters': [{'after': value}]})


def test_what_has_no_formula_is_refused():
    cases = [
        (lambda p: torch.optim.Adam(p, amsgrad=True), 'amsgrad=True has no formula'),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), 'dampening=0.5'),
        (lambda p: torch.optim.RMSprop(p), 'RMSprop: SGD, Adam and AdamW are observed'),
        (
            lambda p: torch.optim.SGD([{'params': p[:1], 'lr': 0.1}, {'params': p[1:]}], lr=1.0),
            'different settings',
        ),
        (lambda p: torch.optim.SGD(p[:1], lr=0.1), 'moves 1 parameters and 2 are named'),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            small(make)
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="the role 'W' is not known"):
        small(lambda p: torch.optim.SGD([weight], lr=0.1), parameters={'w': (weight, 'W')})


def test_calls_out_of_order_and_missing_carries_are_refused():
    dumper, *_ = small()
    given = (torch.ones(1, 1), torch.ones(1, 1), {'h': torch.zeros(1, 2)}, {})
    with pytest.raises(ValueError, match='a lane is reset'):
        dumper.before(*given, reset=torch.tensor([True]))
    dumper.before(*given)
    with pytest.raises(RuntimeError, match='before was called twice'):
        dumper.before(*given)
    one = torch.ones(1, 1)
    made = dict(x={}, psi=one, outputs=one, per_lane=one[0], value=one[0, 0], err=one, learning=one)
    with pytest.raises(ValueError, match='w has no gradient'):
        dumper.after({}, {}, **made)
    with pytest.raises(RuntimeError, match='after was called without before'):
        dumper.after({}, {}, **made)


def test_tf32_is_refused_unless_it_is_allowed():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision('high')
        with pytest.raises(ValueError, match="precision 'high', as TF32"):
            small()
        dumper, *_ = small(allow_tf32=True)
        assert dumper.numeric['matmul_precision'] == 'tf32'
    finally:
        torch.set_float32_matmul_precision(before)
