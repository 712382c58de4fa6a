"""The comparison that all tests use sees what differs, and says where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import assert_close, assert_moves, assert_same_kinds, errors

WANT = {'a': np.array([[1.0, -4.0], [0.5, 2.0]]), 'b': np.zeros(3)}


def moved(path, by):
    """``WANT`` with the second entry of one leaf moved."""
    got = {k: v.copy() for k, v in WANT.items()}
    got[path].flat[1] += by
    return got


def test_the_message_names_the_leaf_and_its_worst_entry():
    with pytest.raises(AssertionError) as caught:
        assert_close(moved('a', 1e-3), WANT, relative=1e-5)
    assert str(caught.value).splitlines() == [
        'the numbers differ',
        "['a']: 0.001 off at [0, 1], 0.00025 of the largest entry 4; allowed 4e-05",
        'these agree: ["[\'b\']"]',
    ]


@pytest.mark.parametrize(
    ('path', 'by', 'relative', 'absolute', 'agrees'),
    [
        ('a', 3.9e-6, 1e-6, 0.0, True),  # relative to the largest entry, not to its own
        ('a', 4.1e-6, 1e-6, 0.0, False),
        ('a', 4.1e-6, 1e-6, 5e-6, True),
        ('b', 0.9e-6, 1e-6, 0.0, True),  # the reference is zero
        ('b', 1.1e-6, 1e-6, 0.0, False),
        ('b', 1e-300, 0.0, 0.0, False),
        ('a', np.nan, 1e-6, 1.0, False),
        ('a', np.inf, 1e-6, 1.0, False),
    ],
)
def test_the_bound_is_relative_to_the_reference_or_absolute(path, by, relative, absolute, agrees):
    got = moved(path, by)
    if agrees:
        assert_close(got, WANT, relative, absolute)
    else:
        with pytest.raises(AssertionError, match='the numbers differ'):
            assert_close(got, WANT, relative, absolute)


def test_equal_infinities_agree():
    assert_close(np.array([np.inf, 1.0]), np.array([np.inf, 1.0]), 0.0)


@pytest.mark.parametrize(
    ('got', 'message'),
    [
        ({'a': WANT['a']}, 'the structure is'),
        ({'a': WANT['a'], 'b': np.zeros((3, 1))}, r"\['b'\] has shape \(3, 1\), expected \(3,\)"),
    ],
)
def test_structure_and_shapes_agree_too(got, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(got, WANT)


def test_kinds_of_numbers_are_compared_where_that_is_asked_for():
    assert_close(jnp.zeros(3, jnp.float32), WANT['b'])
    with pytest.raises(AssertionError, match='the dtypes differ'):
        assert_same_kinds(jnp.zeros(3, jnp.float32), WANT['b'])
    assert_same_kinds(WANT, moved('a', 1.0))


def test_a_gradient_of_an_integer_agrees_with_its_like_alone():
    nothing = jax.grad(lambda n: 1.0, allow_int=True)(3)
    assert_close({'n': nothing}, {'n': nothing})
    with pytest.raises(AssertionError, match=r"\['n'\]"):
        assert_close({'n': nothing}, {'n': np.zeros(())})


def test_errors_are_relative_to_the_reference():
    assert errors(moved('a', 1e-3), WANT) == pytest.approx({"['a']": 2.5e-4, "['b']": 0.0})


def test_a_tree_that_stands_still_is_found():
    with pytest.raises(AssertionError, match=r"no gradient for \[\"\['b'\]\"\]"):
        assert_moves(WANT)
