"""The columns of the tables as data: what each of them measures, and how it is called."""

from __future__ import annotations

from typing import NamedTuple

JIT = 'brainstate.transform.jit'
MAIN = (('rnn', 256, 256, 100), ('rnn', 512, 512, 50), ('gru', 256, 64, 200))
PAIRS = ('oldest', 'latest')  # of environments, each with our package and a public one


class Column(NamedTuple):
    """A column of the results.

    ``task`` of ``worker.TASKS`` runs with ``arguments`` in the environment of ``package``, 'ours'
    or 'public', wrapped in ``call`` of ``worker.CALLS``; ``text`` says on the page how it is
    called. ``everywhere``: measured in both pairs of environments, otherwise in the oldest alone.
    """

    name: str
    package: str
    task: str
    call: str
    text: str
    arguments: dict = {}
    everywhere: bool = True


GRAD = '`etrace_grad(xs, ys, step_fn=loss{})`'
WINDOW = "`D_RTRL(model, vjp_method='multi-step')`, `chunk_size={}`"


def ours(name, task, text, call='as it is', everywhere=True, **arguments) -> Column:
    return Column(name, 'ours', task, call, text, arguments, everywhere)


def public(name, task, text, **arguments) -> Column:
    return Column(f'public {name}', 'public', task, JIT, text, arguments)


BPTT = ours('bptt', 'bptt', '`jax.grad` of the loss of a `jax.lax.scan`', 'jax.jit')
BY_HAND = ours('by hand', 'by_hand', '`benchmarks/by_hand.py`', 'jax.jit')
DROP = ours('d_rtrl drop', 'grad', GRAD.format(", carry='drop'"), carry='drop')
TRACE = ours('d_rtrl trace', 'grad', GRAD.format(", carry='trace'"), carry='trace')
ES_TRACE = ours(
    'es_d_rtrl trace', 'grad', "`ES_D_RTRL`, `carry='trace'`", rule='es_d_rtrl', carry='trace'
)
TRAIN = ours('etrace_train', 'train', '`etrace_train(xs, ys, step_fn=loss, optimizer=sgd)`')
LOOP = '`brainstate.transform.for_loop` over `brainstate.transform.grad`'

SEQUENCES = (
    BPTT,
    BY_HAND,
    DROP,
    TRACE,
    ours('es_d_rtrl drop', 'grad', "`ES_D_RTRL`, `carry='drop'`", rule='es_d_rtrl', carry='drop'),
    ES_TRACE,
    ours('d_rtrl drop, in jit', 'grad', "`carry='drop'` inside a jit", JIT, False, carry='drop'),
    ours('d_rtrl trace, in jit', 'grad', "`carry='trace'` inside a jit", JIT, False, carry='trace'),
    ours('bare model', 'bare', '`jax.lax.scan` of the model', 'jax.jit', False),
    ours('evaluation', 'evolve', '`etrace_evolve(xs, trace=False)`', everywhere=False),
    ours('least operations', 'product', 'one product, `jax.jit(jnp.matmul)`', everywhere=False),
    public('d_rtrl', 'grad', '`D_RTRL(model)`, ' + GRAD.format('')),
    public('d_rtrl 2 windows', 'grad', WINDOW.format('T // 2'), windows=2),
    public('d_rtrl 1 window', 'grad', WINDOW.format('T'), windows=1),
    public(
        'd_rtrl 1 window, reset',
        'grad',
        WINDOW.format('T') + ', then `reset_state()`',
        windows=1,
        then_reset=True,
    ),
    public('pp_prop', 'grad', '`pp_prop(model, 0.9)`, ' + GRAD.format(''), rule='es_d_rtrl'),
    public(
        'pp_prop 1 window',
        'grad',
        "the same with `vjp_method='multi-step'`, `chunk_size=T`",
        rule='es_d_rtrl',
        windows=1,
    ),
)
UPDATES = (
    ours(
        'read and write of the trace',
        'read_and_write',
        '`jax.jit(lambda e: e * a + b, donate_argnums=0)`',
        everywhere=False,
    ),
    TRAIN,
    *[
        ours(
            f'written every {k}',
            'train',
            f'the same with `write_every={k}`',
            everywhere=False,
            write_every=k,
        )
        for k in (1, 2, 4, 8)
    ],
    ours(
        'bfloat16',
        'train',
        'the same with `D_RTRL(model, trace_dtype=jnp.bfloat16)`',
        everywhere=False,
        options={'trace_dtype': 'bfloat16'},
    ),
    ours('own loop', 'own_loop', LOOP, JIT),
    public('own loop', 'own_loop', LOOP),
    public(
        'own loop, fast_solve=False',
        'own_loop',
        'the same of `D_RTRL(model, fast_solve=False)`',
        options={'fast_solve': False},
    ),
)
SCALING = (BPTT, BY_HAND, DROP, TRACE, ES_TRACE, TRAIN)
# Columns of SEQUENCES whose first call is timed, by their rule.
FIRST = {
    'd_rtrl': ('d_rtrl trace', 'public d_rtrl', 'public d_rtrl 1 window'),
    'es_d_rtrl': ('es_d_rtrl trace', 'public pp_prop'),
}


def named(name: str) -> Column:
    return next(c for c in (*SEQUENCES, *UPDATES) if c.name == name)
