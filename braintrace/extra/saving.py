"""A learner as plain text, and as one flat dict of arrays and back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import DEFAULT, abstract, describe_aval, listing, path_key, path_name
from .._jax import is_key
from .._rules import arrays_of
from .._version import __version__
from .._warnings import tell
from .._windows import held
from ..errors import BraintraceError, BraintraceWarning, StructureError

LAYOUT = 2  # of what a fingerprint tells
FILE = '~format'  # an entry of a file of `save_state`: no path begins so, `~` is escaped in them
RULE = 'rule'  # the entry of a learner that holds its rule: the bytes of its text
FINGERPRINT = 'fingerprint'  # the one that holds its fingerprint
PARTS = tuple('versions rule options parameters carry trace ops step'.split())  # of it


# what a learner is ----------------------------------------------------------------------------


def fingerprint(graph, rule, state) -> dict[str, Any]:
    """What a compiled learner is, as plain text; ``state`` is its state, of shapes. Of a number
    that moves no digit is told.
    """

    program, moving = graph.program, list(arrays_of(rule))
    constants = {
        v: abstract(x) if any(x is a for a in moving) else x for v, x in program.constants.items()
    }
    params = zip(program.param_names, program.params, strict=True)
    options = {k: v for k, v in vars(graph.policy).items() if v != getattr(DEFAULT, k)}
    trace = rows(state.trace, 'trace')
    return {
        'layout': LAYOUT,
        'versions': {'braintrace': __version__, 'jax': jax.__version__},
        'rule': rule.own_call,
        # what a function of the user chose is in the ops and the step
        'options': {k: 'a function' if callable(v) else str(v) for k, v in options.items()},
        'parameters': {
            name: f'{describe_aval(program.avals[v])} {graph.routes[name].kind}'
            for name, v in params
        },
        'carry': rows(state.carry, 'carry'),
        'trace': {name: _told('trace', text) for name, text in trace.items()},
        'ops': {
            r.key: f'{r.primitive.name} to {", ".join(g.name for g in r.groups)}'
            for r in graph.hidden_param_op_relations
        },
        'step': listing(replace(program, constants=constants)),
    }


def rows(tree, bare: str) -> dict[str, str]:
    """Path of each leaf (``bare`` where the tree is one) -> dtype and shape."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path_key(path), bare): describe_aval(leaf) for path, leaf in leaves}


def structure_diff(saved: Mapping, here: Mapping) -> list[str]:
    """A line for each difference of two fingerprints (:meth:`OnlineLearner.fingerprint`); empty
    where a state of the one goes on in the other.

    Versions are left out. The equations of the step count where the versions of JAX are equal,
    since each writes them in its own way; of those that differ the first is shown.

    >>> from braintrace.functional import structure_diff
    >>> structure_diff({'rule': 'es_d_rtrl(0.9)', 'carry': {}}, {'rule': 'd_rtrl()', 'carry': {}})
    ['rule: es_d_rtrl(0.9) when saved, d_rtrl() here']
    """
    jaxes = [one.get('versions', {}).get('jax') for one in (saved, here)]
    left_out = {'versions'} | ({'step'} if jaxes[0] != jaxes[1] else set())
    lines = []

    def compare(path: str, a, b) -> None:
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in {**b, **a}:
                name = f'{path}/{key}' if path else key
                compare(name, a.get(key, 'absent'), b.get(key, 'absent'))
        elif isinstance(a, list) and isinstance(b, list):
            pairs = enumerate(zip_longest(a, b, fillvalue='absent'))
            wrong = [(i, x, y) for i, (x, y) in pairs if x != y]
            for i, x, y in wrong[:1]:
                more = f' (and {len(wrong) - 1} more)' if wrong[1:] else ''
                lines.append(f'{path}/{i}: {x} when saved, {y} here{more}')
        elif a != b:
            lines.append(f'{path}: {a} when saved, {b} here')

    compare('', *({k: v for k, v in x.items() if k not in left_out} for x in (saved, here)))
    return lines


