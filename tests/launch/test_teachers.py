"""Teachers by config: whom a run asks, and what it says when it cannot."""

import json
import re

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.models import huggingface
from jaxrl.options import OptionError
from jaxrl.run_options import TeacherOptions
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch import runs
from tests.launch.test_bad_input import refused

DISTILL = str(runs.ROOT / 'configs' / 'distill.py')
TINY = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.num_steps=2',
  '--config.optimizer.warmup_steps=0',
  '--config.optimizer.learning_rate=1e-3',
)
ASKS = f'{runs.VARIED}:on_policy_distill'


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
  """A model of another seed, wider than the student."""
  workdir = tmp_path_factory.mktemp('teacher')
  wide = (runs.model(hidden_size=48), '--config.seed=5')
  runs.record(workdir, *TINY, *wide, config=f'{runs.VARIED}:sft')
  return workdir / 'export'


def learned(recorder):
  return [row for _, row in recorder.metrics if 'loss/total' in row]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['on_policy_distill', 'distill'])
def test_a_fresh_student_takes_its_teachers_vocabulary(folder, tmp_path, name):
  options = (*TINY, f'--config.teacher.checkpoint={folder}')
  recorder = runs.record(tmp_path, *options, config=f'{runs.VARIED}:{name}')
  rows = learned(recorder)
  assert len(rows) == 2 and rows[1]['compile/programs'] == 0
  assert all(np.isfinite(value) for row in rows for value in row.values())
  config = huggingface.load_config(tmp_path / 'model')
  assert config.vocab_size == huggingface.load_config(folder).vocab_size
  assert config.hidden_size < huggingface.load_config(folder).hidden_size
  mine, theirs = (
    json.loads((x / 'tokenizer.json').read_text()) for x in (tmp_path / 'model', folder)
  )
  assert mine['model']['vocab'] == theirs['model']['vocab']


@pytest.mark.slow
def test_the_student_itself_has_nothing_to_teach(tmp_path):
  """The teacher is the folder the student starts from: the first step moves nothing."""
  runs.record(tmp_path / 'a', *TINY, config=f'{runs.VARIED}:sft')
  folder = tmp_path / 'a' / 'model'
  same = (
    f'--config.model.checkpoint={folder}',
    f'--config.teacher.checkpoint={folder}',
  )
  recorder = runs.record(tmp_path / 'b', *TINY, *same, config=ASKS)
  assert abs(learned(recorder)[0]['advantage/mean']) < 1e-5
  assert learned(recorder)[0]['advantage/std'] < 1e-4


def changed_vocabulary(folder, to):
  """A copy of a model whose tokenizer has two tokens swapped; their names."""
  config, params = huggingface.load(folder)
  from transformers import PreTrainedTokenizerFast

  tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
  huggingface.save(to, config, params, tokenizer)
  path = to / 'tokenizer.json'
  tokenizer_json = json.loads(path.read_text())
  vocabulary = tokenizer_json['model']['vocab']
  vocabulary['A'], vocabulary['B'] = vocabulary['B'], vocabulary['A']
  path.write_text(json.dumps(tokenizer_json))
  return vocabulary


@pytest.mark.slow
def test_another_vocabulary_is_refused_and_the_token_named(folder, tmp_path, capsys):
  vocabulary = changed_vocabulary(folder, tmp_path / 'other')
  model = f'--config.model.checkpoint={folder}'
  teacher_option = f'--config.teacher.checkpoint={tmp_path / "other"}'
  error = refused(tmp_path, capsys, *TINY, model, teacher_option, config=ASKS)
  first = min('AB', key=vocabulary.__getitem__)
  other = 'B' if first == 'A' else 'A'
  assert f'teacher.checkpoint={tmp_path / "other"}: its vocabulary is not that' in error
  assert f'token {other!r} is number {vocabulary[other]} there, but number ' in error


