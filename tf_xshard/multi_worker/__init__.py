"""Starts several processes, and makes Keras' `fit` work across them.

Enters: a script, or a call of `fit`. Leaves: processes with TF_CONFIG, and
Keras' training loops, fixed. All but `fit` and `processes` import no
TensorFlow. Imports `reduction` and above.

- `connect`: `tf_xshard.connect`, which sets TF_CONFIG from what an engine says.
- `exchange`: how the processes of a job tell each other their addresses.
- `fit`: `multi_worker_fit`, which fixes Keras' training loops, and keeps
  workers from writing the chief's files.
- `processes`: `rank`, `is_chief` and `barrier`.
- `launch`: `python -m tf_xshard launch`, with its exit codes and restarts;
  runs a worker, prints its output and passes on signals.
- `local_cluster`: ports, TF_CONFIG and settings for workers on this machine.
"""
