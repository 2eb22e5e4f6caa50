"""Walks over nested optimizers, and plans which of them reduces.

Each call of an outermost optimizer makes a `StackPlan`. Optimizers keep no
plan, since an optimizer inside a TowerOptimizer may later be used alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import commit
from tf_xshard.reduction import loss_records


def children(optimizer: Any) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers that `optimizer` passes gradients to."""
    if hasattr(optimizer, "inner_optimizer"):
        yield optimizer.inner_optimizer
    elif hasattr(optimizer, "optimizers"):
        yield from optimizer.optimizers


def descendants(optimizer: Any) -> Iterator[keras.optimizers.Optimizer]:
    """Yields `optimizer` and every optimizer that its gradients can reach."""
    yield optimizer
    for child in children(optimizer):
        yield from descendants(child)


def with_local_optimizers(
    optimizer: Any,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields `descendants`, and local optimizers after each AGNOptimizer."""
    for one in descendants(optimizer):
        yield one
        local = getattr(one, "local_optimizer", None)
        if local is not None:
            yield from descendants(local)


def is_multi_optimizer(optimizer: Any) -> bool:
    """Returns whether this is a MultiOptimizer (new in Keras 3.15)."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether this is one of tf_xshard's optimizers."""
    return getattr(optimizer, "is_tf_xshard_wrapper", False)


def wrappers(optimizer: Any) -> list[Any]:
    """Returns tf_xshard's optimizers among `descendants`."""
    return [one for one in descendants(optimizer) if is_wrapper(one)]


def updating(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update variables, and count updates."""
    return [
        one
        for one in with_local_optimizers(optimizer)
        if not any(children(one))
    ]


def outermost_wrappers(optimizer: Any) -> Iterator[Any]:
    """Yields tf_xshard's optimizers that have no wrapper around them."""
    if is_wrapper(optimizer):
        yield optimizer
        return
    for child in children(optimizer):
        yield from outermost_wrappers(child)


def has_loss_scale_optimizer(optimizer: Any) -> bool:
    """Returns whether a LossScaleOptimizer is among `descendants`."""
    return any(
        isinstance(one, keras.optimizers.LossScaleOptimizer)
        for one in descendants(optimizer)
    )


def scales_loss_before_reduction(optimizer: Any) -> bool:
    """Returns whether gradients reach a LossScaleOptimizer before a wrapper."""
    if is_wrapper(optimizer):
        return False
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or any(
        scales_loss_before_reduction(child) for child in children(optimizer)
    )


def _unreduced(optimizer: Any) -> list[Any]:
    """Returns the innermost optimizers that have no wrapper around them."""
    if is_wrapper(optimizer):
        return []
    found = list(children(optimizer))
    if not found:
        return [optimizer]
    return [one for child in found for one in _unreduced(child)]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Describes the part of one wrapper in a stack."""

    wrapper: Any
    # Whether the wrapper reduces gradients over replicas.
    reduces: bool
    # The groups over which the wrapper reduces, or would reduce; None for one
    # group of all replicas.
    group_assignment: group_assignment_lib.GroupAssignment | None


class StackPlan:
    """Divides the work in the stack of an outermost optimizer."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.loss_normalization = _setting(root, "loss_normalization", "global")
        # True if all replicas skip a step in which a gradient is not finite.
        self.skip_nonfinite = _setting(root, "skip_nonfinite", False)
        self.max_consecutive_skips = _setting(
            root, "max_consecutive_skips", None
        )
        if self.max_consecutive_skips is not None and not self.skip_nonfinite:
            raise ValueError(
                "max_consecutive_skips limits how many steps are skipped, so it"
                " needs skip_nonfinite=True."
            )
        self._parts = {id(one.wrapper): one for one in _parts(root)}
        self._refuse_reductions_of_local_variables()
        if self.skip_nonfinite:
            self._refuse_partial_skips()
        # The losses of the gradients that the running call applies.
        self.losses: list[loss_records.LossRecord] = []
        # True if an earlier call of the traced function took its losses.
        self.other_call_has_losses = False
        # What the writes of the running call wait for.
        self.commit = commit.Commit()

    def _refuse_reductions_of_local_variables(self) -> None:
        reducing = [one.wrapper for one in self._parts.values() if one.reduces]
        for one in reducing:
            others = [
                other
                for other in reducing
                if other is not one
                and (other in wrappers(one) or one in wrappers(other))
            ]
            if one.has_local_variables and others:
                raise ValueError(
                    f"{one.name} has local variables, but {others[0].name},"
                    " inside or around it, reduces the gradients of all"
                    " variables. Only one optimizer of a stack may reduce if"
                    " there are local variables."
                )

    def _refuse_partial_skips(self) -> None:
        reducing = [one.wrapper for one in self._parts.values() if one.reduces]
        for one, other in itertools.combinations(reducing, 2):
            if other not in wrappers(one):
                raise ValueError(
                    f"skip_nonfinite=True: {one.name} and {other.name} reduce"
                    " the gradients of different variables, so one could skip a"
                    " step that the other takes. Wrap the MultiOptimizer in one"
                    " CrossShardOptimizer, and don't wrap its optimizers."
                )
        for one in descendants(self.root):
            if isinstance(one, keras.optimizers.LossScaleOptimizer) and any(
                inside in reducing for inside in wrappers(one)
            ):
                raise ValueError(
                    "skip_nonfinite=True: a LossScaleOptimizer is around"
                    f" {wrappers(one)[0].name}, and would not see an overflow"
                    " in the reduction. Put it inside: CrossShardOptimizer("
                    "keras.optimizers.LossScaleOptimizer(inner))."
                )

    def has(self, optimizer: Any) -> bool:
        """Returns whether an optimizer is in the stack."""
        return any(one is optimizer for one in with_local_optimizers(self.root))

    def undo(self, wrapper: Any, site: site_lib.Site) -> int:
        """Returns N if this wrapper undoes the 1/N of the loss, else 1."""
        # Only the outermost wrapper undoes it, once.
        if wrapper is self.root and self.loss_normalization == "global":
            return site.num_replicas
        return 1

    def checks_finite(self, wrapper: Any) -> bool:
        """Returns whether a wrapper checks gradients and counts skips."""
        # A MultiOptimizer may have created the wrapper after this plan.
        part = self._parts.get(id(wrapper))
        return self.skip_nonfinite and part is not None and part.reduces

    def reducing(
        self,
    ) -> list[tuple[Any, group_assignment_lib.GroupAssignment | None]]:
        """Returns the wrappers that reduce, with their groups."""
        return [
            (part.wrapper, part.group_assignment)
            for part in self._parts.values()
            if part.reduces
        ]

    def groups(
        self, wrapper: Any, site: site_lib.Site
    ) -> group_assignment_lib.GroupAssignment:
        """Returns the groups over which a wrapper reduces."""
        part = self._parts[id(wrapper)]
        if not part.reduces:
            # Another wrapper reduces instead, so each replica is a group.
            return group_assignment_lib.GroupAssignment.contiguous(
                site.num_replicas, 1
            )
        return group_assignment_lib.for_replicas(
            part.group_assignment,
            site.num_replicas,
            f"the strategy {type(site.strategy).__name__}",
        )

    def take_losses(self, wrapper: Any, site: site_lib.Site) -> None:
        """Takes the records of a call's losses, and checks that they fit."""
        if wrapper is not self.root:
            return
        self.other_call_has_losses = loss_records.were_taken(site)
        self.losses = loss_records.take(site)
        self.check_losses(self.losses, site)

    def check_losses(
        self, losses: Sequence[loss_records.LossRecord], site: site_lib.Site
    ) -> None:
        """Raises ValueError if losses and optimizers do not fit together."""
        for one in losses if site.num_replicas > 1 else ():
            self._check_loss(one, site)

    def _check_loss(
        self, loss: loss_records.LossRecord, site: site_lib.Site
    ) -> None:
        if self.loss_normalization != "global":
            raise ValueError(
                f"GlobalMean({loss.name}) is divided by the number of replicas,"
                f" as Keras's losses are, but {self.root.name} has"
                ' loss_normalization="replica". Leave loss_normalization out.'
            )
        alone = group_assignment_lib.GroupAssignment.contiguous(
            site.num_replicas, 1
        )
        # Between exchanges, an AGNOptimizer applies the gradients that it gets.
        groups = group_assignment_lib.joined(
            [alone]
            + [
                self.groups(wrapper, site)
                for wrapper, _ in self.reducing()
                if not hasattr(wrapper, "local_optimizer")
            ]
        )
        if group_assignment_lib.same_groups(groups, loss.groups):
            return
        if groups.group_size == 1:
            remedy = (
                "Each replica's gradient is applied separately, as under"
                " AGNOptimizer, so pass the loss itself to compile(), without"
                " GlobalMean."
            )
        else:
            remedy = f"Pass GlobalMean(loss, {groups.to_list()})."
        raise ValueError(
            f"GlobalMean({loss.name}) is the mean over the groups"
            f" {loss.groups.to_list()}, but {self.root.name} combines"
            f" gradients over {groups.to_list()}. {remedy}"
        )

    def weight_inside(self, wrapper: Any, site: site_lib.Site) -> int:
        """Returns the weight of the first reduction inside a wrapper."""
        for one in wrappers(wrapper.inner_optimizer):
            if self._parts[id(one)].reduces:
                size = self.groups(one, site).group_size
                return reductions.checked(one.reduction).weight(size)
        return 1


def _parts(optimizer: Any, around: _Part | None = None) -> Iterator[_Part]:
    """Yields the parts of an optimizer's wrappers, outermost first."""
    # `around` is the part of the nearest reducing wrapper around the optimizer.
    if is_wrapper(optimizer):
        part = _part(optimizer, around)
        yield part
        if part.reduces:
            around = part
        if optimizer.is_implicit or not optimizer.has_own_reducer:
            _refuse_partial_reduction(optimizer.inner_optimizer)
    for child in children(optimizer):
        yield from _parts(child, around)


def _part(wrapper: Any, around: _Part | None) -> _Part:
    own = wrapper._given_group_assignment
    if not wrapper.has_own_reducer:
        return _Part(wrapper, False, own)
    if wrapper.is_implicit:
        if around is not None:
            return _Part(wrapper, False, around.group_assignment)
        # A MultiOptimizer may have created wrappers, which reduce instead.
        if wrappers(wrapper.inner_optimizer):
            return _Part(wrapper, False, own)
    if around is not None and own is None and wrapper.follows_groups_around:
        return _Part(wrapper, True, around.group_assignment)
    return _Part(wrapper, True, own)


def _setting(root: Any, name: str, default: Any) -> Any:
    """Returns the one value of a setting in a stack."""
    stack = wrappers(root)
    given = {
        one._given_settings[name]
        for one in stack
        if one._given_settings[name] is not None
    }
    if len(given) > 1:
        raise ValueError(
            f"Nested tf_xshard optimizers need one value of {name}, got"
            f" {sorted(given)} in {[one.name for one in stack]}. Pass {name} to"
            " only one of these optimizers."
        )
    return given.pop() if given else default


def _refuse_partial_reduction(inner: Any) -> None:
    """Checks that all or none of a MultiOptimizer's optimizers reduce."""
    alone = _unreduced(inner)
    if alone and wrappers(inner):
        raise ValueError(
            "Some of MultiOptimizer's optimizers reduce gradients over the"
            f" replicas and others do not: {[one.name for one in alone]}. Wrap"
            " each of them in a CrossShardOptimizer, or none."
        )


# The plan of the outermost optimizer that is running. Calls of inner optimizers
# go through Keras's wrappers and MultiOptimizer, which do not pass a plan on.
_running: contextvars.ContextVar[StackPlan | None] = contextvars.ContextVar(
    "tf_xshard_stack_plan", default=None
)


@contextlib.contextmanager
def running(wrapper: Any) -> Iterator[StackPlan]:
    """Yields the plan of the outermost wrapper while a wrapper runs."""
    plan = _running.get()
    if plan is not None and plan.has(wrapper):
        yield plan
        return
    plan = StackPlan(wrapper)
    token = _running.set(plan)
    try:
        yield plan
    finally:
        _running.reset(token)
