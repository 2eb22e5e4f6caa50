"""Runs a program under Horovod, in the environment that has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def command(
    python: str, num_processes: int, program: str, arguments: Sequence[str]
) -> list[str]:
    """What runs a program of this folder in several processes.

    Args:
      python: The Python of the environment.
      num_processes: How many processes.
      program: The file's name.
      arguments: The program's.

    Returns:
      A command line.
    """
    return [
        *(os.path.join(os.path.dirname(python), "horovodrun"), "--gloo"),
        *("-np", str(num_processes), python),
        os.path.join(os.path.dirname(__file__), program),
        *arguments,
    ]


def environment(python: str) -> Mapping[str, str]:
    """The variables with which `horovodrun` finds its environment."""
    folder = os.path.dirname(python)
    return {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def printed(
    command_line: Sequence[str],
    word: str,
    variables: Mapping[str, str],
    timeout_seconds: float,
) -> tuple[str, Any]:
    """Runs a program and reads the line that has a word before JSON.

    Args:
      command_line: Starts the program.
      word: What stands before the JSON.
      variables: Its environment.
      timeout_seconds: Ends a run that hangs.

    Returns:
      The line, and what the JSON says.
    """
    run = subprocess.run(
        command_line,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout_seconds,
        env=variables,
    )
    [line] = [line for line in run.stdout.splitlines() if f"{word} " in line]
    return line, json.loads(line.split(f"{word} ")[1])
