"""One process of a benchmark: it makes tasks, and times a run of a task on request.

So several packages can take turns. Each line of standard input is a JSON object, and so is the
answer. ``{"make": name, "task": ..., "call": ..., "spec": [...], ...}`` is answered when the task
is compiled and has run twice, ``{"time": name}`` runs it once more, ``{"versions": true}`` gives
the versions of packages, ``{"forget": true}`` drops all tasks. A call that traces the model again
is an error, since its time would include the tracing, and so is a gradient of zeros. Only public
names of ``braintrace`` are used.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from functools import partial

import brainstate
import by_hand as expert
import jax
import jax.numpy as jnp
from cells import Network, Spec, cell, data, initial, loss_of, loss_over, traced
from runner import seconds

import braintrace

STEP_SIZE = 1e-3


def learner_of(spec: Spec, rule: str, **options):
    learner = (braintrace.D_RTRL if rule == 'd_rtrl' else braintrace.ES_D_RTRL)(
        Network(spec), **options
    )
    xs, ys = data(spec)
    learner.compile_graph(xs[0])
    return learner, xs, ys


def grad(spec, rule='d_rtrl', options=(), windows=None, then_reset=False, **call):
    """``etrace_grad`` over the sequence; with ``windows``, the public package splits it so."""
    options = {**({'decay_or_rank': 0.9} if rule == 'es_d_rtrl' else {}), **dict(options)}
    if windows:
        options['vjp_method'], call['chunk_size'] = 'multi-step', spec.steps // windows
    learner, xs, ys = learner_of(spec, rule, **options)

    def step_fn(x, y):
        if windows:
            return jax.vmap(loss_of)(learner(braintrace.MultiStepData(x)), y)
        return loss_of(learner(x), y)

    def run(xs, ys):
        found = learner.etrace_grad(xs, ys, step_fn=step_fn, **call)
        if then_reset:
            learner.reset_state()
        return getattr(found, 'grads', found)  # the public package returns the gradients alone

    return run, (xs, ys)


def bptt(spec, unroll=1):
    """Reverse mode through a scan of the same model."""
    loss = partial(loss_over, partial(cell, spec), unroll=unroll)
    return jax.grad(loss), (*initial(spec), *data(spec))


def by_hand(spec, associative=False):
    """The same gradient by the code of an expert."""
    gradient = partial(expert.gradient, spec, associative=associative)
    return gradient, (*initial(spec), *data(spec))


def online(spec, rule=None, **options):
    """A learner of pure functions, and what its calls over a sequence take."""
    learner = braintrace.functional.online(
        partial(cell, spec), rule or braintrace.rules.d_rtrl(), **options
    )
    (params, hidden), (xs, ys) = initial(spec), data(spec)
    return learner, (params, learner.init(params, hidden, xs[0]), xs, ys)


def sequence_grad(spec, keep):
    """D_RTRL of pure functions; ``keep`` gives the new state too."""
    learner, given = online(spec)
    gradient = learner.sequence_grad(loss_of, keep_trace=keep)

    def run(*given):
        grads, _, _, state = gradient(*given)
        return (grads, state) if keep else grads

    return run, given


def bare(spec):
    """The model alone in a scan."""

    def run(params, hidden, xs):
        def step(hidden, x):
            y, hidden = cell(spec, params, hidden, x)
            return hidden, y

        return jax.lax.scan(step, hidden, xs)

    return run, (*initial(spec), data(spec)[0])


def evolve(spec):
    """Evaluation: hidden states advance, the trace stays."""
    learner, xs, _ = learner_of(spec, 'd_rtrl')
    return lambda xs: learner.etrace_evolve(xs, trace=False), (xs,)


def train(spec, options=(), **call):
    """``etrace_train``: a gradient and an update after each ``update_every`` steps."""
    import optax

    learner, xs, ys = learner_of(spec, 'd_rtrl', **dict(options))

    def step_fn(x, y):
        return loss_of(learner(x), y)

    kept = [None]
    optimizer = optax.sgd(STEP_SIZE)

    def run(xs, ys):
        found = learner.etrace_train(
            xs, ys, step_fn=step_fn, optimizer=optimizer, opt_state=kept[0], **call
        )
        kept[0] = found.opt_state
        return found.losses

    return run, (xs, ys)


def own_loop(spec, options=()):
    """A user's loop: reverse mode around each call of the learner, and an update by hand."""
    learner, xs, ys = learner_of(spec, 'd_rtrl', **dict(options))
    weights = learner.states(brainstate.ParamState)

    def step(x, y):
        grads, loss = brainstate.transform.grad(
            lambda: loss_of(learner(x), y), weights, return_value=True
        )()
        for key, g in grads.items():
            weights[key].value = weights[key].value - STEP_SIZE * g
        return loss

    return lambda xs, ys: brainstate.transform.for_loop(step, xs, ys), (xs, ys)


