"""e-prop against its explicit traces, written in NumPy from the paper.

``e^t = D^t e^{t-1} + D_f^t x^t`` of one hidden number, ``ebar^t = kappa ebar^{t-1} +
(dz/dh)^t e^t`` of what the readout reads, ``gradient = sum_t (B^T error^t) ebar^t``.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional
from braintrace.errors import OptionError
from tests import models, oracles
from tests.compare import added, assert_close, assert_moves
from tests.gradients.harness import learn, of_shapes, quick
from tests.late import LATE
from tests.models.library import LibraryOps
from tests.models.model import squared as loss
from tests.models.ops import _spike_jvp as spike
from tests.models.ops import surrogate

LANES, INPUTS, UNITS, OUTPUTS, STEPS = 2, 3, 5, 2, 9
LEAK, KAPPA, THRESHOLD = 0.9, 0.8, 0.4
stop = jax.lax.stop_gradient
rules = braintrace.rules


def cell(kind, params, carry, x, matmul=braintrace.matmul, beside=False):
    """One recurrent layer under a readout that leaks behind its weights; ``beside``: which reads
    the input too.
    """
    old = carry['z']
    current = matmul(x, params['in']) + matmul(stop(old), params['rec'])
    if kind == 'spiking':
        h = LEAK * carry['h'] + current - THRESHOLD * stop(old)
        z = spike(h - THRESHOLD)
    else:
        z = h = LEAK * carry['h'] + (1 - LEAK) * jnp.tanh(current)
    read = jnp.concatenate([x, z], -1) if beside else z
    y = KAPPA * carry['y'] + matmul(read, params['out'])
    return y, {'h': h, 'z': z, 'y': y}


@functools.cache
def drawn():
    """Parameters, another carry to reset to, inputs, targets."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape)

    params = {'in': draw(INPUTS, UNITS), 'rec': draw(UNITS, UNITS), 'out': draw(UNITS, OUTPUTS)}
    fresh = {'h': draw(LANES, UNITS), 'z': draw(LANES, UNITS), 'y': draw(LANES, OUTPUTS)}
    return params, fresh, draw(STEPS, LANES, INPUTS), draw(STEPS, LANES, OUTPUTS)


def zeros():
    return jax.tree.map(np.zeros_like, drawn()[1])


def explicit(kind, kappa=KAPPA, B=None, flags=None, mask=None):
    """The gradient of each step by explicit traces."""
    params, fresh, xs, ys = drawn()
    B = params['out'] if B is None else B
    h, z, y = (zeros()[k] for k in 'hzy')
    e = {k: np.zeros((LANES, len(params[k]), UNITS)) for k in ('in', 'rec')}
    bar, f, found = dict(e), np.zeros((LANES, UNITS)), []
    for t in range(STEPS):
        if flags is not None:
            at = flags[t][:, None]
            h, z, y = (np.where(at, fresh[k], v) for k, v in zip('hzy', (h, z, y)))
            e, bar = ({k: np.where(at[..., None], 0, v) for k, v in of.items()} for of in (e, bar))
            f = np.where(at, 0, f)
        read = {'in': xs[t], 'rec': z}
        current = xs[t] @ params['in'] + z @ params['rec']
        if kind == 'spiking':
            h = LEAK * h + current - THRESHOLD * z
            slope, psi = np.ones_like(h), surrogate(h - THRESHOLD)
            z = (h > THRESHOLD) * 1.0
        else:
            h = LEAK * h + (1 - LEAK) * np.tanh(current)
            slope, psi, z = (1 - LEAK) * (1 - np.tanh(current) ** 2), np.ones_like(h), h
        y = KAPPA * y + z @ params['out']
        e = {k: LEAK * e[k] + read[k][:, :, None] * slope[:, None] for k in e}
        bar = {k: kappa * bar[k] + psi[:, None] * e[k] for k in e}
        f = KAPPA * f + z
        error = (y - ys[t]) * (1.0 if mask is None else mask[t])
        sent = (error @ B.T)[:, None]
        grads = {k: (sent * bar[k]).sum(0) for k in e}
        found.append({**grads, 'out': f.T @ error})
    return found


