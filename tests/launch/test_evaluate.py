"""A checkpoint is scored: each item once, nothing filtered, each time the same."""

import collections
import fractions
import io
import itertools
import json
import re
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import model_loading
from jaxrl.component_calls import ComponentCall
from jaxrl.envs.graders.answer_marks import final_answer
from launch import evaluate, train
from launch.logging.console import Console
from launch.logging.evaluation_results import format_results, summarize_tags
from tests.launch import runs
from tests.marks import slow
from tests.rollout.fakes import row

NUM_ITEMS = 13


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A folder with a data set and a tiny random model."""
  folder = tmp_path_factory.mktemp('evaluate')
  questions = [f'What is {i} + {i}?' for i in range(NUM_ITEMS)]
  rows = [{'question': q, 'answer': str(2 * i)} for i, q in enumerate(questions)]
  (folder / 'test.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  shape = model_loading.random_config(hidden_size=32, num_layers=1, head_dim=16)
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  model_loading.create_model(
    folder / 'model', shape, questions, jax.random.key(0), **options
  )
  return folder


def main(place, *options, name='scores.json'):
  """Evaluates with a filter that drops all; the exit status and what JSON holds."""
  argv = [
    f'--config={runs.VARIED}',
    f'--checkpoint={place}/model',
    f'--json={place}/{name}',
    f'--config.dataset.path={place}/test.jsonl',
    '--config.rollout.group_filter=score_range(low=9, high=10)',
    '--config.eval.num_tasks=-1',
    *options,
  ]
  status = evaluate.main(argv)
  return status, json.loads((place / name).read_text()) if not status else None


def test_a_checkpoint_is_scored(place, capsys):
  options = ('--config.eval.group_size=4', '--config.eval.temperature=1', '--k=1,3,4')
  status, results = main(place, *options)
  output = capsys.readouterr().out
  assert status == 0, output
  tag_results = results['tags']['arithmetic']
  assert tag_results['num_tasks'] == NUM_ITEMS and tag_results['num_attempts'] == 4
  # Every item once, in order; the filter, which would drop them all, never ran.
  assert [task['number'] for task in tag_results['tasks']] == list(range(NUM_ITEMS))
  assert len({task['seed'] for task in tag_results['tasks']}) == NUM_ITEMS
  scores = np.array([task['scores'] for task in tag_results['tasks']])
  assert (
    0 < scores.mean() < 1 and tag_results['scores']['mean@4']['value'] == scores.mean()
  )
  choices = itertools.combinations(range(4), 3)
  wanted = np.mean([(scores[:, list(c)] >= 1).any(1).mean() for c in choices])
  assert tag_results['scores']['pass@3']['value'] == pytest.approx(wanted)
  names = ['mean@4', 'pass@1', 'pass@3', 'pass@4', 'majority@3', 'majority@4']
  assert list(tag_results['scores']) == names
  for name, at in tag_results['scores'].items():
    assert at['low'] <= at['value'] <= at['high']
    assert (
      f'{name:<14} {at["value"]:>8.3f}   {at["low"]:.3f} – {at["high"]:.3f}' in output
    )
  assert f'arithmetic: {NUM_ITEMS} tasks, 4 attempts each' in output
  again = main(place, *options, name='again.json')[1]
  assert again == results


def test_a_tag_on_its_own_with_its_failures():
  groups = [
    [row(1, 0, tag='a'), row(0, 1, tag='a')],
    [row(0, m, 'env_error', tag='a', extras={'error': 'broken'}) for m in range(2)],
    [row(1, m, tag='b') for m in range(2)],
  ]
  metrics = {'eval/a/failed': 0.5, 'eval/a/stop/env_error': 0.5, 'eval/a/mean': 0.25}
  results = summarize_tags({**metrics, 'eval/b/failed': 0.0}, groups, [], seed=0)
  assert results['a']['scores']['mean@2']['value'] == 0.25
  assert results['a']['scores']['pass@2'] == {'value': 0.5, 'low': 0, 'high': 1}
  assert results['a']['error'] == 'broken' and results['b']['error'] is None
  b_score = results['b']['scores']['pass@1']
  assert (b_score['value'], b_score['high']) == (1, 1)
  assert b_score['low'] == pytest.approx(0.025)  # One task says little.
  assert results['a']['other'] == {'failed': 0.5, 'stop/env_error': 0.5}
  output = '\n'.join(text for text, _ in format_results(results))
  assert '50.0% of attempts failed and score 0; the first: broken' in output


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    (['--checkpoint=nowhere'], 'error: --checkpoint=nowhere: no model in nowhere'),
    (['--k=8', '--config.eval.group_size=4'], 'set --config.eval.group_size=8'),
    (['--k=1,x'], 'must be whole numbers'),
    (['--json=no/such/folder/x.json'], 'there is no folder no/such/folder'),
    (['--config.model.lora=lora()'], 'has no effect without training'),
    (['--config.dataset.path=none.jsonl'], 'none.jsonl'),
    (['--config.eval.num_tasks=-2'], 'num_tasks=-2: must be at least -1'),
    (['--chekpoint=x'], 'did you mean --checkpoint?'),
  ],
)
def test_what_is_wrong_is_said_before_any_work(place, options, words, capsys):
  assert main(place, *options)[0] == 2
  error = capsys.readouterr().err
  assert words in error and error.count('\n') == 1


def test_a_model_must_be_named(capsys):
  assert evaluate.main([f'--config={runs.VARIED}']) == 2
  assert '--checkpoint=FOLDER' in capsys.readouterr().err


def test_games_without_an_end_are_refused_at_the_start(tmp_path, capsys):
  options = ('--config.eval.interval=1', '--config.eval.num_tasks=-1')
  lake = f'--config={runs.ROOT}/configs/frozen_lake.py'
  assert train.main([lake, f'--workdir={tmp_path}', *runs.BARE, *options]) == 2
  assert 'set the number of tasks' in capsys.readouterr().err


def test_each_tag_has_its_gauge():
  stream = io.StringIO()
  gauges = evaluate.TagProgress(Console(stream))
  for tag, total in (('a', 3), ('b', 2)):
    for member in range(total):
      gauges(tag, [row(member % 2, member)], total)
  gauges.close()
  lines = stream.getvalue().splitlines()
  assert lines[0] == 'a: 3 episodes' and lines[2] == 'b: 2 episodes'
  assert 'a 3/3  score 0.333' in lines[1] and 'b 2/2  score 0.500' in lines[3]


QUESTIONS = [f'How many are {i} and {i % 7}?' for i in range(24)]
NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:/\d+)?')


@pytest.fixture(scope='module')
def scribbler(tmp_path_factory):
  """A random model whose replies are full of digits, and follow from the question."""
  folder = tmp_path_factory.mktemp('scribbler') / 'model'
  family = ComponentCall('qwen3', {'tie_embeddings': False})
  shape = model_loading.random_config(
    family=family, hidden_size=32, num_layers=2, head_dim=16
  )
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  model = model_loading.create_model(
    folder, shape, QUESTIONS, jax.random.key(1), **options
  )
  digits = [model.tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
  weights = load_file(folder / 'model.safetensors')
  weights['lm_head.weight'][digits] *= 2
  for name, weight in weights.items():
    if '.layers.' in name and weight.ndim == 2:
      weight *= 5  # else a greedy reply repeats itself, whatever it is asked
  save_file(weights, folder / 'model.safetensors', {'format': 'pt'})
  return folder


def evaluate_as_users_do(tmp_path, model, answers, *options):
  """What `python -m launch.evaluate` says and writes, of QUESTIONS in math's rules."""
  rows = [
    {'question': question, 'answer': answer}
    for question, answer in zip(QUESTIONS, answers, strict=True)
  ]
  (tmp_path / 'test.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  command = [
    *(sys.executable, '-m', 'launch.evaluate', f'--config={runs.DEBUG}'),
    *(f'--checkpoint={model}', f'--json={tmp_path}/scores.json'),
    f'--config.dataset.path={tmp_path}/test.jsonl',
    *('--config.eval.num_tasks=-1', '--config.batch.max_length=128', *options),
  ]
  done = subprocess.run(
    command, capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment()
  )
  assert done.returncode == 0, done.stderr
  results = json.loads((tmp_path / 'scores.json').read_text())
  return done.stdout, results['tags']['arithmetic']


