"""Starts several processes, and makes Keras's `fit` work across them.

Enters: a script, or a call of `fit`. Leaves: processes with TF_CONFIG, and
fixed training loops of Keras. Only `fit` and `processes` import TensorFlow.
Imports `reduction` and above.

- `connect`: `tf_xshard.connect`, which sets TF_CONFIG from an engine's
  variables.
- `exchange`: tells the processes of a job each other's addresses.
- `fit`: `multi_worker_fit`, which fixes Keras's training loops, and keeps
  workers from writing the chief's files.
- `processes`: `rank`, `is_chief` and `barrier`.
- `launch`: `python -m tf_xshard launch`, with its exit codes and restarts;
  runs a worker, prints its output and passes on signals.
- `local_cluster`: ports, TF_CONFIG and settings for workers on this machine.
"""
