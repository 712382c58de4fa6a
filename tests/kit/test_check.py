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
    'cumulative': (
        lambda: kit.new_etp_primitive(
            kit.ETPPrimitiveSpec('t_sum', lambda x, w: jnp.cumsum(x * w, -1), batched=True)
        ),
        [(shapes((2, 3), (3,)), {})],
    ),
}


@pytest.mark.tier(quick=0, one_in=2)
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
def test_a_spec_brings_its_cases_to_its_op():
    op = kit.new_etp_primitive(
        kit.ETPPrimitiveSpec(
            't_gain', lambda x, w: x * w, batched=True, cases=[(shapes((2, 3), (3,)), {})]
        )
    )
    by_op, by_name = kit.check(op), kit.check('t_gain')
    assert by_op == by_name and by_op.ok and len(by_op.rows) == len(kit.LAWS)


@pytest.mark.slow
def test_an_op_of_a_factory_is_checked_by_its_name_with_its_own_cases():
    op = kit.make_linear_op('t_flat', lambda x, w: x @ w, cases=[(shapes((2, 3), (3, 4)), {})])
    for form in op.forms:
        form.op = op
    by_op = kit.check(op)
    assert by_op.ok and kit.check('t_flat').rows == by_op.rows
    assert (
        kit.check('t_flat_sample').rows[0].status == 'missing'
        and 't_flat_sample' not in registered()
    )


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


def test_a_platform_that_is_absent_is_not_tested_which_neither_passes_nor_fails():
    report = kit.check('etp_mv', platforms=('tpu',))
    assert {(row.law, row.status) for row in report.rows} == {
        (law, 'not_tested') for law in kit.LAWS
    }
    assert not report.of('pass') and report.ok and 'no tpu device here' in str(report)


@pytest.mark.slow
def test_laws_that_need_a_missing_rule_are_not_tested():
    report = kit.check(bad.without_a_rule())
    assert [row.law for row in report.of('missing')] == ['L0'] and 'no rule init_pp' in report.of(
        'missing'
    )[0].case
    assert (
        {'L5', 'L9'} <= {row.law for row in report.of('not_tested')}
        and not report.of('fail')
        and not report.ok
    )


def test_a_call_that_raises_is_a_row_that_fails():
    def op(x, w):
        raise ZeroDivisionError('of the op')

    report = kit.check(op, DENSE)
    assert [(row.law, row.worst) for row in report.of('fail')] == [('L1', None)]
    assert (
        'ZeroDivisionError: of the op' in report.of('fail')[0].case
        and report.status('L2') == 'not_tested'
    )


def test_a_layout_that_is_none_is_a_row_that_fails():
    report = kit.check(bad.dense(trainable_invars_fn=lambda params: ['weight']))
    assert [row.law for row in report.of('fail')] == ['L0'] and 'trainable_invars_fn' in report.of(
        'fail'
    )[0].case


@pytest.mark.parametrize(
    ('invars', 'found'),
    [
        ({'weight': 2}, "has 2 operands, and its layout says 'weight' at 2"),
        ({'weight': 0}, "'weight' at 0, where x is"),
    ],
)
def test_a_layout_beyond_the_operands_is_named(invars, found):
    report = kit.check(bad.dense(trainable_invars_fn=lambda params: invars))
    assert [row.law for row in report.of('fail')] == ['L0'] and found in str(report)


@pytest.mark.slow
def test_integers_need_numbers_that_they_stand_for():
    primitive = bad.dense(
        impl=lambda x, weight: jnp.take(weight, x, axis=0),
        cases=[([jax.ShapeDtypeStruct((3,), jnp.int32), *shapes((7, 4))], {})],
    )
    report = kit.check(primitive)
    assert {row.law for row in report.of('fail')} == {
        'L8'
    } and 'x has dtype int32 and the primitive no `represent`' in str(report)


def lowered():
    primitive = bad.dense()
    primitive.lowering['cpu'] = lambda x, weight: jnp.einsum('bi,io->bo', x, weight)
    return primitive


