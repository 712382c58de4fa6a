"""Gradients computed in ways that share no code with the library.

Reverse mode in JAX (``total`` gradients, trees like the parameters; ``case`` is a
``tests.models.Case``):

* ``by_time(cell, ...)`` of a plain cell, with weights of the losses and resets;
* ``bptt(case)``       plain BPTT;
* ``same_step(case)``  every step with its old states held constant: no history at all;
* ``through(case)``    the same beside the gradient of the first carry;
* ``cut_bptt(case)``   BPTT with ``cut`` as ``stop_gradient``, once for each group with the other
                       groups' old states constant;
* ``two_pass(case)``   BPTT with the carry of the D pass and the losses of the two-sided pass.

Forward in time in NumPy, by complex steps (``per step`` gradients: a leading axis of time):

* ``dense_recursion(case)``      D_RTRL, a dense trace for each group; asserts a position-wise D;
                                 with ``credit`` and ``own`` as the rules of these names;
* ``exact_windows(case, size)``  reverse mode through each window, and these traces at its border;
* ``es_recursion(case, decay)``  ES_D_RTRL by its formula, with one decay or a pair of two;

and ``finite_differences(case)``. ``total(steps, weights)`` sums a per-step gradient over time;
``restarted`` makes one where lanes start afresh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.ops import JaxOps, NumpyOps

STEP = 1e-30
QUICK = {'xla_backend_optimization_level': 0}  # compile time is most of what these tests cost


# -- reverse mode ----------------------------------------------------------------------------------


def _reverse(case, *readings):
    """Gradients of the losses, one for each reading ``(ops, carry_ops, keep)``.

    ``ops`` makes the outputs, ``carry_ops`` the carry, and ``keep`` names the states of the carry
    that stay live.
    """

    def loss(params, ops, carry_ops, keep):
        def step(carry, at):
            x, y = at
            output, new = case.run(ops, params, carry, x)
            new = new if carry_ops is ops else case.run(carry_ops, params, carry, x)[1]
            new = {k: v if k in keep else jax.lax.stop_gradient(v) for k, v in new.items()}
            return new, case.loss(output, y)

        return jax.lax.scan(step, dict(case.carry), (case.xs, case.ys))[1].sum()

    def gradients(params):
        return [jax.grad(loss)(params, *reading) for reading in readings]

    return jax.tree.map(np.asarray, jax.jit(gradients, compiler_options=QUICK)(case.params))


def by_time(cell, params, carry, xs, ys, loss, weights=None, reset=None):
    """The gradient of the weighted losses of a plain cell by reverse mode through all steps; with
    ``reset``, flags of lanes or of all and a carry, some start again there.
    """
    steps = len(jax.tree.leaves(xs)[0])
    weights = np.ones(steps) if weights is None else weights
    flags, fresh = (None, None) if reset is None else reset

    def total(params):
        def step(h, at):
            x, y, weight, flag = at
            if reset is not None:
                h = jax.tree.map(lambda a, b: jnp.where(_along(flag, a), b, a), h, fresh)
            output, h = cell(params, h, x)
            return h, weight * loss(output, y)

        first = jax.tree.map(jnp.asarray, carry)
        return jax.lax.scan(step, first, (xs, ys, weights, flags))[1].sum()

    return jax.jit(jax.grad(total, allow_int=True), compiler_options=QUICK)(params)


def _along(flag, a):
    return flag.reshape(flag.shape + (1,) * (a.ndim - flag.ndim))


@functools.cache
def bptt(case):
    """Plain back-propagation through time."""
    ops = JaxOps()
    return _reverse(case, (ops, ops, set(case.carry)))[0]


def through(case):
    """Plain back-propagation to the parameters and to the first carry."""

    def total(params, carry):
        def step(carry, at):
            output, new = case.run(JaxOps(), params, carry, at[0])
            return new, case.loss(output, at[1])

        return jax.lax.scan(step, carry, (case.xs, case.ys))[1].sum()

    gradients = jax.jit(jax.grad(total, (0, 1)), compiler_options=QUICK)
    return jax.tree.map(np.asarray, gradients(case.params, dict(case.carry)))


@functools.cache
def same_step(case):
    """The gradient without any history."""
    ops = JaxOps()
    return _reverse(case, (ops, ops, set()))[0]


def cut_bptt(case):
    """Each parameter's gradient, unrolled with only its owner's old states live, and cut."""
    ops = JaxOps('cut')
    grads = _reverse(case, (ops, ops, set()), *[(ops, ops, set(g)) for g in case.model.groups])
    return jax.tree_util.tree_map_with_path(lambda path, *g: g[case.model.reading_of(path)], *grads)


def two_pass(case):
    """``dh/dw`` by the D pass, ``dL/dh'`` and the same step by the two-sided one (reverse mode)."""
    return _reverse(case, (JaxOps('cut'), JaxOps('constant'), set(case.carry)))[0]


# -- complex steps ---------------------------------------------------------------------------------


