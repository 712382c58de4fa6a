"""Models that are refused, each with its expected error; and the rows of all tables of models.

A row's place is the line of its cell with a mark, as ``# here``, or the first line of its lambda.
``degraded.py`` has the models that compile.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import Policy
from braintrace.errors import CompileError, NotSupportedError, StructureError

B, I, N, T = 2, 3, 4, 3  # noqa: E741
RNG = np.random.default_rng(5)
SHAPES = {
    'w': (I, N),
    'u': (I, N),
    'v': (N, N),
    'a': (N,),
    'o': (N, 2),
    'thin': (I, 1),
    'z': (I, N),
    'long': (1100, I, N),
}
PARAMS = {
    name: 0.5 * RNG.normal(size=shape) * (1 + 0.5j if name == 'z' else 1)
    for name, shape in SHAPES.items()
}
X, H, R = RNG.normal(size=(T, B, I)), RNG.normal(size=(B, N)), 0.4 * RNG.normal(size=(N, N))
MESH = Mesh(np.array(jax.devices()[:1]), ('a',))
NOT_SUPPORTED, COMPILE, STRUCTURE = (NotSupportedError, CompileError, StructureError)
mm = braintrace.matmul


@dataclasses.dataclass(frozen=True)
class Note:
    """An expected diagnostic: ``words`` of its message; ``at``: the mark of its line, or None."""

    kind: str
    level: str
    words: tuple[str, ...]
    path: str = ''
    at: str | None = 'here'


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A cell with its arguments, and what is expected of it.

    ``error`` and ``words``: how it is refused. Otherwise ``notes`` are all its diagnostics,
    ``routes`` the reasons of all parameters without a trace, and ``strict`` the marks of the lines
    that a strict policy names; None: it accepts the model.
    """

    name: str
    cell: Callable
    params: Mapping[Any, Any]
    source: Callable  # the function with the marks
    carry: Any = dataclasses.field(default_factory=lambda: H)
    xs: np.ndarray = dataclasses.field(default_factory=lambda: X)
    policy: Policy = Policy()
    hidden: Callable = lambda path, leaf: True
    error: type[Exception] | None = None
    words: tuple[str, ...] = ()
    at: str | None = 'here'
    notes: tuple[Note, ...] = ()
    routes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strict: tuple[str, ...] | None = ('here',)
    # test -> what is wrong: a strict xfail
    fails: Mapping[str, str] = dataclasses.field(default_factory=dict)
    history: bool = True  # what its traces leave out is wrapped in `cut`
    whole: bool = False  # its gradients are whole, though a strict policy refuses it

    def place(self, mark: str) -> str:
        """``file:line`` of the one line with this mark."""
        lines, first = inspect.getsourcelines(self.source)
        if is_lambda := self.source.__name__ == '<lambda>':
            whole, _ = inspect.findsource(self.source)
            first = self.source.__code__.co_firstlineno
            lines = list(itertools.takewhile(lambda line: line[:1] not in ')}', whole[first - 1 :]))
        marked = [first + k for k, line in enumerate(lines) if line.rstrip().endswith(f'# {mark}')]
        if is_lambda and mark == 'here' and not marked:
            marked = [first]
        (number,) = marked
        return f'{inspect.getsourcefile(self.source)}:{number}'


def make_row(source, *, params='w', name='', place=None, **options):
    """A row of a cell, or of an update ``(p, h, x) -> h``; ``params``: also names; ``place``: the
    function with the marks, where it is another one.
    """

    def cell(p, h, x):
        found = source(p, h, x)
        return found if isinstance(found, tuple) else (found, found)

    chosen = {key: PARAMS[key] for key in params.split()} if isinstance(params, str) else params
    return Row(name or source.__name__, cell, chosen, place or source, **options)


REFUSED: list[Row] = []


def refused(error, *words: str, **options):
    """Add a cell to the table of refused models; `` | `` is between words."""
    words = tuple(word for text in words for word in text.split(' | '))

    def register(source):
        REFUSED.append(make_row(source, error=error, words=words, **options))
        return source

    return register


def by_policy(construct: str, option: str, *words: str, **options):
    """Refused because the policy says so."""
    return refused(
        NOT_SUPPORTED,
        construct,
        f"refuses '{option}'",
        *words,
        policy=Policy(refuse=(option,)),
        **options,
    )


@jax.custom_vjp
def opaque(x, w):
    return jnp.tanh(mm(x, w))


opaque.defvjp(
    lambda x, w: (jnp.tanh(mm(x, w)), (x, w)),
    lambda r, g: jax.vjp(lambda x, w: jnp.tanh(x @ w), *r)[1](g),
)


@jax.custom_jvp
def opaque_jvp(x, w):
    return jnp.tanh(mm(x, w))


opaque_jvp.defjvp(lambda p, t: jax.jvp(lambda x, w: jnp.tanh(x @ w), p, t))


# -- by the policy ---------------------------------------------------------------------------------

