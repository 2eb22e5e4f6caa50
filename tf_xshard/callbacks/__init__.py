"""Keras callbacks for groups of replicas and for AGNOptimizer's center.

Enters: the events of `fit`. Leaves: saves, columns in the logs, errors. Each
callback is a few lines over `group_state`, which it imports, and what is above.
"""