def nudged(tree):
    """``tree`` once for every number in it, with an imaginary ``STEP`` there."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        for j in range(np.size(leaf)):
            nudge = np.array(leaf, complex)
            nudge.flat[j] += 1j * STEP
            yield jax.tree.unflatten(structure, [*leaves[:i], nudge, *leaves[i + 1 :]])


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def jacobian(fn, at):
    """The matrix ``d flat(fn(at)) / d flat(at)``."""
    return np.stack([flat(fn(t)).imag / STEP for t in nudged(at)], -1)


def like(vector, tree):
    """``vector``, or rows of vectors, as a tree with the shapes of ``tree``."""
    leaves, structure = jax.tree.flatten(tree)
    parts = np.split(vector, np.cumsum([np.size(leaf) for leaf in leaves])[:-1], -1)
    shaped = [
        p.reshape((*vector.shape[:-1], *np.shape(leaf)))
        for p, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


def real(tree):
    return jax.tree.map(np.real, tree)


def pick(carry, states):
    return {k: carry[k] for k in states}


def total(steps, weights=None):
    """Per-step gradients summed over time."""
    return jax.tree.map(
        lambda g: g.sum(0) if weights is None else np.tensordot(weights, g, 1), steps
    )


def restarted(oracle, case, flags, carry0):
    """Per-step gradients; with ``flags[t, b]`` lane b restarts from ``carry0`` before step t."""

    def lane(b):
        starts = sorted({0, *np.flatnonzero(flags[:, b])})
        parts = [
            oracle(case.part(b, start, stop, carry0 if flags[start, b] else case.carry))
            for start, stop in zip(starts, [*starts[1:], len(flags)], strict=True)
        ]
        return jax.tree.map(lambda *g: np.concatenate(g), *parts)

    return jax.tree.map(lambda *g: sum(g), *map(lane, range(flags.shape[1])))


def transition(case, ops, params, carry, x, states, own=False):
    """``dh/dh'`` of one group, asserted to be position-wise: (S * positions, S * positions).

    ``own``: with what a position reads of itself through the ops, of a cell with one op between.
    """
    d = jacobian(
        lambda h: pick(case.run(ops, params, {**carry, **h}, x)[1], states), pick(carry, states)
    )
    count = len(states)
    blocks = d.reshape(count, d.shape[0] // count, count, -1).swapaxes(1, 2)
    if own:
        blocks *= np.eye(blocks.shape[-1])
        return blocks.swapaxes(1, 2).reshape(d.shape)
    off = blocks * (1 - np.eye(blocks.shape[-1]))
    assert not off.any(), f'{case.model.name}: D of {states} is not position-wise'
    return d


@functools.cache
def _traces(case, own=False):
    """``(carry, dense traces of the groups)`` before every step."""
    constant, groups, before = NumpyOps('constant'), case.model.groups, []
    params, carry = case.params, dict(case.carry)
    traces = [np.zeros((flat(pick(carry, g)).size, flat(params).size)) for g in groups]
    for x in case.xs:
        before.append((carry, list(traces)))

        def states(params, names, carry=carry, x=x):
            return pick(case.run(constant, params, carry, x)[1], names)

        read = NumpyOps() if own else constant
        for i, g in enumerate(groups):
            d = transition(case, read, params, carry, x, g, own)
            traces[i] = d @ traces[i] + jacobian(lambda p, g=g: states(p, g), params)
        carry = real(case.run(NumpyOps(), params, carry, x)[1])
    return before


@functools.cache
def dense_recursion(case, credit='cut', own=False):
    """D_RTRL: D pass ``e = D e' + dh/dw``, two-sided pass ``dL/dw + sum_g dL/dh_g' e_g'``."""
    read, params, steps = NumpyOps('cut' if credit == 'cut' else 'live'), case.params, []
    for x, y, (carry, traces) in zip(case.xs, case.ys, _traces(case, own), strict=True):

        def loss(params, carry, x=x, y=y):
            return case.loss(case.run(read, params, carry, x)[0], y)

        grad = jacobian(lambda p, carry=carry: loss(p, carry), params)[0]
        for i, (g, trace) in enumerate(zip(case.model.groups, traces, strict=True)):
            c = jacobian(lambda h, carry=carry: loss(params, {**carry, **h}), pick(carry, g))[0]
            if own and credit == 'cut':
                c = c + _own_signal(case, params, carry, x, y, i)
            grad = grad + c @ trace
        steps.append(grad)
    return like(np.stack(steps), params)


def exact_windows(case, size):
    """Reverse mode without cuts in windows of ``size`` steps, plus ``dL/dh_0 e_0``."""

    def read(traces):
        pairs = list(zip(case.model.groups, traces, strict=True))
        return lambda lam: sum(flat(pick(lam, g)) @ trace for g, trace in pairs)

    return at_borders(case, [(carry, read(traces)) for carry, traces in _traces(case)], size)


