"""Defines `GroupState`, which reads, saves, restores and merges groups."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.group_state import divergence
from tf_xshard.group_state import ensemble as ensemble_lib
from tf_xshard.group_state import evaluate as evaluate_lib
from tf_xshard.group_state import export
from tf_xshard.group_state import inventory
from tf_xshard.group_state import merge
from tf_xshard.group_state import replica_io
from tf_xshard.group_state import table
from tf_xshard.group_state.checkpoint import checkpoint


class GroupState:
    """Reads, evaluates, saves, restores and merges the values of each group.

    Replicas hold different values by design if there are several groups, or
    between AGNOptimizer's exchanges. TensorFlow and Keras show, save and
    restore only replica 0's values. GroupState covers every replica.

    ```
                 group 0            group 1
    replica      0         1        2         3
    weights      a         a        b         b      get_weights(0) -> a
    slots        m         m        n         n      export(1, path) -> b, n
    moving mean  s0        s1       s2        s3     its value in group 1 is
                                                     the mean of s2 and s3
    save()       a, m, s0, s1, b, n, s2, s3: every distinct value, once
    ```

    A group's value of a variable is the value that its replicas share. If the
    replicas differ bitwise (moving statistics, AGN's local slot variables), the
    group's value is their mean. A counter has no mean, so the group's value is
    the first replica's value. If AGNOptimizer trains the model, its weights are
    the center.

    Each call reads the model's current state, even after another `compile`.
    Reading changes nothing. `save`, `restore`, `set_weights` and `merge` build
    the model's optimizer if it has not been built, even if they then raise an
    error.

    Call the methods outside `strategy.run`. With several processes
    (MultiWorkerMirroredStrategy), call them in all processes, since the
    strategy's collectives communicate the values. Only `save` and `restore`
    need a directory that all processes share.

    Args:
      model: A built `keras.Model`, including its optimizer. For a custom
        training loop, pass a list of variables, or a dict from names to objects
        that hold variables. Such objects are models, layers, optimizers,
        metrics, variables, `tf.Module`s, random number generators, and lists of
        these objects.
      group_assignment: A `GroupAssignment`, or a `[num_groups,
        replicas_per_group]` nested list of replica ids. Default: None, the
        groups of the model's optimizer, combined if wrappers are nested.

    Raises:
      TypeError: If `model` holds no variables.
      ValueError: If variables belong to different strategies, or if the groups
        do not fit the strategy.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()))
    >>> state = tf_xshard.GroupState(model)
    >>> state.num_groups, [w.shape for w in state.get_weights(0)["model"]]
    (1, [(2, 1), (1,)])

    Source: the groups that `group_assignment` of
    `tf.compat.v1.tpu.CrossShardOptimizer` makes. TensorFlow can't save, restore
    or merge them.
    """

    _ensemble: ensemble_lib.Ensemble | None = None

    def __init__(
        self,
        model: keras.Model | Mapping[str, Any] | Sequence,
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
    ) -> None:
        site_lib.refuse_replica_context("GroupState")
        self._holder = model
        self._given_groups = (
            None
            if group_assignment is None
            else group_assignment_lib.GroupAssignment(group_assignment)
        )
        catalog = inventory.of(model, self._given_groups)
        site_lib.kind_of(catalog.strategy)
        self.replicas = replica_io.ReplicaValues(
            catalog.strategy, catalog.communication()
        )

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment:
        """The group assignment of the model as currently compiled."""
        return self._given_groups or inventory.groups_of(
            self._holder, self.replicas.strategy
        )

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self.group_assignment.num_groups

    def group_of(self, replica_id: int) -> int:
        """Returns the group of a replica.

        Args:
          replica_id: The replica's id.

        Returns:
          The group's index.
        """
        return self.group_assignment.group_of(replica_id)

    @property
    def is_chief(self) -> bool:
        """True in the process that writes shared files."""
        return self.replicas.rank == 0

    def catalog(self) -> inventory.Catalog:
        """Lists the variables, optimizers and groups that the model has now.

        Returns:
          A frozen `Catalog`.

        Raises:
          RuntimeError: In replica context, or inside a `tf.function`.
          ValueError: If something has not been built, or there are no
            variables.
        """
        site_lib.refuse_replica_context("GroupState")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "GroupState is used inside a tf.function, where it can't read"
                " values. Call it between steps, or in a callback."
            )
        catalog = inventory.of(self._holder, self._given_groups)
        catalog.check_built(isinstance(self._holder, keras.Model))
        return catalog

    def _built_catalog(self) -> inventory.Catalog:
        """Builds a model's optimizer if needed, and returns the catalog."""
        catalog = self.catalog()
        if not isinstance(self._holder, keras.Model):
            return catalog
        optimizer = catalog.holders.get("optimizer")
        if optimizer is None or optimizer.built:
            return catalog
        with self.replicas.strategy.scope():
            optimizer.build(self._holder.trainable_variables)
        return self.catalog()

    def variables(
        self, kinds: Collection[str] | None = None, each_once: bool = True
    ) -> list[inventory.StateVariable]:
        """Lists all variables, or the variables of some kinds.

        Args:
          kinds: Kinds of `StateVariable`, such as "weight", "slot" and
            "statistic". Default: None, all kinds.
          each_once: Whether to list a variable that belongs to several parts
            only once, in the first part. Default: True.

        Returns:
          A list of `StateVariable`, in a deterministic order.
        """
        return self.catalog().variables(kinds, each_once)

    # One value per group.

    def get_weights(self, group: int) -> dict[str, list[np.ndarray]]:
        """Returns a group's learned values.

        Args:
          group: The group's index.

        Returns:
          A dict from names of parts to lists of arrays. For a model, `"model"`
          has the order of `model.get_weights()`, including BatchNormalization's
          moving statistics, and `"optimizer"` has the order of
          `optimizer.variables`. Otherwise the names are the keys of the dict
          given to the constructor, or `"variables"` for a list. An optimizer
          that has not been built is omitted.

        Raises:
          ValueError: If there is no such group, or something is not built.

        Example:

        >>> state = tf_xshard.GroupState([keras.Variable([1.0, 2.0])])
        >>> state.get_weights(0)
        {'variables': [array([1., 2.], dtype=float32)]}
        """
        catalog = self.catalog()
        catalog.refuse_local_weights("get_weights()")
        members = catalog.groups.to_list()[catalog.checked_group(group)]
        variables = catalog.variables(inventory.LEARNED, each_once=False)
        values = self.replicas.of_group(catalog.shown(variables), members)
        # An unbuilt optimizer has fewer values than `set_weights` needs.
        result: dict[str, list] = {
            name: []
            for name, part in catalog.holders.items()
            if getattr(part, "built", True)
        }
        for one, value in zip(variables, values, strict=True):
            if one.part in result:
                result[one.part].append(value)
        return result

    def set_weights(
        self, group: int, weights: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Sets the values of a group's replicas. Other groups do not change.

        Args:
          group: The group's index.
          weights: A dict as `get_weights` returns it. Parts can be omitted.

        Raises:
          ValueError: If the group, a part, a dtype, a shape or the number of
            values does not match, or if several groups share a variable's only
            copy and would need different values. In that case, no value is
            changed.

        Example:

        >>> weight = keras.Variable(1.0)
        >>> state = tf_xshard.GroupState([weight])
        >>> state.set_weights(0, {"variables": [3.0]})
        >>> float(weight)
        3.0
        """
        catalog = self._built_catalog()
        catalog.refuse_local_weights("set_weights()")
        group = catalog.checked_group(group)
        variables = catalog.variables(inventory.LEARNED, each_once=False)
        unknown = set(weights) - set(catalog.holders)
        if unknown:
            raise ValueError(
                f"set_weights got {sorted(unknown)}, but the parts are"
                f" {list(catalog.holders)}. No value was changed."
            )
        assignments = []
        for part, values in weights.items():
            own = [one for one in variables if one.part == part]
            if len(own) != len(values):
                raise ValueError(
                    f"{part!r} has {len(own)} variables, got"
                    f" {len(values)} values. Pass one for each, as"
                    " get_weights(group) returns them."
                )
            for one, shown, value in zip(
                own, catalog.shown(own), values, strict=True
            ):
                value = merge.as_type(value, one.numpy_type, one.name)
                if value.shape != one.shape:
                    raise ValueError(
                        f"{one.name!r} has shape {one.shape}, got a value of"
                        f" shape {value.shape}. No value was changed."
                    )
                assignments.append((one.variable, value))
                # AGN's replicas continue from the center.
                if shown is not one.variable:
                    assignments.append((shown, value))

        def check() -> None:
            for variable, value in assignments:
                replica_io.refuse_several_values(
                    variable,
                    self.replicas.of_groups(
                        variable, catalog.groups, {group: value}
                    ),
                )

        self.replicas.run_on_all_processes("set_weights()", check)
        # The optimizer's given values, including the center, take precedence.
        for variable, value in assignments:
            self.replicas.assign_groups(
                variable, catalog.groups, {group: value}
            )

    def assign(self, variable: Any, values: Sequence) -> None:
        """Gives each group its own value of one variable.

        For example, `state.assign(optimizer.learning_rate, [0.1, 0.03, 0.01,
        0.003])` trains four groups with four learning rates in one `fit`.

        Args:
          variable: A Keras or TensorFlow variable, created in the strategy's
            scope.
          values: One value for each group.

        Raises:
          TypeError: If `variable` is not a variable (a schedule, for example).
          ValueError: If the number of values, a dtype or a shape is wrong, or
            if several groups share the variable's only copy.

        Example:

        >>> rate = keras.Variable(0.1)
        >>> tf_xshard.GroupState([rate]).assign(rate, [0.5])
        >>> float(rate)
        0.5
        """
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            raise TypeError(
                f"assign() needs a variable, got {type(variable).__name__}."
            )
        groups = self.group_assignment
        dtype = replica_variables.copies(variable)[0].dtype.as_numpy_dtype
        values = merge.one_per_group(
            values,
            groups.num_groups,
            dtype,
            tuple(variable.shape),
            variable.name,
        )
        if not replica_variables.strategy_of(variable):
            # All groups count, also groups of other processes.
            replica_io.refuse_several_values(variable, values)
        self.replicas.assign_groups(variable, groups, dict(enumerate(values)))

    def merge(self, how: str | int | Sequence[float] = "mean") -> None:
        """Makes all replicas of all groups equal.

        Weights, moving statistics and all optimizer state become the (weighted)
        mean over the groups. Counters and random states have no mean. They take
        the values of the group with the largest weight, or of the first such
        group.

        Args:
          how: `"mean"` (default), the index of the group whose values all
            groups take, or a list of one nonnegative weight for each group. The
            weights are divided by their sum.

        Raises:
          ValueError: If `how` is none of these.

        Example:

        >>> tf_xshard.GroupState([keras.Variable(1.0)]).merge("mean")
        """
        catalog = self._built_catalog()
        catalog.refuse_local_weights("merge()")
        weights = merge.merge_weights(
            how, catalog.groups.num_groups, catalog.checked_group
        )
        variables = catalog.variables((*inventory.LEARNED, "random"))
        every = range(self.replicas.num_replicas)
        for one, values in zip(
            variables,
            self.replicas.gather([v.variable for v in variables], every),
            strict=True,
        ):
            of_groups = merge.by_group(values, catalog.groups)
            self.replicas.assign_all(
                one.variable, merge.combined(of_groups, weights)
            )

    def save(
        self,
        directory: str | os.PathLike,
        *,
        epoch: int = 0,
        step: int = 0,
        shared: bool = True,
    ) -> None:
        """Saves every variable of every replica, atomically.

        A save holds everything that a training step reads: weights, moving
        statistics, random states, metrics and all optimizer state. Equal values
        of several replicas are saved once. After a crash, the directory holds
        the previous save or this save.

        Args:
          directory: A path that all processes share, created if missing. It
            holds only the latest save.
          epoch: The number of completed epochs. Default: 0.
          step: The number of completed steps of the next epoch. Default: 0.
          shared: Whether all processes share the directory. If False, each
            process passes a separate directory, and writes only the values that
            it holds. Another program, such as Ray, must then put all files into
            one directory before `restore`. Default: True.

        Raises:
          OSError, tf.errors.OpError or ValueError: If the directory can't be
            written, or if the processes do not share it. The previous save is
            kept, and the other processes raise a RuntimeError.
          RuntimeError: In an evaluator, or in one of several processes that
            train alone (see `connect`).

        Example:

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> weight = keras.Variable(1.0)
        >>> state = tf_xshard.GroupState([weight])
        >>> state.save(directory, epoch=3)
        >>> _ = weight.assign(7.0)
        >>> state.restore(directory)
        Position(epoch=3, step=0)
        >>> float(weight)
        1.0
        """
        lone_training.refuse(self.replicas.strategy, "GroupState saves")
        checkpoint.save(
            self._built_catalog(),
            self.replicas,
            os.fspath(directory),
            int(epoch),
            int(step),
            checks.boolean("shared", shared),
        )

    def restore(
        self,
        directory: str | os.PathLike,
        *,
        regroup: str | Mapping[int, int] | None = None,
    ) -> checkpoint.Position:
        """Restores a save on every replica, bit for bit.

        `restore` reads and checks everything before it changes a value. It
        omits metrics if they are not built yet, or if `regroup` is given.

        Args:
          directory: The directory of the save.
          regroup: None (default) if the save has the same groups and replicas.
            `"mean"` gives every group the mean of the saved groups, and
            `"first"` the values of the first saved group. A dict {group: saved
            group} gives each group the values of its saved group.

        Returns:
          A `Position` with the `epoch` and `step` given to `save`.

        Raises:
          FileNotFoundError: If nothing was saved there.
          ValueError: If `regroup` is invalid, or the save is damaged or belongs
            to another model or other groups. The message names the difference.
            If groups have different values of a variable with one copy.
          RuntimeError: If restoring failed on another process.

        Example: See `save`.
        """
        directory = os.fspath(directory)
        catalog = self._built_catalog()
        if regroup is not None:
            catalog.refuse_local_weights("restore(regroup=...)")
        checkpoint.create_saved_state(catalog, self.replicas, directory)
        return checkpoint.restore(
            self.catalog(), self.replicas, directory, regroup
        )

    @staticmethod
    def position(directory: str | os.PathLike) -> checkpoint.Position:
        """Returns the position of training when a state was saved.

        An input pipeline can start at this position. No model is needed.

        Args:
          directory: The directory of the save.

        Returns:
          A `Position` with the ints `epoch` and `step`.

        Raises:
          FileNotFoundError: If nothing was saved there.
          ValueError: If the save is damaged.

        Example:

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> tf_xshard.GroupState([keras.Variable(1.0)]).save(directory, epoch=2)
        >>> tf_xshard.GroupState.position(directory).epoch
        2
        """
        return checkpoint.position(os.fspath(directory))

    # Metrics and predictions.

    def evaluate(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        verbose: int = 0,
        ensemble: bool = True,
    ) -> table.Table:
        """Computes each group's metrics on the same complete data.

        All replicas evaluate one group after another with `model.evaluate`.
        Afterwards, the model's values are restored.

        Args:
          data: A `tf.data.Dataset`, arrays, or a tuple `(x, y)` or `(x, y,
            sample_weight)`. A generator raises TypeError, since it can be read
            only once. With `steps`, the data must have the same order each
            time.
          y: The targets, if `data` is arrays of inputs.
          batch_size: See `keras.Model.evaluate`.
          sample_weight: See `keras.Model.evaluate`.
          steps: See `keras.Model.evaluate`.
          verbose: See `keras.Model.evaluate`. Default: 0.
          ensemble: Whether to add a row for the ensemble, whose outputs are the
            mean of the groups' `model(x)`. Each replica then holds the weights
            of all groups. Default: True. Ignored if there is only one group, or
            if the model overrides `test_step`.

        Returns:
          A list of rows that prints as a table. Each group's row is a dict with
          `group` and the metrics; the ensemble's `group` is "ensemble".

        Raises:
          TypeError: If `data` is a generator.
          ValueError: If there is no compiled model, or if `data` and an
            argument both give a `sample_weight`.

        Example:

        >>> model = keras.Sequential([keras.layers.Input((2,)),
        ...     keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
        ...               "mse")
        >>> tf_xshard.GroupState(model).evaluate(np.ones([4, 2]), np.ones(4))
        group  loss
        0      1
        """
        evaluate_lib.refuse_generator(data)
        if isinstance(data, tuple) and y is None:
            data, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            if weight is not None and sample_weight is not None:
                raise ValueError(
                    "evaluate() got a sample_weight in the data and another one"
                    " as an argument. Pass only one."
                )
            sample_weight = weight if weight is not None else sample_weight
        options = {
            "y": y,
            "batch_size": batch_size,
            "sample_weight": sample_weight,
            "steps": steps,
            "verbose": verbose,
            "return_dict": True,
        }
        catalog = self.catalog()
        catalog.refuse_local_weights("evaluate()")
        evaluated = self._evaluation(catalog)
        try:
            return evaluated.evaluate(data, ensemble, options)
        finally:
            self._ensemble = evaluated.ensemble

    def predict(
        self,
        data: Any,
        group: int | None = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        verbose: int = 0,
    ) -> Any:
        """Computes the predictions of a group, or of all groups' ensemble.

        All replicas compute with the group's weights. Afterwards, the model's
        values are restored.

        Args:
          data: The inputs, as for `keras.Model.predict`.
          group: The group's index. Default: None, the ensemble, which averages
            the groups' outputs (of `model(x)`, even if `predict_step` is
            overridden).
          batch_size: See `keras.Model.predict`.
          steps: See `keras.Model.predict`.
          verbose: See `keras.Model.predict`. Default: 0.

        Returns:
          The outputs, as from `keras.Model.predict`.

        Raises:
          ValueError: If there is no such group, or no model.

        Example:

        >>> model = keras.Sequential([keras.layers.Input((2,)),
        ...     keras.layers.Dense(1, kernel_initializer="ones")])
        >>> tf_xshard.GroupState(model).predict(np.ones([1, 2]), group=0)
        array([[2.]], dtype=float32)
        """
        options = {"batch_size": batch_size, "steps": steps, "verbose": verbose}
        catalog = self.catalog()
        catalog.refuse_local_weights("predict()")
        if group is not None:
            group = catalog.checked_group(group)
        elif catalog.groups.num_groups == 1:
            group = 0
        evaluated = self._evaluation(catalog)
        try:
            return evaluated.predict(data, group, options)
        finally:
            self._ensemble = evaluated.ensemble

    def _model(self) -> keras.Model:
        if not isinstance(self._holder, keras.Model):
            raise ValueError(
                "GroupState was created without a keras.Model, so there is"
                " nothing to evaluate, predict with or export. Use"
                " GroupState(model)."
            )
        return self._holder

    def _evaluation(
        self, catalog: inventory.Catalog
    ) -> evaluate_lib.GroupEvaluation:
        model = self._model()
        return evaluate_lib.GroupEvaluation(
            model, catalog, self.replicas, self._ensemble
        )

    def divergence(self) -> table.Table:
        """Measures how far replicas have diverged, variable by variable.

        Returns:
          A list with a row per variable, which prints as a table. Columns hold
          the largest absolute differences. For trainable weights, slot
          variables and AGN's center, `within_group` compares replicas of one
          group (0 is expected), and `between_groups` compares groups. For state
          that differs by design, `local` (AGN's local variables, open rounds of
          towers) and `statistic` (moving statistics) compare replicas of one
          group.

        Example:

        >>> tf_xshard.GroupState([keras.Variable(1.0, name="w")]).divergence()
        variable  kind    within_group  between_groups  local  statistic
        w         weight  0             0               -      -
        """
        return divergence.table(self.catalog(), self.replicas)

    def export(self, group: int, path: str | os.PathLike) -> None:
        """Saves a group as an ordinary `.keras` model.

        The file loads without a strategy or tf_xshard. The model is compiled
        with the optimizer inside the wrappers (for AGN, the local optimizer)
        and the group's optimizer state. With several processes, the chief
        writes the file. It replaces an earlier file when the new file is
        complete.

        Args:
          group: The group's index.
          path: A path that ends in `.keras`.

        Raises:
          ValueError: If there is no such group or no model, or the path does
            not end in `.keras`.
          NotImplementedError: If the model can't be created from a config, as
            `keras.Model.save` requires.
          OSError: If the file can't be written. Processes other than the chief
            raise RuntimeError.

        Example:

        >>> import os, tempfile
        >>> model = keras.Sequential([keras.layers.Input((2,)),
        ...                           keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "group_0.keras")
        >>> tf_xshard.GroupState(model).export(0, path)
        >>> keras.models.load_model(path).count_params()
        3
        """
        catalog = self.catalog()
        catalog.refuse_local_weights("export()")
        export.export(
            self._model(),
            catalog,
            self.replicas,
            catalog.checked_group(group),
            path,
        )
