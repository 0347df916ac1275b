"""Chat as tokens: appended histories equal the template's own text."""

import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import CHAT_TEMPLATE, train_tokenizer

QUESTION = {'role': 'user', 'content': 'How many pens has Tom?'}
REPLY = {'role': 'assistant', 'content': '3+4=7\n#### 7'}
MORE = [{'role': 'user', 'content': 'And Ann?'}]
TEXTS = [f'user assistant Tom has {i} pens\n#### {i}' for i in range(50)]

# As Qwen3's: earlier replies lose their thoughts, the last shows an empty one.
THINKING = (
  "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\\n' }}"
  "{%- if m['role'] == 'assistant' and loop.last -%}"
  "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
  "{{ m['content'].split('</think>')[-1] + '<|im_end|>\\n' }}{%- endfor -%}"
  "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
  '{%- if enable_thinking is defined and not enable_thinking -%}'
  "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"
)
# As Llama 3's: trimmed contents, headers, and no line break after a turn.
HEADERS = (
  "{%- for m in messages -%}{{ '[' + m['role'] + ']\\n\\n' + m['content'] | trim"
  " + '<|im_end|>' }}{%- endfor -%}"
  "{%- if add_generation_prompt -%}{{ '[assistant]\\n\\n' }}{%- endif -%}"
)


def make_chat(template=CHAT_TEMPLATE, **options):
  tokenizer = train_tokenizer(TEXTS, 320)
  tokenizer.chat_template = template
  return ChatTokenizer(tokenizer, template_options=options)


def shown(chat, ids):
  return chat.tokenizer.decode(ids)


def test_first_prompt_is_the_templates():
  chat = make_chat()
  assert shown(chat, chat.encode_prompt([QUESTION])) == (
    '<|im_start|>user\nHow many pens has Tom?<|im_end|>\n<|im_start|>assistant\n'
  )


@pytest.mark.parametrize('template', [CHAT_TEMPLATE, HEADERS])
def test_appended_history_equals_the_whole_template(template):
  chat = make_chat(template)
  ids = chat.encode_prompt([QUESTION])
  ids += [*chat.encode(REPLY['content']), chat.end_id]
  ids += chat.encode_next_prompt(MORE, reply=[chat.end_id])
  whole = chat.tokenizer.apply_chat_template(
    [QUESTION, REPLY, *MORE], tokenize=False, add_generation_prompt=True
  )
  assert shown(chat, ids) == whole


def test_a_template_that_rewrites_history_does_not_touch_what_was_written():
  chat = make_chat(THINKING, enable_thinking=False)
  following = shown(chat, chat.encode_next_prompt(MORE, reply=[chat.end_id]))
  assert following == (
    '\n<|im_start|>user\nAnd Ann?<|im_end|>\n<|im_start|>assistant\n'
    '<think>\n\n</think>\n\n'
  )


@pytest.mark.parametrize('template', [CHAT_TEMPLATE, HEADERS, THINKING])
def test_a_reply_cut_short_gets_its_end(template):
  chat = make_chat(template)
  ended = chat.encode_next_prompt(MORE, reply=[chat.end_id])
  assert chat.encode_next_prompt(MORE, reply=[]) == [chat.end_id, *ended]


@pytest.mark.parametrize('template', [CHAT_TEMPLATE, THINKING, HEADERS])
def test_what_is_shown_may_have_the_replys_own_mark_in_it(template):
  chat = make_chat(template)
  marked = [{'role': 'user', 'content': '\x02reply\x03 and more'}]
  plain = [{'role': 'user', 'content': ' and more'}]
  with_mark, without = (
    chat.encode_next_prompt(m, reply=[chat.end_id]) for m in (marked, plain)
  )
  assert 'user' in shown(chat, with_mark) and 'user' in shown(chat, without)
  assert len(with_mark) > len(without)


