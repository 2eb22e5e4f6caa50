"""Computes the metrics and predictions of each group and of the ensemble."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tf_xshard.group_state import ensemble as ensemble_lib
from tf_xshard.group_state import inventory
from tf_xshard.group_state import replica_io
from tf_xshard.group_state import table
from tf_xshard.multi_worker import fit


def refuse_generator(data: Any) -> None:
    """Raises TypeError for a generator, which can be read only once."""
    if inspect.isgenerator(data):
        raise TypeError(
            "The data are read once for each group, but a generator can be read"
            " only once. Pass arrays or a tf.data.Dataset."
        )


class GroupEvaluation:
    """Evaluates and predicts with each group's weights, on all replicas."""

    def __init__(
        self,
        model: keras.Model,
        catalog: inventory.Catalog,
        replicas: replica_io.ReplicaValues,
        ensemble: ensemble_lib.Ensemble | None = None,
    ) -> None:
        self._model = model
        self._catalog = catalog
        self._replicas = replicas
        # The ensemble is created once, so that its functions are traced once.
        self.ensemble = ensemble

    def evaluate(
        self, data: Any, with_ensemble: bool, options: dict[str, Any]
    ) -> table.Table:
        """See `GroupState.evaluate`; `options` go to `keras.Model.evaluate`."""
        rows = table.Table()
        groups = range(self._catalog.groups.num_groups)
        with self.preserved():
            members = [self._weights(group) for group in groups]
            for group, weights in enumerate(members):
                self._assign(weights)
                logs = self._model.evaluate(data, **options)
                rows.append(table.row_of(group, logs))
            own_step = type(self._model).test_step is not keras.Model.test_step
            if with_ensemble and len(groups) > 1 and not own_step:
                logs = self._ensemble_of(members).evaluate(data, **options)
                rows.append(table.row_of("ensemble", logs))
        return rows

    def predict(
        self, data: Any, group: int | None, options: dict[str, Any]
    ) -> Any:
        """See `GroupState.predict`; `options` go to `keras.Model.predict`."""
        with self.preserved():
            if group is not None:
                self._assign(self._weights(group))
                return self._model.predict(data, **options)
            members = [
                self._weights(one)
                for one in range(self._catalog.groups.num_groups)
            ]
            return self._ensemble_of(members).predict(data, **options)

    @contextlib.contextmanager
    def with_weights_of(self, group: int) -> Iterator[None]:
        """Puts a group's weights into the model inside a `with` block."""
        with self.preserved():
            self._assign(self._weights(group))
            yield

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores all variables, including metrics, after a `with` block."""
        kept = [
            (variable, self._replicas.local(variable))
            for variable in (
                *self._model.variables,
                *self._model.metrics_variables,
            )
        ]
        several = self._replicas.num_processes > 1
        try:
            with (
                fit.multi_worker_fit(self._replicas.communication)
                if several
                else contextlib.nullcontext()
            ):
                yield
        finally:
            for variable, values in kept:
                self._replicas.assign(variable, values)

    def _weights(self, group: int) -> list[np.ndarray]:
        by_id = {id(one.variable): one for one in self._catalog.variables()}
        ordered = [by_id[id(variable)] for variable in self._model.weights]
        return self._replicas.of_group(
            self._catalog.shown(ordered),
            self._catalog.groups.to_list()[group],
        )

    def _assign(self, weights: Sequence[np.ndarray]) -> None:
        """Assigns weights to the model, on all replicas."""
        if len(weights) != len(self._model.weights):
            raise ValueError(
                f"The model {self._model.name!r} has layers that have not been"
                " built. Call it on a batch first."
            )
        for variable, value in zip(self._model.weights, weights, strict=True):
            self._replicas.assign_all(variable, value)

    def _ensemble_of(
        self, members: Sequence[Sequence[np.ndarray]]
    ) -> ensemble_lib.Ensemble:
        with self._replicas.strategy.scope():
            if self.ensemble is None or not self.ensemble.is_of(
                self._model, len(members)
            ):
                self.ensemble = ensemble_lib.Ensemble(self._model, len(members))
            self.ensemble.show(members)
        return self.ensemble
