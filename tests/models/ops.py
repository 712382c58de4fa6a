"""The namespaces in which a cell of the table is written: one definition of a cell, read in several
ways.

``reads`` says which readers give a derivative back to the value that they read:

* ``'live'``      all of them: the plain model;
* ``'cut'``       all but ``cut(h)``: the two-sided pass of DESIGN.md, section 3;
* ``'constant'``  all but ops, mixing equations and plain uses of a parameter: the D pass.

``tests.models.library`` adds the namespace of the library itself, in which every annotation is the
identity.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.flow import JaxFlow, NumpyFlow

CONV_DIMENSIONS = {3: ('NWC', 'WIO', 'NWC'), 4: ('NHWC', 'HWIO', 'NHWC')}


def surrogate(v):
    """The derivative of a spike, real on both sides."""
    return 1.0 / (1.0 + (2.0 * v) ** 2)


# Functions of this name in both modules of arrays.
SHARED = 'tanh exp log cos sin sqrt where stack pad tile repeat broadcast_to zeros_like'.split()
EASE = 0.3  # the derivative of ``eased``, an identity


class Ops:
    """What a cell may use. Subclasses give the arrays (``xp``) and what ``constant`` means."""

    xp = None
    idle = False  # in a branch not taken: ops see zeros

    def __init_subclass__(cls):
        for name in SHARED if cls.xp else ():
            setattr(cls, name, staticmethod(getattr(cls.xp, name)))

    def __init__(self, reads: str = 'live'):
        if reads not in ('live', 'cut', 'constant'):
            raise ValueError(f'reads={reads!r}')
        self.reads = reads

    # -- annotations: the identity in the library --------------------------------------------------

    def cut(self, h):
        """An old state as read by an op or a mixing equation that is recurrent for the state's
        group.
        """
        return self.constant(h) if self.reads == 'cut' else h

    def plain(self, w):
        """A parameter used without an op: it has no trace."""
        return self._read(w)

    def new(self, name: str, value):
        """The new value of state ``name``, before anything reads it."""
        return value

    def within(self, name: str, value, without=None):
        """New state ``name``, or a value made of it, as read position by position by another new
        state of its group.

        ``without`` is the same value with that state held constant, if anything else in it can
        carry a derivative.
        """
        return value

    # -- ETP ops: y = op(x, w) ---------------------------------------------------------------------

    def matmul(self, x, w, bias=None):
        return self._op(x, lambda x: x @ w if bias is None else x @ w + bias)

    def element_wise(self, w, fn=lambda w: w):
        return self._op(None, lambda _: fn(w))

    def conv(self, x, kernel, bias=None, strides=None, padding='SAME'):
        strides = strides or (1,) * (x.ndim - 2)
        return self._op(
            x,
            lambda x: self._convolve(x, kernel, strides, padding) + (0.0 if bias is None else bias),
        )

    def sparse_matmul(self, x, data, mask, bias=None):
        """``mask`` is the fixed structure, a boolean array; ``data`` its entries row by row."""
        return self._op(
            x, lambda x: x @ self._scatter(data, mask) + (0.0 if bias is None else bias)
        )

    def lora_matmul(self, x, B, A, alpha=1.0, bias=None):
        return self._op(x, lambda x: alpha * (x @ B @ A) + (0.0 if bias is None else bias))

    # -- mixing equations: one position reads another ----------------------------------------------

    def dot(self, x, w):
        return self._mix(lambda x, w: x @ w, x, w)

    def roll(self, x, shift):
        return self._mix(lambda x: self.xp.roll(x, shift, -1), x)

    def mean(self, x):
        return self._mix(lambda x: self.xp.mean(x, -1, keepdims=True), x)

    def cumsum(self, x):
        return self._mix(lambda x: self.xp.cumsum(x, -1), x)

    def mixing(self, fn, *args):
        """``fn`` of arrays, in which positions meet from its first equation to its last."""
        return self._mix(fn, *args)

    def softmax(self, x, read):
        """The sum alone is mixing; ``read`` is ``x`` as that sum reads it."""
        return self.exp(x) / self._mix(lambda x: self.exp(x).sum(-1, keepdims=True), read)

    def norm(self, x):
        return self._mix(lambda x: self.sqrt((x**2).sum(-1, keepdims=True)), x)

    def logsumexp(self, x):
        return self._mix(lambda x: self.log(self.exp(x).sum(-1, keepdims=True)), x)

    def highest(self, x):
        return self._mix(lambda x: self.xp.max(x, -1, keepdims=True), x)

    def pick(self, x, i):
        """The entry at a position that is known only when the step runs."""
        return self._mix(lambda x: self._slice(x, i, 1), x)

    # -- element-wise functions and data movement --------------------------------------------------

    def concatenate(self, arrays, axis=-1):
        return self.xp.concatenate(arrays, axis)

    def split(self, x, n):
        return self.xp.split(x, n, -1)

    def flip(self, x):
        return self.xp.flip(x, -1)

    def shift(self, x, n):
        """A ``roll`` that is known to bring every position back to its own place, or to a place of
        its own.
        """
        return self.xp.roll(x, n, -1)

    def part(self, x, start, size):
        return self._slice(x, start, size)

    def softplus(self, x):
        return self.xp.log1p(self.exp(x))

    # -- for the subclasses ------------------------------------------------------------------------

    def constant(self, a):
        """``a`` without its derivative."""
        raise NotImplementedError

    def _read(self, a):
        return self.constant(a) if self.reads == 'constant' and a is not None else a

    def _op(self, x, op):
        return self._apply(0.0 * np.nan_to_num(x) if self.idle and x is not None else x, op)

    def _apply(self, x, op):
        return op(self._read(x))

    def _mix(self, fn, *args):
        return fn(*map(self._read, args))


def _heaviside(v):
    return (v > 0).astype(v.dtype)


def _selected(v):  # the same as IREE takes it in front of a product
    return jnp.where(v > 0, jnp.ones_like(v), jnp.zeros_like(v))


_spike_jvp = jax.custom_jvp(_selected)
_spike_jvp.defjvp(
    lambda primals, tangents: (_selected(*primals), surrogate(*primals) * tangents[0])
)

_spike_vjp = jax.custom_vjp(_heaviside)
_spike_vjp.defvjp(lambda v: (_heaviside(v), v), lambda v, g: (surrogate(v) * g,))

_eased_jvp = jax.custom_jvp(lambda x: x)
_eased_jvp.defjvp(lambda primals, tangents: (primals[0], EASE * tangents[0]))

_eased_vjp = jax.custom_vjp(lambda x: x)
_eased_vjp.defvjp(lambda x: (x, None), lambda _, g: (EASE * g,))


class JaxOps(JaxFlow, Ops):
    """Reverse mode: a constant is a ``stop_gradient``."""

    xp = jnp
    constant = staticmethod(jax.lax.stop_gradient)
    sigmoid = staticmethod(jax.nn.sigmoid)
    relu = staticmethod(jax.nn.relu)
    abs = staticmethod(jnp.abs)

    spike, spike_by_vjp = staticmethod(_spike_jvp), staticmethod(_spike_vjp)
    eased, eased_by_vjp = staticmethod(_eased_jvp), staticmethod(_eased_vjp)

    def put(self, x, index, value):
        return x.at[index].set(value)

    def _slice(self, x, start, size):
        return jax.lax.dynamic_slice_in_dim(x, start, size, -1)

    def _convolve(self, x, kernel, strides, padding):
        return jax.lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=CONV_DIMENSIONS[x.ndim]
        )

    def _scatter(self, data, mask):
        return jnp.zeros(mask.shape, data.dtype).at[np.nonzero(mask)].set(data)


class NumpyOps(NumpyFlow, Ops):
    """Complex step: the imaginary part carries one directional derivative, so a constant is the
    real part.
    """

    xp = np

    @staticmethod
    def constant(a):
        return np.real(a)

    def sigmoid(self, x):
        return 1.0 / (1.0 + np.exp(-x))

    def relu(self, x):
        return np.where(positive(x), x, 0.0)

    def abs(self, x):
        return np.where(positive(-x), -x, x)

    def spike(self, v):
        return positive(v) + 1j * surrogate(np.real(v)) * np.imag(v)

    spike_by_vjp = spike

    def eased(self, x):
        return np.real(x) + 1j * EASE * np.imag(x)

    eased_by_vjp = eased

    def put(self, x, index, value):
        x = np.array(x, np.result_type(x, value))
        x[index] = value
        return x

    def _slice(self, x, start, size):
        return x[..., int(start) : int(start) + size]

    def _convolve(self, x, kernel, strides, padding):
        window = kernel.shape[:-2]
        extents = [
            _extent(n, k, s, padding)
            for n, k, s in zip(x.shape[1:-1], window, strides, strict=True)
        ]
        x = np.pad(x, [(0, 0), *(pad for _, pad in extents), (0, 0)])
        y = 0.0
        for offset in np.ndindex(*window):
            taken = [
                slice(o, o + s * (n - 1) + 1, s)
                for o, s, (n, _) in zip(offset, strides, extents, strict=True)
            ]
            y = y + x[(slice(None), *taken)] @ kernel[offset]
        return y

    def _scatter(self, data, mask):
        w = np.zeros(mask.shape, data.dtype)
        w[np.nonzero(mask)] = data
        return w


def _extent(n: int, k: int, stride: int, padding: str) -> tuple[int, tuple[int, int]]:
    """Output size of a convolution along one axis, and the padding before and after it."""
    if padding == 'VALID':
        return (n - k) // stride + 1, (0, 0)
    size = -(-n // stride)
    total = max((size - 1) * stride + k - n, 0)
    return size, (total // 2, total - total // 2)


def positive(x):
    """Whether the real part is above zero; the product of two complex steps of 1e-30, which they
    leave there, counts as zero.
    """
    return np.real(x) > 1e-50
