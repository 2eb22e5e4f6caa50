"""`python -m tf_xshard`: demo, doctor and plan.

Enters: a command line. Leaves: text and an exit code. Uses the package as its
users do, by its public names; `launch` is in `multi_worker`. May import every
folder.

- `doctor`: versions and devices, which path a group sum takes, and its results.
- `demo`: trains on real data, and checks what the package promises.
- `plan`: what the first model that a script compiles would communicate.
- `bandwidth`: the speed of the paths of group sums on this machine.
- `logical_devices`: several replicas on one machine.
"""
