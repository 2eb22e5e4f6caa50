"""Runs programs of tests/programs with Keras 2, in processes of their own."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

from tests.support import paths
from tf_xshard.multi_worker import local_cluster


def printed(program, kind, python=sys.executable):
    """The JSON that each process prints; "workers" are four processes."""
    count = 4 if kind == "workers" else 1
    addresses = local_cluster.local_addresses(count)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(count):
            out, error = (
                stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"
            )
            process = stack.enter_context(
                subprocess.Popen(
                    [python, "-m", f"tests.programs.{program}", kind],
                    stdout=out,
                    stderr=error,
                    cwd=paths.ROOT,
                    env={
                        **os.environ,
                        **local_cluster.settings(count),
                        "TF_USE_LEGACY_KERAS": "1",
                        "TF_CONFIG": local_cluster.tf_config(addresses, rank),
                    },
                )
            )
            stack.callback(process.kill)
            processes.append((process, out, error))
        for process, out, error in processes:
            process.wait(2500)  # The test's own limit may end it sooner.
            for one in (out, error):
                one.seek(0)
            assert process.returncode == 0, error.read()[-3000:]
        return [
            json.loads(out.read().splitlines()[-1]) for _, out, _ in processes
        ]


def differences(found):
    """The largest difference from one device of all processes, by case."""
    return {
        name: max(one[name] for one in found)
        for name, value in found[0].items()
        if isinstance(value, float)
    }
