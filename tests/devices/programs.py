"""Calls of a learner on a mesh: what they move, where their arrays lie, and their numbers.

A process of its own has eight devices: ``python -m tests.devices.programs '[["rnn", ...], ...]'``
prints a line of JSON for each row.
"""

import contextlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from braintrace import _jax, functional, rules
from tests.compare import errors
from tests.devices import hlo
from tests.devices.cells import CELLS, T, loss
from tests.late import Late

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 8
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
LAYOUTS = {'lanes': (8, 1), 'units': (1, 8), 'both': (4, 2), 'one': (1, 1)}
RULES = {
    'd_rtrl': rules.d_rtrl,
    'es_d_rtrl': partial(rules.es_d_rtrl, 0.7),
    'delayed': Late,
}
CALLS = {'step': 1, 'window': 1, 'exact': 2, 'updates': T, 'delayed': T // 2}  # gradients in a call


class Row(NamedTuple):
    cell: str
    rule: str = 'd_rtrl'
    layout: str = 'lanes'
    call: str = 'window'
    platform: str | None = None  # whose code; None: the CPU's
    axes: str = 'auto'


def run_tests_of(rows: list, *, x64: bool = False) -> list[dict]:
    """What :func:`found` says of each row, by a process with eight devices."""
    return output_of('tests.devices.programs', json.dumps(rows), JAX_ENABLE_X64=str(int(x64)))


def output_of(module: str, *args: str, **env: str) -> list:
    """The lines of JSON that a module prints in a process with eight devices."""
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={DEVICES}'
    path = f'{ROOT}{os.pathsep}{ROOT / "receipts"}'
    env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS='cpu', PYTHONPATH=path, **env)
    command = [sys.executable, '-W', 'ignore', '-m', module, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def mesh_of(layout: str, axes: str):
    sizes = LAYOUTS[layout]
    kinds = (EXPLICIT if axes == 'explicit' else AUTO,) * 2
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(sizes, ('b', 'm'), axis_types=kinds, devices=devices)


def call_of(learner, what: str):
    """``(params, state, xs, ys) -> results``, the gradient or the new weights first."""
    if what == 'step':

        def step(p, state, xs, ys):
            found = learner.grad(loss)(p, state, xs[0], ys[0])
            return found.grads, found.state

        return step
    if what == 'window':
        return learner.sequence_grad(loss, window=None)
    if what == 'exact':
        return learner.sequence_grad(loss, window=T // 2, inside='exact')
    every = {'updates': 1, 'delayed': 2}[what]

    def updates(p, state, xs, ys):
        optimizer = optax.sgd(1e-2)
        train = learner.sequence_update(loss, optimizer, every)
        p, losses, _, state, *_ = train(p, optimizer.init(p), state, xs, ys)
        return p, state, losses

    return updates


def compiled_of(row: Row):
    """``(program, its arguments, specs of the state)`` of a call on a mesh."""
    cell, (batches, units) = CELLS[row.cell], LAYOUTS[row.layout]
    dtype = jnp.result_type(float)
    learner = functional.online(cell.run, RULES[row.rule]())
    p, c, (xs, ys) = cell.params(dtype), cell.carry(dtype), cell.data(dtype)
    mesh = mesh_of(row.layout, row.axes)
    jax.eval_shape(learner.init, p, c, xs[0])
    batch = 'b' if batches > 1 else None
    param_specs = cell.specs if units > 1 else dict.fromkeys(cell.shapes, P())
    specs = learner.partition_specs(param_specs, batch)
    placed = partial(jax.tree.map, partial(NamedSharding, mesh))
    p, shardings = jax.device_put(p, placed(param_specs)), placed(specs)
    xs, ys = jax.device_put((xs, ys), NamedSharding(mesh, P(None, batch)))
    state = jax.jit(learner.init, out_shardings=shardings)(p, c, xs[0])
    fn = call_of(learner, row.call)
    out = {'step': (None, shardings)}.get(row.call, (None, shardings, None))
    if row.call in ('window', 'exact'):
        out = functional.Gradient(None, None, None, shardings)
    with contextlib.ExitStack() as stack:
        if row.axes == 'explicit':
            stack.enter_context(jax.set_mesh(mesh))
        if row.platform is not None:
            stack.enter_context(_jax.as_if_on(row.platform))
        program = jax.jit(fn, donate_argnums=1, out_shardings=out).lower(p, state, xs, ys).compile()
    return program, (p, state, xs, ys), learner


def found(row: Row) -> dict:
    program, args, learner = compiled_of(row)
    text, traces = program.as_text(), jax.tree.leaves(args[1].trace)
    shard = max(a.addressable_shards[0].data.nbytes for a in traces)  # before it is donated
    cell, dtype = CELLS[row.cell], jnp.result_type(float)
    weights = sum(a.nbytes for a in jax.tree.leaves(args[0]))
    inputs = cell.data(dtype), cell.params(dtype), cell.carry(dtype)
    got = program(*args)
    (xs, ys), p, c = inputs
    one = functional.online(cell.run, RULES[row.rule]())
    wanted = jax.jit(call_of(one, row.call))(p, one.init(p, c, xs[0]), xs, ys)
    return {
        'moved': hlo.moved(text),
        'weights': weights * CALLS[row.call],
        'collectives': [[c.opcode, c.size, c.turns, c.shapes] for c in hlo.collectives(text)],
        'bytes': dtype.itemsize,
        'trace': shard,
        'whole trace': max(a.nbytes for a in traces),
        'error': max(errors(got, wanted).values()),
    }


if __name__ == '__main__':
    for row in json.loads(sys.argv[1]):
        print(json.dumps({'row': row, **found(Row(*row))}), flush=True)
