"""Where arrays lie on eight devices: a process that prints what it finds as JSON."""

import json
from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import _jax, functional, rules
from braintrace.errors import OptionError, StructureError
from tests import oracles
from tests.compare import errors
from tests.devices import hlo
from tests.devices.cells import CELLS, B, loss
from tests.devices.programs import AUTO, EXPLICIT, call_of

CELL = CELLS['rnn']


def setting():
    dtype = jnp.result_type(float)
    return CELL.params(dtype), CELL.carry(dtype), CELL.data(dtype)


def eight(kind):
    """A mesh of all devices, and what puts a tree on it by a spec."""
    mesh = jax.make_mesh((8,), ('b',), axis_types=(kind,))
    return mesh, lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def shard(tree) -> int:
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))


def of_init(kind, jitted: bool) -> list[int]:
    """The bytes of the trace that one device holds after `init`, and those of the whole."""
    p, c, (xs, _) = setting()
    learner, (_, put) = functional.online(CELL.run), eight(kind)
    init = jax.jit(learner.init) if jitted else learner.init
    state = init(put(p), put(c, 'b'), put(xs[0], 'b'))
    return [shard(state.trace), sum(a.nbytes for a in jax.tree.leaves(state.trace))]


def of_a_module() -> dict:
    """A learner of a module that is placed and restored, beside one that is neither."""
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.normal(size=(3, B, 4)), jnp.float32)

    def make():
        brainstate.random.seed(1)
        model = braintrace.nn.MinGRUCell(4, 8)
        return braintrace.compile(model, rules.d_rtrl(), xs[0], batch_size=B)

    def grads(learner, xs):
        step = lambda x: (learner(x) ** 2).mean()  # noqa: E731
        return learner.etrace_grad(xs, step_fn=step).grads

    mesh, put = eight(AUTO)
    placed, alone = make(), make()
    placed.place(mesh, batch_axis='b')
    placed.restore(jax.device_get(alone.save()))
    half = make()
    half.place(jax.make_mesh((4,), ('b',), axis_types=(AUTO,), devices=jax.devices()[4:]))
    placed.restore(half.save())  # an array that stayed there would be refused beside the others
    got, wanted = grads(placed, put(xs, None, 'b')), grads(alone, xs)
    zero, said = jnp.zeros(()), ''
    try:
        placed.export(loss, xs[0], zero)
    except OptionError as error:
        said = str(error)
    alone.restore(jax.device_get(placed.save()))
    step = alone.export(loss, xs[0], zero)
    outputs = step(step.arrays, x=xs[0], y=zero)[1]['outputs']
    return {
        'said': said,
        'exported': float(abs(outputs - np.asarray(placed(put(xs[0], 'b')))).max()),
        'error': max(errors(got, wanted).values()),
        'shard': shard(placed.etrace.value['trace']),
        'whole': sum(a.nbytes for a in jax.tree.leaves(placed.etrace.value['trace'])),
    }


def reported() -> dict:
    """What the report says of a step, beside what XLA says of it."""
    p, c, (xs, ys) = setting()
    learner, (mesh, put) = functional.online(CELL.run), eight(AUTO)
    jax.eval_shape(learner.init, p, c, xs[0])
    whole = jax.tree.map(lambda _: P(), p)
    share = learner.report.at(B, param_specs=whole, batch_axis='b', mesh=mesh).share
    specs = learner.partition_specs(whole, 'b', mesh)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    p = put(p)
    state = jax.jit(learner.init, out_shardings=places)(p, c, xs[0])
    xs, ys = put((xs, ys), None, 'b')
    step = partial(call_of(learner, 'step'), xs=xs, ys=ys)
    program = jax.jit(step, out_shardings=(None, places)).lower(p, state).compile()
    return {
        'held': share.held,
        'arguments': program.memory_analysis().argument_size_in_bytes,
        'gradient': share.gradient,
        'moved': hlo.moved(program.as_text()),
    }


def said_to(learner, p, state, xs, ys) -> list[str]:
    """What each call that is refused says."""
    found, at = [], (p, state, xs[0])
    of_steps = [call(loss) for call in (learner.grad, learner.heads, learner.observed)]
    calls = [(learner.step, at), (learner.vjp, at), *((call, (*at, ys[0])) for call in of_steps)]
    for call, args in [*calls, (learner.sequence_grad(loss), (p, state, xs, ys))]:
        try:
            call(*args)
        except StructureError as error:
            found.append(str(error))
    return found


def refused() -> list[str]:
    """What each call says to a state of another mesh."""
    p, c, (xs, ys) = setting()
    learner, devices = functional.online(CELL.run), jax.devices()
    first, second = (
        NamedSharding(jax.make_mesh((4,), ('b',), (AUTO,), devices=half), P())
        for half in (devices[:4], devices[4:])
    )
    state = learner.init(jax.device_put(p, first), jax.device_put(c, first), xs[0])
    p, xs, ys = jax.device_put((p, xs, ys), second)
    return said_to(learner, p, state, xs, ys)


