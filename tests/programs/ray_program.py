"""Checks training on Ray, which restarts after a killed worker: to the bit.

`python -m tests.programs.ray_program` installs this package and Ray into an
environment of its own, since Ray brings much.
"""

import json
import os
import pathlib
import tempfile

from tests.support import paths
from tests.support import processes


def _finals(python, folder, *options):
    """Where each worker began last, and what it holds at the end."""
    folder.mkdir()
    processes.run(
        [python, "-m", "tests.programs.ray_training", folder, *options],
        900,
        check=True,
        tensorflow=4,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    found = [
        json.loads(path.read_text()) for path in sorted(folder.glob("rank_*"))
    ]
    assert len(found) == 2, found
    return [epoch for epoch, _ in found], [digest for _, digest in found]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = folder / "environment" / "bin" / "python"
        for command in (
            processes.python("-m", "venv", folder / "environment"),
            [
                *(python, "-m", "pip", "install", "-q"),
                *(f"{paths.ROOT}[cpu]", "ray[train]"),
            ],
        ):
            processes.run(command, 1800, check=True, tensorflow=0)
        epochs, undisturbed = _finals(python, folder / "undisturbed")
        assert epochs == [0, 0] and len(set(undisturbed)) == 1, epochs
        epochs, digests = _finals(python, folder / "killed", "--kill")
        assert epochs[0] == epochs[1] > 0, epochs
        assert digests == undisturbed, (digests, undisturbed)
    print("Ray has restarted a killed worker: the same bits.")


if __name__ == "__main__":
    main()
