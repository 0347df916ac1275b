"""Loads the teachers of a run, for algorithms that distil.

`teacher.checkpoint` is the Hugging Face folder of the teacher, or 'data' where the rows
bring its outputs. `teacher.by_tag.NAME` is that of an environment tag's own teacher.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxrl import model_loading
from jaxrl.data import hub
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.model_loading import LoadedModel
from jaxrl.models import huggingface
from jaxrl.options import error_prefix
from jaxrl.run_options import BatchOptions, TeacherOptions
from jaxrl.training.teacher_scoring import Teachers, WeightedTeachers
from launch.settings.run_settings import RunSettings, teacher_key


def teacher_vocabulary(teacher: TeacherOptions) -> tuple[Any, int]:
  """Loads the vocabulary that a student trained from scratch shares with its teacher.

  Args:
    teacher: The teachers of the run, at least one.

  Returns:
    The first teacher's tokenizer and the rows of its embedding table.

  Raises:
    ConfigError: For a folder that holds no such thing.
  """
  tag, terms = next(iter(teacher.weighted.items()))
  name, _ = terms[0]
  with error_prefix(f'{teacher_key(tag)}={name}', OSError):
    folder = hub.find_checkpoint(name)
    return load_tokenizer(folder), huggingface.load_config(folder).vocab_size


@dataclasses.dataclass(frozen=True)
class TeacherSet:
  """Holds the teachers of a run, not yet on the devices.

  Attributes:
    policies: Teachers with their weights by environment tag; '' stands for all other
      tags.
  """

  policies: dict[str, WeightedTeachers]

  def describe(self) -> str:
    """Names the teachers in one line."""
    names = (
      f'{policy.folder}{f" × {weight:g}" * (weight < 1)}{tag and f" for {tag}"}'
      for tag, policies in self.policies.items()
      for policy, weight in policies
    )
    return ', '.join(names) or 'what comes with the data'

  def place(self, settings: RunSettings, mesh: Mesh, num_rows: int) -> Teachers:
    """Puts the teachers on a mesh.

    Args:
      settings: Settings of the run.
      mesh: Devices of the learner.
      num_rows: Rows of a usual batch.
    """
    by_tag = dict(self.policies)
    default = by_tag.pop('', None)
    return Teachers(
      settings.algorithm,
      default,
      by_tag,
      mesh=mesh,
      chunk_rows=_chunk_rows(settings.batch, num_rows),
      temperature=settings.rollout.temperature,
      tags=tuple(settings.training_tags) if settings.plays else (),
    )


def _chunk_rows(batch: BatchOptions, num_rows: int) -> int:
  """Returns the rows a teacher scores at a time: about a micro-batch of the learner."""
  if batch.packing_plan is not None:
    return max(1, batch.packing_plan.tokens // max(batch.padded_lengths))
  return -(-num_rows // (batch.num_minibatches * max(1, batch.num_micro_batches)))


def load_teachers(settings: RunSettings, student: LoadedModel) -> TeacherSet:
  """Loads the teachers that the algorithm asks.

  Args:
    settings: Settings of the run.
    student: The model that trains, whose vocabulary the teachers must have.

  Raises:
    ConfigError: For a folder that holds no model, or one of another vocabulary.
  """
  loaded: dict[str, LoadedModel] = {}
  weighted = settings.teacher.weighted
  named = ((tag, folder) for tag, terms in weighted.items() for folder, _ in terms)
  for tag, folder in named:
    if folder not in loaded:
      key = teacher_key(tag)
      policy = model_loading.load_model(
        folder,
        value_head=False,
        dtype=settings.model.dtype,
        remat='none',
        kernels=settings.kernels,
        key=key,
      )
      loaded[folder] = model_loading.match_vocabulary(policy, student, key)
  return TeacherSet(with_models(weighted, loaded))


def with_models(
  weighted: Mapping[str, Sequence[tuple[str, float]]], models: Mapping[str, Any]
) -> dict[str, WeightedTeachers]:
  """Puts models in the place of their folders.

  Args:
    weighted: Folders and weights by tag.
    models: Models by folder.
  """
  return {
    tag: tuple((models[folder], weight) for folder, weight in terms)
    for tag, terms in weighted.items()
  }
