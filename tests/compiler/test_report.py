"""The report: groups, relations, routes and cuts, memory, exactness, drawings; and the warnings."""

import contextlib
import inspect
import json
import re
import warnings
from xml.etree import ElementTree

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, rules
from braintrace._compiler import path_name
from braintrace._rules import NEWEST
from braintrace.errors import BraintraceWarning, NotCompiledError, OptionError
from tests import models, oracles
from tests.compare import errors
from tests.gradients.harness import over_sequence, start

I, N = 3, 4  # noqa: E741
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.9)]
mm = braintrace.matmul


def compiled(cell, params, carry, *inputs, rule=RULES[0], **options):
    learner = functional.online(cell, rule, **options)
    jax.eval_shape(learner.init, params, carry, *inputs)
    return learner


def shapes(**given):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in given.items()}


def state(batch=2):
    return jax.ShapeDtypeStruct((batch, N), jnp.float32)


def seen(batch=2):
    return jax.ShapeDtypeStruct((batch, I), jnp.float32)


def join(x, h):
    return jnp.concatenate([x, h], -1)


def gru(p, h, x):
    z = jax.nn.sigmoid(mm(join(x, h), p['z']))
    r = jax.nn.sigmoid(mm(join(x, h), p['r']))
    h = (1 - z) * h + z * jnp.tanh(mm(join(x, r * h), p['n'], p['b']))
    return h @ p['out'], h


GRU = shapes(z=(I + N, N), r=(I + N, N), n=(I + N, N), b=(N,), out=(N, 2))


def gru_learner(rule=RULES[0], batch=2):
    return compiled(gru, GRU, state(batch), seen(batch), rule=rule)


