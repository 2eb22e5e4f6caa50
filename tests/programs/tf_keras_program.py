"""Trains with tf_keras in one of four processes; prints differences as JSON."""

import json
import sys

from tests.support import keras_2


def main(kind):
    strategy = keras_2.strategy_of(kind)
    print(json.dumps(keras_2.differences(strategy, keras_2.ALL_CASES)))


if __name__ == "__main__":
    main(sys.argv[1])
