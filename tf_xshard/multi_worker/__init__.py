"""Starts several processes, and makes Keras's `fit` work across them.

Enters: a script, or a call of `fit`. Leaves: processes with TF_CONFIG, and
Keras's training loops, fixed. `launch` and `local_cluster` import no
TensorFlow. Imports `reduction` and above.

- `fit`: `multi_worker_fit`, which fixes Keras's training loops.
- `chief_callbacks`: keeps workers from writing the chief's files.
- `processes`: `rank`, `is_chief` and `barrier`.
- `launch`: `python -m tf_xshard launch`, with its exit codes and restarts.
- `worker_process`: runs one worker, prints its output and passes on signals.
- `local_cluster`: ports, TF_CONFIG and settings for workers on this machine.
"""
