"""Checkpointing writes train states in the background and restores them on any mesh."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import errno
import functools
import json
import logging
import math
import os
import pathlib
import shutil
import threading
import types
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.experimental import multihost_utils

from jaxrl.options import Options, option
from jaxrl.types import AnyArray, PyTree, StateDict

CHECKSUMS = 'checksums.json'  # in a checkpoint's folder: size and CRC-32 by file
READ_BYTES = 2**22
# Replicas divide the writing of an array among them if each writes this much. Dividing
# a smaller one saves less time than it takes to compile the program that slices it.
MIN_SLICE_BYTES = 2**20

log = logging.getLogger(__name__)


class CheckpointError(OSError):
  """A checkpoint cannot be written or read; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(Options):
  """When checkpoints are written, how many stay, and whether a model is exported."""

  save_interval: int = option(
    0, 'Steps between checkpoints; 0 saves at the end only.', low=0
  )
  export: bool = option(False, 'Whether to write a Hugging Face folder at the end.')
  max_to_keep: int = option(2, 'How many of the newest checkpoints are kept.', low=1)
  strict: bool = option(
    False,
    'Whether a damaged checkpoint is an error, rather than to resume from the one '
    'before it.',
  )


class Checkpointer:
  """Writes and reads a folder of checkpoints, with one folder per step.

  A checkpoint is a tree of arrays and a JSON dict. It is written under another name and
  renamed when it is complete, and older ones are deleted only after that: whenever the
  process dies, the newest complete one can be loaded.

  Size and CRC-32 of its files are written when a checkpoint is complete, by the first
  process, and checked before it is loaded; of several processes each checks a share. A
  damaged one is renamed to STEP.damaged, and the one before it is loaded.

  Args:
    directory: The folder.
    options: How many are kept, and what happens to damaged ones.

  Attributes:
    directory: The absolute path of the folder.
    options: The options.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    options: CheckpointOptions = CheckpointOptions(),
  ):
    self.directory = pathlib.Path(directory).absolute()
    self.options = options
    logging.getLogger('absl').addFilter(_is_not_raised_too)
    logging.getLogger('concurrent.futures').addFilter(_is_not_of_a_closed_loop)
    _avoid_leaks()
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name='data')
    context = ocp.Context()
    context.checkpointables.registry = registry  # pyright: ignore
    saving = context.array_options.saving
    saving.min_slice_bytes_for_replica_parallel = MIN_SLICE_BYTES
    policies = ocp.training.preservation_policies
    self._remove_leftovers()
    self._orbax = ocp.training.Checkpointer(
      str(self.directory),
      context=context,
      preservation_policy=policies.LatestN(options.max_to_keep),  # pyright: ignore
      cleanup_tmp_directories=True,
    )
    self._pending: tuple[int, int, Any] | None = None  # step, bytes, result()
    self._failed = False
    self._pool = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix='checksums'
    )

  @property
  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, or None."""
    return max(self._steps(), default=None)

  def _steps(self) -> list[int]:
    """Returns the steps that have a folder, which may be damaged."""
    if not self.directory.is_dir():
      return []
    return [int(path.name) for path in self.directory.iterdir() if path.name.isdigit()]

  def save(self, step: int, arrays: PyTree, data: StateDict) -> None:
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
    if step in self._steps():
      return
    named = flatten_by_name(arrays)
    size = sum(x.size * x.dtype.itemsize for x in named.values())
    try:
      # Otherwise threads of orbax print tracebacks of their own.
      if self.directory.is_dir() and not os.access(self.directory, os.W_OK):
        raise PermissionError(errno.EACCES, 'Permission denied', str(self.directory))
      response = self._orbax.save_checkpointables_async(
        step, {'state': named, 'data': dict(data)}, force=True
      )
    except Exception as error:
      raise self._failure(step, size, error) from error
    # Several processes meet in a barrier, which belongs on the thread of the devices.
    if jax.process_count() == 1:
      response = self._pool.submit(self._finish, step, response)
    self._pending = (step, size, response)

  def wait(self) -> None:
    """Waits for the save in progress; raises CheckpointError if it failed."""
    if self._pending is None:
      return
    (step, size, response), self._pending = self._pending, None
    try:
      if isinstance(response, concurrent.futures.Future):
        response.result()
      else:
        self._finish(step, response)
    except Exception as error:
      raise self._failure(step, size, error) from error

  def _finish(self, step: int, response: Any) -> None:
    """Waits until a checkpoint is complete, then writes its checksums."""
    if response is not None:
      response.result()
    if jax.process_index():
      return
    try:
      write_checksums(self.directory / str(step))
    except OSError as error:
      log.warning('checkpoint %d has no checksums: %s', step, error)

  def restore(self, like: PyTree, step: int | None = None) -> tuple[PyTree, StateDict]:
    """Loads a checkpoint.

    Args:
      like: The tree to load, of arrays or `ShapeDtypeStruct`s with shardings. The
        arrays get these shardings, whatever mesh they were saved from.
      step: The step; default, the newest.

    Returns:
      `(arrays, data)`.

    Raises:
      CheckpointError: There is no such checkpoint, it is damaged and there is no intact
        one before it, or names, shapes or dtypes differ.
    """
    self.wait()
    steps = sorted(self._steps(), reverse=True) if step is None else [step]
    damaged: dict[int, str] = {}
    for number in steps:
      loaded, damage = self._try_load(like, number)
      if loaded is not None:
        self._set_aside(damaged, number)
        return loaded
      if self.options.strict or step is not None:
        raise CheckpointError(
          f'checkpoint {number} in {self.directory} is damaged: {damage}; repair or '
          'delete it, or set checkpoint.strict=False to resume from the one before it'
        )
      damaged[number] = damage
    if damaged:
      problems = '; '.join(f'{number}: {damage}' for number, damage in damaged.items())
      raise CheckpointError(
        f'no checkpoint in {self.directory} is intact ({problems}); restore the folder '
        'from a copy, or delete it to begin anew'
      )
    raise CheckpointError(f'there is no checkpoint in {self.directory}')

  def _try_load(self, like: PyTree, step: int) -> tuple[PyTree, str]:
    """Returns what a checkpoint holds, or None and what is wrong with its files."""
    path = self.directory / str(step)
    damage = self._find_damage(path)
    if damage:
      return None, damage
    try:
      return self._load(like, step), ''
    except CheckpointError:
      raise
    except Exception as error:
      reason = str(error).strip().splitlines() or [type(error).__name__]
      damage = f'it cannot be read: {reason[0][:300]}'
      # Its files are sound, or other processes may have been able to read it.
      if (path / CHECKSUMS).exists() or jax.process_count() > 1:
        raise CheckpointError(
          f'checkpoint {step} in {self.directory}: {damage}'
        ) from error
      return None, damage

  def _find_damage(self, path: pathlib.Path) -> str:
    """Returns what is wrong with the files of a checkpoint, '' for nothing.

    All processes return the same.
    """
    count = jax.process_count()
    damage = find_damage(path, jax.process_index(), count)
    if count == 1:
      return damage
    text = np.frombuffer(damage.encode()[:300].ljust(300), np.uint8)
    reports = [bytes(row).decode(errors='replace').strip() for row in _gather(text)]
    return next(filter(None, reports), '')

  def _set_aside(self, damaged: Mapping[int, str], used: int) -> None:
    """Renames damaged checkpoints, so that their steps can be saved again.

    Args:
      damaged: What is wrong, by step.
      used: Step of the checkpoint that was loaded instead.
    """
    if not damaged:
      return
    if not jax.process_index():
      for older in self.directory.glob('*.damaged'):
        shutil.rmtree(older, ignore_errors=True)
      for step in damaged:
        path = self.directory / str(step)
        path.rename(path.with_name(f'{step}.damaged'))
    if jax.process_count() > 1:
      _gather(np.zeros(1, np.uint8))  # others see the folder as it is now
    self._orbax.reload()
    for step, damage in damaged.items():
      log.warning(
        'checkpoint %d in %s is damaged: %s; it is now called %d.damaged, and '
        'checkpoint %d is used',
        *(step, self.directory, damage, step, used),
      )

  def _load(self, like: PyTree, step: int) -> tuple[PyTree, StateDict]:
    """Loads the checkpoint of a step whose files are not known to be damaged."""
    expected = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for name, x in flatten_by_name(like).items()
    }
    saved = self._orbax.checkpointables_metadata(step).metadata['state']
    self._compare(step, expected, saved)
    loaded = self._orbax.load_checkpointables(step, {'state': expected, 'data': None})
    arrays = [loaded['state'][name] for name in expected]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), loaded['data']

  def close(self) -> None:
    """Waits for the save in progress and releases the folder."""
    try:
      self.wait()
    finally:
      self._pool.shutdown()
      # After a failure orbax raises it again, which would hide what `_failure` says.
      with contextlib.suppress(*((Exception,) if self._failed else ())):
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
      saved_shape = tuple(saved[name].shape)
      expected_shape = tuple(expected[name].shape)
      if saved_shape != expected_shape:
        raise CheckpointError(
          f'{where}: {name} has shape {saved_shape}, this run needs {expected_shape}; '
          f'{advice}'
        )
      saved_dtype = np.dtype(saved[name].dtype)
      expected_dtype = np.dtype(expected[name].dtype)
      if saved_dtype != expected_dtype:
        raise CheckpointError(
          f'{where}: {name} is {saved_dtype}, this run needs {expected_dtype}; {advice}'
        )
    for name in saved:
      if name not in expected:
        raise CheckpointError(f'{where} has an unknown array {name}; {advice}')

  def _failure(self, step: int, size: int, error: Exception) -> CheckpointError:
    self._failed = True
    _end_orbax_threads()
    self._remove_leftovers()
    fallback = 'there is no earlier one'
    if self.latest_step is not None:
      fallback = f'checkpoint {self.latest_step} is intact'
    if os.access(self.directory, os.W_OK):
      free, advice = shutil.disk_usage(self.directory).free, 'Free some space'
      problem = f', which has {_megabytes(free)} free of the {_megabytes(size)} needed'
    else:
      problem, advice = ', which is read-only', 'Make it writable'
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
      f'checkpoint {step} could not be written to {self.directory}{problem}; '
      f'{fallback}. {advice} or choose another folder. ({reason[0][:300]})'
    )

  def _remove_leftovers(self) -> None:
    """Deletes what unfinished saves have left behind."""
    for path in self.directory.glob('*orbax-checkpoint-tmp*'):
      shutil.rmtree(path, ignore_errors=True)