by_policy('cond', 'cond', 'jnp.where', name='cond_around_an_op')(
    lambda p, h, x: (
        0.8 * h
        + lax.cond(x.sum() > 0, lambda x: mm(x, p['w']), lambda x: jnp.ones((B, N)), x)  # here
    )
)
by_policy('cond', 'cond', 'compute both branches', name='cond_between_states')(
    lambda p, h, x: lax.cond(x.sum() > 0, lambda h: 0.8 * h, lambda h: 0.2 * h, h) + mm(x, p['w'])
)
by_policy('scan', 'scan', 'a Python loop', name='scan_around_an_op')(
    lambda p, h, x: lax.scan(lambda h, _: (0.8 * h + mm(x, p['w']), None), h, None, length=3)[0]
)
by_policy('while', 'while_loop', 'lax.fori_loop', name='while_between_states')(
    lambda p, h, x: lax.while_loop(lambda h: (h**2).sum() > 3, lambda h: 0.5 * h, h) + mm(x, p['w'])
)
by_policy('custom_jvp_call', 'custom_rule', params='w u', name='custom_jvp_around_an_op')(
    lambda p, h, x: 0.8 * h + mm(x, p['w']) + opaque_jvp(x, p['u'])
)
by_policy(
    'custom_vjp_call', 'custom_rule', 'outside', params='w u', name='custom_vjp_around_an_op'
)(lambda p, h, x: 0.8 * h + mm(x, p['w']) + opaque(x, p['u']))
by_policy('shard_map', 'shard_map', 'for one shard', name='shard_map_around_an_op')(
    lambda p, h, x: (
        0.8 * h
        + jax.shard_map(mm, mesh=MESH, in_specs=(P('a'), P()), out_specs=P('a'))(x, p['w'])  # here
    )
)


@by_policy('scan', 'scan', 'a Python loop')
def scan_in_jit_in_checkpoint(p, h, x):
    @jax.checkpoint
    @jax.jit
    def turns(h):
        return lax.scan(lambda h, _: (0.8 * h, None), h, None, length=3)[0]  # here

    return turns(h) + mm(x, p['w'])


refused(
    NOT_SUPPORTED,
    "while | between an input | refuses 'while_loop'",
    policy=Policy(refuse=('while_loop',)),
    name='while_over_an_input',
    fails={'record': 'says that it "holds an ETP op or lies between hidden states"; neither is so'},
)(
    lambda p, h, x: (
        0.8 * h + mm(lax.while_loop(lambda x: (x**2).sum() > 3, lambda x: 0.5 * x, x), p['w'])
    )
)


# -- by every policy: loops ------------------------------------------------------------------------

small = lambda h: (h**2).sum() < 3
op_in_while = functools.partial(
    refused,
    NOT_SUPPORTED,
    'while loop holds an ETP op | lax.fori_loop with a static number | lax.scan',
)
while_mixes = functools.partial(
    refused,
    NOT_SUPPORTED,
    'while loop | positions meet | no derivative in reverse mode | lax.fori_loop',
)

op_in_while(name='op_in_while')(
    lambda p, h, x: lax.while_loop(small, lambda h: 0.8 * h + mm(x, p['w']), h)
)
op_in_while(name='op_in_a_condition_of_while')(
    lambda p, h, x: (
        0.8 * h
        + mm(
            lax.while_loop(lambda x: mm(x, p['w']).sum() < 3, lambda x: 2.0 * x, x),  # here
            p['w'],
        )
    )
)
while_mixes(name='while_that_mixes_a_state')(
    lambda p, h, x: lax.while_loop(small, lambda h: h + jnp.roll(h, 1, -1), h) + mm(x, p['w'])
)
while_mixes(name='while_that_mixes_a_parameter')(
    lambda p, h, x: 0.8 * h + mm(x, lax.while_loop(small, lambda w: w + 0.1 * w.mean(), p['w']))
)


@op_in_while()
def op_in_while_in_cond_in_jit_in_checkpoint(p, h, x):
    def body(h):
        return lax.while_loop(small, lambda h: 0.8 * h + mm(x, p['w']), h)  # here

    return jax.checkpoint(jax.jit(lambda h: lax.cond(x.sum() > 0, body, jnp.tanh, h)))(h)


@refused(NOT_SUPPORTED, 'debug', 'side effect inside a branch', 'Move it out of the branch')
def effect_in_a_branch_with_an_op(p, h, x):
    def yes(h):
        jax.debug.print('{}', h.sum())  # here
        return 0.8 * h + mm(x, p['w'])

    return lax.cond(x.sum() > 0, yes, jnp.tanh, h)


@refused(
    NOT_SUPPORTED,
    'scan of 1100 steps | weights of its own in every step | up to 1024 steps | Shorten it',
    params='long',
)
def long_scan_over_weights(p, h, x):
    h, _ = lax.scan(lambda h, w: (0.8 * h + mm(x, w), None), h, p['long'])  # here
    return h, h


