"""All that knows several processes: `fit` over them, and starting them.

Enters: a script, or a call of `fit`. Leaves: processes with TF_CONFIG, and
Keras' loops as they should be. `launch` and `local_cluster` import no
TensorFlow. Imports `reduction` and above.
"""