def write_checksums(path: pathlib.Path) -> None:
  """Writes `CHECKSUMS` into the folder of a complete checkpoint."""
  files = {name: _checksum(path / name) for name in _files(path)}
  part = path / f'.{CHECKSUMS}.part'
  try:
    part.write_text(json.dumps({'algorithm': 'crc32', 'files': files}))
    os.replace(part, path / CHECKSUMS)
  except OSError:
    part.unlink(missing_ok=True)
    raise


def find_damage(path: pathlib.Path, index: int = 0, count: int = 1) -> str:
  """Compares the files of a checkpoint with its checksums.

  Args:
    path: Folder of the checkpoint.
    index: Which share of the files to read.
    count: Number of shares.

  Returns:
    What is wrong with the first damaged file; '' if nothing is, or if the checkpoint
    was written by a version without checksums.
  """
  try:
    record = json.loads((path / CHECKSUMS).read_text())
    files = {
      str(k): (int(size), int(crc)) for k, (size, crc) in record['files'].items()
    }
  except FileNotFoundError:
    return ''
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return f'{CHECKSUMS} is not readable'
  for name, (size, crc) in sorted(files.items())[index::count]:
    try:
      actual = _checksum(path / name)
    except FileNotFoundError:
      return f'{name} is missing'
    except OSError as error:
      return f'{name}: {error.strerror}'
    if actual[0] != size:
      return f'{name} has {actual[0]:,} bytes instead of {size:,}'
    if actual[1] != crc:
      return f'{name} has changed since it was written (CRC-32)'
  return ''


