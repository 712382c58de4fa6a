"""The tables of the benchmark of speed as data: the networks of their rows, and what each column
measures and how it is called.
"""

from __future__ import annotations

from typing import NamedTuple

# the rows: kind, units, inputs, steps, and perhaps batch and layers behind ------------------------

PAIRS = ('oldest', 'latest')  # of environments, each with our package and a public one
MAIN = (('rnn', 256, 256, 100), ('rnn', 512, 512, 50), ('gru', 256, 64, 200))
# Cells that people use, at their sizes.
CELLS = (
    ('lstm', 128, 128, 100),
    ('lstm', 256, 256, 100),
    ('alif', 100, 40, 100),
    ('alif3', 100, 40, 100),
    ('lif_syn', 200, 40, 100),
    ('lru', 128, 10, 70),
    ('lru_complex', 128, 10, 70),
    ('lru', 256, 64, 1000),
    ('mingru', 256, 64, 1000),
    ('conv_lstm', 128, 784, 50),
)
# Kinds of two and three states, and of one complex state.
SEVERAL = ('lstm', 'alif', 'alif3', 'lif_syn', 'lru', 'lru_complex')
UPDATED = (*MAIN, ('lstm', 128, 128, 100), ('lstm', 256, 256, 50))
UPDATED += (('lif_syn', 256, 64, 100), ('alif', 100, 40, 100))
CORNERS = (
    ('gru', 128, 128, 100, 16, 1),
    *[('lstm', 128, 128, t, 16, 1) for t in (10, 30)],
    *[('lstm', 128, 128, 100, b, 1) for b in (1, 256)],
    ('lstm', 64, 64, 200, 16, 1),
    ('lstm', 512, 512, 20, 16, 1),
    *[('lstm', 128, 128, 100, 16, k) for k in (2, 4)],
)
ONE_CORE = (*MAIN, ('lstm', 128, 128, 100), ('alif', 100, 40, 100))
AS_PUBLIC = {'lstm': 'lstm_apart'}  # the kind that the public package learns, in place of another
ONE_STATE = ('rnn', 'gru')
LINEAR = ('lru', 'lru_complex', 'mingru')  # kinds whose state enters linearly
FIXED = (16, 32, 64, None)  # windows beside 'auto'
CALLED_BY_STEPS = (('gru', 64, 64, 100),)
STEPS = {64: 200, 128: 200, 256: 100, 512: 50, 1024: 20, 2048: 10}
POINTS = {  # of the plots
    'units': [('rnn', n, n, t, 16, 1) for n, t in STEPS.items()],
    'steps': [('rnn', 128, 128, t, 16, 1) for t in (10, 30, 100, 300, 1000, 3000, 10_000)],
    'batch': [('rnn', 128, 128, 100, b, 1) for b in (1, 4, 16, 64, 256)],
    'layers': [('rnn', 128, 128, 100, 16, k) for k in (1, 2, 4, 8)],
}

# the columns ------------------------------------------------------------------------------------

JIT = 'brainstate.transform.jit'


class Column(NamedTuple):
    """A column of the results.

    ``task`` of ``worker.TASKS`` runs with ``arguments`` in the environment of ``package``, 'ours'
    or 'public', wrapped in ``call`` of ``worker.CALLS``; ``text`` says on the page how it is
    called. ``everywhere``: measured in both pairs of environments, otherwise in the oldest alone.
    ``kinds`` are the cells that it is measured for; none stands for all.
    """

    name: str
    package: str
    task: str
    call: str
    text: str
    arguments: dict = {}
    everywhere: bool = True
    kinds: tuple = ()

    def network(self, spec: tuple) -> tuple:
        """The network as the column's package learns it."""
        kind = AS_PUBLIC.get(spec[0], spec[0]) if self.package == 'public' else spec[0]
        return (kind, *spec[1:])


GRAD = '`etrace_grad(xs, ys, step_fn=loss{})`'
WINDOW = "`D_RTRL(model, vjp_method='multi-step')`, `chunk_size={}`"


def ours(name, task, text, call='as it is', everywhere=True, **arguments) -> Column:
    return Column(name, 'ours', task, call, text, arguments, everywhere)


def grad(name, keep: bool, text, call='as it is', everywhere=True, **more) -> Column:
    return ours(name, 'grad', text, call, everywhere, keep_trace=keep, **more)


def public(name, task, text, **arguments) -> Column:
    return Column(f'public {name}', 'public', task, JIT, text, arguments)


