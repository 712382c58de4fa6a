"""One measurement in a fresh process, printed as JSON: the first call, importing, or peak memory.

    python benchmarks/once.py first "d_rtrl trace" rnn 256 256 100       the column of columns.py
    python benchmarks/once.py import
    python benchmarks/once.py memory d_rtrl|bptt 40000
    python benchmarks/once.py precision rnn 256 256 100
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
    """Seconds that importing braintrace takes after brainstate."""
    start = time.perf_counter()
    import brainstate  # noqa: F401
    middle = time.perf_counter()
    import braintrace  # noqa: F401
    return {'brainstate': middle - start, 'braintrace': time.perf_counter() - middle}


def memory(rule, steps):
    """Peak bytes of a process over a sequence; inputs are made inside the step, so that only the method's memory grows."""
    import jax
    import jax.numpy as jnp
    from models import Network, Spec, cell, initial, loss_of

    import braintrace
    spec, key = Spec('gru', 64, 16, int(steps)), jax.random.key(0)

    def inputs(i):
        one, two = jax.random.split(jax.random.fold_in(key, i))
        return jax.random.normal(one, (spec.batch, spec.inputs)), jax.random.normal(two, (spec.batch, 10))

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rule == 'bptt':
        params, hidden = initial(spec)

        def loss(params):
            def step(hidden, i):
                x, y = inputs(i)
                out, hidden = cell(spec, params, hidden, x)
                return hidden, loss_of(out, y)
            return jnp.mean(jax.lax.scan(step, hidden, jnp.arange(spec.steps))[1])
        start = time.perf_counter()
        jax.block_until_ready(jax.jit(jax.grad(loss))(params))
    else:
        make = braintrace.D_RTRL if rule == 'd_rtrl' else lambda model: braintrace.ES_D_RTRL(model, 0.9)
        learner = make(Network(spec))
        learner.compile_graph(jnp.zeros((spec.batch, spec.inputs)))

        def step_fn(i):
            x, y = inputs(i)
            return loss_of(learner(x), y)
        start = time.perf_counter()
        jax.block_until_ready(learner.etrace_grad(jnp.arange(spec.steps), step_fn=step_fn))
    return {'peak': peak(), 'seconds': time.perf_counter() - start}


def precision(kind, *numbers):
    """Relative error of each parameter's gradient with traces in bfloat16 against float32, the trace written at every step."""
    import jax.numpy as jnp
    from models import Spec
    from worker import learner_of, loss_of

    def gradient(**options):
        learner, xs, ys = learner_of(Spec(kind, *map(int, numbers)), 'd_rtrl', **options)
        return learner.etrace_grad(xs, ys, step_fn=lambda x, y: loss_of(learner(x), y), window=1)
    exact, rounded = gradient(), gradient(trace_dtype=jnp.bfloat16)
    return {'errors': {'/'.join(k): float(jnp.linalg.norm(rounded[k] - g) / jnp.linalg.norm(g)) for k, g in exact.items()}}


if __name__ == '__main__':
    what, *rest = sys.argv[1:]
    print(json.dumps({'first': first, 'import': importing, 'memory': memory, 'precision': precision}[what](*rest)))
