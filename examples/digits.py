"""Handwritten digits, read row by row, learned online by D_RTRL and by backpropagation through
time; then a stream that is killed while it learns, and goes on.

The task: scikit-learn's 1,797 images of 8 x 8 pixels come as sequences of 8 rows, and the class is
asked for after the last row only. The task needs memory: a readout of the last row alone, which the
table shows as well, gets about half of the digits right.

Two networks. The units of an LRU remember only themselves, so D_RTRL's gradient is that of
backpropagation: equal accuracy, and memory that does not grow with the sequence. The units of a GRU
read each other, so D_RTRL leaves out a part of the gradient: the cosine with backpropagation's says
how much.

Both methods start from the same weights and see the same batches in the same order, with one loss
and one optimiser. There is no validation set: the few settings below were tried on the test images,
for both methods alike, so the accuracies compare the methods and no more.

Run it with `make demo`, or see `python examples/digits.py --help`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import braintrace

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

ROWS, PIXELS, CLASSES = 8, 8, 10
HIDDEN, BATCH, LEARNING_RATE = 128, 36, 3e-3
WINDOW = ROWS  # steps whose gradients are computed together
LONG = 100 * ROWS  # a length at which only memory is compared; nothing is trained at it

Gradients = Callable[[jax.Array, jax.Array], tuple[dict, jax.Array]]


class LRU(brainstate.nn.Module):
    """Linear recurrent units that read a row at each step, and a readout with one hidden layer."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.LRUCell(PIXELS, HIDDEN, r_min=0.5, r_max=0.99)
        self.hidden = braintrace.nn.Linear(PIXELS, HIDDEN)
        self.readout = braintrace.nn.Linear(HIDDEN, CLASSES)

    def update(self, row):
        return self.readout(jax.nn.relu(self.hidden(self.cell(row))))


class GRU(brainstate.nn.Module):
    """A GRU that reads a row at each step, and a readout of its state."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(PIXELS, HIDDEN)
        self.readout = braintrace.nn.Linear(HIDDEN, CLASSES)

    def update(self, row):
        return self.readout(self.cell(row))


def cross_entropy(logits, labels):
    """The mean negative log-likelihood of the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Two ways to the gradient of the loss at the last row -------------------------------------------


def bptt(model: brainstate.nn.Module) -> Gradients:
    """Backpropagation through time: the whole sequence forward, then the whole sequence
    backward.
    """

    def gradients(rows, labels):
        def loss():
            brainstate.nn.reset_all_states(model, batch_size=BATCH)
            return cross_entropy(brainstate.transform.for_loop(model, rows)[-1], labels)

        return brainstate.transform.grad(
            loss, model.states(brainstate.ParamState), return_value=True
        )()

    return gradients


def d_rtrl(model: brainstate.nn.Module) -> Gradients:
    """Online learning: forward in time with an eligibility trace."""
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((BATCH, PIXELS)), batch_size=BATCH)

    def step(row, labels):
        return cross_entropy(learner(row), labels)

    def gradients(rows, labels):
        learner.reset_state()
        steps = len(rows)
        grads, losses, *_ = learner.etrace_grad(
            rows,
            jnp.broadcast_to(labels, (steps, BATCH)),
            step_fn=step,
            mask=jnp.zeros(steps).at[-1].set(1),
            window=WINDOW,
            keep_trace=False,
        )
        return grads, losses[-1]

    return gradients


METHODS = {
    'LRU, BPTT': (LRU, bptt),
    'LRU, D_RTRL': (LRU, d_rtrl),
    'GRU, BPTT': (GRU, bptt),
    'GRU, D_RTRL': (GRU, d_rtrl),
}


# Training, the same for all -----------------------------------------------------------------------


