"""Training on several hosts, one process on each, that goes on from a file after a crash.

    python examples/several_hosts.py                  # two processes of this machine, over loopback
    python examples/several_hosts.py --process 0 --processes 2 --coordinator host0:1234 --file ...
    srun python examples/several_hosts.py --cluster --file ...    # SLURM, Open MPI or Kubernetes

If a process dies, the others end too: start all of them again, and they go on from the last file.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, INPUTS, UNITS, STEPS, CHUNKS = 8, 4, 16, 50, 4
SECONDS = 150  # that the two processes of this machine may take


def cell(params, h, x):
    """A vanilla RNN with a readout."""
    import jax.numpy as jnp

    import braintrace

    h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return h @ params['out'], h


def loss(y, target):
    """The loss of one step."""
    return ((y - target) ** 2).mean()


def work(args) -> None:
    """What each process does."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from braintrace import functional

    jax.distributed.initialize(
        args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=10
    )
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=automatic)
    everywhere, lanes = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, 'data'))
    learner, optimizer = functional.online(cell), optax.adam(1e-2)

    def start():
        params = {
            'w': jax.random.normal(jax.random.key(0), (INPUTS + UNITS, UNITS)) / 5,
            'out': jnp.zeros((UNITS, 1)),
        }
        state = learner.init(params, jnp.zeros((BATCH, UNITS)), jnp.zeros((BATCH, INPUTS)))
        return params, optimizer.init(params), state, jnp.int32(0)

    params, *_ = jax.eval_shape(start)
    specs = learner.partition_specs(dict.fromkeys(params, P()), 'data', mesh)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    whole = jax.jit(start, out_shardings=(everywhere, everywhere, places, everywhere))()
    with contextlib.suppress(FileNotFoundError):  # no process sees a file: the first start
        whole = functional.load_state(args.file, whole, learner)
    train = jax.jit(
        learner.sequence_update(loss, optimizer, update_every=2),
        out_shardings=functional.Trained(everywhere, everywhere, None, places, everywhere),
    )
    params, opt_state, state, done = whole
    for chunk in range(int(done), CHUNKS):
        if args.kill == chunk:
            os.kill(os.getpid(), signal.SIGKILL)
        # each process reads the part of the batch that its devices learn from
        mine = BATCH // jax.process_count()
        rng = np.random.default_rng([chunk, jax.process_index()])
        xs = rng.normal(size=(STEPS, mine, INPUTS)).astype(np.float32)
        ys = xs[..., :1] / 2  # the mean of the last two inputs
        ys[1:] += xs[:-1, :, :1] / 2
        xs, ys = (jax.make_array_from_process_local_data(lanes, a) for a in (xs, ys))
        params, losses, _, state, opt_state, *_ = train(params, opt_state, state, xs, ys)
        done = done + 1
        whole = params, opt_state, state, done
        functional.save_state(args.file, whole, learner)
        if jax.process_index() == 0:
            print(f'chunk {chunk}: mean loss {float(losses.mean()):.4f}', flush=True)


def launch(args) -> int:
    """Two processes of this machine with two devices each; ends all of them after `SECONDS`."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=2'
    env = dict(os.environ, JAX_PLATFORMS='cpu', XLA_FLAGS=flags)
    common = [sys.executable, __file__, '--coordinator', address, '--processes', '2']
    processes = []
    for k in range(2):
        kill = ['--kill', str(args.kill)] if args.kill is not None and k == 1 else []
        command = [*common, '--process', str(k), '--file', str(args.file), *kill]
        processes.append(subprocess.Popen(command, env=env))
    end = time.monotonic() + SECONDS
    try:
        return max(abs(p.wait(max(1, end - time.monotonic()))) for p in processes)
    finally:
        for p in processes:
            p.kill()


def main(argv=None) -> int:
    """The largest exit status of a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--process', type=int)
    parser.add_argument('--processes', type=int)
    parser.add_argument('--coordinator')
    parser.add_argument('--cluster', action='store_true', help='JAX finds the other processes')
    parser.add_argument('--file', type=Path, help='where to save; all hosts must see it')
    parser.add_argument('--kill', type=int, metavar='CHUNK', help='die there, to see what happens')
    args = parser.parse_args(argv)
    if args.file is None and (args.cluster or args.process is not None):
        parser.error('give --file, which all processes see: each of them saves and goes on from it')
    if args.process is None and not args.cluster:
        with tempfile.TemporaryDirectory() as folder:
            args.file = args.file or Path(folder) / 'state.npz'
            return launch(args)
    work(args)
    return 0


if __name__ == '__main__':
    sys.exit(main())