@pytest.mark.slow
def test_a_larger_table_is_cut_to_the_students(folder, tmp_path):
  """Rows beyond the tokenizer: a larger model of one family often has more of them."""
  config, params = huggingface.load(folder)
  extra = np.full((32, config.hidden_size), 9, np.float32)
  table = np.concatenate([params['embedding']['table'], extra])
  wide = {**params, 'embedding': {'table': table}}
  from transformers import PreTrainedTokenizerFast

  tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
  size = config.vocab_size
  huggingface.save(
    tmp_path / 'wide', config.replace(vocab_size=size + 32), wide, tokenizer
  )
  rows = []
  for name in (folder, tmp_path / 'wide'):
    options = (
      f'--config.model.checkpoint={folder}',
      f'--config.teacher.checkpoint={name}',
    )
    recorder = runs.record(
      tmp_path / name.name, *TINY, *options, config=f'{runs.VARIED}:distill'
    )
    rows.append([row['loss/total'] for row in learned(recorder)])
  assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_tag_goes_to_its_own_teacher(folder, tmp_path):
  """Named alone it is the default; beside a default it goes before it."""
  runs.record(
    tmp_path / 'a', *TINY, f'--config.teacher.checkpoint={folder}', config=ASKS
  )
  student = tmp_path / 'a' / 'model'
  by_tag = f'--config.teacher.by_tag.arithmetic={folder}'
  model = f'--config.model.checkpoint={student}'
  recorder = runs.record(tmp_path / 'b', *TINY, model, by_tag, config=ASKS)
  same = runs.record(
    tmp_path / 'c', *TINY, model, f'--config.teacher.checkpoint={folder}', config=ASKS
  )
  nothing = runs.record(
    tmp_path / 'd',
    *TINY,
    model,
    f'--config.teacher.checkpoint={folder}',
    f'--config.teacher.by_tag.arithmetic={student}',
    config=ASKS,
  )
  spread = [learned(x)[0]['advantage/std'] for x in (recorder, same, nothing)]
  assert spread[0] == spread[1] > 0.01 > 1e-4 > spread[2]


REFUSED = {
  '': 'algorithm on_policy_distill needs a teacher: set '
  '--config.teacher.checkpoint=FOLDER',
  '--config.teacher.checkpoint=/nowhere': 'teacher.checkpoint=/nowhere: no folder',
  '--config.teacher.by_tag.arithmetic=': 'by_tag.arithmetic=: must be a checkpoint',
  '--config.teacher.by_tag.arithmetik=a': "Did you mean 'arithmetic'?",
  '--config.teacher.checkpoint=data --config.teacher.by_tag.more=a': 'name either',
}


@pytest.mark.parametrize('options', REFUSED, ids=lambda text: text[17:50])
def test_what_cannot_be_is_told_in_one_line(tmp_path, capsys, options):
  error = refused(tmp_path, capsys, *TINY, *options.split(), config=ASKS)
  assert REFUSED[options] in error


def test_a_tag_without_a_teacher_is_refused_before_models_are_loaded(tmp_path, capsys):
  options = (*TINY, '--config.teacher.by_tag.arithmetic=/nowhere')
  config = f'{runs.ROOT}/tests/launch/two_tags.py:on_policy_distill'
  error = refused(tmp_path, capsys, *options, config=config)
  assert "tag 'more' has no teacher, only arithmetic" in error


def test_a_teacher_that_nobody_asks_is_refused(tmp_path, capsys):
  error = refused(tmp_path, capsys, '--config.teacher.checkpoint=/nowhere')
  assert 'algorithm grpo does not use a teacher' in error


@pytest.mark.slow
def test_rows_that_must_bring_their_teachers_words_are_named(tmp_path, capsys):
  options = (*TINY, '--config.teacher.checkpoint=data')
  status = runs.main(tmp_path, *options, config=ASKS)
  err = capsys.readouterr().err
  assert status and 'lack teacher_logprobs, but there is no teacher to ask' in err


@pytest.mark.parametrize('name', ['on_policy_distill', 'jsd', 'distill'])
def test_the_distill_config(name):
  config = command_line.load(command_line.parse([f'--config={DISTILL}:{name}'], {}))
  assert config.algorithm.name == name
  quick = command_line.load(
    command_line.parse([f'--config={runs.ROOT}/configs/quickstart.py'], {})
  )
  student, teacher = (
    resolve_settings(one).model.random_config for one in (config, quick)
  )
  assert student.hidden_size < teacher.hidden_size
  assert resolve_settings(config).teacher.folders == {}


