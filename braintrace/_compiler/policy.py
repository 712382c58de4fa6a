"""How the compiler treats each construct of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from .._signatures import is_int, public
from ..errors import OptionError

CHOICES = {'checkpoint': ('keep', 'inline'), 'linear_loops': ('auto', 'sequential')}
CONSTRUCTS = ('cond', 'scan', 'while_loop', 'custom_rule', 'shard_map')


@dataclass(frozen=True)
class Policy:
    """How a step is compiled, where a construct holds an op or lies between hidden states.

    - ``strict``: every lost or approximated path, and every unused parameter, is an error. An op
      that reads a hidden state is none: the rules leave that out by their nature.
    - ``unroll``: loops up to this length are unrolled; longer ones have one trace for all
      iterations.
    - ``refuse``: the constructs, a tuple, that are a :class:`braintrace.errors.NotSupportedError`
      which names their place. Elsewhere of a ``'cond'`` every branch is evaluated, and no gradient
      meets the values of one not taken; a ``'scan'`` is unrolled or stays a loop; a
      ``'while_loop'`` that works position by position is replaced by its forward derivative; an op
      inside ``custom_jvp`` or ``custom_vjp`` (``'custom_rule'``) has the same-step gradient of the
      user's rule; the body of a ``'shard_map'`` is mapped over the axes of the mesh.
    - ``checkpoint``: ``'keep'`` recomputes in the backward pass, ``'inline'`` stores instead.
    - ``linear_loops``: how states with ``h' = A h + b`` at each position, ``A`` and ``b`` made of
      no state of theirs, run over time, and signals in the same way back. ``'auto'``: lowered for a
      GPU or a TPU in a ``jax.lax.associative_scan``, at most three states that read each other.
      It multiplies the ``A`` of many steps, which can overflow where the states themselves do not;
      ``'sequential'``: step by step everywhere.
    - ``mark``: a model that applies no braintrace op learns as it is. ``'auto'`` marks every
      parameter, a predicate ``(path, leaf) -> bool`` those that it chooses, ``path`` a tuple of
      strings; None marks nothing. Where a function of these parameters meets a value that changes,
      the equation becomes the op that does the same: a product of any layout, a convolution, a
      lookup of rows, and every position-wise equation. ``report.diagnostics`` has a line for each;
      one that no op can do keeps the current step's gradient, and ``strict`` refuses it. Ops that
      are in the model stay.
    - ``batched``: paths of hidden states whose axis 0 is the batch though the step does not show
      it. A reset of single lanes puts back only states of which it is known which axis that is.

    - ``groups``: names of groups of states, a dict name -> path of a state of the group. Reports,
      messages and the state of a trace have the name in the place of the group's paths.

    >>> import braintrace
    >>> braintrace.Policy(unroll=0)
    Policy(unroll=0)
    >>> braintrace.Policy(checkpoint='ignore')
    Traceback (most recent call last):
    braintrace.errors.OptionError: checkpoint is 'ignore'; choose one of ('keep', 'inline').
    """

    strict: bool = False
    unroll: int = 8
    refuse: tuple[str, ...] = ()
    checkpoint: Literal['keep', 'inline'] = 'keep'
    linear_loops: Literal['auto', 'sequential'] = 'auto'
    mark: str | Callable | None = None
    batched: tuple[str, ...] = ()
    groups: Mapping[str, str] | tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise OptionError(f'{name} is {value!r}; choose one of {choices}.')
        if not isinstance(self.refuse, tuple) or not {*self.refuse} <= {*CONSTRUCTS}:
            raise OptionError(f'refuse is {self.refuse!r}; give a tuple of some of {CONSTRUCTS}.')
        if not isinstance(self.strict, bool):
            raise OptionError(f'strict is {self.strict!r}; give True or False.')
        if not is_int(self.unroll, 0):
            raise OptionError(
                f'unroll is {self.unroll!r}; give an int >= 0, the length up to which loops are '
                'unrolled.'
            )
        if self.mark is not None and self.mark != 'auto' and not callable(self.mark):
            raise OptionError(
                f"mark is {self.mark!r}; give None, 'auto', or a function (path, leaf) -> bool "
                'that chooses parameters.'
            )
        if not isinstance(self.batched, tuple) or not all(
            isinstance(path, str) for path in self.batched
        ):
            raise OptionError(
                f'batched is {self.batched!r}; give a tuple of paths of hidden states, such as '
                "('count',)."
            )

        groups = self.groups.items() if isinstance(self.groups, Mapping) else self.groups
        if not isinstance(groups, Iterable) or not all(map(_is_name_of_path, groups)):
            raise OptionError(
                f'groups is {self.groups!r}; give a dict of names without a comma, each with the '
                "path of a state of its group, such as {'cells': 'neurons/V'}."
            )
        object.__setattr__(self, 'groups', tuple(groups))  # so that it has a hash

    def __repr__(self) -> str:
        """What is not as by default."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        shown = (f'{field.name}={value!r}' for field, value in given if value != field.default)
        return f'Policy({", ".join(shown)})'

    @property
    def at_once(self) -> bool:
        """Whether a loop over time may be lowered to what a platform runs fastest."""
        return self.linear_loops == 'auto'

    def marking(self, mark: str | Callable | None) -> Policy:
        """This policy with ``mark``; None leaves it as it is."""
        return self if mark is None else replace(self, mark=mark)


def _is_name_of_path(pair) -> bool:
    of_two = isinstance(pair, tuple) and len(pair) == 2
    return of_two and all(isinstance(text, str) and text for text in pair) and ',' not in pair[0]


Policy.__init__ = public('Policy')(Policy.__init__)  # type: ignore[method-assign]
DEFAULT = Policy()
