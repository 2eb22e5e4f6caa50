"""Per-replica gradients -> gradients reduced over the group.

gradients of replica r:   dense        IndexedSlices        None
                            |                |                |
  negotiate                 |                |      zeros, if another replica
                            |                |      of the group has one
  pack into buckets      [flat]              |
  group sum or gather       |            sum of rows
  unpack, scale             |                |
                          dense        IndexedSlices, each index once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import group_relations
from tf_xshard.collectives import owners
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import buckets
from tf_xshard.reduction import gradient_kinds
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import negotiation
from tf_xshard.reduction import residuals as residuals_lib


class GroupReducer:
    """One optimizer's reduction: its groups, and how they communicate.

    It remembers which gradients the replicas have, as negotiated while a step
    was traced, so a retraced step need not negotiate again.

    Args:
      group_assignment: A `GroupAssignment`, or None for one group of all.
      communication: A `Communication`.
      role: What becomes of it in an optimizer that reduces by itself.
        `"explicit"` (default): it reduces as given. `"follower"`: it takes the
        other's groups. `"stand_in"`: it only reduces where nothing else does.
    """

    def __init__(
        self,
        group_assignment: group_assignment_lib.GroupAssignment | None,
        communication: communication_lib.Communication,
        role: str = "explicit",
    ) -> None:
        self.given_assignment = group_assignment
        self.communication = communication
        self.role = role
        # Set by the stack that it is used in.
        self.group_assignment = group_assignment
        self.is_redundant = False
        self.owner = owners.number_for(self)
        self.residuals: residuals_lib.Residuals | None = None
        self._known_patterns: negotiation.KnownPatterns = {}

    def groups(
        self, num_replicas: int, where: str = "the strategy"
    ) -> group_assignment_lib.GroupAssignment:
        """The groups for a number of replicas.

        Args:
          num_replicas: The number of replicas.
          where: What has these replicas, for the error.

        Returns:
          The assignment, or one group of all replicas.

        Raises:
          ValueError: If the assignment is for a different number of replicas.
        """
        return group_relations.for_replicas(
            self.group_assignment, num_replicas, where
        )

    def _groups_here(
        self, site: site_lib.Site
    ) -> group_assignment_lib.GroupAssignment:
        where = f"the strategy {type(site.strategy).__name__}"
        return self.groups(site.num_replicas, where)

    def weight(self, site: site_lib.Site, reduction: str) -> int:
        """What to multiply gradients with before they are accumulated.

        The mean over a group's replicas of what they hold is then the group's
        mean or sum. TensorFlow and GroupState save, restore and regroup means,
        so an open accumulation can be restored on any number of replicas.

        Args:
          site: Where the code runs.
          reduction: `"mean"` or `"sum"`, of the reduction that will follow.

        Returns:
          An int, by which to divide before that reduction.
        """
        if reduction == "mean" or self.is_redundant:
            return 1
        return self._groups_here(site).group_size

    def reduce(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        reduction: str,
        multiplier: float = 1,
        exact: bool = False,
    ) -> list:
        """The mean or sum of a group's gradients, times `multiplier`.

        Args:
          gradients: As for `sum`.
          variables: As for `sum`.
          site: Where the code runs.
          reduction: `"mean"` or `"sum"`.
          multiplier: The factor that undoes the division of the loss. Combined
            with the mean's into one factor: two multiplications change bits.
          exact: Whether they are communicated in their own dtype.

        Returns:
          A list like `sum`'s.
        """
        if reduction == "mean" and not self.is_redundant:
            multiplier = multiplier / self._groups_here(site).group_size
        return [
            gradients_lib.scaled(total, multiplier)
            for total in self.sum(gradients, variables, site, exact)
        ]

    def sum(
        self,
        gradients: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        exact: bool = False,
    ) -> list:
        """Sums gradients over the group of this replica.

        Args:
          gradients: This replica's gradients: tensors of the variables' shapes,
            IndexedSlices or None. From `gradients.standardized`.
          variables: The variables they belong to, the same on all replicas.
          site: Where the code runs.
          exact: See `reduce`.

        Returns:
          A list like `gradients`, bitwise equal on all replicas of a group.
          None where no replica of the group has a gradient.

        Raises:
          RuntimeError: If another process does not answer in time.
          ValueError: If replicas apply different numbers or dtypes of
            gradients, or a dtype cannot be summed here.
        """
        groups = self._groups_here(site)
        if groups.group_size == 1 or not variables or self.is_redundant:
            return list(gradients)
        transport = self.transport(site, exact)
        return self.combined(
            gradients,
            variables,
            transport,
            lambda tensors, owners: self.with_feedback(
                buckets.sum_dense, tensors, owners, transport
            ),
            lambda slices, _: slices,
        )

    def sum_over_group(
        self, tensor: tf.Tensor, site: site_lib.Site
    ) -> tf.Tensor:
        """The group's sum of a tensor that all replicas have.

        Args:
          tensor: This replica's tensor, of the same shape on all replicas.
          site: Where the code runs.

        Returns:
          A tensor of the same shape.
        """
        [total] = self.transport(site).sum([tensor])
        return total

    def transport(
        self, site: site_lib.Site, exact: bool = False
    ) -> transport_lib.Transport:
        """The path on which the group of this replica communicates."""
        how = self.communication.exact() if exact else self.communication
        return collectives.choose(
            site, self._groups_here(site), how, self.owner
        )

    def with_feedback(
        self,
        reduce: Callable,
        tensors: Sequence[tf.Tensor],
        variables: Sequence,
        transport: transport_lib.Transport,
    ) -> list[tf.Tensor]:
        """Reduces dense gradients, and keeps what that loses of them.

        Args:
          reduce: `buckets.sum_dense` or `buckets.scatter_dense`.
          tensors: This replica's gradients.
          variables: The variables they belong to.
          transport: From `transport`.

        Returns:
          What was reduced, one tensor for each.

        Raises:
          ValueError: If something is to be kept where nothing can be.
        """
        if not transport.communication.error_feedback:
            return reduce(tensors, transport).values
        if self.residuals is None:
            raise ValueError(
                "Communication(error_feedback=True) keeps variables, which only"
                " an optimizer has. Pass error_feedback=False to group_reduce."
            )
        tensors = self.residuals.added_to(tensors, variables)
        values, lost = reduce(tensors, transport)
        self.residuals.note(variables, lost or [])
        return values

    def combined(
        self,
        gradients: Sequence,
        variables: Sequence,
        transport: transport_lib.Transport,
        of_dense: Callable,
        of_sparse: Callable,
    ) -> list:
        """`gradient_kinds.combined`, after the replicas have negotiated.

        Args:
          gradients: As for `sum`.
          variables: As for `sum`.
          transport: From `transport`.
          of_dense: See `gradient_kinds.combined`.
          of_sparse: See `gradient_kinds.combined`.

        Returns:
          A value for each variable, or None where no replica of the group has
          a gradient.
        """
        site, groups = transport.site, transport.groups
        patterns = negotiation.agree(
            gradients,
            variables,
            site,
            self.communication.timeout_seconds,
            self._known_patterns,
        )
        if site.replica_id is None:
            group = patterns
        else:
            members = tuple(groups)[groups.group_of(site.replica_id)]
            group = tuple(patterns[r] for r in members)
        # If an operation spans all groups, all replicas must pass the same
        # tensors, even those for which their own group has no gradient.
        found = gradient_kinds.combined(
            gradients,
            variables,
            patterns if transport.spans_groups else group,
            transport,
            of_dense,
            of_sparse,
        )
        return [
            value
            if negotiation.kinds(group, index) != {negotiation.NONE}
            else None
            for index, value in enumerate(found)
        ]
