"""Training on a task is what a loop written by hand does, from each seed by itself."""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import functional, nn, rules, tasks
from braintrace.errors import (
    BraintraceError,
    BraintraceWarning,
    OptionError,
    StepFunctionError,
    StructureError,
)
from braintrace.tasks._task import check_draw
from tests.compare import assert_close
from tests.tiers import slow

ADAM, UNITS = optax.adam(1e-2), 5


def draw(key, batch_size, part):
    """One call of a generator, which is quickly compiled: the sum of the numbers of each step."""
    xs = jax.random.uniform(key, (6, batch_size, 2))
    return tasks.Batch(xs, xs.sum(-1, keepdims=True), jnp.zeros(6).at[-1].set(1))


TASK = dataclasses.replace(tasks.adding(6), draw=draw)
SAME = dataclasses.replace(TASK, draw=lambda key, *rest: TASK.draw(jax.random.key(0), *rest))


class Network(brainstate.nn.Module):
    """A recurrent layer; ``noise`` drops some of its units."""

    def __init__(self, noise=False, units=UNITS):
        super().__init__()
        self.cell, self.readout = nn.MinGRUCell(2, units), nn.Linear(units, 1)
        self.noise = noise

    def update(self, x):
        h = self.cell(x)
        if self.noise:
            h = h * brainstate.random.bernoulli(0.5, size=h.shape)
        return self.readout(h)


class Following(brainstate.nn.Module):
    """A readout behind a function."""

    def __init__(self, fn):
        super().__init__()
        self.readout, self.fn = nn.Linear(2, 1), fn

    def update(self, x):
        return self.fn(self.readout(x))


def surrogate_of(slope):
    """The identity, with another slope."""
    fn = jax.custom_jvp(lambda y: y)
    fn.defjvp(lambda primals, tangents: (fn(*primals), slope * tangents[0]))
    return fn


def plain(params, h, x):
    """A tanh cell without any op of the package."""
    h = jnp.tanh(jnp.concatenate([x, h], -1) @ params['w'])
    return h @ params['out'], h


def made(seed, inputs=2):
    of_w, of_out = jax.random.split(jax.random.key(seed))
    w = jax.random.normal(of_w, (inputs + UNITS, UNITS)) / 2
    return plain, {'w': w, 'out': jax.random.normal(of_out, (UNITS, 1))}, jnp.zeros((4, UNITS))


def run(rule, model=made, task=TASK, updates=3, seeds=(3, 5), optimizer=ADAM, **options):
    updates, options = None if task.stream else updates, {'test': 8} | options
    return tasks.run(task, model, rule, optimizer, updates, seeds, batch_size=4, **options)


def by_hand(seed, gradient, updates=3):
    """Losses and parameters of a loop; ``gradient(params, carry, xs, ys, mask)``."""
    _, params, carry = made(seed)
    moments, losses = ADAM.init(params), []
    for number in range(updates):
        batch = TASK.sample(jax.random.fold_in(jax.random.key(seed), number), 4)
        loss, grads = gradient(params, carry, *batch)
        changes, moments = ADAM.update(grads, moments, params)
        params = optax.apply_updates(params, changes)
        losses.append(float(loss))
    return losses, params


def reverse(window):
    """Back-propagation through a loop; no gradient passes a border of ``window`` steps."""

    @jax.jit
    def gradient(params, carry, xs, ys, mask):
        def total(params):
            def step(h, at):
                t, x = at
                h = jnp.where(t % window == 0, jax.lax.stop_gradient(h), h)
                return plain(params, h, x)[::-1]

            outputs = jax.lax.scan(step, carry, (jnp.arange(len(xs)), xs))[1]
            return jnp.average(jnp.mean((outputs - ys) ** 2, (1, 2)), weights=mask)

        return jax.value_and_grad(total)(params)

    return gradient


def online(rule, **options):
    def gradient(params, carry, xs, ys, mask):
        learner = functional.online(plain, rule, mark='auto')
        grads_of = learner.sequence_grad(TASK.loss, **options)
        grads, losses, *_ = grads_of(params, learner.init(params, carry, xs[0]), xs, ys, mask)
        return jnp.average(losses, weights=mask), grads

    return jax.jit(gradient)


WAYS = {
    'BPTT': (None, {}, reverse(TASK.steps)),
    'D_RTRL': (rules.d_rtrl(), {}, online(rules.d_rtrl())),
    'D_RTRL, exact windows of 2': (
        *(rules.d_rtrl(), {'window': 2}, online(rules.d_rtrl(), window=2, inside='exact')),
    ),
    'truncated BPTT, 4': (None, {'window': 4}, reverse(4)),
}


