"""One measurement in a fresh process, printed as JSON: the first call, peak memory, ...

python benchmarks/once.py first "d_rtrl trace" rnn 256 256 100       the column of columns.py
python benchmarks/once.py compile lstm4 bptt|kept|dropped      what the first call of a stack costs
python benchmarks/once.py memory d_rtrl|es_d_rtrl|bptt 40000
python benchmarks/once.py precision rnn 256 256 100
python benchmarks/once.py window drop|trace gru 256 64 200     the window that 'auto' chooses
python benchmarks/once.py calls                                microseconds of calls from Python
python benchmarks/once.py deleted                              what is left of models that are gone
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from functools import partial
from unittest import mock

import brainstate
import jax
import jax.numpy as jnp
from cells import OUTPUTS, Spec, cell, data, initial, loss_of, loss_over
from columns import named
from runner import seconds
from worker import learner_of, made, sequence_grad

import braintrace


def first(column, kind, *numbers):
    """Seconds from the model to its first gradient, called as its column says."""
    column = named(column)
    jax.block_until_ready(jnp.ones(3) + 1)
    spec = kind, *map(int, numbers)
    call = lambda: made(column.task, column.call, spec, **column.arguments)()
    return {'seconds': seconds(call)}


STACKS = {
    'gru': Spec('gru', 256, 64, 100),
    'lstm4': Spec('lstm', 128, 128, 100, 16, 4),
    'mingru16': Spec('mingru', 128, 128, 100, 16, 16),
}


def stack(name: str):
    """``(step, params, hidden, xs, ys)`` of a network."""
    if spec := STACKS.get(name):
        return partial(cell, spec), *initial(spec), *data(spec)
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(
        braintrace.nn.MambaCell(64, state_size=16), braintrace.nn.Linear(64, 10)
    )
    xs, ys = jnp.ones((100, 16, 64)), jnp.ones((100, 16, 10))
    online, params, hidden = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=16).pure()
    return online.cell, params, hidden, xs, ys


def compiling(name: str, method: str):
    """Processor seconds of tracing and of XLA's compilation of the gradient of a sequence; the
    operations of the program that JAX gives to XLA, and the instructions of what XLA makes of it.
    """
    step, params, hidden, xs, ys = stack(name)
    found = {}

    def timed(what: str, fn):
        start = time.process_time()
        result = fn()
        found[what] = time.process_time() - start
        return result

    jax.block_until_ready(jnp.ones(3) + 1)
    gradient, state = jax.grad(partial(loss_over, step)), hidden
    if method != 'bptt':
        online = braintrace.functional.online(step, braintrace.rules.d_rtrl())
        state = timed('init', lambda: online.init(params, hidden, xs[0]))
        gradient = online.sequence_grad(loss_of, keep_trace=method == 'kept')
    traced = timed('tracing', lambda: jax.jit(gradient).trace(params, state, xs, ys))
    lowered = timed('lowering', traced.lower)
    compiled = timed('compiling', lowered.compile)
    found['operations'] = lowered.as_text().count(' = ')
    found['instructions'] = sum(' = ' in line for line in compiled.as_text().splitlines())
    found['temporary'] = compiled.memory_analysis().temp_size_in_bytes
    return found


def memory(rule, steps):
    """Peak bytes of a process over a sequence, and its seconds. Inputs are made inside the step, so
    that only the method's memory grows.
    """
    spec, key = Spec('gru', 64, 16, int(steps)), jax.random.key(0)

    def drawn(i, _):
        one, two = jax.random.split(jax.random.fold_in(key, i))
        x = jax.random.normal(one, (spec.batch, spec.inputs))
        return x, jax.random.normal(two, (spec.batch, OUTPUTS))

    every = jnp.arange(spec.steps)
    if rule == 'bptt':
        gradient = jax.jit(jax.grad(partial(loss_over, partial(cell, spec), draw=drawn)))
        run = lambda: gradient(*initial(spec), every, every)
    else:
        options = {'decay_or_rank': 0.9} if rule == 'es_d_rtrl' else {}
        learner, *_ = learner_of(spec._replace(steps=1), rule, **options)

        def step_fn(i):
            x, y = drawn(i, i)
            return loss_of(learner(x), y)

        run = lambda: learner.etrace_grad(every, step_fn=step_fn)
    took = seconds(run)
    return {'peak': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 'seconds': took}


def precision(kind, *numbers):
    """Relative error of each parameter's gradient with traces in bfloat16, against float32, where
    the trace is written at every step.
    """

    def gradient(**options):
        learner, xs, ys = learner_of(Spec(kind, *map(int, numbers)), 'd_rtrl', **options)
        step_fn = lambda x, y: loss_of(learner(x), y)
        return learner.etrace_grad(xs, ys, step_fn=step_fn, window=1).grads

    exact, rounded = gradient(), gradient(trace_dtype=jnp.bfloat16)
    return {
        'errors': {
            '/'.join(k): float(jnp.linalg.norm(rounded[k] - g) / jnp.linalg.norm(g))
            for k, g in exact.items()
        }
    }


def window(carry, kind, *numbers):
    """The steps in a window of ``window='auto'``."""
    from braintrace._windows import runs

    choose, found = runs.choose_window, []

    def seen(*args):
        found.append(choose(*args))
        return found[-1]

    run, given = sequence_grad(Spec(kind, *map(int, numbers)), carry == 'trace')
    with mock.patch.object(runs, 'choose_window', seen):
        jax.make_jaxpr(run)(*given)
    return {'window': found[0]}


def calls():
    """Microseconds of processor time of a call from Python of a GRU of 8 units, B = T = 2, the
    least of 300, and those of its pure functions in a jit; how often nine lengths of a sequence are
    traced again.
    """
    import optax

    size, traced = 8, [0]
    model = brainstate.nn.Sequential(
        braintrace.nn.GRUCell(size, size), braintrace.nn.Linear(size, 2)
    )
    xs, ys = jnp.ones((2, 2, size)), jnp.ones((2, 2, 2))
    learner, x = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=2), jnp.ones((2, size))

    def step_fn(x, y):
        traced[0] += 1
        return loss_of(learner(x), y)

    online, params, carry = learner.pure()
    state = online.init(params, carry, x)
    pure = jax.jit(online.sequence_grad(loss_of))

    def least(call) -> float:
        return 1e6 * min(seconds(call, time.process_time) for _ in range(300))

    how = {'step_fn': step_fn, 'optimizer': optax.sgd(1e-3)}
    found = {
        'learner(x)': least(lambda: learner(x)),
        'etrace_grad': least(lambda: learner.etrace_grad(xs, ys, step_fn=step_fn)),
        'etrace_train': least(lambda: learner.etrace_train(xs, ys, **how)),
        'functional in jit': least(lambda: pure(params, state, xs, ys)),
    }
    for _ in range(2):  # epochs
        before = traced[0]
        for length in range(3, 12):
            many = jnp.ones((length, 2, size)), jnp.ones((length, 2, 2))
            learner.etrace_grad(*many, step_fn=step_fn)
    return found | {'traces of the second epoch': traced[0] - before}


def deleted():
    """Bytes of JAX arrays that are alive after 1, 5 and 10 models that close over 1 MiB each were
    trained and deleted.
    """

    def trained():
        held = jnp.ones((512, 512))

        def cell(params, h, x):
            h = jnp.tanh(braintrace.matmul(x, params['w']) + 0.9 * h) + held[0, :4]
            return h, h

        online = braintrace.functional.online(cell)
        params, h, xs = {'w': jnp.ones((3, 4))}, jnp.zeros((2, 4)), jnp.ones((5, 2, 3))
        state = online.init(params, h, xs[0])
        run = jax.jit(online.sequence_grad(lambda y, _: jnp.sum(y)))
        jax.block_until_ready(run(params, state, xs, xs))

    found = {}
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    for number in range(1, 11):
        trained()
        gc.collect()
        if number in (1, 5, 10):
            found[number] = sum(a.nbytes for a in jax.live_arrays()) - before
    return found


MEASUREMENTS = {f.__name__: f for f in (first, memory, precision, window, calls, deleted)}
MEASUREMENTS['compile'] = compiling

if __name__ == '__main__':
    what, *rest = sys.argv[1:]
    print(json.dumps(MEASUREMENTS[what](*rest)))
