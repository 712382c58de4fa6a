"""A spiking network that goes on learning without Python: export a learning step, let a drift set
in, and compare who learns.

A network of adaptive neurons follows a signal; then the sign of the signal's second half turns. The
frozen network fails from there on. The exported step recovers: by JAX without braintrace, and
by IREE where it is installed (``pip install '.[edge]'``).

``--sizes`` prints the table of *Learning without Python*; ``--compare`` the differences of IREE and
JAX; ``--run-module`` runs steps by the native ``iree-run-module``.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import functional, nn, rules

INPUTS, UNITS, OUTPUTS = 40, 100, 2
GAIN = 12.0  # of the neurons: six to nine of a hundred fire in a step
OUTPUT = Path(__file__).parent / 'output' / 'edge.png'
FLAGS = (
    '--iree-input-type=stablehlo --iree-hal-target-backends=llvm-cpu '
    '--iree-llvmcpu-target-cpu=generic --iree-llvmcpu-debug-symbols=false'
).split()


def loss(output, target):
    """The squared error of a step."""
    return jnp.mean((output - target) ** 2)


class Recurrent(brainstate.nn.Module):
    """Neurons that read the inputs and their own last spikes, in front of a readout that leaks."""

    def __init__(self, inputs, units, outputs, neurons):
        super().__init__()
        self.weight, self.neurons = nn.Linear(inputs + units, units), neurons
        self.readout = nn.LeakyRateReadout(units, outputs, tau=10.0)

    def update(self, x):
        """One step."""
        spikes = self.neurons.get_spike()
        self.neurons(self.weight(jnp.concatenate([x, spikes], -1)))
        return self.readout(self.neurons.get_spike())


class LifAlif(brainstate.nn.Module):
    """Half of the neurons adapt, half do not."""

    def __init__(self, inputs, units, outputs):
        super().__init__()
        half = units // 2
        self.weight = nn.Linear(inputs + units, units)
        self.lif, self.alif = nn.LIF(half, 10.0, R=GAIN), nn.ALIF(half, 10.0, R=GAIN, tau_a=100.0)
        self.readout = nn.LeakyRateReadout(units, outputs, tau=10.0)

    def update(self, x):
        """One step."""
        spikes = jnp.concatenate([self.lif.get_spike(), self.alif.get_spike()], -1)
        drive = self.weight(jnp.concatenate([x, spikes], -1))
        lif, alif = jnp.split(drive, 2, -1)
        new = jnp.concatenate([self.lif(lif), self.alif(alif)], -1)
        return self.readout(new)


def network(name):
    """``(module, inputs)`` of a row of the table."""
    if name.startswith('GRU'):
        units = int(name[4:])
        return brainstate.nn.Sequential(nn.GRUCell(8, units), nn.Linear(units, OUTPUTS)), 8
    if name == 'LRU 64':
        cells = nn.Linear(8, 64), nn.LRUCell(64, 64), nn.Linear(64, OUTPUTS)
        return brainstate.nn.Sequential(*cells), 8
    if name == 'ALIF 100':
        return Recurrent(INPUTS, UNITS, OUTPUTS, nn.ALIF(UNITS, 10.0, R=GAIN, tau_a=100.0)), INPUTS
    return LifAlif(INPUTS, UNITS, OUTPUTS), INPUTS


def learner_of(name, rule):
    """``(learner, x, y)``, for a batch of one."""
    brainstate.random.seed(0)
    module, inputs = network(name)
    x, y = jnp.zeros((1, inputs)), jnp.zeros((1, OUTPUTS))
    return braintrace.compile(module, rule, x, batch_size=1), x, y


def tool(name):
    """The path of a program of IREE, on the PATH or beside this Python, or None."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def compiled(step, folder):
    """Save a step, compile it by IREE; the path of the binary, or what the compiler said."""
    step.save(folder)
    binary = Path(folder) / 'step.vmfb'
    command = [tool('iree-compile'), Path(folder) / 'step.mlir', *FLAGS, '-o', binary]
    done = subprocess.run(command, capture_output=True, text=True)
    return binary if done.returncode == 0 else done.stderr


