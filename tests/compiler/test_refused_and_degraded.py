"""Each refused or degraded model: its records, their lines, and no silent zero gradient."""

import functools
import re
import warnings

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import Policy, functional, rules
from braintrace._compiler.kinds import KINDS
from braintrace.errors import BraintraceWarning, UntracedParameterError
from tests.compare import assert_close
from tests.compiler.degraded import DEGRADED, cut
from tests.compiler.degraded_modules import MODULES
from tests.compiler.refused import REFUSED, B, I, T
from tests.tiers import nightly, slow

D_RTRL = rules.d_rtrl()
QUICK = {
    'dot',
    'tail_of_a_cumulative_sum',
    'weight_times_an_input',
    'two_ops_in_a_row',
    'op_in_a_custom_vjp',
    'slice_of_a_state_into_a_smaller_one',
}
PLACE = re.compile(r'\[([^][]*:\d+) \(|\[\]')


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True), brainstate.environ.context(precision=64), warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        yield


def over(rows, test, quick=()):
    """Parametrise by rows; one with something wrong in this test is a strict xfail.

    One outside of ``quick`` is slow, and nightly where its history is compared elsewhere, since
    that comparison holds this one.
    """

    def marks(row):
        found = (
            [pytest.mark.xfail(reason=row.fails[test], strict=True)] if test in row.fails else []
        )
        return found + (
            [nightly if row.history else slow] if quick and row.name not in quick else []
        )

    return pytest.mark.parametrize(
        'row', [pytest.param(row, marks=marks(row), id=row.name) for row in rows]
    )


def compiled(row, policy=None):
    """The learner, compiled on shapes alone, and twice, so that a warning could be told again."""
    policy = policy or row.policy
    if row in MODULES:
        learner = braintrace.D_RTRL(
            brainstate.nn.init_all_states(row.cell(), batch_size=B), policy=policy
        )
        learner.compile_graph(jax.ShapeDtypeStruct((B, I), float))
        return learner
    learner = functional.online(row.cell, D_RTRL, policy=policy, hidden=row.hidden)
    for _ in range(2):
        jax.eval_shape(learner.init, row.params, row.carry, row.xs[0])
    return learner


