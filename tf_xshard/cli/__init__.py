"""`python -m tf_xshard`: demo and doctor.

Enters: a command line. Leaves: text and an exit code. Uses the package as its
users do, by its public names; `launch` is in `multi_worker`. May import every
folder.
"""
