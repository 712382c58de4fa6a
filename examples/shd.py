"""Spoken words as spikes: a recurrent network of adaptive neurons learns SHD or SSC, online or not.

    python examples/shd.py --train shd_train.h5 --test shd_test.h5 --rule d_rtrl --seeds 3

Without files it makes small ones of the same format, which show the way and not the skill. After
each epoch its state is kept in examples/output; with --go-on a run goes on behind the last one.
"""

import argparse
import hashlib
import time
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import braintrace
from braintrace import functional, nn, rules
from braintrace.tasks import events

RULES = {
    'bptt': None,
    'd_rtrl': rules.d_rtrl(),
    'same_step': rules.same_step(),
    'es_d_rtrl': rules.es_d_rtrl(0.9),
    'e_prop': rules.e_prop(feedback='random'),
}
MADE = 'no files were given: made ones of the same format, not SHD'


class Network(brainstate.nn.Module):
    """LIF and ALIF neurons, one half each, which see the input and each other."""

    def __init__(self, inputs, units, outputs, steps):
        super().__init__()
        adapts = jnp.arange(units) >= units // 2
        self.tau = tau = 0.2 * steps  # time constants in steps
        weights = brainstate.nn.init.Normal((inputs + units) ** -0.5)
        self.drive = nn.Linear(inputs + units, units, w_init=weights)
        self.units = nn.ALIF(units, tau, tau_a=1.5 * steps, beta=0.2 * adapts, R=tau)
        self.readout = nn.FilteredReadout(units, outputs, tau)

    def update(self, x):
        fired = jnp.concatenate([jnp.minimum(x, 3.0), self.units.get_spike()], -1)
        return self.readout(self.units(self.drive(fired)) / self.tau)  # of firing rates


def made(task, rule, options, steps):
    """A learner and its gradient ``(params, xs, ys, mask) -> grads, losses`` of whole sequences."""
    model = Network(task.inputs, options.units, task.outputs, steps)
    first = jnp.zeros((options.batch, task.inputs))
    learner = braintrace.compile(model, rule, first, batch_size=options.batch)
    online, params, carry = learner.pure()

    def along(params, xs, ys, mask):
        state, window = online.init(params, carry, xs[0]), None if steps == task.steps else 4
        grads_of = online.sequence_grad(task.loss, window, keep_trace=False)
        return grads_of(params, state, xs, ys, mask)[:2]

    def through(params, xs, ys, mask):
        def step(carry, at):
            outputs, carry = online.cell(params, carry, at[0])
            return carry, task.loss(outputs, at[1])

        losses = jax.lax.scan(step, carry, (xs, ys))[1]
        return jnp.average(losses, weights=mask), losses

    return learner, params, jax.grad(through, has_aux=True) if rule is None else along


def train(task, sizes, options, seed):
    """The learner of a seed after its last epoch, and the validation score after each."""
    brainstate.random.seed(seed)
    learner, params, gradient = made(task, RULES[options.rule], options, task.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))

    @jax.jit
    def update(params, moments, key):
        xs, ys, mask = task.sample(key, options.batch)
        grads, losses = gradient(params, xs, ys, mask)
        changes, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, changes), moments, jnp.average(losses, weights=mask)

    kept, scores = options.output / f'shd_{options.rule}_{seed}.npz', []
    at = {'params': params, 'moments': optimizer.init(params), 'done': np.array(0)}
    if options.go_on and kept.is_file():
        at = functional.load_state(kept, at)
    for epoch in range(int(at['done']), options.epochs):
        begin, losses = time.perf_counter(), []
        params, moments = at['params'], at['moments']
        for key in jax.random.split(
            jax.random.fold_in(jax.random.key(seed), epoch), sizes['train'] // options.batch
        ):
            params, moments, loss = update(params, moments, key)
            losses.append(float(loss))
        at = {'params': params, 'moments': moments, 'done': np.array(epoch + 1)}
        functional.save_state(kept, at)
        scores.append(score(task, learner, params, 'validation', sizes))
        seconds = time.perf_counter() - begin
        told = f'loss {np.mean(losses):.3f}, validation {100 * scores[-1]:.1f} %, {seconds:.1f} s'
        print(f'seed {seed}, epoch {epoch + 1}: {told}', flush=True)
    return learner, at['params'], scores


def score(task, learner, params, part, sizes):
    """The share of right answers in all samples of a part."""
    for path, value in params.items():
        learner.param_states[path].value = value
    xs, ys, mask = task.sample(jax.random.key(0), sizes[part], part)
    right = braintrace.evaluate(learner, xs, ys, lambda outputs, ys: task.score(outputs, ys, mask))
    return float(right)


def memory(task, rule, options, steps=1000):
    """MiB that a compiled gradient over so many steps needs beside its arguments and results."""
    _, params, gradient = made(task, rule, options, steps)
    shapes = [(steps, options.batch, task.inputs), (steps, options.batch), (steps,)]
    kinds = jnp.float32, jnp.int32, jnp.float32
    arguments = map(jax.ShapeDtypeStruct, shapes, kinds)
    program = jax.jit(gradient).lower(params, *arguments).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