def at_borders(case, before, size):
    """The same by any traces: ``before[t]`` is the carry and ``history(dL/dh)`` there."""
    total = 0.0
    for start in range(0, len(case.xs), size):
        carry, history = before[start]
        grad, lam = through(case.steps(start, start + size, carry))
        total = total + flat(grad) + history(lam)
    return like(total, case.params)


def finite_differences(case, step=1e-5):
    """Central differences of the summed losses."""

    def run(vector):
        params, carry, value = like(vector, case.params), dict(case.carry), 0.0
        for x, y in zip(case.xs, case.ys, strict=True):
            output, carry = case.run(NumpyOps(), params, carry, x)
            value += case.loss(output, y)
        return value

    at = flat(case.params)
    moves = step * np.eye(at.size)
    return like(np.array([(run(at + m) - run(at - m)) / (2 * step) for m in moves]), case.params)


# -- ES_D_RTRL -------------------------------------------------------------------------------------


class Probe(NumpyOps):
    """Records ops as ``(x, op)``; adds to their results, and to new states outside their group."""

    def __init__(self, reads='live', add_y=(), add_state=None):
        super().__init__(reads)
        self.calls, self.add_y, self.add_state = [], add_y, add_state or {}

    def _apply(self, x, op):
        self.calls.append((x, op))
        y = super()._apply(x, op)
        k = len(self.calls) - 1
        return y + self.add_y[k] if k < len(self.add_y) else y

    def new(self, name, value):
        return value + self.add_state[name] if name in self.add_state else value

    def within(self, name, value, without=None):
        if name not in self.add_state:
            return value
        return np.real(value) + (0.0 if without is None else 1j * np.imag(without))


def _factors(case, params, carry, x, y):
    """``x`` and ``dy`` of every op in one row; each group's states, D, D_f (columns: ops), L."""

    def loss(ops):
        return case.loss(case.run(ops, params, carry, x)[0], y)

    seen = Probe()
    case.run(seen, params, carry, x)
    zeros = [np.zeros(np.shape(op(x))) for x, op in seen.calls]
    dy = jacobian(lambda add: loss(Probe(add_y=add)), zeros)[0]
    groups = []
    for g in case.model.groups:
        d = transition(case, NumpyOps('constant'), params, carry, x, g)
        df = jacobian(
            lambda add: pick(case.run(Probe('constant', add_y=add), params, carry, x)[1], g), zeros
        )
        signal = np.concatenate(
            [
                jacobian(lambda add: loss(Probe(add_state=add)), {s: np.zeros_like(carry[s])})[0]
                for s in sorted(g)
            ]
        )
        groups.append((d, df, signal))
    return [x for x, _ in seen.calls], dy, groups


def _own_signal(case, params, carry, x, y, i):
    """What group ``i`` sends to the loss by what its positions read of themselves through ops."""
    g = case.model.groups[i]

    def results(h):
        seen = Probe()
        case.run(seen, params, {**carry, **h}, x)
        return [op(x) for x, op in seen.calls]

    _, dy, groups = _factors(case, params, carry, x, y)
    fed = groups[i][1].reshape(len(g), -1, dy.size).any(0)  # which results feed a position
    own = jacobian(results, pick(carry, g)) * np.tile(fed.T, len(g))
    return dy @ own


def _pull_back(case, params, carry, x, inputs, cotangent):
    """``xy_to_dw`` of every op at its given input, back to the parameters."""

    def results(params):
        probe = Probe()
        case.run(probe, params, carry, x)
        return [op(given) for (_, op), given in zip(probe.calls, inputs, strict=True)]

    return cotangent @ jacobian(results, params)


@functools.cache
def es_recursion(case, decay):
    """The three lines of DESIGN.md, section 3. What no op carries keeps its same-step gradient."""
    a_x, a_f = decay if isinstance(decay, tuple) else (decay, decay)
    params, carry, steps = case.params, dict(case.carry), []
    filtered, ef = None, [0.0] * len(case.model.groups)
    for t, (x, y) in enumerate(zip(case.xs, case.ys, strict=True)):
        inputs, dy, groups = _factors(case, params, carry, x, y)
        filtered = [
            None if new is None else a_x * old + new
            for old, new in zip(filtered or [0.0] * len(inputs), inputs, strict=True)
        ]
        traced, rest = 0.0, dy
        for i, (d, df, signal) in enumerate(groups):
            ef[i] = (a_f * d @ ef[i] if t else 0.0) + (1 - a_f) * df
            traced = traced + signal @ ef[i] / (1 - a_f ** (t + 1))
            rest = rest - signal @ df
        by_ops = _pull_back(case, params, carry, x, filtered, traced) + _pull_back(
            case, params, carry, x, inputs, rest
        )
        grad = jacobian(lambda p: case.loss(case.run(NumpyOps(), p, carry, x)[0], y), params)[0]
        steps.append(by_ops + grad - _pull_back(case, params, carry, x, inputs, dy))
        carry = real(case.run(NumpyOps(), params, carry, x)[1])
    return like(np.stack(steps), params)
