"""ETP primitives: JAX primitives with the rules of eligibility trace propagation."""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Primitive
from ..errors import MissingRuleError, RuleContractError
from ._jax_rules import derive_jax_rules, derived_rule, lower_on, of_weights, over_axis
from ._layouts import output_trace
from ._spec import (
    CONTRACTS,
    REQUIRED_SLOTS,
    ETPPrimitiveSpec,
    check_callable,
    check_described,
    whole_impl,
)

ETP_PRIMITIVES: set[ETPPrimitive] = set()
ETP_PRIMITIVE_SPECS: dict[ETPPrimitive, ETPPrimitiveSpec] = {}


class RuleTable(Mapping):
    """The rules in one slot by primitive: what each holds as its own."""

    def __init__(self, slot: str):
        self.slot = slot

    def __getitem__(self, primitive: ETPPrimitive) -> Callable:
        if primitive not in ETP_PRIMITIVES:
            raise KeyError(primitive)
        return primitive.own_rules[self.slot]

    def __iter__(self) -> Iterator[ETPPrimitive]:
        return (p for p in ETP_PRIMITIVES if self.slot in p.own_rules)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class BatchedPrimitives(Set):
    """The registered primitives whose x and y have independent samples along axis 0."""

    def __contains__(self, primitive: object) -> bool:
        return primitive in ETP_PRIMITIVES and primitive.batched

    def __iter__(self) -> Iterator[ETPPrimitive]:
        return (p for p in ETP_PRIMITIVES if p.batched)

    def __len__(self) -> int:
        return sum(1 for _ in self)


RULE_SLOTS = {slot: RuleTable(slot) for slot in CONTRACTS}
ETP_RULES_YW_TO_W = RULE_SLOTS['yw_to_w']
ETP_RULES_XY_TO_DW = RULE_SLOTS['xy_to_dw']
ETP_RULES_INIT_DRTRL = RULE_SLOTS['init_drtrl']
ETP_RULES_INIT_PP = RULE_SLOTS['init_pp']
BATCHED_PRIMITIVES = BatchedPrimitives()


class PlatformTable(UserDict):
    """Platform -> function, filled in by ``table[platform] = fn``; 'gpu' sets each kind of GPU."""

    PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
    GPU = ('cuda', 'rocm')

    def __init__(self, what: str, on_set: Callable[[str, Callable], None]):
        super().__init__()
        self._what, self._on_set = what, on_set

    def __setitem__(self, platform: str, fn: Callable) -> None:
        if platform not in (*self.PLATFORMS, 'gpu'):
            raise RuleContractError(
                f'{self._what}: there is no platform {platform!r}; choose one of '
                f'{", ".join(self.PLATFORMS)}, or gpu for {" and ".join(self.GPU)}.'
            )
        check_callable(f'{self._what}[{platform!r}]', fn)
        for name in self.GPU if platform == 'gpu' else (platform,):
            self._on_set(name, fn)
            super().__setitem__(name, fn)


def _registering(slot: str) -> Callable[[ETPPrimitive, Callable], Callable]:
    """The method ``register_<slot>``."""

    def register(self: ETPPrimitive, rule: Callable) -> Callable:
        self._register({slot: rule})
        return rule

    arguments, result, meaning = CONTRACTS[slot]
    register.__doc__ = f'Register ``{arguments} -> {result}``: {meaning}.'
    register.__name__ = f'register_{slot}'
    register.__qualname__ = f'ETPPrimitive.register_{slot}'
    return register


