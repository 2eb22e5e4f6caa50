"""What each group of replicas holds: read, evaluate, save, restore, merge.

Enters: a model or what else holds variables. Leaves: one value for each group,
files, tables. Every call takes a snapshot (`catalog`) of what the model holds
now; reading changes nothing. Imports `optimizers`, `multi_worker` and above.
"""
