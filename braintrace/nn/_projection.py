"""A projection: weights, the synapses after them, and the current that these drive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import numpy as np

from .._signatures import ShowsArguments
from ..errors import EtpShapeError, OptionError
from ._docs import Documented
from ._synapses import COBA, CUBA, STP, DualExpon, Expon


class Projection(Documented, ShowsArguments, brainstate.nn.Module):
    r"""The way of spikes from one population to another: weights, synapses, current.

    .. math:: I_t = \mathrm{out}(g_t, V_{t-1}) \qquad
        g_t = \mathrm{syn}(\mathrm{comm}(\mathrm{stp}(s_t)))

    The synapses and the neurons after them are one group, so the weights' trace has g and V (S = 2
    for :class:`Expon` before a LIF, 3 for :class:`DualExpon`). D_RTRL is exact for the weights
    of a projection that its targets do not reach, directly or through others. The states of ``stp``
    are before the weights, at the positions of the units that fire: they belong to the group
    of these units, or are a group of their own if the spikes are an input. V is the potential as
    the neurons hold it, before the reset of those that fired.

    Parameters
    ----------
    comm : Module or function
        The weights: a layer such as :class:`Linear`, ``SignedWLinear``, ``SparseLinear``.
    syn : Module
        The synapses at the targets: :class:`Expon` or :class:`DualExpon`, of the size that ``comm``
        gives.
    out : Module, optional
        :class:`CUBA`, where weights carry the sign (``SignedWLinear(..., w_sign=-1)`` inhibits), or
        :class:`COBA`, where E does and weights are not negative. ``None``: the projection returns
        g.
    stp : Module, optional
        :class:`STP`, of the size that ``comm`` reads.

    Raises
    ------
    OptionError
        A part cannot be called or is in the place of another, or negative signs meet COBA.
    EtpShapeError
        The sizes of two parts do not fit.

    Examples
    --------
    Leaky neurons after inhibitory synapses; the conductance is counted in units of the leak.

    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import COBA, LIF, Expon, Linear, Projection
    >>> neurons = LIF(5, tau=20 * u.ms, V_th=-50 * u.mV, V_rest=-65 * u.mV, V_reset=-65 * u.mV)
    >>> inhibition = Projection(Linear(3, 5), Expon(5, tau=8 * u.ms), COBA(E=-80 * u.mV))
    >>> for module in (neurons, inhibition):
    ...     _ = brainstate.nn.init_all_states(module, batch_size=2)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     I = inhibition(jnp.ones((2, 3)), neurons.V.value)
    ...     neurons(I).shape
    (2, 5)
    """

    def __init__(
        self,
        comm: Callable,
        syn: Callable,
        out: Callable | None = None,
        stp: Callable | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.comm, self.syn, self.out, self.stp = comm, syn, out, stp
        self._check_parts()
        for size, end in (('in_size', comm if stp is None else stp), ('out_size', syn)):
            if (found := shape_of(end, size)) is not None:
                setattr(self, size, found)
        self._check_sizes('comm', 'out_size', 'syn')
        self._check_sizes('stp', 'out_size', 'comm')

    def update(self, x: Any, V: Any = None) -> Any:
        """Lead spikes ``x`` of shape ``in_size`` or ``(B, *in_size)`` to a current of shape
        ``out_size`` or ``(B, *out_size)``; ``V`` is the potential of the targets, for
        :class:`COBA`.
        """
        g = self.syn(self.comm(x if self.stp is None else self.stp(x)))
        return g if self.out is None else self.out(g, V)

    def _check_parts(self) -> None:
        for part, (kinds, example) in PARTS.items():
            found = getattr(self, part)
            absent = found is None and part in ('out', 'stp')
            misplaced = isinstance(found, SYNAPTIC) and not isinstance(found, kinds)
            if isinstance(found, type) or misplaced or not (callable(found) or absent):
                raise OptionError(
                    f'Projection: {part} is {found!r}; give a module or a function, such as '
                    f'{example}.'
                )
        signs = getattr(self.comm, 'w_sign', None)
        if isinstance(self.out, COBA) and signs is not None and (np.asarray(signs) < 0).any():
            raise OptionError(
                'Projection: comm has inhibitory signs (w_sign), and out is COBA, where a negative '
                'conductance turns the effect of E over. Leave w_sign out and give inhibition an '
                'E below the resting potential, or use CUBA.'
            )

    def _check_sizes(self, first: str, size: str, second: str) -> None:
        given = shape_of(getattr(self, first), size)
        wanted = shape_of(getattr(self, second), 'in_size')
        if given is not None and wanted is not None and given != wanted:
            raise EtpShapeError(
                f'Projection: {first} ({type(getattr(self, first)).__name__}) gives shape {given}, '
                f'but {second} ({type(getattr(self, second)).__name__}) takes {wanted}.'
            )


SYNAPTIC = Expon, DualExpon, COBA, CUBA, STP
PARTS: dict[str, tuple[tuple, str]] = {  # those of SYNAPTIC that may be there, and an example
    'comm': ((), 'Linear(80, 100)'),
    'syn': ((Expon, DualExpon), 'Expon(100, tau=5.0)'),
    'out': ((COBA, CUBA), 'COBA(E=0.0), or None'),
    'stp': ((STP,), 'STP(80), or None'),
}


def shape_of(module: Any, size: str) -> tuple | None:
    """A module's ``in_size`` or ``out_size`` as a shape, if it says so."""
    found = getattr(module, size, None)
    return (found,) if isinstance(found, int) else found if found is None else tuple(found)
