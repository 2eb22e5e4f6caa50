"""Keras callbacks for groups of replicas and for AGNOptimizer's center.

Enters: the events of `fit`. Leaves: saves, columns in the logs, errors. Each
callback is a thin layer over `group_state`. Imports `group_state` and above.
"""
