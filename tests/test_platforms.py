"""A choice by platform, and what of it is traced."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from braintrace import _jax
from braintrace._rules import entries

pytestmark = pytest.mark.skipif(jax.default_backend() != 'cpu', reason='asks what a CPU runs')


def nested(traced: Counter, x):
    """A choice inside of both sides of another one."""

    def made(name, y):
        traced[name] += 1
        return y

    def inside(where):
        return _jax.platform_dependent(
            x,
            cpu=lambda x: made(f'{where}, own', x + 1),
            tpu=lambda x: made(f'{where}, tpu', x + 3),
            default=lambda x: made(f'{where}, other', x + 2),
        )

    return _jax.platform_dependent(
        cpu=lambda: inside('own') * 10, default=lambda: inside('other') * 100
    )


def test_a_choice_inside_of_a_choice_is_traced_for_the_platforms_that_are_left():
    traced = Counter()
    assert jax.jit(functools.partial(nested, traced))(1.0) == 20
    assert traced == {'own, own': 1, 'other, tpu': 1, 'other, other': 1}
    lowered = jax.jit(functools.partial(nested, Counter())).trace(1.0)
    others = {p: lowered.lower(lowering_platforms=(p,)).as_text() for p in ('cpu', 'cuda', 'tpu')}
    for platform, added in (('cpu', 1), ('cuda', 2), ('tpu', 3)):
        numbers = {k for k in (1, 2, 3) if f'dense<{k}.000000e+00>' in others[platform]}
        assert numbers == {added}, platform


def test_a_choice_after_another_one_is_free_again():
    first = _jax.platform_dependent(cpu=lambda: 1, default=lambda: 2)
    assert (first, _jax.platform_dependent(cpu=lambda: 3, default=lambda: 4)) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        _jax.platform_dependent(cpu=lambda: 1 / 0, default=lambda: 0)
    assert _jax.platform_dependent(tpu=lambda: 5, default=lambda: 6) == 6


@pytest.mark.parametrize('lanes', range(1, 14))
@pytest.mark.parametrize('fused', [1, 2, 4])
def test_a_sum_over_lanes_has_each_lane_once(lanes, fused):
    values = jnp.asarray([2.0**k for k in range(lanes)])
    total = entries._sum_over_lanes(lambda b: values[b], lanes, fused)
    assert total == 2.0**lanes - 1
