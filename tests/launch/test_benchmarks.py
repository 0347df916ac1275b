"""Benchmarks: published files are asked as published, and gold answers are right."""

import json
import re

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl import model_loading
from jaxrl.data.row_sources import DataError, load_rows, parse_row_sources
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.sandbox import local_sandbox
from jaxrl.options import ConfigError
from jaxrl.types import Task
from launch import evaluate
from launch.benchmarks import BENCHMARKS, benchmark_rows, part_scores
from launch.settings.component_options import parse_grader_calls
from tests.envs.graders.test_code_grader import TWICE
from tests.launch import runs
from tests.rollout.fakes import row as played

GSM8K = runs.ROOT.parent / 'shared' / 'data' / 'gsm8k'

# Rows in the published formats, and for each a reply that is right.
ROWS = {
  'gsm8k': [
    {
      'question': f'Ann has {n} apples and buys {n} more. How many has she?',
      'answer': f'She has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n:,}.\n#### {2 * n:,}',
    }
    for n in (3, 1200, 7, 8, 9, 10)
  ],
  'math500': [
    {
      'problem': 'What is it?',
      'solution': f'It is $\\boxed{{{answer}}}$.',
      'answer': answer,
      'subject': 'Algebra',
      'level': 2,
      'unique_id': 'test/algebra/1.json',
    }
    for answer in (
      r'\left( 3, \frac{\pi}{2} \right)',
      'p - q',
      r'\frac{14}{3}',
      r'\text{Evelyn}',
      r'11\sqrt2',
      r'\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}',
      r'90^\circ',
      r'(-\infty, 2) \cup (3, \infty)',
      r'10,\!080',
      r'\$18.90',
      r'\text{(C)}',
      '6 - 5i',
      'x^3 + 3x - 6',
      '1,-2',
      r'\dfrac{1}{2}',
    )
  ],
  'aime': [
    {'id': 60, 'problem': 'Find it.', 'solution': '', 'answer': '204', 'year': '2024'},
    {'ID': '2024-II-4', 'Problem': 'Find it.', 'Solution': '', 'Answer': 33},
    {'problem': 'Find it.', 'answer': '033', 'id': '0'},
    {'id': 60, 'problem': 'Find it.', 'solution': '\\boxed{204}', 'url': 'x'},
    {
      'problem_idx': 1,
      'answer': 70,
      'problem': 'Find it.',
      'problem_type': ['Algebra'],
    },
    {'question': 'Find it.', 'answer': '70'},
  ],
  'ifeval': [
    {
      'key': 1000,
      'prompt': 'Write a riddle. Use no comma and say it in German.',
      'instruction_id_list': [
        'punctuation:no_comma',
        'language:response_language',
        'length_constraints:number_words',
      ],
      'kwargs': [
        {'num_words': None},
        {'language': 'de'},
        {'relation': 'at least', 'num_words': 3},
      ],
    }
  ],
  'mmlu_pro': [
    {
      'question_id': 70,
      'question': 'Which vitamin cures scurvy?',
      'options': ['K', 'A', 'C', 'D', 'N/A', 'N/A'],
      'answer': 'C',
      'answer_index': 2,
      'cot_content': '',
      'category': 'health',
      'src': 'x',
    }
  ],
  'humaneval': [{'task_id': 'Test/0', **TWICE}],
}
VALIDATION = [
  {
    **ROWS['mmlu_pro'][0],
    'question': f'Question {n} of {category}?',
    'cot_content': f"A: Let's think step by step. It is {n}. The answer is (A).",
    'category': category,
  }
  for category in ('law', 'health')
  for n in range(6)
]


BOX = '\\boxed{%s}'


def gold_reply(name, row):
  if name == 'ifeval':
    return 'Was hat Zähne und kann doch nicht beißen? Es ist der Kamm.'
  if name == 'mmlu_pro':
    return f'It heals wounds. The answer is ({row["answer"]}).'
  if name == 'humaneval':
    return f'```python\n{row["prompt"]}{row["canonical_solution"]}```'
  if name == 'gsm8k':
    return row['answer']
  answer = str(row['answer'])  # which math-ai/aime24 has in a box
  return f'Thus it is {answer if "boxed" in answer else BOX % answer}.'


def write(folder, name):
  """A file with the rows of a benchmark, and one with its solved examples."""
  path = folder / 'test.jsonl'
  path.write_text('\n'.join(map(json.dumps, ROWS[name])))
  shots = VALIDATION if name == 'mmlu_pro' else ROWS[name]
  if split := BENCHMARKS[name].shots_split:
    (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, shots)))
  return str(path)


def grade(name, row, reply):
  env = MathEnv(grader=parse_grader_calls(BENCHMARKS[name].grader))
  env.reset(seed=0, options={'task': Task(seed=0, index=0, item=row)})
  _, reward, _, _, info = env.step(reply)
  return reward, info['metrics']


