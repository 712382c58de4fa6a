"""Faults that the tests have to see: each row changes a line of the package, and names tests of the
gate of which one has to fail then.

    python -m tests.mutants                 try all, in a copy of the working tree
    python -m tests.mutants reset peak      those whose name has one of these words

Faults that nobody wrote down are drawn by `tests/cover.py`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 900.0  # seconds, after which a change made a loop endless


class Mutant(NamedTuple):
    """``old``, which a file of the package has once, becomes ``new``; then one of ``tests``,
    arguments of pytest, fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


FEEDBACK = 'tests/gradients/test_feedback.py'
MUTANTS = [
    Mutant(
        'a sum in a backward pass reads its last position',
        '_compiler/equations.py',
        'return np.where(several, MANY, high)',
        'return high',
        'tests/compiler/test_refused_and_degraded.py -k tail_of_a_custom',
    ),
    Mutant(
        'the state before a step behind it',
        '_executor/over_time.py',
        'ends = (new[1:], start[None]) if self.reverse else (start[None], new[:-1])',
        'ends = (new[1:], start[None])',
        'tests/gradients/test_over_time.py',
    ),
    Mutant(
        'a recurrence without its first state',
        '_executor/over_time.py',
        'x if more is None else x.at[start].add(more)',
        'x',
        'tests/gradients/test_over_time.py',
    ),
    Mutant(
        'a product that is linear in both',
        '_executor/over_time.py',
        'linear = does.elementwise and does.linear is not None and does.linear(inside)',
        'linear = does.elementwise and does.linear is not None',
        'tests/gradients/test_over_time.py',
    ),
    Mutant(
        'a hard reset adds the reset potential',
        'nn/_neuron.py',
        "if self.spk_reset == 'soft' else V - self.V_reset",
        "if self.spk_reset == 'soft' else V + self.V_reset",
        'tests/nn/test_table.py -k lif_hard',
    ),
    Mutant(
        'first values are drawn around their deviation',
        'nn/_rotations.py',
        'Normal(scale=float',
        'Normal(float',
        'tests/nn/test_first_values.py -k LRUCell',
    ),
    Mutant(
        'the peak of two exponentials',
        'nn/_synapses.py',
        'q ** (q / (1 - q)) -',
        'q ** (q / (1 + q)) -',
        'tests/nn/test_synapses.py -k highest',
    ),
    Mutant(
        'a reset at the first step leaves pending steps',
        '_rules/d_rtrl.py',
        'pending.without(graph, reset)',
        'pending',
        'tests/gradients/test_updates.py -k need_not_be_a_number',
    ),
    Mutant(
        'the exponent of the correction is off by one at the border of an exact window',
        '_rules/es_d_rtrl.py',
        't = jnp.maximum(t, 1) - 1',
        't = jnp.maximum(t, 1)',
        'tests/gradients/test_exact_windows.py -k border',
    ),
    Mutant(
        'signs of all lanes for each lane',
        'extra/_wide/uoro.py',
        'only = [where_lanes(flags, True, v) for v in signs]',
        'only = signs',
        'tests/gradients/test_rules.py -k learned_decay-uoro',
    ),
    Mutant(
        'adaptive feedback fades twice as fast',
        '_executor/feedback.py',
        '0 if count is None else count,',
        '0 if count is None else 2 * count,',
        f'{FEEDBACK} -k adaptive',
    ),
    Mutant(
        'fixed feedback has the other sign',
        '_executor/feedback.py',
        '            return drawn\n',
        '            return -drawn\n',
        f'{FEEDBACK} -k random_feedback',
    ),
    Mutant(
        'an evaluation uses up what first states draw',
        '_learner/evaluation.py',
        'for state in (default, *bound.states.outside.values())]',
        'for state in bound.states.outside.values()]',
        'tests/learner/test_evaluate.py -k draws',
    ),
    Mutant(
        'a row of a table that is read twice counts once',
        '_etrace_op/dense.py',
        '.at[x].add(d',
        '.at[x].set(d',
        'tests/etrace_op/test_embedding.py',
    ),
    Mutant(
        'a window of factors does not see resets',
        '_rules/es_d_rtrl.py',
        '            row, x, t = at\n            d, df, signals = window.steps.open(row)\n'
        '            if window.resets is not None:',
        '            row, x, t = at\n            d, df, signals = window.steps.open(row)\n'
        '            if window.resets is None:',
        'tests/gradients/test_rules.py -k reset_of_lanes',
    ),
    Mutant(
        'a lane that is reset in a window of snap keeps its signal',
        'extra/_wide/influence.py',
        'before = {k: flows[k].in_lanes(~reset, s) for k, s in before.items()}',
        'before = dict(before)',
        'tests/gradients/test_rules.py -k reset_of_lanes',
    ),
    Mutant(
        'a gate of a branch lets every cotangent back',
        '_compiler/program/control_flow.py',
        'return jax.lax.select_n(taken, jax.lax.stop_gradient(x), x)',
        'return x + 0',
        'tests/gradients/test_control_flow.py -k cond_log_of_negative',
    ),
    Mutant(
        'a bias in another unit counts as if in that of the product',
        '_etrace_op/_operands.py',
        'mantissa if own == unit else',
        'mantissa if own.has_same_dim(unit) else',
        'tests/etrace_op/test_user_functions.py -k unit',
    ),
    Mutant(
        'leaves of a file that the state lacks are not seen',
        'extra/saving.py',
        'for key in {**b, **a}:',
        'for key in b:',
        'tests/functional/test_state_io.py -k structure',
    ),
    Mutant(
        'the slope of a logistic surrogate lacks its factor',
        'nn/surrogate.py',
        'return slope * jax.nn.sigmoid(slope * x) * jax.nn.sigmoid(-slope * x)',
        'return jax.nn.sigmoid(slope * x) * jax.nn.sigmoid(-slope * x)',
        'tests/nn/test_surrogate.py',
    ),
    Mutant(
        'the filter of a bias adds what it keeps',
        'nn/_readout.py',
        'zip(states, (x, 1))',
        'zip(states, (x, left))',
        'tests/nn/test_table.py -k filtered',
    ),
    Mutant(
        'a refractory time is over twice as fast',
        'nn/_neuron.py',
        'jnp.maximum(others[-1] - 1, 0)',
        'jnp.maximum(others[-1] - 2, 0)',
        'tests/nn/test_neurons.py',
    ),
    Mutant(
        'the copy task asks a step too late',
        'tasks/_memory.py',
        'jnp.arange(steps) >= delay + length',
        'jnp.arange(steps) > delay + length',
        'tests/tasks/test_tasks.py -k copy',
    ),
    Mutant(
        'a step before a reset counts behind it',
        '_rules/pending.py',
        'self.factors, t > 1).without(graph, t == 0)',
        'self.factors, t > 1)',
        'tests/learner/test_pending.py tests/gradients/test_updates.py',
    ),
    Mutant(
        'one sign for both factors of KF-RTRL',
        'extra/_wide/uoro.py',
        '_beside(pair, c, e) for c in (a, b))\n',
        '_beside(pair, abs(c), e) for c in (a, b))\n',
        'tests/gradients/test_rules.py -k signs',
    ),
    Mutant(
        'the first slot of a wide trace is lost',
        'extra/_wide/scopes.py',
        'there = (slots >= 0) &',
        'there = (slots > 0) &',
        'tests/gradients/test_rules.py -k snap',
    ),
    Mutant(
        'a score starts from the states that were left',
        '_learner/evaluation.py',
        '            brainstate.nn.init_all_states(model, **self.options)\n            return',
        '            return',
        'tests/learner/test_evaluate.py',
    ),
]


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether its tests pass with it."""
    file = copy / 'braintrace' / mutant.file
    text = file.read_text(encoding='utf-8')
    file.write_text(text.replace(mutant.old, mutant.new), encoding='utf-8')
    run = [sys.executable, '-m', 'pytest', '-q', '-x', '-m', 'not nightly', *mutant.tests.split()]
    try:
        done = subprocess.run(run, cwd=copy, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(text, encoding='utf-8')
    if done.returncode not in (0, 1, 2):  # 2: a file of tests can not be imported
        raise SystemExit(f'{mutant.name}: {mutant.tests}\n{done.stdout}{done.stderr}')
    return not done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description='Faults that the tests have to see.')
    parser.add_argument('words', nargs='*', help='parts of the names of those to try')
    options = parser.parse_args()
    lived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ('benchmarks', 'braintrace', 'examples', 'receipts', 'tests', 'pyproject.toml'):
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, copy / part)
        for mutant in MUTANTS:
            if options.words and not any(word in mutant.name for word in options.words):
                continue
            lives = survives(mutant, copy)
            print('SURVIVES' if lives else 'seen    ', mutant.name, flush=True)
            lived += lives
    return lived


if __name__ == '__main__':
    sys.exit(main())