class ETPPrimitive(Primitive):
    """A JAX primitive ``y = impl(x, *trainables)`` whose trainables can carry an eligibility trace.

    :func:`braintrace.register_primitive` and :func:`braintrace.register_primitive_spec` make one
    of its ``spec``. Abstract evaluation, lowering, JVP, transpose and batching derive from
    ``impl``. ``own_rules`` has the trace rules by slot. A mapped primitive has none: it derives its
    rules from its original's on demand.

    Two declarations keep a primitive's identity under ``jax.vmap`` over x alone: ``batched_form``,
    the primitive that does the same for a leading batch axis, and ``fold_axes(params)``, the batch
    axes ``(in x, in y)`` of independent samples or None. Any other mapping binds ``mapped(axes)``,
    a primitive that holds its ``original`` and the mapped ``axes``; it is ``batched`` where x alone
    is mapped. ``gradient_by_group(number, x, d, weights, **params)`` may give ``xy_to_dw`` of
    groups of samples apart, where devices that share the batch had better not map it over groups.
    ``represent(x, weights)`` may give the numbers that an input of integers means in a
    factor. ``op`` is the ``EtpOp`` to which the primitive belongs, or None.

    ``lowering[platform] = fn(*operands, **params)`` replaces ``impl`` on a platform.
    ``trace_kernel[platform] = fn(D, trace, D_f, x, weights, **params) -> trace`` replaces the
    update of D_RTRL's trace by a single step; D is ``(*y, S, S)``, D_f ``(*y, S)``, and each array
    of the trace, a dict by trainable, has the states in its last axis.
    ``trace_reader[platform] = fn(onto, signal, trace, alive, **params)`` adds ``< signal , e >`` to
    gradients, and ``trace_writer[platform] = fn(p, blocks, trace, alive, **params)`` writes steps:
    ``p e`` and the sums of ``x_k (x) q_k`` over blocks ``(x, q)`` of rows. Signals and traces have
    a value for each state; samples without the flag ``alive`` count as zero. Both return a dict of
    the trainables for which they do better than the default. Setting any of these clears JAX's
    caches.

    Raises
    ------
    MissingRuleError
        :meth:`rule` is asked for a rule that is not there.
    RuleContractError
        A slot is unknown, a rule is no function, or a mapped form is given a rule or a kernel.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> primitive = braintrace.register_primitive('doc_times', lambda x, w: x * w, batched=True)
    >>> primitive.bind(jnp.ones((2, 3)), jnp.ones(3)).shape, primitive.root is primitive
    ((2, 3), True)
    """

    def __init__(
        self,
        spec: ETPPrimitiveSpec,
        original: ETPPrimitive | None = None,
        axes: tuple[int | None, ...] | None = None,
    ):
        super().__init__(spec.name)
        self.spec, self.impl_fn, name = spec, whole_impl(spec), spec.name
        self.batched, self.gradient_enabled = spec.batched, spec.gradient_enabled
        self.trainable_invars_fn = spec.trainable_invars_fn
        self.x_invar_index, self.y_outvar_index = spec.x_invar_index, spec.y_outvar_index
        self.structure = tuple(spec.structure)
        self.batched_form: ETPPrimitive | None = None
        self.fold_axes: Callable[[dict], tuple[int, int] | None] | None = None
        self.gradient_by_group: Callable | None = None
        self.represent: Callable | None = None
        self.op: Any = None
        self.own_rules: dict[str, Callable] = {} if original else spec.rules
        self.original, self.axes = original, axes
        self.lowering = PlatformTable(f'the lowering of {name!r}', self._lower)
        self.trace_kernel = PlatformTable(f'the trace kernel of {name!r}', self._check_kernel)
        self.trace_reader = PlatformTable(f'the trace reader of {name!r}', self._check_kernel)
        self.trace_writer = PlatformTable(f'the trace writer of {name!r}', self._check_kernel)
        self._several: bool | None = None
        self._mapped: dict[tuple, ETPPrimitive] = {}
        derive_jax_rules(self)

    def __call__(self, *operands, **params):
        """Bind the primitive, as ``bind`` does."""
        return self.bind(*operands, **params)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        present = [slot for slot in RULE_SLOTS if self.optional_rule(slot) is not None]
        missing = [slot for slot in REQUIRED_SLOTS if slot not in present]
        parts = [self.name]
        parts += [flag for flag in ('batched', 'gradient_enabled') if getattr(self, flag)]
        parts += [f'{self.original.name} mapped over {self.axes}'] if self.original else []
        parts += [f'rules: {", ".join(present) or "none"}']
        tables = {'lowering': self.lowering, 'trace kernel': self.trace_kernel}
        tables |= {'trace reader': self.trace_reader, 'trace writer': self.trace_writer}
        parts += [f'{what} on {", ".join(table)}' for what, table in tables.items() if table]
        parts += [f'missing: {", ".join(missing)}'] if missing and not self.original else []
        return f'ETPPrimitive({"; ".join(parts)})'

    def _lower(self, platform: str, fn: Callable) -> None:
        # forms that were mapped before are lowered again; later ones ask ``lowering``
        lower_on(self, platform, fn)
        for axes, form in self._mapped.items():
            form.lowering[platform] = _mapped_over(fn, axes)
        self._forget()

    def _forget(self) -> None:
        """Clear JAX's caches, once the primitive was used; they can not be cleared for it alone."""
        if self._several is not None:
            jax.clear_caches()

    def _check_kernel(self, platform: str, fn: Callable) -> None:
        if self.original is not None:
            raise RuleContractError(
                f'{self.name!r} is {self.root.name!r} under jax.vmap, where the default update of '
                f'the trace runs. Give {self.root.name!r} the kernel.'
            )
        self._forget()

    def originals(self) -> list[ETPPrimitive]:
        """The primitive of which this one is a mapped form, then that primitive's original, and so
        on.
        """
        return [] if self.original is None else [self.original, *self.original.originals()]

    @property
    def root(self) -> ETPPrimitive:
        """The registered primitive of a mapped form, or this one."""
        return [self, *self.originals()][-1]

    def trainable_invars(self, params: dict) -> dict[str, int]:
        """Trainable name -> operand index, for an equation with these static parameters."""
        return self.spec.resolve_trainable_invars(params)

    def mapped(self, axes: Iterable[int | None]) -> ETPPrimitive:
        """This primitive under ``vmap`` over axis 0 of the operands whose ``axes`` is 0; the same
        object for the same ``axes``.
        """
        axes = tuple(axes)
        if axes not in self._mapped:
            over = [i for i, axis in enumerate(axes) if axis is not None]
            spec = dataclasses.replace(
                self.spec,
                name=f'{self.name}_vmap',
                impl=_mapped_over(self.impl_fn, axes),
                batched=over == [self.x_invar_index],
                reverse=None,
                check=None,
                static=None,
            )
            # its rules derive from the original's, and a further vmap makes a form of this form
            form = ETPPrimitive(spec, self, axes)
            form.fold_axes = lambda params: None
            for platform, fn in self.lowering.items():
                form.lowering[platform] = _mapped_over(fn, axes)
            self._mapped[axes] = form
        return self._mapped[axes]

    def rule(self, slot: str, algorithm: str = 'the caller') -> Callable:
        """The rule in ``slot``. Raises ``MissingRuleError``, which names the primitive, the slot
        and ``algorithm``, where there is none.
        """
        found = self.optional_rule(slot)
        if found is None:
            raise MissingRuleError(self.root.name, slot, algorithm)
        return found

    def optional_rule(self, slot: str) -> Callable | None:
        """The rule in ``slot``, or None; a mapped primitive derives it from its original's."""
        _check_slots(self.name, [slot])
        return self.own_rules.get(slot) if self.original is None else derived_rule(self, slot)

    def by_sample(self, fn: Callable, params: dict, axis: int = 0) -> Callable:
        """Map ``fn(x, d, weights)`` of the root over the axes that a trace keeps apart: mapped
        axes, and samples as batches of one.

        These axes begin at ``axis`` of x and d, and lead in the result.
        """
        if self.original is not None:
            return over_axis(self, self.original.by_sample(fn, params, axis), params, axis)
        if not self.batched:
            return fn

        def one(x, d, weights):
            return fn(*jax.tree.map(lambda a: jnp.expand_dims(a, axis), (x, d)), weights)

        return jax.vmap(one, in_axes=(axis, axis, None))

    def bound_rule(self, slot: str, params: dict, algorithm: str = 'the caller') -> Callable:
        """Bind an equation's static parameters to the rule in ``slot``; the keys of its results are
        checked.

        An ``init_*`` rule gets the parameters that it declares: by name, or all by ``**params``.
        """
        rule, invars = self.rule(slot, algorithm), self.trainable_invars(params)
        # an ``init_*`` rule need not know the parameters that make no difference to its shapes
        if slot.startswith('init_'):
            declared = inspect.signature(rule).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in declared.values()):
                params = {name: value for name, value in params.items() if name in declared}
        bound, op = partial(rule, **params), self.name
        entries = ', '.join(f'{name!r}: array' for name in invars)
        form = f'dicts of arrays by trainable name, {{{entries}}}'

        @wraps(rule)
        def call(*args):
            # a rule in bare arrays, or of other names, fails by one of these: say how to write it
            try:
                result = bound(*args)
            except (AttributeError, KeyError, TypeError) as error:
                raise RuleContractError(
                    f'the rule {slot!r} of {op!r} failed with {type(error).__name__}: {error}. It '
                    f'is called as {slot}{CONTRACTS[slot][0]}, where weights and traces are {form}.'
                ) from error
            found = f'a {type(result).__name__}'
            if slot == 'init_pp':
                expected = (*args[1].aval.shape, args[3])
                if getattr(result, 'shape', None) != expected:
                    found = f'shape {result.shape}' if hasattr(result, 'shape') else found
                    raise RuleContractError(
                        f'the rule {slot!r} of {op!r} returned {found}; expected one array of '
                        f"zeros of shape {expected}: y's shape, then the states."
                    )
            elif not (isinstance(result, Mapping) and set(result) == set(invars)):
                found = f'the keys {sorted(result)}' if isinstance(result, Mapping) else found
                raise RuleContractError(
                    f'the rule {slot!r} of {op!r} returned {found}; trace rules take and return '
                    f'{form}.'
                )
            return result

        return call

    register_yw_to_w = _registering('yw_to_w')
    register_xy_to_dw = _registering('xy_to_dw')
    register_init_drtrl = _registering('init_drtrl')
    register_init_pp = _registering('init_pp')
    register_instant_drtrl = _registering('instant_drtrl')
    register_solve_drtrl = _registering('solve_drtrl')

    def register_etp_rules(self, **rules: Callable | None) -> None:
        """Register several rules by slot name, or none of them if one is refused; None leaves a
        slot alone.
        """
        _check_slots(self.name, rules)
        self._register({slot: rule for slot, rule in rules.items() if rule is not None})

    def _register(self, rules: dict[str, Callable]) -> None:
        for slot, rule in rules.items():
            check_callable(f'the rule {slot!r} of {self.name!r}', rule)
            if self.original is not None:
                raise RuleContractError(
                    f'{self.name!r} is {self.root.name!r} under jax.vmap, and its rules are made '
                    f'from those of {self.root.name!r}. Register {slot!r} there.'
                )
        self.own_rules.update(rules)


