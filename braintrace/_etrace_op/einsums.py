"""Products by an equation of letters: ``y = einsum(equation, x, weight) (+ b)``.

An entry of the weight feeds one element of y for each value of the letters that y has and the
weight lacks. The trace keeps these elements apart: ``(batch, *others of y, *weight)``. Without such
letters, as in a dense or a grouped product, it has the weight's shape.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._signatures import refuses
from ..errors import OptionError
from ._layouts import bias_at, zeros_trace
from ._operands import product_operands, with_unit
from ._primitive import ETPPrimitive, register_both_forms
from ._spec import ETPPrimitiveSpec


@dataclasses.dataclass(frozen=True)
class Letters:
    """The equation of one sample: the axes of x, of the weight and of y."""

    x: str
    weight: str
    y: str

    @property
    def others(self) -> str:
        """Axes of y along which an entry of the weight is used again."""
        return ''.join(a for a in self.y if a not in self.weight)

    @property
    def bias(self) -> str:
        return ''.join(a for a in self.y if a in self.weight)

    @property
    def entry(self) -> dict[str, str]:
        """The axes of one sample's trace."""
        return {'weight': self.others + self.weight, 'bias': self.others + self.bias}

    @property
    def summed(self) -> str:
        """Axes that the weight alone has; the derivative is constant along them."""
        return ''.join(a for a in self.weight if a not in self.x + self.y)

    def batch_of(self, x) -> str:
        """A letter for the batch of x; none for one sample."""
        free = (a for a in string.ascii_letters if a not in self.x + self.weight + self.y)
        return next(free) if x.ndim > len(self.x) else ''


@functools.cache
def letters_of(equation: str) -> Letters:
    x, weight, y = equation.replace('->', ',').split(',')
    return Letters(x, weight, y)


def _impl(x, weight, *bias, equation: str, has_bias: bool = False, **product):
    e = letters_of(equation)
    b = e.batch_of(x)
    y = jnp.einsum(f'{b}{e.x},{e.weight}->{b}{e.y}', x, weight, **product)
    return y + _spread(bias[0], e.bias, b + e.y) if has_bias else y


def _spread(array, letters: str, target: str):
    """Put the trailing axes ``letters`` of an array in the order of ``target``, with axes of size 1
    for the letters that it lacks.
    """
    lead = array.ndim - len(letters)
    kept = [a for a in target if a in letters]
    array = jnp.transpose(array, (*range(lead), *(lead + letters.index(a) for a in kept)))
    return jnp.expand_dims(array, [lead + i for i, a in enumerate(target) if a not in letters])


def _derivative(
    apart: bool, x, hidden_dim, weights, *, equation: str, has_bias: bool = False, **product
):
    """``hidden_dim`` times the derivative by each weight, with the weight's axes; ``apart``, also
    with the axes of y along which the weight is used again.
    """
    e = letters_of(equation)
    b, target = e.batch_of(x), e.entry if apart else {'weight': e.weight, 'bias': e.bias}
    # along an axis that the weight alone has, each entry gets the same number
    ones = jnp.ones([weights['weight'].shape[e.weight.index(a)] for a in e.summed], x.dtype)
    terms = f'{b}{e.x},{b}{e.y},{e.summed}'
    found = {'weight': jnp.einsum(f'{terms}->{target["weight"]}', x, hidden_dim, ones)}
    found |= {'bias': jnp.einsum(f'{b}{e.y}->{target["bias"]}', hidden_dim)} if has_bias else {}
    return {name: value.astype(weights[name].dtype) for name, value in found.items()}


def _yw_to_w(hidden_dim, trace, *, equation: str, **params):
    e = letters_of(equation)
    return {name: value * _spread(hidden_dim, e.y, e.entry[name]) for name, value in trace.items()}


def _solve(signal, trace, weights, *, equation: str, **params):
    e = letters_of(equation)
    scaled = _yw_to_w(signal, trace, equation=equation)
    # the gradient sums over the batch and over the uses of the weight in one sample
    uses = tuple(range(signal.ndim - len(e.y) + len(e.others)))
    return {name: value.sum(uses) for name, value in scaled.items()}


def _init_drtrl(x_var, y_var, weight_vars, num_hidden_state, *, equation: str, **product):
    e, y = letters_of(equation), y_var.aval.shape
    # y may have axes in front: a batch, and those that the hidden state adds
    lead = y[: len(y) - len(e.y)]
    sizes = dict(zip(e.y, y[len(lead) :], strict=True))
    front = (*lead, *(sizes[a] for a in e.others))

    def own(name, var):
        axes = len(e.weight if name == 'weight' else e.bias)
        return var.aval.shape[len(var.aval.shape) - axes :]

    return {
        name: zeros_trace((*front, *own(name, var)), var, num_hidden_state)
        for name, var in weight_vars.items()
    }


def register_forms(
    name: str, shared: bool, cases: Sequence[tuple] = (), both: bool = True
) -> dict[tuple[bool, bool], ETPPrimitive]:
    """The primitives of an einsum by (batched, shared), whose static parameter ``equation``
    describes one sample. ``shared``: an entry of the weight feeds several elements of y.
    """

    def spec_of(batched: bool) -> ETPPrimitiveSpec:
        return ETPPrimitiveSpec(
            f'{name}{"_shared" if shared else ""}_{"mm" if batched else "mv"}',
            _impl,
            yw_to_w=_yw_to_w,
            xy_to_dw=functools.partial(_derivative, False),
            init_drtrl=_init_drtrl,
            instant_drtrl=functools.partial(_derivative, True) if shared else None,
            solve_drtrl=_solve if shared else None,
            trainable_invars_fn=bias_at(2, weight=1),
            batched=batched,
            cases=tuple(cases),
        )

    return {(form.batched, shared): form for form in register_both_forms(spec_of, both)}