@pytest.mark.parametrize(
    'name', [n if n == 'D_RTRL' else pytest.param(n, marks=slow) for n in WAYS]
)
def test_a_run_is_the_loop_that_one_writes_by_hand(name):
    rule, options, gradient = WAYS[name]
    found = run(rule, **options)
    for i, seed in enumerate((3, 5)):
        losses, params = by_hand(seed, gradient)
        assert found.losses[i] == pytest.approx(losses, rel=1e-4)
        for key, p in params.items():
            assert np.allclose(found.params[key][i], p, atol=2e-5)
    assert found.method == name and found.updates == 3 and found.scores.shape == (2,)
    assert [done for done, _ in found.validation] == [1, 2, 3]


@slow
def test_updates_without_a_rule_are_back_propagation_through_the_steps_since_the_last():
    found, (_, params, carry) = run(None, seeds=(3,), update_every=4), made(3)
    moments, key, gradient = ADAM.init(params), jax.random.key(3), reverse(4)
    for number in range(3):
        h, (xs, ys, mask) = carry, TASK.sample(jax.random.fold_in(key, number), 4)
        for at in (slice(0, 4), slice(4, 6)):
            weights = mask[at] if mask[at].any() else jnp.ones(len(mask[at]))
            grads = gradient(params, h, xs[at], ys[at], weights)[1]
            grads = jax.tree.map(lambda g: g * mask[at].any(), grads)
            for x in xs[at]:
                h = plain(params, h, x)[1]
            changes, moments = ADAM.update(grads, moments, params)
            params = optax.apply_updates(params, changes)
    for name, p in params.items():
        assert np.allclose(found.params[name][0], p, atol=2e-5)


@pytest.mark.nightly
def test_updates_within_a_sequence_and_along_a_stream_are_those_of_sequence_update():
    stream = tasks.shifting_sine(103, shift_every=20)
    learner, key = functional.online(plain, rules.d_rtrl(), mark='auto'), jax.random.key(3)
    for task, options in ((TASK, {'update_every': 2}), (stream, {'window': 2})):
        model = lambda seed, inputs=task.inputs: made(seed, inputs)
        whole = run(rules.d_rtrl(), model, task, 1, (3,), progress=True, **options)
        _, params, carry = model(3)
        inside = 'exact' if task.stream else 'trace'
        learn = learner.sequence_update(task.loss, ADAM, update_every=2, inside=inside)
        xs, ys, mask = task.sample(key if task.stream else jax.random.fold_in(key, 0), 4)
        start = params, ADAM.init(params), learner.init(params, carry, xs[0])
        params, losses, *_ = learn(*start, xs, ys, None if task.stream else mask)
        for name, p in params.items():
            np.testing.assert_allclose(whole.params[name][0], p, 1e-3, 1e-5)
        if task.stream:
            assert np.allclose(whole.losses[0], losses, rtol=1e-3, atol=1e-5)
            half = float(np.average(losses, weights=mask))
            assert whole.scores[0] == pytest.approx(half, rel=1e-3)


@slow
def test_parameters_of_another_seed_or_for_another_model_are_refused():
    found = run(None, lambda seed: Network(), updates=1)
    with pytest.raises(OptionError, match=r'seed is 4; the seeds of this run are \(3, 5\)'):
        found.params_of(4)
    wrong = 'has another shape', 'the model that was trained'
    for message, model in zip(wrong, (Network(units=6), nn.MinGRUCell(2, 5))):
        other = braintrace.compile(model, None, jnp.zeros((8, 2)), batch_size=8)
        with pytest.raises(StructureError, match=message):
            found.load_into(other, 5)


@slow
def test_it_stops_when_every_seed_is_good_enough(capsys):
    whole = run(None, updates=41, until=1e-9)
    assert whole.updates == 41 and [done for done, _ in whole.validation][-2:] == [39, 41]
    early = run(None, updates=41, until=10.0, progress=True)
    assert early.updates == 3 and early.validation[0][0] == 3
    assert np.allclose(early.losses, whole.losses[:, :3], rtol=1e-4)
    assert 'adding 6: 3/41 updates, loss ' in capsys.readouterr().err