def _mapped_over(fn: Callable, axes: tuple[int | None, ...]) -> Callable:
    def mapped(*args, **params):
        return jax.vmap(partial(fn, **params), in_axes=axes)(*args)

    return mapped


def _check_slots(name: str, slots: Iterable[str]) -> None:
    unknown = [slot for slot in slots if slot not in RULE_SLOTS]
    if unknown:
        raise RuleContractError(
            f'{name!r}: no rule slot is called {", ".join(map(repr, unknown))}. The slots are '
            f'{", ".join(RULE_SLOTS)}.'
        )


def register_primitive(
    name: str,
    impl: Callable,
    *,
    batched: bool = False,
    gradient_enabled: bool = False,
    trainable_invars_fn: Callable[[dict], dict[str, int]] | None = None,
    x_invar_index: int | None = 0,
    y_outvar_index: int = 0,
    structure: Sequence[str] = (),
) -> ETPPrimitive:
    """Make an ETP primitive from a plain JAX function, which gives it every JAX rule, and register
    it.

    Give it its trace rules with ``register_etp_rules``; a missing rule is reported when a learner
    needs it.

    Parameters
    ----------
    name, impl : str, function
        The primitive's name, and what it computes.
    batched : bool
        Axis 0 of x and y counts independent samples.
    gradient_enabled : bool
        The op is identity-like: the compiler walks through it.
    trainable_invars_fn : function, optional
        Static parameters of an equation -> {trainable name: operand index}; by default
        ``{'weight': 1}``.
    x_invar_index, y_outvar_index : int
        The index of the untrained operand, None without such an operand, and that of y.
    structure : names
        The last operands that are arrays without a gradient, which no step changes, such as the
        places of sparse entries. Each rule gets them by keyword, with the static parameters.

    Raises
    ------
    RuleContractError
        The name is taken, or the description malformed.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> gain_p = braintrace.register_primitive('doc_gain_p', lambda x, w: x * w, batched=True)
    >>> gain_p.bind(jnp.ones((2, 3)), jnp.ones(3)).shape
    (2, 3)
    >>> braintrace.register_primitive('etp_mm', lambda x, w: x @ w)
    Traceback (most recent call last):
    braintrace.errors.RuleContractError: a primitive called 'etp_mm' is registered already. ...
    """
    if trainable_invars_fn is None:
        trainable_invars_fn = lambda params: {'weight': 1}
    return _registered(
        ETPPrimitiveSpec(
            name,
            impl,
            batched=batched,
            gradient_enabled=gradient_enabled,
            trainable_invars_fn=trainable_invars_fn,
            x_invar_index=x_invar_index,
            y_outvar_index=y_outvar_index,
            structure=structure,
        )
    )


