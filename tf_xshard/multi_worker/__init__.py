"""All that knows several processes: `fit` over them, and starting them.

Enters: a script, or a call of `fit`. Leaves: processes with TF_CONFIG, and
Keras' loops as they should be. `launch` and `local_cluster` import no
TensorFlow. Imports `reduction` and above.

- `fit`: `multi_worker_fit`: Keras' `fit` over several processes.
- `chief_callbacks`: callbacks that write files, on one process only.
- `processes`: which process this is, and waiting for the others.
- `launch`: `python -m tf_xshard launch`: exit codes, restarts.
- `worker_process`: one worker's process, and its signals.
- `local_cluster`: a cluster of processes on this machine.
"""
