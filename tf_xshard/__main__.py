"""`python -m tf_xshard demo | doctor | launch`."""

from __future__ import annotations

import argparse
import sys

import tensorflow as tf

from tf_xshard.cli import demo
from tf_xshard.cli import doctor
from tf_xshard.multi_worker import launch


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: Command line arguments; None for the process's own.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m tf_xshard")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train on real digits: one device against many",
        )
    )
    doctor.add_arguments(
        commands.add_parser(
            "doctor", help="what is here, and whether group sums are right"
        )
    )
    launch.add_arguments(
        commands.add_parser(
            "launch", help="run a script on several workers that train together"
        )
    )
    options = parser.parse_args(arguments)
    # Advice on speed and retracing, which is meant for training programs.
    tf.get_logger().setLevel("ERROR")
    return options.run(options, parser)


if __name__ == "__main__":
    sys.exit(main())
