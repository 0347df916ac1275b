"""Resolve which rows the tasks of environment tags and evaluation sets come from.

A tag takes the run's data set, except for what `env.<tag>.dataset` says. An evaluation
set takes what it leaves open from its tag and from `eval`. Without `eval.sets`, each
tag is a set of its own name.
"""

from jaxrl.options import unknown_name_error
from jaxrl.run_options import EvalSetOptions, RunOptions
from launch.settings.run_settings import EvalSetSettings, TaskSettings


def tag_tasks(options: RunOptions, tag: str) -> TaskSettings:
  """Returns where the tasks of an environment tag come from.

  Args:
    options: The options of the run.
    tag: The environment tag.
  """
  own, run = options.env[tag].dataset, options.dataset
  columns = own.columns.or_else(run.columns)
  return TaskSettings(
    path=own.path or run.path,
    split=own.split or run.split,
    limit=run.limit if own.limit is None else own.limit,
    question_key=columns.question or '',
    answer_key=columns.answer or '',
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
      columns=own.columns.or_else(rows.columns).or_else(options.dataset.columns),
      **{field: getattr(run, field) for field in open_fields},
    )
  return filled


def evaluation_sets(options: RunOptions) -> dict[str, EvalSetSettings]:
  """Returns the evaluation sets by name.

  Args:
    options: The options of the run.

  Raises:
    ConfigError: If a set names no environment tag.
  """
  sets = {}
  for name, filled in evaluation_options(options).items():
    values, columns = filled.as_dict(), filled.columns
    values.pop('columns')
    sets[name] = EvalSetSettings(
      **values, question_key=columns.question or '', answer_key=columns.answer or ''
    )
  return sets
