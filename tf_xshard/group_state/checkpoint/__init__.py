"""Saves the variables of every replica to a directory, and restores them.

- `checkpoint`: saves and restores a state, including onto other groups; pairs a
  model's variables with the entries of a save.
- `files`: locks, writes, checks and atomically replaces a save's files.
"""
