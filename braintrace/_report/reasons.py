"""The reasons of a route in plain words, and what to change."""

from __future__ import annotations

TRACED = ('its gradient is that of the current step plus the history that its trace carries', '')

WINDOWS = "exact windows (window=K, inside='exact'), which hold the history of K steps"

# of a traced parameter under a rule that remembers nothing
FORGETS = (
    'its trace remembers no earlier step under this rule: its gradient holds the current step only',
    'Give ES_D_RTRL a decay above 0 (a rank above 1), or use D_RTRL.',
)

# what to do where the op in question reads the hidden state itself, as the reset gate of a GRU does
GATE = (
    'Apply its result behind the other op, as in h = tanh(op1(x) + gate * op2(h)), '
    f'take {WINDOWS}, or accept this.'
)

# reason -> (what it means, what to do about it)
REASONS = {
    'no_hidden_state': (
        'it reaches no hidden state, so the current step is its whole gradient',
        '',
    ),
    'not_etp_op': (
        'it reaches a hidden state by a plain operation, which has no trace: its gradient holds '
        'the current step only',
        'Apply it with a braintrace op (matmul, element_wise, ...).',
    ),
    'weight_then_weight': (
        'the result of its op reaches hidden states only through another op, where no trace can '
        'follow it: its gradient holds the current step only',
        f'Take {WINDOWS}. For a trace, keep its result in a hidden state that the other op reads.',
    ),
    'mixing_tail': (
        'the result of its op reaches hidden states only through equations that mix its positions: '
        'its gradient holds the current step only',
        'Mix positions in front of the op, or behind the hidden state.',
    ),
    'lost_relation': (
        'an element of the result of its op feeds several positions of a hidden state, each of '
        'which reads many other elements too, and a trace has room for a few: its gradient holds '
        'the current step only',
        'Apply an op of its own to each of them.',
    ),
    'input_dependent_weight': (
        'the weight of its op, or the places of its entries, change from step to step, so no trace '
        'fits it: its gradient holds the current step only',
        "Make the op's weight a function of parameters alone, and apply what changes to the "
        "op's input or result.",
    ),
    'not_hidden': (
        'it reaches later steps through a state that is no hidden state, where no trace follows '
        'it: its gradient holds the current step only',
        'Make that state a hidden state, or stop the gradient that goes into it.',
    ),
    'opaque_call': (
        'its op stands inside a function with a derivative rule of its own: its gradient is what '
        'that rule says, for the current step only',
        'Apply the op outside of that function.',
    ),
    'unused': (
        'it reaches neither an output nor a state: its gradient is zero',
        'Use it in the step, or remove it.',
    ),
    'not_trainable': (
        'it is held fixed: its gradient is zero',
        'To train it, let `trainable` select it.',
    ),
    'not_inexact': ('its dtype has no gradient', 'To train it, keep it in a floating-point dtype.'),
}
