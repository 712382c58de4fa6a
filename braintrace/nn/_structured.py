"""Layers whose matrix has a structure: sparse, of low rank, in blocks, or read row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._etrace_op import SparseStructure, embedding, lora_matmul, sparse_matmul
from .._signatures import ShowsArguments, is_int, refuses
from ..errors import EtpDtypeError, EtpShapeError, EtpUnitError, OptionError
from ._arguments import (
    KAIMING,
    LECUN,
    LECUN_UNIFORM,
    ZERO,
    Init,
    Size,
    axes,
    check_array,
    check_trailing,
    counted,
    first_value,
    parameter,
)
from ._docs import Documented
from ._linear import check_signs_of, checked_signs, over_leading_axes, signed


def folded(op: Callable, x: Any, rank: int) -> Any:
    """``op(x)``, with all axes before the last ``rank`` ones as one batch if they are
    several.
    """
    if x.ndim <= rank + 1:
        return op(x)
    lead, own = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    y = op(x.reshape((-1, *own)))
    return y.reshape((*lead, *y.shape[1:]))


class SparseLinear(Documented, ShowsArguments, brainstate.nn.Module):
    r"""A layer with a sparse matrix, whose stored entries are trained (applied by
    :func:`braintrace.sparse_matmul`).

    .. math:: y_j = \sum_{k:\, c_k = j} x_{r_k}\, w_k + b_j

    with row :math:`r_k` and column :math:`c_k` of entry k, and with signs
    :math:`|w_k|\, S_{r_k c_k}` in the place of :math:`w_k` (Dale's law, see
    :class:`SignedWLinear`). Several leading axes of x count as one batch.

    Parameters
    ----------
    spar_mat : CSR, CSC or COO matrix of ``saiunit.sparse``
        Shape (I, O). Its places stay, its data are the first values of w; they may have a unit.
    b_init : initializer, array, number or None
        Bias b, of shape (O,), in the unit of :math:`x w`; left out by default.
    in_size : int or tuple of int, optional
        I, or sizes whose last is I.
    w_sign : array or None
        S, of +1 and -1, which broadcasts to (I, O), such as shape (I, 1) for one sign of each
        input, or with one sign for each entry. Data must have the signs of S.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight``, of shape (entries,) in the order of ``spar_mat.data``, and, with a
        bias, ``bias``.

    Raises
    ------
    EtpDtypeError
        ``spar_mat`` is no such matrix, or its data are no floating numbers.
    OptionError
        ``in_size`` does not end with I, the data are not one number for each entry, or ``w_sign``
        has other numbers or another shape, or the data other signs.
    EtpShapeError, EtpUnitError
        The input is not of shape (..., I), or its unit does not fit the bias.

    Examples
    --------
    >>> import jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import SparseLinear
    >>> layer = SparseLinear(u.sparse.CSR.fromdense(jnp.array([[0., 2.], [0., 0.], [3., 0.]])))
    >>> layer(jnp.array([1., 10., 100.]))
    Array([300.,   2.], dtype=float32)
    """

    def __init__(
        self,
        spar_mat: Any,
        b_init: Init | None = None,
        in_size: Size | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
        *,
        w_sign: Any = None,
    ):
        super().__init__(name=name)
        structure, data = SparseStructure.of(spar_mat), getattr(spar_mat, 'data', None)
        with jax.ensure_compile_time_eval():  # arrays of JAX: a learner holds these, and no copies
            self.structure = jax.tree.map(jnp.asarray, structure)
        if not jnp.issubdtype(getattr(data, 'dtype', int), jnp.inexact):
            raise EtpDtypeError(
                f'SparseLinear: the data of spar_mat, a {type(spar_mat).__name__}, have dtype '
                f'{getattr(data, "dtype", None)}; give a matrix of saiunit.sparse with floating '
                'numbers.'
            )
        self.num_in, self.num_out = self.structure.shape
        self.in_size = axes(self.num_in if in_size is None else in_size, 'SparseLinear: in_size')
        self.out_size = (*self.in_size[:-1], self.num_out)
        if self.in_size[-1] != self.num_in:
            raise OptionError(
                f'SparseLinear: in_size is {in_size!r}, but spar_mat of shape '
                f'{self.structure.shape} reads {self.num_in} features. Leave in_size out, or let '
                f'it end with {self.num_in}.'
            )
        values = {'weight': first_value('SparseLinear', 'data', data, (self.structure.size,))}
        self.w_sign = None
        if w_sign is not None:
            of_entries = np.ndim(w_sign) == 1
            shape = (self.structure.size,) if of_entries else self.structure.shape
            self.w_sign = checked_signs('SparseLinear', w_sign, shape)
            if not of_entries:
                self.w_sign = self.w_sign[self.structure.rows, self.structure.columns]
            check_signs_of('SparseLinear', 'data', u.get_magnitude(values['weight']), self.w_sign)
        if b_init is not None:
            values['bias'] = first_value('SparseLinear', 'b_init', b_init, (self.num_out,))
        self.weight = parameter('SparseLinear', param_type, values)

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape (..., I) to (..., O)."""
        check_trailing('SparseLinear', x, (self.num_in,))
        weight, bias = self.weight.value['weight'], self.weight.value.get('bias')
        if self.w_sign is not None:
            weight = signed(weight, self.w_sign)
        return folded(
            lambda x: sparse_matmul(x, weight, sparse_mat=self.structure, bias=bias), x, 1
        )


