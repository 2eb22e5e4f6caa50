"""What each group of replicas holds: read, evaluate, save, restore, merge.

Enters: a model, or other holders of variables. Leaves: one value per group,
files, tables. Every call takes a snapshot (`catalog`) of what the model holds
now; reading changes nothing. Imports `optimizers`, `multi_worker` and above.
"""
