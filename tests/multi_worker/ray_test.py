"""Ray trains, and starts again after a worker was killed: to the bit."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import paths


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment of its own, since Ray brings much."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", f"{paths.ROOT}[cpu]"]
    subprocess.run([*install, "ray[train]"], check=True)
    return python


def _finals(python, folder, *options):
    """Where each worker began last, and what it holds at the end."""
    folder.mkdir()
    ended = subprocess.run(
        [python, "-m", "tests.programs.ray_program", folder, *options],
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=900,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    found = [
        json.loads(path.read_text()) for path in sorted(folder.glob("rank_*"))
    ]
    assert len(found) == 2
    return [epoch for epoch, _ in found], [digest for _, digest in found]


@pytest.mark.full
def test_a_killed_worker_on_ray(python, tmp_path):
    epochs, undisturbed = _finals(python, tmp_path / "undisturbed")
    assert epochs == [0, 0] and len(set(undisturbed)) == 1
    epochs, digests = _finals(python, tmp_path / "killed", "--kill")
    assert epochs[0] == epochs[1] > 0
    assert digests == undisturbed
