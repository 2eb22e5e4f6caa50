"""GroupState: what each group holds, read, saved, restored and merged."""

from __future__ import annotations

import os
from typing import Any

import keras

from tf_xshard.group_state import catalog as catalog_lib
from tf_xshard.group_state import divergence
from tf_xshard.group_state import ensemble as ensemble_lib
from tf_xshard.group_state import evaluation
from tf_xshard.group_state import export
from tf_xshard.group_state import files
from tf_xshard.group_state import table


class GroupState(files.GroupFiles):
    """What each group of replicas holds: read, evaluate, save, restore, merge.

    With several groups, and with AGNOptimizer between exchanges, replicas hold
    different values by design. TensorFlow and Keras show, save and restore
    those of replica 0. GroupState covers every replica.

    ```
                 group 0            group 1
    replica      0         1        2         3
    weights      a         a        b         b      get_weights(0) -> a
    slots        m         m        n         n      export(1, path) -> b, n
    moving mean  s0        s1       s2        s3     its value in group 1 is
                                                     the mean of s2 and s3
    save()       a, m, s0, s1, b, n, s2, s3: every distinct value, once
    ```

    A group has one value of each variable: the replicas' value where they are
    bitwise equal, else (moving statistics, AGN's local slots) their mean, or
    the first replica's value where there is no mean (counters). The weights of
    a model that AGNOptimizer trains are the center.

    Each call sees what the model holds at that moment, even after another
    `compile`, and reading changes nothing. `save`, `restore`, `set_weights` and
    `merge` build the model's optimizer if it has not been built.

    Call it outside of `strategy.run`, and with several processes
    (MultiWorkerMirroredStrategy) in all of them: values are communicated by the
    strategy's own collectives. Only `save` and `restore` need a directory that
    all processes share.

    Args:
      model: A built `keras.Model`, with the optimizer that it is compiled with.
        For custom training loops, a dict from names to objects that hold
        variables (models, layers, optimizers, metrics, variables, `tf.Module`s,
        random number generators, and lists of these), or a list of variables.
      group_assignment: A `GroupAssignment`, or a `[num_groups,
        replicas_per_group]` nested list of replica ids. None (default) for that
        of the model's optimizer; for nested wrappers, their combined groups.

    Raises:
      TypeError: If `model` holds no variables.
      ValueError: If variables belong to different strategies, or the groups do
        not fit the strategy.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()))
    >>> state = tf_xshard.GroupState(model)
    >>> state.num_groups, [w.shape for w in state.get_weights(0)["model"]]
    (1, [(2, 1), (1,)])

    Source: "save, restore, merge" of the groups that `group_assignment` of
    `tf.compat.v1.tpu.CrossShardOptimizer` makes; TensorFlow has no counterpart.
    """

    _ensemble: ensemble_lib.Ensemble | None = None

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
        """The metrics of each group, all on the same complete data.

        All replicas evaluate one group after the other, with `model.evaluate`;
        then the model's values are restored.

        Args:
          data: A `tf.data.Dataset`, arrays, or a tuple `(x, y)` or `(x, y,
            sample_weight)`; not a generator, which can be read only once. With
            `steps`, its order must be the same each time.
          y: The targets, if `data` is arrays of inputs.
          batch_size: See `keras.Model.evaluate`.
          sample_weight: See `keras.Model.evaluate`.
          steps: See `keras.Model.evaluate`.
          verbose: See `keras.Model.evaluate`. Default: 0.
          ensemble: Whether to add a row for the ensemble, whose outputs are the
            mean of the groups' `model(x)`. Each replica then holds the weights
            of all groups. Default: True. Ignored if there is one group or the
            model overrides `test_step`.

        Returns:
          A row for each group, with `group` and the metrics, and a row whose
          `group` is "ensemble". It prints as a table.

        Raises:
          TypeError: If `data` is a generator.
          ValueError: If there is no compiled model, or `sample_weight` is given
            both in `data` and as an argument.

        Example:

        >>> model = keras.Sequential([keras.layers.Input((2,)),
        ...     keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
        ...               "mse")
        >>> tf_xshard.GroupState(model).evaluate(np.ones([4, 2]), np.ones(4))
        group  loss
        0      1
        """
        evaluation.refuse_generator(data)
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
        evaluated = self._evaluation()
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
        """The predictions of a group, or of the ensemble of all groups.

        All replicas compute with the group's weights; then the model's values
        are restored.

        Args:
          data: Inputs, see `keras.Model.predict`.
          group: The group's index, or None (default) for the ensemble: the mean
            of the groups' outputs (of `model(x)`, if `predict_step` is
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
        self, catalog: catalog_lib.Catalog | None = None
    ) -> evaluation.GroupEvaluation:
        model = self._model()
        return evaluation.GroupEvaluation(
            model, catalog or self.catalog(), self.replicas, self._ensemble
        )

    def divergence(self) -> table.Table:
        """How far replicas have diverged, variable by variable.

        Returns:
          A row per variable; it prints as a table. For trainable weights, slots
          and AGN's center: `within_group`, the largest absolute difference
          between replicas of one group (expected to be 0), and
          `between_groups`. State that differs by design has its own columns,
          over the replicas of a group: `local` (what AGN trains, open rounds of
          towers) and `statistic` (moving statistics).

        Example:

        >>> tf_xshard.GroupState([keras.Variable(1.0, name="w")]).divergence()
        variable  kind    within_group  between_groups  local  statistic
        w         weight  0             0               -      -
        """
        return divergence.table(self.catalog(), self.replicas)

    def export(self, group: int, path: str | os.PathLike) -> None:
        """Saves a group as an ordinary `.keras` model.

        It loads anywhere, without a strategy or tf_xshard. It is compiled with
        the optimizer inside the wrappers (for AGN, the local optimizer), with
        the group's state. With several processes the chief writes. An earlier
        file is replaced when the new one is complete.

        Args:
          group: The group's index.
          path: A path that ends in `.keras`.

        Raises:
          ValueError: If there is no such group, no model, or the path does not
            end in `.keras`.
          NotImplementedError: If the model can't be created from a config, see
            `keras.Model.save`, which writes the file.
          OSError: If the file can't be written; with several processes,
            RuntimeError on those that do not write it.

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
        export.export(
            self._model(),
            catalog,
            self.replicas,
            catalog.checked_group(group),
            path,
        )
