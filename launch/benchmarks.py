"""The table of benchmarks that `python -m launch.evaluate --benchmark=NAME` knows.

An entry says how a benchmark is asked and scored, and where that was published. Tasks
come from a local file in the published format; nothing is downloaded.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs import base
from jaxrl.config import Config
from jaxrl.data.row_sources import DataError, Row, load_rows
from jaxrl.data.rows.row_choices import letter_at
from jaxrl.group_stats import rows_by_sample
from jaxrl.options import ConfigError, unknown_name_error
from jaxrl.types import Group


@dataclasses.dataclass(frozen=True)
class Benchmark:
  r"""How a benchmark is asked and scored.

  Attributes:
    source: The paper or the harness that these values come from.
    fields: Keys of a row of the published file; alternatives are joined by `|`.
    prompt: The user's message; its fields are `fields`, `options` as lettered lines,
      and `shots`, the solved examples.
    grader: Graders, the first of which decides whether a reply is right.
    metric: The published score, such as 'mean' over all attempts, or the label of one
      of `parts`.
    shot: One solved example in the prompt, with the same fields.
    num_shots: The number of solved examples.
    shots_split: The split that they come from, in a file beside the tasks'.
    same: The field in which examples agree with the task; '' takes the file's first.
    answer: The field that becomes the grader's `answer`; '' for none.
    parts: Further scores: label → (the part of the grader that gives it, the field of
      a row whose length weighs its task, or '').
    votes: Whether attempts have answers that can be counted, for majority@k.
    attempts: Attempts at each task.
    temperature: The temperature at which they are drawn; 0 is greedy.
    top_p: Nucleus sampling, as `rollout.top_p`.
    max_tokens: Tokens of a reply at most.
    max_length: Tokens of prompt and reply together at most.
    stop: Texts that end a reply.
  """

  source: str
  fields: tuple[str, ...]
  prompt: str
  grader: str
  metric: str = 'mean'
  shot: str = ''
  num_shots: int = 0
  shots_split: str = ''
  same: str = ''
  answer: str = 'answer'
  parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
  votes: bool = True
  attempts: int = 1
  temperature: float = 0.0
  top_p: float = 1.0
  max_tokens: int = 512
  max_length: int = 2048
  stop: tuple[str, ...] = ()


BOXED = (
  '{problem}\n\nPlease reason step by step, and put your final answer within '
  '\\boxed{{}}.'
)

BENCHMARKS = {
  # Files: openai/grade-school-math, {train,test}.jsonl; openai/gsm8k.
  'gsm8k': Benchmark(
    source='arXiv 2110.14168; prompt and shots as gsm8k in lm-evaluation-harness',
    fields=('question', 'answer'),
    prompt='{shots}Question: {question}\nAnswer:',
    shot='Question: {question}\nAnswer: {answer}\n\n',
    num_shots=5,
    shots_split='train',
    grader='math + math(strict=True, weight=0)',
    parts={'strict match': ('math_2', '')},
    stop=('Question:',),
  ),
  # File: HuggingFaceH4/MATH-500, test.jsonl.
  'math500': Benchmark(
    source='arXiv 2305.20050; prompt of arXiv 2409.12122',
    fields=('problem', 'answer'),
    prompt=BOXED,
    grader='math',
    max_tokens=4096,
    max_length=6144,
  ),
  # Files: HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime24 (whose
  # `solution` is the answer) and aime25, MathArena/aime_2025, opencompass/AIME2025.
  'aime': Benchmark(
    source='Mathematical Association of America; attempts and sampling of arXiv '
    '2501.12948',
    fields=('problem|Problem|question', 'answer|Answer|solution'),
    prompt=BOXED,
    grader='math',
    attempts=64,
    temperature=0.6,
    top_p=0.95,
    max_tokens=32768,
    max_length=34816,
  ),
  # File: google/IFEval, ifeval_input_data.jsonl; input_data.jsonl of google-research.
  'ifeval': Benchmark(
    source='arXiv 2311.07911',
    fields=('prompt', 'instruction_id_list', 'kwargs'),
    prompt='{prompt}',
    grader='instructions(strict=True) + instructions(weight=0) + '
    'instructions(strict=True, loose=True, weight=0) + '
    'instructions(loose=True, weight=0)',
    metric='prompt-level strict',
    answer='',
    parts={
      'prompt-level strict': ('instructions', ''),
      'inst-level strict': ('instructions_2', 'instruction_id_list'),
      'prompt-level loose': ('instructions_3', ''),
      'inst-level loose': ('instructions_4', 'instruction_id_list'),
    },
    votes=False,
    max_tokens=1280,
    max_length=2560,
  ),
  # Files: TIGER-Lab/MMLU-Pro, test and validation.
  'mmlu_pro': Benchmark(
    source='arXiv 2406.01574; prompt as mmlu_pro in lm-evaluation-harness',
    fields=('question', 'options', 'answer', 'category', 'cot_content'),
    prompt='The following are multiple choice questions (with answers) about '
    '{category}. Think step by step and then finish your answer with "the answer is '
    '(X)" where X is the correct letter choice.\n\n{shots}'
    "Question:\n{question}\nOptions:\n{options}\nAnswer: Let's think step by step.",
    shot='Question:\n{question}\nOptions:\n{options}\nAnswer: {cot_content}\n\n',
    num_shots=5,
    shots_split='validation',
    same='category',
    grader='multiple_choice',
    max_tokens=2048,
    max_length=6144,
    stop=('Question:',),
  ),
  # File: openai/human-eval, HumanEval.jsonl; openai/openai_humaneval.
  'humaneval': Benchmark(
    source='arXiv 2107.03374; prompt for chat models of arXiv 2305.01210',
    fields=('prompt', 'test', 'entry_point'),
    prompt='Please provide a self-contained Python script that solves the following '
    'problem in a markdown code block:\n```python\n{prompt}\n```',
    grader='humaneval',
    metric='pass@1',
    answer='',
    votes=False,
    max_tokens=1024,
    max_length=2048,
  ),
}


def find_benchmark(name: str) -> Benchmark:
  """Returns the benchmark of a name.

  Raises:
    ConfigError: If there is none.
  """
  if name not in BENCHMARKS:
    raise unknown_name_error(name, BENCHMARKS, 'benchmark', f'--benchmark={name}')
  return BENCHMARKS[name]


def benchmark_config(name: str, path: str) -> Config:
  """Returns the config that evaluates a benchmark.

  Args:
    name: One of BENCHMARKS.
    path: The file with its tasks.

  Raises:
    ConfigError: If there is no such benchmark or file.
  """
  benchmark = find_benchmark(name)
  if not path:
    raise ConfigError(
      f'--benchmark={name}: name the file with its tasks: --path=FILE, in the '
      f'published format, with the fields {", ".join(benchmark.fields)}'
    )
  if not pathlib.Path(path).exists():
    raise ConfigError(f'--path={path}: no such file')
  config = base.get_config()
  config.batch.max_length = benchmark.max_length
  config.rollout.top_p = benchmark.top_p
  config.env[name] = base.env_section(
    'math',
    max_tokens_per_step=benchmark.max_tokens,
    stop=benchmark.stop,
    env_config={'grader': benchmark.grader},
  )
  config.dataset.path = (
    f'generate:launch.benchmarks:benchmark_rows(name={name!r}, path={path!r})'
  )
  if not benchmark.answer:
    config.dataset.columns.answer = ''
  config.eval.update(
    group_size=benchmark.attempts, temperature=benchmark.temperature, num_tasks=-1
  )
  return config


def benchmark_rows(
  split: str, *, name: str, path: str, size: int | None = None
) -> list[Row]:
  """Returns a benchmark's tasks, with the whole prompt as `question`.

  A data set of a config can name it: `generate:launch.benchmarks:benchmark_rows(
  name='gsm8k', path='test.jsonl')`.

  Args:
    split: The split of the file, if it is a folder.
    name: One of BENCHMARKS.
    path: The file with its tasks.
    size: The number of tasks at most; None for all.

  Returns:
    The rows of the file, with `question` and, if the grader needs one, `answer`.

  Raises:
    ConfigError: If a row lacks a field, or the solved examples are missing.
  """
  benchmark = find_benchmark(name)
  split_of_shots, same = benchmark.shots_split, benchmark.same
  count = benchmark.num_shots
  examples: list[Row] = []
  if count:
    file = _file_of_split(name, path, split_of_shots)
    examples = [
      _read_fields(benchmark, row, file) for row in load_rows(file, split_of_shots)
    ]
  rows = []
  for row in load_rows(path, split, size):
    fields = _read_fields(benchmark, row, path)
    shots = [one for one in examples if one.get(same) == fields.get(same)][:count]
    if len(shots) < count:
      kind = f' with {same} {fields[same]!r}' if same else ''
      raise DataError(
        f'{name} shows {count} solved examples, but its split {split_of_shots} has '
        f'{len(shots)} rows{kind}'
      )
    shown = ''.join(benchmark.shot.format(**_shown(one)) for one in shots)
    question = benchmark.prompt.format(**_shown(fields), shots=shown)
    task = {**row, 'question': question}
    if benchmark.answer:
      task['answer'] = str(fields[benchmark.answer])
    rows.append(task)
  return rows


def _file_of_split(name: str, path: str, split: str) -> str:
  """Returns where the solved examples are: the folder itself, or a file beside one."""
  place = pathlib.Path(path)
  if place.is_dir():
    names = [file.stem for file in place.rglob('*')]
    if 'dataset_dict' in names or any(split in stem for stem in names):
      return path
    raise DataError(f'{name} shows solved examples: {path} has no split {split}')
  other = place.with_name(place.name.replace('test', split))
  if other == place or not other.is_file():
    raise DataError(
      f'{name} shows solved examples: put the published file of the split {split} '
      f'beside {path}, with {split} in its name where the other has test'
    )
  return str(other)


def _read_fields(benchmark: Benchmark, row: Row, path: str) -> Row:
  """Returns the fields of a row under the names that the prompt uses."""
  fields = {}
  for names in benchmark.fields:
    known = names.split('|')
    key = next((key for key in known if row.get(key) is not None), None)
    if key is None:
      raise DataError(
        f'a row of {path} has no {" or ".join(known)}: its keys are {", ".join(row)}'
      )
    fields[known[0]] = row[key]
  return fields


def _shown(fields: Row) -> Row:
  """Returns the fields as a prompt shows them."""
  if 'options' not in fields:
    return fields
  options = [option for option in fields['options'] if option != 'N/A']
  lines = [f'{letter_at(i)}. {option}' for i, option in enumerate(options)]
  shown = {**fields, 'options': '\n'.join(lines)}
  return shown | {'cot_content': str(fields['cot_content']).removeprefix('A: ')}


def part_scores(
  name: str, groups: Sequence[Group], rows: Sequence[Row]
) -> dict[str, np.ndarray]:
  """Returns a benchmark's further scores of every task.

  There is a group for each task; `rows` are those of the data set, in order.

  Returns:
    `[tasks]` float64 of each of `Benchmark.parts`, whose mean is the score.
  """
  scores = {}
  for label, (part, field) in BENCHMARKS[name].parts.items():
    values = [_mean_metric(group, f'reward/{part}') for group in groups]
    weights = [
      len(rows[group[0].episode_id][field]) if field else 1 for group in groups
    ]
    scores[label] = np.array(values) * weights / np.mean(weights)
  return scores


def _mean_metric(group: Group, metric: str) -> float:
  """Returns the mean of a metric over a group's samples; a failed one counts as 0."""
  last_rows = [rows[-1] for rows in rows_by_sample(group).values()]
  values = [0.0 if row.failed else row.metrics.get(metric, 0.0) for row in last_rows]
  return float(np.mean(values))


def published_score(name: str, tag: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the published score of a `summarize_tags` tag, and what it stands for."""
  benchmark = BENCHMARKS[name]
  metric = benchmark.metric
  if metric == 'mean':
    metric = f'mean@{tag["num_attempts"]}'
  return {
    'name': name,
    'metric': metric,
    **tag['scores'][metric],
    'num_shots': benchmark.num_shots,
    'grader': benchmark.grader,
    'source': benchmark.source,
  }
