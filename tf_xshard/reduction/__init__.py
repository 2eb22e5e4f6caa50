"""Gradients of each replica -> the group's gradient.

Enters: a batch of gradients (tensor, IndexedSlices or None) and their
variables, on every replica. Leaves: the same batch, reduced, bitwise equal on
all replicas of a group. Imports `collectives` and above.

- `gradients`: `GradientBatch`; checks the dtypes and shapes that users pass.
- `reducer`: the pipeline of the modules below, for all-reduce, reduce-scatter
  and all-gather.
- `presence`: the replicas agree on who has a gradient for which variable.
- `error_feedback`: what communication loses, carried to the next step.
- `buckets`: packs tensors, and unpacks what was reduced.
- `wire`: casts packed tensors for the collective, or has them quantized.
- `quantized_sum`, `quantization`: sums of which 8-bit integers are sent.
- `sparse_rows`: gathers and sums the rows of IndexedSlices.
- `loss_scaling`: whether all replicas' gradients are finite.
- `clipping`: ready-made hooks.
- `group_reduce`: the reduction for values of the user's own.
"""
