"""The commands demo, doctor and plan of `python -m tf_xshard`.

Enters: a command line. Leaves: text and an exit code. Uses public names, as
users do. `launch` is in `multi_worker`. May import every folder.

- `doctor`: prints versions and devices, and checks the sums over groups.
- `demo`: trains on real data, and checks tf_xshard's promises.
- `plan`: prints the communication plan of the first model in a script.
- `bandwidth`: measures this machine's collectives, for `doctor --bandwidth`.
- `logical_devices`: creates strategies with several replicas on one machine.
"""
