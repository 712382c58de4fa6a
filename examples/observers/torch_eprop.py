"""An observer of e-prop in PyTorch: it writes one line of ``braintrace.sidecar/1`` for each step.

It needs torch and NumPy, and nothing of braintrace: copy this file into a project and read it. It
takes copies before and after a step, and computes nothing of the step again.

    dumper = TraceDumper(
        sys.stdout, optimizer, parameters={'w_in': (w_in, 'input'), 'w_rec': (w_rec, 'recurrent'),
        'w_out': (w_out, 'readout')}, cell='lif', readout='leaky', constants={...}, kappa=0.9)
    for inputs, targets in data:
        dumper.before(inputs, targets, carry, traces)
        ...                                      # the step: carry, traces, p.grad, optimizer.step()
        dumper.after(carry, traces, x=..., psi=..., outputs=..., per_lane=..., value=..., err=...,
                     learning=...)

Symbols: V = alpha V' + y - theta z', z = H(V - theta), y = x @ W + b, x = [inputs, z'];
psi = dz/dV = surrogate((V - threshold) / theta) / theta; the readout is out @ W + b, or leaks with
kappa_out. Signs are those of PyTorch: momentum's buffer adds up gradients, as optax's does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np
import torch

ROLES = ('input', 'recurrent', 'bias', 'readout', 'readout_bias')
SLOTS = {
    'sgd': {},
    'momentum': {'trace': 'momentum_buffer'},
    'adam': {'mu': 'exp_avg', 'nu': 'exp_avg_sq'},
    'adamw': {'mu': 'exp_avg', 'nu': 'exp_avg_sq'},
}


class TraceDumper:
    """Writes what a step of e-prop read and made; ``before`` and ``after`` stand around the step.

    ``parameters``: ``{name: (parameter, role)}`` for each parameter of the optimizer; roles are
    ``input``, ``recurrent``, ``bias``, ``readout``, ``readout_bias``. A parameter's weight,
    gradient and traces have the ``layout`` ``'out_in'``, as ``torch.nn.Linear``, or ``'in_out'``.
    ``constants``: those of the cell by the names of a receipt, as ``{'dt', 'tau', 'alpha', 'theta',
    'reset_gradient', 'surrogate', 'tau_out', 'kappa_out'}``. ``kappa``: the filter of the traces, 0
    for none. ``feedback``: a fixed array (hidden, outputs), or ``None`` for the readout's weight.
    ``initial``: the carry of a lane that is reset. Every ``every``-th step is written.
    """

    def __init__(
        self,
        file: TextIO,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, tuple[torch.Tensor, str]],
        cell: str,
        readout: str,
        constants: Mapping[str, Any],
        kappa: float = 0.0,
        feedback: torch.Tensor | None = None,
        layout: str = 'out_in',
        loss: str = 'half_mse',
        reduction: str = 'mean',
        initial: Mapping[str, torch.Tensor] | None = None,
        run_id: str = 'torch',
        every: int = 1,
        allow_tf32: bool = False,
    ):
        self.file, self.optimizer, self.parameters = file, optimizer, dict(parameters)
        self.walk = in_order(optimizer, self.parameters)
        self.name, self.config = named_config(optimizer)
        self.layout, self.loss, self.reduction, self.initial = layout, loss, reduction, initial
        self.feedback, self.kappa, self.every = feedback, kappa, every
        self.head = {'cell': cell, 'readout': readout, 'constants': dict(constants)}
        self.numeric = numeric(self.walk, allow_tf32)
        self.run_id, self.step = run_id, 0
        self.t: torch.Tensor | None = None
        self.seen: dict | None = None

    def before(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        carry: Mapping[str, torch.Tensor],
        traces: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        reset: torch.Tensor | None = None,
        lanes: list[int] | None = None,
    ) -> None:
        """Copies what stands before the step; a reset of lanes was applied to carry and traces.

        ``traces``: ``{parameter: {state: array}}``, states ``V``, ``a``, ``h``, ``filter``, ``o``;
        (B, out, in) by the layout, (B, out) of a bias; an axis of length 1 means a repeated one.
        """
        if self.seen is not None:
            raise RuntimeError('before was called twice: after stands between')
        count = inputs.shape[0]
        flags = torch.zeros(count, dtype=torch.bool) if reset is None else reset.bool().cpu()
        if bool(flags.any()) and self.initial is None:
            raise ValueError('a lane is reset: give the carry that it starts from as initial')
        self.t = torch.zeros(count, dtype=torch.int64) if self.t is None else self.t
        self.t = torch.where(flags, 0, self.t)
        self.name, self.config = named_config(self.optimizer)
        self.seen = {
            'lanes': list(range(count)) if lanes is None else list(lanes),
            'reset': flags.tolist(),
            't': self.t.tolist(),
            'inputs': copy(inputs),
            'targets': copy(targets),
            'carry_before': copies(carry),
            'feedback': None if self.feedback is None else copy(self.feedback),
            **self.state('before', traces),
        }

    def after(
        self,
        carry: Mapping[str, torch.Tensor],
        traces: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        x: Mapping[str, torch.Tensor],
        psi: torch.Tensor,
        outputs: torch.Tensor,
        per_lane: torch.Tensor,
        value: torch.Tensor,
        err: torch.Tensor,
        learning: torch.Tensor,
        psi_before: torch.Tensor | None = None,
        probabilities: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Copies what the step made and writes the line; call it behind ``optimizer.step()``.

        ``x``: what each weight read, (B, in). ``psi``: dz/dV at the new membrane, of ``'rnn'``
        dh/dy; ``psi_before``: at the old one, which ``'alif'`` and ``reset_gradient`` need.
        ``err`` = dL/doutputs, ``learning`` = dL/dz, both with the mask and the mean in them.
        """
        if self.seen is None:
            raise RuntimeError('after was called without before')
        seen, self.seen = self.seen, None
        new = self.state('after', traces)
        weight = torch.ones_like(per_lane) if mask is None else mask
        slopes = {} if psi_before is None else {'before': psi_before}
        shown = {} if probabilities is None else {'probabilities': probabilities}
        made = {
            'carry_after': copies(carry),
            'psi': copies({**slopes, 'after': psi}),
            'outputs': copy(outputs),
            'loss': {
                'name': self.loss,
                'reduction': self.reduction,
                'mask': copy(weight),
                'divisor': float(weight.sum()) if self.reduction == 'mean' else 1.0,
                **copies(shown),
                'per_lane': copy(per_lane),
                'value': float(value),
            },
            'signals': copies({'err': err, 'learning': learning}),
        }
        if self.step % self.every == 0:
            line = self.line({**seen, **new}, made, copies(x))
            self.file.write(json.dumps(encoded(line), separators=(',', ':'), allow_nan=False))
            self.file.write('\n')
        self.step += 1
        self.t = self.t + 1

    def state(self, when: str, traces: Mapping[str, Mapping[str, torch.Tensor]]) -> dict:
        """Copies of the parameters, their traces, and what the optimizer keeps for them."""
        slots, counts = {}, []
        for name, parameter in self.walk:
            kept = self.optimizer.state.get(parameter, {})
            zero = torch.zeros_like(parameter)
            slots[name] = {
                slot: copy(zero if kept.get(key) is None else kept[key])
                for slot, key in SLOTS[self.name].items()
            }
            counts.append(int(kept.get('step', 0)))
        if len(set(counts)) > 1:
            raise ValueError(f'the parameters have seen {counts} steps; one count is known')
        return {
            when: {name: copy(parameter) for name, parameter in self.walk},
            f'slots_{when}': slots,
            f'count_{when}': counts[0] if 'mu' in SLOTS[self.name] else None,
            f'traces_{when}': {name: copies(of) for name, of in traces.items()},
        }

    def line(self, seen: dict, made: dict, x: dict) -> dict:
        """The line in the order of the schema."""
        feedback = seen['feedback']
        fixed = None if feedback is None else {'kind': 'fixed', 'array': feedback}
        return {
            'schema': 'braintrace.sidecar/1',
            'framework': {'name': 'pytorch', 'version': torch.__version__},
            'run_id': self.run_id,
            'step': self.step,
            'every': self.every,
            **self.head,
            'algorithm': {'kappa': self.kappa, 'feedback': fixed},
            'numeric': self.numeric,
            **{key: seen[key] for key in ('lanes', 'reset', 't', 'inputs', 'targets')},
            'carry_before': seen['carry_before'],
            'carry_after': made['carry_after'],
            **({} if self.initial is None else {'initial': copies(self.initial)}),
            **{key: made[key] for key in ('psi', 'outputs', 'loss', 'signals')},
            'optimizer': {
                'name': self.name,
                'config': self.config,
                **{key: seen[key] for key in ('count_before', 'count_after')},
            },
            'parameters': [self.parameter(name, p, seen, x) for name, p in self.walk],
            'helper': {'observer': 'torch_eprop'},
        }

    def parameter(self, name: str, parameter: torch.Tensor, seen: dict, x: dict) -> dict:
        """All that belongs to one parameter."""
        if parameter.grad is None:
            raise ValueError(f'{name} has no gradient: call after before it is set to None')
        return {
            'name': name,
            'role': self.parameters[name][1],
            'layout': self.layout,
            'before': seen['before'][name],
            'after': seen['after'][name],
            'gradient': copy(parameter.grad),
            'slots_before': seen['slots_before'][name],
            'slots_after': seen['slots_after'][name],
            **({'x': x[name]} if name in x else {}),
            'traces_before': seen['traces_before'].get(name, {}),
            'traces_after': seen['traces_after'].get(name, {}),
        }


