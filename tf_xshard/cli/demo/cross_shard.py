"""Checks CrossShardOptimizer: against one device, with groups, with shards."""

from __future__ import annotations

import itertools
import math

import tf_xshard
from tf_xshard.cli import numbers
from tf_xshard.cli.demo import training
from tf_xshard.distribute import replica_variables


def check(
    promises: training.Promises,
    runs: training.Runs,
    groups: tf_xshard.GroupAssignment,
    whole: numbers.Trained,
) -> None:
    """Trains in groups with a sharded update, and compares the results."""
    sharded = runs.replicated(
        f"CrossShardOptimizer in {groups.num_groups} groups, shard_update=True",
        lambda inner: tf_xshard.CrossShardOptimizer(
            inner, group_assignment=groups, shard_update=True
        ),
    )
    for index, members in enumerate(groups):
        promises.check(
            f"group {index}, sharded update",
            sharded,
            whole.weights[members[0]],
            members,
        )
    held, whole_size = (_slot_elements(one) for one in (sharded, whole))
    promises.show(
        "slot variables of a replica",
        remark=f"{held} numbers instead of {whole_size}",
    )
    expected = sum(
        math.ceil(int(v.shape.num_elements()) / groups.group_size)
        for v in whole.model.optimizer.variables
        if len(v.shape)
    )
    promises.check_that(
        held == expected,
        f"a replica holds {held} numbers of slot variables, not {expected}",
    )


def _slot_elements(trained: numbers.Trained) -> int:
    """Counts the numbers in the slot variables of the first replica."""
    return sum(
        int(replica_variables.copies(v)[0].shape.num_elements())
        for v in trained.model.optimizer.variables
        if len(v.shape)
    )


MIN_GROUP_DIFFERENCE = 1e-3


def show(runs: training.Runs) -> training.Promises:
    """Trains with CrossShardOptimizer and its references, and compares."""
    options, digits = runs.options, runs.digits
    num_replicas = runs.strategy.num_replicas_in_sync
    groups = tf_xshard.GroupAssignment.strided(
        num_replicas, num_replicas // options.groups
    )
    print(f"groups: {groups.to_list()}")

    def grouped_by(assignment):
        return lambda inner: tf_xshard.CrossShardOptimizer(
            inner, group_assignment=assignment
        )

    def validation(model, strategy):
        del model, strategy
        # Keras needs a batch that the number of replicas divides.
        size = len(digits.x_validation) // num_replicas * num_replicas
        return tf_xshard.GroupValidation(
            (digits.x_validation[:size], digits.y_validation[:size]),
            batch_size=size,
        )

    one = runs.on_one_device("One device, the same global batch")
    plain = runs.replicated("Plain Keras under the strategy")
    everyone = runs.replicated(
        "CrossShardOptimizer over all replicas", tf_xshard.CrossShardOptimizer
    )
    grouped = runs.replicated(
        f"CrossShardOptimizer in {groups.num_groups} groups",
        grouped_by(groups),
        callbacks=[validation] if options.plot else [],
    )
    alone = [
        runs.on_one_device(
            f"One device on the shards of group {index}",
            digits.of_shards(members, num_replicas),
        )
        for index, members in enumerate(groups)
    ]
    wrong = runs.replicated(
        "A wrong reduction: every replica alone",
        grouped_by(tf_xshard.GroupAssignment.contiguous(num_replicas, 1)),
    )
    promises = training.Promises("one device", runs)
    promises.show("one device", one, "reference")
    promises.show(
        "plain Keras under the strategy",
        plain,
        f"{numbers.deviation(plain.weights, one.weights[0]):.1e}",
    )
    promises.check("CrossShardOptimizer, all", everyone, one.weights[0])
    for index, members in enumerate(groups):
        promises.check(
            f"group {index}, on its shards",
            grouped,
            alone[index].weights[0],
            members,
        )
    promises.check(
        "a wrong reduction (on purpose)",
        wrong,
        one.weights[0],
        right=False,
    )
    promises.check_accuracy([one, everyone], options.epochs)
    for first, second in itertools.combinations(groups, 2):
        apart = numbers.difference(
            grouped.weights[first[0]], grouped.weights[second[0]]
        )
        promises.check_that(
            apart >= MIN_GROUP_DIFFERENCE,
            f"groups {list(first)} and {list(second)} differ by only"
            f" {apart:.1e}, expected at least {MIN_GROUP_DIFFERENCE:.0e}",
        )
    if options.shard_update:
        check(promises, runs, groups, grouped)
    if options.plot:
        _plot(grouped.history, groups, options.plot)
    return promises


def _plot(
    history: dict[str, list[float]],
    groups: tf_xshard.GroupAssignment,
    path: str,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    epochs = range(1, len(history["loss"]) + 1)
    for index, members in enumerate(groups):
        axes.plot(
            epochs,
            history[f"val_group_{index}_loss"],
            marker="o",
            label=f"group {index}: replicas {list(members)}",
        )
    if groups.num_groups > 1:
        axes.plot(
            epochs,
            history["val_ensemble_loss"],
            "k--",
            linewidth=2,
            label="their ensemble",
        )
    axes.set(
        xlabel="epoch",
        ylabel="validation loss",
        yscale="log",
        title="Groups train independently (handwritten digits)",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"\nThe groups' loss curves are in {path}")
