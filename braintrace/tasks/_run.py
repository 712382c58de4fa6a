"""Train on a task: several seeds in one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._learner import ETraceLearner
from .._rules import Rule
from .._signatures import is_int, public
from .._windows import check_optimizer, check_progress, signature
from ..errors import OptionError, StructureError
from ..functional import OnlineLearner
from ._loop import Loop
from ._models import HELD, long_term_states, made
from ._task import Task, check_draw, check_real, check_whole
from ._training import Options, Training


@dataclass(frozen=True)
class Run:
    """What :func:`run` found; arrays have the seeds in axis 0.

    - ``task``, ``seeds``, ``updates``: as they were given; ``method``: the rule in words
    - ``params``: the parameters after the last update; of modules also states that no step writes
      and, as ``('~by_seed', ...)``, constants that follow the seed
    - ``losses``: of each update, of a stream of each step
    - ``scores``: of the test part after the last update; of a stream those that it had on the way
    - ``validation``: pairs of a number of updates and the scores then, twenty at most, none of a
      stream
    - ``seconds``, without ``compile_seconds``
    - ``memory``: bytes that the compiled program needs for one seed besides its arguments and
      results

    >>> import brainstate, optax
    >>> from braintrace import nn, rules, tasks
    >>> model, sgd = lambda seed: nn.LeakyRateReadout(2, 1, tau=4.0), optax.sgd(1e-2)
    >>> found = tasks.run(tasks.adding(4), model, rules.d_rtrl(), sgd, updates=3)
    >>> found.losses.shape, found.scores.shape
    ((1, 3), (1,))
    """

    task: Task
    method: str
    seeds: tuple[int, ...]
    params: Any
    losses: np.ndarray
    scores: np.ndarray
    updates: int
    validation: tuple[tuple[int, np.ndarray], ...]
    seconds: float
    compile_seconds: float
    memory: int

    def params_of(self, seed: int) -> Any:
        """The parameters that one of the seeds came to; for another ``seed``
        :class:`braintrace.errors.OptionError`.
        """
        if seed not in self.seeds:
            raise OptionError(f'seed is {seed!r}; the seeds of this run are {self.seeds}.')
        return jax.tree.map(lambda p: p[self.seeds.index(seed)], self.params)

    def load_into(self, learner: ETraceLearner, seed: int) -> None:
        """Give a learner of ``model(seed)`` the parameters of this seed, and the states that no
        step writes.

        Raises :class:`braintrace.errors.OptionError` for another ``learner`` or ``seed``,
        :class:`braintrace.errors.StructureError` for a learner of another model.
        """
        if not isinstance(learner, ETraceLearner):
            raise OptionError(
                f'learner is {type(learner).__name__}; give what braintrace.compile returns. A '
                "model of pure functions takes run.params_of(seed), and the adapter's way back."
            )
        params = self.params_of(seed)
        states = {**learner.param_states, **long_term_states(learner.model)}
        if isinstance(params, dict):  # constants are in the learner's model
            params = {path: value for path, value in params.items() if path[0] != HELD}
        if not isinstance(params, dict) or params.keys() != states.keys():
            raise StructureError(
                f'the learner has the parameters {list(states)}, and the run has others: give a '
                'learner of the model that was trained.'
            )
        for path, value in params.items():
            if signature(value) != signature(states[path].value):
                raise StructureError(
                    f'parameter {"/".join(path)} of the learner has another shape, dtype or unit '
                    'than in the run: give a learner of the model that was trained.'
                )
        for path, value in params.items():
            states[path].value = value

    def __str__(self) -> str:
        scores = [self.task.shown(float(s)) for s in np.sort(self.scores)]
        spread = f' ({scores[0]} to {scores[-1]}, {len(scores)} seeds)' if len(scores) > 1 else ''
        mean, floor = self.task.shown(float(self.scores.mean())), self.task.shown(self.task.floor)
        steps = f'{self.losses.shape[1]:,} steps, ' if self.task.stream else ''
        done = f'{steps}{self.updates:,} updates'
        return f'{self.task.name}, {self.method}: {mean}{spread}, floor {floor}, {done}'


@public('braintrace.tasks.run')
def run(
    task: Task,
    model: Callable[[int], Any],
    rule: Rule | str | None,
    optimizer,
    updates: int | None = None,
    seeds: Iterable[int] = (0,),
    *,
    batch_size: int = 32,
    window: int | None = None,
    update_every: int | None = None,
    penalty: Callable | None = None,
    until: float | None = None,
    test: int = 300,
    progress: bool | Callable = False,
) -> Run:
    """Train a model on a task from each of some seeds, all of them in one compiled program.

    Parameters
    ----------
    task : Task
        What is learned.
    model : function
        ``model(seed)`` returns a ``brainstate.nn.Module`` that takes a batch, made after
        ``brainstate.random.seed(seed)``, or a triple ``(cell, params, carry)`` of pure functions,
        as :mod:`braintrace.adapters` make it. The modules of two seeds may differ in parameters, in
        states and in arrays that they hold, such as a wiring, and triples in params and carry;
        others are refused. Its outputs are those that the task asks for, or a pair of them and
        whatever ``penalty`` reads.
    rule : Rule, str or None
        A value of :mod:`braintrace.rules`, or the name of one that needs no arguments; None:
        back-propagation through time.
    optimizer : optax.GradientTransformation
        Nothing else is clipped.
    updates : int, optional
        Number of updates, each of new sequences from the initial carry on; a stream has none.
    seeds : ints
        One run for each.
    batch_size : int
        Number of sequences of an update.
    window : int, optional
        With a rule its exact windows of so many steps; without one, BPTT is truncated after them.
    update_every : int, optional
        An update after each so many steps; for a stream, which has no end, 1 unless ``window``
        says more.
    penalty : function, optional
        ``penalty(extra) -> scalar`` is added to the loss at all steps, whatever the task's mask is.
    until : float, optional
        Stop when the validation score of every seed is that good; it is looked at twenty times.
    test : int
        Number of sequences that are scored.
    progress : bool or function
        True shows a line on stderr each time. ``progress(updates, losses)`` is called with the
        number of updates so far (of steps, for a stream) and the losses since the last call, one
        row for each seed.

    Raises
    ------
    OptionError
        Arguments do not fit the task or each other.
    StructureError
        Outputs are not those of the task, models differ in code, triples in constants, or a step
        writes a ``brainstate.LongTermState``.

    Notes
    -----
    ``fit`` of ``brainstate.environ`` is True, and False where a score is taken. The generators of
    ``brainstate.random`` and of NumPy are left as they were. Ctrl-C ends a run after the updates
    that run, with a ``KeyboardInterrupt`` whose ``so_far`` is ``(params, losses)``.

    Examples
    --------
    >>> import brainstate, optax
    >>> from braintrace import nn, tasks
    >>> task = tasks.adding(4)
    >>> class Network(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell, self.readout = nn.GRUCell(2, 16), nn.Linear(16, 1)
    ...     def update(self, x):
    ...         return self.readout(self.cell(x))
    >>> model, adam = lambda seed: Network(), optax.adam(1e-2)
    >>> found = tasks.run(task, model, 'd_rtrl', adam, updates=100, seeds=(1, 2))
    >>> found.scores.shape, bool((found.scores < task.floor / 2).all())
    ((2,), True)
    """
    options = Options(batch_size, window, update_every, penalty)
    _check(task, rule, optimizer, updates, options)
    _check_looks(task, until, test, progress)
    check_draw(task, batch_size)
    seeds, length = _numbers(seeds), task.steps if updates is None else updates
    found, seen = [], []
    with brainstate.environ.context(fit=True):
        with brainstate.random.seed_context(seeds[0]):
            learner, *values = made(model, seeds, rule, _zeros(task, batch_size))
        loop = Loop(
            Training(task, learner, optimizer, options), values, seeds, length, progress is True
        )
        for done, at, losses in loop.pieces(_zeros(task, batch_size)):
            found.append(losses)
            if not task.stream:
                seen.append((done, loop.scores(at.params, 'validation', test)))
            if callable(progress):
                progress(done, losses)
            elif progress:
                loop.show(done, losses, seen[-1][1] if seen else None)
            if until is not None and task.reached(seen[-1][1], until):
                break
        losses = np.concatenate(found, 1)
        scores = loop.on_the_way(losses) if task.stream else loop.scores(at.params, 'test', test)
    updates = -(-done // loop.unit)
    costs = loop.seconds, loop.compile_seconds, loop.memory
    method = _method(learner, options)
    return Run(task, method, seeds, at.params, losses, scores, updates, tuple(seen), *costs)


def _method(learner: OnlineLearner, options: Options) -> str:
    """The way to a gradient in words."""
    rule, window, every = learner.rule, options.window, options.every
    if rule is None:
        return 'BPTT' if window is None else f'truncated BPTT, {window}'
    given = ''.join(repr(rule).partition('(')[1:]).replace('()', '')
    words = [rule.spelled or f'{rule.name}{given}']
    if rule.traces and not learner.graph.hidden_param_op_relations:
        words.append('no weight has a trace')
    words += [] if window is None else [f'exact windows of {window}']
    words += [] if every is None else [f'an update each {every} steps']
    return ', '.join(words)


def _zeros(task: Task, batch: int) -> jax.Array:
    """Inputs of a step."""
    xs = jax.eval_shape(lambda: task.sample(jax.random.key(0), batch)).xs
    return jnp.zeros(xs.shape[1:], xs.dtype)


def _numbers(seeds) -> tuple[int, ...]:
    """Seeds as a tuple of ints."""
    found = tuple(seeds) if isinstance(seeds, Iterable) else ()
    fit = all(is_int(s, 0) and s < 2**31 for s in found)
    if not found or not fit or len({*found}) < len(found):
        raise OptionError(f'seeds is {seeds!r}; give different ints from 0 to 2^31 - 1.')
    return tuple(map(int, found))


def _check(task: Task, rule, optimizer, updates, options: Options) -> None:
    if not isinstance(task, Task):
        raise OptionError(f'task is {task!r}; give a Task, such as braintrace.tasks.adding(100).')
    if rule is not None and not isinstance(rule, Rule | str):
        raise OptionError(
            f'rule is {rule!r}; give a value of braintrace.rules, such as '
            "braintrace.rules.d_rtrl(), the name of one ('d_rtrl'), or None for back-propagation "
            'through time.'
        )
    check_optimizer(optimizer)
    window, every = options.window, options.every
    for name, value in (('batch_size', options.batch), ('window', window), ('update_every', every)):
        if value is not None or name == 'batch_size':
            check_whole(name, value)
    if task.stream and updates is not None:
        raise OptionError(
            f'updates is {updates!r}, but {task.name} is a stream, along which parameters change: '
            'leave updates out, and choose the length of the stream in its task.'
        )
    if task.stream and rule is None and window is None:
        raise OptionError(
            f'rule is None, but {task.name} is a stream, whose end does not come: give the window '
            'of truncated back-propagation.'
        )
    if not task.stream:
        check_whole('updates', updates)
        if max(window or 1, every or 1) > task.steps:
            name, value = ('window', window) if window else ('update_every', every)
            raise OptionError(
                f'{name} is {value}, but {task.name} has {task.steps} steps: give no more.'
            )
    if window is not None and every not in (None, window):
        raise OptionError(
            f'update_every is {every} and window {window}; an update ends a window, so give one of '
            'them.'
        )
    if options.penalty is not None and not callable(options.penalty):
        raise OptionError(f'penalty is {options.penalty!r}; give a function of the extra outputs.')


def _check_looks(task: Task, until, test, progress) -> None:
    check_whole('test', test)
    check_progress(progress)
    if until is not None:
        check_real('until', until)
        if task.metric == 'accuracy' and until > 1:
            raise OptionError(f'until is {until}, but an accuracy is a share: give one up to 1.')
        if task.stream:
            raise OptionError(
                f'until is {until}, but {task.name} is a stream, which has no validation part: '
                'leave until out.'
            )
