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
from braintrace import compat
from braintrace._public_names import ABSENT, COMPAT
from braintrace._public_names import ARGUMENTS as NAMES_OF_ARGUMENTS
from braintrace.compat._arguments import ARGUMENTS
from braintrace.errors import CompileError, OptionError, StepFunctionError
from tests.compare import assert_close

from .networks import BATCH, INPUTS, STEPS, UNITS, Net, data, loss_of, squared


def compiled(rule='D_RTRL', model=Net, **options):
    brainstate.random.seed(0)
    x = jnp.zeros((BATCH, INPUTS))
    return compat.compile(model(), rule, x, batch_size=BATCH, **options)


@pytest.fixture
def installed():
    """What a script finds after `import braintrace.compat`."""
    compat._install()
    yield
    compat._remove()


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
    outputs = [one.etrace_evolve(xs, return_outputs=True, trace=False) for one in (learner, other)]
    assert_close(*outputs)
    assert outputs[0].shape == (STEPS, BATCH, 2)
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
    assert learner.is_compiled and not compat.D_RTRL(Net()).is_compiled
    assert list(learner.hidden_states) == [('cell', 'h')]
    assert learner.module is learner and learner.config == learner.rule
    assert isinstance(learner, compat.ETraceAlgorithm)
    learner(jnp.ones((BATCH, INPUTS)))
    assert learner.etrace.value['t'].all()
    learner.init_etrace_state()
    assert not learner.etrace.value['t'].any()
    assert learner.etrace_evolve(data()[0]) is None


def test_after_the_import_names_are_where_a_script_looks(installed):
    assert braintrace.D_RTRL is compat.D_RTRL and braintrace.compile is compat.compile
    assert braintrace.CompilationError is CompileError
    assert braintrace.nn.MiniGRU is compat.MiniGRU
    assert all(hasattr(braintrace, name) or hasattr(braintrace.nn, name) for name in COMPAT)


def test_without_it_a_name_says_where_it_is():
    assert COMPAT < set(compat.__all__)
    with pytest.raises(AttributeError, match='Did you mean D_RTRL'):
        compat.D_RTR  # noqa: B018
    for name in COMPAT - {'MiniGRU', 'MiniLSTM', 'ValinaRNNCell', 'load_public'}:
        with pytest.raises(AttributeError, match=f'`import braintrace.compat`, {name}'):
            getattr(braintrace, name)
    with pytest.raises(AttributeError, match='`import braintrace.compat`, MiniGRU'):
        _ = braintrace.nn.MiniGRU
    with pytest.raises(AttributeError, match='It is `braintrace.errors.OptionError`'):
        _ = braintrace.OptionError
    with pytest.raises(OptionError, match='compat` takes vjp_method'):
        braintrace.compile(Net(), 'D_RTRL', jnp.zeros((1, INPUTS)), vjp_method='single-step')
    assert {*ARGUMENTS, 'vjp_method', 'chunk_size'} > NAMES_OF_ARGUMENTS - {
        'kappa_filter_decay',
        'loss_output',
        'projection_key',
        'verbose',
    }


@pytest.mark.parametrize('size', [None, 3])
def test_multi_step_learners_take_exact_windows(size):
    xs, ys = data(6)
    learner, other = compiled(vjp_method='multi-step'), compiled()
    window = 1 if size is None else size

    def step_fn(x, y):
        if size is None:
            return squared(learner(x), y)
        return jax.vmap(squared)(learner(compat.MultiStepData(x)), y)

    got = learner.etrace_grad(xs, ys, step_fn=step_fn, chunk_size=size, return_value=True)
    want = other.etrace_grad(
        xs, ys, step_fn=loss_of(other), window=window, inside='exact', return_value=True
    )
    assert_close(got, want)
    if size is not None:
        whole = lambda x, y: squared(learner(compat.MultiStepData(x)), y)
        with pytest.raises(StepFunctionError, match=r'it returned \(\) for a window'):
            learner.etrace_grad(xs, ys, step_fn=whole, chunk_size=size)


