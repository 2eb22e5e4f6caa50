"""Makes a TPUEstimator's graphs, sessions, hooks and summaries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_xshard.compat.v1.estimator import tpu_config
from tf_xshard.private.tensorflow import v1 as tensorflow_v1

# The collection of operations that initialize a graph's input. They are not in
# the collection of table initializers, which a Scaffold with its own
# local_init_op would leave out.
INPUTS = "tf_xshard_inputs"


class Sessions:
    """Makes a TPUEstimator's graphs and sessions."""

    def __init__(self, config: tpu_config.RunConfig, directory: str) -> None:
        self._config = config
        self._directory = directory

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Enters a new graph with a global step, which all shards share."""
        with tf.Graph().as_default():
            tf.compat.v1.set_random_seed(self._config.tf_random_seed)
            tf.compat.v1.train.create_global_step()
            yield

    def for_training(
        self,
        spec: Any,
        loss: tf.Tensor,
        hooks: Sequence[Any] | None,
        listeners: Sequence[Any],
    ) -> Any:
        """Makes a session that resumes from the newest checkpoint and saves."""
        tf1 = tf.compat.v1
        config = self._config
        tf1.summary.scalar("loss", loss)
        all_hooks = [
            tf1.train.NanTensorHook(loss),
            *(spec.training_hooks or ()),
            # This process is the chief. A TPUEstimatorSpec has no such hooks.
            *(getattr(spec, "training_chief_hooks", None) or ()),
            *(hooks or ()),
        ]
        if config.log_step_count_steps:
            step = tf1.train.get_global_step()
            all_hooks.append(
                tf1.train.LoggingTensorHook(
                    {"loss": loss, "step": step},
                    every_n_iter=config.log_step_count_steps,
                )
            )
        if config.save_summary_steps:
            all_hooks.append(
                tf1.train.SummarySaverHook(
                    config.save_summary_steps,
                    output_dir=self._directory,
                    summary_op=tf1.summary.merge_all(),
                )
            )
        scaffold = self._scaffold(spec)
        # The hook that saves is last, to save what other hooks do in `end`.
        every_steps = config.save_checkpoints_steps
        all_hooks.append(
            SaverHook(scaffold, self._directory, every_steps, listeners)
        )
        return self._session(
            scaffold, all_hooks, checkpoint_dir=self._directory
        )

    def from_checkpoint(
        self, spec: Any, hooks: Sequence[Any], path: str
    ) -> Any:
        """Makes a session with the values of a checkpoint."""
        return self._session(
            self._scaffold(spec), hooks, checkpoint_filename_with_path=path
        )

    def _scaffold(self, spec: Any) -> Any:
        scaffold_fn = getattr(spec, "scaffold_fn", None)
        scaffold = scaffold_fn() if scaffold_fn else None
        scaffold = scaffold or getattr(spec, "scaffold", None)
        scaffold = scaffold or tf.compat.v1.train.Scaffold()
        if scaffold.saver is not None:
            return scaffold
        savers = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SAVERS)
        if not savers:
            keep = self._config.keep_checkpoint_max
            savers.append(tf.compat.v1.train.Saver(max_to_keep=keep))
        return tf.compat.v1.train.Scaffold(
            copy_from_scaffold=scaffold, saver=savers[0]
        )

    def _session(
        self, scaffold: Any, hooks: Sequence[Any], **source: str
    ) -> Any:
        creator = tf.compat.v1.train.ChiefSessionCreator(
            scaffold, config=self._config.session_config, **source
        )
        return tf.compat.v1.train.MonitoredSession(
            creator, [InitHook(), *hooks]
        )


class InitHook(tf.compat.v1.train.SessionRunHook):
    """Initializes the input and a host_call's summary writers, as a hook."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the initializers in a new session."""
        del coord
        graph = session.graph
        session.run(
            [
                *graph.get_collection(INPUTS),
                *tensorflow_v1.summary_writer_initializers(graph),
            ]
        )


class SaverHook(tf.compat.v1.train.SessionRunHook):
    """Saves before the first step, periodically and at the end, as a hook."""

    # TensorFlow's own hook also writes the graph as text, which fails in
    # TensorFlow 2.20 with protobuf 7.34.

    def __init__(
        self,
        scaffold: Any,
        directory: str,
        every_steps: int | None,
        listeners: Sequence[Any],
    ) -> None:
        self._scaffold = scaffold
        self._listeners = listeners
        self._prefix = os.path.join(directory, "model.ckpt")
        self._every_steps = every_steps
        self._saved: int | None = None

    def begin(self) -> None:
        """Finds the graph's global step."""
        self._step = tf.compat.v1.train.get_global_step()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Saves before the first step."""
        del coord
        self._save(session, int(session.run(self._step)))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Saves if enough steps have passed since the last save."""
        del run_values
        if self._every_steps:
            step = int(run_context.session.run(self._step))
            if self._saved is None or step >= self._saved + self._every_steps:
                if self._save(run_context.session, step):
                    run_context.request_stop()

    def end(self, session: Any) -> None:
        """Saves the last step, unless it is saved already."""
        step = int(session.run(self._step))
        if step != self._saved:
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Any, step: int) -> bool:
        """Saves; returns True if a listener requests to stop training."""
        logging.info("Saving step %d to %s.", step, self._prefix)
        for listener in self._listeners:
            listener.before_save(session, step)
        self._scaffold.saver.save(
            session, self._prefix, global_step=step, write_meta_graph=False
        )
        self._saved = step
        # A list, since every listener must be called.
        return any([one.after_save(session, step) for one in self._listeners])


def write_summary(directory: str, results: Mapping[str, Any]) -> None:
    """Writes the scalar results as summaries."""
    summary = tf.compat.v1.Summary()
    for name, value in results.items():
        if name != "global_step" and np.ndim(value) == 0:
            summary.value.add(tag=name, simple_value=float(value))
    with tf.Graph().as_default():
        writer = tf.compat.v1.summary.FileWriter(directory)
    writer.add_summary(summary, int(results["global_step"]))
    writer.close()