class IreeStep:
    """The step in IREE's runtime, called as :class:`functional.Exported` is."""

    def __init__(self, binary, manifest):
        import iree.runtime as rt

        self.context = rt.SystemContext(config=rt.Config('local-sync'))
        module = rt.VmModule.mmap(self.context.instance, str(binary))
        self.context.add_vm_module(module)
        self.call = self.context.modules[module.name]['main']
        self.arguments = [row['name'] for row in manifest['arguments']]
        self.results = [row['name'] for row in manifest['results']]

    def __call__(self, arrays, **inputs):
        """One step."""
        given = {**arrays, **inputs}
        found = dict(zip(self.results, self.call(*(given[name] for name in self.arguments))))
        results = {name: np.asarray(array) for name, array in found.items()}
        return {name: results.pop(name, arrays[name]) for name in arrays}, results


def signal(steps, drift_at):
    """Spikes of the inputs, and a target that is a sum of their traces, whose sign turns."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(INPUTS, OUTPUTS)) / np.sqrt(INPUTS)
    rate = 0.1 + 0.1 * np.sin(np.arange(steps)[:, None] / 40 + np.linspace(0, 6, INPUTS))
    xs, trace, ys = (rng.random((steps, INPUTS)) < rate).astype('f4'), np.zeros(INPUTS), []
    for t, x in enumerate(xs):
        trace = 0.9 * trace + x
        ys.append(trace @ weights * (1 if t < drift_at else -1))
    return xs[:, None], np.asarray(ys, 'f4')[:, None]


def live(step, arrays, xs, ys):
    """Losses of a stream, and seconds a step."""
    losses, begin = [], time.perf_counter()
    for x, y in zip(xs, ys, strict=True):
        arrays, results = step(arrays, x=x, y=y)
        losses.append(float(results['loss']))
    return np.array(losses), (time.perf_counter() - begin) / len(xs), arrays


def smooth(losses, width=200):
    """The mean over the last steps."""
    total = np.cumsum(np.concatenate([np.zeros(1), losses]))
    return (total[width:] - total[:-width]) / width


def main(steps=4000, path=OUTPUT):
    """Train, export, drift; print the errors and draw them. Returns them by name."""
    xs, ys = signal(2 * steps, steps + steps // 4)
    learner, x, y = learner_of('ALIF 100', rules.d_rtrl())
    optimizer = optax.sgd(1e-2)
    found = learner.etrace_train(
        xs[:steps], ys[:steps], step_fn=lambda x, y: loss(learner(x), y), optimizer=optimizer
    )
    step = learner.export(loss, x, y, optimizer=optimizer, opt_state=found.opt_state)
    frozen, late = learner.export(loss, x, y), (xs[steps:], ys[steps:])
    curves, ends = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        step.save(folder)
        again = functional.load_exported(folder)
        runs = {'frozen': (frozen, frozen.arrays), 'learning, JAX': (again, again.arrays)}
        if importlib.util.find_spec('iree') and tool('iree-compile'):
            binary = compiled(step, folder)
            runs['learning, IREE'] = IreeStep(binary, step.manifest), step.arrays
            print(f'{step.manifest["bytes"]["total"]:,} bytes are kept, '
                  f'the program has {binary.stat().st_size:,}')  # fmt: skip
        print('| network | error before the drift | after it | at the end | ms a step |')
        print('|---|---|---|---|---|')
        for name, (run, arrays) in runs.items():
            losses, seconds, _ = live(run, arrays, *late)
            parts = np.split(losses, [steps // 4, steps // 2, -steps // 4])
            ends[name] = [float(part.mean()) for part in (parts[0], parts[1], parts[3])]
            curves[name] = smooth(losses)
            told = ' | '.join(f'{end:.3f}' for end in ends[name])
            print(f'| {name} | {told} | {1e3 * seconds:.2f} |')
    draw(curves, steps // 4, path)
    return ends


def draw(curves, drift_at, path):
    """Error against steps."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout='constrained')
    for (name, curve), style in zip(curves.items(), ('-', '-', ':')):
        axes.plot(np.arange(len(curve)) + 200, curve, style, label=name)
    axes.axvline(drift_at, color='0.6', lw=1)
    axes.set(xlabel='steps after the export', ylabel='squared error', title='A drift sets in')
    axes.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


RULES = {
    'D_RTRL': rules.d_rtrl(),
    'D_RTRL, bf16 trace': rules.d_rtrl(trace_dtype=jnp.bfloat16),
    'ES_D_RTRL': rules.es_d_rtrl(0.9),
    'e-prop': rules.e_prop(kappa='auto'),
}
NETWORKS = 'GRU 32', 'GRU 64', 'ALIF 100', 'LIF + ALIF 100', 'LRU 64'


