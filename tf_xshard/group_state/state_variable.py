"""One variable of the state of a model, and what it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_xshard.distribute import replica_variables


@dataclasses.dataclass(frozen=True)
class StateVariable:
    """One variable of the state.

    Attributes:
      part: The part that it belongs to: `"model"`, `"optimizer"`, or a name
        that the user gave.
      name: Its path.
      variable: A Keras or TensorFlow variable.
      kind: `"weight"`; `"slot"`, of an optimizer; `"center"`, of AGNOptimizer;
        `"local"`: a replica's own (what AGN trains, open rounds of towers,
        counters); `"statistic"`: not trained, may differ by replica in Keras;
        `"random"`: a generator's state; `"metric"`.
      of_optimizer: Whether it belongs to an optimizer, in which case its name
        contains that of another variable.
    """

    part: str
    name: str
    variable: Any
    kind: str
    of_optimizer: bool = False

    @property
    def key(self) -> int:
        """A key that is equal for two entries of one variable."""
        return id(replica_variables.tensorflow_variable(self.variable))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(int(n) for n in self.variable.shape)

    @property
    def numpy_type(self) -> np.dtype:
        """Its NumPy dtype."""
        dtype = replica_variables.copies(self.variable)[0].dtype
        return np.dtype(dtype.as_numpy_dtype)

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return replica_variables.copies(self.variable)[0].dtype.name