def _files(path: pathlib.Path) -> list[str]:
  """Returns the files of a checkpoint that have a checksum, relative to its folder."""
  names = (str(one.relative_to(path)) for one in path.rglob('*') if one.is_file())
  return sorted(name for name in names if CHECKSUMS not in name)


def _checksum(path: pathlib.Path) -> tuple[int, int]:
  """Returns the size and the CRC-32 of a file."""
  size, crc = 0, 0
  with path.open('rb') as file:
    while block := file.read(READ_BYTES):
      size, crc = size + len(block), zlib.crc32(block, crc)
  return size, crc


def _gather(row: np.ndarray) -> np.ndarray:
  """Returns the rows of all processes; waits for them."""
  return np.asarray(multihost_utils.process_allgather(row)).reshape(-1, len(row))


@functools.cache
def _avoid_leaks() -> None:
  """Keeps orbax from calling what tensorstore never frees.

  tensorstore 0.1.85 and 0.1.86 leak what they convert from JSON to Python: its metrics,
  of which orbax makes metrics of its own twice per checkpoint, and the location of the
  store, which orbax asks for once for every array. Together they are 50 kB for each
  checkpoint of 30 arrays.
  """
  try:
    from orbax.checkpoint._src.serialization import (
      jax_array_handlers,
      tensorstore_utils,
    )

    names = vars(jax_array_handlers.ts)
    make_spec = tensorstore_utils.build_kvstore_tspec
  except (ImportError, AttributeError):  # another version of orbax
    return

  def no_metrics(prefix: str) -> None:
    raise NotImplementedError  # orbax goes on without them

  names = {**names, 'experimental_collect_matching_metrics': no_metrics}
  jax_array_handlers.ts = types.SimpleNamespace(**names)

  make_folder_spec = functools.lru_cache(4)(make_spec)

  def make_array_spec(
    directory: str, name: str | None = None, *, use_ocdbt: bool = True, **options: Any
  ) -> dict[str, Any]:
    if name is None or not use_ocdbt:
      return make_spec(directory, name, use_ocdbt=use_ocdbt, **options)
    try:
      spec = make_folder_spec(directory, **options)
    except TypeError:  # an option of another version that cannot be a key of the cache
      return make_spec(directory, name, use_ocdbt=use_ocdbt, **options)
    return {**copy.deepcopy(spec), 'path': name}

  tensorstore_utils.build_kvstore_tspec = make_array_spec


