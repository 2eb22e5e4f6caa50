"""Compares Model Garden's models with one device; runs the guide's programs.

Run: python -m tests.programs.model_garden

Makes an environment of its own, since Model Garden brings much. Trains there
under each kind of replicas, and runs the guide's two programs, of which one is
for TF-Recommenders.
"""

import os
import pathlib
import re
import tempfile

from tests.support import paths
from tests.support import processes

PACKAGES = (
    f"{paths.ROOT}[testing]",
    "tf-models-official==2.20.0",
    "tensorflow-recommenders==0.7.7",
    "pytest",
)


def _run(*command, **options):
    print(processes.run(command, 6000, check=True, **options).stdout)


def main():
    page = pathlib.Path(paths.ROOT, "tf_xshard/docs/from_tf_keras.md")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    with tempfile.TemporaryDirectory() as folder:
        _run(*processes.python("-m", "venv", folder))
        python = f"{folder}/bin/python"
        _run(python, "-m", "pip", "install", "-q", *PACKAGES)
        legacy = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
        _run(python, "-m", "tests.programs.model_garden_program", env=legacy)
        for library in ("from official.", "import tensorflow_rec"):
            [block] = [one for one in blocks if library in one]
            _run(python, "-c", block, cwd=folder, env=legacy)


if __name__ == "__main__":
    main()