@functools.cache
def learner_of(row):
    """The one learner of a degraded row, and its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learner = compiled(row)
    return learner, [str(w.message) for w in seen if w.category is BraintraceWarning]


def all_in(words, text):
    assert all(word in text for word in words), f'{words} expected in: {text}'


@over([*REFUSED, *(row for row in MODULES if row.error)], 'record')
def test_a_refused_model_is_told_what_where_and_what_to_do(row):
    with pytest.raises(row.error) as caught:
        if row in MODULES:
            compiled(row)
        functional.online(row.cell, D_RTRL, policy=row.policy, hidden=row.hidden).init(
            row.params, row.carry, row.xs[0]
        )
    assert type(caught.value) is row.error
    all_in(row.words, str(caught.value))
    if row.at:
        all_in([row.place(row.at) + ' ('], str(caught.value))


@over([row for row in REFUSED if row.policy != Policy()], 'accepted')
def test_what_one_policy_refuses_another_accepts(row):
    assert compiled(row, Policy()).graph.hidden_param_op_relations


WITH_MODULES = [*DEGRADED, *(row for row in MODULES if row.error is None)]


@pytest.mark.tier(quick=24)
@over(WITH_MODULES, 'record')
def test_a_degraded_model_has_these_records_and_no_others(row):
    learner, _ = learner_of(row)
    graph, told = learner.graph, learner.report.diagnostics
    found = {(d.kind, d.level, d.path, re.sub(r' \(.*', '', d.location)): d.message for d in told}
    wanted = {
        (n.kind, n.level, n.path, row.place(n.at) if n.at else ''): n.words for n in row.notes
    }
    assert sorted(found) == sorted(wanted) and len(told) == len(row.notes), told
    for key, words in wanted.items():
        all_in(words, found[key])
    assert {path: r.reason for path, r in graph.routes.items() if r.kind != 'trace'} == row.routes


@pytest.mark.tier(quick=53)
@over(DEGRADED, 'warning')
def test_each_warning_is_given_once_with_its_place(row):
    learner, said = learner_of(row)
    notes = [d for d in learner.report.diagnostics if d.level == 'warning']
    assert sorted(said) == sorted(
        f'{d.message} [{d.location}].' if d.location else f'{d.message}.' for d in notes
    )


@pytest.mark.tier(quick=72)
@over(WITH_MODULES, 'strict')
def test_a_strict_policy_refuses_it_at_the_same_lines(row):
    policy = Policy(strict=True, unroll=row.policy.unroll, mark=row.policy.mark)
    if row.strict is None:
        compiled(row, policy)
        return
    with pytest.raises(UntracedParameterError, match='strict=False') as caught:
        compiled(row, policy)
    all_in(row.routes, str(caught.value))
    assert {place for place in PLACE.findall(str(caught.value)) if place} == {
        row.place(mark) for mark in row.strict
    }


def loss(output):
    return sum(jnp.sin(leaf * (1.0 + k)).sum() for k, leaf in enumerate(jax.tree.leaves(output)))


def online(row, steps):
    learner = functional.online(row.cell, D_RTRL, policy=row.policy, hidden=row.hidden)
    state, total = learner.init(row.params, row.carry, row.xs[0]), None
    grad = jax.jit(learner.grad(lambda output, _: loss(output)))
    for x in row.xs[:steps]:
        grads, _, _, state = grad(row.params, state, x, 0.0)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return learner, total


def plain(row, steps, forgetful=False):
    """Reverse mode through all steps; ``forgetful``: each step reads its carry as a constant."""

    def total(params):
        carry, result = jax.tree.map(jnp.asarray, row.carry), 0.0
        for x in jnp.asarray(row.xs[:steps]):
            output, carry = row.cell(params, carry, x)
            carry = jax.tree.map(jax.lax.stop_gradient, carry) if forgetful else carry
            result += loss(output)
        return result

    return jax.jit(jax.grad(total))(row.params)


@pytest.mark.tier(quick=4)
@over(DEGRADED, 'gradient', QUICK)
def test_its_gradient_of_one_step_is_exact(row):
    wanted = plain(row, 1)
    assert_close(online(row, 1)[1], wanted)
    assert all(
        jnp.abs(g).max() > 1e-3
        for path, g in wanted.items()
        if row.routes.get(path) not in ('unused', 'no_hidden_state')
    )


@pytest.mark.slow
@over([row for row in DEGRADED if row.history], 'history')
def test_its_gradient_lacks_what_the_records_name_and_nothing_else(row, monkeypatch):
    learner, got = online(row, T)
    wanted = plain(row, T, forgetful=True)
    monkeypatch.setattr(cut, 'on', True)
    history = jax.tree.map(jnp.subtract, plain(row, T), plain(row, T, forgetful=True))
    assert_close(
        got,
        {
            path: g + history[path] if learner.routes[path].kind == 'trace' else g
            for path, g in wanted.items()
        },
    )


@pytest.mark.slow
@over([row for row in MODULES if row.error is None], 'gradient')
def test_the_gradient_of_one_step_of_a_module_is_exact(row):
    learner = compiled(row)
    model, x = learner.model, jnp.asarray(row.xs[0])
    wanted = brainstate.transform.grad(lambda: loss(model(x)), learner.param_states)()
    brainstate.nn.init_all_states(model, batch_size=B)
    got = learner.etrace_grad(row.xs[:1], step_fn=lambda x: loss(learner(x))).grads
    assert_close(got, wanted, 1e-10)


@pytest.mark.tier(quick=58)
@over(DEGRADED, 'exact')
def test_the_report_calls_a_model_exact_where_strict_has_nothing_to_say(row):
    assert learner_of(row)[0].report().exact == (row.whole or row.strict in (None, ()))


def test_every_kind_of_diagnostic_stands_in_the_table():
    kinds = {kind.partition(':')[0] for kind, row in KINDS.items() if row.level}
    assert {note.kind for row in WITH_MODULES for note in row.notes} == kinds


def test_each_row_has_a_name_of_its_own():
    rows = [*REFUSED, *DEGRADED, *MODULES]
    assert len({row.name for row in rows}) == len(rows)
