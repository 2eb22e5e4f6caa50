"""Reduces each replica's gradients over its group.

Enters: a batch of gradients (tensor, IndexedSlices or None) and their
variables, on every replica. Leaves: the same batch, reduced, bitwise equal on
all replicas of a group. Imports `collectives` and above.

- `gradients`: `GradientBatch`, and checks of the gradients that users pass.
- `reducer`: runs the stages below, for all-reduce, reduce-scatter, all-gather,
  and sums the rows of IndexedSlices.
- `presence`: agrees on which replicas have a gradient, and which have None.
- `error_feedback`: adds the last step's rounding errors to the next gradients.
- `buckets`: packs dense tensors into buckets, and unpacks the results.
- `owners`: communicates whole tensors to and from one replica of a group.
- `wire`: casts buckets to `Communication.dtype`, or has them quantized.
- `quantization`: rounds float32 numbers to 8-bit integers with scales, and
  sums them by all-to-all and all-gather (`"int8"`).
- `loss_scaling`: makes all replicas skip a step after an overflow on one.
- `clipping`: the public hooks `clip_by_global_norm`, `clip_by_norm`, ...
- `loss_records`: passes a loss's number of items to the optimizer's next step.
- `group_reduce`: the public function that reduces values in a custom loop.
"""