def _end_orbax_threads() -> None:
  """Ends threads of orbax that wait for parts of a save that has failed.

  They would keep the process from ending for ten minutes. What they write nevertheless
  is a leftover.
  """
  try:
    from orbax.checkpoint._src.futures import future, synchronization

    for thread in threading.enumerate():
      if isinstance(thread, future._SignalingThread):
        signals = list(synchronization.HandlerAwaitableSignal)
        future.set_signals(signals, operation_id=thread._operation_id)
        threading.Thread.join(thread, 5.0)
  except (ImportError, AttributeError):  # another version of orbax
    return


def _is_not_raised_too(record: logging.LogRecord) -> bool:
  """Leaves out tracebacks of orbax, whose errors are raised by `Checkpointer` too."""
  return record.levelno < logging.ERROR or 'orbax' not in record.pathname


def _is_not_of_a_closed_loop(record: logging.LogRecord) -> bool:
  """Leaves out that an event loop of orbax was closed before its threads ended."""
  return 'Event loop is closed' not in str(record.exc_info and record.exc_info[1])


def _megabytes(size: int) -> str:
  return f'{math.ceil(size / 2**20):,} MiB'


def flatten_by_name(tree: PyTree) -> dict[str, AnyArray]:
  """Returns the arrays of a tree by dotted name, in the tree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