def place(marker, fn=gru):
    """``file:line (function)`` of the one line of a function that holds a marker."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = [first + i for i, line in enumerate(lines) if marker in line]
    return f'{__file__}:{number} ({fn.__qualname__})'


# text ---------------------------------------------------------------------------------------------


def test_the_axes_of_a_rule_that_are_not_as_by_default_have_a_line():
    def lines(**axes):
        return str(gru_learner(rules.d_rtrl(**axes)).report).splitlines()[2:4]

    whole, own = lines(credit='whole'), lines(scope='own')
    assert whole[0] == 'credit whole: the signal follows every path of the step'
    assert own[0].startswith('scope own: of an op that reads its own group')
    assert lines(credit='whole', scope='own') == [whole[0], own[0]]
    assert lines()[0].startswith('approximate')


def net():
    return brainstate.nn.Sequential(braintrace.nn.GRUCell(I, N), braintrace.nn.Linear(N, 2))


def test_learner_graph_and_functional_learner_give_one_report():
    model, es = net(), gru_learner(RULES[1])
    learner = braintrace.compile(
        model, 'ES_D_RTRL', jnp.zeros((2, I)), batch_size=2, decay_or_rank=0.9
    )
    assert learner.report == braintrace.report(learner.graph, rules.es_d_rtrl(0.5))
    assert learner.report.rule == 'ES_D_RTRL'
    assert learner.report.at(7) == learner.report(batch_size=7)
    assert es.report(9) == es.report().at(9) == braintrace.report(es.graph, es.rule, batch_size=9)
    assert braintrace.report(es.graph, RULES[0]) == gru_learner().report()
    graph = braintrace.compile_etrace_graph(model, jnp.zeros((2, I)))
    assert braintrace.report(graph).rule == 'D_RTRL'


def test_the_rows_are_plain_data():
    report = gru_learner().report()
    data = report.as_dict()
    assert json.loads(json.dumps(data)) == data and repr(report) == str(report)
    assert data['memory'] == 480 and data['batch_size'] == 2 and not data['exact']
    assert data['groups'] == [
        {
            'name': 'carry',
            'members': ['carry'],
            'num_state': 1,
            'shape': [2, 4],
            'dtype': 'float32',
            'left_out': [str(c) for c in report.cuts],
            'derived': [],
        }
    ]
    assert data['relations'][1]['parameters'] == {'weight': ['n'], 'bias': ['b']}
    with pytest.raises(AttributeError):
        report.rule = 'another'


def test_without_a_rule_there_is_no_trace_and_no_history():
    report = compiled(gru, GRU, state(), seen(), rule=None).report()
    assert (
        report.memory == 0
        and not report.exact
        and 'without a rule there is no trace' in str(report)
    )
    assert {p.history for p in report.parameters} == {'none', 'not needed'}


def test_a_rule_of_which_nothing_is_known_is_not_called_exact():
    class Foreign:
        name = 'mine'

        def init(self, graph):
            return rules.d_rtrl().init(graph)

    learner = of_diagonal()
    report = braintrace.report(learner.graph, Foreign())
    assert learner.report().exact and not report.exact
    assert 'nothing is known of what mine leaves out' in str(report)
    assert report.memory == learner.report().memory


def test_what_is_no_rule_and_what_is_no_batch_size_is_refused():
    learner = gru_learner()
    for rule in ('D_RTRL', braintrace.D_RTRL, type(RULES[0])):
        with pytest.raises(OptionError, match='rule is .*braintrace.rules'):
            braintrace.report(learner.graph, rule)
    for batch_size in (-1, 2.0, True, '3'):
        with pytest.raises(OptionError, match='batch_size is .*int >= 0'):
            learner.report(batch_size)


# memory -------------------------------------------------------------------------------------------


def lstm(p, c, x):
    i, f, g, o = jnp.split(mm(join(x, c['h']), p['w'], p['b']), 4, -1)
    new = jax.nn.sigmoid(f) * c['c'] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(new)
    return h, {'c': new, 'h': h}


def lanes(p, h, x):
    """One weight for each lane, beside one for all."""
    h = braintrace.element_wise(p['gain']) * h + jnp.tanh(mm(join(x, h), p['w']))
    return h, h


def stack(p, c, x):
    a = jnp.tanh(mm(join(x, c['a']), p['one']))
    b = jnp.tanh(mm(jnp.concatenate([a, c['b']], -1), p['two']))
    return b, {'a': a, 'b': b}


def looped(p, h, x):
    """The op is in a loop of 20 iterations."""

    def body(z, scale):
        return 0.9 * z + mm(scale * x, p['w']), None

    h = 0.5 * h + jax.lax.scan(body, jnp.zeros_like(h), jnp.linspace(1.0, 2.0, 20))[0]
    return h, h


SIZED = {
    'looped': lambda b: (looped, shapes(w=(I, N)), state(b)),
    'gru': lambda b: (gru, GRU, state(b)),
    'lstm': lambda b: (lstm, shapes(w=(I + N, 4 * N), b=(4 * N,)), {'c': state(b), 'h': state(b)}),
    'lanes': lambda b: (lanes, shapes(w=(I + N, N), gain=(b, N)), state(b)),
    'stack': lambda b: (
        *(stack, shapes(one=(I + N, N), two=(2 * N, N))),
        {'a': state(b), 'b': state(b)},
    ),
}


def allocated(learner, *args):
    """The arrays of a real trace: (relation, group, slot) -> array, its states in the last axis."""
    trace = learner.init(*jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), args)).trace
    return {
        (rel, group, slot): jnp.stack(a, -1) if isinstance(a, tuple) else a
        for rel, groups in trace.items()
        if rel != NEWEST
        for group, slots in groups.items()
        for slot, a in slots.items()
        if len(a)
    }


def sized(name, rule=RULES[0], batch=2):
    cell, *args = SIZED[name](batch)
    return compiled(cell, *args, seen(batch), rule=rule)


@pytest.mark.tier(quick=6)
@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize('name', SIZED)
def test_the_memory_at_two_batch_sizes_is_that_of_the_allocated_trace(name, rule):
    small = sized(name, rule)
    for batch in (2, 5):
        report, (cell, *args) = small.report(batch), SIZED[name](batch)
        arrays = allocated(functional.online(cell, rule), *args, seen(batch))
        assert report.memory == sum(a.nbytes for a in arrays.values())
        assert report.memory or (name, rule) == ('stack', RULES[0])  # none of its states is read
        rows = {(of.key, r.group, r.slot): r for of in report.relations for r in of.trace}
        assert {k: (r.shape, r.dtype, r.bytes) for k, r in rows.items()} == {
            k: (a.shape, str(a.dtype), a.nbytes) for k, a in arrays.items()
        }
    assert small.report(5).memory - small.report(4).memory == small.report().memory_of_sample
    assert name == 'lanes' or small.report(0).memory == 0


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float64], ids=str)
def test_the_memory_has_the_width_of_the_traces_dtype_wherever_it_is_asked(dtype):
    with jax.enable_x64(True):
        of_dtype = lambda a: jax.ShapeDtypeStruct(a.shape, dtype)
        args = jax.tree.map(of_dtype, (GRU, state(), seen()))
        learner = compiled(gru, *args)
        want = sum(a.nbytes for a in allocated(learner, *args).values())
    assert learner.report().memory == want == 480 * jnp.dtype(dtype).itemsize // 4
    assert learner.report(6).memory == 3 * want


def test_a_trace_too_large_for_any_machine_is_only_counted():
    n, lanes = 20_000, [jax.ShapeDtypeStruct((8, 20_000), jnp.float32)] * 2
    report = compiled(diagonal, shapes(w=(n, n)), *lanes).report(10_000)
    assert report.memory == 4 * 10_000 * n * n
    assert '14.6 TiB at batch size 10000' in str(report)


def test_a_trace_without_lanes_does_not_grow():
    def cell(p, c, x):
        common = 0.9 * c['common'] + braintrace.element_wise(p['drift'])
        h = 0.5 * c['h'] + mm(x, p['w'])
        return h + common, {'h': h, 'common': common}

    carry = {'h': state(), 'common': shapes(c=(N,))['c']}
    report = compiled(cell, shapes(w=(I, N), drift=(N,)), carry, seen()).report()
    axes = {rel.key: [row.batch_axis for row in rel.trace] for rel in report.relations}
    assert axes == {'w': [0], 'drift': [None]} and report.at(0).memory == 4 * N
    assert report.at(3).memory == 4 * N + 3 * report.memory_of_sample


@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.snap(2), rules.es_d_rtrl(0.9)])
def test_one_sample_tells_the_trace_of_many(rule):
    """Every axis of length 1 could be that of a single sample."""
    one, five = (gru_learner(rule, samples).report(5) for samples in (1, 5))
    assert one.relations == five.relations


def test_a_step_without_a_batch_axis_says_so():
    vector = shapes(h=(N,), x=(I,))
    learner = compiled(gru, GRU, vector['h'], vector['x'])
    report = learner.report()
    assert report.batch_size is None and report.memory == 240
    assert 'trace memory: 240 B; the step has no batch axis that its ops share' in str(report)
    assert 'at batch size' not in learner.report.explain('z')
    with pytest.raises(OptionError, match='no batch axis.*240 bytes.*jax.vmap'):
        learner.report(8)


# exactness ----------------------------------------------------------------------------------------

QUICK = {'min_gru', 'gru', 'spiking_three', 'shared', 'tail_cumsum'}
ROWS = [*models.MODELS, *models.names(models.PROGRAMS, exact=True)]


LATER = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'name', [n if n in QUICK else pytest.param(n, marks=LATER[i % 2]) for i, n in enumerate(ROWS)]
)
def test_a_gradient_equals_plain_backpropagation_exactly_where_the_report_says_so(name):
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        case = models.case(name)
        grads, report = over_sequence(case, RULES[0], None)[0], start(case, RULES[0])[0].report()
        got, want = map(functional.flatten_paths, (grads, oracles.bptt(case)))
    exact = {path_name(p): max(errors(got[p], want[p]).values()) < 1e-10 for p in want}
    assert {row.path: exact[row.path] for row in report.parameters} == {
        row.path: row.history in ('whole', 'not needed') for row in report.parameters
    }
    assert report.exact == all(exact.values())


def diagonal(p, h, x):
    return h, 0.5 * h + mm(x, p['w'])


def of_diagonal(**options):
    return compiled(diagonal, shapes(w=(I, N)), state(), seen(), **options)


def test_a_parameter_that_loses_nothing_is_exact_for_d_rtrl_and_not_for_es_d_rtrl():
    assert of_diagonal().report.explain('w').endswith('Nothing is left out.')
    report = of_diagonal(rule=RULES[1]).report()
    said = report.explain('w')
    assert not report.exact and 'exact at the first step' in str(report) and not report.cuts
    assert 'exact at the first step' in said and 'MinGRUCell' not in said


@pytest.mark.parametrize('forgetful', [0.0, 1])
def test_es_d_rtrl_that_remembers_nothing_says_so(forgetful):
    """Decay 0, which is rank 1: the gradient is that of the current step."""
    report = of_diagonal(rule=rules.es_d_rtrl(forgetful)).report()
    (row,) = report.parameters
    assert not report.exact and 'decay above 0' in row.advice
    assert (row.route, row.history) == ('trace', 'none')
    said, explained = ' '.join(str(report).split()), report.explain('w')
    assert 'with decay 0 (rank 1) the trace remembers no earlier step' in said
    assert 'the whole past of w' in said and 'remembers no earlier step' in explained
    assert 'exact' not in said and 'exact' not in explained


@pytest.mark.parametrize(
    ('cell', 'history', 'said'),
    [
        (lambda p, h, x: 2 * (mm(x, p['w']) + h @ p['v'],), 'none', 'Let each unit read'),
        (lambda p, h, x: 2 * (mm(x, p['w']),), 'not needed', 'no later step reads'),
    ],
)
def test_a_trace_without_entries_is_told(cell, history, said):
    """Where later steps read a state through cuts alone, which is warned of, or not at all."""
    warned = pytest.warns(BraintraceWarning, match='keeps nothing of earlier steps')
    with warned if history == 'none' else contextlib.nullcontext():
        report = compiled(cell, shapes(w=(I, N), v=(N, N)), state(), seen()).report
    row = next(row for row in report.parameters if row.path == 'w')
    explained = report.explain('w')
    assert (row.route, row.history) == ('trace', history)
    assert said in explained and 'carries' not in explained


def test_a_layer_whose_trace_has_no_entries_is_told_beside_one_that_has_some():
    def cell(p, h, x):
        below = jnp.tanh(mm(x, p['w']) + mm(h['below'], p['v']))
        return 2 * ({'below': below, 'above': 0.5 * h['above'] + mm(below, p['u'])},)

    states = {'below': state(), 'above': state()}
    said = r'nothing of earlier steps of below: .* gradient of v, w holds the current step only'
    with pytest.warns(BraintraceWarning, match=said):
        compiled(cell, shapes(w=(I, N), v=(N, N), u=(N, N)), states, seen())


def test_a_weight_that_also_feeds_a_state_with_entries_is_not_said_to_lose_all():
    def cell(p, h, x):
        y = mm(x, p['w'])
        plain = jnp.tanh(y + mm(h['plain'], p['v']))
        return 2 * ({'plain': plain, 'leaky': 0.5 * h['leaky'] + y},)

    with pytest.warns(BraintraceWarning, match=r'steps of plain: .* gradient of v holds'):
        compiled(cell, shapes(w=(I, N), v=(N, N)), {'plain': state(), 'leaky': state()}, seen())


# cuts ---------------------------------------------------------------------------------------------


def test_layers_name_what_they_cut_between_each_other():
    report = sized('stack').report()
    assert {c.what: (c.reads, c.reaches) for c in report.cuts} == {
        'etp_mm (one)': (('a',), ('a', 'b')),
        'etp_mm (two)': (('a', 'b'), ('b',)),
    }
    left_out = {text for group in report.groups for text in group.left_out}
    assert left_out == set(map(str, report.cuts))


@pytest.mark.parametrize('reads', [True, False], ids=['reads itself', 'feed-forward'])
def test_a_remedy_is_told_for_what_a_parameter_loses_and_for_nothing_else(reads):
    def cell(p, c, x):
        h = 0.5 * c['h'] + jnp.tanh(mm(join(x, c['h']) if reads else x, p['w']))
        r = 0.9 * c['r'] + mm(h, p['o'])
        return r, {'h': h, 'r': r}

    weights = shapes(w=(I + N * reads, N), o=(N, N))
    with pytest.warns(BraintraceWarning):
        learner = compiled(cell, weights, {'h': state(), 'r': state()}, seen())
    w, o = map(learner.report.explain, 'wo')
    assert 'r leaks.' in w and ('let each unit read only itself' in w) == reads
    assert 'r leaks.' not in o and 'let each unit read only itself' not in o


def test_what_is_left_out_of_a_parameter_is_told_apart_by_kind():
    def cell(p, c, x):
        plain = x @ p['w'][:I]  # plain
        h = 0.5 * c['h'] + mm(join(x, c['h']), p['w']) + plain + 0.1 * c['slow']
        return h, {'h': h, 'slow': 0.9 * c['slow'] + h}

    carry = {'h': state(), 'slow': state()}
    hidden = {'hidden': lambda path, leaf: path == ('h',)}
    with pytest.warns(BraintraceWarning):
        learner = compiled(cell, shapes(w=(I + N, N)), carry, seen(), rule=RULES[1], **hidden)
    (row,) = learner.report.parameters
    assert (row.route, row.history) == ('trace', 'part') and not learner.report.exact
    assert all(left.text == str(left) for left in row.left_out)
    left = {left.kind: left.text for left in row.left_out}
    assert left.keys() == {'cut', 'use', 'lost', 'rule'}
    assert left['use'] == f'its use in slice [{place("# plain", cell)}]'
    assert 'Apply every use of it with a braintrace op' in learner.report.explain('w')
    slow = next(c for c in learner.report.cuts if c.what.startswith('slow'))
    assert (slow.what, slow.reads) == ('slow, which is no hidden state', ('h',))
    assert 'hidden states alone' in slow.reason
    assert [(use.path, use.reason) for use in learner.graph.found('use')] == [('w', 'plain')]
    assert ('h', 'not-hidden') in [(d.group, d.reason) for d in learner.graph.found('cut')]


# explain ------------------------------------------------------------------------------------------


@jax.custom_jvp
def own_rule(x, w):
    return mm(x, w)


@own_rule.defjvp
def _(primals, tangents):
    return own_rule(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]


def every_route(p, h, x):
    first = mm(x, p['before'])
    y = mm(join(jnp.tanh(first), h), p['w'] * p['mask'])
    y = y + jnp.cumsum(mm(x, p['tail']), -1)
    y = y + mm(x, p['scaled'] * x.mean()) + own_rule(x, p['opaque'])
    h = 0.5 * h + jnp.tanh(y + x @ p['plain']) * p['fixed']
    return h @ p['out'], h


ROUTES = {
    'w': (
        'route trace: its gradient is that of the current step plus the history',
        "p['w']",
        'serves hidden group carry',
        'etp_mm (w)',
    ),
    'out': ('same-step (no_hidden_state)', "p['out']", 'the current step is its whole gradient'),
    'plain': ('same-step (not_etp_op)', "p['plain']", 'Apply it with a braintrace op'),
    'before': (
        'same-step (weight_then_weight)',
        "p['before']",
        'etp_mm (before) leads to etp_mm (w)',
    ),
    'tail': ('same-step (mixing_tail)', "p['tail']", 'Mix positions in front of the op'),
    'scaled': (
        'same-step (input_dependent_weight)',
        "p['scaled']",
        'a function of parameters alone',
    ),
    'opaque': (
        'same-step (opaque_call:custom_jvp_call)',
        "p['opaque']",
        'Apply the op outside of that function.',
    ),
    'spare': ('same-step (unused)', None, 'Use it in the step, or remove it.'),
    'fixed': ('frozen (not_trainable)', "p['fixed']", 'let `trainable` select it'),
    'mask': ('frozen (not_inexact)', "p['mask']", 'a floating-point dtype'),
}


@pytest.fixture(scope='module')
def routed():
    inputs = dict.fromkeys(('before', 'tail', 'scaled', 'plain', 'opaque'), (I, N))
    params = {
        **shapes(**inputs, w=(2 * N, N), fixed=(N,), out=(N, 2), spare=(N,)),
        'mask': jax.ShapeDtypeStruct((2 * N, N), bool),
    }
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        return compiled(
            every_route, params, state(), seen(), trainable=lambda path, leaf: path != ('fixed',)
        )


@pytest.mark.parametrize('path', ROUTES)
def test_every_route_is_explained_with_its_place_and_remedy(routed, path):
    words, marker, *more = ROUTES[path]
    text = routed.report.explain(path)
    assert text.startswith(f'{path} ') and all(w in text for w in (words, *more))
    assert marker is None or place(marker, every_route) in text
    assert routed.graph.routes[path].reason in text or routed.graph.routes[path].kind == 'trace'


def test_every_reason_is_covered_above_and_described_in_the_documentation(routed):
    from braintrace._compiler.kinds import KINDS

    rows = {kind: row for kind, row in KINDS.items() if row.route in ('same-step', 'frozen')}
    reasons = {row.reason or kind.replace('-', '_') for kind, row in rows.items()}
    elsewhere = {'not_hidden', 'lost_relation'}  # tests/compiler/degraded.py
    assert {
        r.reason.split(':')[0] for r in routed.routes.values() if r.kind != 'trace'
    } | elsewhere == reasons
    assert not [reason for reason in reasons if f'``{reason}' not in braintrace.Route.__doc__]


def test_an_explanation_gives_the_trace_and_what_is_left_out():
    text = gru_learner().report.explain('n')
    assert 'weight float32[2, 7, 4, 1]' in text and '256 B at batch size 2 (D_RTRL)' in text
    assert all(
        f'through etp_mm ({k}) [{place(chr(39).join(("p[", k, "]")))}]' in text for k in 'zrn'
    )
    assert 'let each unit read only itself' in text


def test_weights_that_are_constants_are_told_in_the_summary_and_asked_for_by_explain():
    def cell(p, h, x):
        return h, 0.5 * h + mm(x, jnp.ones((I, N))) + (mm(x, p['w']) if p else 0.0)  # constant

    said = (
        'the weight of etp_mm is a constant: no ParamState, and not among the parameters '
        f'[{place("# constant", cell)}'
    )
    with pytest.warns(BraintraceWarning, match='Keep it in a brainstate.ParamState'):
        report = (alone := compiled(cell, {}, state(), seen())).report
    assert not report.exact and not report.as_dict()['exact']
    assert 'exact' not in str(report) and 'no-relation' not in str(report)
    assert f'nothing trains these weights:\n  {said}' in str(report)
    with pytest.raises(OptionError, match='Beside them, the weight of etp_mm'):
        alone.report.explain('w')
    with pytest.warns(BraintraceWarning):
        report = compiled(cell, shapes(w=(I, N)), state(), seen()).report
    assert report.exact and f'but nothing trains these weights:\n  {said}' in str(report)


def test_nothing_is_said_of_a_weight_that_is_held_fixed():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner = of_diagonal(trainable=lambda path, leaf: False)
    assert learner.report.diagnostics == () and learner.routes['w'].kind == 'frozen'


def test_a_path_is_a_tuple_or_text_and_may_lead_to_several_parameters():
    report = braintrace.compile(net(), 'D_RTRL', jnp.zeros((2, I)), batch_size=2).report
    both = report.explain(('layers', '0', 'Wz', 'weight'))
    assert both == report.explain('layers/0/Wz/weight') == report.explain('layers/0/Wz')
    told = [text.split(' ')[0] for text in both.split('\n\n')]
    assert told == ['layers/0/Wz/weight/bias', 'layers/0/Wz/weight/weight']
    assert report.explain('layers/1/weight/bias').startswith('layers/1/weight/bias ')
    assert both == report.explain('Wz') == report.explain('Wz/weight')
    for path, nearest in (
        ('layers/0/wz/weight', 'layers/0/Wz'),
        ('layrs/1', 'layers/1'),
        (('layers', '0', 'Wx'), 'layers/0/W'),
    ):
        with pytest.raises(OptionError, match=f'is no parameter of .*; nearest are .*{nearest}'):
            report.explain(path)
    for end in ('bias', 'weight/bias'):
        several = rf"'{end}' is the end of \['layers/0/Wh/weight/bias', .*'layers/1/weight/bias'\]"
        with pytest.raises(OptionError, match=several):
            report.explain(end)
    cell = lambda p, h, x: (h, 0.5 * h + mm(x, p['a/b']))
    odd = compiled(cell, shapes(**{'a/b': (I, N)}), state(), seen()).report
    assert odd.explain('a/b') == odd.explain(('a/b',)) == odd.explain('a~1b')


# drawings -----------------------------------------------------------------------------------------


def parsed(report):
    """The tags and the texts of a view, which raises where its tags are not balanced."""
    root = ElementTree.fromstring(report._repr_html_().replace('<details open>', '<details>'))
    return {e.tag for e in root.iter()}, list(root.itertext())


def test_a_cell_of_a_notebook_is_named_so_and_not_by_the_file_that_stands_for_it():
    names: dict = {'mm': mm}
    code = "def cell(p, h, x):\n    return h, 0.5 * h + mm(x, p['W'])\n"
    exec(compile(code, '/tmp/ipykernel_12/345.py', 'exec'), names)
    learner = compiled(names['cell'], shapes(W=(I, N)), state(), seen())
    assert [r.location for r in learner.report.relations] == ['notebook cell:2 (cell)']


ODD = '<b>"&#\n;`end'


def odd():
    cell = lambda p, h, x: (h, 0.5 * h + mm(x, p[ODD]))
    return compiled(cell, shapes(**{ODD: (I, N)}), state(), seen())


def test_the_html_view_is_balanced_complete_and_escaped():
    tags, texts = parsed(odd().report())
    assert tags == set('div pre details summary table thead tbody tr th td'.split())
    assert ODD in texts
    report = gru_learner().report()
    _, found = parsed(report)
    cells = [str(list(r.shape)) for r in report.parameters] + [c.what for c in report.cuts]
    assert {*cells, 'same-step', 'weight_then_weight'} <= set(found)
    assert '480 B at batch size 2' in found[0]


LABEL = r'"(?:[^"#;<>&`\n]|#\d+;)*"'
SHAPES = (r'\[{}\]', r'\(\[{}\]\)', r'\{\{{}\}\}', r'\[\({}\)\]', r'\(\({}\)\)')
NODE = re.compile(rf'  (?P<id>[a-z]+\d*)(?:{"|".join(SHAPES)})'.replace('{}', LABEL))
EDGE = re.compile(r'  (?P<a>[a-z]+\d*) (?P<kind>-->|-\.->) (?P<b>[a-z]+\d*)')


def flowchart(report):
    """Node ids and edges of a chart; every line must be a node, an edge or the comment."""
    first, comment, *lines = report.to_mermaid().split('\n')
    assert first == 'flowchart LR' and comment.startswith('  %% ')
    nodes, edges = [], {}
    for line in lines:
        node, edge = NODE.fullmatch(line), EDGE.fullmatch(line)
        assert node or edge, line
        if node:
            nodes.append(node['id'])
        else:
            edges[edge['a'], edge['b']] = edge['kind']
    assert len(nodes) == len(set(nodes)) and {end for edge in edges for end in edge} <= set(nodes)
    assert not set(nodes) & {'end', 'graph', 'style', 'class', 'click', 'subgraph', 'default'}
    return nodes, edges


def test_the_chart_of_a_gru_shows_what_is_traced_and_what_is_cut():
    report = gru_learner().report
    nodes, edges = flowchart(report)
    # b n out r z; ops z r n
    assert nodes == ['p0', 'p1', 'p2', 'p3', 'p4', 'e0', 'e1', 'e2', 'g0', 'out']
    whole = 'p0 e2, p1 e2, p2 out, p4 e0, e0 g0, e2 g0, g0 g0, g0 out'
    cut = 'p3 e1, e1 e2, g0 e0, g0 e1, g0 e2'
    for kind, pairs in (('-->', whole), ('-.->', cut)):
        wanted = {tuple(pair.split()) for pair in pairs.split(', ')}
        assert {pair for pair, found in edges.items() if found == kind} == wanted
    assert report.to_mermaid() == gru_learner().report.to_mermaid()


def test_a_chart_has_a_node_for_each_mixing_equation_and_quotes_every_name(routed):
    nodes, edges = flowchart(routed.report)
    assert {n for n in nodes if n[0] == 'm'} and edges['p4', 'out'] == '-->'
    assert all(kind == '-.->' for (_, b), kind in edges.items() if b[0] == 'm')
    assert flowchart(odd().report)[1] == ONE_OP


ONE_OP = {('p0', 'e0'): '-->', ('e0', 'g0'): '-->', ('g0', 'g0'): '-->', ('g0', 'out'): '-->'}


def test_layers_are_joined_by_dashed_edges_and_an_op_in_a_loop_is_one_node():
    _, edges = flowchart(sized('stack').report)
    assert edges['g0', 'e1'] == '-.->' and edges['e1', 'g1'] == '-->' and ('g0', 'g1') not in edges
    report = sized('looped').report()
    assert flowchart(report)[1] == ONE_OP and report.exact
    assert report.relations[0].repeats == (20,) and 'etp_mm x20' in str(report)


# warnings -----------------------------------------------------------------------------------------


def plain(p, h, x):
    h = 0.5 * h + jnp.tanh(mm(x, p['w']) + x @ p['plain'])
    return h, h


PLAIN = shapes(w=(I, N), plain=(I, N), spare=(1,))


def heard(fn):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        fn()
    return [w for w in found if issubclass(w.category, BraintraceWarning)]


def test_warnings_are_told_once_for_all_shapes_at_the_line_that_compiles():
    learner = functional.online(plain, RULES[0])
    arrays = [jax.tree.map(lambda a: jnp.zeros(a.shape), a) for a in (PLAIN, state(), seen())]
    direct = heard(lambda: learner.init(*arrays))
    assert [str(w.message) for w in direct] == [
        'parameter plain reaches a hidden state by a plain operation: its gradient holds the '
        'current step only. Apply it with a '
        f'braintrace op (matmul, element_wise, ...) to give it a trace [{PLACE}].',
        'parameter spare reaches neither an output nor a state: its gradient is zero.',
    ]
    assert not heard(lambda: jax.eval_shape(learner.init, PLAIN, state(3), seen(3)))
    again = heard(lambda: compiled(plain, PLAIN, state(), seen()))
    shell = heard(lambda: braintrace.D_RTRL(initialised()).compile_graph(jnp.zeros((2, I))))
    assert len(again) == 2 and {w.filename for w in (*direct, *again, *shell)} == {__file__}
    assert not heard(gru_learner), 'a model without a remedy to offer is silent'


PLACE = place("p['plain']", plain)


def initialised():
    """A plain layer in front of a cell."""
    model = brainstate.nn.Sequential(brainstate.nn.Linear(I, I), braintrace.nn.MinGRUCell(I, N))
    return brainstate.nn.init_all_states(model, batch_size=2)


def test_a_warning_turned_into_an_error_leaves_model_and_learner_as_they_were():
    model = initialised()
    learner, before = braintrace.D_RTRL(model), {k: (s, s.value) for k, s in model.states().items()}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for _ in range(2):
            with pytest.raises(BraintraceWarning, match=r'layers/0/weight.*plain operation'):
                learner.compile_graph(jnp.zeros((2, I)))
    assert {k: (s, s.value) for k, s in model.states().items()} == before
    with pytest.raises(NotCompiledError):
        str(learner.report)
    with pytest.warns(BraintraceWarning):
        learner.compile_graph(jnp.zeros((2, I)))
    assert learner.report.memory