@pytest.mark.parametrize('name', BENCHMARKS)
def test_gold_answers_are_right_and_others_wrong(name, tmp_path):
  if name == 'humaneval' and local_sandbox.unsupported_reason():
    pytest.skip(local_sandbox.unsupported_reason())
  for row in benchmark_rows('test', name=name, path=write(tmp_path, name)):
    reward, metrics = grade(name, row, gold_reply(name, row))
    assert reward == 1 and metrics['accuracy'] == 1, row
    assert grade(name, row, 'I cannot, sorry')[0] == 0, row


def test_every_gold_answer_of_gsm8k_is_right():
  if not GSM8K.is_dir():
    pytest.skip('the published files of GSM8K are not beside the repository')
  rows = benchmark_rows('test', name='gsm8k', path=str(GSM8K / 'test.jsonl'))
  assert len(rows) == 1319
  env = MathEnv(grader=parse_grader_calls(BENCHMARKS['gsm8k'].grader))
  for row in rows:
    env.reset(seed=0, options={'task': Task(seed=0, index=0, item=row)})
    _, reward, _, _, info = env.step(row['answer'])
    assert reward == 1 and info['metrics']['reward/math_2'] == 1, row
    assert row['question'].count('\nAnswer:') == 6


@pytest.mark.parametrize('whole', [False, True])
def test_parquet_files_of_hugging_face_are_read(whole, tmp_path):
  folder = tmp_path / 'data'
  folder.mkdir()
  test = folder / 'test-00000-of-00001.parquet'
  validation = folder / 'validation-00000-of-00001.parquet'
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS['mmlu_pro']), test)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VALIDATION), validation)
  path = str(tmp_path if whole else test)
  (row,) = benchmark_rows('test', name='mmlu_pro', path=path)
  assert row['question'].count('Question ') == 5
  assert row['question'].endswith(
    "A. K\nB. A\nC. C\nD. D\nAnswer: Let's think step by step."
  )
  assert grade('mmlu_pro', row, gold_reply('mmlu_pro', row))[0] == 1


def test_prompts_show_solved_examples(tmp_path):
  (tmp_path / 'gsm8k').mkdir()
  row = benchmark_rows('test', name='gsm8k', path=write(tmp_path / 'gsm8k', 'gsm8k'))[5]
  assert row['question'].startswith(
    'Question: Ann has 3 apples and buys 3 more. How many has she?\nAnswer: She has '
    '3 + 3 = <<3+3=6>>6.\n#### 6\n\nQuestion: Ann has 1200 apples'
  )
  assert row['question'].endswith('#### 18\n\nQuestion: Ann has 10 apples and buys 10 '
                                  'more. How many has she?\nAnswer:')  # fmt: skip
  assert row['question'].count('Question:') == 6
  (row,) = benchmark_rows('test', name='mmlu_pro', path=write(tmp_path, 'mmlu_pro'))
  assert re.findall(r'Question (\d) of (\w+)', row['question']) == [
    (str(n), 'health') for n in range(5)
  ]
  assert "D. D\nAnswer: Let's think step by step. It is 4." in row['question']
  assert 'about health. Think step by step' in row['question']
  assert 'N/A' not in row['question']
  assert row['question'].endswith(
    'Question:\nWhich vitamin cures scurvy?\nOptions:\nA. K\nB. A\nC. C\nD. D\n'
    "Answer: Let's think step by step."
  )


def test_prompts_without_examples(tmp_path):
  questions = {}
  for name in ('math500', 'aime', 'ifeval', 'humaneval'):
    (row,) = benchmark_rows('test', name=name, path=write(tmp_path, name), size=1)
    questions[name] = row['question']
  boxed = 'Please reason step by step, and put your final answer within \\boxed{}.'
  assert questions['math500'] == f'What is it?\n\n{boxed}'
  assert questions['aime'] == f'Find it.\n\n{boxed}'
  assert questions['ifeval'] == ROWS['ifeval'][0]['prompt']
  assert questions['humaneval'].endswith(f'```python\n{TWICE["prompt"]}\n```')


def test_a_file_of_another_form_is_refused(tmp_path):
  path = write(tmp_path, 'math500')
  with pytest.raises(DataError, match='has no question: its keys are problem'):
    (tmp_path / 'train.jsonl').write_text((tmp_path / 'test.jsonl').read_text())
    benchmark_rows('test', name='gsm8k', path=path)
  (tmp_path / 'train.jsonl').unlink()
  with pytest.raises(DataError, match='file of the split train beside'):
    benchmark_rows('test', name='gsm8k', path=write(tmp_path, 'aime'))
  write(tmp_path, 'gsm8k')
  (tmp_path / 'train.jsonl').write_text(json.dumps(ROWS['gsm8k'][0]))
  with pytest.raises(DataError, match='shows 5 solved examples, but its split train'):
    benchmark_rows('test', name='gsm8k', path=path)
  with pytest.raises(ConfigError, match="no benchmark 'gsm8'"):
    benchmark_rows('test', name='gsm8', path=path)