def test_only_new_messages_are_tokenised():
  chat = make_chat()
  long = [{'role': 'user', 'content': 'x' * 500}]
  assert len(chat.encode_next_prompt(MORE, reply=[chat.end_id])) < 40
  assert len(chat.encode_next_prompt(long, reply=[chat.end_id])) > 100


def test_decode_leaves_special_tokens_out():
  chat = make_chat()
  ids = [*chat.encode('#### 7'), chat.end_id]
  assert chat.decode(ids) == chat.decode(np.array(ids, np.int32)) == '#### 7'


def test_conversation_is_what_a_rollout_would_have_made():
  chat = make_chat()
  messages = [QUESTION, REPLY, *MORE, {'role': 'assistant', 'content': '#### 2'}]
  tokens, mask = chat.encode_with_mask(messages)
  by_hand = chat.encode_prompt([QUESTION])
  by_hand += [*chat.encode(REPLY['content']), chat.end_id]
  by_hand += chat.encode_next_prompt(MORE, reply=[chat.end_id])
  by_hand += [*chat.encode('#### 2'), chat.end_id]
  assert tokens.tolist() == by_hand
  assert shown(chat, tokens[mask]) == '3+4=7\n#### 7<|im_end|>#### 2<|im_end|>'
  assert (tokens.dtype, mask.dtype) == (np.int32, bool)


def test_a_conversation_that_ends_with_the_user_has_no_more_to_learn():
  chat = make_chat()
  tokens, mask = chat.encode_with_mask([QUESTION, REPLY, *MORE])
  assert mask[-1]
  assert np.array_equal(tokens, chat.encode_with_mask([QUESTION, REPLY])[0])


def test_the_prompt_of_a_reply_is_rendered_once_for_each_set_of_options(monkeypatch):
  chat = make_chat(THINKING)
  plain = chat.with_options(enable_thinking=False)
  assert chat.generation_prompt == '<|im_start|>assistant\n'
  thought = '<think>\n\n</think>\n\n'
  assert plain.generation_prompt == chat.generation_prompt + thought
  monkeypatch.setattr(chat.tokenizer, 'apply_chat_template', None)
  assert chat.generation_prompt and plain.generation_prompt


def test_errors():
  with pytest.raises(ValueError, match='follow each other'):
    make_chat().encode_with_mask([QUESTION, REPLY, REPLY])
  with pytest.raises(ValueError, match='chat template'):
    make_chat(None)


@pytest.mark.parametrize(
  'unit',
  ['Tom has 3 pens ', 'x', ' ', '7', '٤', '🙂', '\n\n', 'user assistant', '<|im_end|>'],
)
def test_a_text_far_beyond_what_is_needed_is_not_encoded_to_its_end(unit, monkeypatch):
  chat = make_chat()
  text, encoded = unit * (20_000 // len(unit)), []
  encode = chat.tokenizer.encode
  whole = encode(text, add_special_tokens=False)
  monkeypatch.setattr(
    chat.tokenizer, 'encode', lambda t, **kw: encoded.append(len(t)) or encode(t, **kw)
  )
  for needed in (1, 100, 500):
    assert chat.encode(text, max_tokens=needed)[:needed] == whole[:needed]
    tokens_per_char = len(whole) / len(text)
    assert sum(encoded) <= max(8, 6 / tokens_per_char) * (needed + 64)
    encoded.clear()
  assert chat.encode(text, max_tokens=len(whole)) == whole
  assert chat.encode(text[:1000], max_tokens=10**6) == encode(
    text[:1000], add_special_tokens=False
  )


def test_prompts_are_cut_at_the_same_ids():
  chat = make_chat()
  long = [{'role': 'user', 'content': 'Tom has 7 pens ' * 1000}]
  assert chat.encode_prompt(long, max_tokens=50) == chat.encode_prompt(long)[:50]
  whole = chat.encode_next_prompt(long, reply=[])
  assert chat.encode_next_prompt(long, reply=[], max_tokens=50) == whole[:50]
