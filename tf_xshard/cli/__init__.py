"""The commands demo, doctor, evidence and plan of `python -m tf_xshard`.

Enters: a command line. Leaves: text and an exit code. Uses public names, as
users do. `launch` is in `multi_worker`. May import every folder.

- `doctor`: prints versions and devices, checks the sums over groups, and times
  the collectives of this machine (`--bandwidth`).
- `evidence`: writes a report of tf_xshard on a machine's devices.
- `demo`: trains on real data, and checks tf_xshard's promises.
- `plan`: prints the communication plan of the first model in a script.
- `logical_devices`: creates strategies with several replicas on one machine.
"""
