"""Models whose gradients leave out something of the past, a row each with all that is said of them;
and a few of which nothing is said.

A cell wraps in ``cut`` what its traces leave out: with ``cut.on`` plain backpropagation has the
history that D_RTRL should have.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace import Policy
from tests.compiler.refused import (
    PARAMS,
    B,
    H,
    I,
    N,
    Note,
    R,
    Row,
    make_row,
    mm,
    opaque,
    opaque_jvp,
)


class Cut:
    """The identity, or where ``on`` is set a constant."""

    on = False

    def __call__(self, value):
        return lax.stop_gradient(value) if self.on else value


cut = Cut()
DEGRADED: list[Row] = []
KEY = np.array([3, 7], np.uint32)


# the reason of a parameter's route, by the kind of the diagnostic that tells of it
REASONS = {
    'mixing-tail': 'mixing_tail',
    'not-etp-op': 'not_etp_op',
    'input-dependent-weight': 'input_dependent_weight',
    'unused': 'unused',
    'lost-relation': 'lost_relation',
}


def routes_of(notes) -> dict[str, str]:
    return {note.path: REASONS[note.kind] for note in notes if note.kind in REASONS}


def degraded(*notes: Note, **options):
    """Add a cell to the table of degraded models; ``routes``: where the notes do not tell."""

    def register(source):
        DEGRADED.append(make_row(source, notes=notes, **{'routes': routes_of(notes)} | options))
        return source

    return register


def mixing(what: str, why: str = 'merges positions of a hidden state', at: str = 'here') -> Note:
    return Note('mixing', 'info', (what, why, 'carries no trace'), at=at)


def moving(what: str) -> Note:
    return mixing(what, 'moves values to other positions')


def merging(what: str, at: str = 'here') -> Note:
    words = what, 'merges positions of the result of an op', 'history is lost there'
    return Note('mixing', 'warning', words, at=at)


WORDS = {
    'mixing-tail': 'parameter {} | mix its positions | current step only',
    'not-etp-op': 'parameter {} | plain operation | braintrace op',
    'input-dependent-weight': '{} | changes from step to step | no trace',
    'opaque-call': 'parameter {} | derivative rule of its own | Apply the op outside',
    'unused': 'parameter {} | neither an output nor a state | zero',
    'no-relation': 'no weight of an ETP op | position by position',
}


def warning(kind: str, path: str = '', at: str | None = 'here') -> Note:
    return Note(kind, 'warning', tuple(WORDS[kind].format(path).split(' | ')), path, at)


def mixing_tail(path: str = 'w', at: str = 'here') -> Note:
    return warning('mixing-tail', path, at)


def dependent(path: str = 'w') -> Note:
    return warning('input-dependent-weight', path)


def no_relation(at: str = 'here') -> Note:
    return warning('no-relation', at=at)


not_etp_op = functools.partial(warning, 'not-etp-op')


def lost(words: str, path: str = 'w', at: str = 'here') -> Note:
    return Note('lost-relation', 'warning', (path, 'no trace to', words), path, at)


def cross(reads: str, read: str, at: str = 'here') -> Note:
    return Note(
        'cross-group',
        'warning',
        (f'{reads} reads the old {read}', 'different shapes', 'Give both states one shape'),
        read,
        at,
    )


def fixed(what: str = 'a constant', slot: str = 'weight', path: str = '', at: str = 'here') -> Note:
    words = f'the {slot} of etp_mm is {what}', 'Nothing trains it', 'brainstate.ParamState'
    return Note('constant-weight', 'warning', words, path, at)


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (g / (1.0 + jnp.linalg.norm(g)),))

# -- mixing on the way from a state ----------------------------------------------------------------

SPREAD = 'reduce_sum, spread by broadcast_in_dim'
# name -> what is told, and what is added to a leaky unit: a function of its old states and inputs
MIXING = {
    'dot': ('dot_general', lambda h, x: jnp.tanh(h @ R)),
    'convolution': (
        'conv_general_dilated',
        lambda h, x: lax.conv(h[:, None], jnp.ones((1, 1, 3)), (1,), 'SAME')[:, 0],
    ),
    'cumulative_sum': ('cumsum', lambda h, x: 0.3 * jnp.cumsum(h, -1)),
    'roll': (moving('slice'), lambda h, x: 0.3 * jnp.roll(h, 1, -1)),
    'mean_over_features': (SPREAD, lambda h, x: -0.3 * h.mean(-1, keepdims=True)),
    'max_over_features': (
        'reduce_max, spread by broadcast_in_dim',
        lambda h, x: -0.3 * h.max(-1, keepdims=True),
    ),
    'mean_over_the_batch': (SPREAD, lambda h, x: -0.3 * h.mean(0)),
    'gather_by_an_input': (
        'gather',
        lambda h, x: h[:, (x[0] > 0).astype(int)[jnp.array([0, 1, 2, 0])]],
    ),
    'slice_at_an_input': (
        'dynamic_slice, spread by',
        lambda h, x: lax.dynamic_slice(h, (0, (x[0, 0] > 0).astype(int)), (B, 1)),
    ),
    'top_k': ('top_k, spread by', lambda h, x: lax.top_k(h, 1)[0]),
    'linear_solve': (
        'custom_linear_solve',
        lambda h, x: 0.8 * jnp.linalg.solve(2 * jnp.eye(N) + R, h.T).T,
    ),
}
for name, (told, term) in MIXING.items():
    degraded(told if isinstance(told, Note) else mixing(told), name=name, place=term)(
        lambda p, h, x, term=term: 0.8 * h + mm(x, p['w']) + term(cut(h), x)
    )
degraded(mixing(SPREAD), name='softmax', history=False)(
    lambda p, h, x: 2 * jax.nn.softmax(h) + mm(x, p['w'])
)
degraded(mixing('cumsum'), name='branch_that_mixes_beside_one_with_an_op')(
    lambda p, h, x: lax.cond(
        x.sum() > 0,
        lambda h: 0.8 * h + mm(x, p['w']),
        lambda h: 0.5 * jnp.cumsum(cut(h), -1),  # here
        h,
    )
)
degraded(moving('rev'), name='descended_scan_that_turns_its_carry')(
    lambda p, h, x: lax.scan(
        lambda h, _: (0.5 * h + 0.1 * cut(h)[:, ::-1] + mm(x, p['w']), None),  # here
        h,
        None,
        length=40,
    )[0]
)


@degraded(
    mixing('reduce_sum, spread by', at='mean'),
    mixing('reduce_sum, spread by', at='scale'),
    strict=('mean', 'scale'),
)
def layer_norm(p, h, x):
    centred = h - cut(h).mean(-1, keepdims=True)  # mean
    h = centred / (0.1 + jnp.sqrt((cut(centred) ** 2).mean(-1, keepdims=True))) + mm(  # scale
        x, p['w']
    )
    return h, h


@degraded(
    Note('mixing', 'warning', ('custom_vjp_call', 'not known to be linear', 'carries no trace')),
    mixing_tail(at='op'),
    no_relation('op'),
    strict=('op', 'here'),
)
def backward_that_is_not_linear(p, h, x):
    y = mm(x, p['w'])  # op
    return clipped(cut(0.8 * h) + y)  # here


# -- mixing of the result of an op -----------------------------------------------------------------


def spread(y):
    return jnp.broadcast_to(jnp.tanh(y[:, :1]), y.shape)


first_for_all = jax.custom_jvp(spread)
first_for_all.defjvp(lambda p, t: jax.jvp(spread, p, t))


@jax.custom_vjp
def mean_for_all(y):
    return jnp.broadcast_to(y.mean(-1, keepdims=True), y.shape)


mean_for_all.defvjp(
    lambda y: (mean_for_all(y), None),
    lambda _, g: (jnp.broadcast_to(g.mean(-1, keepdims=True), g.shape),),
)

TAILS = {
    'tail_of_a_cumulative_sum': ('cumsum', lambda x, w: jnp.cumsum(mm(x, w), -1)),
    'tail_of_a_plain_dot': ('dot_general', lambda x, w: mm(x, w) @ R),
    'tail_of_a_sum_over_features': ('reduce_sum', lambda x, w: mm(x, w).sum(-1, keepdims=True)),
    'tail_of_a_custom_vjp': ('custom_vjp_call', lambda x, w: mean_for_all(mm(x, w))),
    'tail_of_a_fourier_transform': ('fft', lambda x, w: jnp.fft.fft(mm(x, w)).real),
}
for name, (told, term) in TAILS.items():
    degraded(merging(told), mixing_tail(), no_relation(), name=name, place=term)(
        lambda p, h, x, term=term: 0.8 * h + term(x, p['w'])
    )
degraded(
    mixing('dynamic_update_slice'),
    mixing_tail(at='op'),
    no_relation(at='op'),
    Note(
        'stacked-state',
        'warning',
        ('carry', 'leaf of the carry (a HiddenState) of its own'),
        'carry',
    ),
    strict=('here', 'op'),
    name='written_at_an_input',
)(
    lambda p, h, x: lax.dynamic_update_slice(  # here
        0.8 * cut(h),
        mm(x, p['w'])[:, :1],  # op
        (0, (x[0, 0] > 0).astype(int)),
    )
)


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

degraded(
    Note(
        'nonlinear-rule',
        'warning',
        ('w goes through custom_vjp_call', 'not known to be linear', 'Clip the whole gradient'),
        'w',
    ),
    history=False,
    name='weight_behind_a_clip',
)(lambda p, h, x: 0.8 * h + mm(x, clipped(p['w'])))

rounded_to_few_bits = {
    'rounded_state': ('reduce_precision', lambda h: lax.reduce_precision(h, 5, 2)),
    'state_in_eight_bits': (
        'convert_element_type',
        lambda h: h.astype(jnp.float8_e4m3fn).astype(h.dtype),
    ),
}
for name, (told, rounded) in rounded_to_few_bits.items():
    degraded(
        Note('nonlinear-rule', 'warning', (told, 'rounds values to a few bits', 'stop_gradient')),
        history=False,
        name=name,
        place=rounded,
    )(lambda p, h, x, rounded=rounded: rounded(0.8 * h + mm(x, p['w'])))
degraded(
    lost(
        'feeds several positions of the state [2, 12, 12], each of which reads many others', 'wide'
    ),
    no_relation(),
    params={'wide': np.linspace(-0.5, 0.6, 3 * I * N).reshape(I, 3 * N)},
    carry=np.ones((B, 3 * N, 3 * N)),
    name='result_times_itself',
)(lambda p, h, x: 0.8 * h + (y := mm(x, p['wide']))[:, :, None] * y[:, None])


@degraded(merging('sort', at='there'), mixing_tail(), params='w u', strict=('here', 'there'))
def tail_of_a_sort_beside_a_traced_op(p, h, x):
    y = mm(x, p['w'])  # here
    return 0.8 * h + mm(x, p['u']) + jnp.sort(y)  # there


@degraded(merging('reduce_sum', at='sum'), strict=('sum',))
def tail_of_a_softmax(p, h, x):
    y = mm(x, p['w'])
    return 0.8 * h + jnp.exp(y) / jnp.exp(cut(y)).sum(-1, keepdims=True)  # sum


# -- readouts that leak behind their weights -------------------------------------------------------


def leaky(*words: str):
    told = Note('leaky-readout', 'warning', ('r leaks behind', 'of h is in no trace', *words), 'o')
    return degraded(told, params='w o', carry={'h': H, 'r': H[:, :2]}, history=False)


@leaky('FilteredReadout has the same outputs', "e_prop(kappa='auto')")
def leaky_readout(p, c, x):
    h = 0.8 * c['h'] + mm(x, p['w'])
    r = 0.7 * c['r'] + mm(h, p['o'])  # here
    return r, {'h': h, 'r': r}


@leaky('Take exact windows')
def readout_of_several_leaks(p, c, x):
    h = 0.8 * c['h'] + mm(x, p['w'])
    r = np.array([0.5, 0.9]) * c['r'] + mm(h, p['o'])  # here
    return r, {'h': h, 'r': r}


# -- weights ---------------------------------------------------------------------------------------

degraded(dependent(), no_relation(), name='weight_times_an_input')(
    lambda p, h, x: 0.8 * h + mm(x, p['w'] * x.sum())
)
degraded(dependent(), params='w u', name='weight_times_a_state')(
    lambda p, h, x: 0.8 * h + mm(x, p['w'] * jnp.tanh(cut(h).mean())) + mm(x, p['u'])
)
degraded(dependent(), no_relation(), name='weight_of_each_lane')(
    lambda p, h, x: 0.8 * h + jax.vmap(lambda x: mm(x, x[:, None] * p['w']))(x)
)
degraded(
    dependent('a'),
    dependent('w'),
    no_relation(),
    params='w a',
    name='weight_of_two_parameters_and_an_input',
    fails={'record': 'one record for both parameters names the first only'},
)(lambda p, h, x: 0.8 * h + mm(x, p['w'] * p['a'] * x.sum()))
degraded(not_etp_op('u'), params='w u', name='plain_dot_into_a_state')(
    lambda p, h, x: 0.8 * h + mm(x, p['w']) + x @ p['u']
)
degraded(not_etp_op('a'), params='w a', name='plain_decay')(
    lambda p, h, x: jax.nn.sigmoid(p['a']) * h + mm(x, p['w'])
)
degraded(not_etp_op('v'), mixing('dot_general'), params='w v', name='plain_recurrence')(
    lambda p, h, x: 0.5 * h + jnp.tanh(cut(h) @ p['v'] + mm(x, p['w']))
)
degraded(not_etp_op('a'), params='w a', name='plain_gain_before_an_op')(
    lambda p, h, x: 0.8 * h + mm(p['a'][:I] * x, p['w'])
)
for kind, fn in {'custom_vjp': opaque, 'custom_jvp': opaque_jvp}.items():
    degraded(
        warning('opaque-call', 'u'),
        params='w u',
        routes={'u': f'opaque_call:{kind}_call'},
        name=f'op_in_a_{kind}',
    )(lambda p, h, x, fn=fn: 0.8 * h + mm(x, p['w']) + fn(x, p['u']))
degraded(warning('unused', 'a', None), params='w a', strict=(), name='unused_parameter')(
    lambda p, h, x: 0.8 * h + mm(x, p['w'])
)


@degraded(dependent(), no_relation(), carry={'h': H, 'key': KEY})
def weight_under_dropout(p, c, x):
    key, now = jax.random.split(jax.random.wrap_key_data(c['key']))
    h = 0.8 * c['h'] + mm(x, p['w'] * jax.random.bernoulli(now, 0.5, (I, N)))  # here
    return h, {'h': h, 'key': jax.random.key_data(key)}


@degraded(
    dependent(),
    merging('cumsum', at='tail'),
    params='w u',
    strict=('here', 'tail'),
    fails={'record': 'none of the weight, whose route says input_dependent_weight'},
)
def weight_times_an_input_with_a_mixing_tail(p, h, x):
    y = mm(x, p['w'] * x.sum())  # here
    return 0.8 * h + mm(x, p['u']) + jnp.cumsum(y, -1)  # tail


@degraded(params='w v', routes={'w': 'weight_then_weight'})
def two_ops_in_a_row(p, h, x):
    y = jnp.tanh(mm(x, p['w']))  # here
    return 0.8 * h + mm(y, p['v'])


@degraded(not_etp_op('u'), params='w u v')
def reset_gate_of_a_function_that_is_used_plainly_too(p, h, x):
    u = 2 * p['u']  # here
    return 0.8 * h + mm(x, p['w']) + mm(jax.nn.sigmoid(mm(x, u)) * cut(h), p['v']) + x @ u


@degraded(params='w v', history=False)
def traced_weight_used_before_another_op(p, h, x):
    y = mm(2 * x, p['w'])  # here
    return 0.8 * h + mm(x, p['w']) + mm(jnp.tanh(y), p['v'])


@degraded(dependent(), history=False, routes={})
def traced_weight_used_once_more_times_an_input(p, h, x):
    h = 0.8 * h + mm(x, p['w'])
    return h + mm(x, p['w'] * x.sum())  # here


@degraded(
    Note(
        'partial-trace',
        'warning',
        ('parameter w has a trace', 'its use in dot_general', 'current step only'),
        'w',
        'op',
    ),
    history=False,
)
def traced_weight_used_plainly(p, h, x):
    h = 0.8 * h + mm(x, p['w'])  # op
    return h + x @ p['w']  # here


@degraded(not_etp_op('u'), params='w u')
def plain_use_behind_a_plain_readout(p, h, x):
    o = x @ p['u']
    h = 0.8 * h + mm(x, p['w']) + jnp.tanh(x @ p['u'])  # here
    return h + o, h


@degraded(merging('cumsum', at='tail'), mixing_tail('u'), params='w u', strict=('here', 'tail'))
def mixing_tail_behind_an_op_of_a_readout(p, h, x):
    o = mm(x, p['u'])
    y = mm(2 * x, p['u'])  # here
    h = 0.8 * h + mm(x, p['w']) + jnp.cumsum(y, -1)  # tail
    return h + o, h


# -- weights that nothing trains ---------------------------------------------------------------

degraded(fixed(), params={}, name='constant_weight')(lambda p, h, x: 0.8 * h + mm(x, PARAMS['w']))
degraded(fixed(), name='constant_weight_beside_a_parameter', whole=True)(
    lambda p, h, x: 0.8 * h + mm(x, PARAMS['u']) + jnp.tanh(mm(2 * x, p['w']))
)
degraded(fixed(slot='bias'), name='constant_bias', whole=True)(
    lambda p, h, x: 0.8 * h + mm(x, p['w'], jnp.ones(N))
)
degraded(no_relation(), params={}, strict=None, name='weight_that_is_an_input')(
    lambda p, h, x: 0.8 * h + mm(x, x.T @ jnp.ones((B, N)))
)


@degraded(
    fixed('state m', path='m'),
    carry={'h': H, 'm': PARAMS['w']},
    params={},
    hidden=lambda path, leaf: path == ('h',),
)
def weight_in_a_carry_that_no_step_changes(p, c, x):
    h = 0.8 * c['h'] + mm(x, c['m'])  # here
    return h, {'h': h, 'm': c['m']}


# -- marked automatically --------------------------------------------------------------------------


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@degraded(
    Note('marked', 'info', ('dot_general', 'w became etp_einsum_mm', 'trace to'), 'w', 'marked'),
    Note('closed-over', 'info', ('dot_general reads a constant', 'params'), at='constant'),
    Note('unmarked', 'warning', ('parameter u', 'custom_vjp_call', 'current step only'), 'u'),
    params='w u',
    routes={'u': 'not_etp_op'},
    policy=Policy(mark='auto'),
)
def weight_in_a_function_with_a_rule_of_its_own(p, h, x):
    h = 0.8 * h + x @ p['w']  # marked
    h = h + x @ R[:I]  # constant
    return h + product(x, p['u'])  # here


# -- several states, and none ----------------------------------------------------------------------


@degraded(cross('g', 'h'), carry={'h': H, 'g': H[:, :2]}, history=False)
def slice_of_a_state_into_a_smaller_one(p, c, x):
    h = 0.8 * c['h'] + mm(x, p['w'])
    g = 0.7 * c['g'] + h[:, :2]  # here
    return (h, g), {'h': h, 'g': g}


@degraded(
    cross('g', 'h'),
    carry={'h': H, 'g': H[:, :2]},
    history=False,
    fails=dict.fromkeys(
        ('record', 'strict'),
        'names the last line that makes the new state, and not the one that reads the other state',
    ),
)
def slice_of_a_state_and_more(p, c, x):
    h = 0.8 * c['h'] + mm(x, p['w'])
    g = 0.7 * c['g'] + h[:, :2]  # here
    g = jnp.tanh(g)
    return (h, g), {'h': h, 'g': g}


@degraded(
    Note('lost-relation', 'warning', ('parameter w', 'd', 'is no hidden state'), 'w'),
    no_relation(),
    carry={'h': H, 'd': H},
    hidden=lambda path, leaf: path == ('h',),
    routes={'w': 'not_hidden'},
)
def delay_that_is_no_hidden_state(p, c, x):
    h = 0.8 * c['h'] + c['d']
    d = mm(x, p['w'])  # here
    return (h, d), {'h': h, 'd': d}


@degraded(cross('g', 'h'), carry={'h': H, 'g': H[:, :1]})
def mean_of_an_old_state_into_a_smaller_one(p, c, x):
    h = 0.8 * c['h'] + mm(x, p['w'])
    g = 0.7 * cut(c['g']) + c['h'].mean(-1, keepdims=True)  # here
    return (h, g), {'h': h, 'g': g}


@degraded(no_relation(), routes={'w': 'no_hidden_state'}, strict=None)
def op_that_reaches_no_state(p, h, x):
    h = 0.8 * h + x[:, :1]
    return mm(x, p['w']) * h, h  # here


# -- nothing is lost, and nothing is said ----------------------------------------------------------

degraded(strict=None, name='whole')(lambda p, h, x: 0.8 * h + jnp.tanh(mm(x, p['w'])))
degraded(strict=None, name='whole_with_a_constant_mask')(
    lambda p, h, x: 0.8 * h + mm(x, p['w'] * jax.random.bernoulli(jax.random.key(0), 0.5, (I, N)))
)
degraded(params='w u', strict=None, routes={'w': 'no_hidden_state'}, name='stopped_result')(
    lambda p, h, x: 0.8 * h + mm(x, p['u']) + lax.stop_gradient(mm(x, p['w']))
)
degraded(strict=None, name='mean_of_spikes_without_gradient')(
    lambda p, h, x: 0.8 * h + mm(x, p['w']) - 0.1 * (h > 0).mean(-1, keepdims=True)
)
degraded(params='w v', strict=None, name='weight_made_by_another_op')(
    lambda p, h, x: 0.8 * h + mm(x, mm(p['w'], p['v']))
)
degraded(strict=None, name='one_element_for_all_by_a_rule_of_its_own')(
    lambda p, h, x: 0.8 * h + first_for_all(mm(x, p['w']))
)
degraded(strict=None, carry=H[:, 0], name='product_with_one_term_for_each_result')(
    lambda p, h, x: 0.8 * h + jnp.tanh(mm(x, p['w'])) @ jnp.arange(1.0, N + 1)
)
degraded(strict=None, name='state_rounded_straight_through')(
    lambda p, h, x: (h := 0.8 * h + mm(x, p['w'])) + lax.stop_gradient(jnp.round(h) - h)
)


@degraded(params='w o', routes={'o': 'no_hidden_state'}, strict=None)
def whole_with_a_mixing_readout(p, h, x):
    h = 0.8 * h + mm(x, p['w'])
    return jax.nn.softmax(jnp.cumsum(h, -1)) @ p['o'], h
