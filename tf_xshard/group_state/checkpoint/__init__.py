"""A directory that holds every variable of every replica.

- `checkpoint`: saves a state and restores it, also on other replicas.
- `files`: the directory, which a new save replaces atomically.
- `matching`: which variable of a model belongs to which one of a save.
"""