def in_order(optimizer: torch.optim.Optimizer, parameters: Mapping) -> list:
    """Names and parameters in the order of ``optimizer.param_groups``: ``optimizer.state`` has none
    that can be relied on.
    """
    names = {parameter: name for name, (parameter, _) in parameters.items()}
    unknown = [role for _, role in parameters.values() if role not in ROLES]
    if unknown:
        raise ValueError(f'the role {unknown[0]!r} is not known: use one of {", ".join(ROLES)}')
    walk = [p for group in optimizer.param_groups for p in group['params']]
    if len(walk) != len(names) or set(walk) != names.keys():
        raise ValueError(
            f'the optimizer moves {len(walk)} parameters and {len(names)} are named: name '
            'those of the optimizer and no others'
        )
    return [(names[parameter], parameter) for parameter in walk]


def named_config(optimizer: torch.optim.Optimizer) -> tuple[str, dict]:
    """The optimizer's name and numbers as a receipt has them; the groups of parameters agree."""
    groups = [{k: v for k, v in g.items() if k != 'params'} for g in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise ValueError('the groups of parameters have different settings; one is known')
    group = groups[0]
    for flag in ('dampening', 'maximize', 'amsgrad'):
        if group.get(flag):
            raise ValueError(f'{flag}={group[flag]!r} has no formula in a receipt')
    config = {'lr': float(group['lr'])}
    decay = {'weight_decay': float(group.get('weight_decay', 0.0))}
    if type(optimizer) is torch.optim.SGD:
        if not group['momentum']:
            return 'sgd', {**config, **decay}
        momentum = {'momentum': float(group['momentum']), 'nesterov': bool(group['nesterov'])}
        return 'momentum', {**config, **momentum, **decay}
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f'{type(optimizer).__name__}: SGD, Adam and AdamW are observed')
    decoupled = type(optimizer) is torch.optim.AdamW or group.get('decoupled_weight_decay')
    b1, b2 = map(float, group['betas'])
    moments = {'b1': b1, 'b2': b2, 'eps': float(group['eps'])}
    return 'adamw' if decoupled else 'adam', {**config, **moments, **decay}


