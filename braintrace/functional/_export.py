"""One step of a learner as a program that runs without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._compiler import abstract, is_inexact
from .._signatures import public
from .._windows import Optimizer, check_optimizer, optimised
from ..errors import OptionError
from ..extra.edge import Exported, exported
from ._online import OnlineLearner
from ._sequences import check_learnt
from ._state import OnlineState
from ._state import reset as put_back

PLATFORMS = {'cpu', 'cuda', 'rocm', 'tpu'}


@public('functional.export_step')
def export_step(
    learner: OnlineLearner,
    loss_fn: Callable | None,
    params,
    state: OnlineState,
    x,
    y=None,
    *,
    optimizer: Optimizer | None = None,
    opt_state=None,
    reset: Any = False,
    platforms=('cpu',),
) -> Exported:
    """One step as a program over flat, named arrays, which needs neither this package nor the cell.

    - with an optimizer: ``params, optimizer, carry, trace, t, x, y -> params, optimizer, carry,
      trace, t, loss, outputs``
    - with a loss alone: ``params, carry, trace, t, x, y -> carry, trace, t, grads, loss, outputs``
    - with ``loss_fn=None``, inference: ``params, carry, x -> carry, outputs``

    An array is named by its part and its path there, as ``trace/W/carry/weight/0``; names are in
    their alphabetical order.

    Parameters
    ----------
    learner : OnlineLearner
        The learner that made ``state``.
    loss_fn : function or None
        ``(outputs, y) -> scalar``, as for :meth:`OnlineLearner.grad`.
    params, state : tree, OnlineState
        What the first call starts from.
    x, y : tree
        Inputs and targets of one step, or their ``jax.ShapeDtypeStruct``; a tuple ``x`` holds
        several inputs.
    optimizer, opt_state : optional
        An ``optax.GradientTransformation`` and its state, by default ``optimizer.init(params)``.
    reset : bool or tree
        True, or a carry: one more argument ``reset``, a bool for each sample; flagged ones start
        again before the step, from this carry (True: that of ``state``, which has taken no step).
    platforms : sequence of str
        What the file for JAX is for: 'cpu', 'cuda', 'rocm', 'tpu'.

    Raises
    ------
    OptionError
        Another option; arrays that are traced, shapes alone, or on several devices; a count in
        Python.
    StructureError
        Params, state or ``x`` are not the learner's, a leaf is no array, a step changes its dtype
        or shape, or no optimizer can change a parameter.
    NotSupportedError
        The step calls a function of this process.

    Examples
    --------
    >>> import jax.numpy as jnp, optax, braintrace
    >>> from braintrace import functional
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner, params = functional.online(cell), {'W': jnp.ones((2, 4))}
    >>> x, y = jnp.ones((1, 2)), jnp.zeros((1, 4))
    >>> state = learner.init(params, jnp.zeros((1, 4)), x)
    >>> loss = lambda h, y: jnp.mean((h - y) ** 2)
    >>> step = functional.export_step(learner, loss, params, state, x, y, optimizer=optax.sgd(0.1))
    >>> list(step.arrays), step.manifest['bytes']['total']
    (['params/W', 'carry', 'trace/W/carry/weight/0', 't'], 84)
    >>> arrays, results = step(step.arrays, x=x, y=y)
    >>> arrays, results = step(arrays, x=x, y=y)
    >>> arrays['t'].tolist(), list(results)
    ([2], ['loss', 'outputs'])
    """
    if not isinstance(learner, OnlineLearner):
        raise OptionError(
            f'learner is {learner!r:.60}; give what `functional.online` returned. A learner of a '
            'module has its own `learner.export(loss_fn, x, y)`.'
        )
    if (loss_fn is None) != (y is None) or (loss_fn is None and optimizer is not None):
        raise OptionError(
            'give a loss_fn and a target y, with or without an optimizer; or, for inference, none '
            'of the three.'
        )
    if not (isinstance(platforms, tuple | list) and platforms and {*platforms} <= PLATFORMS):
        raise OptionError(f'platforms is {platforms!r}; give several of {sorted(PLATFORMS)}.')
    compiled = learner.matching(params, state, learner.taken(x))
    parts = ('carry',) if loss_fn is None else ('carry', 'trace', 't')
    kept, given = {'params': params}, {'x': x}
    if optimizer is not None:
        check_optimizer(optimizer)
        kept['optimizer'] = optimizer.init(params) if opt_state is None else opt_state
        check_learnt(optimizer, params, kept['optimizer'])
    kept |= {part: getattr(state, part) for part in parts}
    if loss_fn is not None:
        given['y'] = y
    if isinstance(reset, np.bool_):
        reset = bool(reset)
    if reset is not False:
        given['reset'] = jax.ShapeDtypeStruct(state.t.shape, bool)
    carry0 = state.carry if reset is True else reset
    if reset is True and (state.t > 0).any():
        raise OptionError(
            'reset is True, and the state has taken steps, so its carry is no beginning. Give the '
            'carry that samples start from: `reset=carry0`.'
        )
    base = state.replace(trace={})
    leaves, treedef = jax.tree.flatten(params)
    learns = [k not in compiled.frozen and is_inexact(abstract(p)) for k, p in enumerate(leaves)]

    def step(**now):
        params, x = now['params'], now['x']
        before = base.replace(**{part: now[part] for part in parts})
        if reset is not False:
            before = put_back(before, now['reset'], carry0, learner.hidden)
        if loss_fn is None:
            outputs, carry = learner.cell(params, before.carry, *learner.taken(x))
            return {'carry': carry, 'outputs': outputs}
        grads, loss, outputs, after = learner.grad(loss_fn)(params, before, x, now['y'])
        new = {'loss': loss, 'outputs': outputs, **{part: getattr(after, part) for part in parts}}
        if optimizer is None:
            return {'grads': grads, **new}
        learnt, moves = (params, now['optimizer']), treedef.unflatten(learns)
        params, opt_state = optimised(optimizer, learnt, grads, moves, loss)
        return {'params': params, 'optimizer': opt_state, **new}

    kind = 'inference' if loss_fn is None else 'gradient' if optimizer is None else 'learning'
    about = {'kind': kind, 'learner': learner.fingerprint()}
    return exported(step, kept, given, platforms, about)