def eager(spec):
    """Each step a call of the learner from Python."""
    learner, xs, _ = learner_of(spec, 'd_rtrl')
    steps = list(xs)

    def run():
        for x in steps:
            y = learner(x)
        return y

    return run, ()


def read_and_write(spec):
    """``spec.steps`` reads and writes of an array of the trace's size, in place, in one program."""

    def all_steps(e):
        return jax.lax.fori_loop(0, spec.steps, lambda _, e: e * 0.5 + 1.0, e)

    bump = jax.jit(all_steps, donate_argnums=0)
    kept = [jnp.zeros(spec.trace_numbers, jnp.float32)]

    def run():
        kept[0] = jax.block_until_ready(bump(kept[0]))
        return ()

    return run, ()


def product(spec):
    """One product of two square matrices, whose time is scaled to the least number of operations of
    the sequence's gradient.
    """
    size = 2048
    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    share = spec.operations / (2 * size**3)

    def run():
        jax.block_until_ready(multiply(a, a))

    run.share = share
    return run, ()


MODELS = (grad, bptt, by_hand, sequence_grad, bare, evolve, train, own_loop, eager)
TASKS = {f.__name__: f for f in (*MODELS, read_and_write, product)}
CALLS = {
    'brainstate.transform.jit': brainstate.transform.jit,
    'jax.jit': jax.jit,
    'as it is': lambda run: run,
}


def untaught(grads) -> list[str]:
    """The recurrent weights whose gradient is zero everywhere. A readout has one in no version."""
    found = jax.tree_util.tree_leaves_with_path(grads)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in found}
    return [name for name, leaf in named.items() if 'out' not in name and not jnp.any(leaf)]


def made(task, call, spec, **arguments):
    """Make a task, called as its column says, into a function that returns its seconds."""
    run, given = TASKS[task](Spec(*spec), **arguments)
    called, share = CALLS[call](run), getattr(run, 'share', 1)

    def once() -> float:
        return seconds(lambda: called(*given)) * share

    once.run = lambda: called(*given)
    return once


def answer(ask: dict, runs: dict) -> dict:
    """The answer to one line; ``runs`` keeps the tasks by name."""
    if 'make' in ask:
        name = ask['make']
        once = made(**{key: value for key, value in ask.items() if key != 'make'})
        once()
        once()
        runs[name] = once
        if ask['task'] == 'grad' and (dead := untaught(once.run())):
            return {'error': f'the gradient of {dead} is zero everywhere'}
        return {}
    if 'time' in ask:
        before = traced[0]
        took = runs[ask['time']]()
        if traced[0] != before:
            return {'error': 'the model was traced again; wrap the call in jit'}
        return {'seconds': took}
    if 'versions' in ask:
        versions = {n: importlib.metadata.version(n) for n in ('jax', 'brainstate')}
        versions['braintrace'] = braintrace.__version__
        kind = jax.devices()[0].device_kind
        return {'python': platform.python_version(), 'device': kind, **versions}
    runs.clear()
    jax.clear_caches()
    return {}


def main():
    if sys.argv[1:] == ['one-core']:  # before XLA makes its threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs = {}
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line), runs)
        except Exception as error:  # a package may raise anything; the page shows it
            answered = {'error': f'{type(error).__name__}: {str(error)[:300]}'}
        print(json.dumps(answered), flush=True)


if __name__ == '__main__':
    main()
