"""Trains a script on one and on several replicas, and compares the weights.

- `script`: runs a script in this process, and records its first steps.
- `rows`: sees and cuts the data of a script.
- `recording`: what a run has left.
- `cures`: the causes of a difference, and what helps.
- `child`: a run in a process of its own.
- `folder`: keeps the files of the working folder.
- `verdict`: compares two recordings.
- `command`: the runs of `python -m tf_xshard compare`, and what it prints.
"""

from __future__ import annotations

from tf_xshard.cli.compare.command import add_arguments as add_arguments
from tf_xshard.cli.compare.command import run as run
