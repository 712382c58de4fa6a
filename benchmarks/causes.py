"""Why some rows of ``results.py`` miss their aim: gradients beside those of BPTT.

    python benchmarks/causes.py                    every question
    python benchmarks/causes.py evidence digits    these

The tables go to ``benchmarks/results/causes.json``, from which ``benchmarks/results_page.py`` puts
them into ``docs/results.md``. Cosines, ratios of norms and dropped shares are those of
``braintrace.verify.diagnose``, for the task's loss on one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from nets import NETS
from results import CACHE, CLIP, PENALTY, WINDOW
from tables import table

import braintrace
from braintrace import nn, rules, tasks, verify
from braintrace.rules import Rule
from braintrace.tasks import Run, Task

PATH = Path(__file__).parent / 'results' / 'causes.json'
SEED, TESTED = 1, 300
DIGITS = 1197  # of the training part
CUES = 20  # inputs of evidence accumulation that show cues
AT_START, LEARNT = 'at the start', 'after {} updates of BPTT'
DECAYS = (0.5, 0.9, 0.99, 0.999)


class Case(NamedTuple):
    """A task on a net, and how it is trained."""

    task: Task
    net: str
    updates: int
    rate: float
    batch: int
    penalty: float = 0.0

    def model(self, seed: int = SEED):
        return NETS[self.net](self.task, False)

    def trained(self, rule: Rule | None, seeds=(SEED,), model=None, **more) -> Run:
        rates = optax.cosine_decay_schedule(self.rate, self.updates)
        return tasks.run(
            self.task,
            model or self.model,
            rule,
            optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(rates)),
            self.updates,
            seeds,
            batch_size=self.batch,
            penalty=(lambda extra: self.penalty * extra) if self.penalty else None,
            test=TESTED,
            **more,
        )

    def zeros(self):
        return jnp.zeros((self.batch, self.task.inputs))

    def learner(self, rule: Rule | None, trained: Run | None):
        """A learner with the parameters of a run, or those at the start."""
        brainstate.random.seed(SEED)
        made = braintrace.compile(self.model(), rule, self.zeros(), batch_size=self.batch)
        if trained is not None:
            trained.load_into(made, SEED)
        return made

    def sequences(self) -> tuple:
        """A batch, its targets beside the weights of its steps, and the loss of both."""
        xs, ys, mask = self.task.sample(jax.random.key(5), self.batch)

        def loss(outputs, target):
            y, weight = target
            return weight * self.task.loss(outputs[0] if self.penalty else outputs, y)

        return xs, (ys, mask / mask.sum()), loss

    def diagnosed(self, rule: Rule, trained: Run | None = None) -> verify.Diagnosis:
        return verify.diagnose(self.learner(rule, trained), *self.sequences())


def told(row: verify.ParameterRow) -> str:
    """A parameter's cosine and ratio of norms."""
    return f'{row.cosine:.2f}, {row.norm_ratio:.2g}'


def of_path(found: verify.Diagnosis, path: str) -> verify.ParameterRow:
    return next(row for row in found.rows if row.path.startswith(path))


def percent(share: float | None) -> str:
    return '-' if share is None else f'{100 * share:.0f} %'


class Apart(brainstate.nn.Module):
    """A linear map in two parts, so that a diagnosis tells them apart: of the first inputs, and of
    the others.
    """

    def __init__(self, first, others, bias):
        super().__init__()
        self.count = len(first)
        self.cues = nn.Linear(*first.shape, w_init=first, b_init=None)
        self.others = nn.Linear(*others.shape, w_init=others, b_init=bias)

    def update(self, x):
        return self.cues(x[:, : self.count]) + self.others(x[:, self.count :])


class Evidence(Case):
    """Evidence accumulation, with the weights of the left and the right cues apart; ``sign`` turns
    the effect of adaptation round.
    """

    sign = 1.0

    def model(self, seed: int = SEED):
        net = super().model(seed)
        weights, bias = (net.map.weight.value[name] for name in ('weight', 'bias'))
        net.map = Apart(weights[:CUES], weights[CUES:], bias)
        net.units.beta = self.sign * net.units.beta
        return net


class Turned(Evidence):
    sign = -0.1


def evidence() -> list[list]:
    """The weights of the cues, 105 steps before the answer, and what each rule learns."""
    case = Evidence(tasks.evidence(), 'LIF + ALIF 100, rates', 100, 1e-2, 32, PENALTY)
    ways = {'same step': rules.same_step()}
    ways |= {f'ES_D_RTRL {decay:g}': rules.es_d_rtrl(decay) for decay in DECAYS}
    ways['D_RTRL'] = rules.d_rtrl()
    learnt = case.trained(None)
    then = LEARNT.format(case.updates)
    head = ['rule', 'cues', 'biases', f'cues, {then}', 'biases then']
    rows = [[*head, 'cues where adaptation excites', 'accuracy after 200 updates']]
    for name, rule in ways.items():
        cells = [name]
        for found in (case.diagnosed(rule), case.diagnosed(rule, learnt)):
            cells += [
                told(of_path(found, path)) for path in ('map/cues/weight', 'map/others/weight/bias')
            ]
        turned = Turned(*case).diagnosed(rule)
        scores = case._replace(updates=200).trained(rule, (1, 2)).scores
        cells += [told(of_path(turned, 'map/cues/weight'))]
        rows.append([*cells, ' '.join(percent(score) for score in scores)])
    return rows