class LoRA(Documented, ShowsArguments, brainstate.nn.Module):
    r"""A product of low rank r, alone or added to another layer (low-rank adaptation; Hu et al.,
    2021, arXiv:2106.09685).

    .. math:: y = f(x) + \frac{1}{r}\, x\,A\,B

    The factor is the paper's :math:`\alpha / r` with :math:`\alpha = 1`. As in the paper A is drawn
    and B is 0 at first, so that the base f is not disturbed. Then the first gradient of A is 0, and
    B alone learns in the first step. A layer without a base needs ``lora_b_init`` to give anything
    but 0 before it has learnt. The base's parameters stay parameters; train ``weight`` alone to
    adapt a base that is frozen. Several leading axes of x count as one batch.

    Parameters
    ----------
    in_features, lora_rank, out_features : int
        Numbers of input features I, r, and of output features O.
    base_module : brainstate.nn.Module, optional
        f, which maps (..., I) to (..., O); without it f is 0.
    kernel_init, lora_b_init : initializer, array or number
        A, of shape (I, r), and B, of shape (r, O).
    in_size : int or tuple of int, optional
        I, or sizes whose last is I.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``lora_a``, A, and ``lora_b``, B.

    Raises
    ------
    OptionError
        A size is no positive int, ``in_size`` does not end with I, or ``base_module`` is no module.
    EtpShapeError, EtpDtypeError, EtpUnitError
        The input is not an array of shape (..., I), or the base's result has another shape or unit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Linear, LoRA
    >>> base = Linear(6, 4)
    >>> layer, x = LoRA(6, 2, 4, base_module=base), jnp.ones((3, 6))
    >>> bool((layer(x) == base(x)).all())
    True
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: brainstate.nn.Module | None = None,
        kernel_init: Init = LECUN,
        lora_b_init: Init = ZERO,
        param_type: type = brainstate.ParamState,
        in_size: Size | None = None,
    ):
        super().__init__()
        counts = counted(
            'LoRA', in_features=in_features, lora_rank=lora_rank, out_features=out_features
        )
        self.in_features, self.lora_rank, self.out_features = counts
        self.in_size = axes(in_features if in_size is None else in_size, 'LoRA: in_size')
        self.out_size = (*self.in_size[:-1], self.out_features)
        if self.in_size[-1] != self.in_features:
            raise OptionError(
                f'LoRA: in_size is {in_size!r} and in_features {in_features}; in_size ends with '
                'in_features, or is left out.'
            )
        if not (base_module is None or isinstance(base_module, brainstate.nn.Module)):
            raise OptionError(
                f'LoRA: base_module is a {type(base_module).__name__}; give a '
                'brainstate.nn.Module, or leave it out.'
            )
        self.base_module = base_module
        factor_a = first_value('LoRA', 'kernel_init', kernel_init, counts[:2])
        factor_b = first_value('LoRA', 'lora_b_init', lora_b_init, counts[1:])
        self.weight = parameter('LoRA', param_type, {'lora_a': factor_a, 'lora_b': factor_b})

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape (..., I) to (..., O)."""
        check_trailing('LoRA', x, (self.in_features,))
        a, b = (self.weight.value[name] for name in ('lora_a', 'lora_b'))
        y = folded(lambda x: lora_matmul(x, a, b, alpha=1 / self.lora_rank), x, 1)
        return y if self.base_module is None else added('LoRA', self.base_module(x), y)


