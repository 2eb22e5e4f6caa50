"""Defines `Run`, which one call passes from wrapper to wrapper.

```
batch -> TowerOptimizer -> CrossShardOptimizer -> leaf     `then`
            writes            reduced, writes      update  the gate opens
```

Each wrapper passes on a batch, the reductions that writes wait for, and
functions that write. The leaf's update and these functions stand behind one
no-op. See `commit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import commit
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.update import whole
from tf_xshard.private.keras import optimizer_state
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_records


@dataclasses.dataclass(frozen=True)
class Run:
    """Carries one call through the wrappers of a stack.

    Attributes:
      plan: Which wrapper does what.
      site: Where the call runs.
      losses: The losses of the gradients that the call applies.
      other_call_has_losses: True if an earlier call of the traced function took
        its losses.
      num_items: The number of items in a round of a TowerOptimizer around. None
        if no round is around, or its calls count equally.
      waits_for: What the call's writes wait for.
      writes: Functions that write, of the wrappers so far.
    """

    plan: stack.StackPlan
    site: site_lib.Site
    losses: Sequence[loss_records.LossRecord] = ()
    other_call_has_losses: bool = False
    num_items: tf.Tensor | None = None
    waits_for: tuple = ()
    writes: tuple[Callable[[], Any], ...] = ()

    def groups(self, wrapper: Any) -> group_assignment_lib.GroupAssignment:
        """Returns the groups over which a wrapper reduces."""
        return self.plan.groups(wrapper, self.site)

    def after(self, values: Sequence) -> Run:
        """Returns a run whose writes also wait for these values."""
        return dataclasses.replace(self, waits_for=(*self.waits_for, *values))

    def then(
        self,
        wrapper: Any,
        batch: gradients_lib.GradientBatch,
        *,
        update: Callable[[], Any] | None = None,
        finite: tf.Tensor | None = None,
        num_items: tf.Tensor | None = None,
        waits_for: Sequence = (),
        writes: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """Passes a wrapper's batch to the next wrapper, or to the leaf.

        Args:
          wrapper: The wrapper whose batch this is.
          batch: The gradients.
          update: Applies the batch in the last wrapper. None (default) for the
            leaf's whole update.
          finite: A scalar bool. If it is False, the batch is not applied, but
            `writes` are written. None (default) to apply the batch.
          num_items: The number of items of a round that the wrapper ends.
          waits_for: What all writes wait for, such as reduced values.
          writes: Functions that write after the update.
        """
        run = dataclasses.replace(
            self.after(waits_for),
            num_items=self.num_items if num_items is None else num_items,
            writes=(*writes, *self.writes),
        )
        inside = self.plan.chain[self.plan.chain.index(wrapper) + 1 :]
        if not inside:
            apply = update or functools.partial(
                whole.apply, self.plan.leaf, batch
            )
            with commit.gate(run.waits_for):
                _if(finite, apply)
                for write in run.writes:
                    write()
        elif finite is None:
            _step(inside[0], batch, run)
        else:
            with run.behind_gate() as behind:
                _if(finite, lambda: _step(inside[0], batch, behind))

    @contextlib.contextmanager
    def behind_gate(self) -> Iterator[Run]:
        """Makes all operations of this context wait, including reductions.

        A branch in which the call continues waits as a whole. Yields the run to
        use in it. After the context, writes wait for its updates.
        """
        with commit.gate(self.waits_for):
            yield dataclasses.replace(self, waits_for=(), writes=())
            if not self.writes:
                return
            # Reading a counter waits for the update that counts.
            counts = [
                optimizer_state.num_calls(one)
                for one in stack.updating(self.plan.root)
            ]
            with commit.gate(counts):
                for write in self.writes:
                    write()


def begin(root: Any, gradients: Sequence, site: site_lib.Site) -> Run:
    """Begins a call of an outermost wrapper that got gradients."""
    plan = stack.StackPlan(root)
    other_call_has_losses = loss_records.were_taken(site)
    losses = loss_records.take(site)
    plan.check_losses(losses, site)
    groups = [plan.groups(one, site) for one, _ in plan.reducing]
    site, waits_for = commit.begin(
        gradients, root.counts_of_stack(), groups, site, root.name
    )
    return Run(plan, site, losses, other_call_has_losses, waits_for=waits_for)


def _step(wrapper: Any, batch: gradients_lib.GradientBatch, run: Run) -> None:
    values = gradients_lib.standardized(batch.values, batch.variables)
    with tf.name_scope(wrapper.name):
        wrapper._step(batch.with_values(values), run)


def _if(condition: tf.Tensor | None, function: Callable[[], Any]) -> None:
    if condition is None:
        function()
    else:
        replica_variables.cond(condition, function)