@slow
def test_each_update_and_each_seed_draws_its_own_noise():
    """One batch and one set of weights, so that the losses differ by the noise alone."""

    def model(seed):
        net = Network(noise=True)
        for state in net.states(brainstate.ParamState).values():
            state.value = jax.tree.map(lambda w: jnp.full_like(w, 0.3), state.value)
        return net

    losses = run(rules.d_rtrl(), model, SAME, optimizer=optax.sgd(0.0)).losses
    assert len({*losses.ravel().tolist()}) == 6


@slow
def test_each_seed_draws_its_own_noise_of_the_rule():
    losses = run(rules.uoro(), lambda seed: made(0), SAME).losses
    assert losses[0, 0] == losses[1, 0] and losses[0, 2] != losses[1, 2]


@slow
def test_what_is_not_trainable_stays():
    params = {'w': jnp.ones((2 + UNITS, UNITS)) / 5, 'out': jnp.ones((UNITS, 1))}
    places = {**params, 'places': jnp.arange(3)}
    model = lambda seed: (plain, places, jnp.zeros((4, UNITS)))
    decay = optax.adamw(1e-2, weight_decay=0.1)
    found = run(rules.d_rtrl(), model, updates=2, seeds=(0,), optimizer=decay)
    assert found.params['places'].tolist() == [[0, 1, 2]]
    assert not np.allclose(found.params['w'], params['w'], atol=1e-3)


@slow
def test_a_penalty_counts_at_every_step():
    """The cell of one unit without recurrence, whose gradient any rule has whole."""

    def cell(params, h, x):
        h = jnp.tanh(x @ params['w'])
        return (h, jnp.sum(h**2)), h

    params = {'w': jnp.ones((2, 1)) / 2}
    model = lambda seed: (cell, params, jnp.zeros((4, 1)))
    penalty = lambda extra: 0.3 * extra

    def total(params):
        xs, ys, mask = TASK.sample(jax.random.fold_in(jax.random.key(0), 0), 4)
        h = jnp.tanh(xs @ params['w'])
        losses = jnp.mean((h - ys) ** 2, (1, 2))
        return jnp.average(losses, weights=mask) + jnp.mean(0.3 * jnp.sum(h**2, (1, 2)))

    wanted = params['w'] - jax.grad(total)(params)['w']
    for rule in (None, rules.d_rtrl()):
        found = run(rule, model, TASK, 1, (0,), optax.sgd(1.0), penalty=penalty)
        assert np.allclose(found.params['w'][0], wanted, atol=1e-5)


class Dropping(Network):
    """Drops outputs of the cell, and has fixed features: of each seed, of all, or as a state."""

    def __init__(self, kind='state'):
        super().__init__()
        drawn = brainstate.random.normal(size=(2, 2))
        self.drop = brainstate.nn.Dropout(0.5)
        self.features = brainstate.LongTermState(drawn) if kind == 'state' else drawn
        self.norm = brainstate.nn.BatchNorm0d((UNITS,)) if kind == 'norm' else lambda h: h

    def update(self, x):
        features = getattr(self.features, 'value', self.features)
        return self.readout(self.norm(self.drop(self.cell(x @ features))))


@slow
def test_a_seed_alone_is_that_seed_beside_others_and_its_score_that_of_evaluation():
    """Ten sequences in lanes of four; what is dropped is dropped in training alone."""
    both, alone = (
        run(rules.d_rtrl(), lambda seed: Dropping(), TASK, 2, those, test=10)
        for those in ((3, np.int64(5)), (5,))
    )
    assert np.allclose(both.losses[1], alone.losses[0], rtol=1e-5)
    brainstate.random.seed(5)
    with brainstate.environ.context(fit=True):
        learner = braintrace.compile(Dropping(), None, jnp.zeros((2, 2)), batch_size=2)
    both.load_into(learner, 5)
    xs, ys, mask = TASK.sample(jax.random.key(0), 10, 'test')
    score = braintrace.evaluate(learner, xs, ys, lambda out, ys: TASK.score(out, ys, mask))
    assert both.scores[1] == pytest.approx(float(score), rel=1e-5)


class Wired(brainstate.nn.Module):
    """Leaky units whose wiring and leaks are drawn by the seed, and kept as ``keep`` says."""

    def __init__(self, seed, keep):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.mask = keep(jnp.asarray(rng.random((2, UNITS)) < 0.5))
        self.leak = keep(jnp.asarray(rng.uniform(0.5, 0.95, UNITS), jnp.float32))
        self.weight = brainstate.ParamState(brainstate.random.normal(size=(2, UNITS)))
        self.readout = nn.Linear(UNITS, 1)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        mask, leak = (getattr(kept, 'value', kept) for kept in (self.mask, self.leak))
        self.h.value = leak * self.h.value + braintrace.matmul(x, self.weight.value * mask)
        return self.readout(self.h.value)


