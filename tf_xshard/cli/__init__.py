"""The commands of `python -m tf_xshard`, all but `launch`.

Enters: a command line. Leaves: text and an exit code. Uses public names, as
users do. `launch` is in `multi_worker`. May import every folder.

- `compare`: compares a script's weights on one and on several replicas.
- `doctor`: prints versions and devices, checks the sums over groups, and times
  the collectives of this machine (`--bandwidth`).
- `evidence`: writes a report of tf_xshard on a machine's devices.
- `demo`: trains on real data, and checks tf_xshard's promises.
- `plan`: prints the communication plan of the first model in a script.
- `checks`: compares sums over groups with NumPy.
- `numbers`: trains on one device and under a strategy, and compares.
- `timing`: times functions in turn.
- `logical_devices`: creates strategies with several replicas on one machine.
"""
