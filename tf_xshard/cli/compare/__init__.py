"""Trains a script on one and on several replicas, and compares the weights.

Enters: a script. Leaves: a table of steps, a verdict and what to write.

- `command`: the arguments, the comparison and the verdict.
- `runs`: runs the script in processes, and watches its files.
- `child`: the process of a run.
- `folder`: finds and moves what a run has written.
- `script`: runs the script, with all that is replaced meanwhile.
- `patches`: replaces methods, and tells the script's code from other code.
- `strategies`: gives strategies logical CPUs.
- `rows`: sees and cuts the data.
- `steps`: sees the updates of optimizers, and refuses what can't be compared.
- `recording`: the settings of a run, and what it has left.
- `cures`: the causes of a difference, and what helps.
- `diagnosis`: finds the cures that help.
- `known_errors`: finds what the troubleshooting page says of an error.
- `verdict`: compares two recordings.
"""

from __future__ import annotations

from tf_xshard.cli.compare.command import add_arguments as add_arguments
from tf_xshard.cli.compare.command import run as run
