"""Names, compile, reset, report and traces of a learner."""

import brainstate
import jax
import jax.numpy as jnp
import optax
import pytest

import braintrace
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close
from tests.functional.test_purity import left_of

from .networks import BATCH, INPUTS, UNITS, Net, compiled, data, loss_of, squared


@pytest.mark.slow
def test_reset_state_puts_back_trace_count_and_hidden_states():
    xs, ys = data()
    learner, fresh = compiled(), compiled()
    learner.model.cell.h.value = jnp.full((BATCH, UNITS), 0.25)
    learner.compile_graph(xs[0])
    first = learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads
    learner.reset_state()
    assert (learner.model.cell.h.value == 0.25).all()
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(learner.etrace.value))
    assert_close(learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads, first)
    with pytest.raises(OptionError, match='batch_size is 9'):
        learner.reset_state(9)
    with pytest.raises(StructureError, match=r'give bool of shape \[\] or \[3\]'):
        learner.reset_state(lanes=jnp.zeros(2, bool))
    fresh.reset_state(BATCH)


def test_the_trace_of_a_parameter_is_named_by_relation_and_group():
    xs, _ = data()
    learner = compiled()
    learner.etrace_evolve(xs)
    cell = learner.model.cell
    (entry,) = learner.get_etrace_of(cell.Wh.weight).values()
    assert (
        entry['weight'].shape == (BATCH, INPUTS + UNITS, UNITS, 1)
        and jnp.abs(entry['weight']).max() > 0
    )
    assert learner.get_etrace_of(('readout',)) == {}
    assert set(learner.get_etrace_of(('cell', 'Wz', 'weight'))) == {
        ('cell/Wz/weight/weight', 'cell/h')
    }


def test_a_learner_prints_three_lines_that_point_to_the_report():
    learner = compiled()
    first, memory, more = str(learner).splitlines()
    assert first == 'D_RTRL learner of Net: 1 hidden group(s), 2 relation(s), 7 parameter(s)'
    assert memory == str(learner.report).splitlines()[1]
    assert more.startswith('gradients leave out a part of the past; `print(learner.report)` shows')
    assert 'not compiled\ncall `learner.compile_graph(x)`' in repr(braintrace.D_RTRL(Net()))


def test_the_graph_is_frozen_and_the_compiler_can_be_called_alone():
    model = Net()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    graph = braintrace.compile_etrace_graph(model, jnp.zeros((BATCH, INPUTS)))
    assert [r.primitive.name for r in graph.hidden_param_op_relations] == ['etp_mm', 'etp_mm']
    assert repr(graph).startswith('ETraceGraph(1 hidden groups, 2 relations, ')
    with pytest.raises(AttributeError):
        graph.ops = ()


# -- what a learner compiled ends with it ----------------------------------------------------------


class Holding(Net):
    """Holds an array beside its states."""

    def __init__(self):
        super().__init__()
        self.array = jnp.ones((50, 2)) * 2

    def update(self, x):
        return super().update(x) + self.array[0]


CALLS = {
    'call': lambda learner, fn, xs, ys: learner(xs[0]),
    'grad': lambda learner, fn, xs, ys: brainstate.transform.grad(
        lambda: fn(xs[0], ys[0]), learner.param_states
    )(),
    'evolve': lambda learner, fn, xs, ys: learner.etrace_evolve(xs),
    'etrace_grad': lambda learner, fn, xs, ys: learner.etrace_grad(xs, ys, step_fn=fn).grads,
    'etrace_train': lambda learner, fn, xs, ys: learner.etrace_train(
        xs, ys, step_fn=fn, optimizer=optax.sgd(0.1)
    ),
    'evaluate': lambda learner, fn, xs, ys: braintrace.evaluate(learner, xs, ys, squared),
}


QUICK = 'call', 'evolve'
ROWS = [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS]


@pytest.mark.parametrize('call', ROWS)
def test_nothing_of_a_learner_outlives_it(call):
    def used():
        learner, (xs, ys) = compiled(model=Holding), data()
        CALLS[call](learner, lambda x, y: squared(learner(x), y), xs, ys)
        return learner, learner.graph, learner.model, learner.model.array

    left_of(used, 1)  # what is made once for the process
    assert left_of(used, 1) == (0, 0)
