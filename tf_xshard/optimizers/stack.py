"""Walks over nested optimizers, and plans which of them reduces.

A stack is a chain of wrappers, and the leaf: the Keras optimizer inside the
last wrapper, which may be a LossScaleOptimizer or a MultiOptimizer.

Each call of an outermost optimizer makes a `StackPlan`. Optimizers keep no
plan, since an optimizer inside a TowerOptimizer may later be used alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.distribute import site as site_lib
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


def chain(root: Any) -> list[Any]:
    """Returns a stack's wrappers, the outermost first.

    Raises ValueError if another optimizer, such as a LossScaleOptimizer or a
    MultiOptimizer, is between them.
    """
    result = [root]
    while is_wrapper(result[-1].inner_optimizer):
        result.append(result[-1].inner_optimizer)
    container = result[-1].inner_optimizer
    if inside := wrappers(container):
        refuse_between(result[-1], container, inside[0])
    return result


def refuse_between(outer: Any, container: Any, inside: Any) -> NoReturn:
    """Raises ValueError, since a Keras optimizer is between two wrappers."""
    kind = type(container).__name__
    around = (
        " A MultiOptimizer may also be around whole stacks."
        if is_multi_optimizer(container)
        else ""
    )
    raise ValueError(
        f"{outer.name} contains a {kind} that contains {inside.name}. Put the"
        f" {kind} into the innermost tf_xshard optimizer: TowerOptimizer("
        f"CrossShardOptimizer({kind}(...)), ...).{around} To load a model that"
        " was saved with such an optimizer, pass compile=False."
    )


class StackPlan:
    """Divides the work in the stack of an outermost optimizer."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.chain = chain(root)
        self.leaf = self.chain[-1].inner_optimizer
        self.loss_normalization = self._setting("loss_normalization", "global")
        # True if all replicas skip a step in which a gradient is not finite.
        self.skip_nonfinite = self._setting("skip_nonfinite", False)
        self.max_consecutive_skips = self._setting(
            "max_consecutive_skips", None
        )
        if self.max_consecutive_skips is not None and not self.skip_nonfinite:
            raise ValueError(
                "max_consecutive_skips limits how many steps are skipped, so it"
                " needs skip_nonfinite=True."
            )
        reducing = [one for one in self.chain if one.has_own_reducer]
        if len(reducing) > 1:
            # A TowerOptimizer's own reduces only if no other one does.
            reducing = [one for one in reducing if not one.is_implicit]
        # The wrappers that reduce, with their groups; None for one group of all
        # replicas.
        self.reducing: list[
            tuple[Any, group_assignment_lib.GroupAssignment | None]
        ] = []
        groups = None
        for one in reducing:
            own = one.group_assignment
            follows = own is None and one.follows_groups_around
            groups = groups if follows else own
            self.reducing.append((one, groups))
        for one in reducing:
            if one.has_local_variables and len(reducing) > 1:
                other = next(other for other in reducing if other is not one)
                raise ValueError(
                    f"{one.name} has local variables, but {other.name}, inside"
                    " or around it, reduces the gradients of all variables."
                    " Only one optimizer of a stack may reduce if there are"
                    " local variables."
                )

    def _setting(self, name: str, default: Any) -> Any:
        """Returns the one value of a setting in a stack."""
        values = [one._given_settings[name] for one in self.chain]
        given = set(values) - {None}
        if len(given) > 1:
            raise ValueError(
                f"Nested tf_xshard optimizers need one value of {name}, got"
                f" {sorted(given)} in {[one.name for one in self.chain]}. Pass"
                f" {name} to only one of these optimizers."
            )
        return given.pop() if given else default

    def undo(self, wrapper: Any, site: site_lib.Site) -> int:
        """Returns N if this wrapper undoes the 1/N of the loss, else 1."""
        # Only the outermost wrapper undoes it, once.
        if wrapper is self.root and self.loss_normalization == "global":
            return site.num_replicas
        return 1

    def reduces(self, wrapper: Any) -> bool:
        """Returns whether a wrapper reduces gradients over replicas."""
        return any(one is wrapper for one, _ in self.reducing)

    def groups(
        self, wrapper: Any, site: site_lib.Site
    ) -> group_assignment_lib.GroupAssignment:
        """Returns the groups over which a wrapper reduces.

        If another wrapper reduces instead, each replica is a group.
        """
        for one, groups in self.reducing:
            if one is wrapper:
                return group_assignment_lib.for_replicas(
                    groups,
                    site.num_replicas,
                    f"the strategy {type(site.strategy).__name__}",
                )
        return group_assignment_lib.GroupAssignment.contiguous(
            site.num_replicas, 1
        )

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
                for wrapper, _ in self.reducing
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
        for one in self.chain[self.chain.index(wrapper) + 1 :]:
            if self.reduces(one):
                size = self.groups(one, site).group_size
                return reductions.checked(one.reduction).weight(size)
        return 1
