"""One run of a script, in a process of its own.

`python -m tf_xshard.cli.compare.child SETTINGS RESULT DESCRIPTOR`: pickled
settings, where the recording is pickled to, and where progress is written.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys


def main() -> None:
    settings_path, result_path, descriptor = sys.argv[1:]
    # The command asks where a script hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    import keras
    import tensorflow as tf

    from tf_xshard.cli import logical_devices
    from tf_xshard.cli.compare import recording as recording_lib
    from tf_xshard.cli.compare import script

    with open(settings_path, "rb") as file:
        settings = pickle.load(file)
    # A program that the script starts must not keep it open.
    os.set_inheritable(int(descriptor), False)
    progress = os.fdopen(int(descriptor), "w", buffering=1)

    def finish(recording: recording_lib.Recording) -> None:
        with open(result_path + ".part", "wb") as file:
            pickle.dump(recording, file)
        os.replace(result_path + ".part", result_path)
        sys.stdout.flush()
        sys.stderr.flush()
        # No `finally` and no atexit of the script, which could write files.
        os._exit(0)

    tf.config.set_visible_devices([], "GPU")
    logical_devices.use_logical_cpus(settings.num_replicas)
    if settings.floatx:
        keras.config.set_floatx(settings.floatx)
    keras.config.disable_traceback_filtering()
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    finish(
        script.trained(
            settings, lambda step: print(step, file=progress), finish
        )
    )


if __name__ == "__main__":
    main()