@functools.cache
def learner_of(kind, rule, **options):
    return functional.online(functools.partial(cell, kind, **options), rule)


def started(learner, params=None):
    first, _, xs, _ = drawn()
    params = first if params is None else params
    return params, learner.init(params, zeros(), xs[0])


def over_sequence(learner, window=None, params=None, **options):
    params, state = started(learner, params)
    inside = {'inside': options.pop('inside', 'trace')}
    run = learner.sequence_grad(loss, window=window, reduction='sum', **inside)
    return quick(run)(params, state, *drawn()[2:], **options)[0]


def weights_sent_back(learner):
    """B of the readout, as its learner has it."""
    started(learner)
    (number,) = learner.graph.feedback['out'].values()
    return np.asarray(learner.graph.program.constants[number])


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'kind, window', [('spiking', 4), ('leaky', 3), ('spiking', 1), ('leaky', None)]
)
def test_it_is_the_gradient_of_explicit_traces(kind, window):
    want = added(explicit(kind))
    assert_moves(want)
    assert_close(over_sequence(learner_of(kind, rules.e_prop(KAPPA)), window), want)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['spiking', 'leaky'])
@pytest.mark.parametrize(
    'rule, kappa', [(rules.e_prop(KAPPA, 'random'), KAPPA), (rules.rflo(), 0.0)], ids=str
)
def test_random_feedback_sends_the_error_back_through_b(kind, rule, kappa):
    learner = learner_of(kind, rule)
    B = weights_sent_back(learner)
    assert_close(over_sequence(learner, 3), added(explicit(kind, kappa, B)))
    assert np.abs(B - drawn()[0]['out']).max() > 0.1


OPTIONS = [{'credit': 'whole'}, {'scope': 'own'}]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'kind, rule, starts',
    [
        ('spiking', rules.e_prop(KAPPA), []),
        ('spiking', rules.e_prop(KAPPA, 'random'), []),
        ('leaky', rules.e_prop(KAPPA), [(2, 0), (3, 0), (3, 1), (5, 0)]),
        ('spiking', LATE.filtered(KAPPA), []),
        *(('spiking', rules.d_rtrl(**options).filtered(KAPPA), []) for options in OPTIONS),
    ],
)
def test_each_step_gives_the_gradient_of_explicit_traces(kind, rule, starts):
    """The filter goes with every option of the trace; some lanes start again."""
    learner, flags = learner_of(kind, rule), np.zeros((STEPS, LANES), bool)
    for start in starts:
        flags[start] = True
    (params, state), step = started(learner), quick(learner.grad(loss))
    B = weights_sent_back(learner) if learner.graph.feedback else None
    wanted = explicit(kind, B=B, flags=flags)
    for x, target, flag, want in zip(*drawn()[2:], flags, wanted, strict=True):
        state = functional.reset(state, flag, drawn()[1])
        grads, _, _, state = step(params, state, x, target)
        assert_close(grads, want)


@pytest.mark.slow
@pytest.mark.parametrize('window', [None, 2])
def test_resets_of_lanes_and_masks(window):
    flags, mask = np.zeros((STEPS, LANES), bool), np.linspace(0, 2, STEPS)
    flags[[2, 4], 0] = flags[[1, 4, 7], 1] = True
    reset = flags, drawn()[1]
    learner = learner_of('spiking', rules.e_prop(KAPPA))
    got = over_sequence(learner, window, mask=mask, reset=reset)
    assert_close(got, added(explicit('spiking', flags=flags, mask=mask)))


def by_time(kind, params, **options):
    """Back-propagation through time, in which the network reads its old spikes as constants."""
    plain = functools.partial(cell, kind, matmul=jnp.matmul, **options)
    return oracles.by_time(plain, params, zeros(), *drawn()[2:], loss)


@pytest.mark.slow
@pytest.mark.parametrize('window', [1, 3, None])
def test_exact_windows_follow_the_readout_inside_and_the_filter_at_the_border(window):
    learner = learner_of('spiking', rules.e_prop(KAPPA))
    got = over_sequence(learner, window, inside='exact')
    assert_close(got, by_time('spiking', drawn()[0]))
    plain = over_sequence(learner_of('spiking', rules.d_rtrl()), window, inside='exact')
    assert (np.abs(plain['in'] - got['in']).max() > 1e-3) == (window is not None)


