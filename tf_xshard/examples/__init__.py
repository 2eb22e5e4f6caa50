"""Programs that show one thing each, in under a minute on CPUs.

Run one with `python -m tf_xshard.examples.NAME`, after
`pip install '.[cpu,demo]'` in a clone. `tpu_without_hardware` also needs the
extra `[testing]`, and `from_tf_keras` needs `[tensorflow,tf_keras]` instead of
`[cpu]`. The data are part of scikit-learn.

- `one_device_numbers`: compares eight replicas with one device.
- `ensemble`: trains four models in one `fit`.
- `custom_loop`: trains in a custom loop.
- `padded_text`: counts tokens instead of rows.
- `sharded_adamw`: divides AdamW's state over the replicas.
- `muon`: divides Muon's update over the replicas, by whole variables.
- `local_sgd`: averages models every 10 steps.
- `int8_gradients`: sends gradients in 8 bits.
- `many_workers`: trains on several processes.
- `from_horovod`: shows each of Horovod's lines beside its replacement.
- `from_tf_keras`: trains Keras 2's models in two groups.
- `tf1_script`: runs a TPUEstimator without a TPU.
- `tpu_without_hardware`: simulates a TPU, and compiles for one.
"""