@pytest.mark.slow
def test_greedy_replies_are_those_of_transformers(scribbler, tmp_path):
  """Torch plays each question; every second one has what it replies for an answer."""
  torch = pytest.importorskip('torch')
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(scribbler)
  model = transformers.AutoModelForCausalLM.from_pretrained(scribbler).eval()
  replies = []
  for question in QUESTIONS:
    chat = [{'role': 'user', 'content': question}]
    text = tokenizer.apply_chat_template(
      chat, tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    with torch.no_grad():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
      )
    replies.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
  said = [final_answer(reply, '1') for reply in replies]
  last = [answer if NUMBER.fullmatch(answer) else None for answer in said]
  assert len(set(last)) > 4 and sum(number is not None for number in last) > 12
  right = [i % 2 == 0 and number is not None for i, number in enumerate(last)]
  answers = [n if ok else '123456' for n, ok in zip(last, right, strict=True)]
  output, tag_results = evaluate_as_users_do(tmp_path, scribbler, answers)
  task_answers = [task['answers'] for task in tag_results['tasks']]
  assert task_answers == [[answer] for answer in said]
  assert [task['scores'] for task in tag_results['tasks']] == [
    [float(ok)] for ok in right
  ]
  assert tag_results['scores']['pass@1']['value'] == pytest.approx(np.mean(right))
  assert f'{np.mean(right):.3f}' in output


