"""Pieces that are encoded one by one are the ids of the whole conversation."""

import copy
import functools

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from jaxrl.data.chat_tokenizer import ChatTokenizer
from tests.data.made_tokenizers import END, FORGETFUL, KINDS, make_tokenizer

# Each joins a message's head and its text; the assistant's also ends.
TEMPLATES = {
  'ChatML': (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  'Llama 3': (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content']"
    " + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
  ),
  'Llama 2': (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + '<|im_end|>' }}{% else %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
  ),
  'Mistral': (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ m['content'] + '<|im_end|>' }}{% else %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
  ),
  'Vicuna': (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + m['content'] + '<|im_end|>\n' }}{% else %}"
    "{{ 'User: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
  ),
  'bare': (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% else %}"
    "{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
  ),
}
# Which put a space before a text after a special token, as docs/models.md says.
SPACED = ('byte level, prefix space', 'metaspace always', 'unigram always', 'prepend')
PIECES = '4|Tom| has|\n|\n\n|  | |pens|é|🙂|漢|#### 7|"|.|the answer|\t|x|user|[INST]|_'
texts = st.lists(st.sampled_from(PIECES.split('|')), min_size=1, max_size=6)
turns = st.tuples(texts.map(''.join), texts.map(''.join))
conversations = st.lists(turns, min_size=1, max_size=3)


@functools.cache
def make_chat(kind, flags, template):
  tokenizer = copy.copy(make_tokenizer(kind, flags))
  tokenizer.chat_template = TEMPLATES[template]
  return ChatTokenizer(tokenizer)


class Pair:
  """A chat tokenizer, and what the template and the tokenizer say by themselves."""

  def __init__(self, kind, flags, template):
    self.kind, self.flags, self.template = kind, flags, template
    self.chat = make_chat(kind, flags, template)
    self.tokenizer = self.chat.tokenizer

  def render(self, messages, prompt):
    return self.tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=prompt
    )

  def encode(self, text):
    return self.tokenizer.encode(text, add_special_tokens=False)

  def cuts_a_token(self, text, at):
    """Whether a token of the whole text begins before an index and ends after it."""
    encoding = self.tokenizer(
      text, add_special_tokens=False, return_offsets_mapping=True
    )
    return any(start < at < end for start, end in encoding['offset_mapping'])

  def check_same(self, ids, text, cuts):
    """Checks ids against those of the whole text, or its letters where it is cut."""
    whole = self.encode(text)
    if any(self.cuts_a_token(text, at) for at in cuts):
      if self.kind not in FORGETFUL:
        assert self.tokenizer.decode(ids) == self.tokenizer.decode(whole)
    else:
      assert list(ids) == whole


def messages_of(conversation):
  roles = 'user', 'assistant'
  return [
    {'role': role, 'content': text}
    for turn in conversation
    for role, text in zip(roles, turn, strict=True)
  ]


def check_rows(pair, conversation):
  """A supervised row is what the template writes, up to the last reply's end."""
  messages = messages_of(conversation)
  text = pair.render(messages, prompt=False)
  text = text[: text.rindex(END) + len(END)]
  cuts = [len(pair.render(messages[:i], True)) for i in range(1, len(messages), 2)]
  ids, mask = pair.chat.encode_with_mask(messages)
  pair.check_same(ids, text, cuts)
  ends = [i for i, token in enumerate(ids) if token == pair.chat.end_id and mask[i]]
  assert len(ends) == len(conversation)


def check_episode(pair, conversation):
  """Prompts and replies of an episode are what the template writes for all of it."""
  messages = messages_of(conversation)
  ids = pair.chat.encode_prompt(messages[:1])
  assert ids == pair.encode(pair.render(messages[:1], True))
  for i in range(1, len(messages) - 1, 2):
    before, after = (
      pair.render(messages[:i], True),
      pair.render(messages[: i + 1], False),
    )
    written = pair.encode(after[: after.rindex(END) + len(END)])
    assume(written[: len(ids)] == ids)  # else no model writes the reply's ids
    reply = written[len(ids) :]
    if pair.kind not in FORGETFUL and not pair.flags:
      said = pair.chat.decode(reply)
      expected = after[len(before) : after.rindex(END)]
      is_spaced = pair.kind.startswith(SPACED) and pair.template == 'bare'
      assert said == expected or (is_spaced and said == f' {expected}')
    following = pair.chat.encode_next_prompt([messages[i + 1]], reply=reply)
    ids = [*ids, *reply, *following]
    assert ids == pair.encode(pair.render(messages[: i + 2], True))
    if len(reply) > 1 and not pair.flags:  # a reply that was cut short gets its end
      cut = pair.chat.encode_next_prompt([messages[i + 1]], reply=reply[:-1])
      assert cut == [pair.chat.end_id, *following]


def check(kind, count):
  @settings(max_examples=count, deadline=None, derandomize=True, database=None)
  @given(st.sampled_from(['', 'rstrip', 'normalized']), st.data())
  def run(flags, data):
    if kind == 'prepend' and flags == 'normalized':
      flags = ''  # is refused
    pair = Pair(kind, flags, data.draw(st.sampled_from(sorted(TEMPLATES))))
    conversation = data.draw(conversations)
    check_rows(pair, conversation)
    check_episode(pair, conversation)

  run()


@pytest.mark.parametrize('kind', KINDS)
def test_ids_are_those_of_the_whole_conversation(kind):
  check(kind, 25)


@pytest.mark.slow
def test_ids_are_those_of_many_conversations():
  for kind in KINDS:
    check(kind, 80)


@pytest.mark.parametrize('kind', ['metaspace always', 'prepend'])
@pytest.mark.parametrize('template', ['ChatML', 'Llama 3'])
def test_a_reply_whose_start_would_share_a_token_gets_no_space(kind, template):
  """Where line ends or `\\n\\n####` are one token, the reply is encoded by itself."""
  pair = Pair(kind, '', template)
  for reply in ('#### 7', '\n\n4', '\n#### 7'):
    messages = messages_of([('Tom', reply)])
    ids, mask = pair.chat.encode_with_mask(messages)
    assert pair.chat.decode(ids[mask]) == reply


def test_a_tokenizer_that_reads_its_own_end_as_letters_is_refused():
  with pytest.raises(
    ValueError, match=r'reads <\|im_end\|> after a word as plain letters'
  ):
    make_chat('prepend', 'normalized', 'ChatML')
