"""Gradients of each replica -> the group's gradient.

Enters: a list of gradients (tensor, IndexedSlices or None) and their variables,
on every replica. Leaves: the same list, reduced, bitwise equal on all replicas
of a group. In between, replicas negotiate which of them has which gradient, and
tensors are packed into buckets. Imports `collectives` and above.
"""
