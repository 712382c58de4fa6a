"""Trainings that the verifier's engine makes, told to the observer as another framework would."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from receipts_observer import Observer, numeric

from braintrace_receipts import parse_run
from braintrace_receipts.arrays import array_of
from making import run

I = 2  # inputs of a run


@dataclass
class Foreign:
    """A framework that has its weights in a ``layout``, those of inputs and of spikes ``split``.
    ``spoil`` changes what the observer is told behind a step.
    """

    framework: str = 'pytorch'
    layout: str = 'out_in'
    split: bool = True
    tells_updates: bool = False
    optimizer: str = ''  # what it says that its optimiser is, if not what it is
    spoil: Callable = lambda told: None

    def receipts(self, count: int, cell: str = 'lif', **how) -> list[dict]:
        """What the observer makes of ``making.run(cell, **how)``."""
        records = run(cell, steps=count, surrogate='fast_sigmoid', **how)
        file = io.BytesIO()
        observer = self.observer(file, records)
        for record in records:
            carry, err = arrays(record['carry_before']), array_of(record['signals']['err'])
            inputs, targets = array_of(record['inputs']), array_of(record['targets'])
            before = self.state(record, 'before')
            observer.before(*before, inputs, targets, reset=np.array(record['reset']))
            sent = 'h' if cell == 'rnn' else 'z'
            x = {'input': inputs, 'recurrent': carry[sent]}
            x = x if self.split else {'recurrent': np.concatenate([*x.values()], -1)}
            feedback = observer.feedback
            weight = array_of(record['params_before']['W_out']) if feedback is None else feedback
            told = {
                'state': self.state(record, 'after'),
                'gradients': self.parts(arrays(record['gradients'])),
                'x': x | {'readout': array_of(record['carry_after'][sent])},
                'psi': slope(record, 'after'),
                'psi_before': None if cell == 'rnn' else slope(record, 'before'),
                'outputs': array_of(record['outputs']),
                'err': err,
                'learning': err @ weight.T,
                'value': record['loss']['value'],
            }
            shown = ('mask', 'per_lane', 'probabilities')
            told |= {key: array_of(record['loss'][key]) for key in shown if key in record['loss']}
            if self.tells_updates:
                told['updates'] = self.parts(arrays(record['optimizer']['updates']))
            self.spoil(told)
            observer.after(*told.pop('state'), **told)
        return parse_run(file.getvalue())

    def observer(self, file, records: list[dict]) -> Observer:
        record = records[0]
        topology, algorithm = record['topology'], record['algorithm']
        optimizer, feedback = record['optimizer'], algorithm['feedback']
        initial = next((one['initial'] for one in records if 'initial' in one), None)
        return Observer(
            file,
            {role: role for role, *_ in self.roles},
            cell=topology['cell'],
            readout=topology['readout'],
            constants=topology['constants'],
            optimizer=(self.optimizer or optimizer['name'], optimizer['config']),
            numeric=numeric(record['numeric']['dtype'], 'highest', 'cpu', False, ''),
            kappa=algorithm['kappa'],
            feedback=None if feedback is None else array_of(feedback['array']),
            layout=self.layout,
            loss=record['loss']['name'],
            initial=None if initial is None else arrays(initial),
            source=(self.framework, '1.0'),
        )

    @property
    def roles(self) -> list[tuple[str, str, slice | None]]:
        """Roles, names of the run, and rows of a weight."""
        rows = {'input': slice(0, I), 'recurrent': slice(I, None)}
        rows = rows if self.split else {'recurrent': slice(None)}
        weights = [(role, 'W', own) for role, own in rows.items()]
        biases = [('bias', 'b', None), ('readout_bias', 'b_out', None)]
        return [*weights, ('readout', 'W_out', slice(None)), *biases]

    def put(self, value: np.ndarray, rows: slice | None) -> np.ndarray:
        value = value if rows is None else value[..., rows, :]
        return value if rows is None or self.layout == 'in_out' else np.swapaxes(value, -1, -2)

    def parts(self, values: dict) -> dict:
        return {role: self.put(values[name], rows) for role, name, rows in self.roles}

    def state(self, record: dict, when: str) -> tuple:
        """Parameters, slots, carry and traces."""
        state, slots, traces = record['optimizer'][f'state_{when}'], {}, {}
        for path, kept in state['slots'].items():
            for slot, value in kept.items():
                slots.setdefault(slot, {})[path] = array_of(value)
        count = state['count'] if 'mu' in slots else None
        names = {group['name']: group['states'] for group in record['topology']['groups']}
        paths = {one['name']: one['params'] for one in record['topology']['relations']}
        for of in record[f'traces_{when}']:
            states = [name.strip('()') for name in names[of['group']]]
            for slot, values in of['entries'].items():
                own = zip(states, map(array_of, values), strict=True)
                traces[paths[of['relation']][slot]] = dict(own)
        return (
            self.parts(arrays(record[f'params_{when}'])),
            (count, {slot: self.parts(values) for slot, values in slots.items()}),
            arrays(record[f'carry_{when}']),
            {
                role: {s: self.put(v, rows) for s, v in traces.get(name, {}).items()}
                for role, name, rows in self.roles
            },
        )


def arrays(nodes: dict) -> dict[str, np.ndarray]:
    return {name: array_of(node) for name, node in nodes.items()}


def slope(record: dict, when: str) -> np.ndarray:
    """dz/dV at the potential: the slope of a fast sigmoid at (V - threshold) / theta, over theta;
    of a rnn dh/dy.
    """
    c, s = record['topology']['constants'], arrays(record[f'carry_{when}'])
    if 'V' not in s:
        return array_of(record['factors'][0]['D_f'][0])
    above = (s['V'] - c['theta'] - (c['beta'] * s['a'] if 'a' in s else 0)) / c['theta']
    steepness = c['surrogate']['parameters']['slope']
    return 1 / (1 + steepness * np.abs(above)) ** 2 / c['theta']
