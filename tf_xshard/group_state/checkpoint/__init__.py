"""A directory with the variables of every replica.

- `checkpoint`: saves and restores a state, also onto other groups; pairs a
  model's variables with the entries of a save.
- `files`: locks, writes, checks and atomically replaces a save's files.
"""