BPTT = ours('bptt', 'bptt', '`jax.grad` of the loss of a `jax.lax.scan`', 'jax.jit')
BY_HAND = ours('by hand', 'by_hand', '`benchmarks/by_hand.py`', 'jax.jit')
SCANNED = 'the same with `jax.lax.associative_scan`'
ASSOCIATIVE = ours('by hand, associative', 'by_hand', SCANNED, 'jax.jit', associative=True)
ASSOCIATIVE = ASSOCIATIVE._replace(kinds=LINEAR)
CARRIES = {'drop': False, 'trace': True}  # whether the trace is kept
PURE = tuple(
    ours(f'functional {carry}', 'sequence_grad', '`functional`', 'jax.jit', keep=keep)
    for carry, keep in CARRIES.items()
)
DROP, TRACE = (
    grad(f'd_rtrl {carry}', keep, GRAD.format(f', keep_trace={keep}'))
    for carry, keep in CARRIES.items()
)
ES_DROP, ES_TRACE = (
    grad(f'es_d_rtrl {carry}', keep, f'`ES_D_RTRL`, `keep_trace={keep}`', rule='es_d_rtrl')
    for carry, keep in CARRIES.items()
)
TRAIN = ours('etrace_train', 'train', '`etrace_train(xs, ys, step_fn=loss, optimizer=sgd)`')
ROUNDED = 'the same with `D_RTRL(model, trace_dtype=jnp.bfloat16)`'
LOOP = '`brainstate.transform.for_loop` over `brainstate.transform.grad`'

BY_STEPS = public('d_rtrl', 'grad', '`D_RTRL(model)`, ' + GRAD.format(''))
BY_WINDOWS = (
    public('d_rtrl 2 windows', 'grad', WINDOW.format('T // 2'), windows=2),
    public('d_rtrl 1 window', 'grad', WINDOW.format('T'), windows=1),
    public(
        *('d_rtrl 1 window, reset', 'grad', WINDOW.format('T') + ', then `reset_state()`'),
        **{'windows': 1, 'then_reset': True},
    ),
    public('pp_prop', 'grad', '`pp_prop(model, 0.9)`, ' + GRAD.format(''), rule='es_d_rtrl'),
    public(
        *('pp_prop 1 window', 'grad', "the same with `vjp_method='multi-step'`, `chunk_size=T`"),
        **{'rule': 'es_d_rtrl', 'windows': 1},
    ),
)
PEERS = (BY_STEPS, *BY_WINDOWS)
OURS = BPTT, BY_HAND, DROP, TRACE, ES_DROP, ES_TRACE
SEQUENCES = (
    *OURS,
    *[
        grad(f'd_rtrl {carry}, in jit', keep, f'`keep_trace={keep}` inside a jit', JIT, False)
        for carry, keep in CARRIES.items()
    ],
    ours('bare model', 'bare', '`jax.lax.scan` of the model', 'jax.jit', False),
    ours('evaluation', 'evolve', '`etrace_evolve(xs, trace=False)`', everywhere=False),
    ours('least operations', 'product', 'one product, `jax.jit(jnp.matmul)`', everywhere=False),
    *PEERS,
)
UPDATES = (
    ours(
        'read and write of the trace',
        'read_and_write',
        '`jax.lax.fori_loop` of `e * a + b`, donated, in one `jax.jit`',
        everywhere=False,
    ),
    TRAIN,
    ours('bfloat16', 'train', ROUNDED, everywhere=False, options={'trace_dtype': 'bfloat16'}),
    ours('own loop', 'own_loop', LOOP, JIT),
    public('own loop', 'own_loop', LOOP)._replace(kinds=ONE_STATE),
    public(
        'own loop, fast_solve=False',
        'own_loop',
        'the same of `D_RTRL(model, fast_solve=False)`',
        options={'fast_solve': False},
    )._replace(kinds=ONE_STATE),
)
# Step by step the public package takes many seconds a sequence here: its windows alone.
OF_CELLS = (
    *(*OURS[:2], ASSOCIATIVE, *OURS[2:]),
    *[c._replace(kinds=('lstm', 'alif')) for c in BY_WINDOWS],
)


def windows_of(steps: int) -> tuple[Column, ...]:
    """A gradient with ``window='auto'`` and with each fixed window."""
    return tuple(
        grad(f'{carry} {window}', keep, f'`keep_trace={keep}`, `window={window!r}`', window=window)
        for carry, keep in CARRIES.items()
        for window in ('auto', *[k for k in FIXED if k is None or k < steps])
    )


REFERENCES = (BPTT, BY_HAND, DROP, TRACE, *PURE)
EAGER = ours('learner(x)', 'eager', '`learner(x)` step by step from Python')
SCALING = (*REFERENCES, ES_TRACE, TRAIN)
# Columns of SEQUENCES whose first call is timed, by their rule.
FIRST = {
    'd_rtrl': ('d_rtrl trace', 'public d_rtrl', 'public d_rtrl 1 window'),
    'es_d_rtrl': ('es_d_rtrl trace', 'public pp_prop'),
}


def chosen(columns, kind: str, everywhere: bool) -> list[Column]:
    """The columns that are measured for a kind of cell."""
    return [
        c for c in columns if (not c.kinds or kind in c.kinds) and (c.everywhere or not everywhere)
    ]


def named(name: str) -> Column:
    return next(c for c in (*SEQUENCES, *UPDATES) if c.name == name)