def numeric(walk: list, allow_tf32: bool) -> dict:
    """The format of the numbers and the device; TF32 is refused unless it is allowed."""
    parameter = walk[0][1]
    dtype = str(parameter.dtype).removeprefix('torch.')
    if dtype not in ('float32', 'float64'):
        raise ValueError(f'parameters of {dtype}: float32 and float64 are observed')
    products = torch.get_float32_matmul_precision() if dtype == 'float32' else 'highest'
    if products != 'highest' and not allow_tf32:
        raise ValueError(
            f'products of float32 have the precision {products!r}, as TF32 with 11 bits: call '
            "torch.set_float32_matmul_precision('highest'), or pass allow_tf32=True"
        )
    return {
        'dtype': dtype,
        'trace_dtype': dtype,
        'matmul_precision': {'highest': 'highest', 'high': 'tf32', 'medium': 'bf16'}[products],
        'device': str(parameter.device),
        'k': None,
    }


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares neither storage nor graph: the next step changes tensors in place."""
    return tensor.detach().clone()


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of each."""
    return {name: copy(tensor) for name, tensor in tensors.items()}


def encoded(value: Any, path: str = '') -> Any:
    """Tensors as ``{"shape", "dtype", "data"}`` with the shortest decimals that give them back."""
    if isinstance(value, Mapping):
        return {key: encoded(part, f'{path}.{key}') for key, part in value.items()}
    if isinstance(value, list):
        return [encoded(part, f'{path}[{i}]') for i, part in enumerate(value)]
    if isinstance(value, torch.Tensor):
        array = value.cpu().numpy()
        flat = array.reshape(-1)
        finite = bool(np.isfinite(flat).all())
        text = flat.astype(str) if array.dtype == np.float32 else flat
        data = [float(one) for one in text] if array.dtype.kind == 'f' else flat.tolist()
        value = {'shape': list(array.shape), 'dtype': array.dtype.name, 'data': data}
    else:
        finite = not isinstance(value, float) or math.isfinite(value)
    if not finite:
        raise ValueError(f'{path[1:]} is not finite: a line has finite numbers')
    return value
