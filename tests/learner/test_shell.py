"""Names, compile, reset, report and traces of a learner."""

import inspect

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._learner import D_RTRL
from braintrace.errors import StructureError
from tests.compare import assert_close

from .networks import BATCH, INPUTS, STEPS, UNITS, Net, by_steps, compiled, data, loss_of


@pytest.mark.tier(quick=0, one_in=4)
@pytest.mark.parametrize(
    'rule, options', [('D_RTRL', {}), (D_RTRL, {}), (braintrace.rules.d_rtrl(), {})]
)
def test_compile_takes_a_class_a_name_or_a_rule(rule, options):
    xs, ys = data()
    learner, other = compiled(rule, **options), compiled()
    assert_close(
        learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads,
        other.etrace_grad(xs, ys, step_fn=loss_of(other)).grads,
    )


def test_compile_hands_options_to_the_class_and_seeds_the_initialisation():
    learner = braintrace.compile(
        Net(), 'es_d_rtrl', jnp.zeros((BATCH, INPUTS)), batch_size=BATCH, decay_or_rank=19, seed=4
    )
    again = braintrace.compile(
        Net(),
        braintrace.ES_D_RTRL,
        jnp.zeros((BATCH, INPUTS)),
        batch_size=BATCH,
        decay_or_rank=0.9,
        seed=4,
    )
    assert learner.rule == again.rule == braintrace.rules.es_d_rtrl(0.9)
    np.testing.assert_array_equal(learner.model.cell.h.value, again.model.cell.h.value)


@pytest.mark.slow
def test_reset_state_of_some_lanes_is_that_of_a_sequence():
    """Single steps with lanes reset between them have the gradient of one call with these flags."""
    xs, ys = data()
    flags = jnp.zeros((STEPS, BATCH), bool).at[2, 0].set(True).at[4, 1:].set(True)
    learner, whole = compiled(), compiled()
    total = None
    for t in range(STEPS):
        if flags[t].any():
            learner.reset_state(lanes=flags[t])
        got = by_steps(learner, xs[t : t + 1], ys[t : t + 1])
        total = got if total is None else jax.tree.map(jnp.add, total, got)
    assert_close(
        total, whole.etrace_grad(xs, ys, step_fn=loss_of(whole), reset=flags, reduction='sum').grads
    )
    assert (
        learner.etrace.value['t'].tolist()
        == whole.etrace.value['t'].tolist()
        == [STEPS - 2, STEPS - 4, STEPS - 4]
    )
    with pytest.raises(StructureError, match=r'give bool of shape \[\] or \[3\]'):
        learner.reset_state(lanes=jnp.zeros(2, bool))


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
    with pytest.raises(braintrace.errors.OptionError, match='batch_size is 9'):
        learner.reset_state(9)
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


def test_the_report_names_groups_relations_and_routes():
    report = ' '.join(str(compiled().report).split())
    for words in (
        'cell/h 1 [3, 4] float64 cell/h',
        'weight <- cell/Wz/weight/weight; bias <- cell/Wz/weight/bias etp_mm cell/h',
        'cell/Wr/weight/weight [6, 4] float64 same-step weight_then_weight none',
        'readout [4, 2] float64 same-step no_hidden_state not needed',
    ):
        assert words in report


def test_a_learner_prints_three_lines_that_point_to_the_report():
    learner = compiled()
    first, memory, more = str(learner).splitlines()
    assert first == 'D_RTRL learner of Net: 1 hidden group(s), 2 relation(s), 7 parameter(s)'
    assert memory == str(learner.report).splitlines()[1]
    assert more.startswith('gradients leave out a part of the past; `print(learner.report)` shows')
    assert 'not compiled\ncall `learner.compile_graph(x)`' in repr(braintrace.D_RTRL(Net()))


def test_signatures_are_those_of_the_nearest_constructor():
    class Own(braintrace.ES_D_RTRL):
        pass

    classes = braintrace.ETraceLearner, braintrace.D_RTRL, Own
    shown = [str(inspect.signature(cls)) for cls in classes]
    assert [s[: s.index(', policy')] for s in (text.replace(' *,', '') for text in shown)] == [
        "(model: 'brainstate.nn.Module', rule: 'Rule | None'",
        "(model: 'brainstate.nn.Module', trace_dtype=None, write_every: 'int | None' = None, "
        "credit: \"Literal['cut', 'whole']\" = 'cut', scope: \"Literal['position', 'own']\" = "
        "'position'",
        "(model: 'brainstate.nn.Module', decay_or_rank: 'float | int | "
        "tuple[float | int, float | int]'",
    ]


