"""An update that is not finite is left out; after it samples that are not finite start again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import BraintraceWarning, NotFiniteError, OptionError
from tests.compare import assert_close
from tests.functional.plain import D_RTRL, I, N, drawn, params
from tests.late import LATE
from tests.precision import float64 as float64
from tests.tiers import in_turn, none

B, T, RATE = 3, 9, 0.01
NAN, INF, SGD = jnp.nan, jnp.inf, optax.sgd(RATE)
K, LANE = 4, 1  # where the first number is bad
ONE = np.arange(B) == LANE


def cell(p, h, inputs):
    """Leaky units with a bias, in front of a readout; ``keep`` is the leak of each sample."""
    x, keep = inputs
    h = keep * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['w'], p['b']))
    return h @ p['out'], h


def loss(out, y):
    return ((out - y) ** 2).mean()


def data(length: int = T):
    return (drawn(length, B, I), jnp.full((length, B, 1), 0.6)), drawn(length, B, 2)


def carry0():
    return drawn(B, N, seed=2)


def spoiled(what: str):
    """Data with numbers that are not finite, or that make some, in one sample or in all."""
    (xs, keep), ys = data()
    if what == 'y':
        ys = ys.at[K, LANE].set(NAN)
    elif what == 'overflow':  # the state a step later
        keep = keep.at[K : K + 2, LANE].set(1e300)
    elif what == 'all':
        xs = xs.at[K].set(NAN)
    elif what == 'ends':
        xs = xs.at[0, 0, 0].set(NAN).at[T - 1, 2].set(-INF)
    else:
        xs = xs.at[K, LANE, 0].set(float(what))
    return (xs, keep), ys


@functools.cache
def updates(jit=True, of=cell, rule=D_RTRL, optimizer=SGD, loss=loss, **options):
    """A learner and its updates along a sequence, compiled once for the tests that share them."""
    learner = functional.online(of, rule)
    learn = learner.sequence_update(loss, optimizer, **options)
    return learner, jax.jit(lambda *args, reset=None: learn(*args, reset=reset)) if jit else learn


def learnt(xs, ys, not_finite='reset', p=None, first=None, state=None, again=None, **options):
    """Updates from a carry on; ``again``: the one with which samples start again."""
    learner, learn = updates(not_finite=not_finite, **options)
    p, optimizer = params() if p is None else p, options.get('optimizer', SGD)
    first = drawn(B, N).astype(p['b'].dtype) if first is None else first
    first = learner.init(p, first, jax.tree.map(lambda x: x[0], xs))
    given = p, optimizer.init(p), first if state is None else state(first), (xs,), ys
    return learn(*given, reset=(None, carry0() if again is None else again))


def by_hand(xs, ys, every: int = 1, trace: float = 0.0, sound=1, written: int = 1):
    """D-RTRL of ``cell`` in NumPy, samples put back by hand: weights, states, the trace of w, and
    the counts. ``trace``: the number with which that of a sample begins; ``sound``: the samples
    whose losses count. ``written``: after how many updates the trace is; before, it does not
    overflow.
    """
    p = {k: np.array(v) for k, v in params().items()}
    h, h0, counts = np.array(drawn(B, N)), np.array(carry0()), [0, np.zeros(B, int)]
    e = {'w': np.zeros((B, I + N, N)), 'b': np.zeros((B, N))}
    e['w'][LANE] = trace
    steps = list(zip(*map(np.array, (*xs, ys)), strict=True))
    for begin in range(0, T, every):
        grads = {k: 0 for k in p}
        for x, keep, y in steps[begin : begin + every]:
            z = np.concatenate([x, h], -1)
            a = np.tanh(z @ p['w'] + p['b'])
            new = keep * h + a
            d_out = np.where(sound, 2 * (new @ p['out'] - y) / y.size, 0)
            dh, df = d_out @ p['out'].T, 1 - a**2
            grads['out'] += new.T @ d_out
            late = begin // every % written
            read = np.nan_to_num(e['w'], posinf=0) if late else e['w']
            grads['w'] += z.T @ (dh * df) + np.einsum('bo,bio->io', keep * dh, read)
            grads['b'] += (dh * df).sum(0) + (keep * dh * e['b']).sum(0)
            e['w'] = keep[..., None] * e['w'] + z[:, :, None] * df[:, None]
            e['b'] = keep * e['b'] + df
            h = new
        finite = all(np.isfinite(g).all() for g in grads.values())
        if finite:
            p = {k: p[k] - RATE * g / len(steps[begin : begin + every]) for k, g in grads.items()}
        bad = ~np.isfinite(np.concatenate([h, e['w'].reshape(B, -1), e['b']], 1)).all(1)
        bad &= not (finite and np.isfinite(h).all())  # nobody looks at a trace before
        h, counts = np.where(bad[:, None], h0, h), [counts[0] + (not finite), counts[1] + bad]
        e = {k: np.where(bad.reshape(-1, *[1] * (v.ndim - 1)), 0, v) for k, v in e.items()}
    return p, h, e['w'], counts


def assert_as_by_hand(got, want):
    p, h, e, (updates, samples) = want
    past = np.asarray(got.state.t) > 0
    assert_close((got.params, got.state.carry), (p, h))
    assert_close(got.state.trace['w']['carry']['weight'][0][past], e[past])
    assert got.skipped.updates == updates and got.skipped.samples.tolist() == samples.tolist()
    assert got.skipped.samples.dtype == jnp.int32


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('what', ['inf', 'nan', '-inf', 'overflow', 'y', 'all', 'ends'])
def test_that_update_is_left_out_and_that_sample_starts_anew_and_the_others_go_on(what):
    data = spoiled(what)
    with np.errstate(all='ignore'):
        want = by_hand(*data)
    assert_as_by_hand(learnt(*data), want)
    samples = {'all': [1, 1, 1], 'ends': [1, 0, 1], 'y': [0, 0, 0]}.get(what, [0, 1, 0])
    updates = 2 if what in ('overflow', 'ends') else 1
    assert (want[-1][0], want[-1][1].tolist()) == (updates, samples)


@pytest.mark.slow
def test_a_trace_that_overflows_costs_its_sample_and_the_update_that_reads_it():
    """Its state is finite at each step, and nothing reads it. Two updates share a write of the
    trace, and what is not written does not overflow.
    """
    (xs, keep), ys = data()
    inputs = xs, keep.at[K, LANE].set(1e4)
    begin, sound = 1e306, ~ONE[:, None]

    def full(state):
        (e,) = state.trace['w']['carry']['weight']
        entry = {**state.trace['w']['carry'], 'weight': (e.at[LANE].set(begin),)}
        return state.replace(trace={'w': {'carry': entry}}, t=state.t + 1)

    with np.errstate(all='ignore'):
        want = by_hand(inputs, ys, trace=begin, sound=sound, written=2)
    of_sound = lambda out, y: jnp.where(sound, (out - y) ** 2, 0).mean()
    got = learnt(inputs, ys, loss=of_sound, state=full)
    assert_as_by_hand(got, want)
    assert got.skipped.samples.tolist() == [0, 1, 0]


def in_pieces(xs, ys, every: int, flags, **options):
    """One call for each update; that of step K is left out, and samples are put back by hand."""
    p = options.pop('p', params())
    learner, learn = updates(update_every=every, **options)
    state = learner.init(p, drawn(B, N).astype(p['b'].dtype), (xs[0][0], xs[1][0]))
    opt_state = options.get('optimizer', SGD).init(p)
    for begin in range(0, T, every):
        part = slice(begin, begin + every)
        found = learn(p, opt_state, state, (jax.tree.map(lambda a: a[part], xs),), ys[part])
        state = found.state
        if begin <= K < begin + every:
            state = functional.reset(state, jnp.array(flags), carry0().astype(p['b'].dtype))
        else:
            p, opt_state = found.params, found.opt_state
    return p, state


@pytest.mark.tier(quick=0)
@in_turn(
    none,
    options=[
        {},
        {'rule': LATE},
        {'update_every': 2},
        {'rule': LATE, 'update_every': 2},
        {'update_every': 2, 'inside': 'exact'},
        {'update_every': 4, 'reduction': 'sum'},
        {'rule': rules.es_d_rtrl(0.7)},
        {'rule': rules.es_d_rtrl(0.7), 'update_every': 2},
        {'rule': rules.snap(1)},
        {'rule': rules.rtrl(), 'update_every': 2},
        {'rule': rules.same_step()},
        {'jit': False},
    ],
    what=['nan', 'inf'],
)
def test_it_is_a_reset_of_the_sample_by_hand(options, what):
    """Every rule and window, an infinity that tanh makes finite beside a NaN in the state."""
    data = spoiled(what)
    got = learnt(*data, **options)
    every = options.get('update_every', 1)
    options = {k: v for k, v in options.items() if k not in ('update_every', 'jit')}
    # an infinity is gone after its step where there is no trace
    flags = ONE & (what == 'nan' or 'same_step' not in str(options))
    p, state = in_pieces(*data, every, flags, **options)
    assert got.skipped.updates == 1 and got.skipped.samples.tolist() == flags.tolist()
    assert_close((got.params, got.state.carry), (p, state.carry))


@pytest.mark.slow
def test_an_overflow_in_float16_costs_its_sample():
    """7e4 is an infinity, as is the square of a gradient that its optimiser makes."""
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float16), tree)
    (xs, keep), ys = data()
    inputs, p = half((xs.at[K, LANE, 0].set(7e4), keep)), half(params())
    got = learnt(inputs, half(ys), p=p, again=half(carry0()))
    assert got.state.carry.dtype == jnp.float16
    want, state = in_pieces(inputs, half(ys), 1, ONE, p=p)
    assert_close((got.params, got.state.carry), (want, state.carry), 2e-3)
    assert got.skipped.updates == 1 and got.skipped.samples.tolist() == [0, 1, 0]


@pytest.mark.slow
def test_an_update_whose_moments_overflow_is_left_out_whole_and_later_ones_go_on():
    """The gradient is finite, and its square is none in float32."""
    f32 = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    (inputs, ys), p, optimizer = f32(data()), f32(params()), optax.adam(RATE)
    ys = ys.at[K].set(1e25)
    got = learnt(inputs, ys, p=p, optimizer=optimizer, again=f32(carry0()))
    want, state = in_pieces(inputs, ys, 1, ONE & False, p=p, optimizer=optimizer)
    assert_close((got.params, got.state.carry), (want, state.carry), 1e-5)
    assert got.skipped.updates == 1 and not got.skipped.samples.any()
    assert got.opt_state[0].count == T - 1


@pytest.mark.slow
def test_a_weight_may_be_a_single_number():
    """It is 1 here, and does not learn."""

    def of(p, h, inputs):
        out, h = cell(p, h, inputs)
        return jax.lax.stop_gradient(p['gain']) * out, h

    got = learnt(*spoiled('nan'), of=of, p={**params(), 'gain': jnp.ones(())})
    want = learnt(*spoiled('nan'))
    assert_close({k: got.params[k] for k in want.params}, want.params)
    assert got.skipped.updates == 1 and got.params['gain'] == 1


@pytest.mark.slow
def test_an_infinity_with_which_an_optimizer_begins_is_no_fault():
    """The lowest loss so far, which is never told here."""
    best = optax.GradientTransformation(lambda p: jnp.array(INF), lambda g, s, p: (g, s))
    got = learnt(*spoiled('y'), optimizer=optax.chain(best, optax.sgd(RATE)))
    want = learnt(*spoiled('y'))
    assert_close(got.params, want.params, 0)
    assert got.skipped.updates == want.skipped.updates == 1


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*by a plain path between different shapes')
def test_where_no_sample_can_start_anew_by_itself_all_do():
    """All of them read one average, which is a hidden leaf."""

    def shared(p, carry, inputs):
        h, mean = carry
        out, new = cell(p, h + mean, inputs)
        return out, (new, 0.9 * mean + 0.1 * new.mean(0))

    first = carry0(), jnp.zeros(N)
    got = learnt(*spoiled('inf'), of=shared, first=first, again=first)
    assert got.skipped.updates == 1 and got.skipped.samples.tolist() == [1] * B
    assert jnp.isfinite(got.state.carry[0]).all() and jnp.isfinite(got.params['w']).all()
    assert got.state.t.tolist() == [T - K - 1] * B


@pytest.mark.slow
@pytest.mark.parametrize('what', ['nan', 'inf'])
def test_samples_may_stand_second_in_the_state(what):
    def second(p, h, inputs):
        out, h = cell(p, h.T, inputs)
        return out, h.T

    got = learnt(*spoiled(what), of=second, first=drawn(B, N).T, again=carry0().T)
    with np.errstate(all='ignore'):
        p, h, _, (updates, samples) = by_hand(*spoiled(what))
    assert_close((got.params, got.state.carry), (p, h.T))
    assert got.skipped.updates == updates and got.skipped.samples.tolist() == samples.tolist()


@pytest.mark.slow
def test_a_stream_goes_on_after_a_bad_end_and_a_mask_hides_a_bad_target():
    xs, ys = spoiled('ends')
    learner, learn = updates(not_finite='reset')
    state = learner.init(params(), drawn(B, N), jax.tree.map(lambda x: x[0], xs))
    mask = jnp.ones(T).at[2].set(0)
    given = params(), SGD.init(params()), state, (xs,), ys.at[2].set(NAN), mask
    found = learn(*given, reset=(None, carry0()))
    assert found.skipped.updates == 2 and found.skipped.samples.tolist() == [1, 0, 1]
    assert found.state.t.tolist() == [T - 1, T, 0]
    xs, ys = data()
    given = found.params, found.opt_state, found.state
    found = learn(*given, (xs,), ys, reset=(None, carry0()))
    assert found.skipped.updates == 0 and not found.skipped.samples.any()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_weights_that_are_not_finite_stay_as_they_are_and_every_update_is_told():
    p = {**params(), 'out': params()['out'].at[0].set(NAN)}
    got = learnt(*data(), p=p)
    assert_close((got.params['w'], got.params['b']), (p['w'], p['b']), 0)
    assert got.skipped.updates == T


@pytest.mark.slow
def test_a_gradient_that_the_optimizer_hides_is_not_finite_all_the_same():
    """The loss is finite where a derivative is not."""

    def hidden(out, y):
        root = jnp.sqrt(jnp.where(y > 1e3, out - jax.lax.stop_gradient(out), 1.0))
        return jnp.sum(jnp.where(y > 1e3, root, (out - y) ** 2))

    xs, ys = data()
    ys, found = ys.at[K, LANE].set(1e4), []
    for optimizer in (optax.sgd(RATE), optax.chain(optax.zero_nans(), optax.sgd(RATE))):
        got = learnt(xs, ys, loss=hidden, optimizer=optimizer)
        assert jnp.isfinite(got.losses).all() and got.skipped.updates == 1
        found.append(got.params)
    assert_close(*found)


@pytest.mark.slow
def test_an_infinity_with_which_a_carry_begins_is_no_fault():
    """The largest number so far."""

    def of_largest(p, carry, inputs):
        h, largest = carry
        out, h = cell(p, h, inputs)
        return out, (h, jnp.maximum(largest, jax.lax.stop_gradient(h)))

    first = carry0(), jnp.full((B, N), -INF)
    got = learnt(*data(), of=of_largest, first=first, again=first)
    assert got.skipped.updates == 0 and not got.skipped.samples.any()


def test_a_model_without_lanes_starts_anew_as_a_whole():
    alone = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p))
    learner, learn = updates(of=alone, not_finite='reset')
    xs, h, w = drawn(T, I).at[3].set(NAN), jnp.zeros(N), drawn(I, N)
    given = w, SGD.init(w), learner.init(w, h, xs[0]), xs, jnp.ones((T, N))
    p, _, _, state, _, skipped, _ = learn(*given, reset=(None, h))
    assert skipped.updates == skipped.samples == 1
    assert int(state.t) == T - 4 and jnp.isfinite(p).all()
    mapped = jax.vmap(lambda x: learn(*given[:3], x, given[4], reset=(None, h)))
    found = mapped(jnp.stack([xs, jnp.ones_like(xs)]))
    assert found.skipped.updates.tolist() == found.skipped.samples.tolist() == [1, 0]


def test_a_batch_that_no_op_shows_is_told_and_the_advice_works():
    def cell(p, h, x):
        v = jax.nn.sigmoid(braintrace.element_wise(p)) * h['v'] + x
        return v, {'v': v}

    xs, h, w = jnp.ones((T, 3, N)).at[2, 1].set(NAN), {'v': jnp.zeros((3, N))}, jnp.ones(N)

    def learn(**options):
        learner = functional.online(cell, D_RTRL, **options)
        given = w, SGD.init(w), learner.init(w, h, xs[0])
        update = jax.jit(learner.sequence_update(loss, SGD, not_finite='reset'))
        return update(*given, xs, jnp.zeros_like(xs), reset=(None, h)).skipped.samples.tolist()

    with pytest.warns(BraintraceWarning, match=r"Policy\(batched=\('v',\)\)"):
        assert learn() == 1
    assert learn(policy=braintrace.Policy(batched=('v',))) == [0, 1, 0]


@pytest.mark.slow
def test_raise_keeps_what_was_learnt_and_names_the_samples():
    xs, ys = spoiled('ends')
    with pytest.raises(NotFiniteError) as caught:
        learnt(xs, ys, 'raise', jit=False)
    text = str(caught.value)
    assert '2 update(s) were not finite' in text and 'sample 0 (1 x), sample 2 (1 x)' in text
    assert 'that is not finite is that of step 0' in text
    want, so_far = learnt(xs, ys, jit=False), caught.value.so_far
    parts = [(found.params, found.state.carry, found.state.t) for found in (so_far, want)]
    assert_close(*parts, 0)


@pytest.mark.slow
def test_data_that_are_finite_pass_where_jax_looks_for_nans():
    with jax.debug_nans(True):
        got = learnt(*data(2), optimizer=optax.adam(RATE), jit=False)
    assert got.skipped.updates == 0


def test_what_can_not_be_done_is_refused():
    (xs, ys), learner, optimizer, p = data(2), functional.online(cell, D_RTRL), SGD, params()
    state = learner.init(p, drawn(B, N), jax.tree.map(lambda x: x[0], xs))
    given = p, optimizer.init(p), state, (xs,), ys
    with pytest.raises(OptionError, match="not_finite is 'drop'; choose 'keep' or 'reset' or"):
        learner.sequence_update(loss, optimizer, not_finite='drop')
    for options in ({'update_every': 0}, {'update_every': 2.5}, {'update_every': True}):
        (name, value), *_ = options.items()
        with pytest.raises(OptionError, match=f'{name} is {value}; give a'):
            learner.sequence_update(loss, optimizer, **options)
    with pytest.raises(OptionError, match='Give reset=.None'):
        learner.sequence_update(loss, optimizer, not_finite='reset')(*given)
    raises = learner.sequence_update(loss, optimizer, not_finite='raise')
    with pytest.raises(OptionError, match='inside of a transformation'):
        jax.jit(raises)(*given)


def test_without_the_option_the_program_is_as_it_was():
    (xs, ys), learner, p = data(), functional.online(cell, D_RTRL), params()
    state = learner.init(p, drawn(B, N), jax.tree.map(lambda x: x[0], xs))
    given = p, SGD.init(p), state, (xs,), ys

    def text(**options):
        learn = learner.sequence_update(loss, SGD, **options)
        return jax.jit(lambda *args: learn(*args)).lower(*given).as_text()

    plain = text()
    assert text(not_finite='keep', observe=None) == plain and 'is_finite' not in plain
