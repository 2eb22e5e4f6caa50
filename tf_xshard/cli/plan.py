"""Prints the communication plan of the first model that a script compiles."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from typing import Any

import keras

import tf_xshard


class _Compiled(BaseException):
    """Leaves the script, whose `except Exception` does not catch it."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--gigabytes-per-second",
        type=_speeds,
        metavar="GB",
        help="the speed of a link in GB/s, to show times; one number, or two"
        " separated by a comma (within a host and across hosts)",
    )
    parser.add_argument(
        "--rows-per-step",
        type=int,
        metavar="ROWS",
        help="the number of different Embedding rows in a replica's batch",
    )
    parser.add_argument(
        "script", help="the script, which runs until it compiles a model"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the script until a model is compiled, and prints its plan."""
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}")
    model = _first_model(options.script, options.arguments)
    if model is None:
        parser.error(
            f"{options.script} ended without compiling a model. In a custom"
            " training loop, call tf_xshard.communication_plan(optimizer,"
            " variables)."
        )
    try:
        plan = tf_xshard.communication_plan(
            model,
            rows_per_step=options.rows_per_step,
            gigabytes_per_second=options.gigabytes_per_second,
        )
    except (TypeError, ValueError) as error:
        # The script's model or an option can't be planned, such as a model with
        # a plain Keras optimizer.
        parser.error(f"{options.script}: {error}")
    print(plan)
    return 0


def _speeds(text: str) -> tuple[float, float]:
    within, _, across = text.partition(",")
    try:
        return float(within), float(across or within)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a number, or two separated by a comma, got {text!r}"
        ) from error


def _first_model(script: str, arguments: list[str]) -> keras.Model | None:
    plain = keras.Model.compile

    @functools.wraps(plain)
    def compile_and_leave(
        model: keras.Model, *args: Any, **kwargs: Any
    ) -> None:
        plain(model, *args, **kwargs)
        raise _Compiled(model)

    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    # Python does the same for a script.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    keras.Model.compile = compile_and_leave
    try:
        runpy.run_path(script, run_name="__main__")
    except _Compiled as compiled:
        return compiled.model
    finally:
        keras.Model.compile = plain
        sys.argv, sys.path[:] = before
    return None
