"""Reads, evaluates, saves, restores and merges the values of each group.

Enters: a model, or other holders of variables. Leaves: one value per group,
files, tables. Each call makes an `inventory.Catalog`, a snapshot of the model;
reading changes nothing. Imports `optimizers`, `multi_worker` and above.

- `state`: `GroupState`, the class that users call, which checks arguments.
- `inventory`: finds the variables, optimizers and groups of a model.
- `replica_io`: reads and writes each replica's values, across processes.
- `merge`: averages, converts and compares values in NumPy.
- `evaluate`: computes the metrics and predictions of groups and the ensemble.
- `ensemble`: a Keras model that averages the outputs of all groups.
- `export`: saves a group as an ordinary `.keras` model.
- `divergence`: measures and repairs differences between replicas.
- `table`: a list of rows that prints as a table.
- `checkpoint`: saves every replica to a directory, and restores.
"""