def test_the_graph_is_frozen_and_the_compiler_can_be_called_alone():
    model = Net()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    graph = braintrace.compile_etrace_graph(model, jnp.zeros((BATCH, INPUTS)))
    assert [r.primitive.name for r in graph.hidden_param_op_relations] == ['etp_mm', 'etp_mm']
    assert repr(graph).startswith('ETraceGraph(1 hidden groups, 2 relations, ')
    with pytest.raises(AttributeError):
        graph.ops = ()


def test_the_published_tiny_rnn_has_one_relation_and_its_plain_weight_learns():
    class TinyRNN(brainstate.nn.Module):
        def __init__(self, in_dim=4, hid_dim=6):
            super().__init__()
            self.in_dim, self.hid_dim = in_dim, hid_dim
            self.W_rec = brainstate.ParamState(
                0.1 * jax.random.normal(jax.random.PRNGKey(0), (hid_dim, hid_dim))
            )
            self.W_in = brainstate.ParamState(
                0.1 * jax.random.normal(jax.random.PRNGKey(1), (in_dim, hid_dim))
            )

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size or 1, self.hid_dim)))

        def update(self, x):
            self.h.value = jnp.tanh(
                x @ self.W_in.value + braintrace.matmul(self.h.value, self.W_rec.value)
            )
            return self.h.value

    model = TinyRNN()
    brainstate.nn.init_all_states(model, batch_size=2)
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(jnp.zeros((2, model.in_dim)))
    (relation,) = learner.graph.hidden_param_op_relations
    assert relation.primitive.name == 'etp_mm' and list(relation.trainable_vars) == ['weight']
    assert relation.paths == {'weight': ('W_rec',)}
    learner(jnp.ones((2, 4)))
    grads = brainstate.transform.grad(
        lambda: learner(jnp.ones((2, 4))).sum(), learner.param_states
    )()
    assert all(jnp.abs(g).max() > 0 for g in grads.values())
    assert learner.graph.routes['W_in'].kind == 'same-step'


@pytest.mark.slow
def test_a_custom_primitive_learns_like_the_built_in_one():
    def impl(x, w, *, scale=1.0):
        return scale * (x @ w)

    def xy_to_dw(x, d, weights, *, scale=1.0):
        return jax.vjp(lambda w: impl(x, w['weight'], scale=scale), weights)[1](d)[0]

    spec = braintrace.ETPPrimitiveSpec(
        name='etp_test_scaled',
        impl=impl,
        yw_to_w=lambda d, e, **_: {'weight': e['weight'] * d[..., None, :]},
        xy_to_dw=xy_to_dw,
        init_drtrl=lambda x, y, w, n: {
            'weight': jnp.zeros((x.aval.shape[0], *w['weight'].aval.shape, n))
        },
        init_pp=lambda x, y, w, n: jnp.zeros((*y.aval.shape, n)),
        trainable_invars_fn=lambda params: {'weight': 1},
        batched=True,
    )
    scaled = braintrace.register_primitive_spec(spec)

    class Cell(brainstate.nn.Module):
        def __init__(self, apply):
            super().__init__()
            self.w, self.apply = (
                brainstate.ParamState(jnp.linspace(-1.0, 1.0, 6 * 4).reshape(6, 4)),
                apply,
            )

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

        def update(self, x):
            self.h.value = jnp.tanh(
                0.5 * self.h.value
                + self.apply(jnp.concatenate([x, self.h.value], -1), self.w.value)
            )
            return self.h.value

    xs, ys = data()[0], jnp.ones((STEPS, BATCH, UNITS))
    for rule in (braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.7)):
        for window in (1, 3, None):
            found = []
            for apply in (
                lambda x, w: scaled.bind(x, w, scale=2.0),
                lambda x, w: 2 * braintrace.matmul(x, w),
            ):
                learner = braintrace.compile(Cell(apply), rule, xs[0], batch_size=BATCH)
                found.append(
                    learner.etrace_grad(xs, ys, step_fn=loss_of(learner), window=window).grads
                )
            assert_close(*found)
