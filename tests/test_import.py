"""What an import of the package does to the process; each process shows several things."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import braintrace
from braintrace import _version

ROOT = Path(__file__).resolve().parent.parent

START = '''
import json, sys
import jax
import jax.numpy as jnp

def changed():
    """The flags that are not as they were."""
    now = dict(jax.config.values)
    return {k: [before.get(k), v] for k, v in now.items() if before.get(k) != v}

def weights():
    """The dtypes in which brainstate, our layers and jax.numpy make floats by default."""
    import brainstate, braintrace
    linear = braintrace.nn.Linear(2, 3)
    made = [linear.weight.value['weight'], brainstate.random.rand(2), jnp.ones(2),
            brainstate.environ.dftype()(0)]
    return sorted({str(jnp.asarray(a).dtype) for a in made})

found = {}
'''


def python(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', **environment}
    run = [sys.executable, '-c', code]
    return subprocess.run(run, capture_output=True, text=True, cwd=cwd, env=env)


def process(code: str, **environment: str) -> dict:
    """What a new process leaves in ``found``."""
    done = python(START + textwrap.dedent(code) + '\nprint(json.dumps(found))', **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_flags_of_the_user_stay_and_functional_users_import_no_brainstate():
    found = process("""
        import numpy as np
        jax.config.update('jax_enable_x64', True)
        jax.config.update('jax_debug_nans', True)
        jax.config.update('jax_default_matmul_precision', 'float32')
        before = dict(jax.config.values)

        import braintrace
        from braintrace import adapters, functional, kit, matmul, rules, verify
        found['import'] = changed()
        cell = lambda p, h, x: (h, jnp.tanh(matmul(x, p) + h))
        online = functional.online(cell, rules.es_d_rtrl(0.5))
        online.init(jnp.ones((2, 3)), jnp.zeros(3), jnp.ones(2))
        kit.describe('etp_mm')
        try:
            verify.diagnose(3, jnp.ones((4, 2)), jnp.zeros((4, 3)), lambda output, target: 0.)
        except braintrace.errors.OptionError as e:
            found['diagnose'] = str(e)
        dir(braintrace), hasattr(braintrace, 'no_such_name')
        found['brainstate'] = [name for name in sys.modules if name.split('.')[0] == 'brainstate']

        def first_use():
            return braintrace.nn.GRUCell and 1.
        drawn = np.random.get_state()[1:]
        with jax.enable_x64(False):
            jax.jit(first_use)()
        found['numpy'] = all(map(np.array_equal, drawn, np.random.get_state()[1:]))
        found['nn'], found['weights'] = changed(), weights()
        import brainstate
        found['precision'] = brainstate.environ.get_precision()
    """)
    assert found['import'] == found['nn'] == {} and found['numpy']
    assert found['brainstate'] == []
    assert 'learner is int; give a compiled learner' in found['diagnose']
    assert found['weights'] == ['float64'] and found['precision'] == 64


@pytest.mark.slow
def test_flags_stay_where_a_learner_is_the_first_name_used():
    found = process(
        """
        before = dict(jax.config.values)
        import braintrace
        found['kit'] = 'braintrace.kit' in sys.modules
        found['import'] = changed()
        with jax.enable_x64(True):
            braintrace.D_RTRL
        found['learner'], found['weights'] = changed(), weights()
        import braintrace.nn, pickle, pydoc
        found['pickled'] = pickle.loads(pickle.dumps(braintrace.D_RTRL)) is braintrace.D_RTRL
        text = pydoc.render_doc(braintrace)
        found['help'] = [name in text for name in ('D_RTRL', 'compile_etrace_graph', 'matmul')]
        names = {}
        exec('from braintrace import *', names)
        found['star'] = sorted(set(braintrace.__all__) - set(names))
        found['end'] = changed()
        jax.config.update('jax_enable_x64', True)  # later: of plain JAX alone
        step = lambda p, h, x: (h, jnp.tanh(braintrace.matmul(x, p) + h))
        state = braintrace.functional.online(step).init(jnp.ones((2, 3)), jnp.zeros(3), jnp.ones(2))
        found['later'] = sorted({str(a.dtype) for a in jax.tree.leaves((state.carry, state.trace))})
        before['jax_enable_x64'] = True
        found['left'] = changed(), str(braintrace.nn.Linear(2, 3).weight.value['weight'].dtype)
        import brainstate
        brainstate.environ.set(precision=64)
        found['line'] = weights()
    """,
        JAX_ENABLE_X64='0',
    )
    assert found == {
        'kit': False,
        'import': {},
        'learner': {},
        'weights': ['float32'],
        'pickled': True,
        'help': [True] * 3,
        'star': [],
        'end': {},
        'later': ['float64'],
        'left': [{}, 'float32'],
        'line': ['float64'],
    }


@pytest.mark.slow
def test_a_brainstate_that_is_there_already_is_left_as_it_is():
    found = process("""
        import brainstate
        brainstate.environ.set(precision=16)
        jax.config.update('jax_enable_x64', True)
        before = dict(jax.config.values)
        from braintrace import D_RTRL, nn
        found.update(changed=changed(), precision=brainstate.environ.get_precision())
    """)
    assert found == {'changed': {}, 'precision': 16}


def test_names_for_type_checkers_and_names_on_first_use_are_the_same():
    tree = ast.parse(Path(braintrace.__file__).read_text(encoding='utf-8'))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    listed = [alias.name for node in block.body for alias in node.names]
    assert ast.unparse(block.test) == 'TYPE_CHECKING' and listed == list(braintrace._LAZY)
    assert set(braintrace._LAZY) - {'kit'} < set(braintrace.__all__) < set(dir(braintrace))
    assert all(getattr(braintrace, name) is not None for name in braintrace.__all__)


def test_the_version_is_that_of_the_build():
    assert braintrace.__version__ == _version.__version__
    assert '.'.join(map(str, braintrace.__version_info__)) == braintrace.__version__
    assert all(type(part) is int for part in braintrace.__version_info__)


def test_another_package_of_this_name_in_the_same_folder_is_told(tmp_path):
    (tmp_path / 'braintrace').symlink_to(ROOT / 'braintrace')
    (tmp_path / 'braintrace-0.2.8.dist-info').mkdir()
    (tmp_path / 'braintrace_online-0.1.0.dist-info').mkdir()
    code = 'import braintrace; print(braintrace.__file__)'
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == f'{tmp_path}/braintrace/__init__.py\n', done.stderr
    assert done.stderr.count('BraintraceWarning') == 1
    assert 'braintrace-0.2.8 is installed in the same folder as braintrace-online' in done.stderr
