"""Names and arguments of the public package: the numbers behind those that are accepted, and the
remedy behind the others.
"""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._public_names import ABSENT, ARGUMENTS
from tests.compare import assert_close

from .networks import BATCH, INPUTS, STEPS, UNITS, Net, compiled, data, loss_of, squared


class OneSample(brainstate.nn.Module):
    """A model that only one sample fits: it sums over all axes, and makes states of one sample."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS + 1, UNITS)
        self.readout = brainstate.ParamState(brainstate.random.randn(UNITS, 2))

    def init_state(self):
        self.slow = brainstate.HiddenState(jnp.zeros(UNITS))

    def update(self, x):
        y = self.cell(jnp.append(x, x.sum()))
        self.slow.value = 0.5 * self.slow.value + y
        return (y + self.slow.value) @ self.readout.value


def alone(rule, xs, ys, **options):
    """The gradient of one sample, by a learner of its own."""
    brainstate.random.seed(0)
    learner = braintrace.compile(OneSample(), rule, xs[0], **options)
    return learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reduction='sum')


RULES = [('D_RTRL', {}), pytest.param('pp_prop', {'decay_or_rank': 0.7}, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize('rule, options', RULES)
def test_lanes_are_learners_of_one_sample_each(rule, options):
    xs, ys = data()
    brainstate.random.seed(0)
    learner = braintrace.compile(
        OneSample(), rule, xs[0], batch_size=BATCH, vmap=True, vjp_method='single-step', **options
    )
    got = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reduction='sum')
    each = [alone(rule, xs[:, b], ys[:, b], **options) for b in range(BATCH)]
    assert_close(got, jax.tree.map(lambda *g: sum(g), *each))
    assert list(learner.param_states) == [('cell', *p[1:]) for p in got if p[0] == 'cell'] + [
        ('readout',)
    ]


@pytest.mark.slow
def test_lanes_are_reset_and_initialised_as_a_batch_is():
    xs, ys = data()
    learner = compiled(vmap=True)
    other = compiled()
    flags = jnp.zeros((STEPS, BATCH), bool).at[3, 1].set(True)
    assert_close(
        learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reset=flags),
        other.etrace_grad(xs, ys, step_fn=loss_of(other), reset=flags),
    )
    assert_close(learner.etrace_evolve(xs, trace=False), other.etrace_evolve(xs, trace=False))
    brainstate.nn.init_all_states(learner)
    assert learner.model.module.cell.h.value.shape == (BATCH, UNITS)
    assert not learner.etrace.value['t'].any()


def test_lanes_draw_numbers_of_their_own():
    class Noisy(Net):
        def update(self, x):
            return super().update(x + brainstate.random.rand(INPUTS))

    learner = compiled(model=Noisy, vmap=True)
    y = learner(jnp.zeros((BATCH, INPUTS)))
    assert len(np.unique(np.asarray(y)[:, 0])) == BATCH


@pytest.mark.slow
def test_a_model_is_compiled_in_lanes_inside_of_jit():
    xs, ys = data()
    brainstate.random.seed(0)
    net = Net()
    weights = net.states(brainstate.ParamState)

    @brainstate.transform.jit
    def grads(xs, ys):
        learner = braintrace.compile(net, 'd_rtrl', xs[0], batch_size=BATCH, vmap=True)
        return learner.etrace_grad(xs, ys, step_fn=loss_of(learner), weights=weights)

    other = compiled()
    assert_close(grads(xs, ys), other.etrace_grad(xs, ys, step_fn=loss_of(other)))


def test_verbose_and_show_graph_print_the_report(capsys):
    learner = compiled(verbose=1)
    text = str(learner.report) + '\n'
    assert capsys.readouterr().out == text
    assert learner.show_graph(verbose=False, return_msg=True) + '\n' == text
    assert capsys.readouterr().out == ''
    assert learner.show_graph() is None
    learner.report.show()
    assert capsys.readouterr().out == 2 * text


def test_a_learner_has_the_attributes_that_scripts_read():
    learner = compiled(name='mine')
    assert learner.is_compiled and not braintrace.D_RTRL(Net()).is_compiled
    assert list(learner.hidden_states) == [('cell', 'h')]
    assert learner.module is learner
    assert isinstance(learner, braintrace.ETraceAlgorithm)
    assert isinstance(learner, braintrace.ETraceVjpAlgorithm)
    assert braintrace.CompilationError is braintrace.CompileError


@pytest.mark.slow
@pytest.mark.parametrize('reduction', ['mean', pytest.param('sum', marks=pytest.mark.slow)])
def test_losses_come_back_as_loss_output_asks(reduction):
    xs, ys = data()
    mask = jnp.array([0.0, 0.5, 1, 1, 0, 1, 1])

    def run(**options):
        learner = compiled()

        def step_fn(x, y, m):
            return jnp.where(m == 0, jnp.nan, squared(learner(x), y))

        given = {'mask': mask, 'reduction': reduction, 'return_value': True, **options}
        return learner.etrace_grad(xs, ys, mask, step_fn=step_fn, **given)

    grads, losses = run()
    assert jnp.isnan(losses[0])
    masked = np.where(mask == 0, 0, losses * mask)
    total = masked.sum() / (mask.sum() if reduction == 'mean' else 1)
    assert_close(run(loss_output='masked'), (grads, masked))
    assert_close(run(loss_output='scalar', chunk_size=1), (grads, total))


@pytest.mark.slow
def test_a_window_of_inputs_is_a_loop_of_calls():
    xs, ys = data()
    learner, other = compiled(), compiled()

    def loss():
        return squared(learner(braintrace.MultiStepData(xs)), ys)

    got, value = brainstate.transform.grad(loss, learner.param_states, return_value=True)()
    want, losses = other.etrace_grad(
        xs, ys, step_fn=loss_of(other), reduction='sum', return_value=True
    )
    assert_close((got, value), (want, losses.sum()))
    assert_close(learner.etrace.value['t'], other.etrace.value['t'])


@pytest.mark.parametrize('wrapped', [braintrace.SingleStepData, lambda x: x])
def test_inputs_of_one_step_are_the_same_beside_a_window(wrapped):
    class Two(Net):
        def update(self, x, gain):
            return super().update(x * gain)

    xs, _ = data()
    gain = jnp.array([2.0, -1.0])
    brainstate.random.seed(0)
    learner = braintrace.compile(Two(), 'D_RTRL', xs[0], gain, batch_size=BATCH)
    got = learner(braintrace.MultiStepData(xs), wrapped(gain))
    learner.reset_state()
    one = [learner(braintrace.SingleStepData(x), wrapped(gain)) for x in xs]
    assert_close(got, jnp.stack(one))


REFUSED = [
    ('compile', {'vjp_method': 'multi-step'}, "etrace_grad.*inside='exact'"),
    ('compile', {'fast_solve': True}, 'Drop it'),
    ('compile', {'chunked_trace': True}, 'Drop it'),
    ('compile', {'control_flow': None}, 'braintrace.Policy'),
    ('compile', {'config': None}, 'braintrace.rules.*braintrace.ETraceConfig'),
    ('compile', {'random_feedback_key': 3}, 'rule.with_feedback'),
    ('compile', {'modulator': 1.0}, 'braintrace.modulated'),
    ('compile', {'projection_key': 42}, 'called `seed`'),
    ('compile', {'projection_eps': 1e-12}, 'Drop it'),
    ('compile', {'snap_max_jacobian_elements': 3}, 'Drop it'),
    ('compile', {'verbose': 3}, 'choose 0, or 1 or 2'),
    ('compile', {'vmap': 'yes'}, 'choose True or False'),
    ('compile', {'vmap': True, 'batch_size': None}, 'give batch_size too'),
    ('compile', {'vmap': True, 'batch_size': 5}, r'\[0\] has shape \[3, 2\]'),
    ('etrace_grad', {'chunk_size': 2}, '`window` of etrace_grad'),
    ('etrace_grad', {'loss_output': 'mean'}, "'per_step' or 'masked' or 'scalar'"),
    ('etrace_evolve', {'chunk_size': 2}, 'step_fn takes one step'),
    ('graph', {'include_hidden_perturb': True}, 'Drop it'),
    ('graph', {'include_recurrent_mixing': True}, 'as cuts'),
    ('register_primitive', {'impl_fn': len}, r'register_primitive\(name, impl\)'),
]


@pytest.mark.parametrize('call, options, remedy', REFUSED)
def test_an_argument_that_means_something_else_is_refused_with_the_remedy(call, options, remedy):
    xs, ys = data()
    calls = {
        'compile': lambda: braintrace.compile(
            Net(), 'D_RTRL', xs[0], **{'batch_size': BATCH, **options}
        ),
        'etrace_grad': lambda: compiled().etrace_grad(xs, ys, step_fn=squared, **options),
        'etrace_evolve': lambda: compiled().etrace_evolve(xs, **options),
        'graph': lambda: braintrace.compile_etrace_graph(Net(), xs[0], **options),
        'register_primitive': lambda: braintrace.register_primitive('etp_none', **options),
    }
    (name,) = list(options)[:1]
    with pytest.raises(braintrace.OptionError, match=f'{name} is|{name}=') as raised:
        calls[call]()
    assert re.search(remedy, str(raised.value))


def test_constructors_meet_the_same_arguments():
    assert braintrace.D_RTRL(Net(), vjp_method='single-step', name='a').rule
    with pytest.raises(braintrace.OptionError, match='multi-step'):
        braintrace.ES_D_RTRL(Net(), 0.5, vjp_method='multi-step')
    with pytest.raises(TypeError, match='vjp_methd'):
        braintrace.D_RTRL(Net(), vjp_methd='single-step')


def test_an_absent_name_says_what_to_use():
    with pytest.raises(AttributeError, match=r"'GradExpon'.*sum the gradients of etrace_grad"):
        braintrace.GradExpon  # noqa: B018
    with pytest.raises(braintrace.OptionError, match="'gradexpon'.*has GradExpon; here: sum"):
        braintrace.compile(Net(), 'gradexpon', jnp.zeros((BATCH, INPUTS)))


def test_remedies_name_what_there_is():
    texts = [*ABSENT.values(), *(argument.remedy for argument in ARGUMENTS.values())]
    for name in re.findall(r'braintrace\.(\w+)', ' '.join(texts)):
        assert hasattr(braintrace, name), name
    assert not [name for name in ABSENT if hasattr(braintrace, name)]
