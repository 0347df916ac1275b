"""From a config to the rows of files that a run learns from."""

import logging
from collections.abc import Iterator
from typing import Any

from jaxrl.algorithms import compose
from jaxrl.config import Config
from jaxrl.data.chat import Chat
from jaxrl.data.files import FileSampler
from jaxrl.data.formats import Format
from jaxrl.data.seeds import fold
from jaxrl.data.sources import load_rows
from jaxrl.signature import ConfigError
from jaxrl.types import Algorithm

log = logging.getLogger(__name__)

TEXTS = 2000  # rows of a source that a fresh tokenizer is trained on
ROLES = ('system', 'user', 'assistant', 'tool')
# Columns that only those who play can fill, and what they are.
PLAYED = {
  'rollout_logprobs': 'the log-probs of whoever wrote the rows',
  'weights_version': 'how old the policy was that wrote the rows',
  'greedy_mask': 'a greedy attempt at each task',
  'state_hash': 'what the environment showed at each turn',
}


def check(config: Config, algorithm: Algorithm) -> None:
  """Raises ConfigError for what files cannot give the algorithm, naming the key."""
  name, schema = config.algorithm.name, algorithm.schema
  if schema == 'rollout':
    if config.num_epochs:
      raise ConfigError(
        f'--config.num_epochs={config.num_epochs}: {name} plays, and passes are '
        'counted over files; set --config.num_steps, or for rows from files '
        '--config.algorithm.schema=messages'
      )
    return
  where = f'--config.algorithm.schema={schema}: {name}'
  if not config.dataset.path:
    raise ConfigError(f'{where} learns from files: set --config.dataset.path=…')
  if algorithm.atom == 'pair' and schema != 'preference':
    raise ConfigError(f'{where} compares pairs: only schema=preference has them')
  for column in sorted(PLAYED.keys() & _required(algorithm)):
    raise ConfigError(f'{where} needs {PLAYED[column]}, which files do not hold')
  if 'old_logprobs' in compose.reads(algorithm) and algorithm.behaviour == 'rollout':
    raise ConfigError(
      f'{where} compares with the log-probs of whoever wrote the rows, which files do '
      'not hold; --config.algorithm.behaviour=decoupled takes those of the learner '
      'before the update in their place'
    )
  for key in ('filters', 'shapers'):
    if getattr(algorithm, key):
      raise ConfigError(
        f'{where}: {key} choose among what is played; set --config.algorithm.{key}=none'
      )
  for key in ('group_filter', 'shapers'):
    if config.rollout[key]:
      raise ConfigError(
        f'--config.rollout.{key}={config.rollout[key]}: has no effect here: {name} '
        f'learns from files, schema={schema}, and plays nothing'
      )


def _required(algorithm: Algorithm) -> set[str]:
  """The columns without which some part of the algorithm cannot do."""
  parts = compose.parts(algorithm).values()
  read = {name for part in parts for name in compose.columns(part, required=True)}
  ranks = any(compose.options_of(part).get('rank_penalty') for part in parts)
  return read | ({'rollout_logprobs'} if ranks else set())


def main(config: Config, algorithm: Algorithm, tokenizer: Any) -> FileSampler:
  """The rows of `dataset.path`, as the algorithm's schema has them."""
  data = config.dataset
  sampler = _sampler(
    config,
    tokenizer,
    path=data.path,
    split=data.split,
    limit=data.limit,
    schema=algorithm.schema,
    rated='rewards' in compose.reads(algorithm) and algorithm.schema == 'messages',
    batch_size=config.batch.num_groups,
  )
  if sampler.skipped:
    log.warning(
      '%s: %d rows are longer than batch.max_length=%d tokens and left out',
      *(data.path, sampler.skipped, config.batch.max_length),
    )
  return sampler


def warm_start(config: Config, tokenizer: Any) -> FileSampler:
  """The conversations of `sft.path`, for the supervised start."""
  settings = config.sft
  return _sampler(
    config,
    tokenizer,
    path=settings.path or config.dataset.path,
    limit=settings.limit,
    batch_size=settings.batch_size,
  )


def experts(config: Config, tokenizer: Any, batch_size: int) -> FileSampler:
  """Expert rows beside rollouts, of expert.path, or else sft.path or dataset.path."""
  path = config.expert.path or config.sft.path or config.dataset.path
  if not path:
    raise ConfigError('it takes rows that an expert wrote: set --config.expert.path=…')
  limit = config.sft.limit
  return _sampler(
    config, tokenizer, 'experts', path=path, limit=limit, batch_size=batch_size
  )


def _sampler(
  config: Config, tokenizer: Any, stream: str = 'files', **options: Any
) -> FileSampler:
  return FileSampler(
    Chat(tokenizer),
    **options,
    **_formats(config),
    max_length=config.batch.max_length,
    seed=fold(config.seed, stream),
  )


def _formats(config: Config) -> dict[str, Any]:
  """Where rows hold what, as options of `Format` and `FileSampler`."""
  keys = {'question_key': config.dataset.question_key}
  return {**config.files, **keys, 'solution_key': config.sft.solution_key}


def num_steps(config: Config, sampler: FileSampler | None) -> int:
  """The steps of a run: those of `num_epochs` passes over the files, if it is set."""
  if sampler is None or not config.num_epochs:
    return config.num_steps
  return sampler.num_steps(config.num_epochs)


def describe(config: Config, sampler: FileSampler) -> str:
  """The data of a run, in a line for people."""
  batch, steps = config.batch.num_groups, num_steps(config, sampler)
  epochs = steps * batch / sampler.size
  return (
    f'{config.dataset.path}: {sampler.size:,} {sampler.noun}, {batch} a step, '
    f'{epochs:.3g} epochs'
  )


def texts(config: Config) -> Iterator[str]:
  """What a fresh tokenizer learns from: the texts that the model will meet."""
  data, form = config.dataset, Format(**_formats(config))
  paths = {config.sft.path or data.path, data.path} - {''}
  if not paths:
    raise ConfigError(
      'a random model needs texts to train its tokenizer on: set '
      '--config.dataset.path or --config.sft.path, or --config.model.checkpoint'
    )
  keys = (data.question_key, data.answer_key, config.sft.solution_key)
  for path in sorted(paths):
    for row in load_rows(path, data.split, TEXTS):
      own = [str(row[key]) for key in keys if key in row]
      yield from dict.fromkeys([*own, *form.strings(row)])
      yield '\n'.join(ROLES)  # as often as messages: a role is then one token
