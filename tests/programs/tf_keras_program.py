"""Trains with tf_keras in one of four processes; returns the differences."""

from tests.support import keras_2


def main(kind):
    return keras_2.differences(keras_2.strategy_of(kind), keras_2.ALL_CASES)
