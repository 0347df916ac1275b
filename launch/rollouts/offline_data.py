"""Builds the samplers of rows from files: offline algorithms, warm starts, experts."""

import logging
from collections.abc import Iterator
from typing import Any

from jaxrl.algorithms import requirements
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.row_sources import describe_sources, load_rows
from jaxrl.data.rows.row_formats import RowFormat
from jaxrl.data.seeds import fold_seed
from jaxrl.options import ConfigError, OptionValues
from launch.settings.run_settings import RunSettings

log = logging.getLogger(__name__)

TOKENIZER_ROWS = 2000  # rows of a source that a fresh tokenizer is trained on
ROLES = ('system', 'user', 'assistant', 'tool')


def make_offline_sampler(settings: RunSettings, tokenizer: Any) -> FileSampler:
  """Returns the sampler of `dataset.path` for an algorithm that learns from files."""
  data, algorithm = settings.dataset, settings.algorithm
  rated = 'rewards' in requirements.fields_read(algorithm)
  sampler = _make_sampler(
    settings,
    tokenizer,
    'dataset.path',
    path=data.path,
    split=data.split,
    limit=data.limit,
    data_format=algorithm.data_format,
    rated=rated and algorithm.data_format == 'messages',
    batch_size=settings.batch.num_groups,
  )
  if sampler.skipped:
    log.warning(
      '%s: %d rows are longer than batch.max_length=%d tokens and left out',
      describe_sources(data.path),
      sampler.skipped,
      settings.batch.max_length,
    )
  return sampler


def make_warm_start_sampler(settings: RunSettings, tokenizer: Any) -> FileSampler:
  """Returns the sampler of the conversations of `sft.path`, for the warm start."""
  return _make_sampler(
    settings,
    tokenizer,
    'sft.path' if settings.sft.path else 'dataset.path',
    path=settings.sft.path or settings.dataset.path,
    limit=settings.sft.limit,
    batch_size=settings.sft.batch_size,
  )


def make_expert_sampler(
  settings: RunSettings, tokenizer: Any, batch_size: int
) -> FileSampler:
  """Returns the sampler of expert rows, which some samplers mix with rollouts.

  They come from `dataset.expert_path`, or else from `sft.path` or `dataset.path`.

  Raises:
    ConfigError: If none of these is set.
  """
  paths = {
    'dataset.expert_path': settings.dataset.expert_path,
    'sft.path': settings.sft.path,
    'dataset.path': settings.dataset.path,
  }
  key, path = next(((k, p) for k, p in paths.items() if p), ('', ''))
  if not path:
    raise ConfigError(
      'needs rows that an expert wrote: set --config.dataset.expert_path=…'
    )
  limit = settings.sft.limit
  return _make_sampler(
    settings, tokenizer, key, 'experts', path=path, limit=limit, batch_size=batch_size
  )


def _make_sampler(
  settings: RunSettings,
  tokenizer: Any,
  key: str,
  seed_name: str = 'files',
  **options: object,
) -> FileSampler:
  """Returns a sampler of the rows of a path, which `key` of the config names."""
  with settings.naming(key):
    return FileSampler(
      ChatTokenizer(tokenizer, settings.chat),
      **options,
      **_row_options(settings),
      max_length=settings.batch.max_length,
      seed=fold_seed(settings.seed, seed_name),
    )


def _row_options(settings: RunSettings) -> OptionValues:
  """Says where rows hold what, as options of the row format and of `FileSampler`."""
  return {
    'columns': settings.dataset.columns,
    'system_prompt': settings.dataset.system_prompt,
  }


def count_steps(settings: RunSettings, sampler: FileSampler | None) -> int:
  """Returns the steps of a run: of `num_epochs` passes over the files, if that is set.

  Args:
    settings: Settings of the run.
    sampler: The sampler of the files; None for a run that plays.
  """
  if sampler is None or not settings.num_epochs:
    return settings.num_steps
  return sampler.num_steps(settings.num_epochs)


def describe(settings: RunSettings, sampler: FileSampler) -> str:
  """Describes the data of a run in one line."""
  batch, steps = settings.batch.num_groups, count_steps(settings, sampler)
  epochs = steps * batch / sampler.size
  data = describe_sources(settings.dataset.path)
  return (
    f'{data}: {sampler.size:,} {sampler.group_noun}, {batch} a step, '
    f'{epochs:.3g} epochs'
  )


def tokenizer_texts(settings: RunSettings) -> Iterator[str]:
  """Yields the texts that a fresh tokenizer is trained on: those the model will see.

  Raises:
    ConfigError: If the run names no data.
  """
  data, row_format = settings.dataset, RowFormat(**_row_options(settings))
  keys_by_path = {data.path: 'dataset.path'}
  keys_by_path.setdefault(settings.sft.path or data.path, 'sft.path')
  keys_by_path.pop('', None)
  run_keys = [data.columns.question, data.columns.answer, data.columns.solution]
  sources = [
    (path, data.split, run_keys, keys_by_path[path])
    for path in sorted(keys_by_path, key=describe_sources)
  ]
  for tag in settings.env:
    tasks = settings.tasks[tag]
    own_keys = [tasks.columns.question or '', tasks.columns.answer or '']
    source = (tasks.path, tasks.split, own_keys, settings.task_key(tag, 'path'))
    if tasks.path and tasks.path not in keys_by_path:
      sources.append(source)
      keys_by_path[tasks.path] = settings.task_key(tag, 'path')
  if not sources:
    raise ConfigError(
      'a random model needs texts to train its tokenizer on: set '
      '--config.dataset.path or --config.sft.path, or --config.model.checkpoint'
    )
  for path, split, keys, config_key in sources:
    with settings.naming(config_key):
      rows = load_rows(path, split, TOKENIZER_ROWS)
    for row in rows:
      fields = [str(row[key]) for key in keys if key in row]
      yield from dict.fromkeys([*fields, *row_format.strings(row)])
      yield '\n'.join(ROLES)  # as often as messages: a role is then one token
