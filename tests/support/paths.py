"""Where the project is, for tests that read files or start processes."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