@refused(
    NOT_SUPPORTED, 'scan of 1100 steps | hidden states | Shorten it', carry=np.ones((1100, B, N))
)
def long_scan_over_states(p, h, x):
    _, h = lax.scan(  # here
        lambda z, h: (0.8 * z, 0.8 * h + z + mm(x, p['w'])), jnp.ones((B, N)), h
    )
    return h[-1], h


# -- by every policy: complex states and others ----------------------------------------------------


@refused(
    NOT_SUPPORTED,
    'not holomorphic in 0 | an array of its own',
    params='w v',
    carry=np.stack([H + 0j, H + 1j]),
)
def a_modulus_of_stacked_complex_states(p, c, x):
    first = c[0] / (1 + jnp.abs(c[0])) + mm(x, p['w'])  # here
    second = 0.5j * c[1] + mm(first.real, p['v'])
    return second.real, jnp.stack([first, second])


@refused(NOT_SUPPORTED, 'shard_map', "maps ['a'] and leaves ['b']", 'Map every axis')
def shard_map_over_a_part_of_the_mesh(p, h, x):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('a', 'b'))
    h = 0.8 * h + jax.shard_map(  # here
        mm, mesh=mesh, in_specs=(P('a'), P()), out_specs=P('a'), axis_names={'a'}
    )(x, p['w'])
    return h, h


refused(
    NOT_SUPPORTED,
    'batch_group_count=2 | mixes samples | feature_group_count',
    params={'k': RNG.normal(size=(2, 2, 3))},
    carry=np.zeros((1, 2, 5)),
    xs=RNG.normal(size=(T, 2, 2, 5)),
    fails={'record': 'names no line'},
    name='conv_that_mixes_samples',
)(lambda p, h, x: 0.8 * h + braintrace.conv(x, p['k'], padding='SAME', batch_group_count=2))

# -- what is no model, or no step ------------------------------------------------------------------

refused(
    COMPILE, 'no ETP op | braintrace.matmul(x, W) instead of x @ W', at=None, name='without_ops'
)(lambda p, h, x: 0.8 * h + x @ p['w'])
refused(
    COMPILE,
    'outside of that function',
    params='u',
    name='without_ops_but_an_opaque_one',
    fails={'record': 'says that the step applies no ETP op, though it does, and names no line'},
)(lambda p, h, x: 0.8 * h + opaque(x, p['u']))
refused(
    STRUCTURE,
    "params leaf 'f' is function | close over them",
    at=None,
    params={'w': PARAMS['w'], 'f': lambda a: a},
    name='with_a_function_among_the_parameters',
)(lambda p, h, x: h + p['f'](mm(x, p['w'])))


def no_step(*args, **options):
    """Refused for what goes in or comes out, which has no line."""
    return refused(*args, **{'at': None, 'carry': {'h': H}} | options)


no_step(COMPILE, 'no hidden state', 'HiddenState', carry={}, name='without_states')(
    lambda p, c, x: {}
)
no_step(
    COMPILE,
    'no hidden state of a floating-point dtype',
    carry={'n': np.arange(N)},
    name='with_integer_states_only',
)(lambda p, c, x: {'n': c['n'] + mm(x, p['w']).sum().astype(int)})
no_step(
    STRUCTURE,
    'h: float64[2, 4] before the step, float32[2, 4] after | Cast or reshape',
    name='narrowing',
)(lambda p, c, x: {'h': (c['h'] + mm(x, p['w'])).astype(jnp.float32)})
no_step(STRUCTURE, 'h: missing in the new carry', 'g: added in the new carry', name='renaming')(
    lambda p, c, x: {'g': c['h'] + mm(x, p['w'])}
)
no_step(STRUCTURE, 'same paths, but the tree', carry=(H, H), name='from_tuple_to_list')(
    lambda p, c, x: [c[1] + mm(x, p['w']), c[0]]
)
no_step(
    STRUCTURE,
    "carry leaf 'name' is str, not an array | Keep Python objects out of carry",
    carry={'h': H, 'name': 'cell'},
    name='with_a_python_object_in_the_carry',
)(lambda p, c, x: {'h': c['h'] + mm(x, p['w']), 'name': c['name']})


@no_step(STRUCTURE, "outputs leaf 'name' is str", carry=H)
def returning_a_python_object(p, h, x):
    return {'h': h, 'name': 'cell'}, h + mm(x, p['w'])


@no_step(COMPILE, 'a tuple of 3', 'return a pair (outputs, new_carry)', carry=H)
def returning_a_triple(p, h, x):
    return h, h, h + mm(x, p['w'])


@refused(NOT_SUPPORTED, 'new_ref works on a mutable array', 'Compute with values')
def writing_to_a_mutable_array(p, h, x):
    now = jax.new_ref(h)  # here
    now[...] = 0.8 * now[...] + mm(x, p['w'])
    return now[...], now[...]
