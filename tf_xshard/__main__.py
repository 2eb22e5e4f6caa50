"""Runs the commands of `python -m tf_xshard`, also named `tf-xshard`."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

# Import a command's module when it is called, since `launch` and help need no
# TensorFlow.
_COMMANDS = {
    "compare": (
        "tf_xshard.cli.compare",
        "does a script train on several replicas as on one?",
    ),
    "demo": (
        "tf_xshard.cli.demo",
        "train on real digits: one device compared with many",
    ),
    "doctor": (
        "tf_xshard.cli.doctor",
        "check this machine's devices and whether group sums are right",
    ),
    "evidence": (
        "tf_xshard.cli.evidence",
        "write a report of this machine's devices, for the developers",
    ),
    "launch": (
        "tf_xshard.multi_worker.launch",
        "run a script on several workers that train together",
    ),
    "plan": (
        "tf_xshard.cli.plan",
        "plan the communication of the first model that a script compiles",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="tf-xshard",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="commands:\n"
        + "\n".join(
            f"  {name:8}{what}" for name, (_, what) in _COMMANDS.items()
        ),
        epilog="tf-xshard COMMAND --help lists a command's arguments.",
    )
    parser.add_argument(
        "command", choices=list(_COMMANDS), metavar="COMMAND", help="see above"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args(arguments)
    module_name, what = _COMMANDS[options.command]
    module = importlib.import_module(module_name)
    # Hide TensorFlow's advice on speed and retracing, which addresses training
    # programs.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    command = argparse.ArgumentParser(
        prog=f"{parser.prog} {options.command}", description=what
    )
    module.add_arguments(command)
    options = command.parse_args(options.arguments)
    return options.run(options, command)


if __name__ == "__main__":
    sys.exit(main())
