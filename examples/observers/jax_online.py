"""An observer of online learning in plain JAX: one line of ``braintrace.sidecar/1`` for each step.

It needs jax and NumPy, and nothing of braintrace: copy this file into a project and read it. It
takes copies before and after a step, on any device, and computes nothing of the step again.

    dumper = TraceDumper(
        sys.stdout, parameters={'w': 'recurrent', 'w_out': 'readout'}, cell='lif', readout='leaky',
        constants={...}, optimizer=('adam', {'lr': 1e-3, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}))
    dumper.trace(step, params, opt_state, carry, traces, inputs, targets)       # its jaxpr, once
    for inputs, targets in data:
        dumper.before(params, opt_state, carry, traces, inputs, targets)
        params, opt_state, carry, traces, seen = step(params, ...)      # may donate its arguments
        dumper.after(params, opt_state, carry, traces, **seen)

Symbols: V = alpha V' + y - theta z', z = H(V - theta), y = x @ W + b, x = [inputs, z'];
psi = dz/dV = surrogate((V - threshold) / theta) / theta; the readout is out @ W + b, or leaks with
kappa_out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np

ROLES = ('input', 'recurrent', 'bias', 'readout', 'readout_bias')
SLOTS = {'sgd': (), 'momentum': ('trace',), 'adam': ('mu', 'nu'), 'adamw': ('mu', 'nu')}
PRECISION = 'jax_default_matmul_precision'
EXACT = ('highest', 'float32')  # the precisions of products in which float32 keeps its 24 bits


class TraceDumper:
    """Writes what a step read and made; ``before`` and ``after`` stand around the step.

    ``parameters``: ``{name: role}`` of the entries of ``params``; roles are ``input``,
    ``recurrent``, ``bias``, ``readout``, ``readout_bias``. A parameter's weight, gradient and
    traces have the ``layout`` ``'in_out'`` or ``'out_in'``. ``constants``: those of the cell by the
    names of a receipt. ``optimizer``: its name and its numbers; ``opt_state`` is optax's, or a dict
    with ``count`` and, for each slot, ``{name: array}``. ``kappa``: the filter of the traces, 0 for
    none. ``feedback``: a fixed array (hidden, outputs), or ``None`` for the readout's weight.
    ``initial``: the carry of a lane that is reset. Every ``every``-th step is written.
    """

    def __init__(
        self,
        file: TextIO,
        *,
        parameters: Mapping[str, str],
        cell: str,
        readout: str,
        constants: Mapping[str, Any],
        optimizer: tuple[str, Mapping[str, Any]],
        kappa: float = 0.0,
        feedback: Any = None,
        layout: str = 'in_out',
        loss: str = 'half_mse',
        reduction: str = 'mean',
        initial: Mapping[str, Any] | None = None,
        run_id: str = 'jax',
        every: int = 1,
        allow_tf32: bool = False,
    ):
        unknown = [role for role in parameters.values() if role not in ROLES]
        if unknown:
            raise ValueError(f'the role {unknown[0]!r} is not known: use one of {ROLES}')
        if optimizer[0] not in SLOTS:
            raise ValueError(f'{optimizer[0]!r}: {", ".join(SLOTS)} are observed')
        self.file, self.parameters, self.layout = file, dict(parameters), layout
        self.head = {'cell': cell, 'readout': readout, 'constants': dict(constants)}
        self.optimizer = (optimizer[0], dict(optimizer[1]))
        self.kappa, self.loss, self.reduction = float(kappa), loss, reduction
        self.feedback = None if feedback is None else copied(feedback)
        self.initial = None if initial is None else copied(initial)
        self.run_id, self.every, self.allow_tf32 = run_id, every, allow_tf32
        self.step = 0
        self.t: np.ndarray | None = None
        self.seen: dict | None = None
        self.helper = {'observer': 'jax_online'}

    def trace(self, step: Callable, *arguments: Any) -> None:
        """Notes the digest of the step's jaxpr, so that it can be said later what ran."""
        text = re.sub(r' at 0x[0-9a-f]+', '', str(jax.make_jaxpr(step)(*arguments)))
        self.helper['jaxpr'] = f'sha256:{hashlib.sha256(text.encode()).hexdigest()}'

    def before(
        self,
        params: Mapping[str, Any],
        opt_state: Any,
        carry: Mapping[str, Any],
        traces: Mapping[str, Mapping[str, Any]],
        inputs: Any,
        targets: Any,
        *,
        reset: Any = None,
        lanes: list[int] | None = None,
    ) -> None:
        """Copies what stands before the step, which may donate it; a reset of lanes was applied.

        ``traces``: ``{parameter: {state: array}}``, states ``V``, ``a``, ``h``, ``filter``, ``o``;
        (B, in, out) by the layout, (B, out) of a bias; an axis of length 1 means a repeated one.
        """
        if self.seen is not None:
            raise RuntimeError('before was called twice: after stands between')
        count = np.shape(inputs)[0]
        flags = np.zeros(count, bool) if reset is None else np.array(reset, bool)
        if flags.any() and self.initial is None:
            raise ValueError('a lane is reset: give the carry that it starts from as initial')
        self.t = np.where(flags, 0, np.zeros(count, np.int64) if self.t is None else self.t)
        self.numeric = numeric(params, self.parameters, self.allow_tf32)
        self.seen = {
            'lanes': list(range(count)) if lanes is None else list(lanes),
            'reset': flags.tolist(),
            't': self.t.tolist(),
            'inputs': copied(inputs),
            'targets': copied(targets),
            'carry_before': copied(carry),
            **self.state('before', params, opt_state, traces),
        }

    def after(
        self,
        params: Mapping[str, Any],
        opt_state: Any,
        carry: Mapping[str, Any],
        traces: Mapping[str, Mapping[str, Any]],
        *,
        gradients: Mapping[str, Any],
        updates: Mapping[str, Any],
        x: Mapping[str, Any],
        psi: Any,
        outputs: Any,
        per_lane: Any,
        value: Any,
        err: Any,
        learning: Any,
        psi_before: Any = None,
        probabilities: Any = None,
        mask: Any = None,
    ) -> None:
        """Copies what the step made and writes the line.

        ``updates``: what was added to each parameter. ``x``: what each weight read, (B, in).
        ``psi``: dz/dV at the new membrane, of ``'rnn'`` dh/dy; ``psi_before``: at the old one,
        which ``'alif'`` and ``reset_gradient`` need. ``err`` = dL/doutputs, ``learning`` = dL/dz,
        both with the mask and the mean over lanes in them.
        """
        if self.seen is None:
            raise RuntimeError('after was called without before')
        seen, self.seen = self.seen, None
        made = copied(dict(outputs=outputs, err=err, learning=learning, per_lane=per_lane))
        weight = np.ones_like(made['per_lane']) if mask is None else copied(mask)
        slopes = {'before': psi_before, 'after': psi}
        extra = {} if probabilities is None else {'probabilities': copied(probabilities)}
        seen |= self.state('after', params, opt_state, traces)
        seen |= {
            'carry_after': copied(carry),
            'psi': {when: copied(s) for when, s in slopes.items() if s is not None},
            'outputs': made['outputs'],
            'loss': {
                'name': self.loss,
                'reduction': self.reduction,
                'mask': weight,
                'divisor': float(weight.sum()) if self.reduction == 'mean' else 1.0,
                **extra,
                'per_lane': made['per_lane'],
                'value': float(value),
            },
            'signals': {'err': made['err'], 'learning': made['learning']},
        }
        if self.step % self.every == 0:
            of = {'gradient': copied(gradients), 'update': copied(updates), 'x': copied(x)}
            line = encoded(self.line(seen, of))
            self.file.write(json.dumps(line, separators=(',', ':'), allow_nan=False) + '\n')
        self.step, self.t = self.step + 1, self.t + 1

    def state(self, when: str, params: Mapping, opt_state: Any, traces: Mapping) -> dict:
        """Copies of the parameters, their traces, and what the optimizer keeps for them."""
        found = dict(kept(opt_state))
        missing = [slot for slot in SLOTS[self.optimizer[0]] if slot not in found]
        if missing:
            raise ValueError(f'opt_state has no {missing[0]!r}: {self.optimizer[0]} keeps it')
        slots = {
            name: {slot: copied(found[slot][name]) for slot in SLOTS[self.optimizer[0]]}
            for name in self.parameters
        }
        adaptive = 'mu' in SLOTS[self.optimizer[0]]
        return {
            when: {name: copied(params[name]) for name in self.parameters},
            f'slots_{when}': slots,
            f'count_{when}': int(found['count']) if adaptive else None,
            f'traces_{when}': copied(dict(traces)),
        }

    def line(self, seen: dict, of: dict) -> dict:
        """The line in the order of the schema."""
        fixed = None if self.feedback is None else {'kind': 'fixed', 'array': self.feedback}
        given = ('lanes', 'reset', 't', 'inputs', 'targets', 'carry_before', 'carry_after')
        return {
            'schema': 'braintrace.sidecar/1',
            'framework': {'name': 'jax', 'version': jax.__version__},
            'run_id': self.run_id,
            'step': self.step,
            'every': self.every,
            **self.head,
            'algorithm': {'kappa': self.kappa, 'feedback': fixed},
            'numeric': self.numeric,
            **{key: seen[key] for key in given},
            **({} if self.initial is None else {'initial': self.initial}),
            **{key: seen[key] for key in ('psi', 'outputs', 'loss', 'signals')},
            'optimizer': {
                'name': self.optimizer[0],
                'config': self.optimizer[1],
                **{key: seen[key] for key in ('count_before', 'count_after')},
            },
            'parameters': [self.parameter(name, seen, of) for name in self.parameters],
            'helper': self.helper,
        }

    def parameter(self, name: str, seen: dict, of: dict) -> dict:
        """All that belongs to one parameter."""
        return {
            'name': name,
            'role': self.parameters[name],
            'layout': self.layout,
            'before': seen['before'][name],
            'after': seen['after'][name],
            **{key: of[key][name] for key in ('gradient', 'update')},
            'slots_before': seen['slots_before'][name],
            'slots_after': seen['slots_after'][name],
            **({'x': of['x'][name]} if name in of['x'] else {}),
            'traces_before': seen['traces_before'].get(name, {}),
            'traces_after': seen['traces_after'].get(name, {}),
        }


