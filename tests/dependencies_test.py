"""Versions stand in setup.cfg, and newer ones than tested are allowed."""

import configparser
import importlib.metadata

import pytest
from packaging import specifiers

from tests.support import paths
from tests.support import processes
from tf_xshard import dependencies


def test_tested_versions_are_those_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(paths.ROOT / "setup.cfg")
    lines = "".join(config["options.extras_require"].values())
    for name in ("tensorflow", "keras", "jax", "jaxlib", "libtpu"):
        required = {
            str(specifiers.SpecifierSet(line.split(";")[0][len(name) :]))
            for line in lines.splitlines()
            if line.startswith(f"{name} ")
        }
        upper = {str(dependencies.specifier(name))}
        assert required == ({"<3.17"} if name == "keras" else upper)
    assert "keras >=3.12,<4" in config["options"]["install_requires"]
    assert dependencies.tested("keras") == ((3, 12), (3, 16))
    assert dependencies.tested("tensorflow") == ((2, 20), (2, 22))


def test_two_tensorflows_of_different_versions(monkeypatch):
    installed = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}

    def has_none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: installed.get(name) or has_none(name),
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