def test_the_instruction_level_score_weighs_prompts_by_their_instructions():
  """Two of four instructions followed in one prompt, all of one in the other."""
  rows = [{'instruction_id_list': list('abcd')}, {'instruction_id_list': ['a']}]
  scores = [(0, 0.5, 1, 1.0), (1, 1.0, 1, 1.0)]
  names = ('', '_2', '_3', '_4')
  metrics = [
    {f'reward/instructions{n}': x for n, x in zip(names, values, strict=True)}
    for values in scores
  ]
  groups = [[played(0, 0, episode_id=i, metrics=metrics[i])] for i in range(2)]
  part_means = {k: v.mean() for k, v in part_scores('ifeval', groups, rows).items()}
  assert part_means == {
    'prompt-level strict': 0.5,
    'inst-level strict': pytest.approx(3 / 5),
    'prompt-level loose': 1,
    'inst-level loose': 1,
  }


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('model') / 'model'
  shape = model_loading.random_config(hidden_size=32, num_layers=1, head_dim=16)
  texts = [json.dumps(row) for rows in ROWS.values() for row in rows]
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  model_loading.create_model(folder, shape, texts, jax.random.key(0), **options)
  return folder


def run(name, model, folder, *options):
  return evaluate.main(
    [
      f'--benchmark={name}',
      f'--path={write(folder, name)}',
      f'--checkpoint={model}',
      f'--workdir={folder}/results',
      f'--config.env.{name}.max_tokens_per_step=8',
      '--config.batch.max_length=2048',
      *options,
    ]
  )


@pytest.mark.slow
def test_a_benchmark_from_the_command_line(model, tmp_path, capsys):
  options = ('--config.eval.group_size=3', '--config.eval.temperature=1')
  assert run('ifeval', model, tmp_path, *options) == 0
  output = capsys.readouterr().out
  results = json.loads((tmp_path / 'results' / 'ifeval.json').read_text())
  scores = results['tags']['ifeval']['scores']
  parts = list(BENCHMARKS['ifeval'].parts)
  assert list(scores) == ['mean@3', 'pass@1', 'pass@2', *parts]
  assert scores['prompt-level strict'] == scores['mean@3']
  for label in parts:
    assert re.search(rf'  {label} +{scores[label]["value"]:.3f}   \d', output)
  assert results['benchmark']['metric'] == 'prompt-level strict'
  assert results['benchmark']['value'] == scores['mean@3']['value']
  assert results['benchmark']['source'] == 'arXiv 2311.07911'
  assert f'{tmp_path}/results/ifeval.json' in output


@pytest.mark.slow
@pytest.mark.parametrize('name', BENCHMARKS)
def test_every_benchmark_from_the_command_line(name, model, tmp_path, capsys):
  if name == 'humaneval' and local_sandbox.unsupported_reason():
    pytest.skip(local_sandbox.unsupported_reason())
  attempts = '--config.eval.group_size=2'
  assert run(name, model, tmp_path, attempts, '--config.eval.temperature=1') == 0
  results = json.loads((tmp_path / 'results' / f'{name}.json').read_text())
  assert results['tags'][name]['num_tasks'] == len(ROWS[name])
  assert results['tags'][name]['other']['failed'] == 0, results['tags'][name]['error']
  wanted = 'mean@2' if BENCHMARKS[name].metric == 'mean' else BENCHMARKS[name].metric
  assert results['benchmark']['metric'] == wanted
  assert np.isfinite(
    [results['benchmark'][key] for key in ('low', 'value', 'high')]
  ).all()
  assert wanted in capsys.readouterr().out


@pytest.mark.parametrize(
  ('argv', 'words'),
  [
    (['--benchmark=gsm9k', '--path=x'], "no benchmark 'gsm9k'"),
    (['--benchmark=gsm8k'], '--benchmark=gsm8k: name the file with its tasks'),
    (['--benchmark=gsm8k', '--path=none.jsonl'], '--path=none.jsonl: no such file'),
    (['--benchmark=gsm8k', '--config=x.py'], '--benchmark brings its own config'),
    (['--path=x', f'--config={runs.DEBUG}'], '--path=x: is the file of a benchmark'),
  ],
)
def test_what_is_wrong_is_said(argv, words, capsys):
  assert evaluate.main([*argv, '--checkpoint=x']) == 2
  assert words in capsys.readouterr().err


def test_the_page_has_the_table(tmp_path):
  page = (runs.ROOT / 'docs' / 'benchmarks.md').read_text()
  rows = [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in page.splitlines()
    if line.startswith('| `')
  ]
  assert [row[0].strip('`') for row in rows] == list(BENCHMARKS)
  for row, benchmark in zip(rows, BENCHMARKS.values(), strict=True):
    assert row[3].partition(',')[0] == str(benchmark.num_shots)
    drawn = f'at {benchmark.temperature:g}' if benchmark.temperature else 'greedy'
    assert row[4] == f'{benchmark.attempts}, {drawn}'
    assert benchmark.grader.startswith(row[5].strip('`'))
    assert row[6] == benchmark.metric
  (source,) = re.findall(r'--config.eval.path="(.*)"', page)
  source = source.replace('gsm8k/test.jsonl', write(tmp_path, 'gsm8k'))
  rows = load_rows(parse_row_sources(source), 'test')
  assert [row['answer'] for row in rows] == [row['answer'] for row in ROWS['gsm8k']]
  for command in re.findall(r'--benchmark=(\w+)', page):
    assert command in BENCHMARKS