def check_fingerprint(saved: Any, here: Mapping, advice: str) -> None:
    """Refuse another learner; of other versions it is told."""
    if saved is None:
        tell(
            'the file does not say which learner it is of, so arrays alone were compared: it was '
            'written without `learner=`.'
        )
        return
    with refused('its fingerprint can not be read'):
        wrong, old, new = structure_diff(saved, here), dict(saved['versions']), here['versions']
    if wrong:
        raise StructureError('\n  '.join(['this is of another learner:', *wrong]) + f'\n{advice}')
    if old != new:
        pairs = [f'{k} {old.get(k)} there, {new[k]} here' for k in new if old.get(k) != new[k]]
        tell(f'it was saved by other versions: {", ".join(pairs)}. The last digits may differ.')


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """What is wrong with that which is read inside is a ``StructureError``, of whatever kind."""
    try:
        yield
    except (BraintraceError, BraintraceWarning, MemoryError):
        raise
    except Exception as error:
        raise StructureError(f'{what}: {type(error).__name__}: {error!s:.200}') from error


# a learner ------------------------------------------------------------------------------------


def save(states: Mapping[tuple[str, ...], Any], rule, of: Mapping) -> dict[str, jax.Array]:
    """Copies of all arrays that ``states`` (path -> state with a ``value``) hold, by name, the rule
    and the fingerprint ``of`` the learner.
    """
    leaves = named_leaves({path: state.value for path, state in states.items()}, _entry)[0]
    tree = {name: jnp.array(numbers_of(leaf)) for name, leaf in leaves.items()}
    texts = {RULE: rule.own_call, FINGERPRINT: json.dumps(of)}
    return {**tree, **{k: jnp.array(np.frombuffer(x.encode(), np.uint8)) for k, x in texts.items()}}


def restore(
    states: Mapping[tuple[str, ...], Any], rule, of: Mapping, tree: Mapping[str, Any]
) -> None:
    """Copy a result of :func:`save` into ``states``; nothing changes where it does not fit, or
    where it is interrupted.
    """
    if not isinstance(tree, Mapping):
        raise StructureError(
            f'the tree is {type(tree).__name__}; give the dict that `learner.save()` returned.'
        )
    if FILE in tree:
        raise StructureError(
            'the tree is a file of `functional.save_state`: read it by '
            '`functional.load_state(file, like)`. `restore` takes what `learner.save()` returned.'
        )

    def describe(x) -> str:
        if not hasattr(x, 'dtype') and isinstance(x, bool | int | float | complex):
            x = jnp.asarray(x)
        unit = f' {u.get_unit(x)}' if _is_quantity(x) else ''
        return describe_aval(x) + unit if hasattr(x, 'shape') else type(x).__name__

    old = {path: state.value for path, state in states.items()}
    leaves, treedef = named_leaves(old, _entry)
    here = {name: describe(numbers_of(leaf)) for name, leaf in leaves.items()}
    entries, there = {}, {}
    for name in tree:
        with refused(f'the entry {name!r} of the tree can not be read'):
            entry = entries[name] = tree[name]
            if name in (RULE, FINGERPRINT) and not _is_quantity(entry):
                there[name] = bytes(np.asarray(entry, np.uint8)).decode(errors='replace')
            else:
                there[str(name)] = describe(entry)
    saved = there.pop(FINGERPRINT, None)
    if wrong := differences(there, {RULE: rule.own_call, **here}):
        raise StructureError(
            f'this tree does not fit the learner, which is as it was:\n{wrong}\nRestore into a '
            'learner of the same model, rule, batch size and precision. For another batch size, '
            'make the states so first: `brainstate.nn.init_all_states(model, batch_size=...)` and '
            '`learner.compile_graph(x)`.'
        )
    if saved:
        with refused('its fingerprint can not be read'):
            told = json.loads(saved) or {}
        check_fingerprint(
            told,
            of,
            'The learner is as it was. Make its model as it was when saved, or take the parameters '
            f'alone: leave {FINGERPRINT!r} out of the tree.',
        )
    new = []
    for name, leaf in leaves.items():
        with refused(f'the entry {name!r} of the tree can not be read'):
            array = jnp.array(entries[name])
            if describe(array) != here[name]:
                raise ValueError(f'it is {describe(array)}')
            new.append(placed(array, leaf))
    with held():  # an interrupt waits until all are written
        try:
            for path, value in jax.tree.unflatten(treedef, new).items():
                states[path].value = value
        except BaseException:  # also of a hook of a state
            for path, value in old.items():
                states[path].value = value
            raise


