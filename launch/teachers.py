"""From `config.teacher` to the policies that teach.

teacher.checkpoint: the Hugging Face folder of the teacher, or 'data': rows bring what
their teacher said. teacher.by_tag: others for single environment tags, as in
'gsm8k=FOLDER, lake=FOLDER'.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models import huggingface
from jaxrl.signature import ConfigError, unknown
from jaxrl.training import packing, teacher_columns
from jaxrl.training import policy as policies
from jaxrl.training.policy import Policy
from jaxrl.training.teachers import Teachers
from jaxrl.types import Algorithm

FROM_DATA = 'data'
CHECKPOINT, BY_TAG = '--config.teacher.checkpoint', '--config.teacher.by_tag'


def folders(config: Config) -> dict[str, str]:
  """The folder of each tag's teacher; '' stands for the tags that are not named."""
  text, found = config.teacher.by_tag, {}
  for item in filter(str.strip, text.split(',')):
    tag, _, folder = (part.strip() for part in item.partition('='))
    if not (tag and folder) or tag in found:
      raise ConfigError(f'{BY_TAG}={text}: write tag=FOLDER, tag=FOLDER, each tag once')
    found[tag] = folder
  default = config.teacher.checkpoint
  if default == FROM_DATA and found:
    raise ConfigError(f'{CHECKPOINT}=data: then there is no teacher, {BY_TAG}={text}')
  return found | ({'': default} if default not in ('', FROM_DATA) else {})


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError unless the algorithm and the config agree about teachers."""
  name, found = config.algorithm.name, folders(config)
  asked = config.teacher.checkpoint or config.teacher.by_tag
  if not teacher_columns.columns(algorithm):
    if asked:
      raise ConfigError(f'{CHECKPOINT} or {BY_TAG}: algorithm {name} asks no teacher')
    return
  teacher_columns.top_k(algorithm)
  if not asked:
    raise ConfigError(
      f'algorithm {name} asks a teacher: name its folder, {CHECKPOINT}=FOLDER'
    )
  if algorithm.schema == 'rollout':
    for tag in filter(None, found):
      if tag not in config.env:
        raise unknown(tag, config.env, 'environment tag', BY_TAG)


def vocabulary(config: Config) -> tuple[Any, int] | None:
  """A teacher's tokenizer and the size of its table, for a student made from nothing.

  None when no teacher is named. Raises ConfigError for a folder without them.
  """
  for tag, folder in folders(config).items():
    try:
      return load_tokenizer(folder), huggingface.load_config(folder).vocab_size
    except (OSError, ValueError) as error:
      key = BY_TAG if tag else CHECKPOINT
      raise ConfigError(f'{key}={folder}: {error}') from error
  return None


@dataclasses.dataclass(frozen=True)
class Staff:
  """The teachers of a run by tag, not yet on the devices; '' is all other tags."""

  policies: dict[str, Policy]

  def describe(self) -> str:
    """What people read about them."""
    told = (
      f'{one.folder}{tag and f" for {tag}"}' for tag, one in self.policies.items()
    )
    return ', '.join(told) or 'what comes with the data'

  def placed(
    self, config: Config, algorithm: Algorithm, mesh: Mesh, num_rows: int
  ) -> Teachers:
    """num_rows: of a usual batch."""
    by_tag = dict(self.policies)
    default = by_tag.pop('', None)
    return Teachers(
      algorithm,
      default,
      by_tag,
      mesh=mesh,
      chunk_rows=_chunk_rows(config, num_rows),
      temperature=config.rollout.temperature,
      tags=config.env if algorithm.schema == 'rollout' else (),
    )


def _chunk_rows(config: Config, num_rows: int) -> int:
  """Rows that a teacher scores at a time: about as much as the learner has."""
  batch = config.batch
  packed = packing.parse(batch.packing)
  if packed is not None:
    return max(1, packed.tokens // max(batch.buckets or (batch.max_length,)))
  return -(-num_rows // (batch.minibatches * batch.micro_batches))


def load(config: Config, algorithm: Algorithm, student: Policy) -> Staff | None:
  """The teachers that the algorithm asks; None if it asks none.

  Raises ConfigError for a folder that holds no model, or one of another vocabulary.
  """
  if not teacher_columns.columns(algorithm):
    return None
  loaded: dict[str, Policy] = {}
  found = folders(config)
  for tag, folder in found.items():
    if folder not in loaded:
      key = BY_TAG if tag else CHECKPOINT
      policy = policies.load(
        folder,
        value_head=False,
        dtype=config.model.dtype,
        remat='none',
        kernels=config.kernels,
        key=key,
      )
      loaded[folder] = policies.with_vocabulary(policy, student, key)
  return Staff({tag: loaded[folder] for tag, folder in found.items()})