def draw(task, learner, curves, options, title):
    """Scores by epochs; a sample of the test part, and what the last network says of it."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout='constrained')
    for scores in curves:
        axes[0].plot(options.epochs - len(scores) + 1 + np.arange(len(scores)), scores, 'o-')
    axes[0].axhline(task.floor, color='grey', linestyle=':')
    axes[0].set(xlabel='epoch', ylabel='validation: share of right answers', ylim=(0, 1.02))
    xs, ys, _ = task.sample(jax.random.key(0), 1, 'test')
    sure = jax.nn.softmax(braintrace.evaluate(learner, xs, ys, lambda outputs, ys: outputs))[:, 0]
    time = np.linspace(0, 1.4, task.steps)
    extent = (0, 1.4, 0, task.inputs)
    axes[1].imshow(xs[:, 0].T, aspect='auto', origin='lower', cmap='gray_r', extent=extent)
    axes[1].set(xlabel='time (s)', ylabel='input', title=f'a test sample of class {ys[0, 0]}')
    axes[2].plot(time, sure, color='grey', linewidth=0.7)
    axes[2].plot(time, sure[:, ys[0, 0]], color='C3')
    axes[2].set(xlabel='time (s)', ylabel='probability of each class (its own: red)', ylim=(0, 1))
    figure.suptitle(title)
    figure.savefig(options.output / 'shd.png', dpi=150)
    plt.close(figure)


def files(options):
    """The title, and the events of the three parts."""
    if options.train is None:
        print(MADE, flush=True)
        paths = [options.output / f'made_{part}.h5' for part in ('train', 'test')]
        for seed, (path, samples) in enumerate(zip(paths, (options.samples, 128))):
            events.write_shd(path, events.made_events(samples, seed))
    else:
        paths = [options.train, options.test]
        for path in paths:
            with path.open('rb') as file:
                print(f'{path}: SHA-256 {hashlib.file_digest(file, "sha256").hexdigest()}')
    train, test = map(events.read_shd, paths)
    by = 'sample' if train.speakers is None else 'speaker'
    train, held = train.split(by, key=jax.random.key(0))
    return {'train': train, 'validation': held, 'test': test}


def main(arguments=None):
    """Train each seed, draw, compare memory with BPTT's, and return the test scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--train', type=Path, help='an unpacked HDF5 file of SHD or SSC')
    parser.add_argument('--test', type=Path, help='another one')
    parser.add_argument('--rule', choices=RULES, default='d_rtrl')
    for name, value in (('seeds', 1), ('steps', 100), ('groups', 5), ('units', 256), ('batch', 32)):
        parser.add_argument(f'--{name}', type=int, default=value)
    parser.add_argument('--epochs', type=int, help='30, of made files 5')
    parser.add_argument('--samples', type=int, default=640, help='of the made training file')
    parser.add_argument('--go-on', action='store_true', help='behind the last epoch that was kept')
    parser.add_argument('--output', type=Path, default=Path(__file__).parent / 'output')
    options = parser.parse_args(arguments)
    if (options.train is None) != (options.test is None):
        parser.error('give --train and --test, or none of them.')
    options.epochs = options.epochs or (5 if options.train is None else 30)
    options.output.mkdir(parents=True, exist_ok=True)
    parts = files(options)
    for those in parts.values():
        print(those)
    sizes = {part: len(those) for part, those in parts.items()}
    task = events.events_task(**parts, steps=options.steps, groups=options.groups)
    print(task)
    curves, scores = [], []
    for seed in range(options.seeds):
        learner, params, curve = train(task, sizes, options, seed)
        curves.append(curve)
        scores.append(score(task, learner, params, 'test', sizes))
        print(f'seed {seed}: {100 * scores[-1]:.1f} % of the test part', flush=True)
    title = MADE if options.train is None else f'{options.train.name}, {options.test.name}'
    draw(task, learner, curves, options, f'{options.rule}: {title}')
    spread = f'{100 * np.mean(scores):.1f} %, {100 * min(scores):.1f} to {100 * max(scores):.1f}'
    print(f'{options.rule}, {options.seeds} seed(s): {spread}; floor {task.shown(task.floor)}')
    wide = memory(task, None, options)
    print(f'memory of a gradient over 1,000 steps: BPTT {wide:.0f} MiB')
    for dtype in (jnp.float32, jnp.bfloat16):
        slim = memory(task, rules.d_rtrl(trace_dtype=dtype), options)
        told = f'D_RTRL in windows of 4, trace in {jnp.dtype(dtype).name}'
        print(f'  {told}: {slim:.0f} MiB, {slim / wide:.2f} of it')
    return scores


if __name__ == '__main__':
    main()
