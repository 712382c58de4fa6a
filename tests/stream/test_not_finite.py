"""A lane that is not finite is left out of its step and starts anew; the others learn on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace._windows import runs
from braintrace.errors import NotFiniteError, OptionError
from tests.compare import assert_close
from tests.functional.plain import D_RTRL, I, N, cell, drawn, params
from tests.precision import float64 as float64

B, T, RATE = 3, 9, 0.01
NAN, INF = jnp.nan, jnp.inf


def loss(out, target):
    """The part of a lane counts where ``sound``; elsewhere nothing of it is read."""
    y, sound = target
    return jnp.where(sound[:, None], (out - y) ** 2, 0).mean()


def data(length: int = T):
    return drawn(length, B, I), (drawn(length, B, 2), jnp.ones((length, B), bool))


def carry0():
    return drawn(B, N, seed=2)


def learnt(xs, ys, not_finite, reset=None, rule=D_RTRL, of=cell, jit=True, p=None, **options):
    learner, optimizer = functional.online(of, rule), options.pop('optimizer', optax.sgd(RATE))
    p, of_loss = params() if p is None else p, options.pop('loss', loss)
    state = learner.init(p, drawn(B, N), jax.tree.map(lambda x: x[0], xs))
    learn = learner.sequence_update(of_loss, optimizer, not_finite=not_finite, **options)
    reset = (None, carry0()) if reset is None else reset
    run = lambda *args: learn(*args, reset=reset)  # noqa: E731
    given = (xs,) if isinstance(xs, tuple) else xs  # a step takes one input
    return (jax.jit(run) if jit else run)(p, optimizer.init(p), state, given, ys)


def by_hand(xs, ys):
    """D-RTRL of ``plain.cell`` in NumPy, an update at each step, without lanes that are not finite:
    weights, states, and how many steps of each lane were left out.
    """
    p = {k: np.array(v) for k, v in params().items()}
    h, h0, skipped = np.array(drawn(B, N)), np.array(carry0()), np.zeros(B, int)
    of_w, of_b = np.zeros((B, I + N, N)), np.zeros((B, N))
    for x, y in zip(np.array(xs), np.array(ys), strict=True):
        z = np.concatenate([x, h], -1)
        a = np.tanh(np.einsum('bi,io->bo', z, p['w']) + p['b'])
        new = 0.6 * h + a
        d_out = 2 * (new @ p['out'] - y) / y.size
        good = np.isfinite(np.concatenate([new, d_out], -1)).all(-1)
        skipped += ~good
        g = np.flatnonzero(good)
        dh = d_out[g] @ p['out'].T
        old, dy, df = 0.6 * dh, dh * (1 - a[g] ** 2), 1 - a[g] ** 2
        p['out'] -= RATE * new[g].T @ d_out[g]
        p['w'] -= RATE * (z[g].T @ dy + np.einsum('bo,bio->io', old, of_w[g]))
        p['b'] -= RATE * (dy.sum(0) + (old * of_b[g]).sum(0))
        of_w[g] = 0.6 * of_w[g] + z[g][:, :, None] * df[:, None, :]
        of_b[g] = 0.6 * of_b[g] + df
        h = np.where(good[:, None], new, h0)
        of_w[~good] = of_b[~good] = 0
    return p, h, skipped


def spoiled(where: str):
    """Data with numbers that are not finite: at the first step, at the last one, two in a row, in
    two lanes at once, in all of them.
    """
    xs, (ys, sound) = data()
    if where == 'x':
        xs = xs.at[3, 1, 0].set(NAN).at[4, 1].set(-INF).at[T - 1, 2].set(NAN)
    elif where == 'y':
        ys = ys.at[0, 0, 1].set(NAN).at[5, 2].set(INF).at[5, 0].set(NAN)
    else:
        xs, ys = xs.at[4].set(NAN), ys.at[6].set(NAN)
    return xs, ys, sound


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('where', ['x', 'y', 'all lanes'])
def test_the_others_learn_as_if_it_were_not_there(where):
    xs, ys, sound = spoiled(where)
    p, losses, _, state, _, skipped, _ = learnt(xs, (ys, sound), 'skip')
    want, h, counts = by_hand(xs, ys)
    assert_close((p, state.carry), (want, h))
    assert skipped.tolist() == counts.tolist() and skipped.dtype == jnp.int32
    ends = jnp.isnan(losses) | jnp.isinf(losses)
    at = [~(jnp.isfinite(a).all((1, 2))) for a in (xs, ys)]
    assert ends.tolist() == (at[0] | at[1]).tolist()  # of the data as they came


@pytest.mark.slow
def test_where_the_loss_alone_overflows_no_lane_is_to_blame_and_all_start_anew():
    xs, (ys, sound) = data()
    p, losses, _, state, _, skipped, _ = learnt(xs, (ys.at[4, 1].set(1e200), sound), 'skip')
    assert skipped.tolist() == [1] * B and jnp.isinf(losses[4]) and jnp.isfinite(losses[5:]).all()
    assert state.t.tolist() == [T - 5] * B and jnp.isfinite(p['w']).all()


@pytest.mark.tier(quick=0, one_in=3)
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'write_every': 3},
        {'update_every': 2},
        {'update_every': 2, 'inside': 'exact'},
        {'update_every': 4, 'reduction': 'sum'},
        {'rule': rules.es_d_rtrl(0.7)},
        {'rule': rules.es_d_rtrl(0.7), 'update_every': 2, 'write_every': 4},
        {'rule': rules.snap(1)},
        {'rule': rules.rtrl(), 'update_every': 2},
        {'rule': rules.same_step()},
        {'jit': False},
    ],
    ids=str,
)
def test_it_is_a_mask_of_the_lane_and_two_resets(options):
    """Every rule and window, beside a call that is told by hand what to leave out."""
    xs, ys, _ = spoiled('x')
    bad = ~jnp.isfinite(xs).all(-1)
    flags = bad.at[1:].set(bad[1:] | bad[:-1]).at[6].set(True)
    of_user = jnp.zeros(T, bool).at[6].set(True)
    got = learnt(xs, (ys, ~jnp.zeros_like(bad)), 'skip', reset=(of_user, carry0()), **options)
    clean = jnp.where(bad[..., None], 0, xs)
    want = learnt(clean, (ys, ~bad), 'keep', reset=(flags, carry0()), **options)
    assert_close(got[0], want[0])
    last = jnp.zeros(B, bool).at[2].set(True)  # what is bad in the last step starts anew after it
    state = functional.reset(want.state, last, carry0())
    assert_close((got.state.carry, got.state.t), (state.carry, state.t))
    assert got.skipped.tolist() == bad.sum(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize('jit', [True, False])
def test_a_group_of_blocks_is_run_once_more_and_the_others_are_not(jit, monkeypatch):
    """Groups of two blocks of two steps, then one block, then a step."""
    monkeypatch.setattr(runs, 'GUARDED', 2)
    xs, ys = data(11)
    xs = xs.at[5, 1].set(NAN).at[10, 0].set(NAN)
    p, _, _, state, _, skipped, _ = learnt(xs, ys, 'skip', jit=jit, write_every=2)
    want, h, counts = by_hand(xs, ys[0])
    assert_close((p, state.carry), (want, h))
    assert skipped.tolist() == counts.tolist() == [1, 1, 0]


@pytest.mark.slow
def test_an_input_that_all_lanes_share_is_not_taken_for_lanes_of_its_own():
    """It has as many features as there are lanes."""

    def shared(p, h, x):
        own, common = x
        return cell(p, h, own + common @ jnp.ones((B, I)))

    xs, (ys, sound) = data()
    ys, common = ys.at[4, 1].set(NAN), drawn(T, B)
    p, *_, skipped, _ = learnt((xs, common), (ys, sound), 'skip', of=shared)
    want, _, counts = by_hand(xs + common[:, None] @ jnp.ones((B, I)), ys)
    assert_close(p, want)
    assert skipped.tolist() == counts.tolist()


@pytest.mark.slow
def test_a_stream_goes_on_after_a_bad_end_and_a_mask_hides_a_bad_target():
    xs, ys, sound = spoiled('x')
    learner, optimizer = functional.online(cell, D_RTRL), optax.adam(RATE)
    learn = learner.sequence_update(loss, optimizer, not_finite='skip')
    given = params(), optimizer.init(params()), learner.init(params(), drawn(B, N), xs[0])
    ys = ys.at[2].set(NAN)
    mask = jnp.ones(T).at[2].set(0)
    found = learn(*given, xs, (ys, sound), mask, reset=(None, carry0()))
    assert found.skipped.tolist() == [0, 2, 1] and found.state.t.tolist() == [T, T - 5, 0]
    xs, ys = data()
    given = found.params, found.opt_state, found.state
    found = learn(*given, xs, ys, reset=(None, carry0()))
    assert found.skipped.tolist() == [0] * B
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_weights_that_are_not_finite_skip_all_and_say_so():
    p = {**params(), 'out': params()['out'].at[0].set(NAN)}
    new, *_, skipped, _ = learnt(*data(), 'skip', p=p)
    assert_close((new['w'], new['b']), (p['w'], p['b']), 0)
    assert skipped.tolist() == [T] * B


@pytest.mark.slow
def test_a_gradient_that_the_optimizer_hides_is_not_finite_all_the_same():
    """The loss is finite where lane 1 has a derivative that is not."""

    def hidden(out, target):
        y, sound = target
        bad = ~sound[:, None]
        root = jnp.sqrt(jnp.where(bad, out - jax.lax.stop_gradient(out), 1.0)) - 1
        return jnp.sum(jnp.where(bad, 0, (out - y) ** 2) + jnp.where(bad, root + 1, root))

    xs, (ys, sound) = data()
    sound, found = sound.at[4, 1].set(False), []
    for optimizer in (optax.sgd(RATE), optax.chain(optax.zero_nans(), optax.sgd(RATE))):
        got = learnt(xs, (ys, sound), 'skip', loss=hidden, optimizer=optimizer)
        assert jnp.isfinite(got.losses).all() and got.skipped.tolist() == [0, 1, 0]
        found.append(got.params)
    assert_close(*found)


def test_a_model_without_lanes_starts_anew_as_a_whole():
    learner = functional.online(lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p)), D_RTRL)
    xs, h = drawn(T, I).at[3].set(NAN), jnp.zeros(N)
    state = learner.init(drawn(I, N), h, xs[0])
    optimizer = optax.sgd(RATE)
    learn = learner.sequence_update(
        lambda h, y: ((h - y) ** 2).mean(), optimizer, not_finite='skip'
    )
    given = drawn(I, N), optimizer.init(drawn(I, N)), state, xs, jnp.ones((T, N))
    p, losses, _, state, _, skipped, _ = learn(*given, reset=(None, h))
    assert int(skipped) == 1 and int(state.t) == T - 4 and jnp.isfinite(p).all()
    mapped = jax.vmap(lambda x: learn(*given[:3], x, given[4], reset=(None, h)))
    xs = jnp.stack([xs, jnp.ones_like(xs)])
    assert mapped(xs).skipped.tolist() == [1, 0]


@pytest.mark.slow
def test_raise_keeps_what_was_learnt_and_names_the_lanes():
    xs, ys, sound = spoiled('x')
    with pytest.raises(NotFiniteError) as caught:
        learnt(xs, (ys, sound), 'raise', jit=False)
    text = str(caught.value)
    assert (
        '2 steps of lane 1, 1 steps of lane 2' in text
        and 'that is not finite is that of step 3' in text
    )
    want = learnt(xs, (ys, sound), 'skip', jit=False)
    so_far = caught.value.so_far
    assert_close((so_far.params, so_far.state), (want.params, want.state), 0)


def test_what_can_not_be_done_is_refused():
    xs, ys = data(2)
    learner, optimizer = functional.online(cell, D_RTRL), optax.sgd(RATE)
    state, p = learner.init(params(), drawn(B, N), xs[0]), params()
    given = p, optimizer.init(p), state, xs, ys
    with pytest.raises(OptionError, match="not_finite is 'drop'; choose 'keep' or"):
        learner.sequence_update(loss, optimizer, not_finite='drop')
    for options in ({'update_every': 0}, {'update_every': 2.5}, {'write_every': True}):
        (name, value), *_ = options.items()
        with pytest.raises(OptionError, match=f'{name} is {value}; give a'):
            learner.sequence_update(loss, optimizer, **options)
    with pytest.raises(OptionError, match='Give reset=.None'):
        learner.sequence_update(loss, optimizer, not_finite='skip')(*given)
    raises = learner.sequence_update(loss, optimizer, not_finite='raise')
    with pytest.raises(OptionError, match='inside of a transformation'):
        jax.jit(raises)(*given)
    with pytest.raises(OptionError, match='beside a synthesizer'):
        functional.online(cell, None).sequence_update(
            loss, optimizer, 2, inside='exact', synthesizer=lambda p, h: h, not_finite='skip'
        )


def test_without_the_option_the_program_is_as_it_was():
    xs, ys = data()
    learner, optimizer = functional.online(cell, D_RTRL), optax.sgd(RATE)
    given = params(), optimizer.init(params()), learner.init(params(), drawn(B, N), xs[0]), xs, ys

    def text(**options):
        learn = learner.sequence_update(loss, optimizer, **options)
        return jax.jit(lambda *args: learn(*args)).lower(*given).as_text()

    plain = text()
    assert text(not_finite='keep', observe=None) == plain and 'is_finite' not in plain