def truncated() -> list[list]:
    """The gradient of the last steps alone, beside that of all."""
    case = Evidence(tasks.evidence(), 'LIF + ALIF 100, rates', 100, 1e-2, 32, PENALTY)
    online, params, carry = case.learner(rules.d_rtrl(), None).pure()
    xs, ys, loss = case.sequences()

    @jax.jit
    def carries(carry):
        return jax.lax.scan(lambda c, x: (online.cell(params, c, x)[1], c), carry, xs)[1]

    every, found = carries(carry), {}
    for steps in (WINDOW, 64, 110, 130, 160, len(xs)):
        at = len(xs) - steps
        start = jax.tree.map(lambda c, at=at: c[at], every)
        last = jax.tree.map(lambda a, at=at: a[at:], (xs, ys))
        grads = verify.bptt_gradients(online.cell, params, start, *last, loss)
        weights = {'/'.join(path): value for path, value in grads.items()}
        parts = ('map/cues/weight', 'map/others/weight')
        found[steps] = [np.asarray(weights[part]['weight']).ravel() for part in parts]
    rows = [['last steps', 'cues', 'others']]
    for steps, grads in found.items():
        pairs = zip(grads, found[len(xs)], strict=True)
        rows.append([str(steps), *(beside(got, wanted) for got, wanted in pairs)])
    return rows


def beside(got: np.ndarray, wanted: np.ndarray) -> str:
    """Cosine and ratio of norms."""
    one, other = np.linalg.norm(got), np.linalg.norm(wanted)
    return f'{got @ wanted / max(one * other, 1e-30):.2f}, {one / other:.2g}'


PARTS = ('cues', 'others')
GATES = {'Wz': 'update gate', 'Wr': 'reset gate', 'Wh': 'candidate'}


def gradients(case: Case, layer: str, rule: Rule, trained: Run | None, **options) -> tuple:
    """The gradient of all weights of a layer, by a rule and by BPTT."""
    online, params, carry = case.learner(rule, trained).pure()
    state, (xs, ys, loss) = online.init(params, carry, case.zeros()), case.sequences()
    learn = online.sequence_grad(loss, reduction='sum', **options)
    got = jax.jit(learn)(params, state, xs, ys)[0]
    both = got, verify.bptt_gradients(online.cell, params, carry, xs, ys, loss)
    mine = [{path: grad for path, grad in grads.items() if path[0] == layer} for grads in both]
    return tuple(np.concatenate([*map(np.ravel, jax.tree.leaves(grads))]) for grads in mine)


def history(case: Case, rule: Rule, trained: Run | None) -> str:
    """What a rule adds to the same step, beside what BPTT adds, of all weights of the cell."""
    same, whole = gradients(case, 'cell', rules.same_step(), trained)
    return beside(gradients(case, 'cell', rule, trained)[0] - same, whole - same)


def characters() -> list[list]:
    """The weights of a GRU, at the start and when BPTT has learnt."""
    case = Case(tasks.characters(), 'GRU 64', 200, 1e-2, 32)
    learnt = {AT_START: None, LEARNT.format(case.updates): case.trained(None)}
    ways = {'same step': rules.same_step(), 'D_RTRL': rules.d_rtrl()}
    ways['whole credit'] = rules.d_rtrl(credit='whole')
    rows = [['rule', 'weights', *GATES.values(), 'dropped of the candidate', 'history alone']]
    for when, trained in learnt.items():
        for name, rule in ways.items():
            found = case.diagnosed(rule, trained)
            each = [of_path(found, f'cell/{gate}/weight/weight') for gate in GATES]
            alone = history(case, rule, trained) if name != 'same step' else '-'
            rows.append([name, when, *map(told, each), percent(each[-1].dropped), alone])
    return rows


class Match(Case):
    """Match to sample on a GRU, whose weights of the inputs are told apart by time: those at the
    sample, and those afterwards. Each holds the same numbers.
    """

    def learner(self, rule: Rule | None, trained: Run | None):
        brainstate.random.seed(SEED)
        net = self.model()
        of_net = braintrace.compile(net, None, self.zeros(), batch_size=self.batch)
        if trained is not None:
            trained.load_into(of_net, SEED)
        for gate in GATES:
            weights, bias = (getattr(net.cell, gate).weight.value[n] for n in ('weight', 'bias'))
            setattr(net.cell, gate, Apart(weights[: self.task.inputs], weights, bias))
        twice = jnp.concatenate([self.zeros()] * 2, 1)
        net.cell.in_size = twice.shape[1:]
        return braintrace.compile(net, rule, twice, batch_size=self.batch)

    def sequences(self) -> tuple:
        xs, *others = super().sequences()
        early = (jnp.arange(len(xs)) < len(xs) - 65)[:, None, None]
        return jnp.concatenate([xs * early, xs * ~early], -1), *others


