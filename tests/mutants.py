"""Faults that the tests have to see: each row changes a line of the package, and names tests of the
gate of which one has to fail then.

    python -m tests.mutants                 try all, in a copy of the working tree
    python -m tests.mutants reset peak      those whose name has one of these words
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """``old``, which a file of the package has once, becomes ``new``; then one of ``tests``,
    arguments of pytest, fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


LINEAR, FEEDBACK = 'tests/gradients/test_linear_loops.py', 'tests/gradients/test_feedback.py'
MUTANTS = [
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
        'peak = q ** (q / (1 - q)) - q ** (1 / (1 - q))',
        'peak = q ** (q / (1 + q)) - q ** (1 / (1 - q))',
        'tests/nn/test_synapses.py -k highest',
    ),
    Mutant(
        'columns of a coupled linear step are sums',
        '_executor/recurrence.py',
        'if r == s else h',
        'if r <= s else h',
        'tests/executor/test_linear_loops.py',
    ),
    Mutant(
        'a reset multiplies what is no number in an associative scan',
        '_executor/recurrence.py',
        'jnp.where((a != 0) | jnp.isfinite(x), x, 0)',
        'x',
        f'{LINEAR} -k number',
    ),
    Mutant(
        'transitions across a reset stay in an associative scan',
        '_rules/reverse_scan.py',
        '        p = masked(~(resets | later), p)\n',
        '        pass\n',
        f'{LINEAR} -k number',
    ),
    Mutant(
        'a reset at the first step leaves pending steps',
        '_rules/d_rtrl.py',
        'pending.without(graph, resets[0])',
        'pending',
        'tests/gradients/test_updates.py -k need_not_be_a_number',
    ),
    Mutant(
        'the exponent of the correction is off by one at the border of an exact window',
        '_rules/es_d_rtrl.py',
        't, factored = jnp.maximum(start.t, 1) - 1, {}',
        't, factored = jnp.maximum(start.t, 1), {}',
        'tests/gradients/test_exact_windows.py -k border',
    ),
    Mutant(
        'signs of all lanes for each lane',
        '_rules/uoro.py',
        'only = [where_lanes(flags, True, v) for v in signs]',
        'only = signs',
        'tests/gradients/test_random_rules.py -k learned_decay-uoro',
    ),
    Mutant(
        'adaptive feedback fades twice as fast',
        '_executor/feedback.py',
        '** (0 if count is None else count)',
        '** (0 if count is None else 2 * count)',
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
        '_etrace_op/embedding.py',
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
        'tests/gradients/test_es_d_rtrl.py -k reset',
    ),
    Mutant(
        'a lane that is reset in a window of snap keeps its signal',
        '_rules/influence.py',
        'lam = {k: flows[k].in_lanes(~reset, s) for k, s in lam.items()}',
        'lam = dict(lam)',
        'tests/gradients/test_wide_scopes.py -k resets',
    ),
    Mutant(
        'a gate of a branch lets every cotangent back',
        '_compiler/program/branches.py',
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
        '_saving.py',
        'for key in {**b, **a}:',
        'for key in b:',
        'tests/functional/test_state_io.py -k structure',
    ),
]


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether the tests of the gate pass with it."""
    file = copy / 'braintrace' / mutant.file
    text = file.read_text(encoding='utf-8')
    file.write_text(text.replace(mutant.old, mutant.new), encoding='utf-8')
    run = [sys.executable, '-m', 'pytest', '-q', '-x', '-m', 'not nightly', *mutant.tests.split()]
    done = subprocess.run(run, cwd=copy, capture_output=True, text=True)
    file.write_text(text, encoding='utf-8')
    if done.returncode not in (0, 1):
        raise SystemExit(f'{mutant.name}: {mutant.tests}\n{done.stdout}{done.stderr}')
    return not done.returncode


def main() -> int:
    words, lived = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ('braintrace', 'tests', 'benchmarks', 'pyproject.toml'):
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, copy / part)
        for mutant in MUTANTS:
            if not words or any(word in mutant.name for word in words):
                lives = survives(mutant, copy)
                print('SURVIVES' if lives else 'seen    ', mutant.name, flush=True)
                lived += [mutant] if lives else []
    return len(lived)


if __name__ == '__main__':
    sys.exit(main())
