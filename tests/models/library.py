"""The namespace of the library: ETP ops are ``braintrace``'s, and every annotation is the
identity.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from saiunit import sparse

import braintrace
from tests.models.flow import LibraryFlow
from tests.models.ops import CONV_DIMENSIONS, JaxOps


class LibraryOps(LibraryFlow, JaxOps):
    """What the library sees: it must find by itself what the annotations tell the oracles."""

    def matmul(self, x, w, bias=None):
        return braintrace.matmul(x, w, bias)

    def element_wise(self, w, fn=lambda w: w):
        return braintrace.element_wise(w, fn)

    def conv(self, x, kernel, bias=None, strides=None, padding='SAME'):
        return braintrace.conv(
            x,
            kernel,
            bias,
            strides=strides or (1,) * (x.ndim - 2),
            padding=padding,
            dimension_numbers=CONV_DIMENSIONS[x.ndim],
        )

    def sparse_matmul(self, x, data, mask, bias=None):
        return braintrace.sparse_matmul(
            x, data, sparse_mat=_structure(mask.shape, mask.tobytes(), str(data.dtype)), bias=bias
        )

    def lora_matmul(self, x, B, A, alpha=1.0, bias=None):
        return braintrace.lora_matmul(x, B, A, alpha=alpha, bias=bias)

    def softmax(self, x, read):
        return jax.nn.softmax(x)

    def norm(self, x):
        return jnp.linalg.norm(x, axis=-1, keepdims=True)

    def logsumexp(self, x):
        return jax.nn.logsumexp(x, -1, keepdims=True)


@functools.cache
def _structure(shape: tuple[int, int], mask: bytes, dtype: str) -> sparse.CSR:
    """The CSR matrix of a boolean mask, made once and outside of any trace."""
    mask = np.frombuffer(mask, bool).reshape(shape)
    starts = np.concatenate([[0], np.cumsum(mask.sum(1))]).astype(np.int32)
    return sparse.CSR(
        (np.ones(mask.sum(), dtype), np.nonzero(mask)[1].astype(np.int32), starts), shape=shape
    )
