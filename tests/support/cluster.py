"""Runs a test's program in several processes that form a cluster."""

import contextlib
import json
import subprocess
import tempfile
import time

from tests.support import paths
from tf_xshard.multi_worker import local_cluster


def results_of(program, num_workers, arguments=(), seconds=540):
    """What each worker prints last, as JSON; all of them must end well."""
    with contextlib.ExitStack() as stack:
        output = [
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"]
            for _ in range(num_workers)
        ]
        processes = local_cluster.start(
            ["-m", program, *arguments], output, cwd=paths.ROOT
        )
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        deadline = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in processes]
        for pair in output:
            for file in pair:
                file.seek(0)
        # The first cause may be in any of them.
        said = [errors.read()[-3000:] for _, errors in output]
        assert codes == [0] * num_workers, "\n".join([str(codes), *said])
        return [json.loads(out.read().splitlines()[-1]) for out, _ in output]