@pytest.mark.slow
def test_scores_of_sampled_replies_follow_from_their_answers(scribbler, tmp_path):
  """pass@k and majority@k by going through every choice of k of six attempts."""
  options = ('--config.eval.group_size=6', '--config.eval.temperature=.1', '--k=1,2,5')
  _, tag_results = evaluate_as_users_do(tmp_path, scribbler, ['8'] * 24, *options)
  tasks = [
    [_value(answer) for answer in task['answers']] for task in tag_results['tasks']
  ]
  passed = [[answer == 8 for answer in answers] for answers in tasks]
  assert [task['scores'] for task in tag_results['tasks']] == passed
  by_task = {'mean@6': [np.mean(task) for task in passed]}
  for k in (1, 2, 5):
    choices = list(itertools.combinations(range(6), k))
    by_task[f'pass@{k}'] = [
      np.mean([any(task[i] for i in choice) for choice in choices]) for task in passed
    ]
    by_task[f'majority@{k}'] = [
      np.mean([_vote([answers[i] for i in choice]) for choice in choices])
      for answers in tasks
    ]
  assert 0 < np.mean(by_task['pass@1']) < np.mean(by_task['pass@5']) < 1
  assert set(tag_results['scores']) == set(by_task) - {'majority@1'}
  rng = np.random.default_rng(5)
  for name, score in tag_results['scores'].items():
    values = np.array(by_task[name])
    assert score['value'] == pytest.approx(values.mean()), name
    means = values[rng.integers(0, 24, (20_000, 24))].mean(axis=1)
    ends = np.percentile(means, [2.5, 97.5])
    np.testing.assert_allclose([score['low'], score['high']], ends, atol=0.03)


def _value(answer):
  """A number, or text without spaces but those between digits; 8 l is 8."""
  answer = re.sub(r'(?<=[0-9])\s?[lgmsh]$', '', answer)  # units of one letter
  text = ' '.join(answer.lower().split())
  text = re.sub('(?<![0-9]) | (?![0-9])', '', text)
  number = text.rstrip('.,%')
  if re.fullmatch(r'[+-]?[0-9]{1,3}(,[0-9]{3})+([.][0-9]+)?', number):
    number = number.replace(',', '')
  try:
    return fractions.Fraction(number) if number.isascii() else text
  except (ValueError, ZeroDivisionError):
    return text


def _vote(answers):
  """The share of 8 among the most frequent answers; nobody votes for nothing."""
  counts = collections.Counter(answer for answer in answers if answer != '')
  top = [answer for answer, n in counts.items() if n == max(counts.values())]
  return top.count(8) / len(top) if top else 0.0


@pytest.mark.parametrize('error', ['KeyError', slow('ValueError')])
@pytest.mark.parametrize('part', ['build_evaluation', 'evaluate'])
def test_what_a_users_code_raises_is_one_line(
  tmp_path, capsys, monkeypatch, part, error
):
  file = tmp_path / 'own.py'
  file.write_text(f'def fail(*_):\n  raise {error}("no game")\n')
  monkeypatch.setattr(evaluate, 'build_evaluation', lambda *_: None)
  monkeypatch.setattr(evaluate, part, runpy.run_path(str(file))['fail'])
  argv = [f'--config={runs.DEBUG}', f'--checkpoint={tmp_path}']
  assert evaluate.main(argv) in (1, 2)
  line = capsys.readouterr().err
  assert line.startswith('error: ') and line.count('\n') == 1 and 'no game' in line
  is_placed = part == 'evaluate' or error == 'KeyError'
  assert (f'{error}: ' in line and f'({file}, line 2)' in line) is is_placed
