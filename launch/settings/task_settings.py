"""Resolve which rows the tasks of environment tags and evaluation sets come from.

A tag takes the run's data set, except for what `env.<tag>.dataset` says. An evaluation
set takes what it leaves open from its tag and from `eval`. Without `eval.sets`, each
tag is a set of its own name.
"""

from jaxrl.data.dataset import GlobalDataset
from jaxrl.data.rows.row_formats import RowFormat
from jaxrl.options import ConfigError, defaults, unknown_name_error
from jaxrl.run_options import EvalSetOptions, RunOptions
from launch.settings.run_settings import EvalSetSettings, TaskSettings, naming_key


def tag_tasks(options: RunOptions, tag: str) -> TaskSettings:
  """Returns where the tasks of an environment tag come from.

  Args:
    options: The options of the run.
    tag: The environment tag.

  Raises:
    ConfigError: If the keys of rows cannot be read.
  """
  own, run = options.env[tag].dataset, options.dataset
  where = f'env.{tag}.dataset.keys' if own.keys else 'dataset.keys'
  return TaskSettings(
    path=own.path or run.path,
    split=own.split or run.split,
    limit=run.limit if own.limit is None else own.limit,
    **_task_keys(own.keys or run.keys, where),
    curriculum=own.curriculum or run.curriculum,
  )


def evaluation_options(options: RunOptions) -> dict[str, EvalSetOptions]:
  """Returns the evaluation sets by name, with what they leave open filled in.

  Args:
    options: The options of the run.

  Raises:
    ConfigError: If a set names no environment tag.
  """
  run = options.eval
  sets = run.sets or {tag: EvalSetOptions(tag=tag) for tag in options.env}
  filled = {}
  for name, own in sets.items():
    tag = own.tag or next(iter(options.env), '')
    if tag not in options.env or (len(options.env) > 1 and not own.tag):
      key = f'--config.eval.sets.{name}.tag'
      raise unknown_name_error(own.tag, options.env, 'environment tag', key)
    rows = options.env[tag].dataset
    open_fields = [
      field
      for field in ('num_tasks', 'group_size', 'temperature', 'interval')
      if getattr(own, field) is None
    ]
    filled[name] = own.replace(
      tag=tag,
      path=own.path or ('' if rows.path else run.path),
      split=own.split or run.split,
      keys=own.keys or rows.keys or options.dataset.keys,
      **{field: getattr(run, field) for field in open_fields},
    )
  return filled


def evaluation_sets(options: RunOptions) -> dict[str, EvalSetSettings]:
  """Returns the evaluation sets by name.

  Args:
    options: The options of the run.

  Raises:
    ConfigError: If a set names no environment tag, or its keys cannot be read.
  """
  sets = {}
  for name, filled in evaluation_options(options).items():
    values, own = filled.as_dict(), options.eval.sets.get(name)
    is_own = own is not None and own.keys not in ('', options.dataset.keys)
    where = f'eval.sets.{name}.keys' if is_own else 'dataset.keys'
    sets[name] = EvalSetSettings(**_task_keys(values.pop('keys'), where), **values)
  return sets


def parse_row_keys(text: str, key: str = 'dataset.keys') -> dict[str, str]:
  """Parses `dataset.keys`, such as 'question=problem, answer=solution'.

  `question`, `answer` and `solution` are the keys of a task's question, of its answer
  and of a written response; 'answer=' says that rows have none. The other names are
  those of `RowFormat`.

  Args:
    text: The value of the key.
    key: The dotted key, for messages.

  Returns:
    'question_key', 'answer_key', 'solution_key', and the other terms as 'keys'.

  Raises:
    ConfigError: If the text cannot be read, or a name is unknown.
  """
  keys = {
    'question': defaults(GlobalDataset)['question_key'],
    'answer': defaults(GlobalDataset)['answer_key'],
    'solution': defaults(RowFormat)['solution_key'],
  }
  others, seen = [], set()
  for term in filter(str.strip, text.split(',')):
    name, equals, row_key = (part.strip() for part in term.partition('='))
    if not equals:
      raise ConfigError(f'--config.{key}={text}: write name=KEY, name=KEY')
    if name in seen:
      raise ConfigError(f'--config.{key}={text}: {name!r} is given twice')
    seen.add(name)
    if name in keys:
      keys[name] = row_key
    else:
      others.append(term.strip())
  rest = ', '.join(others)
  with naming_key(key, text):
    RowFormat(keys=rest)
  return {f'{name}_key': row_key for name, row_key in keys.items()} | {'keys': rest}


def _task_keys(text: str, where: str) -> dict[str, str]:
  """Returns the keys of a question and of an answer, under the names of settings."""
  keys = parse_row_keys(text, where)
  for term in text.split(',') if where != 'dataset.keys' else ():
    name = term.partition('=')[0].strip()
    if name not in ('question', 'answer', ''):
      raise ConfigError(
        f'--config.{where}={text}: a task has a question and an answer, and no {name}'
      )
  return {key: keys[key] for key in ('question_key', 'answer_key')}
