"""Folders that are written keep how a model's text is read; published tokenizers."""

import copy
import datetime
import json

import jax
import pytest

from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.model_loading import check_table_size, create_model, random_config
from jaxrl.models.tokenizer_files import read_generation_config, save_tokenizer
from jaxrl.options import ConfigError
from tests import real
from tests.marks import slow_except

MESSAGES = [{'role': 'user', 'content': 'How  are you?\n'}]
TEXTS = ['Hello  world', 'a<think>b</think> é 🙂', 'def f():\n\treturn 1', '12 345']


@pytest.mark.real
@pytest.mark.parametrize(
  'name',
  slow_except(('deepseek_v3',), ['qwen3', 'deepseek_v3', 'gemma3', 'llama3_1']),
)
def test_transformers_reads_what_was_written(name, tmp_path, capfd):
  from transformers import AutoTokenizer

  tokenizer = load_tokenizer(real.find(f'tokenizers/{name}'))
  chat = ChatTokenizer(tokenizer)
  tokenizer.generation_config = {'eos_token_id': list(chat.stop_token_ids), 'top_k': 7}
  said = save_tokenizer(tmp_path, tokenizer)
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'qwen3', **said}))
  theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
  for text in TEXTS:
    ids = theirs.encode(text, add_special_tokens=False)
    assert ids == ours.encode(text, add_special_tokens=False) == chat.encode(text)
  assert theirs.chat_template == ours.chat_template == tokenizer.chat_template
  prompt = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)
  assert ChatTokenizer(ours).encode_prompt(MESSAGES) == list(prompt['input_ids'])
  assert ChatTokenizer(ours).stop_token_ids == chat.stop_token_ids
  assert ours.generation_config['top_k'] == 7
  assert 'incorrect regex' not in capfd.readouterr().err


@pytest.mark.real
@pytest.mark.parametrize(
  'name', slow_except(('deepseek_v3', 'mistral_v1'), real.TOKENIZERS)
)
def test_a_tokenizer_is_read_as_its_file_has_it(name):
  import tokenizers

  file = real.find(f'tokenizers/{name}') / 'tokenizer.json'
  plain = tokenizers.Tokenizer.from_file(str(file))
  tokenizer = real.load_tokenizer(name)
  for text in TEXTS:
    ids = plain.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_config_json_names_the_tokens_where_there_is_no_other_file(tmp_path):
  config = {'eos_token_id': [1, 106], 'vocab_size': 5}
  config['text_config'] = {'bos_token_id': 2}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  told = {'eos_token_id': [1, 106], 'bos_token_id': 2}
  assert read_generation_config(tmp_path) == told
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": 7, "top_p": 1}')
  assert read_generation_config(tmp_path) == {'eos_token_id': 7, 'top_p': 1}
  (tmp_path / 'generation_config.json').write_text('[]')
  with pytest.raises(ValueError, match='must hold an object'):
    read_generation_config(tmp_path)


def test_a_tokenizer_larger_than_the_table_is_refused():
  tokenizer = train_tokenizer(['abc'], 300)
  size = len(tokenizer)
  check_table_size(tokenizer, size)
  with pytest.raises(ValueError, match=f'{size} tokens.*rows for {size - 1}'):
    check_table_size(tokenizer, size - 1)
  tokenizer.add_tokens(['<new>'])
  with pytest.raises(ValueError, match='none for <new>'):
    check_table_size(tokenizer, size)


@pytest.mark.real
def test_tokens_for_images_may_lie_beyond_the_table():
  """As in Gemma 3's text models, whose table has 262,144 rows."""
  check_table_size(real.load_tokenizer('gemma3'), 262_144)
  with pytest.raises(ValueError, match='rows for 262,000'):
    check_table_size(real.load_tokenizer('gemma3'), 262_000)


def test_options_of_a_template_are_ones_that_it_reads():
  tokenizer = train_tokenizer(['abc'], 300)
  for name in ('enable_thinkin', 'tokenize', 'a b'):
    with pytest.raises(ValueError, match=name):
      ChatTokenizer(tokenizer, ChatOptions(template_options={name: True}))
  source = tokenizer.chat_template + '{% if loud %}!{% endif %}'
  options = ChatOptions(template_options={'loud': True}, chat_template=source)
  prompt = ChatTokenizer(tokenizer, options).encode_prompt(MESSAGES)
  assert tokenizer.decode(prompt).endswith('assistant\n!')
  for text in ('{# loud #}', '{{ messages[0].loud }}', 'loud', '{% set loud = 1 %}'):
    options = ChatOptions({'loud': True}, tokenizer.chat_template + text)
    with pytest.raises(ValueError, match="no option 'loud'"):
      ChatTokenizer(tokenizer, options)


@pytest.mark.real
@pytest.mark.parametrize(
  ('tokenizer', 'template', 'text'),
  [
    ('gptoss', 'gptoss', 'Current date: 2026-01-31\n'),
    ('llama3_1', 'llama3_2', 'Today Date: 31 Jan 2026\n'),
    ('qwen3', 'qwen3', ''),
  ],
)
def test_templates_write_the_day_of_the_run(tokenizer, template, text):
  day = datetime.date(2026, 1, 31)
  options = ChatOptions(chat_template=real.read_template(template), date=day)
  chat = ChatTokenizer(real.load_tokenizer(tokenizer), options)
  assert text in chat.decode(chat.encode_prompt(MESSAGES))
  assert ('today is 2026-01-31' in chat.describe()) == bool(text)


@pytest.mark.real
def test_options_of_published_templates_are_told():
  tokenizer = copy.copy(real.load_tokenizer('qwen3'))
  options = ChatOptions(template_options={'enable_thinkin': True})
  with pytest.raises(ValueError, match=r"Did you mean 'enable_thinking'.*It has: "):
    ChatTokenizer(tokenizer, options)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'template_options': {'loud': True}},
      'model.template_options.loud: .*It has none',
    ),
    ({'stop_token_ids': (99_999,)}, 'model.stop_token_ids: 99999 is not a token'),
    ({'stop_token_ids': (-1,)}, 'model.stop_token_ids: -1 is not a token'),
    ({'chat_template': '{% for m in messages %'}, 'model.chat_template: .*refuses'),
    ({'chat_template': 'hello'}, 'model.chat_template: .*does not render'),
  ],
)
def test_the_option_at_fault_is_named(tmp_path, options, message):
  config = random_config(num_layers=1, hidden_size=16)
  key, chat = jax.random.key(0), ChatOptions(**options)
  with pytest.raises(ConfigError, match=f'^{message}.* \\(in .*model'):
    create_model(
      *(tmp_path / 'model', config, ['abc'], key),
      **{'value_head': False, 'dtype': 'float32', 'remat': 'full', 'chat': chat},
    )
