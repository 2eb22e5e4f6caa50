"""What engines start: training that one device repeats.

`python -m tests.programs.engine_program [GROUPS]`. Prints one JSON line with
what this process holds at the end.
"""

import json
import sys

import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_program as program


def main(groups="null"):
    tf_xshard.connect(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = program.trained(strategy, json.loads(groups))
    weights = program.values(model.trainable_variables)
    plan = tf_xshard.communication_plan(model)
    paths = sorted({one.path for one in plan.operations})
    result = [tf_xshard.rank(strategy), weights, paths]
    print("final", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