def added(owner: str, base: Any, own: Any) -> Any:
    """The sum of two results of one shape and dimension."""
    if base.shape != own.shape:
        raise EtpShapeError(
            f'{owner}: base_module gives shape {base.shape} and the product {own.shape}; they are '
            'added, so give a base with the same number of outputs.'
        )
    units = u.get_unit(base), u.get_unit(own)
    if not units[0].has_same_dim(units[1]):
        raise EtpUnitError(
            f'{owner}: base_module gives unit {units[0]} and the product {units[1]}; they are '
            'added, so give kernel_init or lora_b_init the unit that is missing.'
        )
    return base + own


class GroupedLinear(Documented, ShowsArguments, brainstate.nn.Module):
    r"""A dense layer for each group of features (a block-diagonal matrix, applied by
    :func:`braintrace.grouped_matmul`'s product).

    .. math:: y_g = x_g\,W_g + b_g

    Parameters
    ----------
    num_groups, in_features, out_features : int
        Numbers of groups G, and of the input features I and output features O of each.
    w_init : initializer, array or number
        W, of shape (G, I, O); an initializer is called for each group's (I, O) by itself.
    b_init : initializer, array, number or None
        b, of shape (G, O), in the unit of :math:`x W`; ``None`` leaves it out.

    Attributes
    ----------
    weight : brainstate.ParamState
        A dict with ``weight`` and, with a bias, ``bias``.

    Raises
    ------
    OptionError
        A size is no positive int.
    EtpShapeError, EtpDtypeError, EtpUnitError
        The input is not an array of shape (..., G, I), or its unit does not fit the bias.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import GroupedLinear
    >>> layer = GroupedLinear(4, 3, 5)
    >>> layer(jnp.ones((4, 3))).shape, layer(jnp.ones((2, 4, 3))).shape
    ((4, 5), (2, 4, 5))
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        shape = groups, num_in, num_out = counted(
            'GroupedLinear',
            num_groups=num_groups,
            in_features=in_features,
            out_features=out_features,
        )
        self.in_size, self.out_size = (groups, num_in), (groups, num_out)
        if callable(w_init):
            w_init = u.math.stack([w_init((num_in, num_out)) for _ in range(groups)])
        values = {'weight': first_value('GroupedLinear', 'w_init', w_init, shape)}
        if b_init is not None:
            values['bias'] = first_value('GroupedLinear', 'b_init', b_init, self.out_size)
        self.weight = parameter('GroupedLinear', param_type, values)

    def update(self, x: Any) -> Any:
        """Map ``x`` of shape (..., G, I) to (..., G, O)."""
        check_trailing('GroupedLinear', x, self.in_size)
        value = self.weight.value
        return over_leading_axes(x, 'gi,gio->go', value['weight'], value.get('bias'))


LEAVE_OUT = 'Leave it out: rows are used, and learn, as they are.'
AS_THEY_ARE = dict.fromkeys(('max_norm', 'norm_type', 'scale_grad_by_freq'), LEAVE_OUT)


class Embedding(Documented, ShowsArguments, brainstate.nn.Module):
    r"""A table of vectors by index (applied by :func:`braintrace.embedding`; Bengio et al., 2003,
    JMLR 3:1137).

    .. math:: y = W_i

    Several axes of indices count as one batch.

    Parameters
    ----------
    num_embeddings : int
        Number of rows V; indices go from 0 to V - 1.
    embedding_size : int or tuple of int
        Shape E of a row.
    embedding_init : initializer, array or number
        W, of shape (V, \*E).
    padding_idx : int, optional
        The row that does not learn; it is 0 unless ``embedding_init`` is an array.
    freeze : bool
        Whether the table is a constant: a ``brainstate.LongTermState``, no parameter.

    Attributes
    ----------
    weight : brainstate.ParamState
        W, an array.

    Raises
    ------
    OptionError
        A size is no positive int, ``padding_idx`` is no row, or ``freeze`` is no bool.
    EtpDtypeError, EtpShapeError
        The input is no array of integers, or an index that is known is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import Embedding
    >>> layer = Embedding(10, 4, padding_idx=0)
    >>> layer(jnp.array([1, 7])).shape, layer(jnp.array(0))
    ((2, 4), Array([0., 0., 0., 0.], dtype=float32))
    """

    @refuses('Embedding', **AS_THEY_ARE)
    def __init__(
        self,
        num_embeddings: int,
        embedding_size: Size,
        embedding_init: Init = LECUN_UNIFORM,
        padding_idx: int | None = None,
        freeze: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        (self.num_embeddings,) = counted('Embedding', num_embeddings=num_embeddings)
        self.embedding_size = axes(embedding_size, 'Embedding: embedding_size')
        self.in_size, self.out_size = (), self.embedding_size
        if padding_idx is not None and not (
            is_int(padding_idx, 0) and padding_idx < num_embeddings
        ):
            raise OptionError(
                f'Embedding: padding_idx is {padding_idx!r}; give a row from 0 to '
                f'{num_embeddings - 1}.'
            )
        if not isinstance(freeze, bool | np.bool_):
            raise OptionError(f'Embedding: freeze is {freeze!r}; give True or False.')
        self.padding_idx, self.freeze = padding_idx, bool(freeze)
        shape = (self.num_embeddings, *self.embedding_size)
        table = first_value('Embedding', 'embedding_init', embedding_init, shape)
        if padding_idx is not None and (callable(embedding_init) or not np.shape(embedding_init)):
            table = u.math.where(self._is_padding(), u.math.zeros_like(table), table)
        learns = parameter('Embedding', param_type, table)
        self.weight = brainstate.LongTermState(table) if self.freeze else learns

    def update(self, x: Any) -> Any:
        """Map integers ``x`` of any shape to vectors (..., \\*E)."""
        check_array('Embedding', x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise EtpDtypeError(f'Embedding: the input has dtype {x.dtype}; give integers.')
        table = self.weight.value
        if self.padding_idx is not None:
            table = u.math.where(self._is_padding(), jax.lax.stop_gradient(table), table)
        rows = table.reshape((self.num_embeddings, math.prod(self.embedding_size)))
        y = folded(lambda x: constant_rows(x, rows) if self.freeze else embedding(x, rows), x, 0)
        return y.reshape((*x.shape, *self.embedding_size))

    def _is_padding(self) -> Any:
        """Which entries of the table are those of the row that does not learn."""
        return (np.arange(self.num_embeddings) == self.padding_idx).reshape(
            -1, *(1 for _ in self.embedding_size)
        )


def constant_rows(x: Any, table: Any) -> Any:
    """Rows of a table that nothing trains, so without an op; NaN for an index out of range."""
    return u.math.take(table, jnp.where(x < 0, len(table), x), axis=0, mode='fill')