def sizes(names=NETWORKS):
    """Print the bytes of program and arrays of each network, rule and optimiser."""
    with_iree = tool('iree-compile') is not None
    print('| network | rule | weights | state | with SGD | with Adam | StableHLO | IREE |')
    print('|---|---|---|---|---|---|---|---|')
    for name in names:
        for rule_name, rule in RULES.items():
            if rule_name == 'e-prop' and 'LIF' not in name:
                continue
            learner, x, y = learner_of(name, rule)
            row = []
            for optimizer in (optax.sgd(1e-2), optax.adam(1e-3)):
                step = learner.export(loss, x, y, optimizer=optimizer)
                row.append(step.manifest['bytes'])
                if len(row) == 1:
                    first = step
            state = row[0]['carry'] + row[0]['trace'] + row[0]['t']
            told = [row[0]['params'], state, row[0]['total'], row[1]['total'], len(first.text)]
            told = ' | '.join(f'{n:,}' for n in told)
            with tempfile.TemporaryDirectory() as folder:
                binary = compiled(first, folder) if with_iree else '-'
                last = f'{binary.stat().st_size:,}' if isinstance(binary, Path) else binary[:60]
            print(f'| {name} | {rule_name} | {told} | {last} |', flush=True)


def compare(steps=10_000, names=('GRU 32', 'LIF + ALIF 100')):
    """Print how far IREE and JAX are apart after so many steps. Returns the differences."""
    ends = {}
    print('| network | rule | mean loss, JAX | IREE | largest difference of losses | of weights |')
    print('|---|---|---|---|---|---|')
    for name in names:
        for rule_name in ('D_RTRL', 'ES_D_RTRL'):
            learner, x, y = learner_of(name, RULES[rule_name])
            step = learner.export(loss, x, y, optimizer=optax.sgd(1e-3))
            rng = np.random.default_rng(1)
            xs = (rng.random((steps, *x.shape)) < 0.2).astype('f4')
            ys = np.sin(np.arange(steps)[:, None, None] / 20 + np.arange(OUTPUTS)).astype('f4')
            with tempfile.TemporaryDirectory() as folder:
                other = IreeStep(compiled(step, folder), step.manifest)
                (a, _, p), (b, _, q) = (live(s, step.arrays, xs, ys) for s in (step, other))
            apart = max(abs(np.asarray(p[k]) - q[k]).max() for k in p if k.startswith('params'))
            ends[name, rule_name] = a.mean(), b.mean(), abs(a - b).max(), apart
            told = '{:.6f} | {:.6f} | {:.1e} | {:.1e}'.format(*ends[name, rule_name])
            print(f'| {name} | {rule_name} | {told} |', flush=True)
    return ends


def run_module(steps=20):
    """Run steps by ``iree-run-module``, each from the files of the one before; returns losses of it
    and of JAX.
    """
    learner, x, y = learner_of('ALIF 100', rules.d_rtrl())
    step, (xs, ys) = learner.export(loss, x, y, optimizer=optax.sgd(1e-2)), signal(steps, steps)
    names = [row['name'] for row in step.manifest['arguments']]
    results = [row['name'] for row in step.manifest['results']]
    losses = live(step, step.arrays, xs, ys)[0]
    with tempfile.TemporaryDirectory() as folder:
        binary, native = compiled(step, folder), []
        place = {name: Path(folder) / f'{k}.npy' for k, name in enumerate({*names, *results})}
        for name, array in step.arrays.items():
            np.save(place[name], array)
        for x, y in zip(xs, ys, strict=True):
            np.save(place['x'], x)
            np.save(place['y'], y)
            command = [tool('iree-run-module'), f'--module={binary}', '--device=local-sync']
            command += ['--function=main', *(f'--input=@{place[name]}' for name in names)]
            subprocess.run([*command, *(f'--output=@{place[n]}' for n in results)], check=True)
            native.append(float(np.load(place['loss'])))
    print(f'{steps} steps by iree-run-module: losses differ by {abs(losses - native).max():.1e}')
    return losses, np.array(native)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ('--sizes', '--compare', '--run-module'):
        parser.add_argument(option, action='store_true')
    asked = parser.parse_args()
    jobs = {sizes: asked.sizes, compare: asked.compare, run_module: asked.run_module}
    for job in [job for job, wanted in jobs.items() if wanted] or [main]:
        job()
