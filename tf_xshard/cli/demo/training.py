"""One run of the demo: a model trained on one device or under a strategy."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import tensorflow as tf

from tf_xshard.cli.demo import digits as digits_lib


class Trained:
    """A finished run: the weights of every replica, and what they are worth.

    Attributes:
      model: The model.
      start: The weights that it started from.
      weights: `weights[replica][variable]`.
    """

    def __init__(
        self,
        title,
        digits,
        options,
        strategy=None,
        wrap=None,
        callbacks=(),
        train_step=None,
    ):
        print(f"\n{title}", flush=True)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = digits_lib.model(options.seed)
            optimizer = digits_lib.OPTIMIZERS[options.optimizer]()
            if train_step:
                model.train_step = functools.partial(train_step, model)
            digits_lib.compiled(model, wrap(optimizer) if wrap else optimizer)
            model.optimizer.build(model.trainable_variables)
        self.start = [np.array(v) for v in model.get_weights()]
        dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
        model.fit(
            dataset.batch(digits.batch_size, drop_remainder=True),
            epochs=options.epochs,
            steps_per_epoch=digits.steps_per_epoch,
            shuffle=False,
            callbacks=[one(model, strategy) for one in callbacks],
        )
        self.model = model
        self._digits, self._options = digits, options
        self.weights = of_replicas(model, strategy)

    def moved(self, replica_id=0) -> float:
        """The largest change of a weight."""
        return difference(self.weights[replica_id], self.start)

    def accuracy(self, replica_id=0) -> float:
        """On the validation data."""
        return digits_lib.evaluate(
            self.weights[replica_id], self._digits, self._options.seed
        )[1]

    def tolerance(self) -> float:
        """How exact float32 is: what the order of rows in a batch changes."""
        permuted = Trained(
            "The same with the rows inside each batch in another order",
            self._digits.with_permuted_batches(self._options.seed),
            self._options,
        )
        return tolerance(deviation(permuted.weights, self.weights[0]))


def tolerance(of_permuted_rows: float) -> float:
    """What counts as equal, by what another order of rows changes."""
    return max(1e-6, 3 * of_permuted_rows)


def of_replicas(model, strategy) -> list[list[np.ndarray]]:
    """`weights[replica][variable]`."""
    if strategy is None:
        return [model.get_weights()]
    of_variables = [
        [np.array(one) for one in strategy.experimental_local_results(v.value)]
        for v in model.weights
    ]
    return [list(of_replica) for of_replica in zip(*of_variables, strict=True)]


def difference(some, others) -> float:
    """The largest one between two lists of weights."""
    # np.max and not max, which can lose a nan.
    return float(
        np.max([np.abs(a - b).max() for a, b in zip(some, others, strict=True)])
    )


def deviation(weights, reference, members=None) -> float:
    """The largest difference of any replica's weights from a reference's."""
    members = range(len(weights)) if members is None else members
    return float(np.max([difference(weights[r], reference) for r in members]))