def exported() -> dict:
    """What an export says to a state on eight devices, and the error of one that follows what it
    says.
    """
    p, c, (xs, ys) = setting()
    learner, (_, put), said = functional.online(CELL.run), eight(AUTO), []
    wanted = learner.grad(loss)(p, learner.init(p, c, xs[0]), xs[0], ys[0]).grads
    p, c = put(p), put(c, 'b')
    state = learner.init(p, c, put(xs[0], 'b'))
    one = jax.device_put((p, state), jax.devices()[0])
    for params, now in ((p, one[1]), (one[0], state)):
        try:
            functional.export_step(learner, loss, params, now, xs[0], ys[0])
        except OptionError as error:
            said.append(str(error))
    step = functional.export_step(learner, loss, *one, xs[0], ys[0])
    results = step(step.arrays, x=xs[0], y=ys[0])[1]
    found = {name: results[f'grads/{name}'] for name in wanted}
    return {'said': said, 'error': max(errors(found, wanted).values())}


def outside() -> list[str]:
    """What each call says to arrays on explicit axes, outside of their mesh, where `init` runs."""
    p, c, (xs, ys) = setting()
    learner, (_, put) = functional.online(CELL.run), eight(EXPLICIT)
    p, c, xs, ys = put(p), put(c, 'b'), put(xs, None, 'b'), put(ys, None, 'b')
    return said_to(learner, p, learner.init(p, c, xs[0]), xs, ys)


def explicit() -> list[float]:
    """Errors of calls under explicit axes that the table of programs has not."""
    p, c, (xs, ys) = setting()
    wanted = functional.online(CELL.run)
    start = wanted.init(p, c, xs[0])
    losses = loss, lambda out, y: 2 * loss(out, y)
    calls = [
        lambda learner, state, p: learner.observed(loss)(p, state, xs[0], ys[0])[0].grads,
        lambda learner, state, p: learner.heads(*losses)(p, state, xs[0], ys[0]).grads,
        lambda learner, state, p: learner.sequence_grad(loss)(p, state, xs, ys)[0],
    ]
    found = [jax.jit(partial(call, wanted))(start, p) for call in calls]
    mesh, put = eight(EXPLICIT)
    with jax.set_mesh(mesh):
        p, c, xs, ys = put(p), put(c, 'b'), put(xs, None, 'b'), put(ys, None, 'b')
        learner = functional.online(CELL.run)
        state = learner.init(p, c, xs[0])
        got = [jax.jit(partial(call, learner))(state, p) for call in calls]
    return [max(errors(a, b).values()) for a, b in zip(got, found, strict=True)]


def unshared() -> float:
    """The error of a gradient on one device, of an op that reads another input at each turn of a
    loop inside of the step.
    """

    def cell(p, h, x):
        turn = lambda h, x: (0.8 * h + jnp.tanh(braintrace.matmul(x, p['w'])), None)  # noqa: E731
        h, _ = jax.lax.scan(turn, h, x)
        return h @ p['out'], h

    rng, learner = np.random.default_rng(0), functional.online(cell)
    p = {'w': rng.normal(size=(3, 5)), 'out': rng.normal(size=(5, 4))}
    h, xs, ys = np.zeros((2, 5)), rng.normal(size=(4, 11, 2, 3)), rng.normal(size=(4, 2, 4))
    got = jax.jit(learner.sequence_grad(loss))(p, learner.init(p, h, xs[0]), xs, ys).grads
    return max(errors(got, oracles.by_time(cell, p, h, xs, ys, loss, np.full(4, 0.25))).values())


def alone() -> list[bool]:
    """Whether code of one device's own runs: on one device, on all, and in each shard of all."""
    mesh = jax.make_mesh((8,), ('b',), axis_types=(AUTO,))
    choose = lambda x: _jax.alone_or(lambda x: x + 1, lambda x: x - 1)(x)  # noqa: E731
    x = jnp.zeros(8)
    spread = jax.device_put(x, NamedSharding(mesh, P('b')))
    shards = jax.shard_map(choose, mesh=mesh, in_specs=P('b'), out_specs=P('b'))
    rows = choose(x), jax.jit(choose)(x), jax.jit(choose)(spread), jax.jit(shards)(spread)
    mapped = jax.jit(jax.vmap(choose))(spread)
    return [bool((row == 1).all()) for row in (*rows, mapped)]


if __name__ == '__main__':
    jax.config.update('jax_enable_x64', True)
    inits = [(kind, jitted) for kind in (AUTO, EXPLICIT) for jitted in (False, True)]
    found = {f.__name__: f() for f in (alone, unshared, explicit, refused, exported, outside)}
    found['init'] = [of_init(*row) for row in inits if row != (AUTO, True)]
    print(json.dumps(found | {'module': of_a_module(), 'report': reported()}))
