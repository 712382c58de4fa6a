"""The kinds of findings: one table that says how loud each is, what it means and what to do.

A finding is a :class:`braintrace.Diagnostic` of ``graph.findings``. Routes, warnings, strict mode,
the report and its explanations are filters of that list by the columns of this table, so a new kind
is one row here and one place in ``analysis/findings.py`` that makes it.
"""

from __future__ import annotations

from typing import NamedTuple

STEP_ONLY = 'its gradient holds the current step only'
WINDOWS = "exact windows (window=K, inside='exact'), which hold the history of K steps"
LEAKS = (
    '{path}: {states} leaks behind the weights, and what it remembers of {group} is in no trace: '
    'earlier steps get no credit for it'
)
UNFILTERED = (
    "Take exact windows (inside='exact'), or let all outputs leak by one constant, for which there "
    "are braintrace.nn.FilteredReadout and braintrace.rules.e_prop(kappa='auto')"
)
FILTERED = (
    'Let it leak in front of its weights (braintrace.nn.FilteredReadout has the same outputs), '
    "filter the traces with its leak (braintrace.rules.e_prop(kappa='auto')), or take exact "
    "windows (inside='exact')"
)
UNMARKED = f'parameter {{path}} is not marked in {{name}}, so there {STEP_ONLY}:'


class Kind(NamedTuple):
    """One row.

    ``level``: ``warning`` and ``info`` are told as diagnostics, in the words of ``says``; others
    are in the tables of the report alone. ``strict``: a strict policy refuses it. ``route``: it
    is the route of a parameter, with ``reason``. ``meaning`` and ``advice`` are the words of a
    route, ``meaning`` also why a trace ends at a cut.
    """

    level: str = ''
    says: str = ''
    meaning: str = ''
    advice: str = ''
    strict: bool = False
    route: str = ''
    reason: str = ''


