"""One measurement in a fresh process, printed as JSON: the first call, importing, peak memory, ...

python benchmarks/once.py first "d_rtrl trace" rnn 256 256 100       the column of columns.py
python benchmarks/once.py import
python benchmarks/once.py memory d_rtrl|bptt 40000
python benchmarks/once.py precision rnn 256 256 100
python benchmarks/once.py eager gru 64 64 500                  the number of calls last
python benchmarks/once.py window drop|trace gru 256 64 200     the window that 'auto' chooses
python benchmarks/once.py calls                                microseconds of calls from Python
python benchmarks/once.py deleted                              what is left of models that are gone
"""

from __future__ import annotations

import json
import resource
import sys
import time


def first(column, kind, *numbers):
    """Seconds from the model to its first gradient, called as its column says."""
    import jax
    from columns import named
    from worker import made

    column = named(column)
    jax.block_until_ready(jax.numpy.ones(3) + 1)
    start = time.perf_counter()
    made(column.task, column.call, (kind, *map(int, numbers)), **column.arguments)()
    return {'seconds': time.perf_counter() - start}


def importing():
    """Seconds of importing brainstate, and of importing braintrace after it."""
    start = time.perf_counter()
    import brainstate  # noqa: F401

    middle = time.perf_counter()
    import braintrace  # noqa: F401

    return {'brainstate': middle - start, 'braintrace': time.perf_counter() - middle}


def memory(rule, steps):
    """Peak bytes of a process over a sequence, and its seconds. Inputs are made inside the step, so
    that only the method's memory grows.
    """
    import jax
    from models import Spec

    spec = Spec('gru', 64, 16, int(steps))
    run = through_time(spec) if rule == 'bptt' else online(spec, rule)
    start = time.perf_counter()
    jax.block_until_ready(run())
    seconds = time.perf_counter() - start
    return {'peak': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 'seconds': seconds}


def inputs_of(spec):
    """A function that draws the input and the target of a step from its number."""
    import jax
    from models import OUTPUTS

    key = jax.random.key(0)

    def inputs(i):
        one, two = jax.random.split(jax.random.fold_in(key, i))
        x = jax.random.normal(one, (spec.batch, spec.inputs))
        return x, jax.random.normal(two, (spec.batch, OUTPUTS))

    return inputs


def through_time(spec):
    """The gradient by reverse mode, as a function to call."""
    import jax
    import jax.numpy as jnp
    from models import cell, initial, loss_of

    (params, hidden), inputs = initial(spec), inputs_of(spec)

    def loss(params):
        def step(hidden, i):
            x, y = inputs(i)
            out, hidden = cell(spec, params, hidden, x)
            return hidden, loss_of(out, y)

        return jnp.mean(jax.lax.scan(step, hidden, jnp.arange(spec.steps))[1])

    return lambda: jax.jit(jax.grad(loss))(params)


def online(spec, rule):
    """The gradient by a learner, as a function to call."""
    import jax.numpy as jnp
    from models import Network, loss_of

    import braintrace

    model, inputs = Network(spec), inputs_of(spec)
    learner = braintrace.D_RTRL(model) if rule == 'd_rtrl' else braintrace.ES_D_RTRL(model, 0.9)
    learner.compile_graph(jnp.zeros((spec.batch, spec.inputs)))

    def step_fn(i):
        x, y = inputs(i)
        return loss_of(learner(x), y)

    return lambda: learner.etrace_grad(jnp.arange(spec.steps), step_fn=step_fn)


def precision(kind, *numbers):
    """Relative error of each parameter's gradient with traces in bfloat16, against float32, where
    the trace is written at every step.
    """
    import jax.numpy as jnp
    from models import Spec
    from worker import learner_of, loss_of

    def gradient(**options):
        learner, xs, ys = learner_of(Spec(kind, *map(int, numbers)), 'd_rtrl', **options)
        step_fn = lambda x, y: loss_of(learner(x), y)  # noqa: E731
        return learner.etrace_grad(xs, ys, step_fn=step_fn, window=1).grads

    exact, rounded = gradient(), gradient(trace_dtype=jnp.bfloat16)
    return {
        'errors': {
            '/'.join(k): float(jnp.linalg.norm(rounded[k] - g) / jnp.linalg.norm(g))
            for k, g in exact.items()
        }
    }


def eager(kind, *numbers):
    """Seconds of single calls ``learner(x)`` outside of any ``jit``, for each rule: the median, and
    the least.
    """
    import jax
    from models import Spec
    from worker import learner_of

    def seconds(rule, **options):
        learner, xs, _ = learner_of(Spec(kind, *map(int, numbers)), rule, **options)
        times = []
        for x in xs:
            start = time.perf_counter()
            jax.block_until_ready(learner(x))
            times.append(time.perf_counter() - start)
        times = sorted(times[5:])
        return {'median': times[len(times) // 2], 'least': times[0]}

    return {'d_rtrl': seconds('d_rtrl'), 'es_d_rtrl': seconds('es_d_rtrl', decay_or_rank=0.9)}


def window(carry, kind, *numbers):
    """The steps in a window of ``window='auto'``."""
    from unittest import mock

    import jax
    from models import Spec
    from worker import sequence_grad

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
    import brainstate
    import jax
    import jax.numpy as jnp
    import optax

    import braintrace

    size, traced = 8, [0]
    model = brainstate.nn.Sequential(
        braintrace.nn.GRUCell(size, size), braintrace.nn.Linear(size, 2)
    )
    xs, ys = jnp.ones((2, 2, size)), jnp.ones((2, 2, 2))
    learner, x = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=2), jnp.ones((2, size))

    def step_fn(x, y):
        traced[0] += 1
        return jnp.mean((learner(x) - y) ** 2)

    optimizer = optax.sgd(1e-3)
    online, params, carry = learner.pure()
    state = online.init(params, carry, x)
    pure = jax.jit(online.sequence_grad(lambda out, y: jnp.mean((out - y) ** 2)))

    def least(call) -> float:
        times = []
        for _ in range(300):
            start = time.process_time()
            jax.block_until_ready(call())
            times.append(time.process_time() - start)
        return 1e6 * min(times)

    found = {
        'learner(x)': least(lambda: learner(x)),
        'etrace_grad': least(lambda: learner.etrace_grad(xs, ys, step_fn=step_fn)),
        'etrace_train': least(
            lambda: learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optimizer)
        ),
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
    import gc

    import jax
    import jax.numpy as jnp

    import braintrace

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


MEASUREMENTS = {
    'first': first,
    'import': importing,
    'memory': memory,
    'precision': precision,
    'eager': eager,
    'window': window,
    'calls': calls,
    'deleted': deleted,
}

if __name__ == '__main__':
    what, *rest = sys.argv[1:]
    print(json.dumps(MEASUREMENTS[what](*rest)))
