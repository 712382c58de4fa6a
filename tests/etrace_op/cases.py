"""One table of op applications, and the rules called as an executor calls them. Every suite takes
the product.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braintrace import _etrace_op as ops


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An op with the shapes of its operands; values are drawn from a seed."""

    name: str
    primitive: Any
    x: tuple[int, ...] | None
    weights: dict[str, tuple[int, ...]]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    structure: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last operands

    def __str__(self) -> str:
        return self.name

    @property
    def rule_params(self) -> dict[str, Any]:
        """What rules get by keyword."""
        return {**self.params, **self.structure}

    def draw(self, seed: int = 0, dtype=None):
        """x (or None) and the weights by name."""
        rng = np.random.default_rng(seed)
        array = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
        return None if self.x is None else array(self.x), {
            n: array(shape) for n, shape in self.weights.items()
        }

    def draw_y(self, seed: int, dtype=None):
        return jnp.asarray(np.random.default_rng(seed).normal(size=self.y.shape), dtype)

    @functools.cached_property
    def y(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(lambda: self.call(*self.draw()))

    def operands(self, x, weights) -> list:
        x = [] if x is None else [x]
        return [*x, *(weights[name] for name in self.weights), *self.structure.values()]

    def call(self, x, weights):
        """Bind the primitive."""
        return self.primitive.bind(*self.operands(x, weights), **self.params)

    def impl(self, x, weights):
        """The implementation, without the primitive."""
        return self.primitive.impl_fn(*self.operands(x, weights), **self.params)


def pattern(
    rows: int, columns: int, entries: int, seed: int = 0, repeated: bool = False
) -> ops.SparseStructure:
    rng = np.random.default_rng(seed)
    at = rng.choice(rows * columns, entries, replace=repeated)
    return ops.SparseStructure(*np.divmod(at, columns), (rows, columns))


def dense(name, primitive, lead, inputs, outputs, bias):
    weights = {'weight': (inputs, outputs)} | ({'bias': (outputs,)} if bias else {})
    return Case(name, primitive, (*lead, inputs), weights, {'has_bias': bias})


def lora(name, primitive, lead, inputs, rank, outputs, bias, alpha=1.5):
    weights = {'lora_b': (inputs, rank), 'lora_a': (rank, outputs)}
    weights |= {'bias': (outputs,)} if bias else {}
    return Case(name, primitive, (*lead, inputs), weights, {'alpha': alpha, 'has_bias': bias})


def sparse(name, primitive, lead, inputs, outputs, entries, bias, **options):
    weights = {'weight': (entries,)} | ({'bias': (outputs,)} if bias else {})
    places, (shape, padded) = pattern(inputs, outputs, entries, **options).tree_flatten()
    params = {'shape': shape, 'padded': padded, 'has_bias': bias}
    structure = dict(zip(ops.etp_sp_mm_p.structure, places, strict=True))
    return Case(name, primitive, (*lead, inputs), weights, params, structure)


def conv(name, x, kernel, outputs, bias=False, **params):
    params = {'strides': (1,) * (len(x) - 2), 'padding': 'SAME'} | params
    weights = {'weight': kernel} | ({'bias': (outputs,)} if bias else {})
    return Case(name, ops.etp_conv_p, x, weights, {'has_bias': bias} | params)


LAST = dict(dimension_numbers=('NWC', 'WIO', 'NWC'))
STRIDED = dict(strides=(2, 3), dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
BY_HAND = dict(strides=(2, 1), padding=((1, 2), (0, 3)), lhs_dilation=(1, 2), rhs_dilation=(2, 1))
CROPPED = dict(padding=((-1, 1), (2, -2)), dimension_numbers=('NHWC', 'HOWI', 'NHCW'))
LOWER = dict(padding='SAME_LOWER', dimension_numbers=('NDHWC', 'DHWIO', 'NDHWC'))
PAIR = dict(feature_group_count=2)
DEPTHWISE = dict(padding='VALID', feature_group_count=3)
GROUPED = 'conv 2-D grouped, dilated, padded by hand'
ODD = 'conv 2-D odd layouts, cropped'
CONVS = [
    conv('conv 1-D', (2, 3, 9), (4, 3, 3), 4, True),
    conv('conv 1-D batch of one', (1, 3, 5), (4, 3, 2), 4),
    conv('conv 1-D channels last', (2, 9, 3), (4, 3, 5), 5, True, **LAST),
    conv('conv 2-D strided', (2, 8, 7, 3), (3, 2, 3, 4), 4, True, **STRIDED),
    conv(GROUPED, (2, 4, 6, 5), (6, 2, 3, 2), 6, True, **BY_HAND, **PAIR),
    conv(ODD, (2, 7, 8, 4), (3, 6, 2, 2), 6, True, **CROPPED, **PAIR),
    conv('conv 2-D depthwise', (2, 3, 5, 5), (3, 1, 2, 2), 3, **DEPTHWISE),
    conv('conv 3-D', (2, 4, 3, 4, 2), (2, 2, 2, 2, 3), 3, **LOWER),
]


def einsum(name, equation, x, weight, bias=None):
    """An einsum of one sample; x has a batch axis where it has more axes than the equation says."""
    letters = equation.replace('->', ',').split(',')
    shared = bool(set(letters[2]) - set(letters[1]))
    weights = {'weight': weight} | ({'bias': bias} if bias else {})
    form = ops.EINSUM_FORMS[len(x) > len(letters[0]), shared]
    return Case(name, form, x, weights, {'equation': equation, 'has_bias': bias is not None})


EINSUMS = [
    einsum('einsum grouped', 'gi,gio->go', (4, 2, 3), (2, 3, 5), (2, 5)),
    einsum('einsum grouped, one sample', 'gi,gio->go', (2, 3), (2, 3, 5), (2, 5)),
    einsum('einsum over heads, out first', 'hi,hio->oh', (2, 3, 4), (3, 4, 2), (2, 3)),
    einsum('einsum transposed', 'i,oi->o', (3, 4), (5, 4)),
    einsum('einsum of two input axes', 'ij,ijo->o', (3, 2, 4), (2, 4, 5)),
    einsum('einsum gain', 'i,i->i', (3, 4), (4,), (4,)),
    einsum('einsum to a number', 'i,i->', (3, 4), (4,)),
    einsum('einsum with a summed axis', 'i,io->i', (3, 4), (4, 2)),
    einsum('einsum along time', 'ti,io->to', (2, 4, 3), (3, 5), (5,)),
    einsum('einsum along time, one sample', 'ti,io->ot', (4, 3), (3, 5), (5,)),
    einsum('einsum outer', 'i,o->io', (2, 3), (4,), (4,)),
]
EMPTY = [
    einsum('einsum empty batch', 'gi,gio->go', (0, 2, 3), (2, 3, 5), (2, 5)),
    einsum('einsum along no time', 'ti,io->to', (2, 0, 3), (3, 5), (5,)),
    dense('mm empty batch', ops.etp_mm_p, (0,), 3, 5, True),
    sparse('sp_mm empty batch', ops.etp_sp_mm_p, (0,), 3, 5, 7, True),
    lora('lora_mm empty batch', ops.etp_lora_mm_p, (0,), 3, 2, 5, True),
    conv('conv empty batch', (0, 3, 9), (4, 3, 3), 4, bias=True),
    dense('mm no inputs', ops.etp_mm_p, (2,), 0, 5, False),
    sparse('sp_mm no entries', ops.etp_sp_mm_p, (2,), 3, 5, 0, False),
    lora('lora_mm rank zero', ops.etp_lora_mm_p, (2,), 3, 0, 5, False),
    Case('elemwise empty', ops.etp_elemwise_p, None, {'weight': (0,)}),
]
FILLED = [
    dense('mm', ops.etp_mm_p, (4,), 3, 5, False),
    dense('mm with bias', ops.etp_mm_p, (2,), 5, 3, True),
    dense('mm batch of one', ops.etp_mm_p, (1,), 2, 3, True),
    dense('mv', ops.etp_mv_p, (), 3, 5, False),
    dense('mv with bias', ops.etp_mv_p, (), 3, 5, True),
    Case('elemwise', ops.etp_elemwise_p, None, {'weight': (3, 2)}),
    Case('elemwise scalar', ops.etp_elemwise_p, None, {'weight': ()}),
    sparse('sp_mm by gather', ops.etp_sp_mm_p, (2,), 6, 5, 7, False),
    sparse('sp_mm by a dense product, with bias', ops.etp_sp_mm_p, (5,), 3, 5, 12, True),
    sparse('sp_mm with repeated entries', ops.etp_sp_mm_p, (3,), 4, 3, 20, True, repeated=True),
    sparse('sp_mv', ops.etp_sp_mv_p, (), 6, 5, 7, False),
    sparse('sp_mv with bias', ops.etp_sp_mv_p, (), 3, 5, 9, True),
    lora('lora_mm', ops.etp_lora_mm_p, (4,), 3, 2, 5, False),
    lora('lora_mm batch of one, with bias', ops.etp_lora_mm_p, (1,), 6, 2, 3, True, alpha=-0.5),
    lora('lora_mv', ops.etp_lora_mv_p, (), 3, 2, 5, False),
    lora('lora_mv with bias', ops.etp_lora_mv_p, (), 3, 2, 5, True),
    *CONVS,
    *EINSUMS,
]
ALL = FILLED + EMPTY
UNBATCHED = {
    ops.etp_mm_p: ops.etp_mv_p,
    ops.etp_sp_mm_p: ops.etp_sp_mv_p,
    ops.etp_lora_mm_p: ops.etp_lora_mv_p,
    **{ops.EINSUM_FORMS[True, shared]: ops.EINSUM_FORMS[False, shared] for shared in (False, True)},
}


def variable(array):
    if array is None:
        return None
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(array.shape, array.dtype))


def rule(case: Case, slot: str):
    return functools.partial(case.primitive.rule(slot), **case.rule_params)


def gradient(case: Case, x, d, weights):
    return rule(case, 'xy_to_dw')(x, d, weights)


def entry_rule(case: Case):
    """The rule that makes an entry, summed over a batch."""
    own = case.primitive.optional_rule('instant_drtrl')
    return rule(case, 'xy_to_dw' if own is None else 'instant_drtrl')


def instant(case: Case, x, d, weights):
    """One step's trace entry: for a batched op mapped over its samples as batches of one."""
    one = entry_rule(case)
    if case.primitive.batched:
        return jax.vmap(lambda x, d: one(x[None], d[None], weights))(x, d)
    return one(x, d, weights)


def transport(case: Case, d, trace):
    return rule(case, 'yw_to_w')(d, trace)


def solve(case: Case, signal, trace, weights):
    own = case.primitive.optional_rule('solve_drtrl')
    if own is not None:
        return own(signal, trace, weights, **case.rule_params)
    return {
        n: e.sum(0) if case.primitive.batched else e
        for n, e in transport(case, signal, trace).items()
    }


def init(case: Case, x, weights, num_state: int, slot: str = 'init_drtrl'):
    """The empty trace, or another rule of the same arguments."""
    weight_vars = {n: variable(w) for n, w in weights.items()}
    y = jax.ShapeDtypeStruct(case.y.shape, jnp.result_type(*weights.values()))
    bound = case.primitive.bound_rule(slot, case.rule_params)
    return bound(variable(x), variable(y), weight_vars, num_state)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def arguments(case: Case, dtype=None):
    """x, weights and two derivatives of y."""
    return (*case.draw(dtype=dtype), case.draw_y(1, dtype), case.draw_y(2, dtype))


def laws(case: Case, x, weights, d, e) -> dict:
    """Both sides of the equations that tie the rules together, by their names."""
    entry, product = instant(case, x, e, weights), d * e
    pull = jax.vjp(lambda w: case.impl(x, w), weights)[1]
    found = {
        'a gradient is the vjp': (gradient(case, x, e, weights), pull(e)[0]),
        'carrying commutes with making': (
            transport(case, d, entry),
            instant(case, x, product, weights),
        ),
        'solving gives the vjp': (
            solve(case, d, entry, weights),
            gradient(case, x, product, weights),
        ),
    }
    if case.primitive.batched:
        whole = {n: t.sum(0) for n, t in entry.items()}
        found['a whole batch is summed'] = entry_rule(case)(x, e, weights), whole
    return found


def results(case: Case, dtype=None, num_state: int = 1) -> dict:
    """Everything that the rules return, to be traced for shapes and dtypes."""
    x, weights, d, e = arguments(case, dtype)
    entry = instant(case, x, e, weights)
    return {
        'gradient': gradient(case, x, e, weights),
        'entry': entry,
        'carried': transport(case, d, entry),
        'solved': solve(case, d, entry, weights),
        'empty': init(case, x, weights, num_state),
    }


def sides(pairs: dict) -> tuple[dict, dict]:
    """What was got and what is expected, from pairs of both by the name of an equation."""
    return {n: got for n, (got, _) in pairs.items()}, {n: want for n, (_, want) in pairs.items()}


def compiled(fn):
    """``jax.jit`` for small programs that run once: little time is spent on making them fast."""
    fast = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
    return jax.jit(fn, compiler_options=fast)


def etp_primitives(jaxpr) -> list:
    """The ETP primitives that a jaxpr binds itself."""
    return [eqn.primitive for eqn in jaxpr.eqns if isinstance(eqn.primitive, ops.ETPPrimitive)]


def primitives_in(jaxpr) -> list[str]:
    """Names of the primitives of a jaxpr, open or closed, and of those inside it."""
    names = []
    for eqn in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
        names.append(eqn.primitive.name)
        for value in eqn.params.values():
            inner = getattr(value, 'jaxpr', value)
            names += primitives_in(inner) if hasattr(inner, 'eqns') else []
    return names