def kept(opt_state: Any) -> Iterator[tuple[str, Any]]:
    """The fields ``count``, ``trace``, ``mu`` and ``nu`` wherever an optimizer's state has them."""
    if isinstance(opt_state, Mapping):
        yield from opt_state.items()
    elif hasattr(opt_state, '_asdict'):
        for name, value in opt_state._asdict().items():
            yield from [(name, value)] if name in ('count', 'trace', 'mu', 'nu') else kept(value)
    elif isinstance(opt_state, tuple | list):
        for part in opt_state:
            yield from kept(part)


def numeric(params: Mapping, names: Mapping, allow_tf32: bool) -> dict:
    """The format of the numbers and the device; TF32 is refused unless it is allowed."""
    first = params[next(iter(names))]
    dtype, platform = str(first.dtype), jax.default_backend()
    if dtype not in ('float32', 'float64'):
        raise ValueError(f'parameters of {dtype}: float32 and float64 are observed')
    asked = getattr(jax.config, PRECISION)
    rough = dtype == 'float32' and platform != 'cpu' and asked not in EXACT
    if rough and not allow_tf32:
        raise ValueError(
            f'products of float32 run on {platform} with the precision {asked!r}, as TF32 with 11 '
            f"bits: call jax.config.update({PRECISION!r}, 'highest'), or pass "
            'allow_tf32=True'
        )
    return {
        'dtype': dtype,
        'trace_dtype': dtype,
        'matmul_precision': 'tf32' if rough else 'highest',
        'device': platform,
        'k': None,
    }


def copied(tree: Any) -> Any:
    """NumPy copies of arrays in a tree: a donated buffer is gone after the step."""
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def encoded(value: Any, path: str = '') -> Any:
    """Arrays as ``{"shape", "dtype", "data"}`` with the shortest decimals that give them back."""
    if isinstance(value, Mapping):
        return {key: encoded(part, f'{path}.{key}') for key, part in value.items()}
    if isinstance(value, list):
        return [encoded(part, f'{path}[{i}]') for i, part in enumerate(value)]
    finite = not isinstance(value, float | np.ndarray) or bool(np.isfinite(value).all())
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        text = flat.astype(str) if value.dtype == np.float32 else flat
        data = [float(one) for one in text] if value.dtype.kind == 'f' else flat.tolist()
        value = {'shape': list(value.shape), 'dtype': value.dtype.name, 'data': data}
    if not finite:
        raise ValueError(f'{path[1:]} is not finite: a line has finite numbers')
    return value
