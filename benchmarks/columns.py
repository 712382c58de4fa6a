"""What is measured, as data: the columns of the tables, and how each of them is called."""
from __future__ import annotations

from typing import NamedTuple

JIT = 'brainstate.transform.jit'
MAIN = (('rnn', 256, 256, 100), ('rnn', 512, 512, 50), ('gru', 256, 64, 200))
PAIRS = ('oldest', 'latest')      # of environments: each has our package and a public one on one JAX


class Column(NamedTuple):
    """A column of the results: ``task`` of ``worker.TASKS`` with ``arguments``, in the environment of
    ``package`` 'ours' or 'public', wrapped in ``call`` of ``worker.CALLS``; ``text`` says it on the page.
    ``everywhere``: measured in both pairs of environments, otherwise in the oldest alone.
    """
    name: str
    package: str
    task: str
    call: str
    text: str
    arguments: dict = {}
    everywhere: bool = False


WINDOW = "`D_RTRL(model, vjp_method='multi-step')`, "
GRAD = '`etrace_grad(xs, ys, step_fn=loss{})`'
BPTT = Column('bptt', 'ours', 'bptt', 'jax.jit', '`jax.grad` of the loss of a `jax.lax.scan`', {}, True)
BY_HAND = Column('by hand', 'ours', 'by_hand', 'jax.jit', '`benchmarks/by_hand.py`', {}, True)
DROP = Column('d_rtrl drop', 'ours', 'grad', 'as it is', GRAD.format(", carry='drop'"),
              {'carry': 'drop'}, True)
TRACE = Column('d_rtrl trace', 'ours', 'grad', 'as it is', GRAD.format(", carry='trace'"),
               {'carry': 'trace'}, True)
ES_TRACE = Column('es_d_rtrl trace', 'ours', 'grad', 'as it is', 'the same of `ES_D_RTRL`',
                  {'rule': 'es_d_rtrl', 'carry': 'trace'}, True)
TRAIN = Column('etrace_train', 'ours', 'train', 'as it is',
               '`etrace_train(xs, ys, step_fn=loss, optimizer=sgd)`', {}, True)

SEQUENCES = (
    BPTT, BY_HAND, DROP, TRACE,
    Column('es_d_rtrl drop', 'ours', 'grad', 'as it is', "the same of `ES_D_RTRL`, `carry='drop'`",
           {'rule': 'es_d_rtrl', 'carry': 'drop'}, True),
    ES_TRACE,
    Column('d_rtrl drop, in jit', 'ours', 'grad', JIT, "`carry='drop'` once more, inside a jit", {'carry': 'drop'}),
    Column('d_rtrl trace, in jit', 'ours', 'grad', JIT, "`carry='trace'` once more, inside a jit", {'carry': 'trace'}),
    Column('bare model', 'ours', 'bare', 'jax.jit', '`jax.lax.scan` of the model'),
    Column('evaluation', 'ours', 'evolve', 'as it is', '`etrace_evolve(xs, trace=False)`'),
    Column('least operations', 'ours', 'product', 'as it is', 'one product, `jax.jit(jnp.matmul)`'),
    Column('public d_rtrl', 'public', 'grad', JIT, '`D_RTRL(model)`, ' + GRAD.format(''), {}, True),
    Column('public d_rtrl 2 windows', 'public', 'grad', JIT, WINDOW + '`chunk_size=T // 2`', {'windows': 2}, True),
    Column('public d_rtrl 1 window', 'public', 'grad', JIT, WINDOW + '`chunk_size=T`', {'windows': 1}, True),
    Column('public d_rtrl 1 window, reset', 'public', 'grad', JIT,
           WINDOW + '`chunk_size=T`, then `reset_state()` inside the same jit, so that XLA may leave the last trace out',
           {'windows': 1, 'then_reset': True}, True),
    Column('public pp_prop', 'public', 'grad', JIT, '`pp_prop(model, 0.9)`, ' + GRAD.format(''),
           {'rule': 'es_d_rtrl'}, True),
    Column('public pp_prop 1 window', 'public', 'grad', JIT, "the same with `vjp_method='multi-step'`, `chunk_size=T`",
           {'rule': 'es_d_rtrl', 'windows': 1}, True),
)
UPDATES = (
    Column('read and write of the trace', 'ours', 'read_and_write', 'as it is',
           '`jax.jit(lambda e: e * a + b, donate_argnums=0)`'),
    TRAIN,
    *[Column(f'written every {k}', 'ours', 'train', 'as it is', f'the same with `write_every={k}`', {'write_every': k})
      for k in (1, 2, 4, 8)],
    Column('bfloat16', 'ours', 'train', 'as it is', 'the same with `D_RTRL(model, trace_dtype=jnp.bfloat16)`',
           {'options': {'trace_dtype': 'bfloat16'}}),
    Column('own loop', 'ours', 'own_loop', JIT, '`brainstate.transform.for_loop` over `brainstate.transform.grad`', {}, True),
    Column('public own loop', 'public', 'own_loop', JIT, '`brainstate.transform.for_loop` over `brainstate.transform.grad`', {}, True),
    Column('public own loop, fast_solve=False', 'public', 'own_loop', JIT, 'the same of `D_RTRL(model, fast_solve=False)`',
           {'options': {'fast_solve': False}}, True),
)
SCALING = (BPTT, BY_HAND, DROP, TRACE, ES_TRACE, TRAIN)
FIRST = {'d_rtrl': ('d_rtrl trace', 'public d_rtrl', 'public d_rtrl 1 window'),
         'es_d_rtrl': ('es_d_rtrl trace', 'public pp_prop')}      # columns of SEQUENCES


def named(name: str) -> Column:
    return next(c for c in (*SEQUENCES, *UPDATES) if c.name == name)