def test_arguments_are_taken_by_position_in_the_order_of_the_public_package():
    assert compat.pp_prop(Net(), 0.9, None, 'multi-step').vjp_method == 'multi-step'
    learner = compat.EProp(Net(), 'random', 0.0, 3, 'name', 'single-step', True)
    feedback = braintrace.Feedback('random', seed=3)
    assert learner.rule == braintrace.rules.e_prop(0.0, feedback)
    learner = compat.D_RTRL(Net(), None, 'single-step', False, jnp.bfloat16, True)
    assert learner.rule == braintrace.rules.d_rtrl(jnp.bfloat16)
    assert compat.DNI(Net()).vjp_method == 'multi-step'
    with pytest.raises(TypeError, match='too many positional'):
        compat.SnAp(Net(), 2, 'name', 'single-step', True, 3, 4)
    with pytest.raises(TypeError, match="multiple values for argument 'name'"):
        compat.D_RTRL(Net(), 'one', name='two')
    seeds = [compat.UORO(Net(), projection_key=jax.random.key(k)).rule for k in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.slow
def test_losses_come_back_as_loss_output_asks():
    xs, ys = data()
    mask = jnp.array([0.0, 0.5, 1, 1, 0, 1, 1])

    def run(**options):
        learner = compiled()

        def step_fn(x, y, m):
            return jnp.where(m == 0, jnp.nan, squared(learner(x), y))

        given = {'mask': mask, 'return_value': True, **options}
        return learner.etrace_grad(xs, ys, mask, step_fn=step_fn, **given)

    grads, losses = run()
    assert jnp.isnan(losses[0])
    masked = np.where(mask == 0, 0, losses * mask)
    assert_close(run(loss_output='masked'), (grads, masked))
    assert_close(run(loss_output='scalar', chunk_size=1), (grads, masked.sum() / mask.sum()))


@pytest.mark.parametrize('wrapped', [compat.SingleStepData, lambda x: x])
def test_inputs_of_one_step_are_the_same_beside_a_window(wrapped):
    class Two(Net):
        def update(self, x, gain):
            return super().update(x * gain)

    xs, _ = data()
    gain = jnp.array([2.0, -1.0])
    brainstate.random.seed(0)
    learner = compat.compile(Two(), 'D_RTRL', xs[0], gain, batch_size=BATCH)
    got = learner(compat.MultiStepData(xs), wrapped(gain))
    learner.reset_state()
    one = [learner(compat.SingleStepData(x), wrapped(gain)) for x in xs]
    assert_close(got, jnp.stack(one))


REFUSED = [
    ('compile', {'control_flow': 'cond'}, 'braintrace.Policy'),
    ('compile', {'config': 3}, 'braintrace.rules.*compat.ETraceConfig'),
    ('compile', {'random_feedback_key': 3}, 'rule.with_feedback'),
    ('compile', {'modulator': 1.0}, 'braintrace.modulated'),
    ('compile', {'verbose': 3}, 'choose 0, or 1 or 2'),
    ('compile', {'vmap': 'yes'}, 'choose True or False'),
    ('compile', {'vmap': True, 'batch_size': None}, 'give batch_size too'),
    ('compile', {'vmap': True, 'batch_size': 5}, r'\[0\] has shape \[3, 2\]'),
    ('compile', {'vjp_method': 'both'}, 'choose'),
    ('etrace_grad', {'chunk_size': 3}, 'for a learner of si'),
    ('windows', {'chunk_size': 0}, 'give an int'),
    ('etrace_grad', {'loss_output': 'mean'}, "'per_step' or 'masked' or 'scalar'"),
    ('register_primitive', {'impl_fn': len}, r'register_primitive\(name, impl\)'),
]


@pytest.mark.parametrize('call, options, remedy', REFUSED)
def test_an_argument_that_means_something_else_is_refused_with_the_remedy(call, options, remedy):
    xs, ys = data()
    calls = {
        'compile': lambda: compat.compile(
            Net(), 'D_RTRL', xs[0], **{'batch_size': BATCH, **options}
        ),
        'etrace_grad': lambda: compiled().etrace_grad(xs, ys, step_fn=squared, **options),
        'windows': lambda: compiled(vjp_method='multi-step').etrace_grad(
            xs, ys, step_fn=squared, **options
        ),
        'register_primitive': lambda: compat.register_primitive('etp_none', **options),
    }
    (name,) = list(options)[:1]
    with pytest.raises(OptionError, match=f'{name} is|{name}=') as raised:
        calls[call]()
    assert re.search(remedy, str(raised.value))


def test_what_changes_no_number_is_accepted():
    learner = compat.D_RTRL(Net(), fast_solve=False, chunked_trace=True, control_flow=None)
    assert learner.rule == braintrace.rules.d_rtrl()
    model, x = compiled().model, data()[0][0]
    graph = compat.compile_etrace_graph(model, x, include_hidden_perturb=True)
    assert graph.hidden_groups
    with pytest.raises(OptionError, match='no argument vjp_methd'):
        compat.D_RTRL(Net(), vjp_methd='single-step')


def test_an_absent_name_says_what_to_use():
    with pytest.raises(AttributeError, match=r"'GradExpon'.*sum the gradients of etrace_grad"):
        braintrace.GradExpon  # noqa: B018
    with pytest.raises(OptionError, match="'gradexpon'.*has GradExpon; here: sum"):
        compat.compile(Net(), 'gradexpon', jnp.zeros((BATCH, INPUTS)))


def test_remedies_name_what_there_is():
    texts = [*ABSENT.values(), *(argument.remedy for argument in ARGUMENTS.values())]
    for name in {*re.findall(r'braintrace\.(\w+)', ' '.join(texts))} - {'compat'}:
        assert hasattr(braintrace, name), name
    assert not [name for name in ABSENT if hasattr(braintrace, name)]


@pytest.mark.slow
def test_a_model_is_compiled_in_lanes_inside_of_jit():
    xs, ys = data()
    brainstate.random.seed(0)
    net = Net()
    weights = net.states(brainstate.ParamState)

    @brainstate.transform.jit
    def grads(xs, ys):
        learner = compat.compile(net, 'd_rtrl', xs[0], batch_size=BATCH, vmap=True)
        return learner.etrace_grad(xs, ys, step_fn=loss_of(learner), weights=weights)

    other = compiled()
    assert_close(grads(xs, ys), other.etrace_grad(xs, ys, step_fn=loss_of(other)))