EIGHT, FOUR = tasks.match_to_sample(8, 500, distractors=0), tasks.match_to_sample(4, 500)


def match_scores() -> list[list]:
    """What a GRU learns of match to sample."""
    rows = [['task', 'rule', 'accuracy']]
    ways = None, rules.d_rtrl(), rules.same_step()
    for task, seeds, tried in ((EIGHT, (1, 2), ways), (FOUR, (1,), ways[:2])):
        case = Case(task, 'GRU 64', 600, 5e-3, 32)
        for rule in tried:
            found = case.trained(rule, seeds)
            rows.append([task.name, found.method, shares(found.scores)])
    return rows


def match() -> list[list]:
    """The weights by which a GRU stores the sample, and those of everything else."""
    case = Match(EIGHT, 'GRU 64', 600, 5e-3, 32)
    learnt = {AT_START: None, LEARNT.format(case.updates): case.trained(None)}
    ways = {'same step': rules.same_step(), 'D_RTRL': rules.d_rtrl()}
    ways['whole credit, own'] = rules.d_rtrl(credit='whole', scope='own')
    rows = [['rule', 'weights', *(f'{name}, {part}' for name in GATES.values() for part in PARTS)]]
    for when, trained in learnt.items():
        for name, rule in ways.items():
            found = case.diagnosed(rule, trained)
            paths = (f'cell/{gate}/{part}/weight/weight' for gate in GATES for part in PARTS)
            rows.append([name, when, *(told(of_path(found, path)) for path in paths)])
    return rows


def windows() -> list[list]:
    """Exact windows on match to sample, whose spiking units read each other."""
    case = Case(tasks.match_to_sample(2, 500), 'LIF + ALIF 100, rates', 100, 5e-3, 32, PENALTY)
    learnt = {AT_START: None, LEARNT.format(case.updates): case.trained(None)}
    exact = {'window': WINDOW, 'inside': 'exact'}
    ways = {'D_RTRL': (rules.d_rtrl(), {})}
    ways['D_RTRL, whole credit'] = rules.d_rtrl(credit='whole'), {}
    ways[f'exact windows of {WINDOW}'] = rules.d_rtrl(), exact
    ways[f'truncated BPTT, {WINDOW}'] = rules.d_rtrl(), exact | {'keep_trace': False}
    rows = [['rule', *learnt]]
    for name, (rule, options) in ways.items():
        found = [gradients(case, 'map', rule, trained, **options) for trained in learnt.values()]
        rows.append([name, *(beside(*both) for both in found)])
    return rows


def digits() -> list[list]:
    """What is learnt by heart, and what of the held-out digits is known."""
    task, rows = tasks.digits('pixels'), []
    for name, rate in (('LRU 64', 3e-3), ('LRU 64, wide, noise', 5e-3)):
        found = Case(task, name, 1200, rate, 50).trained(None, (1, 2, 3))
        seen = found.validation[-1][1]
        cells = [f'{found.losses[:, -100:].mean():.3f}', shares(seen), shares(found.scores)]
        rows.append([f'{name}, {found.method}', *cells])
    rows += [[name, '-', *of_images] for name, of_images in at_once(task).items()]
    return [['net', 'loss of the last 100 updates', 'validation', 'test'], *rows]


def at_once(task: Task) -> dict[str, list[str]]:
    """Accuracies of learners that see all pixels at once, from the same training digits."""
    from sklearn.neural_network import MLPClassifier
    from sklearn.svm import SVC

    sizes = {'train': DIGITS, 'validation': TESTED, 'test': TESTED}
    parts = {part: task.sample(jax.random.key(0), size, part) for part, size in sizes.items()}
    (xs, ys), *held = [(np.asarray(b.xs[..., 0]).T, np.asarray(b.ys[0])) for b in parts.values()]
    made = {'perceptron of 64 units, all pixels at once': MLPClassifier((64,), max_iter=400)}
    made['support vectors, all pixels at once'] = SVC(C=10, gamma=0.5)
    found = {}
    for name, learner in made.items():
        learner.set_params(random_state=0).fit(xs, ys)
        found[name] = [f'{100 * learner.score(*part):.1f}' for part in held]
    return found


def shares(scores) -> str:
    """Accuracies of some seeds, and their mean."""
    return ' '.join(f'{100 * s:.1f}' for s in scores) + f' (mean {100 * np.mean(scores):.1f})'


QUESTIONS = {
    f.__name__: f for f in (evidence, truncated, windows, match_scores, match, characters, digits)
}


def main():
    jax.config.update('jax_compilation_cache_dir', str(CACHE))
    kept = json.loads(PATH.read_text(encoding='utf-8')) if PATH.exists() else {}
    for name in sys.argv[1:] or QUESTIONS:
        kept[name] = QUESTIONS[name]()
        print(f'{name}\n\n{table(kept[name][0], kept[name][1:])}\n', flush=True)
        PATH.write_text(json.dumps(kept, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
    main()
