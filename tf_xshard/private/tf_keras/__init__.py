"""Uses the names of tf_keras (Keras 2) that it does not export.

Enters and leaves: optimizers of tf_keras. tf_keras is imported only when one of
these functions is called.

- `optimizers`: finds the optimizer that sums gradients, and replaces the sum.
"""