@pytest.mark.slow
def test_a_readout_that_reads_the_input_too_filters_what_the_layer_made():
    params = drawn()[0] | {'out': np.vstack([np.ones((INPUTS, OUTPUTS)), drawn()[0]['out']])}
    learner = learner_of('spiking', rules.otpe(KAPPA), beside=True)
    assert_close(over_sequence(learner, 3, params), by_time('spiking', params, beside=True))
    assert [group.num_state for group in learner.graph.hidden_groups] == [2, 1]
    assert 'kappa 0.8 at out[1]' in str(learner.report)


def test_the_report_names_the_filter_and_the_feedback():
    learner = learner_of('spiking', rules.e_prop(KAPPA, 'random'))
    started(learner)
    text = str(learner.report)
    assert 'kappa 0.8 at out; the error reaches h through B in place of W at out' in text
    assert not learner.report.exact


def test_auto_is_the_leak_of_the_readout():
    learner = learner_of('spiking', rules.e_prop('auto'))
    assert_close(over_sequence(learner, 3), added(explicit('spiking')))
    assert 'kappa 0.8 at out' in str(learner.report)
    assert repr(learner.rule) == "e_prop(kappa='auto')"


def leaky(leak, params, carry, x):
    """A feed-forward layer under a readout that leaks."""
    h = LEAK * carry['h'] + braintrace.matmul(x, params['in'])
    y = leak(params, carry, x) * carry['y'] + braintrace.matmul(h, params['out'])
    return y, {'h': h, 'y': y}


def compiled(rule, leak):
    """The learner, and what is told."""
    params, carry, xs, _ = drawn()
    params = {name: params[name] for name in ('in', 'out')}
    carry = {name: carry[name] for name in 'hy'}
    return of_shapes(functools.partial(leaky, leak), rule, params, carry, xs[0])


LOST = r'^out: y leaks behind the weights, and what it remembers of h .*'
TOLD = {  # what is told of a readout and a rule
    'd_rtrl': (0.8, rules.d_rtrl(), f'{LOST}FilteredReadout.*e_prop.kappa=.auto'),
    'es_d_rtrl': (0.8, rules.es_d_rtrl(0.9), f'{LOST}FilteredReadout'),
    'e_prop': (0.8, rules.e_prop(), f'{LOST}FilteredReadout'),
    'a small leak': (1e-3, rules.d_rtrl(), f'{LOST}FilteredReadout'),
    'another kappa': (0.8, rules.e_prop(0.5), r'^out: 0\.8 of y is left .* kappa=.auto'),
    'several': (np.array([0.5, 0.9]), rules.d_rtrl(), f'{LOST}Take exact windows'),
    'kappa': (0.8, rules.e_prop(0.8), ''),
    'auto': (0.8, rules.e_prop('auto'), ''),
    'no leak': (0.0, rules.d_rtrl(), ''),
    'every path': (0.8, rules.rtrl(), ''),
    'no trace': (0.8, rules.same_step(), ''),
    'no rule': (0.8, None, ''),
}


@pytest.mark.parametrize('name', TOLD)
def test_a_readout_that_leaks_behind_its_weights_is_told_with_what_helps(name):
    leak, rule, words = TOLD[name]
    learner, told = compiled(rule, lambda *_: leak)
    assert len(told) == bool(words) and re.search(words, ''.join(told)), told
    if words and rule == rules.d_rtrl():
        assert 'y leaks. ' in learner.report.explain('in')
        assert 'let each unit read only itself' not in learner.report.explain('in')


CHANGES = {  # a share that is left of the outputs, and whether it is told of as a leak
    'learned': (lambda p, c, x: jax.nn.sigmoid(p['in'][0, 0]), True),
    'of the input': (lambda p, c, x: jax.nn.sigmoid(x[:, :1]), False),
    'of a state': (lambda p, c, x: jax.nn.sigmoid(c['h'][:, :1]), False),
    'of itself': (lambda p, c, x: c['y'], False),
    'through a scan': (
        lambda p, c, x: jax.lax.scan(lambda h, _: (h / 2, 0), 1.0, None, 3)[0],
        True,
    ),
}


