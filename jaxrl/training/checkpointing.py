"""Checkpointing writes train states in the background and restores them on any mesh."""

import logging
import math
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

log = logging.getLogger(__name__)


class CheckpointError(OSError):
  """A checkpoint cannot be written or read; the message says which and why."""


class Checkpointer:
  """Writes and reads a folder of checkpoints, with one folder per step.

  A checkpoint is a tree of arrays and a JSON dict. It is written under another name and
  renamed when it is complete, and older ones are deleted only after that: whenever the
  process dies, the newest complete one can be loaded.

  Args:
    directory: The folder.
    max_to_keep: How many of the newest checkpoints are kept.

  Attributes:
    directory: The absolute path of the folder.
    max_to_keep: How many of the newest checkpoints are kept.
  """

  def __init__(self, directory: str | pathlib.Path, *, max_to_keep: int = 2):
    if max_to_keep < 1:
      raise ValueError(
        f'checkpoint max_to_keep={max_to_keep}: keep at least 1 checkpoint'
      )
    self.directory = pathlib.Path(directory).absolute()
    self.max_to_keep = max_to_keep
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name='data')
    context = ocp.Context()
    context.checkpointables.registry = registry  # pyright: ignore
    policies = ocp.training.preservation_policies
    self._remove_leftovers()
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      context=context,
      preservation_policy=policies.LatestN(max_to_keep),  # pyright: ignore
      cleanup_tmp_directories=True,
    )
    self._pending: tuple[int, int, Any] | None = None  # step, bytes, response

  @property
  def latest_step(self) -> int | None:
    """The step of the newest complete checkpoint, or None."""
    newest = self._orbax.latest
    return None if newest is None else newest.step

  def save(self, step: int, arrays: Any, data: Mapping[str, Any]) -> None:
    """Starts writing a checkpoint.

    It returns when the arrays may be changed or donated, and does nothing if the step
    has a checkpoint already.

    Args:
      step: The step.
      arrays: A pytree of arrays.
      data: JSON.

    Raises:
      CheckpointError: This save, or the one before, failed.
    """
    self.wait()
    if any(checkpoint.step == step for checkpoint in self._orbax.checkpoints):
      return
    named = flatten_by_name(arrays)
    size = sum(x.size * x.dtype.itemsize for x in named.values())
    try:
      response = self._orbax.save_checkpointables_async(
        step, {'state': named, 'data': dict(data)}, force=True
      )
    except Exception as error:
      raise self._failure(step, size, error) from error
    self._pending = (step, size, response)

  def wait(self) -> None:
    """Waits for the save in progress; raises CheckpointError if it failed."""
    if self._pending is None:
      return
    (step, size, response), self._pending = self._pending, None
    try:
      if response is not None:
        response.result()
    except Exception as error:
      raise self._failure(step, size, error) from error

  def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Loads a checkpoint.

    Args:
      like: The tree to load, of arrays or `ShapeDtypeStruct`s with shardings. The
        arrays get these shardings, whatever mesh they were saved from.
      step: The step; default, the newest.

    Returns:
      `(arrays, data)`.

    Raises:
      CheckpointError: There is no such checkpoint, or names, shapes or dtypes differ.
    """
    self.wait()
    step = self.latest_step if step is None else step
    if step is None:
      raise CheckpointError(f'there is no checkpoint in {self.directory}')
    expected = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for name, x in flatten_by_name(like).items()
    }
    try:
      saved = self._orbax.checkpointables_metadata(step).metadata['state']
    except Exception as error:
      raise CheckpointError(
        f'checkpoint {step} in {self.directory} cannot be read: {error}'
      ) from error
    self._compare(step, expected, saved)
    loaded = self._orbax.load_checkpointables(step, {'state': expected, 'data': None})
    arrays = [loaded['state'][name] for name in expected]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), loaded['data']

  def close(self) -> None:
    """Waits for the save in progress and releases the folder."""
    try:
      self.wait()
    finally:
      self._orbax.close()

  def _compare(self, step: int, expected: Mapping, saved: Mapping) -> None:
    """Raises CheckpointError unless the saved arrays are those expected."""
    where = f'checkpoint {step} in {self.directory}'
    advice = (
      'it was written with another model, optimizer or algorithm: use another folder'
    )
    for name in expected:
      if name not in saved:
        raise CheckpointError(f'{where} has no array {name}; {advice}')
      saved_shape, expected_shape = (
        tuple(saved[name].shape),
        tuple(expected[name].shape),
      )
      if saved_shape != expected_shape:
        raise CheckpointError(
          f'{where}: {name} has shape {saved_shape}, this run needs {expected_shape}; '
          f'{advice}'
        )
      saved_dtype, expected_dtype = (
        np.dtype(saved[name].dtype),
        np.dtype(expected[name].dtype),
      )
      if saved_dtype != expected_dtype:
        raise CheckpointError(
          f'{where}: {name} is {saved_dtype}, this run needs {expected_dtype}; {advice}'
        )
    for name in saved:
      if name not in expected:
        raise CheckpointError(f'{where} has an unknown array {name}; {advice}')

  def _failure(self, step: int, size: int, error: Exception) -> CheckpointError:
    self._remove_leftovers()
    free = shutil.disk_usage(self.directory).free
    fallback = 'there is no earlier one'
    if self.latest_step is not None:
      fallback = f'checkpoint {self.latest_step} is intact'
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
      f'checkpoint {step} could not be written to {self.directory}, which has '
      f'{_megabytes(free)} free of the {_megabytes(size)} needed; {fallback}. '
      f'Free some space or choose another folder. ({reason[0][:300]})'
    )

  def _remove_leftovers(self) -> None:
    """Deletes what unfinished saves have left behind."""
    for path in self.directory.glob('*orbax-checkpoint-tmp*'):
      shutil.rmtree(path, ignore_errors=True)


def _megabytes(size: int) -> str:
  return f'{math.ceil(size / 2**20):,} MiB'


def flatten_by_name(tree: Any) -> dict[str, Any]:
  """Returns the arrays of a tree by dotted name, in the tree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
