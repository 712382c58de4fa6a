"""``kit.check`` on the library's own ops and on ops of factories; reports, errors, descriptions,
the command line.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import _etrace_op as ops
from braintrace import kit
from braintrace.errors import OptionError, RuleContractError
from braintrace.kit.__main__ import main
from braintrace.kit._cases import registered

from . import bad
from .bad import DENSE, shapes
from .test_meta import ALWAYS

pytestmark = pytest.mark.usefixtures('registries_are_restored')


def statuses(report):
    return {law: report.status(law) for law in kit.LAWS}


FACTORIES = {
    'heads': (
        lambda: kit.make_einsum_op('t_heads', 'bhi,hio->bho', bias=True),
        [(shapes((2, 4, 3), (4, 3, 5), (4, 5)), {})],
    ),
    'scaled': (
        lambda: kit.make_linear_op(
            't_scaled', lambda w, x, *, k: k * (x @ w), x=1, trainable={'weight': 0}, static=('k',)
        ),
        [(shapes((3, 4), (2, 3)), {'k': 2.0})],
    ),
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', FACTORIES)
def test_ops_of_factories_keep_every_law(name):
    make, cases = FACTORIES[name]
    op = make()
    report = kit.check(op, cases)
    assert report.ok and report.rows[0].op == op.name, str(report)
    assert statuses(report) == {
        law: 'pass' if law in ALWAYS | {'L7', 'L8'} else 'not_applicable' for law in kit.LAWS
    }


@pytest.mark.slow
def test_an_op_of_a_factory_is_checked_by_its_name_with_its_own_cases():
    op = kit.make_linear_op('t_flat', lambda x, w: x @ w, cases=[(shapes((2, 3), (3, 4)), {})])
    for form in op.forms:
        form.op = op
    by_op = kit.check(op)
    assert by_op.ok and kit.check('t_flat').rows == by_op.rows
    assert kit.check('t_flat_sample').rows[0].status == 'missing'
    assert 't_flat_sample' not in registered()


@pytest.mark.slow
def test_a_mapped_op_is_checked_as_the_derived_primitive_that_it_binds():
    report = kit.check(jax.vmap(braintrace.matmul), [(shapes((2, 4, 3), (2, 3, 5)), {})])
    assert report.ok and report.status('L9') == 'pass', str(report)


@pytest.mark.slow
def test_every_op_of_a_function_gets_its_rows():
    def two(x, b, a):
        return braintrace.matmul(braintrace.matmul(x, b), a)

    report = kit.check(two, [(shapes((4, 3), (3, 2), (2, 5)), {})])
    assert report.ok and len(report.rows) == 2 * len(kit.LAWS), str(report)


# what is absent -----------------------------------------------------------------------------------


def test_an_op_without_cases_is_one_missing_row():
    (row,) = kit.check(lambda x, w: braintrace.matmul(x, w)).rows
    assert row.status == 'missing' and 'no cases: give `cases`' in row.case


@pytest.mark.slow
def test_laws_that_need_a_missing_rule_are_not_tested():
    report = kit.check(bad.without_a_rule())
    (row,) = report.of('missing')
    assert row.law == 'L0' and 'no rule init_pp' in row.case
    assert {'L5', 'L9'} <= {row.law for row in report.of('not_tested')}
    assert not report.of('fail') and not report.ok


def raises(x, w):
    raise ZeroDivisionError('of the op')


def test_a_call_that_raises_is_a_row_that_fails():
    report = kit.check(raises, DENSE)
    (row,) = report.of('fail')
    assert (row.law, row.worst) == ('L1', None) and 'ZeroDivisionError: of the op' in row.case
    assert report.status('L2') == 'not_tested'


TAKEN = dict(
    impl=lambda x, weight: jnp.take(weight, x, axis=0),
    cases=[([jax.ShapeDtypeStruct((3,), jnp.int32), *shapes((7, 4))], {})],
)
MISFITS = {
    'no layout': ({'trainable_invars_fn': lambda _: ['weight']}, 'L0', 'trainable_invars_fn'),
    'beyond the operands': (
        *({'trainable_invars_fn': lambda _: {'weight': 2}}, 'L0'),
        "has 2 operands, and its layout says 'weight' at 2",
    ),
    'where x is': (
        *({'trainable_invars_fn': lambda _: {'weight': 0}}, 'L0', "'weight' at 0, where x is"),
    ),
    'integers that stand for nothing': (
        *(TAKEN, 'L8', 'x has dtype int32 and the primitive no `represent`'),
    ),
}


@pytest.mark.tier(quick=3)
@pytest.mark.parametrize(('fields', 'law', 'found'), MISFITS.values(), ids=MISFITS)
def test_a_description_that_does_not_fit_is_a_row_that_fails(fields, law, found):
    rows = kit.check(bad.dense(**fields)).of('fail')
    assert rows[0].law == law and found in rows[0].case
    # of the learners one needs to know what integers stand for, and says so
    assert all('represent' in row.case for row in rows[1:])


def fused(d, trace, d_f, x, weights):
    kept = jnp.einsum('bosr,bior->bios', d, trace['weight'])
    return {'weight': kept + jnp.einsum('bos,bi->bios', d_f, x)}


def fused_for_one_state(d, trace, d_f, x, weights):
    kept = d[..., None, :, 0, 0] * trace['weight'][..., 0]
    return {'weight': (kept + x[..., None] * d_f[..., None, :, 0])[..., None]}


def backward(inputs, outputs, d, params, required):
    return [d @ inputs[1].T, inputs[0].T @ d]


def forward(inputs, params):
    return inputs[0] @ inputs[1], backward


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    ('make', 'law'),
    [
        (lambda: bad.on_cpu(lambda x, weight: jnp.einsum('bi,io->bo', x, weight)), 'L13'),
        (lambda: bad.on_cpu(trace_kernel=fused), 'L13'),
        (lambda: bad.on_cpu(trace_kernel=fused_for_one_state), 'L13'),
        (lambda: bad.reversed_by(backward=backward), 'L14'),
        (lambda: bad.reversed_by(forward=forward), 'L14'),
    ],
)
def test_what_a_primitive_brings_beside_its_rules_is_compared(make, law):
    report = kit.check(make())
    assert report.ok and report.status(law) == 'pass', str(report)


# options and input --------------------------------------------------------------------------------


@pytest.mark.slow
def test_single_precision_has_its_own_tolerance():
    report = kit.check(braintrace.matmul, [(shapes((4, 3), (3, 5)), {})], x64=False)
    row = next(row for row in report.rows if row.law == 'L2')
    assert report.ok and row.tolerance == 1e-4 and 'float32[4, 3]' in row.case
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
def test_the_seed_draws_other_values():
    first, second = ([row.worst for row in kit.check('etp_mv', seed=seed).rows] for seed in (0, 1))
    assert first != second


@pytest.mark.slow
def test_cases_may_be_given_as_arrays_and_keywords():
    x, w, c = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones(5)
    case = [x, w], {'A': jnp.ones((5, 2)), 'alpha': 2.0, 'bias': c[:2]}
    report = kit.check(braintrace.lora_matmul, [case])
    assert report.ok, str(report)
    assert 'A=float64[5, 2], bias=float64[2], alpha=2.0' in report.rows[0].case


@pytest.mark.parametrize(
    ('op', 'cases', 'found'),
    [
        (3, None, 'op is a int; give an EtpOp, an ETPPrimitive, a function'),
        ('etp_mn', None, "no ETP primitive is called 'etp_mn'. Registered: .*etp_mm, etp_mv"),
        (braintrace.matmul, [3], r'a case is 3; expected a pair \(operands, params\)'),
        (braintrace.matmul, [([3.0], {})], 'expected a pair'),
        (jnp.matmul, DENSE, 'matmul binds no ETP primitive on float64.4, 3.'),
    ],
    ids=['number', 'unknown name', 'case of a number', 'operand of a number', 'plain function'],
)
def test_what_is_no_op_or_no_case_is_refused(op, cases, found):
    with pytest.raises(OptionError, match=found):
        kit.check(op, cases)


# reports ------------------------------------------------------------------------------------------


def test_the_report_names_what_fails_and_only_that():
    report = kit.check(bad.quadratic())
    assert str(report).startswith('etp_bad: 12 pass, 3 not_applicable, 1 fail\netp_bad L8 fail')
    assert 'linear in x, or independent of it' in str(report)
    report.require('L2', 'L9')
    with pytest.raises(AssertionError, match=r'1 rows do not conform:\netp_bad L8 fail .* > 1e-12'):
        report.require()


@pytest.mark.slow
def test_a_report_is_json_also_where_a_deviation_has_no_bound():
    found = json.loads(kit.check(bad.batch_summed_twice()).to_json())
    assert found['ops'] == 1 and len(found['rows']) == len(kit.LAWS) and len(found['fail']) == 3
    (row,) = (row for row in found['rows'] if row['law'] == 'L6')
    assert row.pop('case')
    assert [*row.values()] == ['etp_bad', 'L6', 'fail', 'inf', 1e-12]


@pytest.mark.slow
def test_assert_conformant_is_silent_or_raises():
    assert kit.assert_conformant(braintrace.element_wise, [(shapes((3,)), {})]) is None
    with pytest.raises(AssertionError, match='raises L1 fail'):
        kit.assert_conformant(raises, DENSE)


def test_describe_lists_what_is_registered():
    bad.without_a_rule()
    rows = {row['op']: row for row in json.loads(kit.describe(fmt='json'))}
    assert {'etp_mm', 'etp_conv', 'etp_bad'} <= set(rows)
    assert rows['etp_bad']['missing'] == ['init_pp'] and rows['etp_mm']['trainables'] == ['weight']
    row = '| etp_lora_mm | yes | no | 0 | lora_b, lora_a | yw_to_w, xy_to_dw, init_drtrl, init_pp, '
    assert f'{row}instant_drtrl' in kit.describe()
    assert kit.describe(kit.make_elementwise_op('t_gain', lambda x, w: x * w)).count('t_gain') == 2
    with pytest.raises(OptionError, match="fmt is 'text'"):
        kit.describe(fmt='text')
    with pytest.raises(OptionError, match='matmul is no ETP primitive'):
        kit.describe(braintrace.matmul)


# rules in bare arrays -----------------------------------------------------------------------------


def test_rules_in_bare_arrays_conform_once_they_are_wrapped():
    primitive = braintrace.register_primitive('etp_bare', lambda x, w: x @ w, batched=True)

    def init_drtrl(x, y, w, states):
        return jnp.zeros((x.aval.shape[0], *w.aval.shape, states), w.aval.dtype)

    primitive.register_etp_rules(
        yw_to_w=kit.single_key(lambda d, trace: trace * d[..., None, :]),
        xy_to_dw=kit.single_key(lambda x, d, w: x.T @ d),
        init_drtrl=kit.single_key(init_drtrl),
        init_pp=bad.output_zeros,
    )
    kit.assert_conformant(primitive, DENSE)


def test_a_rule_for_one_trainable_refuses_others():
    with pytest.raises(
        RuleContractError, match=r"one trainable called 'weight', found \['bias', 'weight'\]"
    ):
        kit.single_key(lambda d, trace: trace)(1.0, {'weight': 1.0, 'bias': 2.0})


# command line -------------------------------------------------------------------------------------


def run(capsys, *argv):
    code = main(argv)
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_missing_rule_or_case_has_its_own_exit_code(capsys):
    bad.without_a_rule()
    code, out, _ = run(capsys, 'check', 'etp_bad', '--json')
    assert code == 2 and 'no rule init_pp' in json.loads(out)['missing'][0]
    braintrace.register_primitive('etp_bare', lambda x, w: x @ w)
    assert run(capsys, 'check', 'etp_bare')[0] == 2


@pytest.mark.slow
def test_the_command_line_checks_several_or_all(capsys):
    code, out, _ = run(capsys, 'check', 'etp_elemwise', 'etp_mv')
    assert code == 0 and out.startswith('etp_elemwise: 12 pass, 4 not_applicable\netp_mv: ')
    ops.ETP_PRIMITIVES.clear()
    ops.ETP_PRIMITIVES.update([ops.etp_elemwise_p, bad.quadratic()])
    code, out, _ = run(capsys, 'check', '--all', '--json')
    found = json.loads(out)
    assert (code, found['ops']) == (1, 2)
    assert ['etp_bad L8' in row for row in found['fail']] == [True]


def test_a_bare_call_prints_the_help_and_is_no_pass(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (3, '') and 'check' in err and '--version' in err
    assert run(capsys, '--version')[:2] == (0, f'braintrace {braintrace.__version__}\n')


def test_an_interrupt_ends_a_check_without_a_traceback(capsys, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr('braintrace.kit.__main__.check', interrupted)
    assert run(capsys, 'check', 'etp_mv') == (130, '', '')


def test_what_was_not_tested_alone_is_no_fault(capsys):
    code, out, _ = run(capsys, 'check', 'etp_mv', '--platform', 'tpu', '--json')
    found = json.loads(out)
    assert code == 0 and len(found['not_tested']) == len(kit.LAWS) and not found['fail']
    assert 'no tpu device here' in out


def test_a_module_that_registers_primitives_can_be_imported(tmp_path, capsys, monkeypatch):
    (tmp_path / 'my_ops_of_a_test.py').write_text(
        'import braintrace\nbraintrace.register_primitive("etp_mine", lambda x, w: x @ w)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = run(capsys, 'describe', 'etp_mine', '--import', 'my_ops_of_a_test')
    row = '| etp_mine | no | no | 0 | weight | - | yw_to_w, xy_to_dw, init_drtrl, init_pp |'
    assert code == 0 and row in out


@pytest.mark.slow
@pytest.mark.parametrize('reader, found', [('cat', 'etp_mm'), ('true', '')])
def test_it_runs_as_a_module_also_for_a_reader_that_closes_the_pipe(reader, found):
    command = f'{sys.executable} -m braintrace.kit describe etp_mm | {reader}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert found in done.stdout and done.stderr == ''


@pytest.mark.parametrize(
    ('argv', 'found'),
    [
        ('check', 'NAMES or --all'),
        ('check etp_mm --all', 'NAMES or --all'),
        ('check etp_mn', "no ETP primitive is called 'etp_mn'"),
        ('check etp_mm --speed', 'unrecognized arguments: --speed'),
        ('check etp_mm --platform cpuu', "JAX knows no 'cpuu'; give some of"),
        ('check etp_mm --import my_ops.py', 'takes the name of a module: my_ops'),
        ('check etp_mm --import no_such_module', "No module named 'no_such_module'"),
        ('check etp_mm --import that_raises', '--import that_raises: '),
        ('check etp_mm --import no_python', '--import no_python: '),
        ('describe x', 'is called'),
    ],
)
def test_wrong_usage_has_its_own_exit_code(tmp_path, capsys, monkeypatch, argv, found):
    """Neither a module that breaks nor a platform that does not exist is a law that failed."""
    (tmp_path / 'that_raises.py').write_text('raise ValueError("boom")')
    (tmp_path / 'no_python.py').write_text('def f(:')
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run(capsys, *argv.split())
    assert code == 3 and found in err