def register_primitive_spec(spec: ETPPrimitiveSpec) -> ETPPrimitive:
    """Register everything that ``spec`` describes and return its primitive; nothing is registered
    if it is refused.

    Raises ``RuleContractError`` for missing rules (all of them named), a rule that is no function,
    a taken name.

    >>> import braintrace
    >>> spec = braintrace.ETPPrimitiveSpec('doc_without_rules', lambda x, w: x * w)
    >>> braintrace.register_primitive_spec(spec)
    Traceback (most recent call last):
    braintrace.errors.RuleContractError: the spec of 'doc_without_rules' lacks yw_to_w, ...
    """
    if not isinstance(spec, ETPPrimitiveSpec):
        raise RuleContractError(f'expected an ETPPrimitiveSpec, found a {type(spec).__name__}.')
    required = (*REQUIRED_SLOTS, 'trainable_invars_fn')
    missing = [name for name in required if getattr(spec, name) is None]
    if missing:
        raise RuleContractError(
            f'the spec of {spec.name!r} lacks {", ".join(missing)}. A spec needs '
            f'{", ".join(required)}; to register a primitive before its rules are written, use '
            '`register_primitive` and `primitive.register_etp_rules(...)`.'
        )
    primitive = _registered(spec)
    ETP_PRIMITIVE_SPECS[primitive] = spec
    return primitive