# A kind, or ``kind:reason`` where one kind has several sentences. `_report/rows.py` fills the
# braces: {path} {group} {slot} {states} of the finding, {name} of its first equation, and so on.
KINDS = {
    # ---- where a parameter's gradient comes from: each parameter has one of these ----
    'traced': Kind(
        route='trace',
        meaning='its gradient is that of the current step plus the history that its trace carries',
    ),
    'no-hidden-state': Kind(
        route='same-step',
        meaning='it reaches no hidden state, so the current step is its whole gradient',
    ),
    'not-etp-op': Kind(
        'warning',
        f'parameter {{path}} reaches a hidden state by a plain operation: {STEP_ONLY}. Apply it '
        'with a braintrace op (matmul, element_wise, ...) to give it a trace',
        f'it reaches a hidden state by a plain operation, which has no trace: {STEP_ONLY}',
        'Apply it with a braintrace op (matmul, element_wise, ...).',
        route='same-step',
    ),
    'weight-then-weight': Kind(
        route='same-step',
        meaning='the result of its op reaches hidden states only through another op, where no '
        f'trace can follow it: {STEP_ONLY}',
        advice=f'Take {WINDOWS}. For a trace, keep its result in a hidden state that the other op '
        'reads.',
    ),
    'mixing-tail': Kind(
        'warning',
        'parameter {path} belongs to an op whose result reaches hidden states only through '
        f'equations that mix its positions: {STEP_ONLY}',
        'the result of its op reaches hidden states only through equations that mix its '
        f'positions: {STEP_ONLY}',
        'Mix positions in front of the op, or behind the hidden state.',
        route='same-step',
    ),
    'weight-of-lost-relation': Kind(
        route='same-step',
        reason='lost_relation',
        meaning='an element of the result of its op feeds several positions of a hidden state, '
        'each of which reads many other elements too, and a trace has room for a few: '
        f'{STEP_ONLY}',
        advice='Apply an op of its own to each of them.',
    ),
    'weight-that-changes': Kind(
        route='same-step',
        reason='input_dependent_weight',
        meaning='the weight of its op, or the places of its entries, change from step to step, so '
        f'no trace fits it: {STEP_ONLY}',
        advice="Make the op's weight a function of parameters alone, and apply what changes to the "
        "op's input or result.",
    ),
    'not-hidden': Kind(
        route='same-step',
        meaning='it reaches later steps through a state that is no hidden state, where no trace '
        f'follows it: {STEP_ONLY}',
        advice='Make that state a hidden state, or stop the gradient that goes into it.',
    ),
    'opaque-call': Kind(
        'warning',
        'parameter {path} belongs to an op inside a function with a derivative rule of its own: '
        'its gradient is what that rule says, for the current step only. Apply the op outside of '
        'that function to give it a trace',
        'its op is inside a function with a derivative rule of its own: its gradient is what '
        'that rule says, for the current step only',
        'Apply the op outside of that function.',
        route='same-step',
    ),
    'unused': Kind(
        'warning',
        'parameter {path} reaches neither an output nor a state: its gradient is zero',
        'it reaches neither an output nor a state: its gradient is zero',
        'Use it in the step, or remove it.',
        route='same-step',
    ),
    'not-trainable': Kind(
        route='frozen',
        meaning='it is held fixed: its gradient is zero',
        advice='To train it, let `trainable` select it.',
    ),
    'not-inexact': Kind(
        route='frozen',
        meaning='its dtype has no gradient',
        advice='To train it, keep it in a floating-point dtype.',
    ),
    # ---- parts of the history of a parameter that has a trace ----
    'use': Kind(says='its use in {what} [{where}]'),
    'use:state': Kind(says='its use as the new state {states}'),
    'partial-trace': Kind(
        'warning',
        f'parameter {{path}} has a trace, but not for {{uses}}, where {STEP_ONLY}',
    ),
    'rule': Kind(says='{reason}'),
    # ---- where one position reads another, and the past ends ----
    'mixing:merges': Kind(
        'info',
        '{chain} merges positions of a hidden state: it carries no trace',
        'merges positions of a hidden state',
        strict=True,
    ),
    'mixing:moves': Kind(
        'info',
        '{chain} moves values to other positions of a hidden state: it carries no trace',
        'moves values to other positions of a hidden state',
        strict=True,
    ),
    'mixing:merges-result': Kind(
        'warning',
        '{chain} merges positions of the result of an op: it carries no trace, so history is lost '
        'there. Mix positions in front of the op, or behind the state',
        'merges positions of the result of an op',
        strict=True,
    ),
    'mixing:not-linear': Kind(
        'warning',
        '{chain} has a derivative rule of its own that is not known to be linear, as a clip is: no '
        'derivative stands for it, so it carries no trace and history is lost there. Clip the '
        "whole gradient, or take exact windows (window=K, inside='exact')",
        'has a derivative rule that is not known to be linear',
        strict=True,
    ),
    'cut': Kind(says='{what}', meaning='one position reads another'),
    'cut:other-shape': Kind(
        says='plain paths to states of another shape', meaning='no trace fits both shapes'
    ),
    'cut:not-hidden': Kind(
        says='{states}, which is no hidden state', meaning='a trace follows hidden states alone'
    ),
    'cross-group': Kind(
        'warning',
        '{group} reads the old {path} by a plain path between different shapes: what goes that way '
        'has no trace. Give both states one shape to trace it: where one is cut into parts, or '
        'joined of them, give each part a state of its own',
        strict=True,
    ),
    'stacked-state:moved': Kind(
        'warning',
        '{path} holds several states, and {name} moves them through the array from step to step in '
        'a way that is not taken apart: what they owe to earlier steps has no gradient. Give each '
        'row a leaf of the carry (a HiddenState) of its own',
        strict=True,
    ),
    'stacked-state:read-as-old': Kind(
        'warning',
        '{path} holds several states, and a part of its new value is read by {name} as if it were '
        'made of old ones: what it owes to earlier steps has no gradient there. Keep each of these '
        'states in a leaf of the carry (a HiddenState) of its own',
        strict=True,
    ),
    'leaky-readout': Kind(
        'warning',
        f'{LEAKS}. {FILTERED}',
        advice=f'{FILTERED}.',
        strict=True,
    ),
    'leaky-readout:several': Kind(
        'warning',
        f'{LEAKS}. {UNFILTERED}',
        advice=f'{UNFILTERED}.',
        strict=True,
    ),
    'leaky-readout:other': Kind(
        'warning',
        '{path}: {share} of {states} is left after a step, and the traces in front of it are '
        "filtered by another kappa, so they do not hold what it remembers. Give kappa='auto'",
        advice="Give kappa='auto'.",
        strict=True,
    ),
    # ---- ops and weights without a trace ----
    'lost-relation': Kind(
        'warning',
        '{path}: no trace to {group}: an element of its result {y} feeds several positions of the '
        'state {shape}, each of which reads many others too, and a trace has room for a few. Apply '
        'an op of its own to each of them',
        strict=True,
    ),
    'lost-relation:not-hidden': Kind(
        'warning',
        'parameter {path}: {states} is no hidden state: what goes through it to later steps has no '
        'gradient. Make it one, or stop the gradient that goes into it',
        strict=True,
    ),
    'input-dependent-weight': Kind(
        'warning',
        "{path}: the op's weight changes from step to step (it depends on an input or a state), so "
        'it has no trace. Read an array that stays as it is, such as a mask, from a '
        'brainstate.ParamState (functional: from params) through jax.lax.stop_gradient',
        strict=True,
    ),
    'input-dependent-weight:structure': Kind(
        'warning',
        "{path}: the places of the entries of the op's matrix change from step to step or with the "
        'lanes of a vmap, so the op has no trace. Keep them among the parameters, or constant',
        strict=True,
    ),
    'no-relation': Kind(
        'warning',
        'no weight of an ETP op reaches a hidden state position by position: nothing has a trace, '
        'and every gradient holds the current step only',
    ),
    'constant-weight': Kind(
        'warning',
        'the {slot} of {name} is {made}. Nothing trains it, and no trace is kept for it. Keep it '
        'in a brainstate.ParamState (functional: in params) to train it; if it is to stay as it '
        'is, apply it with a plain operation',
        'the {slot} of {name} is {made}',
        strict=True,
    ),
    'nonlinear-rule': Kind(
        'warning',
        '{name} has a derivative rule of its own that is not known to be linear, as a clip is: '
        'traces hold derivatives, so what the rule does to a signal on its way to earlier steps is '
        'not in them. Clip the whole gradient, or take exact windows '
        "(window=K, inside='exact')",
        strict=True,
    ),
    'nonlinear-rule:rounds': Kind(
        'warning',
        '{name} rounds values to a few bits, and what comes back through it as well: traces hold '
        'derivatives, which are not rounded. To round the value alone, write '
        "h + jax.lax.stop_gradient(rounded - h), or take exact windows (window=K, inside='exact')",
        strict=True,
    ),
    'nonlinear-rule:weight': Kind(
        'warning',
        '{path} goes through {name}, whose derivative rule is not known to be linear, as a clip '
        'is: the rule is applied once to the gradient of all steps together, and not at each step. '
        'Clip the whole gradient',
        strict=True,
    ),
    # ---- what automatic marking did ----
    'marked': Kind('info', '{reason} with parameter {path} became {op}, {trace}'),
    'unmarked': Kind(
        'warning',
        f'{UNMARKED} no op does that. Bring the parameter in by a product, or position by position',
        strict=True,
    ),
    'unmarked:layout': Kind(
        'warning',
        f'{UNMARKED} no op has its layout. Products of any layout, convolutions without batch '
        'groups, and lookups of whole rows have one',
        strict=True,
    ),
    'unmarked:while_loop': Kind(
        'warning',
        f'{UNMARKED} it is in a loop of unknown length, where no trace exists. Use '
        'lax.fori_loop with a static number of steps, or lax.scan',
        strict=True,
    ),
    'unmarked:custom_rule': Kind(
        'warning',
        f'{UNMARKED} it is a function with a derivative rule of its own, and nothing inside is '
        'marked. Apply the parameter outside of it',
        strict=True,
    ),
    'closed-over': Kind(
        'info',
        '{name} reads a constant matrix, which nothing trains. If it is a weight that the cell '
        'closes over, keep it in params (a brainstate.ParamState)',
    ),
}


def kind_of(kind: str, reason: str = '') -> Kind:
    """The row of a kind, or that of its reason where it has one."""
    return KINDS.get(f'{kind}:{reason}') or KINDS[kind]
