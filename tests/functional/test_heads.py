"""Several losses of one step: each gradient is that of its own call, of the batch or by sample."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import OptionError, StepFunctionError, StructureError
from tests import oracles
from tests.compare import assert_close
from tests.functional.plain import drawn
from tests.precision import float64 as float64

B, I, N, T = 3, 2, 5, 4  # noqa: E741
LOSSES = (
    lambda y, t: jnp.mean(jnp.sin(y) * t),
    lambda y, t: jnp.mean((y - t) ** 2),
    lambda y, t: jnp.mean(jnp.tanh(y)),
)
NETS = {
    'GRU': lambda: brainstate.nn.Sequential(nn.GRUCell(I, N), nn.Linear(N, 2)),
    'LRU': lambda: nn.LRUCell(I, N),
    'LIF': lambda: brainstate.nn.Sequential(nn.Linear(I, N), nn.LIF(N, 3.0), nn.Linear(N, 2)),
}
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.7), rules.same_step(), rules.snap(2)]
pytestmark = pytest.mark.usefixtures('float64')


def learner_of(net, rule, batch=B):
    """``(learner, params, carry)``, in float64."""
    brainstate.random.seed(0)
    model = NETS[net]()
    brainstate.nn.init_all_states(model, batch_size=batch)
    cell, *trees = braintrace.adapters.from_brainstate(model, jnp.zeros((batch, I)))
    params, carry = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), trees)
    return functional.online(cell, rule), params, carry


def data():
    return drawn(T, B, I), drawn(T, B, 1)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', RULES, ids=str)
@pytest.mark.parametrize('net', NETS)
def test_heads_are_calls_of_grad_and_by_sample_those_of_one_sample(net, rule):
    learner, params, carry = learner_of(net, rule)
    xs, ys = data()
    state = by_sample = learner.init(params, carry, xs[0])
    samples_of = [slice(b, b + 1) for b in range(B)]
    fresh = [jax.tree.map(lambda c, at=at: c[at], carry) for at in samples_of]
    single, _, _ = learner_of(net, rule, batch=1)
    ones = [single.init(params, one, xs[0, :1]) for one in fresh]
    heads = jax.jit(learner.heads(*LOSSES))
    samples = jax.jit(learner.heads(*LOSSES, per_sample=True))
    calls = jax.jit(lambda *given: [learner.grad(loss)(*given) for loss in LOSSES])
    calls_of_one = jax.jit(lambda *given: [single.grad(loss)(*given) for loss in LOSSES])
    flags = drawn(T, B) > 0.7
    assert flags.any()
    for x, y, flag in zip(xs, ys, flags, strict=True):
        found, apart = heads(params, state, x, y), samples(params, by_sample, x, y)
        of_calls = calls(params, state, x, y)
        for k, (grads, value, *_) in enumerate(of_calls):
            assert_close((found.losses[k], found.grads[k]), (value, grads))
        _, _, outputs, new = of_calls[0]
        assert_close((found.aux, found.state), (outputs, new))
        assert_close((apart.aux, apart.state), (outputs, new))
        for b, at in enumerate(samples_of):
            of_calls = calls_of_one(params, ones[b], x[at], y[at])
            for k, (grads, value, *_) in enumerate(of_calls):
                of_sample = jax.tree.map(lambda g, b=b: g[b], (apart.losses[k], apart.grads[k]))
                assert_close(of_sample, (value, grads))
            ones[b] = functional.reset(of_calls[0].state, flag[at], fresh[b])
        state, by_sample = (functional.reset(s, flag, carry) for s in (found.state, apart.state))


def plain_params():
    return {'a': drawn(N), 'w': drawn(I, N), 'out': drawn(N, 2)}


def marked(p, h, x):
    a = braintrace.element_wise(p['a'], jax.nn.sigmoid)
    h = a * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return (h @ p['out'], h), h


def test_gradients_by_sample_add_up_to_backpropagation_through_that_sample():
    losses = (lambda o, y: jnp.sum(o[0] ** 2 * y), lambda o, y: jnp.sum(jnp.sin(o[1])))
    (xs, ys), params, h = data(), plain_params(), drawn(B, N)
    learner = functional.online(marked, rules.d_rtrl())
    state, sums = learner.init(params, h, xs[0]), [0, 0]
    heads = jax.jit(learner.heads(*losses, per_sample=True))
    for x, y in zip(xs, ys, strict=True):
        grads, _, _, state = heads(params, state, x, y)
        sums = [jax.tree.map(jnp.add, s, g) if s else g for s, g in zip(sums, grads, strict=True)]
    for loss, found in zip(losses, sums, strict=True):
        for b in range(B):
            one = slice(b, b + 1)
            want = oracles.by_time(marked, params, h[one], xs[:, one], ys[:, one], loss)
            assert_close(jax.tree.map(lambda g, b=b: g[b], found), want)


@pytest.mark.slow
@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.es_d_rtrl(0.7)], ids=str)
def test_a_bias_that_marking_found_has_a_gradient_for_each_sample(rule):
    def cell(p, h, x):
        h = 0.8 * h + jnp.tanh(x @ p['w'] + p['a'])
        return h @ p['out'], h

    (xs, ys), params, h = data(), plain_params(), drawn(B, N)
    learner, loss = functional.online(cell, rule, mark='auto'), LOSSES[1]
    state = learner.init(params, h, xs[0])
    _, state = learner.step(params, state, xs[0])
    given = params, state, xs[1], ys[1]
    (apart,), _, _, new = jax.jit(learner.heads(loss, per_sample=True))(*given)
    grads, _, _, want = jax.jit(learner.grad(loss))(*given)
    assert_close(jax.tree.map(lambda g: g.mean(0), apart), grads)
    assert_close(new, want)


def test_pull_takes_any_cotangent_back_and_changes_no_state():
    learner, params, carry = learner_of('GRU', rules.d_rtrl())
    xs, ys = data()
    _, state = learner.step(params, learner.init(params, carry, xs[0]), xs[0])
    outputs, pull, new = learner.vjp(params, state, xs[1])
    grads, _, of_step, after = learner.grad(LOSSES[0])(params, state, xs[1], ys[1])
    assert_close((outputs, new), (of_step, after))
    cotangent = jax.grad(LOSSES[0])(outputs, ys[1])
    assert_close(pull(cotangent), grads)
    assert_close(pull(2 * cotangent), jax.tree.map(lambda g: 2 * g, grads))


def stacked(p, c, x):
    """Two states in one array, whose batch is axis 1; a step count; weights at known places."""
    h, s = c['hs']
    h = 0.5 * h + jnp.tanh(braintrace.matmul(x, p['w'])) * x.shape[0] ** 0
    s = 0.9 * s + 0.1 * h
    return s @ p['out'], {'hs': jnp.stack([h, s]), 'count': c['count'] + 1}


def test_the_batch_may_be_another_axis_and_integers_have_no_gradient():
    params = {**plain_params(), 'places': jnp.arange(3)}
    carry = {'hs': drawn(2, B, N), 'count': jnp.zeros((), int)}
    (xs, ys), learner = data(), functional.online(stacked, rules.d_rtrl())
    state = learner.init(params, carry, xs[0])
    assert state.lane_axes == (('carry/hs', 1),)
    loss = lambda o, y: jnp.sum(o * y)
    heads, grad = jax.jit(learner.heads(loss, per_sample=True)), jax.jit(learner.grad(loss))
    for x, y in zip(xs, ys, strict=True):
        want, _, _, after = grad(params, state, x, y)
        (grads,), (values,), _, state = heads(params, state, x, y)
        assert values.shape == (B,)
        assert grads['places'].dtype == jax.dtypes.float0 and grads['places'].shape == (B, 3)
        del grads['places'], want['places']
        assert_close(jax.tree.map(lambda g: g.sum(0), grads), want)
        assert_close(state, after)


def test_a_batch_of_one_and_inputs_that_samples_share():
    def cell(p, h, x, gain):
        h = 0.5 * h + gain * jnp.tanh(braintrace.matmul(x, p['w']))
        return h, h

    loss = lambda h, y: jnp.sum(h * y)
    for batch in (1, 3):
        params = {'w': drawn(I, N), 'places': jnp.arange(2)}
        x, y = drawn(batch, I), drawn(batch, 1)
        learner = functional.online(cell)
        state = learner.init(params, jnp.zeros((batch, N)), x, jnp.array(2.0))
        given = params, state, (x, jnp.array(2.0)), y
        (grads,), (value,), outputs, new = jax.jit(learner.heads(loss, per_sample=True))(*given)
        summed, want, h, after = jax.jit(learner.grad(loss))(*given)
        assert value.shape == (batch,) and grads['w'].shape == (batch, I, N)
        assert grads['places'].dtype == jax.dtypes.float0 and grads['places'].shape == (batch, 2)
        assert_close((value.sum(), grads['w'].sum(0), outputs), (want, summed['w'], h))
        assert_close(new, after)


def test_heads_are_mapped_and_run_in_a_loop():
    learner, params, carry = learner_of('LRU', rules.d_rtrl())
    xs, ys = data()
    state = learner.init(params, carry, xs[0])
    heads = learner.heads(*LOSSES[:2], per_sample=True)

    def along(params, state):
        def step(state, at):
            grads, _, _, state = heads(params, state, *at)
            return state, grads

        return jax.lax.scan(step, state, (xs, ys))

    two = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    _, mapped = jax.jit(jax.vmap(along, (0, None)))(two, state)
    for k, scale in enumerate((1.0, 0.5)):
        _, want = along(jax.tree.map(lambda p, s=scale: s * p, params), state)
        assert_close(jax.tree.map(lambda g, k=k: g[k], mapped), want)


LOSS, UORO = lambda y, t: jnp.mean(y), rules.uoro()


def call(cell=marked, rule=None, carry=None, x=None, targets=None, losses=(LOSS,), per_sample=True):
    params, x = plain_params(), drawn(B, I) if x is None else x
    inputs = x if isinstance(x, tuple) else (x,)
    learner = functional.online(cell, rule or rules.d_rtrl())
    state = learner.init(params, drawn(B, N) if carry is None else carry, *inputs)
    targets = drawn(B, 1) if targets is None else targets
    return learner.heads(*losses, per_sample=per_sample)(params, state, x, targets)


def one(p, h, x):
    h = 0.5 * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return h, h


def noisy(p, c, x):
    key, new = jax.random.split(c['key'])
    h, _ = one(p, c['h'], x)
    return h, {'h': h + 0.1 * jax.random.normal(key, h.shape), 'key': new}


def masked(p, h, x, mask):
    h, _ = one(p, h, x)
    return h, h * jax.lax.sort(mask)[0]


def averaged(p, h, x):
    h, _ = one(p, h, x)
    return h.mean(0), h


def keyed():
    return {'h': drawn(B, N), 'key': jax.random.key(0)}


WRONG = {
    'no loss': (lambda: dict(losses=()), OptionError, 'no loss'),
    'per_sample=1': (lambda: dict(per_sample=1), OptionError, 'per_sample'),
    'no scalar': (
        lambda: dict(cell=one, losses=(lambda y, t: y,)),
        StepFunctionError,
        'one real scalar',
    ),
    'no batch': (
        lambda: dict(cell=one, carry=drawn(N), x=drawn(I), targets=drawn(1)),
        StructureError,
        'jax.vmap',
    ),
    'a key': (lambda: dict(cell=noisy, carry=keyed()), OptionError, 'key .*shared by the samples'),
    'no batch of a rule': (lambda: dict(cell=one, rule=UORO), OptionError, r'not uoro\(\)'),
    'targets': (lambda: dict(cell=one, targets=drawn(2)), StructureError, 'targets.*batch of 3'),
    'an input': (
        lambda: dict(cell=masked, x=(drawn(B, I), drawn(B))),
        StructureError,
        'depend on each other',
    ),
    'no arrays': (lambda: dict(cell=one, targets=1.0), StructureError, 'targets is 1.0'),
    'an output': (lambda: dict(cell=averaged), StructureError, r'output 0.*\[5\] for a batch of 3'),
}


def dropped(p, h, x, key):
    h, _ = one(p, h, x)
    h = h * jax.random.bernoulli(key, 0.5, h.shape)
    return h, h


def counting(p, c, x):
    h, _ = one(p, c['h'], x)
    return h, {'h': h, 'n': c['n'] + (x > 0).sum().astype(c['n'].dtype)}


def compared(p, c, x):
    """Its two states are one group where the batch is one sample."""
    z = jnp.tanh(braintrace.matmul(x, p['w']) - c['m'].mean(0))
    return z, {'h': c['h'] * 0.5 + z, 'm': 0.9 * c['m'] + 0.1 * z}


def of_one(change):
    def cell(p, h, x):
        h, _ = one(p, h, x)
        return change(h, x), h

    return cell


def later(p, c, x):
    """From the 100th step on each sample reads the mean of all."""
    h, _ = one(p, c['h'], x)
    h = jnp.where((c['n'] > 100)[:, None], h - h.mean(0), h)
    return h, {'h': h, 'n': c['n'] + 1}


DEPEND = {
    'mean': dict(cell=of_one(lambda h, x: h - h.mean(0))),
    'softmax': dict(cell=of_one(lambda h, x: jax.nn.softmax(h, 0))),
    'running sum': dict(cell=of_one(lambda h, x: jnp.cumsum(h, 0))),
    'roll': dict(cell=of_one(lambda h, x: jnp.roll(h, 1, 0))),
    'place': dict(cell=of_one(lambda h, x: h + jnp.arange(len(x))[:, None])),
    'number': dict(cell=of_one(lambda h, x: h / x.shape[0])),
    'attention': dict(cell=of_one(lambda h, x: jax.nn.softmax(h @ h.T) @ h)),
    'one key': dict(cell=dropped, x=(jnp.ones((B, I)), jax.random.key(0))),
    'one raw key': dict(cell=dropped, x=(jnp.ones((B, I)), jax.random.PRNGKey(0))),
    'a count': dict(cell=counting, carry={'h': jnp.ones((B, N)), 'n': jnp.zeros((), int)}),
    'later': dict(cell=later, carry={'h': jnp.ones((B, N)), 'n': jnp.zeros(B, int)}),
    'other signs': dict(cell=of_one(lambda h, x: h + jax.nn.relu(-h).mean(0))),
    'groups': dict(cell=compared, carry={'h': jnp.ones((B, N)), 'm': jnp.ones((B, N))}),
}


def in_float64(a):
    """Of what was made before the precision was set."""
    return a.astype(float) if getattr(a, 'dtype', None) == jnp.float32 else a


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', DEPEND)
def test_samples_that_depend_on_each_other_are_not_taken_apart(name):
    given = jax.tree.map(in_float64, DEPEND[name])
    with pytest.raises(StructureError, match='depend on each other'):
        call(**given)


def test_a_key_of_each_sample_is_an_input():
    def cell(p, h, x, keys):
        h, _ = one(p, h, x)
        return h * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (N,)))(keys), h

    keys, params, x = jax.random.split(jax.random.key(0), B), {'w': drawn(I, N)}, drawn(B, I)
    learner = functional.online(cell)
    state, loss = learner.init(params, jnp.zeros((B, N)), x, keys), lambda y, t: jnp.sum(y * t)
    given = params, state, (x, keys), drawn(B, 1)
    (grads,), _, outputs, _ = jax.jit(learner.heads(loss, per_sample=True))(*given)
    summed, _, want, _ = jax.jit(learner.grad(loss))(*given)
    assert_close((outputs, grads['w'].sum(0)), (want, summed['w']))


@pytest.mark.parametrize('name', WRONG)
def test_what_can_not_be_taken_apart_is_refused(name):
    given, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call(**given())


def test_a_head_can_not_call_its_learner():
    learner, params, carry = learner_of('GRU', rules.d_rtrl())
    x = data()[0][0]
    state = learner.init(params, carry, x)
    inner = lambda y, t: jnp.mean(learner.step(params, state, x)[0])
    with pytest.raises(StepFunctionError, match='called the learner'):
        learner.heads(inner)(params, state, x, x)