FORMS = register_forms('etp_einsum', False) | register_forms('etp_einsum', True)


def parsed(op: str, equation: str) -> tuple[Letters, bool]:
    """The equation of one sample, and whether x and y have a batch axis in front."""
    text = equation.replace(' ', '') if isinstance(equation, str) else ''
    parts = text.replace('->', ',').split(',')
    letters = set(''.join(parts))
    if (
        text.count('->') != 1
        or text.count(',') != 1
        or len(parts) != 3
        or not letters <= set(string.ascii_letters)
    ):
        shown = repr(equation) if isinstance(equation, str) else f'a {type(equation).__name__}'
        raise OptionError(
            f'{op}: the equation is {shown}; expected letters for the axes of x, of the weight and '
            "of y, like 'bi,io->bo'."
        )
    x, weight, y = parts
    twice = [part for part in parts if len(set(part)) < len(part)]
    if twice:
        raise OptionError(f'{op}: the equation {equation!r} has a letter twice in {twice[0]!r}.')
    if unknown := sorted(set(y) - set(x + weight)):
        raise OptionError(
            f'{op}: the equation {equation!r} has the letters {unknown} in y that no operand has.'
        )
    # a first letter that x and y share, and the weight lacks, counts independent samples
    batched = bool(x and y and x[0] == y[0] and x[0] not in weight)
    return Letters(x[batched:], weight, y[batched:]), batched


def bound(op: str, forms: dict, equation: str, x, weight, bias=None, **product):
    """Bind the form that fits the equation; operands are arrays or quantities.

    ``product``: ``precision`` and ``preferred_element_type`` of ``jax.numpy.einsum``.
    """
    letters, batched = parsed(op, equation)
    x_axes = equation.replace(' ', '').split(',')[0]
    layouts, own = [' '.join(x_axes)], {'weight': (weight, ' '.join(letters.weight))}
    hint = f'The equation is {equation!r}.'
    x, weights, bias, unit = product_operands(
        op, x, layouts, own, bias, ' '.join(letters.bias), hint=hint
    )
    form = forms[batched, bool(letters.others)]
    text = f'{letters.x},{letters.weight}->{letters.y}'
    y = form.bind(x, *weights, *bias, equation=text, has_bias=bool(bias), **product)
    return with_unit(y, unit)


@refuses('einsum', weight_fn='Write `einsum(equation, x, fn(weight))`.')
def einsum(equation: str, x, weight, bias=None) -> jax.Array:
    """Multiply by a traced weight along named axes: ``y = einsum(equation, x, weight) (+ bias)``,
    as ``jax.numpy.einsum``.

    ``equation`` names the axes of x, of the weight and of y by letters, each once in an operand:
    ``'bi,io->bo'`` is :func:`matmul`, ``'bhi,hio->bho'`` a product for each head. If x and y share
    their first letter and the weight lacks it, it is the batch. ``bias`` has the axes of y that the
    weight has. Along other axes of y (``t`` in ``'bti,io->bto'``) the weight is used again, and the
    trace holds an entry for each use. y has the unit of x times the unit of the weight.

    Raises ``OptionError`` for an equation of another form, ``EtpShapeError``, ``EtpDtypeError`` or
    ``EtpUnitError`` for an operand that does not fit.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.einsum('bhi,hio->bho', jnp.ones((2, 4, 3)), jnp.ones((4, 3, 5))).shape
    (2, 4, 5)
    """
    return bound('einsum', FORMS, equation, x, weight, bias)


@refuses(
    'grouped_matmul',
    weight_fn='Write `grouped_matmul(x, fn(weight), bias)`.',
    bias_fn='Write `grouped_matmul(x, weight, fn(bias))`.',
)
def grouped_matmul(x, weight, bias=None) -> jax.Array:
    """Multiply each group of features by its own traced matrix: ``y[g] = x[g] @ weight[g]
    (+ bias[g])``.

    ``x`` is ``(groups, in)`` or ``(batch, groups, in)``, ``weight`` ``(groups, in, out)``, ``bias``
    ``(groups, out)``; y is ``(groups, out)`` or ``(batch, groups, out)``. A block-diagonal product
    is this on ``x.reshape(batch, groups, -1)``.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> x, weight, bias = jnp.ones((2, 4, 3)), jnp.ones((4, 3, 5)), jnp.ones((4, 5))
    >>> braintrace.grouped_matmul(x, weight, bias)[0, 0]
    Array([4., 4., 4., 4., 4.], dtype=float32)
    """
    layouts, own = ('groups in', 'batch groups in'), {'weight': (weight, 'groups in out')}
    x, weights, bias, unit = product_operands('grouped_matmul', x, layouts, own, bias, 'groups out')
    form = FORMS[x.ndim == 3, False]
    y = form.bind(x, *weights, *bias, equation='gi,gio->go', has_bias=bool(bias))
    return with_unit(y, unit)
