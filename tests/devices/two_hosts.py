"""What each of two processes does that are not alike: it prints what it is told.

python -m tests.devices.two_hosts PROCESS ADDRESS FOLDER
"""

import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import functional
from braintrace.errors import BraintraceWarning
from braintrace.extra import saving


def learner_of(decay: float):
    def cell(p, h, x):
        h = decay * h + braintrace.matmul(x, p['w'])
        return h, h

    learner = functional.online(cell)
    learner.init({'w': jnp.ones((2, 3))}, jnp.zeros((4, 3)), jnp.zeros((4, 2)))
    return learner


def main(process: int, address: str, folder: Path) -> None:
    jax.distributed.initialize(address, 2, process, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    learner, slower = learner_of(0.9), learner_of(0.5)

    def whole(number: float):
        """Half of `h` is on each process, `w` is on both."""
        half, both = np.full((2, 3), number, np.float32), np.full(5, number, np.float32)
        h = jax.make_array_from_process_local_data(NamedSharding(mesh, P('data')), half)
        return {'h': h, 'w': jax.make_array_from_process_local_data(NamedSharding(mesh, P()), both)}

    def told(what: str, call) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always', BraintraceWarning)
            try:
                found = call()
                text = 'done' if found is None else float(found['w'].addressable_data(0)[0])
            except Exception as error:  # it is what the test reads
                text = f'{type(error).__name__}: {error}'
        texts = [str(x.message) for x in seen if isinstance(x.message, BraintraceWarning)]
        print(what, '|', *str(text).splitlines()[:1], *texts, flush=True)

    file, mine = folder / 'run.npz', folder / f'{process}.npz'
    other = slower if process else learner
    load, save = functional.load_state, functional.save_state
    told('nobody sees it', lambda: load(file, whole(0)))
    told('saved', lambda: save(file, whole(1), learner))
    told('loaded', lambda: load(file, whole(0), learner))
    told('other cells save', lambda: save(file, whole(2), other))
    told('other cells load', lambda: load(file, whole(0), other))
    saving.__version__ = f'0.{process}'
    told('other versions', lambda: save(file, whole(2), learner_of(0.9)))
    told('one sees it', lambda: load([file, mine][process], whole(0)))
    if process:
        mine.write_bytes(b'torn')
    told('torn for one', lambda: load([file, mine][process], whole(0)))
    told('no folder', lambda: save(folder / 'none' / 'run.npz', whole(2)))
    for n in (0, 1):
        save(folder / f'{n}.npz', whole(n))
    told('other files', lambda: load(mine, whole(0)))
    told('as it was', lambda: load(file, whole(0)))
    told('other numbers', lambda: save(file, whole(3 + process)))
    told('those of process 0', lambda: load(file, whole(0)))


if __name__ == '__main__':
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