@pytest.mark.parametrize('name', CHANGES)
def test_auto_needs_a_constant(name):
    leak, known = CHANGES[name]
    _, told = compiled(rules.d_rtrl(), leak)
    assert any('leaks behind the weights' in text for text in told) == known
    if name == 'through a scan':
        compiled(rules.e_prop('auto'), leak)
        return
    with pytest.raises(OptionError, match=r"kappa is 'auto'.*out \(.*\): None\. Give a number"):
        compiled(rules.e_prop('auto'), leak)


def test_a_leak_that_a_jit_traces_is_told_and_no_constant():
    found = []

    @jax.jit
    def program(leak):
        found.extend(compiled(rules.d_rtrl(), lambda *_: leak)[1])
        with pytest.raises(OptionError, match="kappa is 'auto'"):
            compiled(rules.e_prop('auto'), lambda *_: leak)

    program(0.9)
    assert re.search(f'{LOST}Take exact windows', *found)


def test_auto_filters_nothing_where_no_readout_leaks():
    def last(params, h, x):
        h = LEAK * h + braintrace.matmul(x, params['in'])
        return braintrace.matmul(h, params['out']), h

    params = {name: drawn()[0][name] for name in ('in', 'out')}
    learner, _ = of_shapes(last, rules.e_prop('auto'), params, zeros()['h'], drawn()[2][0])
    assert learner.report.exact and not re.search(r'kappa \S+ at', str(learner.report))


UNFILTERED = {  # readouts whose filter would read no position, or count what they forget
    'mixing': (
        lambda z, p: braintrace.matmul(z @ p['rec'], p['out']),
        r'are: out \(.*py:.*Filtered',
    ),
    'plain': (lambda z, p: z @ p['out'], 'kappa is 0.8.*are: none.*FilteredReadout'),
    'forgetting': (
        lambda z, p: braintrace.matmul(jnp.tanh(z), p['out']),
        'A readout that does not leak.*needs no kappa',
    ),
}


@pytest.mark.parametrize('name', UNFILTERED)
def test_a_readout_that_has_no_filter_is_named(name):
    read, found = UNFILTERED[name]

    def cell(params, carry, x):
        h = LEAK * carry + braintrace.matmul(x, params['in'])
        return read(h, params), h

    with pytest.raises(OptionError, match=found):
        of_shapes(cell, rules.e_prop(KAPPA), drawn()[0], zeros()['h'], drawn()[2][0])


def several(ops, params, carry, x):
    """A layer that leaks under three readouts: two read it as it is, or in another layout, and one
    reads a function of it in a recomputed region.
    """
    h = LEAK * carry['h'] + ops.matmul(x, params['in'])
    z = jnp.tanh(h)
    made = {
        'plain': ops.matmul(z, params['plain']),
        'conv': ops.conv(z.reshape(LANES, 3, 2), params['conv']),
        'again': jax.checkpoint(lambda z: ops.matmul(jnp.sin(z), params['again']))(z),
    }
    new = {name: KAPPA * carry[name] + y for name, y in made.items()}
    return new, {**new, 'h': h}


@pytest.mark.slow
def test_several_readouts_of_a_layer():
    rng, xs = np.random.default_rng(3), drawn()[2]
    shapes = {'in': (INPUTS, 6), 'plain': (6, OUTPUTS), 'conv': (3, 2, 2), 'again': (6, OUTPUTS)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    carry = {name: np.zeros((LANES, OUTPUTS)) for name in ('plain', 'again')}
    carry |= {'conv': np.zeros((LANES, 3, 2)), 'h': np.zeros((LANES, 6))}

    def squares(ys, target):
        return sum(((y - target) ** 2).sum() for y in ys.values())

    of = lambda ops: functools.partial(several, ops)
    data = params, carry, xs, np.ones(STEPS), squares
    got, online = learn(of(LibraryOps()), rules.e_prop(KAPPA), *data, window=3)
    assert_close(got, oracles.by_time(of(models.ops.JaxOps()), *data))
    assert 3 in [group.num_state for group in online.graph.hidden_groups]
