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
    BraintraceWarning,
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
ORACLES = [
    verify.bptt_gradients,
    verify.cut_bptt_gradients,
    verify.dense_recursion_gradients,
    verify.finite_difference_gradients,
]


def args(**changes):
    return {**dict(cell=cell, params=PARAMS, carry=H, xs=XS, ys=YS, loss_fn=squared), **changes}


def refused(error, message, fn, *given, **options):
    with pytest.raises(error, match=re.escape(message)) as caught:
        fn(*given, **options)
    assert isinstance(caught.value, BraintraceError)


@pytest.mark.parametrize('oracle', ORACLES)
@pytest.mark.parametrize(
    'change, error, message',
    [
        ({'cell': 3}, OptionError, 'cell is 3; give a function'),
        ({'loss_fn': None}, OptionError, 'loss_fn is None; give a function'),
        (
            {'ys': YS[:3]},
            StructureError,
            'stack the steps on axis 0, one at least, as many in each',
        ),
        ({'xs': XS[:0], 'ys': YS[:0]}, StructureError, 'stack the steps on axis 0'),
        ({'xs': 1.0}, StructureError, 'stack the steps on axis 0'),
        ({'xs': 'text'}, StructureError, 'xs is str; every leaf is an array'),
        (
            {'params': {'W': PARAMS['W'], 'name': 'x'}},
            StructureError,
            "params['name'] is str; every leaf is an array",
        ),
        (
            {'loss_fn': lambda output, target: output},
            StepFunctionError,
            'loss_fn returned float64[3]; return one real scalar',
        ),
    ],
)
def test_wrong_arguments_of_an_oracle(oracle, change, error, message):
    refused(error, message, oracle, **args(**change))


@pytest.mark.parametrize('oracle', [o for o in ORACLES if o is not verify.cut_bptt_gradients])
def test_a_cell_that_breaks_its_contract(oracle):
    refused(
        StructureError, 'return a pair (outputs, new_carry)', oracle, **args(cell=lambda p, h, x: h)
    )
    refused(
        StructureError,
        "of another structure, shape or dtype: PyTreeDef(*) of ['float64[3]'] before",
        oracle,
        **args(cell=lambda p, h, x: (h, h[:2])),
    )
    refused(
        StructureError, 'of another structure', oracle, **args(cell=lambda p, h, x: (h, {'h': h}))
    )


def test_differences_want_float64():
    refused(
        StructureError,
        "['carry'] is float32",
        verify.finite_difference_gradients,
        **args(carry=H.astype('float32')),
    )
    for eps in (0, -1e-3, 'small', True):
        refused(
            OptionError, f'eps is {eps!r}', verify.finite_difference_gradients, **args(), eps=eps
        )
    for entries in (0, 1.5, True):
        refused(
            OptionError,
            f'entries is {entries!r}',
            verify.finite_difference_gradients,
            **args(),
            entries=entries,
        )
    with jax.enable_x64(False):
        refused(
            OptionError,
            "jax.config.update('jax_enable_x64', True)",
            verify.finite_difference_gradients,
            **args(),
        )


def test_the_dense_recursion_refuses_complex_numbers():
    refused(
        NotSupportedError,
        "['carry'] is complex",
        verify.dense_recursion_gradients,
        **args(carry=H.astype(complex)),
    )


def test_the_cut_refuses_what_it_can_not_cut():
    refused(OptionError, 'graph is int', verify.cut_bptt_gradients, **args(), graph=3)

    def looped(p, h, x):
        h = jax.lax.scan(
            lambda h, _: (0.9 * h + jnp.tanh(braintrace.matmul(x, p['W'])), None),
            h,
            None,
            length=20,
        )[0]
        return h, h

    refused(
        NotSupportedError,
        'has a loop that is not unrolled [',
        verify.cut_bptt_gradients,
        **args(cell=looped),
    )

    def crossed(p, c, x):
        h = 0.5 * c['h'] + braintrace.matmul(x, p['W'])
        return h, {'h': h, 'g': 0.5 * c['g'] + c['h'][:2]}

    with pytest.warns(BraintraceWarning):
        refused(
            NotSupportedError,
            'g reads the old h by a plain path between different shapes',
            verify.cut_bptt_gradients,
            **args(cell=crossed, carry={'h': jnp.zeros(3), 'g': jnp.zeros(2)}),
        )


def test_wrong_arguments_of_the_doctor():
    online = functional.online(cell, rules.d_rtrl())
    pure = dict(params=PARAMS, carry=jnp.zeros(3))
    for steps in (0, 5, 2.5, True):
        refused(
            OptionError,
            f'steps is {steps!r}; give an int from 1 to 4',
            verify.diagnose,
            online,
            XS,
            YS,
            squared,
            steps=steps,
            **pure,
        )
    refused(OptionError, 'learner is function', verify.diagnose, cell, XS, YS, squared)
    refused(
        OptionError, 'pass params=... and carry=... too', verify.diagnose, online, XS, YS, squared
    )
    refused(
        OptionError,
        'made with rule=None',
        verify.diagnose,
        functional.online(cell, None),
        XS,
        YS,
        squared,
        **pure,
    )
    wrong = OptionError, 'loss_fn is None'
    refused(*wrong, verify.diagnose, online, XS, YS, None, **pure)
    missing = np.where(np.arange(4)[:, None] % 2, np.nan, YS)
    refused(
        StepFunctionError,
        'not a finite number at the steps [1, 3]',
        verify.diagnose,
        online,
        XS,
        missing,
        squared,
        **pure,
    )
    refused(
        StepFunctionError,
        'return one real scalar',
        verify.diagnose,
        online,
        XS,
        YS,
        lambda output, target: output,
        **pure,
    )


def test_wrong_arguments_of_the_doctor_with_a_learner():
    model = nn.MinGRUCell(2, 3)
    brainstate.nn.init_all_states(model)
    refused(
        NotCompiledError,
        'learner.compile_graph(x)',
        verify.diagnose,
        braintrace.D_RTRL(model),
        XS,
        YS,
        squared,
    )
    learner = braintrace.compile(model, 'D_RTRL', jnp.zeros(2))
    refused(
        OptionError,
        'has those of its model',
        verify.diagnose,
        learner,
        XS,
        YS,
        squared,
        params=PARAMS,
    )
    refused(
        StructureError,
        'inputs 0: float64[2] when compiled, float64[5] now',
        verify.diagnose,
        learner,
        jnp.ones((4, 5)),
        YS,
        squared,
    )
