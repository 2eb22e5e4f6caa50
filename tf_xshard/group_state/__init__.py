"""What each group of replicas holds: read, evaluate, save, restore, merge.

Enters: a model, or other holders of variables. Leaves: one value per group,
files, tables. Every call takes a snapshot (`inventory.Catalog`) of what the
model holds now; reading changes nothing. Imports `optimizers`, `multi_worker`
and above.

- `state`: `GroupState`, what users call.
- `inventory`: the variables, optimizers and groups that a model has now.
- `replica_io`: reads and writes each replica's values.
- `merge`: several values into one; NumPy only.
- `evaluate`: each group's metrics and predictions, and the ensemble's.
- `ensemble`: the ensemble of all groups, as a Keras model.
- `export`: a group as an ordinary `.keras` model.
- `divergence`: how far replicas have diverged, by variable.
- `table`: rows of results that print as a table.
- `checkpoint`: saves every replica to a directory, and restores.
"""
