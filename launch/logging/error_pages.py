"""Prints errors: with the page that explains them, or the place in a user's code."""

import linecache
import re
import sys
import traceback

from jaxrl.options import ConfigError
from jaxrl.user_code import describe_error, user_place
from launch.logging.console import Console
from launch.logging.workdir import ERROR_FILE, Workdir

# What each page explains: the start of config keys, or a flag of a command.
_KEYS = {
  'docs/benchmarks.md': '--benchmark',
  'docs/cluster.md': 'cluster logging.level',
  'docs/datasets.md': 'dataset sft',
  'docs/environments.md': 'env eval',
  'docs/extending.md': 'algorithm logging.sinks plugins rollout.group_filter '
  'rollout.reward_shaping',
  'docs/graders.md': 'rollout.rewards',
  'docs/kernels.md': 'kernels',
  'docs/lora.md': 'model.lora model.remat optimizer.name',
  'docs/memory.md': 'batch rollout.max_num_seqs',
  'docs/mesh.md': 'mesh',
  'docs/mismatch.md': 'algorithm.correction batch.logprob_mismatch_warn '
  'rollout.async_ratio rollout.staleness_policy',
  'docs/models.md': 'model checkpoint.export --checkpoint',
  'docs/packing.md': 'batch.length_buckets batch.packing',
  'docs/performance.md': 'logging.trace_steps',
  'docs/plan.md': '--topology',
  'docs/reliability.md': 'checkpoint',
  'docs/store.md': 'dataset.experience_store trajectory_dump',
  'docs/synthesis.md': '--mode',
  'docs/vllm.md': 'rollout.engine',
  'docs/weights.md': 'weight_sync',
}
PAGES = {key: page for page, keys in _KEYS.items() for key in keys.split()}
# A flag, or a key with its section: a bare `mesh` in a sentence is only a word, and
# `eval.jsonl` is a file.
_NAME = re.compile(
  r'--config\.([a-z_][\w.]*)|(--[a-z]+)|'
  r'(?<![\w./-])(?:config\.)?([a-z_]+\.(?!(?:py|jsonl?|csv|parquet)\b)[a-z_][\w.]*)'
)
# A key of a section, or the section before what is wrong in it.
_SECTIONS = '|'.join(
  sorted({page.partition('.')[0] for page in PAGES if page[0] != '-'})
)
_KEY = re.compile(
  rf'(?<![\w./\'"-])(?:{_SECTIONS}|teacher)\.'
  r'(?!(?:py|jsonl?|csv|parquet|safetensors)\b)[A-Za-z_]\w*|^(?:mesh|kernels|seed|num_steps|num_epochs)(?=[:=])'
)


def find_page(text: str) -> str:
  """Returns the page that explains an error; '' if there is none.

  Args:
    text: The error. The first key or flag of PAGES in it decides.
  """
  for names in _NAME.findall(text):
    name = next(filter(None, names))
    while name:
      if name in PAGES:
        return PAGES[name]
      name = name.rpartition('.')[0]
  return ''


def with_flags(text: str) -> str:
  """Returns a text in which keys of the config are written as on the command line."""
  return _KEY.sub(r'--config.\g<0>', text)


def print_error(error: Exception | str) -> None:
  """Prints an error to stderr, with the page that explains it."""
  text = str(error)
  if isinstance(error, Exception) and is_refusal(error):
    text = with_flags(text)
  page = '' if 'docs/' in text else find_page(text)
  print(f'error: {text} ({page})' if page else f'error: {text}', file=sys.stderr)


def is_refusal(error: BaseException) -> bool:
  """Returns whether an error says what is wrong with what the user asked for.

  These are ConfigErrors, and ValueErrors that the package itself raises, in contrast to
  those that arise in what it calls.
  """
  if isinstance(error, ConfigError):
    return True
  trace = error.__traceback__
  if type(error) is not ValueError or trace is None:
    return False
  *_, (frame, line) = traceback.walk_tb(trace)
  package = frame.f_globals.get('__name__', '').partition('.')[0]
  source = linecache.getline(frame.f_code.co_filename, line)
  return package in ('jaxrl', 'kernels', 'launch') and source.strip().startswith(
    'raise'
  )


def describe_user_error(error: Exception) -> str:
  """Describes an error of a user's own code, with the file and line in that code.

  Returns:
    One line; '' for an error that arose elsewhere.
  """
  # An error from another process has no traceback, but may have a note with the place.
  notes = [note for note in getattr(error, '__notes__', ()) if ', line ' in note]
  if notes:
    return '; '.join((f'{type(error).__name__}: {error}', *notes))
  return describe_error(error) if user_place(error) else ''


def report_user_error(error: Exception) -> int:
  """Prints an error of a user's own code in one line.

  Returns:
    1, the exit status.

  Raises:
    Exception: `error` itself, if it arose elsewhere.
  """
  line = describe_user_error(error)
  if not line:
    raise error
  print_error(line)
  return 1


def report_failure(error: Exception, console: Console, workdir: Workdir) -> int:
  """Reports an error: in one line if the user can mend it, else with its traceback.

  What a user's own code raises is a line with its place in that code. ERROR_FILE has
  the traceback of either.
  """
  from jaxrl.rollout.queue.group_pipeline import InsufficientGroupsError
  from jaxrl.rollout.weights.transport import WeightsError

  workdir.end('failed')
  text = ''.join(traceback.format_exception(error))
  log = workdir.path / ERROR_FILE
  try:
    log.write_text(text)
  except OSError:
    log = None
  refused = is_refusal(error)
  known = refused or isinstance(
    error, InsufficientGroupsError | WeightsError | OSError | ArithmeticError
  )
  line: Exception | str = '' if refused else describe_user_error(error)
  line = line or (error if known else '')
  if line:
    print_error(line)
  else:
    print(text, file=sys.stderr)
  if log and line:
    console.say(f'(traceback in {log})', style='dim')
  return 2 if refused else 1
