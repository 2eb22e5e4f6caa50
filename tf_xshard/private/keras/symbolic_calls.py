"""Tells whether Keras only computes the shapes of a model's tensors."""

from __future__ import annotations

from tf_xshard.private import names

# Present in Keras 3.12 to 3.16.
_KERAS = names.PrivateNames(
    "group_reduce",
    {
        "in_symbolic_scope": (
            "keras.src.backend.common.symbolic_scope.in_symbolic_scope"
        )
    },
)


def is_running() -> bool:
    """Returns True in a layer or loss that Keras calls without values.

    Keras does so when a model is made, and before the first batch of `fit`.
    """
    return _KERAS.in_symbolic_scope()