@pytest.mark.slow
def test_a_file_may_bring_what_a_teacher_said(folder, tmp_path):
  """As a service or an earlier run wrote it down: training goes as with the teacher."""
  policy = model_loading.load_model(
    str(folder), value_head=False, dtype='float32', remat='none'
  )
  rows, chat = [], ChatTokenizer(policy.tokenizer)
  run = jax.jit(policy.model.policy_outputs, static_argnames='top_k')
  for i in range(8):
    reply = {'role': 'assistant', 'content': f'It is {2 * i}'}
    messages = [{'role': 'user', 'content': f'What is {i} + {i}?'}, reply]
    tokens, _ = chat.encode_with_mask(messages)
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    segments = (np.arange(64) < len(tokens)).astype(np.int32)[None]
    out = run(policy.params, padded, segments, top_k=8)
    real_tokens = slice(0, len(tokens))
    extras = {
      'teacher_topk_ids': np.asarray(out.topk_ids)[0, real_tokens].tolist(),
      'teacher_topk_logprobs': np.asarray(out.topk_logprobs)[0, real_tokens].tolist(),
    }
    rows.append({'messages': messages, 'extras': extras})
  weak = jax.tree.map(lambda x: x / 2, policy.params)
  huggingface.save(tmp_path / 'weak', policy.model.config, weak, policy.tokenizer)
  student = f'--config.model.checkpoint={tmp_path / "weak"}'
  losses = []
  for source, brought in (('data', True), (folder, False)):
    path = tmp_path / f'{brought}.jsonl'
    kept = [row if brought else {'messages': row['messages']} for row in rows]
    path.write_text('\n'.join(json.dumps(row) for row in kept))
    options = (f'--config.teacher.checkpoint={source}', f'--config.dataset.path={path}')
    run_dir = tmp_path / path.stem
    options += (student, '--config.algorithm.top_k=8')
    recorder = runs.record(run_dir, *TINY, *options, config=f'{runs.VARIED}:distill')
    losses.append([row['loss/policy'] for row in learned(recorder)])
  assert min(losses[0]) > 1e-3
  np.testing.assert_allclose(*losses, rtol=1e-3)


def test_weights_of_teachers():
  options = TeacherOptions(
    checkpoint='/a b(weight=3) + org/c-d(weight=1)',
    by_tag={'x': '/one+two'},
  )
  assert options.weighted == {
    '': (('/a b', 0.75), ('org/c-d', 0.25)),
    'x': (('/one+two', 1.0),),
  }
  for text in ('/a(weight=1) + /b', '/a(weight=0) + /b(weight=1)', '/a(weight=x)'):
    with pytest.raises(OptionError, match='weight'):
      TeacherOptions(checkpoint=text)


@pytest.mark.slow
def test_a_run_asks_several_teachers(folder, tmp_path):
  """The student itself among them takes its share of the gap away."""
  first = f'--config.teacher.checkpoint={folder}'
  runs.record(tmp_path / 'a', *TINY, first, config=ASKS)
  model = tmp_path / 'a' / 'model'
  start = f'--config.model.checkpoint={model}'
  spread = []
  for name, text in (
    ('b', f'{folder}'),
    ('c', f'{folder}(weight=1) + {model}(weight=3)'),
  ):
    teacher = f'--config.teacher.checkpoint={text}'
    recorder = runs.record(tmp_path / name, *TINY, start, teacher, config=ASKS)
    spread.append(learned(recorder)[0]['advantage/std'])
  assert spread[1] == pytest.approx(spread[0] / 4, rel=1e-3) and spread[0] > 0.01


TAUGHT_BY_ITSELF = {
  '--config.teacher.checkpoint=/nowhere': 'the policy is its own teacher',
  '--config.env.arithmetic.max_steps=3': 'the policy teaches itself single replies',
  '--config.algorithm.context=siblings()': "Did you mean 'sibling'?",
  '--config.algorithm.kl_loss=k3': 'the moving average and the reference in one place',
}


@pytest.mark.parametrize('options', TAUGHT_BY_ITSELF, ids=lambda text: text[9:40])
def test_what_a_policy_cannot_teach_itself_is_told(tmp_path, capsys, options):
  error = refused(tmp_path, capsys, *TINY, options, config=f'{runs.VARIED}:sdpo')
  assert TAUGHT_BY_ITSELF[options] in error


def test_a_context_of_ones_own_is_a_class_in_a_file(tmp_path):
  """That of docs/distillation.md, whose columns the rows bring."""
  page = (runs.ROOT / 'docs' / 'distillation.md').read_text()
  (code,) = re.findall(r'```python\n(.*?)```', page, re.DOTALL)
  (tmp_path / 'hint_context.py').write_text(code)
  context = f'--config.algorithm.context={tmp_path}/hint_context.py:Hint()'
  options = (*TINY, context, '--config.num_steps=1', runs.ONE_LAYER)
  recorder = runs.record(tmp_path / 'run', *options, config=f'{runs.VARIED}:sdft')
  (row,) = learned(recorder)
  assert row['policy/taught'] == 1 and row['optimizer/grad_norm'] > 0
