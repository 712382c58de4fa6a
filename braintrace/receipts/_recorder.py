"""Receipts written line by line, on the host."""

from __future__ import annotations

import difflib
import uuid
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_receipts.canonical import emit, spec_digest
from braintrace_receipts.files import write_files
from braintrace_receipts.optimizers import OPTIMIZERS

from .._signatures import is_int
from ..errors import OptionError, StructureError
from ._capture import Record, Recording, Run
from ._entries import Fields, direct_signals, named, with_nodes

CONFIG = ('lr', 'momentum', 'nesterov', 'b1', 'b2', 'eps', 'eps_root', 'weight_decay')
ADAM = {'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}  # the defaults of optax


class Update(NamedTuple):
    """What an optimiser did behind a step; all None where it did nothing."""

    updates: Any = None
    opt_before: Any = None
    opt_after: Any = None
    params_after: Any = None
    lr: float | None = None


class Recorder:
    """Writes a receipt for each step as a line of ``file``; what was there before is replaced.

    Parameters
    ----------
    file : path or binary stream
        Large arrays of ``arrays='npz'`` go beside it, so that needs a path.
    recording : Recording
        What made the records.
    optimizer : dict, optional
        ``{'name', 'config'}``: ``'sgd'``, ``'momentum'``, ``'adam'`` or ``'adamw'`` with ``lr``
        and, as optax names them, ``momentum``, ``nesterov``, ``b1``, ``b2``, ``eps``,
        ``eps_root``, ``weight_decay``. Another name is kept, and no verifier can derive its
        updates. None: parameters stay.
    record_every : int
        Each so many steps are written; rules between neighbours need all of them.
    run_id : str, optional
        Stands in each receipt; by default drawn.

    Raises
    ------
    OptionError
        An argument has another value, a reset comes without a carry, an update without an
        optimizer, or a lane has a negative weight.
    StructureError
        The optimizer's state is not that of its name, or an array was donated.

    Examples
    --------
    >>> import io, jax, jax.numpy as jnp, braintrace
    >>> from braintrace.receipts import Cell, Recorder, capture
    >>> cell = Cell.rnn()
    >>> learner = braintrace.functional.online(cell)
    >>> params, x, y = cell.init(jax.random.key(0), 3, 4, 2), jnp.ones((5, 3)), jnp.ones((5, 2))
    >>> state = learner.init(params, cell.carry(params, 5), x)
    >>> recording, file = capture(learner), io.BytesIO()
    >>> recorder = Recorder(file, recording)
    >>> _, record = recording.grad(params, state, x, y)
    >>> recorder.write(params, state, x, y, record)
    >>> file.getvalue()[:34]
    b'{"schema":"braintrace.receipt/1","'
    """

    def __init__(
        self,
        file,
        recording: Recording,
        optimizer: dict | None = None,
        *,
        record_every: int = 1,
        run_id: str | None = None,
    ):
        if not is_int(record_every, 1):
            raise OptionError(f'record_every is {record_every!r}; give an int >= 1.')
        _of_type('recording', recording, Recording, 'receipts.capture returned')
        _of_type('run_id', '' if run_id is None else run_id, str, 'names the run')
        self._stream = file if hasattr(file, 'write') else None
        self._path = None if self._stream is not None else Path(file)
        if recording.arrays == 'npz' and self._path is None:
            raise OptionError("arrays='npz' writes files beside the receipts: give a path.")
        self.recording, self.every = recording, record_every
        self.optimizer = None if optimizer is None else _checked(optimizer)
        self.run_id = uuid.uuid4().hex if run_id is None else run_id
        self.step, self._begun = 0, False

    @cached_property
    def _topology(self):
        return self.recording.topology

    def write(
        self,
        params,
        state,
        inputs,
        targets,
        record: Record,
        updates=None,
        opt_before=None,
        opt_after=None,
        params_after=None,
        *,
        reset=None,
        initial=None,
        lr: float | None = None,
    ) -> None:
        """Write one step: the arguments of :meth:`Recording.grad`, its record, and the update.

        Everything is copied to the host here; of arguments that were donated to the step pass
        copies that were made before. ``reset`` (B,) says which lanes :func:`functional.reset` put
        back to the carry ``initial`` before this step; ``lr`` is the rate of this update, where a
        schedule changes it.
        """
        _of_type('record', record, Record, 'Recording.grad returned')
        if reset is not None:
            if initial is None:
                raise OptionError('reset has no initial carry; pass the `initial` of the reset.')
            record = record._replace(reset=jnp.broadcast_to(reset, record.reset.shape))
        if np.any(np.asarray(record.mask) < 0):
            raise OptionError('mask has a negative weight; a lane counts with a weight from 0 on.')
        record = record._replace(carry_before=state.carry)
        update = Update(updates, opt_before, opt_after, params_after, lr)
        self._put([self._line(self.step, params, inputs, targets, record, initial, update)])

    def write_sequence(
        self,
        params,
        run: Run,
        updates=None,
        opt_before=None,
        opt_after=None,
        params_after=None,
        *,
        lr: float | None = None,
    ) -> None:
        """Write the steps of a :class:`Run`, and the update at its end; all of them or none."""
        _of_type('run', run, Run, 'Recording.sequence_grad returned')
        run, length, lines = jax.tree.map(_on_host, run), len(run.weights), []
        for i in range(length):
            record, x, y = jax.tree.map(lambda a, i=i: a[i], (run.steps, run.inputs, run.targets))
            initial = run.initial if np.any(record.reset) else None
            update = Update()
            window = {
                'index': i,
                'length': length,
                'reduction': 'mean',
                'weight': float(str(run.weights[i])),
                'divisor': float(str(run.weights.sum())) or 1.0,
            }
            if i == length - 1:
                update = Update(updates, opt_before, opt_after, params_after, lr)
                window['gradients'] = self._topology.learned(run.gradients)
            lines.append(self._line(self.step + i, params, x, y, record, initial, update, window))
        self._put(lines)

    def _put(self, made: list) -> None:
        """Writes receipts and their lines, of which some are None: steps that are not kept."""
        kept = [pair for pair in made if pair is not None]
        lines = b''.join(line for _, line in kept)
        if self.recording.arrays == 'npz' and self._path is not None:
            for receipt, _ in kept:
                write_files(receipt, self._path.parent)
        self.step += len(made)
        if self._stream is not None:
            self._stream.write(lines)
        elif lines and self._path is not None:
            with self._path.open('ab' if self._begun else 'wb') as stream:
                stream.write(lines)
        self._begun = self._begun or bool(lines)

    def _line(
        self,
        step: int,
        params,
        inputs,
        targets,
        record: Record,
        initial,
        update: Update,
        window: dict | None = None,
    ) -> tuple[dict, bytes] | None:
        """The receipt of a step and its line; None for a step that is not kept."""
        if step % self.every:
            return None
        record, params, inputs, targets, initial, after = jax.tree.map(
            _on_host, (record, params, inputs, targets, initial, update.params_after)
        )
        topology, fields = self._topology, Fields(self.recording, self._topology, record)
        lanes, before = len(record.reset), named(topology.params, params)
        # First with arrays in the places of their nodes, which are made all at once.
        receipt = {
            'schema': 'braintrace.receipt/1',
            'run_id': self.run_id,
            'step': step,
            'every': self.every,
            'algorithm': fields.algorithm,
            'numeric': fields.numeric,
            'topology': topology.topology,
            'lanes': list(range(lanes)),
            'reset': record.reset.tolist(),
            't': np.broadcast_to(record.observed.t, lanes).tolist(),
            'inputs': inputs,
            'targets': targets,
            'params_before': before,
            'carry_before': named(topology.carry, record.carry_before),
            'factors': fields.factors,
            'traces_before': fields.traces('before'),
            'traces_after': fields.traces('after'),
            'carry_after': named(topology.carry, record.carry_after),
            'outputs': record.outputs,
            'loss': fields.loss,
            'signals': fields.signals,
            'gradients': topology.learned(record.gradients),
            'optimizer': self._optimizer_of(update),
            'params_after': before if after is None else named(topology.params, after),
        }
        if topology.topology['cell'] == 'opaque':
            receipt['signals']['direct'] = direct_signals(receipt)
        if initial is not None:
            receipt['initial'] = named(topology.carry, initial)
        if window is not None:
            receipt['window'] = window
        stem = None if self._path is None else self._path.stem
        arrays, file = self.recording.arrays, f'{stem}-{step}.npz'
        receipt = with_nodes(receipt, record.outputs.dtype, arrays, file)
        receipt['spec_digest'] = spec_digest(receipt)
        return receipt, emit(receipt)

    def _optimizer_of(self, update: Update) -> dict | None:
        if update.updates is None:
            return None
        if self.optimizer is None:
            raise OptionError(
                "updates were given, but the Recorder knows no optimizer; pass optimizer={'name': "
                "'adam', 'config': {'lr': ...}} when you make it."
            )
        rate = {} if update.lr is None else {'lr': float(update.lr)}
        return {
            **self.optimizer,
            'config': self.optimizer['config'] | rate,
            'state_before': self._state(self.optimizer['name'], update.opt_before),
            'state_after': self._state(self.optimizer['name'], update.opt_after),
            'updates': self._topology.learned(jax.tree.map(_on_host, update.updates)),
        }

    def _state(self, name: str, state) -> dict:
        """The slots of an optax state, found by the names of its fields."""
        wanted, parts = OPTIMIZERS[name].slots if name in OPTIMIZERS else (), dict[str, Any]()
        for part in _parts(state):
            # Moments have a count beside them; other counts, as a schedule's, are not theirs.
            beside = ('count',) if 'mu' in wanted and hasattr(part, 'mu') else ()
            found = {k: getattr(part, k) for k in (*wanted, *beside) if hasattr(part, k)}
            parts |= jax.tree.map(_on_host, found)
        missing = [key for key in wanted if key not in parts]
        if missing:
            raise StructureError(
                f'optimizer: the state has no {missing}, which {name} of optax '
                'keeps. Pass the state that its `init` and `update` returned, or give the '
                'optimizer another name.'
            )
        slots: dict[str, dict] = {}
        for key in wanted:
            for path, value in self._topology.learned(parts[key]).items():
                slots.setdefault(path, {})[key] = value
        count = parts.get('count')
        return {'count': None if count is None else int(count), 'slots': slots}


def _parts(state: Any):
    """A state of optax and, chained or wrapped in it, others."""
    yield state
    if isinstance(state, tuple):
        for part in state:
            yield from _parts(part)


def _on_host(leaf) -> np.ndarray:
    """A copy in NumPy."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise StructureError(
            'an array was donated to a jitted function, so its numbers are gone. Copy what the '
            'step donates before it runs: jax.tree.map(numpy.array, tree).'
        )
    return np.array(leaf)


def _of_type(name: str, value, kind: type, source: str) -> None:
    if not isinstance(value, kind):
        found = type(value).__name__
        raise OptionError(f'{name} is {found}; give the {kind.__name__} that {source}.')


def _checked(optimizer) -> dict:
    """The name and the configuration, as numbers."""
    if not isinstance(optimizer, dict) or set(optimizer) != {'name', 'config'}:
        raise OptionError(
            f"optimizer is {optimizer!r}; give {{'name': 'adam', 'config': {{'lr': 1e-3}}}}."
        )
    unknown = sorted(set(optimizer['config']) - set(CONFIG))
    if unknown or 'lr' not in optimizer['config']:
        found = f'names {unknown}' if unknown else 'has no lr'
        raise OptionError(f'the optimizer config {found}; it holds lr and some of {CONFIG[1:]}.')
    _of_type("the optimizer's name", optimizer['name'], str, 'names it')
    for key, value in optimizer['config'].items():
        if not isinstance(value, bool | int | float):
            raise OptionError(
                f'{key} of the optimizer config is {type(value).__name__}; give the number of this '
                'run, such as float(value). The rate of a schedule goes to `write(..., lr=...)`.'
            )
    return {'name': optimizer['name'], 'config': _with_defaults(**optimizer)}


def _with_defaults(name: str, config: dict) -> dict:
    """The configuration with optax's defaults of Adam; what has none must be given."""
    near = difflib.get_close_matches(name.lower(), OPTIMIZERS, 1)
    if name not in OPTIMIZERS and near:
        raise OptionError(
            f"the optimizer's name is {name!r}; did you mean {near[0]!r}? A name that no verifier "
            'knows is taken too, if it is not so near to one that it knows.'
        )
    config = ADAM | config if name in ('adam', 'adamw') else config
    for needed in OPTIMIZERS[name].needs if name in OPTIMIZERS else ():
        if needed not in config:
            raise OptionError(f'the config of {name} has no {needed}; give the number of this run.')
    return {key: config[key] for key in CONFIG if key in config}
