"""Versions stand in setup.cfg, and newer ones than tested are allowed."""

import importlib.metadata

import pytest

from tests.support import paths
from tests.support import processes
from tf_xshard import dependencies
from tf_xshard.private import names as private_names


@pytest.fixture(autouse=True)
def _no_cache():
    dependencies.requirements.cache_clear()
    yield
    dependencies.requirements.cache_clear()


def _has_none(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("where", ["metadata", "setup.cfg"])
def test_what_is_tested(where, monkeypatch):
    found = [
        "numpy",
        "keras<4,>=3.12",
        'keras<3.17; extra == "tested"',
        'tensorflow<2.23,>=2.20; extra == "tensorflow"',
        'jax<0.13,>=0.10.2; extra == "testing"',
    ]
    requires = _has_none if where == "setup.cfg" else lambda name: found
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert dependencies.tested("keras") == ((3, 12), (3, 16))
    assert dependencies.tested("tensorflow") == ((2, 20), (2, 22))
    jax = dependencies.specifier("jax")
    versions = ("0.10.1", "0.10.2", "0.12.1", "0.13")
    assert [jax.contains(v) for v in versions] == [False, True, True, False]
    text = (paths.ROOT / "setup.cfg").read_text()
    assert "    keras >=3.12,<4\n" in text


def test_two_tensorflows_of_different_versions(monkeypatch):
    installed = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: installed.get(name) or _has_none(name),
    )
    dependencies.check()
    installed["tensorflow-cpu"] = "2.22.0"
    with pytest.raises(ImportError, match="2.21.0 and tensorflow-cpu 2.22.0"):
        dependencies.check()


_WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
sys.argv[0] = "tf-xshard"
from tf_xshard import __main__
sys.exit(__main__.main())
"""


_SCRIPT = ["-c", _WITHOUT_TENSORFLOW]


@pytest.mark.parametrize(
    "command",
    [
        [*_SCRIPT, "--help"],
        [*_SCRIPT, "launch", "--workers", "1", "-m", "json.tool", "--help"],
        ["-m", "tf_xshard", "launch", "--help"],
    ],
    ids=["help", "launch", "module"],
)
def test_no_tensorflow_for_help_and_launch(command):
    """An import of it ends the script, as where it is not installed."""
    command = processes.python("-X", "importtime", *command)
    run = processes.run(command, check=True, tensorflow=0)
    assert "usage: " in run.stdout
    # The list of imports with their times.
    assert "argparse" in run.stderr and "tensorflow" not in run.stderr


def test_a_copy_beside_another_projects_setup(tmp_path, monkeypatch):
    """Its versions are not ours, and a moved name is named all the same."""
    (tmp_path / "setup.cfg").write_text("[options]\npackages = find:\n")
    copy = tmp_path / "tf_xshard" / "dependencies.py"
    monkeypatch.setattr(dependencies, "__file__", str(copy))
    monkeypatch.setattr(importlib.metadata, "requires", _has_none)
    assert dependencies.requirements() == ()
    names = private_names.PrivateNames("Pytest", {"gone": "pytest._gone"})
    private_names.DECLARED.remove(names)
    with pytest.raises(ImportError, match="_gone.*unknown versions"):
        names.check()
