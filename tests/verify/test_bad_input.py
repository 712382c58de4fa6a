"""What is refused, and what the message says."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, nn, rules, verify
from braintrace.errors import (
    BraintraceError,
    NotCompiledError,
    NotSupportedError,
    OptionError,
    StepFunctionError,
    StructureError,
)


def cell(p, h, x):
    h = 0.5 * h + braintrace.matmul(x, p['W'])
    return h, h


def squared(output, target):
    return jnp.sum((output - target) ** 2)


PARAMS, H, XS, YS = {'W': np.ones((2, 3))}, np.zeros(3), np.ones((4, 2)), np.ones((4, 3))
DIFFERENCES, CUT = verify.finite_difference_gradients, verify.cut_bptt_gradients
ORACLES = [verify.bptt_gradients, CUT, verify.dense_recursion_gradients, DIFFERENCES]


def args(**changes):
    return {**dict(cell=cell, params=PARAMS, carry=H, xs=XS, ys=YS, loss_fn=squared), **changes}


def refused(error, fn, *given, **options):
    """An error of this type whose text has that of ``error``."""
    with pytest.raises(type(error), match=re.escape(str(error))) as caught:
        fn(*given, **options)
    assert isinstance(caught.value, BraintraceError)


WRONG = [  # another argument, and what is said of it
    ({'cell': 3}, OptionError('cell is 3; give a function')),
    ({'loss_fn': None}, OptionError('loss_fn is None; give a function')),
    ({'ys': YS[:3]}, StructureError('stack the steps on axis 0, one at least, as many in each')),
    ({'xs': XS[:0], 'ys': YS[:0]}, StructureError('stack the steps on axis 0')),
    ({'xs': 1.0}, StructureError('stack the steps on axis 0')),
    ({'xs': 'text'}, StructureError('xs is str; every leaf is an array')),
    (
        {'params': {'W': PARAMS['W'], 'name': 'x'}},
        StructureError("params['name'] is str; every leaf is an array"),
    ),
    (
        {'loss_fn': lambda output, target: output},
        StepFunctionError('loss_fn returned float64[3]; return one real scalar'),
    ),
]


@pytest.mark.parametrize('oracle', ORACLES)
@pytest.mark.parametrize('change, error', WRONG)
def test_wrong_arguments_of_an_oracle(oracle, change, error):
    refused(error, oracle, **args(**change))


@pytest.mark.parametrize('oracle', [o for o in ORACLES if o is not CUT])
@pytest.mark.parametrize(
    'broken, message',
    [
        (lambda p, h, x: h, 'return a pair (outputs, new_carry)'),
        (
            lambda p, h, x: (h, h[:2]),
            "of another structure, shape or dtype: PyTreeDef(*) of ['float64[3]'] before",
        ),
        (lambda p, h, x: (h, {'h': h}), 'of another structure'),
    ],
)
def test_a_cell_that_breaks_its_contract(oracle, broken, message):
    refused(StructureError(message), oracle, **args(cell=broken))


def test_differences_want_float64():
    single = args(carry=H.astype('float32'))
    refused(StructureError("['carry'] is float32"), DIFFERENCES, **single)
    with jax.enable_x64(False):
        refused(OptionError("jax.config.update('jax_enable_x64', True)"), DIFFERENCES, **args())


@pytest.mark.parametrize(
    'name, value',
    [('eps', v) for v in (0, -1e-3, 'small', True)] + [('entries', v) for v in (0, 1.5, True)],
)
def test_options_of_differences(name, value):
    refused(OptionError(f'{name} is {value!r}'), DIFFERENCES, **args(**{name: value}))


def test_the_dense_recursion_refuses_complex_numbers():
    error = NotSupportedError("['carry'] is complex")
    refused(error, verify.dense_recursion_gradients, **args(carry=H.astype(complex)))


def looped(p, h, x):
    def turn(h, _):
        return 0.9 * h + jnp.tanh(braintrace.matmul(x, p['W'])), None

    h = jax.lax.scan(turn, h, None, length=20)[0]
    return h, h


def crossed(p, c, x):
    h = 0.5 * c['h'] + braintrace.matmul(x, p['W'])
    return h, {'h': h, 'g': 0.5 * c['g'] + c['h'][:2]}


@pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
@pytest.mark.parametrize(
    'change, error',
    [
        ({'graph': 3}, OptionError('graph is int')),
        ({'cell': looped}, NotSupportedError('has a loop that is not unrolled [')),
        (
            {'cell': crossed, 'carry': {'h': np.zeros(3), 'g': np.zeros(2)}},
            NotSupportedError('g reads the old h by a plain path between different shapes'),
        ),
    ],
)
def test_the_cut_refuses_what_it_can_not_cut(change, error):
    refused(error, CUT, **args(**change))


ONLINE = functional.online(cell, rules.d_rtrl())
PURE = {'params': PARAMS, 'carry': np.zeros(3)}
MISSING = np.where(np.arange(4)[:, None] % 2, np.nan, YS)


ASKED = [  # a learner, other arguments, and what is said of them
    (cell, {}, OptionError('learner is function')),
    (ONLINE, {}, OptionError('pass params=... and carry=... too')),
    (functional.online(cell, None), PURE, OptionError('made with rule=None')),
    (ONLINE, PURE | {'loss_fn': None}, OptionError('loss_fn is None')),
    (ONLINE, PURE | {'ys': MISSING}, StepFunctionError('not a finite number at the steps [1, 3]')),
    (ONLINE, PURE | {'loss_fn': lambda o, y: o}, StepFunctionError('return one real scalar')),
]
ASKED += [
    (ONLINE, PURE | {'steps': n}, OptionError(f'steps is {n!r}; give an int from 1 to 4'))
    for n in (0, 5, 2.5, True)
]


@pytest.mark.parametrize('learner, change, error', ASKED)
def test_wrong_arguments_of_the_doctor(learner, change, error):
    given = {'xs': XS, 'ys': YS, 'loss_fn': squared} | change
    refused(error, verify.diagnose, learner, **given)


def test_wrong_arguments_of_the_doctor_with_a_learner():
    def asked(error, learner, xs=XS, **options):
        refused(error, verify.diagnose, learner, xs, YS, squared, **options)

    model = nn.MinGRUCell(2, 3)
    brainstate.nn.init_all_states(model)
    asked(NotCompiledError('learner.compile_graph(x)'), braintrace.D_RTRL(model))
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros(2))
    asked(OptionError('has those of its model'), learner, params=PARAMS)
    other = StructureError('inputs 0: float64[2] when compiled, float64[5] now')
    asked(other, learner, jnp.ones((4, 5)))