class OfLayers(brainstate.nn.Module):
    """The same of layers: a mask, places in a sparse matrix and time constants of neurons."""

    def __init__(self, seed, keep):
        super().__init__()
        rng = np.random.default_rng(seed)
        mask, tau = rng.random((2, UNITS)) < 0.5, jnp.asarray(rng.uniform(5, 20, UNITS))
        sparse = np.zeros(2 * UNITS, np.float32)
        sparse[rng.permutation(2 * UNITS)[:4]] = 2.0
        matrix = u.sparse.CSR.fromdense(jnp.asarray(sparse.reshape(2, UNITS)))
        self.masked = nn.SignedWLinear(2, UNITS, w_init=brainstate.nn.init.Normal(9.0), w_mask=mask)
        self.sparse, self.neurons = nn.SparseLinear(matrix), nn.LIF(UNITS, tau=tau)
        self.readout = nn.Linear(UNITS, 1)

    def update(self, x):
        self.neurons(self.masked(x) + self.sparse(x))
        return self.readout(self.neurons.V.value)


def constant(array):
    return array


DECAYED = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3))


def wired(model, keep, rule, seeds):
    of_seed = lambda seed: model(seed, keep)
    return run(rule, of_seed, TASK, 2, seeds, optimizer=DECAYED)


def weights(found, seed):
    params = found.params_of(seed).items()
    return jax.tree.leaves([value for path, value in params if path[-1] == 'weight'])


KEPT = pytest.mark.parametrize(
    'keep',
    [constant, pytest.param(brainstate.LongTermState, marks=pytest.mark.nightly)],
    ids=['array', 'state'],
)


@slow
@KEPT
def test_each_seed_has_its_own_wiring_and_constants(keep):
    """Its traces are exact, and no update changes what is kept."""
    found, reverse = (wired(Wired, keep, rule, (1, 2)) for rule in (rules.d_rtrl(), None))
    assert found.method == 'D_RTRL'
    for seed in (1, 2):
        for one, other in zip(weights(found, seed), weights(reverse, seed), strict=True):
            assert_close(one, other, 1e-5, 1e-6)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(found.params)]
    for name in ('mask', 'leak'):
        kept = [getattr(Wired(seed, constant), name) for seed in (1, 2)]
        assert any(np.array_equal(np.stack(kept), array) for array in arrays)


@pytest.mark.nightly
@pytest.mark.parametrize(
    'model, keep', [(Wired, constant), (Wired, brainstate.LongTermState), (OfLayers, constant)]
)
def test_a_seed_with_its_own_wiring_is_what_it_is_alone(model, keep):
    both, now = (wired(model, keep, rule, (1, 2)) for rule in (rules.d_rtrl(), rules.same_step()))
    for seed in (1, 2):
        alone = wired(model, keep, rules.d_rtrl(), (seed,))
        for one, other in zip(weights(both, seed), weights(alone, seed), strict=True):
            assert_close(one, other, 1e-5, 1e-6)
        pairs = zip(weights(both, seed), weights(now, seed), strict=True)
        assert any(not np.allclose(*pair, rtol=1e-3) for pair in pairs)


@pytest.mark.nightly
@pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
@KEPT
def test_what_a_seed_has_kept_is_loaded_with_its_weights(keep):
    found = wired(Wired, keep, None, (1, 2))
    model = Wired(2 if keep is constant else 5, keep)
    found.load_into(braintrace.compile(model, None, jnp.zeros((4, 2)), batch_size=4), 2)
    assert np.array_equal(model.weight.value, found.params['weight',][1])
    mask = getattr(model.mask, 'value', model.mask)
    assert np.array_equal(mask, Wired(2, constant).mask)


def reading(outputs):
    """A model that returns this of a product."""
    return lambda seed: (lambda p, h, x: (outputs(x @ p), h), jnp.ones((2, 1)), 0.0)


def holding(seed):
    held = jnp.full((2, 1), float(seed))
    return lambda p, h, x: (x @ (p * held), h), jnp.ones((2, 1)), 0.0


