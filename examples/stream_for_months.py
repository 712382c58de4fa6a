"""A stream that is meant to run for months: killed at any moment, it goes on, bit by bit.

The target is the input of the step before, times a number that drifts; now and then a sensor gives
NaN. ``--kill 3`` kills the stream at three random moments, starts it again each time, and compares
its last file with that of a stream that nobody disturbed.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import functional

LANES, UNITS, STEPS = 4, 32, 200


def cell(params, h, x):
    """Units that leak, each at its own pace, in front of a readout."""
    decay = jax.nn.sigmoid(braintrace.element_wise(params['decay']))
    h = decay * h + braintrace.matmul(x, params['in'])
    return h @ params['out'], h


def sensor(first, last):
    """Chunks ``first`` to ``last``, each drawn from its number: that is all a file has to keep."""
    for k in range(first, last):
        noise = np.random.default_rng(k).normal(size=(STEPS + 1, LANES, 1))
        drift = np.cos(1e-4 * (STEPS * k + np.arange(STEPS)))[:, None, None]
        xs, ys = noise[1:].copy(), drift * noise[:-1]
        if k % 5 == 3:
            xs[k % STEPS, k % LANES] = np.nan
        yield xs, ys


def run(file, chunks):
    """Learn chunk after chunk, and go on from the file if there is one."""
    learner, optimizer = functional.online(cell), optax.adam(3e-3)
    carry0, drawn = jnp.zeros((LANES, UNITS)), jax.random.normal(jax.random.key(0), (UNITS,))
    params = {'in': drawn[None], 'decay': 2 * drawn, 'out': drawn[:, None] / UNITS}
    state = learner.init(params, carry0, jnp.zeros((LANES, 1)))
    at = params, optimizer.init(params), state, jnp.array(0), jnp.array(0)
    if file.exists():
        at = functional.load_state(file, at, learner=learner)
    update = learner.sequence_update(
        lambda y, target: jnp.mean((y - target) ** 2),
        optimizer,
        not_finite='reset',
        observe=lambda grads, state: jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))),
    )
    learn = jax.jit(update, donate_argnums=2)
    for xs, ys, mask in functional.chunks(sensor(int(at[3]), chunks), STEPS):
        begin, (*learnt, done, left_out) = time.perf_counter(), at
        found = learn(*learnt, xs, ys, mask, (None, carry0))
        learnt = found.params, found.opt_state, found.state
        at = *learnt, done + 1, left_out + found.skipped.updates
        functional.save_state(file, at, learner=learner)
        rate = STEPS / (time.perf_counter() - begin)
        loss, norm = jnp.nanmean(found.losses), found.observed[-1]
        print(f'chunk {at[3]}: loss {loss:.3f}, gradient {norm:.3f}, '
              f'updates left out {at[4]}, {rate:.0f} steps/s', flush=True)  # fmt: skip


def kill(times, chunks, seed=0):
    """Whether a stream that is killed so often ends like one that is not, bit by bit."""
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, file = Path(folder) / 'whole.npz', Path(folder) / 'killed.npz'
        for k in range(-1, times + 1):
            command = [sys.executable, __file__, '--file', whole if k < 0 else file]
            command += ['--chunks', str(chunks)]
            stream = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            if 0 <= k < times:
                for _ in range(moments.randint(1, max(1, chunks // (times + 1)))):
                    line = stream.stdout.readline()
                time.sleep(moments.uniform(0, 0.02))  # in the middle of a chunk, or of saving it
                stream.kill()
                print(f'killed after {line.split(":")[0]}')
            stream.communicate()
        return whole.read_bytes() == file.read_bytes() and len(list(Path(folder).iterdir())) == 2


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--file', type=Path, default=Path('stream.npz'))
    parser.add_argument('--chunks', type=int, default=60)
    parser.add_argument('--kill', type=int, default=0)
    given = parser.parse_args()
    if given.kill:
        print('the last files are equal:', kill(given.kill, given.chunks))
    else:
        run(given.file, given.chunks)