def _entry(path, leaf) -> str:
    """The name of an entry; a unit, or the kind of a random key, is behind it in brackets."""
    kind = ''
    if _is_quantity(leaf):
        kind = f' [{u.get_unit(leaf)}]'
    elif is_key(leaf):
        kind = f' [{kind_of_key(leaf)}]'
    return '/'.join(path_key(path)) + kind


# leaves ---------------------------------------------------------------------------------------


def _is_quantity(value) -> bool:
    return isinstance(value, u.Quantity)


def named_leaves(tree, name: Callable) -> tuple[dict[str, Any], Any]:
    """``name(path, leaf)`` -> leaf, in the order of the tree, and its structure; a quantity is one
    leaf.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantity)
    leaves = {name(path, leaf): leaf for path, leaf in found}
    if len(leaves) != len(found):
        raise StructureError(
            'two leaves have the same path once keys are written as strings. Give them different '
            'keys.'
        )
    return leaves, treedef


def differences(saved: dict[str, str], here: dict[str, str]) -> str:
    """A line for each name whose leaves are described differently; empty where none is."""
    told = ({name: _told(name, text) for name, text in x.items()} for x in (saved, here))
    # one level down: at the top stand versions, which are left out
    lines = structure_diff(*({'': x} for x in told))
    return '\n'.join(f'  {line}' for line in lines)


def _told(name: str, text: str) -> str:
    """The description of a leaf; a trace in bfloat16 is kept as its bits."""
    return text.replace('uint16', 'bfloat16') if 'trace' in name.split('/') else text


def descriptions(leaves: Mapping[str, Any], what: str) -> dict[str, str]:
    """Dtype (of a key its kind), shape and unit of leaves of ``what``, by name."""
    found = {}
    for name, leaf in leaves.items():
        with refused(f'the leaf {name!r} of {what} is no array of JAX'):
            unit = f' {u.get_unit(leaf)}' if _is_quantity(leaf) else ''
            found[name] = describe_aval(abstract(u.get_magnitude(leaf))) + unit
    return found


def numbers_of(leaf):
    """A leaf without its unit; a random key as integers."""
    return jax.random.key_data(leaf) if is_key(leaf) else u.get_magnitude(leaf)


def as_like(numbers, like):
    """Numbers as the leaf ``like`` holds its own: the inverse of :func:`numbers_of`."""
    if is_key(like):
        return jax.random.wrap_key_data(numbers, impl=kind_of_key(like))
    return u.Quantity(numbers, unit=u.get_unit(like)) if _is_quantity(like) else numbers


def placed(numbers, like):
    """Numbers as the leaf ``like`` holds its own, on the mesh on which it was placed."""
    sharding = getattr(u.get_magnitude(like), 'sharding', None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return as_like(jnp.asarray(numbers), like)
    if isinstance(numbers, np.ndarray) and not sharding.is_fully_addressable:
        of_shard = lambda at: np.asarray(numbers[at])  # noqa: E731
        return as_like(jax.make_array_from_callback(numbers.shape, sharding, of_shard), like)
    leaf = as_like(jnp.asarray(numbers), like)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), leaf)


def kind_of_key(key):
    """The kind of random keys, also of abstract ones, which tell it while they are traced."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]