@slow
def test_a_model_that_would_give_wrong_numbers_is_refused():
    of_structure = [
        (r'are float32\[4\]; adding 6 asks for an array \[4, 1\]', reading(lambda y: y[:, 0]), {}),
        ('are a dict', reading(lambda y: {'y': y}), {}),
        ('returns no pair', reading(lambda y: y), {'penalty': jnp.mean}),
        (r'constants float32\[2, 1\].* in the params', holding, {}),
        ('do not compute the same', lambda seed: Following(lambda y: seed * y), {}),
        ('do not compute the same', lambda seed: Following(surrogate_of(seed)), {}),
        ('writes the state norm/', lambda seed: Dropping('norm'), {'seeds': (3,)}),
        ('other parameters or states than', lambda seed: nn.GRUCell(2, seed), {}),
    ]
    of_penalty = [
        ('the penalty a quantity in mV', lambda y: y[0, 0], lambda extra: extra * u.mV),
        (r'the penalty float32\[4\]', lambda y: y[:, 0], lambda extra: extra),
    ]
    for message, model, options in of_structure:
        with pytest.raises(StructureError, match=message):
            run(None, model, **options)
    for message, extra, penalty in of_penalty:
        with pytest.raises(StepFunctionError, match=message):
            run(None, reading(lambda y, extra=extra: (y, extra(y))), penalty=penalty)


def test_a_task_draws_what_it_says():
    own = functools.partial(dataclasses.replace, TASK)
    for task, message in (
        (own(steps=7), r'draws xs \[6, 32, 2\], and its sizes say \[7, 32, 2\]'),
        (own(draw=lambda *args: TASK.draw(*args)[:2]), 'draws tuple'),
    ):
        with pytest.raises(StructureError, match=message):
            tasks.run(task, lambda seed: Network(), rules.d_rtrl(), ADAM, 1)
    with pytest.raises(OptionError, match="metric is 'r2'"):
        own(metric='r2')
    with pytest.warns(BraintraceWarning, match='draws one batch, whatever the key'):
        check_draw(SAME, 4)


def test_a_run_is_told_in_one_line():
    losses, scores = np.zeros((2, 7)), np.array([0.25, 0.75])
    found = tasks.Run(tasks.evidence(), 'BPTT', (0, 1), {}, losses, scores, 7, (), 1.0, 2.0, 3)
    told = 'evidence 7, BPTT: 50.0 % (25.0 % to 75.0 %, 2 seeds), floor 50.0 %, 7 updates'
    assert str(found) == told


STREAM = tasks.shifting_sine(40)
REFUSED = {
    'task': (dict(task='adding'), "task is 'adding'"),
    'model': (dict(model=Network()), 'give a function of a seed'),
    'module': (dict(model=lambda seed: 3), r'model\(0\) is int; return a brainstate'),
    'rule': (dict(rule=7), 'rule is 7; give a value of braintrace.rules'),
    'name': (dict(rule='d_rtlr'), "rule is 'd_rtlr'.*Did you mean 'd_rtrl'"),
    'optimizer': (dict(optimizer='adam'), 'optimizer'),
    'updates': (dict(updates=None), 'updates is None'),
    'stream': (dict(task=STREAM, updates=3), 'a stream'),
    'endless': (dict(task=STREAM, updates=None, rule=None), 'give the window'),
    'share': (dict(task=tasks.evidence(), until=90), 'an accuracy is a share'),
    'long': (dict(update_every=7), 'update_every is 7, but adding 6 has 6 steps'),
    'cell': (dict(model=made), r'made for one batch: make it for 32'),
    'until': (dict(task=STREAM, updates=None, until=0.1), 'no validation part'),
    'every': (dict(window=2, update_every=3), 'an update ends a window'),
    'window': (dict(window=0), 'window is 0'),
    'batch': (dict(batch_size=None), 'batch_size is None'),
    'seeds': (dict(seeds=(1, 1)), 'different ints'),
    'a long seed': (dict(seeds=(2**31,)), 'from 0 to'),
    'penalty': (dict(penalty=0.1), 'penalty is 0.1'),
    'progress': (dict(progress=1), 'progress is 1'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_does_not_fit_is_refused(name):
    given, message = REFUSED[name]
    start = {'task': TASK, 'model': lambda seed: Network(), 'rule': rules.d_rtrl()}
    arguments = start | {'optimizer': ADAM, 'updates': 3} | given
    with pytest.raises(BraintraceError, match=message):
        tasks.run(**arguments)