def fused():
    def kernel(d, trace, d_f, x, weights):
        return {
            'weight': jnp.einsum('bosr,bior->bios', d, trace['weight'])
            + jnp.einsum('bos,bi->bios', d_f, x)
        }

    primitive = bad.dense()
    primitive.trace_kernel['cpu'] = kernel
    return primitive


def fused_for_one_state():
    def kernel(d, trace, d_f, x, weights):
        return {
            'weight': (
                d[..., None, :, 0, 0] * trace['weight'][..., 0]
                + x[..., None] * d_f[..., None, :, 0]
            )[..., None]
        }

    primitive = bad.dense()
    primitive.trace_kernel['cpu'] = kernel
    return primitive


def reversed_by(**forms):
    return lambda: bad.dense(
        reverse=kit.rule_reverse(**forms), xy_to_dw=bad.reverse_of(bad.product)
    )


@pytest.mark.tier(quick=1, one_in=2)
@pytest.mark.parametrize(
    ('make', 'law'),
    [
        (lowered, 'L13'),
        (fused, 'L13'),
        (fused_for_one_state, 'L13'),
        (
            reversed_by(
                backward=lambda inputs, outputs, d, params, required: [
                    d @ inputs[1].T,
                    inputs[0].T @ d,
                ]
            ),
            'L14',
        ),
        (
            reversed_by(
                forward=lambda inputs, params: (
                    inputs[0] @ inputs[1],
                    lambda inputs, outputs, d, params, required: [
                        d @ inputs[1].T,
                        inputs[0].T @ d,
                    ],
                )
            ),
            'L14',
        ),
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
    report = kit.check(
        braintrace.lora_matmul, [([x, w], {'A': jnp.ones((5, 2)), 'alpha': 2.0, 'bias': c[:2]})]
    )
    assert report.ok and 'A=float64[5, 2], bias=float64[2], alpha=2.0' in report.rows[0].case, str(
        report
    )


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
    assert not found['missing'] and not found['not_tested']
    row = next(row for row in found['rows'] if row['law'] == 'L6')
    assert (row['op'], row['status'], row['worst'], row['tolerance']) == (
        'etp_bad',
        'fail',
        'inf',
        1e-12,
    )


@pytest.mark.slow
def test_assert_conformant_is_silent_or_raises():
    assert kit.assert_conformant('etp_elemwise') is None
    with pytest.raises(AssertionError, match='<lambda> L12 fail'):
        kit.assert_conformant(bad.lambda_as_static(), DENSE)


def test_describe_lists_what_is_registered():
    bad.without_a_rule()
    rows = {row['op']: row for row in json.loads(kit.describe(fmt='json'))}
    assert {'etp_mm', 'etp_conv', 'etp_bad'} <= set(rows)
    assert rows['etp_bad']['missing'] == ['init_pp'] and rows['etp_mm']['trainables'] == ['weight']
    assert (
        '| etp_lora_mm | yes | no | 0 | lora_b, lora_a | yw_to_w, xy_to_dw, init_drtrl, init_pp, '
        'instant_drtrl' in kit.describe()
    )
    assert kit.describe(kit.make_elementwise_op('t_gain', lambda x, w: x * w)).count('t_gain') == 2
    with pytest.raises(OptionError, match="fmt is 'text'"):
        kit.describe(fmt='text')
    with pytest.raises(OptionError, match='matmul is no ETP primitive'):
        kit.describe(braintrace.matmul)


# rules in bare arrays -----------------------------------------------------------------------------


def test_rules_in_bare_arrays_conform_once_they_are_wrapped():
    primitive = braintrace.register_primitive('etp_bare', lambda x, w: x @ w, batched=True)
    primitive.register_etp_rules(
        init_pp=bad.output_zeros,
        **{
            slot: kit.single_key(rule)
            for slot, rule in {
                'yw_to_w': lambda d, trace: trace * d[..., None, :],
                'xy_to_dw': lambda x, d, w: x.T @ d,
                'init_drtrl': lambda x, y, w, states: jnp.zeros(
                    (x.aval.shape[0], *w.aval.shape, states), w.aval.dtype
                ),
            }.items()
        },
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


def only(*primitives):
    ops.ETP_PRIMITIVES.clear()
    ops.ETP_PRIMITIVES.update(primitives)


@pytest.mark.slow
def test_the_command_line_checks_one_or_all(capsys):
    assert run(capsys, 'check', 'etp_elemwise')[:2] == (
        0,
        'etp_elemwise: 12 pass, 4 not_applicable\n',
    )
    only(ops.etp_elemwise_p, bad.quadratic())
    code, out, _ = run(capsys, 'check', '--all', '--json')
    found = json.loads(out)
    assert (
        code == 1
        and found['ops'] == 2
        and len(found['fail']) == 1
        and 'etp_bad L8' in found['fail'][0]
    )


@pytest.mark.slow
def test_a_missing_rule_or_case_has_its_own_exit_code(capsys):
    bad.without_a_rule()
    code, out, _ = run(capsys, 'check', 'etp_bad', '--json')
    assert code == 2 and 'no rule init_pp' in json.loads(out)['missing'][0]
    braintrace.register_primitive('etp_bare', lambda x, w: x @ w)
    assert run(capsys, 'check', 'etp_bare')[0] == 2


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
    assert code == 0 and len(json.loads(out)['not_tested']) == len(kit.LAWS)


@pytest.mark.parametrize(
    ('argv', 'found'),
    [
        (('check',), 'NAMES or --all'),
        (('check', 'etp_mm', '--all'), 'NAMES or --all'),
        (('check', 'etp_mm', '--import', 'my_ops.py'), 'takes the name of a module: my_ops'),
        (('check', 'etp_mn'), "no ETP primitive is called 'etp_mn'"),
        (('check', 'etp_mm', '--speed'), 'unrecognized arguments: --speed'),
        (('check', 'etp_mm', '--import', 'no_such_module'), "No module named 'no_such_module'"),
        (('describe', 'x'), 'is called'),
    ],
)
def test_wrong_usage_has_its_own_exit_code(capsys, argv, found):
    code, _, err = run(capsys, *argv)
    assert code == 3 and found in err


def test_a_module_that_registers_primitives_can_be_imported(tmp_path, capsys, monkeypatch):
    (tmp_path / 'my_ops_of_a_test.py').write_text(
        'import braintrace\nbraintrace.register_primitive("etp_mine", lambda x, w: x @ w)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = run(capsys, 'describe', 'etp_mine', '--import', 'my_ops_of_a_test')
    assert (
        code == 0
        and '| etp_mine | no | no | 0 | weight | - | yw_to_w, xy_to_dw, init_drtrl, init_pp |'
        in out
    )


@pytest.mark.slow
def test_several_names_are_checked_at_once(capsys):
    code, out, _ = run(capsys, 'check', 'etp_elemwise', 'etp_mv')
    assert code == 0 and [line.split(':')[0] for line in out.splitlines()] == [
        'etp_elemwise',
        'etp_mv',
    ]


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_hears_no_traceback():
    done = subprocess.run(
        f'{sys.executable} -m braintrace.kit describe | true',
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ''


@pytest.mark.slow
def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, '-m', 'braintrace.kit', 'describe', 'etp_mm', '--json'],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout)[0]['op'] == 'etp_mm', done.stderr


@pytest.mark.parametrize('text', ['raise ValueError("boom")', 'def f(:'])
def test_a_module_that_can_not_be_imported_is_no_law_that_failed(
    tmp_path, capsys, monkeypatch, text
):
    (tmp_path / 'broken_ops_of_a_test.py').write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, error = run(capsys, 'check', 'etp_mm', '--import', 'broken_ops_of_a_test')
    assert code == 3 and '--import broken_ops_of_a_test: ' in error


def test_a_platform_that_does_not_exist_is_no_platform_that_is_absent(capsys):
    with pytest.raises(OptionError, match="JAX knows no 'cpuu'; give some of"):
        kit.check('etp_mm', platforms=('cpuu',))
    assert run(capsys, 'check', 'etp_mm', '--platform', 'cpuu')[0] == 3
