"""One process of a benchmark: it makes tasks and times one run of them when it is asked, so that several packages take turns.

It reads a JSON object a line from standard input and answers in kind: ``{"make": name, "task": ..., "spec": [...], ...}`` answers
when the task is compiled and has run once, ``{"time": name}`` runs it once more. It knows only public names of ``braintrace``.
"""
from __future__ import annotations

import json
import sys
import time

import brainstate
import jax
import jax.numpy as jnp
from models import Network, Spec, cell, data, initial, loss_of

import braintrace

STEP_SIZE = 1e-3


def learner_of(spec: Spec, rule: str, **options):
    learner = (braintrace.D_RTRL if rule == 'd_rtrl' else braintrace.pp_prop)(Network(spec), **options)
    xs, ys = data(spec)
    learner.compile_graph(xs[0])
    return learner, xs, ys


def grad(spec, rule='d_rtrl', options=(), **call):
    """``etrace_grad`` over the sequence; what is given beside the rule goes to the call."""
    if rule == 'es_d_rtrl':
        options = {'decay_or_rank': 0.9, **dict(options)}
    learner, xs, ys = learner_of(spec, rule, **dict(options))

    def step_fn(x, y):
        return jax.vmap(loss_of)(learner(braintrace.MultiStepData(x)), y) if 'chunk_size' in call else loss_of(learner(x), y)
    return lambda: learner.etrace_grad(xs, ys, step_fn=step_fn, **call)


def bptt(spec):
    """Reverse mode through a scan of the same model."""
    params, hidden = initial(spec)
    xs, ys = data(spec)

    @jax.jit
    def gradient(params, hidden, xs, ys):
        def loss(params):
            def step(hidden, at):
                y, hidden = cell(spec, params, hidden, at[0])
                return hidden, loss_of(y, at[1])
            return jnp.mean(jax.lax.scan(step, hidden, (xs, ys))[1])
        return jax.grad(loss)(params)
    return lambda: gradient(params, hidden, xs, ys)


def bare(spec):
    """The model alone in a scan."""
    params, hidden = initial(spec)
    xs, _ = data(spec)

    @jax.jit
    def run(params, hidden, xs):
        def step(hidden, x):
            y, hidden = cell(spec, params, hidden, x)
            return hidden, y
        return jax.lax.scan(step, hidden, xs)
    return lambda: run(params, hidden, xs)


def evolve(spec):
    """Evaluation: hidden states advance, the trace stays."""
    learner, xs, _ = learner_of(spec, 'd_rtrl')
    return lambda: learner.etrace_evolve(xs, trace=False)


def train(spec, options=(), **call):
    """``etrace_train``: a gradient and an update after each ``update_every`` steps."""
    import optax
    learner, xs, ys = learner_of(spec, 'd_rtrl', **dict(options))

    def step_fn(x, y):
        return loss_of(learner(x), y)
    kept = [None]
    optimizer = optax.sgd(STEP_SIZE)

    def run():
        losses, kept[0] = learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optimizer, opt_state=kept[0], **call)
        return losses
    return run


def own_loop(spec):
    """A user's loop: reverse mode around each call of the learner, and an update by hand."""
    learner, xs, ys = learner_of(spec, 'd_rtrl')
    weights = learner.states(brainstate.ParamState)

    def step(x, y):
        grads, loss = brainstate.transform.grad(lambda: loss_of(learner(x), y), weights, return_value=True)()
        for key, g in grads.items():
            weights[key].value = weights[key].value - STEP_SIZE * g
        return loss

    @brainstate.transform.jit
    def run(xs, ys):
        return brainstate.transform.for_loop(step, xs, ys)
    return lambda: run(xs, ys)


def read_and_write(spec):
    """One donated read and write of an array of the trace's size; the time is that of ``spec.steps`` of them."""
    bump = jax.jit(lambda e: e * 0.5 + 1.0, donate_argnums=0)
    kept = [jnp.zeros(spec.trace_numbers, jnp.float32)]

    def run():
        for _ in range(spec.steps):
            kept[0] = jax.block_until_ready(bump(kept[0]))
        return ()
    return run


def product(spec):
    """One product of two square matrices; the time is that of as many operations as the gradient of the sequence needs at least."""
    size = 2048
    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    share = spec.operations / (2 * size ** 3)

    def run():
        jax.block_until_ready(multiply(a, a))
    run.share = share
    return run


TASKS = {f.__name__: f for f in (grad, bptt, bare, evolve, train, own_loop, read_and_write, product)}


def timed(run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * getattr(run, 'share', 1)


def main():
    runs = {}
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            if 'make' in ask:
                name = ask.pop('make')
                start = time.perf_counter()
                run = TASKS[ask.pop('task')](Spec(*ask.pop('spec')), **ask)
                timed(run)
                answer = {'seconds': time.perf_counter() - start}
                runs[name] = run
                timed(run)
            elif 'forget' in ask:
                runs.clear()
                jax.clear_caches()
                answer = {}
            else:
                answer = {'seconds': timed(runs[ask['time']])}
        except Exception as error:
            answer = {'error': f'{type(error).__name__}: {str(error)[:300]}'}
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