def _registered(spec: ETPPrimitiveSpec) -> ETPPrimitive:
    # everything is checked before the registration, so that nothing is half registered
    check_described(spec)
    if any(primitive.name == spec.name for primitive in ETP_PRIMITIVES):
        raise RuleContractError(
            f'a primitive called {spec.name!r} is registered already. Choose another name, or keep '
            'the primitive that the first registration returned and give it rules with '
            '`primitive.register_etp_rules(...)`.'
        )
    primitive = ETPPrimitive(spec)
    ETP_PRIMITIVES.add(primitive)
    return primitive


def completed(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """The spec with the rules that every op can derive from its function: ``xy_to_dw`` is its VJP,
    which sums over a batch, and ``init_pp`` has y's shape.
    """
    if spec.trainable_invars_fn is None:
        invars = {'weight': 0 if spec.x_invar_index is None else 1}
        spec = dataclasses.replace(spec, trainable_invars_fn=lambda params: invars)
    forward = of_weights(spec, whole_impl(spec))

    def xy_to_dw(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: forward(x, w, **params), weights)
        return pull(hidden_dim.astype(y.dtype))[0]

    return dataclasses.replace(
        spec, xy_to_dw=spec.xy_to_dw or xy_to_dw, init_pp=spec.init_pp or output_trace
    )


def register_both_forms(
    spec_of: Callable[[bool], ETPPrimitiveSpec], both: bool = True
) -> tuple[ETPPrimitive, ...]:
    """Complete and register the spec for a batch and, if ``both``, that for one sample."""
    before = set(ETP_PRIMITIVES)
    try:
        forms = [register_primitive_spec(completed(spec_of(b))) for b in (True, False)[: 1 + both]]
    except BaseException:  # also an interrupt: all forms are registered, or none
        for primitive in ETP_PRIMITIVES - before:
            ETP_PRIMITIVES.discard(primitive)
            ETP_PRIMITIVE_SPECS.pop(primitive, None)
        raise
    # under ``jax.vmap`` over x alone a batch takes the mapped axis in, and one sample gets a batch
    forms[0].fold_axes = lambda params: (0, 0)
    for single in forms[1:]:
        single.batched_form = forms[0]
    return tuple(forms)


def get_primitive_spec(primitive) -> ETPPrimitiveSpec:
    """The spec that ``primitive`` was registered with.

    Raises ``RuleContractError`` for a primitive that was not registered by a spec.

    >>> import braintrace
    >>> from braintrace import kit
    >>> op = kit.make_elementwise_op('doc_gained', lambda x, w: x * w)
    >>> braintrace.get_primitive_spec(op.primitive).name
    'doc_gained'
    """
    if primitive in ETP_PRIMITIVE_SPECS:
        return ETP_PRIMITIVE_SPECS[primitive]
    what = (
        'was registered without a spec'
        if isinstance(primitive, ETPPrimitive)
        else 'is not an ETP primitive'
    )
    raise RuleContractError(
        f'{str(primitive)!r} {what}; `register_primitive_spec(ETPPrimitiveSpec(...))` registers '
        'one with its spec.'
    )


def is_etp_primitive(primitive) -> bool:
    """Whether this is a registered ETP primitive or the mapped form of one."""
    mapped = isinstance(primitive, ETPPrimitive) and primitive.original is not None
    return mapped or primitive in ETP_PRIMITIVES
