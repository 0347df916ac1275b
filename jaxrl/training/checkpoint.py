"""Checkpoints: whole or absent, written in the background, restored on any mesh."""

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
  """A folder of checkpoints, one folder a step; the newest `keep` stay.

  A checkpoint is a tree of arrays and a JSON dict. It is written under another name
  and renamed when it is complete, and older ones go only after that: whenever the
  process dies, the newest complete one can be loaded.
  """

  def __init__(self, directory: str | pathlib.Path, *, keep: int = 2):
    if keep < 1:
      raise ValueError(f'checkpoint keep={keep}: keep at least 1 checkpoint')
    self.directory, self.keep = pathlib.Path(directory).absolute(), keep
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name='data')
    context = ocp.Context()
    context.checkpointables.registry = registry  # pyright: ignore
    policies = ocp.training.preservation_policies
    self._remove_leftovers()
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      context=context,
      preservation_policy=policies.LatestN(keep),  # pyright: ignore
      cleanup_tmp_directories=True,
    )
    self._pending: tuple[int, int, Any] | None = None  # step, bytes, response

  @property
  def latest(self) -> int | None:
    """The newest complete checkpoint's step, or None."""
    newest = self._orbax.latest
    return None if newest is None else newest.step

  def save(self, step: int, arrays: Any, data: Mapping[str, Any]) -> None:
    """Starts writing `arrays`, a pytree, and `data`, JSON, as checkpoint `step`.

    Returns when the arrays may be changed or donated. Does nothing when that step is
    there already. Raises CheckpointError when this save, or the one before, fails.
    """
    self.wait()
    if any(checkpoint.step == step for checkpoint in self._orbax.checkpoints):
      return
    named = flatten(arrays)
    size = sum(x.size * x.dtype.itemsize for x in named.values())
    try:
      response = self._orbax.save_checkpointables_async(
        step, {'state': named, 'data': dict(data)}, force=True
      )
    except Exception as error:
      raise self._failure(step, size, error) from error
    self._pending = (step, size, response)

  def wait(self) -> None:
    """Waits for the save at hand. Raises CheckpointError if it failed."""
    if self._pending is None:
      return
    (step, size, response), self._pending = self._pending, None
    try:
      if response is not None:
        response.result()
    except Exception as error:
      raise self._failure(step, size, error) from error

  def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Loads checkpoint `step`, or the newest.

    like: the tree wanted, of arrays or ShapeDtypeStructs with shardings; the arrays
    come in that layout, whatever the mesh they were saved from. Returns (arrays,
    data). Raises CheckpointError, naming the parameter, when shapes or names differ.
    """
    self.wait()
    step = self.latest if step is None else step
    if step is None:
      raise CheckpointError(f'there is no checkpoint in {self.directory}')
    wanted = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for name, x in flatten(like).items()
    }
    try:
      found = self._orbax.checkpointables_metadata(step).metadata['state']
    except Exception as error:
      raise CheckpointError(
        f'checkpoint {step} in {self.directory} cannot be read: {error}'
      ) from error
    self._compare(step, wanted, found)
    loaded = self._orbax.load_checkpointables(step, {'state': wanted, 'data': None})
    arrays = [loaded['state'][name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), loaded['data']

  def close(self) -> None:
    """Waits for the save at hand and lets go of the folder."""
    try:
      self.wait()
    finally:
      self._orbax.close()

  def _compare(self, step: int, wanted: Mapping, found: Mapping) -> None:
    where = f'checkpoint {step} in {self.directory}'
    advice = (
      'it was written with another model, optimizer or algorithm: use another folder'
    )
    for name in wanted:
      if name not in found:
        raise CheckpointError(f'{where} has no array {name}; {advice}')
      shapes = tuple(found[name].shape), tuple(wanted[name].shape)
      if shapes[0] != shapes[1]:
        raise CheckpointError(
          f'{where}: {name} has shape {shapes[0]}, this run needs {shapes[1]}; {advice}'
        )
      kinds = np.dtype(found[name].dtype), np.dtype(wanted[name].dtype)
      if kinds[0] != kinds[1]:
        raise CheckpointError(
          f'{where}: {name} is {kinds[0]}, this run needs {kinds[1]}; {advice}'
        )
    for name in found:
      if name not in wanted:
        raise CheckpointError(f'{where} has an unknown array {name}; {advice}')

  def _failure(self, step: int, size: int, error: Exception) -> CheckpointError:
    self._remove_leftovers()
    free = shutil.disk_usage(self.directory).free
    kept = 'there is no earlier one'
    if self.latest is not None:
      kept = f'checkpoint {self.latest} is intact'
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
      f'checkpoint {step} could not be written to {self.directory}, which has '
      f'{_megabytes(free)} free of the {_megabytes(size)} needed; {kept}. '
      f'Free some space or choose another folder. ({reason[0][:300]})'
    )

  def _remove_leftovers(self) -> None:
    """Deletes what saves that died have left behind."""
    for path in self.directory.glob('*orbax-checkpoint-tmp*'):
      shutil.rmtree(path, ignore_errors=True)


def _megabytes(size: int) -> str:
  return f'{math.ceil(size / 2**20):,} MiB'


def flatten(tree: Any) -> dict[str, Any]:
  """The arrays of a tree by dotted name, in the tree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
