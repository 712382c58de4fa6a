"""The networks that each part of the benchmark measures, as data.

Each is ``(kind, units, inputs, steps)``, and perhaps batch and layers behind.
"""

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
UPDATED = (
    *MAIN,
    ('lstm', 128, 128, 100),
    ('lstm', 256, 256, 50),
    ('lif_syn', 256, 64, 100),
    ('alif', 100, 40, 100),
)
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
MEASURED_ON_DEVICE = (('rnn', 512, 512, 50), ('lstm', 256, 256, 100))
STEPS = {64: 200, 128: 200, 256: 100, 512: 50, 1024: 20, 2048: 10}
SCALING = {
    'units': [('rnn', n, n, t, 16, 1) for n, t in STEPS.items()],
    'steps': [('rnn', 128, 128, t, 16, 1) for t in (10, 30, 100, 300, 1000, 3000, 10_000)],
    'batch': [('rnn', 128, 128, 100, b, 1) for b in (1, 4, 16, 64, 256)],
    'layers': [('rnn', 128, 128, 100, 16, k) for k in (1, 2, 4, 8)],
}