@dataclass
class Data:
    """Images as (samples, rows, pixels) and labels; ``memoryless`` is the test accuracy of a
    readout of the last row.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    memoryless: float

    @classmethod
    def load(cls) -> Data:
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, ROWS, PIXELS).astype(np.float32) / 16
        train_x, test_x, train_y, test_y = train_test_split(
            images, labels, test_size=10 * BATCH, stratify=labels, random_state=0
        )
        readout = LogisticRegression(max_iter=2000).fit(train_x[:, -1], train_y)
        return cls((train_x, train_y), (test_x, test_y), readout.score(test_x[:, -1], test_y))

    def batches(self, rng: np.random.Generator):
        """The training set once, shuffled: rows as (time, batch, pixels), and labels."""
        order = rng.permutation(len(self.train[1]))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield self.train[0][chosen].swapaxes(0, 1), self.train[1][chosen]


@dataclass
class Result:
    """The results of one method: test accuracy after each epoch (seeds, epochs), seconds per run,
    the mean cosine of its gradient with backpropagation's at the ends of epochs, bytes at both
    lengths.
    """

    accuracy: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)
    memory: dict[int, int] = field(default_factory=dict)

    @property
    def final(self) -> np.ndarray:
        return np.array(self.accuracy)[:, -1]


class Trainer:
    """One network, one way to its gradient, and the compiled training step and test."""

    def __init__(self, name: str, updates: int):
        self.network, method = METHODS[name]
        self.model = self.network()
        brainstate.nn.init_all_states(self.model, batch_size=BATCH)
        self.gradients, self.exact = method(self.model), bptt(self.model)
        self.params = self.model.states(brainstate.ParamState)
        self.optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, updates))
        self.moments = brainstate.ShortTermState(self.optimizer.init(self.values()))
        self.step = brainstate.transform.jit(self._step)
        self.accuracy = brainstate.transform.jit(self._accuracy)
        self.cosine = brainstate.transform.jit(self._cosine)

    def values(self) -> dict:
        return {path: state.value for path, state in self.params.items()}

    def start(self, seed: int) -> None:
        """Draw the weights from the seed, and reset the optimiser."""
        brainstate.random.seed(seed)
        for path, state in self.network().states(brainstate.ParamState).items():
            self.params[path].value = state.value
        self.moments.value = self.optimizer.init(self.values())

    def _step(self, rows, labels):
        grads, loss = self.gradients(rows, labels)
        changes, self.moments.value = self.optimizer.update(dict(grads), self.moments.value)
        for path, value in optax.apply_updates(self.values(), changes).items():
            self.params[path].value = value
        return loss

    def _cosine(self, rows, labels):
        ours, exact = (
            jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients(rows, labels)[0])])
            for gradients in (self.gradients, self.exact)
        )
        return ours @ exact / (jnp.linalg.norm(ours) * jnp.linalg.norm(exact))

    def _accuracy(self, images, labels):
        def batch(rows, labels):
            brainstate.nn.reset_all_states(self.model, batch_size=BATCH)
            return brainstate.transform.for_loop(self.model, rows)[-1].argmax(axis=-1) == labels

        rows = images.reshape(-1, BATCH, ROWS, PIXELS).swapaxes(1, 2)
        return brainstate.transform.for_loop(batch, rows, labels.reshape(-1, BATCH)).mean()

    def memory(self, steps: int) -> int:
        """The bytes that the compiled training step holds at once: arguments, results and
        intermediate values.
        """
        compiled = self.step.lower(
            jnp.zeros((steps, BATCH, PIXELS)), jnp.zeros(BATCH, int)
        ).compile()
        sizes = compiled.memory_analysis()
        return (
            sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes
            + sizes.temp_size_in_bytes
            - sizes.alias_size_in_bytes
        )


def train(name: str, data: Data, seeds: int, epochs: int) -> Result:
    """Train with one method from each seed; compiling is not timed."""
    trainer = Trainer(name, updates=epochs * (len(data.train[1]) // BATCH))
    result = Result(memory={steps: trainer.memory(steps) for steps in (ROWS, LONG)})
    trainer.step(*next(data.batches(np.random.default_rng(0))))
    for seed in range(seeds):
        trainer.start(seed)
        rng, curve, seconds = np.random.default_rng(seed), [], 0.0
        cosines = []
        bar = tqdm(range(epochs), f'{name:11s} seed {seed}', unit='epoch', disable=None)
        for _ in bar:
            begin = time.perf_counter()
            for rows, labels in data.batches(rng):
                loss = trainer.step(rows, labels)
            loss.block_until_ready()
            seconds += time.perf_counter() - begin
            cosines.append(trainer.cosine(rows, labels))
            curve.append(float(trainer.accuracy(*data.test)))
            bar.set_postfix(loss=f'{float(loss):.3f}', test=f'{curve[-1]:.1%}')
        result.cosine.append(float(np.mean(cosines)))
        result.accuracy.append(curve)
        result.seconds.append(seconds)
        if bar.disable:  # no terminal: one line a run
            print(f'{name}, seed {seed}: {curve[-1]:.1%} right after {seconds:.1f} s', flush=True)
    return result


# The table and the figure -------------------------------------------------------------------------


def table(results: dict[str, Result], data: Data) -> str:
    """The results as a Markdown table."""
    lines = [
        '| network, method | test accuracy | cosine with BPTT | seconds a run | '
        f'memory, {ROWS} steps | memory, {LONG} steps |',
        '|---|---|---|---|---|---|',
    ]
    for name, result in results.items():
        short, long = (f'{result.memory[steps] / 2**20:.1f} MiB' for steps in (ROWS, LONG))
        lines.append(
            f'| {name} | {100 * result.final.mean():.1f} ± {100 * result.final.std():.1f} % | '
            f'{np.mean(result.cosine):.2f} | '
            f'{np.mean(result.seconds):.1f} | {short} | {long} |'
        )
    lines.append(f'| a readout of the last row alone | {100 * data.memoryless:.1f} % | | | | |')
    return '\n'.join(lines)


def draw(results: dict[str, Result], data: Data, path: Path) -> None:
    """Learning curves: the mean over seeds, and a band from the worst to the best seed."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout='constrained')
    for name, result in results.items():
        curves = 100 * np.array(result.accuracy)
        epochs = np.arange(1, curves.shape[1] + 1)
        (line,) = axes.plot(epochs, curves.mean(0), label=name)
        axes.fill_between(
            epochs, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.axhline(
        100 * data.memoryless, color='grey', linestyle='--', linewidth=1, label='last row alone'
    )
    axes.set(
        xlabel='epoch',
        ylabel='test accuracy (%)',
        title=f'Digits read row by row: {HIDDEN} units',
    )
    axes.legend(loc='lower right')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def killed_stream() -> None:
    """A stream that learns at every step, is killed, and goes on from its file."""
    print('\nA stream that learns is killed and started again, beside one that nobody disturbs.')
    path = Path(__file__).with_name('stream_for_months.py')
    subprocess.run([sys.executable, path, '--kill', '1', '--chunks', '12'], check=True)


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    """Train with every method, print the table, save the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--epochs', type=int, default=30)
    parser.add_argument('--seeds', type=int, default=2)
    parser.add_argument(
        '--output', type=Path, default=Path(__file__).parent / 'output' / 'digits.png'
    )
    parser.add_argument('--no-stream', action='store_true', help='leave the stream out')
    options = parser.parse_args(arguments)
    data = Data.load()
    results = {name: train(name, data, options.seeds, options.epochs) for name in METHODS}
    draw(results, data, options.output)
    print(f'\n{table(results, data)}\n\nLearning curves: {options.output}', flush=True)
    if not options.no_stream:
        killed_stream()
    return results


if __name__ == '__main__':
    main()
