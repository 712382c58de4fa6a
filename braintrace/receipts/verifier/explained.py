"""What each rule means in words, what to look at when it fails, and real defects of its kind."""

from __future__ import annotations

from .rules import RULES

__all__ = ['explained']

# rule -> what it means, what to look at when it fails
_WORDS = {
    0: (
        'The receipt has the keys, types and shapes of its schema, finite numbers, known names, '
        'spikes that are 0 or 1, and decays in [0, 1). No other rule runs before this one holds.',
        'The path names the first field that is wrong. A number that is not finite mostly comes '
        'from the step itself: look at the earliest field of the step that has one.',
    ),
    1: (
        'The error at the outputs is the derivative of the named loss at the stored outputs and '
        'targets, with the mask and the divisor.',
        'The name of the loss, its reduction, and whether the mask acts on the error as on the '
        'loss.',
    ),
    2: (
        'The learning signal at the cell is the error taken back through the readout, the error '
        'through the fixed feedback, or the modulator that the receipt declares.',
        'A surrogate, a threshold or a beta that is not the declared one; a signal that is zero '
        'everywhere, feedback of a wrong orientation, a readout weight of another step, or a '
        'modulator that a compiled function has captured.',
    ),
    3: (
        'The signals of the step are the learning signal times the derivatives of the states: by '
        "the op's result (D_f, with the surrogate's slope at the stored membrane) and by the "
        'states before (D).',
        'A cell that computes another formula than the declared one, as (1 - alpha) y; the slope:'
        ' of which membrane, the one before or after the reset; the chain from the '
        'output to each state; a state that a list leaves out.',
    ),
    4: (
        'The gradient is what the signals and the traces of this step make: for D_RTRL the same '
        'step and the trace before it, for ES_D_RTRL the product of the two factors.',
        'A batch that is averaged twice or not at all, the trace of a wrong step, a missing '
        'bias, a transposed weight.',
    ),
    5: (
        'The update of SGD is the gradient times minus the learning rate.',
        'The sign; the rate, which a schedule changes: give it to each write.',
    ),
    6: (
        'Each parameter after the step is the one before plus the update.',
        'A sign that was turned twice, an update of another path, an update that was not applied.',
    ),
    7: (
        'A decay acts as declared: decoupled, as (1 - lr wd) before + update, or coupled, inside '
        'of the gradient. A frozen parameter stays bit for bit.',
        'Whether the framework couples the decay (Adam) or not (AdamW), and whether the rate '
        'scales it.',
    ),
    8: (
        'What an op read is what it is said to read: the inputs, the carry before, both, or the '
        'new output. The factors D are the same for all ops of a group.',
        'The order in the concatenation, a carry of the wrong step, factors under a wrong name.',
    ),
    9: (
        'A step starts at the parameters at which the step before ended.',
        'A missing or repeated step, a restored checkpoint, parameters that something else moved.',
    ),
    10: (
        'The records are of one run, in order, without a gap, and of one specification.',
        'Files that were joined, a run that was started again, a model that changed on the way.',
    ),
    11: ('The stored probabilities are the softmax of the outputs.', 'The axis; a temperature.'),
    12: (
        'The loss of each lane is its formula, and its total is the weighted sum over the divisor.',
        'A factor 1/2, a mean over outputs where a sum is due, a mask that is left out.',
    ),
    13: (
        'Over a window from zero traces, the sum of the online gradients is that of a reverse '
        'sweep in float64 with the same cut, which carries no trace.',
        'Where each step holds and the sum does not: the order of the window and its weights.',
    ),
    14: (
        'The engine derives the whole step again from parameters, carry, traces, inputs and '
        'targets, in float64, without reading any result, and finds every field.',
        'If this rule alone fails, the fields agree with each other and not with the cell: its '
        'constants, its surrogate, the order of reset and spike.',
    ),
    15: (
        'A receipt that claims a skip names a basis, and the basis holds.',
        'Remove the claim: the verifier finds out by itself what it cannot derive.',
    ),
    16: (
        'The digest is that of the bytes; with a key, the signature is that of the digest.',
        'Any edit after the receipt was written.',
    ),
    17: (
        'The root digest binds each record to all records before it.',
        'A record that was removed, repeated, changed or moved.',
    ),
    18: (
        'The batch is reduced as declared: the divisor is the sum of the mask, or 1. So is time '
        'in a window.',
        'A mean over all lanes where some are masked, a sum that was averaged.',
    ),
    19: (
        'The lane of a trace belongs to one sample until it is reset.',
        'A shuffled batch: the traces have to be shuffled along, or reset.',
    ),
    20: (
        'The optimiser has its slots, of the right shapes, for every parameter that it moves, '
        'and counts its steps.',
        'A parameter group that the optimiser does not have.',
    ),
    21: (
        'The buffer of momentum and the direction, with or without Nesterov.',
        'A buffer that starts with the first gradient, dampening, the sign of the buffer.',
    ),
    22: (
        'The first moment of Adam is the running mean of gradients.',
        'b1; the gradient that it takes: a clipped or scaled one makes another optimiser.',
    ),
    23: ('The second moment of Adam is that of squared gradients.', 'b2; a square of a mean.'),
    24: (
        'The update of Adam: both moments corrected by the count, epsilon outside of the root.',
        'The rate, which a schedule changes: give it to each write. The count, from 0 or from 1; '
        'epsilon inside of the root; the decay of AdamW.',
    ),
    25: (
        'An update starts at the optimiser state at which the update before ended.',
        'An optimiser that was made anew, or a state that was not carried on.',
    ),
    26: (
        'Algorithm, numbers, cell, feedback and optimiser, but for its rate, stay as they are.',
        'A setting that changed within the run.',
    ),
    27: (
        'The trace decays by the derivative of the states: sum_r D_sr times the trace of r.',
        'D of another step or group, a state that the sum leaves out, a trace that was cleared.',
    ),
    28: (
        'The two factors of an ES_D_RTRL trace are running sums with the declared decays.',
        'a of a rank r is (r - 1)/(r + 1); the fresh part of ef has the weight 1 - a, that of '
        'ex has 1.',
    ),
    29: (
        "What a step adds to the trace is the op's own derivative: D_f times what it read.",
        'The rule of this op: compare it with a derivative that JAX takes.',
    ),
    30: (
        'The trace after the step is the recurrent term plus the instantaneous one; zeros by '
        'structure stay zero.',
        'If 27 and 29 hold, the sum is wrong: a term is missing, or is there twice.',
    ),
    31: (
        'Traces, carry and the count of steps go on from one record to the next, but on lanes '
        'that are reset.',
        'A lane that was reset without a word: give reset and initial to write. A trace that '
        'lives on over the end of a sequence, or a carry that '
        'something else changed.',
    ),
    32: (
        'Where a lane starts its trace is zero, and a reset lane has the initial carry.',
        'A reset that clears the carry and not the trace, or the other way about.',
    ),
    33: (
        'The correction at the start is 1 - a^(t + 1), and t counts the steps of the trace.',
        'A count of calls where steps of the trace are due.',
    ),
    34: (
        'alpha, rho and kappa are exp(-dt/tau) of the declared times, and the derivatives D are '
        'made of the declared constants.',
        'A time constant of another part, as of the membrane for the readout; a threshold; the '
        "surrogate's name and parameters.",
    ),
    35: (
        'How much of the hidden Jacobian lies outside of what the trace keeps. It never fails.',
        'A large share says that the rule is far from the full gradient in this network.',
    ),
    36: (
        'Each parameter has one route, by trace, same-step or frozen, and a gradient if trained.',
        'A parameter that the learner does not know, and which so learns nothing.',
    ),
}
_TAU = 'ml_genn, issue 100: the readout trace of e-prop decayed with tau_mem in place of tau_out.'
_OPS = 'public braintrace, PR 126: the traces of convolutions and of LoRA were wrong.'
_ZERO_SIGNAL = 'public braintrace, PR 126: the learning signal of OSTTP was always zero.'
_CHAIN = 'a trace was carried over the end of a sequence; lanes were permuted; parameters moved.'
_DEFECTS = {
    0: 'NeuroTorch, issue 127: gradients of e-prop that were not finite.',
    2: f'{_ZERO_SIGNAL} And a modulator that jit had captured stayed that of the first step.',
    3: _ZERO_SIGNAL,
    9: _CHAIN,
    14: f'{_TAU} {_OPS}',
    18: 'public braintrace, PR 105: a sum over the batch of gradients that were wrong before it.',
    19: _CHAIN,
    28: _TAU,
    29: _OPS,
    31: _CHAIN,
    32: _CHAIN,
    33: 'public braintrace 0.2.6: the correction counted calls in place of steps of the trace.',
    34: _TAU,
    35: 'a public project: a trace that is exact for one layer was used for a stack, unsaid.',
    36: 'public braintrace 0.2.6: plain parameters got a gradient of exactly zero.',
}


def explained(number: int) -> dict[str, str]:
    """What there is to say about a rule, by what it answers."""
    rule, (meaning, look) = RULES[number], _WORDS[number]
    return {
        'rule': f'{number}, {rule.title} ({rule.family})',
        'means': meaning,
        'formula': rule.formula,
        'needs': rule.needs or 'nothing more than a receipt',
        'real defect': _DEFECTS.get(number, 'none is on record'),
        'if it fails': look,
    }
