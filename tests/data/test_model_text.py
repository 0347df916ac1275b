"""A model's text as its own tokenizer and template have it, with published ones."""

import copy
import dataclasses
import functools
import json
import random
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.trajectory_writers.atif_writer import to_atif
from jaxrl.rollout.rewards.reward_pipeline import split_steps
from tests import real
from tests.data.tool_formats.test_round_trips import can_hold, make_call, tools_of

pytestmark = pytest.mark.real

QUESTION = {'role': 'user', 'content': 'What is 2+2?'}
REPLIES = [
  '4',
  ' It is **4**.\n\n#### 4',
  '你好 🙂 é',
  '\n\n4\n',
  'def f():\n  return 4',
]
NEXT = {'role': 'user', 'content': 'And  3+3?\n'}


@dataclasses.dataclass(frozen=True)
class Family:
  """A template with a tokenizer that has its tokens, and what is known of both.

  Attributes:
    tokenizer: the tokenizer.
    template: the template; '' for the tokenizer's own.
    stops: tokens that end a reply.
    closing: what the template writes after the last reply.
    tokens: tokens that the tokenizer lacks.
    eos: what generation_config.json of the published model names.
  """

  tokenizer: str
  template: str
  stops: str
  closing: str
  tokens: str = ''
  eos: str = ''


FAMILIES = {
  'qwen3': Family('qwen3', '', '<|im_end|>', '<|im_end|>', eos='<|im_end|>'),
  'qwen2_5': Family('qwen3', 'qwen2_5', '<|im_end|>', '<|im_end|>'),
  'qwen3_5_think': Family('qwen3', 'qwen3_5_think', '<|im_end|>', '<|im_end|>'),
  'qwen3_8': Family('qwen3', 'qwen3_8', '<|im_end|>', '<|im_end|>'),
  'gemma3': Family(
    'gemma3', '', '<eos> <end_of_turn>', '<end_of_turn>', eos='<eos> <end_of_turn>'
  ),
  'gemma': Family('gemma3', 'gemma', '<end_of_turn>', '<end_of_turn>'),
  'gemma4': Family(
    'gemma3',
    'gemma4',
    '<end_of_turn> <turn|> <|tool_response>',
    '<turn|>',
    '<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>',
    eos='<turn|> <|tool_response>',
  ),
  'llama3_1': Family('llama3_1', '', '<|eot_id|>', '<|eot_id|>'),
  'llama3': Family(
    'llama3_1',
    'llama3',
    '<|end_of_text|> <|eot_id|>',
    '<|eot_id|>',
    eos='<|end_of_text|> <|eot_id|>',
  ),
  'gptoss': Family(
    'gptoss',
    'gptoss',
    '<|endoftext|> <|return|> <|call|>',
    '<|return|>',
    eos='<|return|> <|endoftext|> <|call|>',
  ),
  'deepseek_v3': Family(
    'deepseek_v3', '', '<｜end▁of▁sentence｜>', '<｜end▁of▁sentence｜>'
  ),
  'r1': Family(
    'deepseek_v3',
    'deepseek_r1_distill',
    '<｜end▁of▁sentence｜>',
    '<｜end▁of▁sentence｜>',
  ),
  'phi3': Family(
    'mistral_v1', 'phi3', '</s> <|end|>', '<|end|>', '<|user|> <|assistant|> <|end|>'
  ),
  'glm4moe': Family(
    'qwen3',
    'glm4moe',
    '<|im_end|> <|user|> <|observation|>',
    '<|user|>',
    '[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>',
    '<|user|> <|observation|>',
  ),
  'smollm2': Family(real.SMOLLM2, '', '<|im_end|>', '<|im_end|>'),
}
# Whose templates write tool calls.
CALLING = {
  'qwen3': '',
  'qwen2_5': '',
  'llama3_1': 'llama3_1',
  'deepseek_v3': 'deepseekv3',
  'gptoss': '',
  'glm4moe': '',
  'qwen3_8': '',
  'gemma4': '',
}


@functools.cache
def make_tokenizer(name):
  """A family's tokenizer, with the tokens that the published one lacks."""
  family = FAMILIES[name]
  tokenizer = copy.deepcopy(real.load_tokenizer(family.tokenizer))
  if family.tokens:
    tokenizer.add_special_tokens(
      {'additional_special_tokens': family.tokens.split()},
      replace_extra_special_tokens=False,
    )
  ids = tokenizer.convert_tokens_to_ids(family.eos.split())
  tokenizer.generation_config = {'eos_token_id': ids} if ids else {}
  return tokenizer


def make(name, template='', **options):
  """The chat tokenizer of a family."""
  tokenizer, family = copy.copy(make_tokenizer(name)), FAMILIES[name]
  if template or family.template:
    tokenizer.chat_template = real.read_template(template or family.template)
  return ChatTokenizer(tokenizer, ChatOptions(**options))


@pytest.fixture(scope='module', params=FAMILIES)
def chat(request):
  chat = make(request.param)
  chat.family = request.param
  return chat


def whole(chat, messages, prompt=True):
  return chat.tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=prompt
  )


def text_of(chat, ids):
  return chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def encode(chat, text):
  return chat.tokenizer.encode(text, add_special_tokens=False)


def test_replies_stop_where_the_template_and_the_checkpoint_end_them(chat):
  family = FAMILIES[chat.family]
  stops = chat.tokenizer.convert_ids_to_tokens(chat.stop_token_ids)
  assert set(stops) == set(family.stops.split())
  assert chat.turn_end.closing == family.closing
  for stop in stops:
    assert stop in chat.describe()


def in_parts(messages):
  return [
    {**message, 'content': [{'type': 'text', 'text': message['content']}]}
    for message in messages
  ]


@pytest.mark.parametrize('form', [list, in_parts])
@pytest.mark.parametrize('template', ['llava_next', 'smolvlm', 'phi3', 'qwen2_5_vl'])
def test_a_content_is_brought_into_the_form_that_a_template_reads(template, form):
  """LLaVA-NeXT and SmolVLM read lists of parts, Phi-3 texts, Qwen2.5-VL both."""
  tokenizer = copy.deepcopy(real.load_tokenizer('mistral_v1'))
  ends = ['<end_of_utterance>', '<|im_end|>', '<|end|>']
  tokenizer.add_special_tokens({'additional_special_tokens': ends})
  source = real.read_template(template)
  messages = [{'role': 'system', 'content': 'Be brief.'}, QUESTION, NEXT]
  chat = ChatTokenizer(tokenizer, ChatOptions(chat_template=source))
  expected = tokenizer.apply_chat_template(
    messages if template == 'phi3' else in_parts(messages),
    chat_template=source,
    tokenize=False,
    add_generation_prompt=True,
  )
  ids = chat.encode_prompt(form(messages))
  assert ids == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize('reply', REPLIES)
def test_a_turn_is_what_the_template_writes(chat, reply):
  """Prompt, reply as the model writes it, and next prompt equal the whole text."""
  prompt = chat.encode_prompt([QUESTION])
  assert prompt == encode(chat, whole(chat, [QUESTION]))
  # Of what the template writes before a reply, a thought that is shown only once.
  message = {'role': 'assistant', 'content': reply}
  written = whole(chat, [QUESTION, message, NEXT])
  ids = [*encode_reply(chat, reply), chat.end_id]
  assert chat.decode(ids) == reply
  ids += chat.encode_next_prompt([NEXT], reply=ids)
  tail = text_of(chat, [chat.end_id, *ids][1:])
  found = written.rpartition(reply.strip())[2]
  stripped = found.removeprefix(chat.turn_end.message_end or chat.turn_end.closing)
  if reply.strip() == reply:
    assert tail.endswith(stripped)


def encode_reply(chat, reply):
  """Encodes a reply as a model would write it after its prompt."""
  prompt = whole(chat, [QUESTION])
  before, both = encode(chat, prompt), encode(chat, prompt + reply)
  if both[: len(before)] == before:
    return both[len(before) :]
  return chat.encode(reply)


@pytest.mark.parametrize('reply', REPLIES)
def test_a_supervised_row_is_what_the_template_writes(chat, reply):
  messages = [QUESTION, {'role': 'assistant', 'content': reply}]
  tokens, mask = chat.encode_with_mask(messages)
  expected = whole(chat, messages, prompt=False)
  end = expected.rindex(chat.turn_end.closing) if chat.turn_end.is_written else None
  if end is None:
    expected += chat.turn_end.closing
  else:
    expected = expected[: end + len(chat.turn_end.closing)]
  assert text_of(chat, tokens) == text_of(chat, encode(chat, expected))
  if not whole(chat, [QUESTION]).endswith('<think>\n') and reply.strip() == reply:
    # Elsewhere, a token would reach from the prompt into the reply.
    assert tokens.tolist() == encode(chat, expected)
  learned = text_of(chat, tokens[mask])
  assert reply.strip() in learned and learned.endswith(chat.turn_end.closing)
  assert QUESTION['content'] not in learned
  assert mask.tolist() == sorted(mask.tolist())


def test_a_supervised_row_of_several_turns_has_each_end_once(chat):
  second = {'role': 'assistant', 'content': '6'}
  messages = [QUESTION, {'role': 'assistant', 'content': '4'}, NEXT, second]
  tokens, mask = chat.encode_with_mask(messages)
  ends = [i for i, t in enumerate(tokens) if mask[i] and t == chat.end_id]
  assert len(ends) == 2
  for end in ends:
    assert mask[end] and (end + 1 == len(tokens) or not mask[end + 1])


# Whose templates write earlier replies otherwise, as docs/models.md says: rows, and
# episodes, whose models here write no thought.
OTHER_ROWS = ('qwen3', 'qwen3_5_think', 'gptoss')
OTHER_EPISODES = ('qwen3_5_think', 'qwen3_8', 'gptoss', 'r1', 'glm4moe')
PIECES = (
  '4|Tom| has|\n|\n\n|  | |pens|é|🙂|漢|#### 7|"|.|the answer|\t|x|user|```py|_| - '
)
made_texts = st.lists(st.sampled_from(PIECES.split('|')), min_size=1, max_size=6)
made_texts = made_texts.map(''.join).map(str.strip).filter(bool)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(texts=st.tuples(*[made_texts] * 4))
def test_ids_are_those_of_the_whole_conversation(chat, texts):
  roles = 'user', 'assistant', 'user', 'assistant'
  messages = [{'role': r, 'content': t} for r, t in zip(roles, texts, strict=True)]
  tokens, _ = chat.encode_with_mask(messages)
  text, end = whole(chat, messages, prompt=False), chat.turn_end.closing
  if chat.turn_end.is_written:
    text = text[: text.rindex(end) + len(end)]
  else:
    text += end
  if chat.family not in OTHER_ROWS:
    assert text_of(chat, tokens) == text_of(chat, encode(chat, text))
    if not whole(chat, [QUESTION]).endswith('<think>\n'):
      assert tokens.tolist() == encode(chat, text)
  ids = chat.encode_prompt(messages[:1])
  both = encode(chat, whole(chat, messages[:1]) + texts[1] + end)
  assert both[: len(ids)] == ids
  assert chat.decode(both[len(ids) :]) == texts[1]
  ids = [*both, *chat.encode_next_prompt([messages[2]], reply=both[len(ids) :])]
  is_same = ids == encode(chat, whole(chat, messages[:3]))
  assert is_same == (chat.family not in OTHER_EPISODES)


def test_a_reply_that_was_cut_short_gets_the_end_of_its_message(chat):
  cut = encode_reply(chat, 'It is')
  tail = text_of(chat, chat.encode_next_prompt([NEXT], reply=cut))
  assert tail.startswith(chat.turn_end.message_end)
  ended = text_of(chat, chat.encode_next_prompt([NEXT], reply=[*cut, chat.end_id]))
  assert tail.endswith(ended) and tail != ended


def test_special_tokens_within_a_reply_are_kept(chat):
  reply = '<think>2+2</think><answer>4</answer>'
  assert chat.decode([*encode_reply(chat, reply), chat.end_id]) == reply


def test_gemma_learns_to_end_its_turn_and_not_the_text():
  chat = make('gemma3')
  tokens, mask = chat.encode_with_mask(
    [QUESTION, {'role': 'assistant', 'content': '4'}]
  )
  assert text_of(chat, tokens[mask]) == '4<end_of_turn>'
  # A model that ends its reply by the other token is not given two ends.
  eos = chat.tokenizer.convert_tokens_to_ids('<eos>')
  for stop in (eos, chat.end_id):
    following = text_of(chat, chat.encode_next_prompt([NEXT], reply=[stop]))
    assert following.startswith('\n<start_of_turn>user\n')


def test_a_base_model_with_a_template_is_told_of():
  chat = ChatTokenizer(real.load_tokenizer(real.GEMMA3))
  assert '<end_of_turn>' in chat.turn_end.doubt and '<eos> (1)' in chat.turn_end.doubt
  assert not make('gemma3').turn_end.doubt


@pytest.mark.parametrize('template', ['qwen3', 'gemma4', 'llama3_1', 'phi3', 'gptoss'])
def test_a_template_of_another_model_is_refused(template):
  tokenizer = copy.deepcopy(real.load_tokenizer('mistral_v1'))
  tokenizer.chat_template = real.read_template(template)
  with pytest.raises(ValueError, match='is not a token of this tokenizer'):
    ChatTokenizer(tokenizer)
  assert ChatTokenizer(tokenizer, ChatOptions(stop_token_ids=(2,)))


def test_options_of_the_template_reach_it():
  thinking, plain = (
    make('qwen3'),
    make('qwen3', template_options={'enable_thinking': False}),
  )
  empty = '<think>\n\n</think>\n\n'
  assert text_of(plain, plain.encode_prompt([QUESTION])).endswith(empty)
  assert empty not in text_of(thinking, thinking.encode_prompt([QUESTION]))
  chat = make('gptoss', template_options={'reasoning_effort': 'low'})
  assert 'Reasoning: low' in text_of(chat, chat.encode_prompt([QUESTION]))


@pytest.mark.parametrize('key', ['reasoning_content', 'reasoning', 'thinking'])
@pytest.mark.parametrize('name', ['qwen3', 'qwen3_5_think', 'qwen3_8', 'gptoss'])
def test_a_thought_is_learned_once_under_each_name(name, key):
  chat = make(name)
  reply = {'role': 'assistant', 'content': 'It is 4.', key: 'Two and two.'}
  tokens, mask = chat.encode_with_mask([QUESTION, reply])
  learned = text_of(chat, tokens[mask])
  assert learned.count('Two and two.') == 1 and learned.count('It is 4.') == 1
  assert text_of(chat, tokens).count('<think>') <= 1


def test_a_plain_reply_stands_outside_an_opened_thought():
  chat = make('qwen3_5_think')
  assert text_of(chat, chat.encode_prompt([QUESTION])).endswith('<think>\n')
  reply = {'role': 'assistant', 'content': '4'}
  tokens, mask = chat.encode_with_mask([QUESTION, reply])
  assert text_of(chat, tokens[mask]) == '\n</think>\n\n4<|im_end|>'
  inline = {'role': 'assistant', 'content': '<think>\n2+2\n</think>\n\n4'}
  tokens, mask = chat.encode_with_mask([QUESTION, inline])
  assert text_of(chat, tokens[mask]) == '2+2\n</think>\n\n4<|im_end|>'


@pytest.mark.parametrize('name', ['gemma3', 'llama3_1', 'smollm2', 'r1', 'phi3'])
def test_a_thought_that_the_template_leaves_out_is_refused(name):
  reply = {'role': 'assistant', 'content': '4', 'reasoning_content': 'Two and two.'}
  with pytest.raises(ValueError, match='leaves out its thought'):
    make(name).encode_with_mask([QUESTION, reply])


def test_calls_that_the_template_leaves_out_are_refused():
  call = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  with pytest.raises(ValueError, match='leaves out its tool calls'):
    make('phi3').encode_with_mask([QUESTION, reply])


@pytest.mark.parametrize('arguments', ['', '{"a": 1}', {'a': 1}, {}])
@pytest.mark.parametrize('name', CALLING)
def test_calls_and_their_results_are_written_by_the_template(name, arguments):
  chat = make(name, CALLING[name])
  function = {'name': 'add', 'arguments': arguments}
  call = {'id': 'call_1', 'type': 'function', 'function': function}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  result = {'role': 'tool', 'name': 'add', 'tool_call_id': 'call_1', 'content': '3'}
  last = {'role': 'assistant', 'content': 'Three.'}
  tokens, mask = chat.encode_with_mask([QUESTION, reply, result, last])
  learned, text = text_of(chat, tokens[mask]), text_of(chat, tokens)
  assert 'add' in learned and 'Three.' in learned and '3' in text
  assert "{'a'" not in learned
  assert not re.search(r'(<\|im_end\|>|<\|eot_id\|>|<\|call\|>)\s*\1', text)


@pytest.mark.parametrize('name', CALLING)
def test_calls_are_read_as_the_template_writes_them(name):
  chat = make(name, CALLING[name])
  arguments = {'a': 1, 'text': 'two\n"words"'}
  call = {'id': 'call_1', 'type': 'function'}
  call['function'] = {'name': 'add', 'arguments': arguments}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  tokens, mask = chat.encode_with_mask([QUESTION, reply])
  calls = chat.parse_reply(chat.decode(tokens[mask])).calls
  assert calls == [{'name': 'add', 'arguments': arguments}]
  assert chat.tool_format.name in chat.describe()


@pytest.mark.slow
@pytest.mark.parametrize('name', CALLING)
def test_all_kinds_of_calls_are_read_as_the_template_writes_them(name):
  chat, rng = make(name, CALLING[name]), random.Random(3)
  num_held = 0
  for _ in range(300):
    call = make_call(rng)
    is_held = can_hold(chat.tool_format, call)
    if name == 'gemma4' and '▁' in repr(call):  # which its tokenizer reads as a space
      is_held = False
    if not is_held:
      continue
    num_held += 1
    described, writer = tools_of([call]), chat
    described[0]['function']['description'] = 'A tool.'
    if name != 'deepseek_v3':  # whose template shows no tools to the model
      writer = chat.with_tools(described)
    written = {'name': call['name'], 'arguments': call['arguments']}
    calls = [{'id': 'call_1', 'type': 'function', 'function': written}]
    reply = {'role': 'assistant', 'content': '', 'tool_calls': calls}
    tokens, mask = writer.encode_with_mask([QUESTION, reply])
    text = writer.decode(tokens[mask])
    assert writer.parse_reply(text, described).calls == [call], text
  assert num_held > 200


def read(chat, text):
  """The text of a reply, with its thought, and its calls."""
  parts = chat.parse_reply(text)
  return parts.text, parts.calls


def test_a_call_within_a_thought_is_none():
  chat = make('qwen3')
  call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
  text = f'<think>\nSay {call}?\n</think>\n\nNo.'
  assert read(chat, text) == (text, [])
  content, calls = read(chat, f'<think>\nHm.\n</think>\n\n{call}')
  assert content.startswith('<think>\nHm.') and len(calls) == 1


def test_a_thought_that_is_a_message_of_its_own_is_no_answer():
  text = (
    '<|channel|>analysis<|message|>Two and two.<|end|>'
    '<|start|>assistant<|channel|>final<|message|>4'
  )
  assert read(make('gptoss'), text) == ('4', [])


@pytest.mark.parametrize('name', CALLING)
def test_a_dump_has_the_thoughts_and_calls_of_each_family(name):
  chat = make(name, CALLING[name])
  call = {'id': 'call_1', 'type': 'function'}
  call['function'] = {'name': 'add', 'arguments': {'a': 1, 'b': 'two\n"words"'}}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  if name in ('qwen3', 'qwen3_8', 'gptoss', 'glm4moe', 'gemma4'):
    reply['reasoning_content'] = 'I add.'
  tokens, mask = chat.encode_with_mask([QUESTION, reply])
  said = {'role': 'assistant', 'content': chat.decode(tokens[mask])}
  content = {'messages': [QUESTION, said], 'extras': chat.format_names}
  step = to_atif({'save_content': json.dumps(content)})['steps'][1]
  (made,) = step['tool_calls']
  assert (made['function_name'], made['arguments']) == tuple(call['function'].values())
  assert step.get('reasoning_content') == reply.get('reasoning_content')
  assert step['message'] == ''


@pytest.mark.parametrize(
  ('name', 'end'),
  [('gptoss', '<|call|>'), ('gemma4', '<|tool_response>'), ('llama3_1', '<|eot_id|>')]
  + [(name, '<|im_end|>') for name in ('qwen3', 'qwen2_5', 'qwen3_8')],
)
def test_calls_end_as_the_template_ends_them_without_a_generation_config(name, end):
  tokenizer = copy.copy(make_tokenizer(name))
  if template := CALLING.get(name) or FAMILIES[name].template:
    tokenizer.chat_template = real.read_template(template)
  tokenizer.generation_config = {}
  chat = ChatTokenizer(tokenizer)
  stops = {tokenizer.convert_tokens_to_ids(end), chat.end_id, tokenizer.eos_token_id}
  assert set(chat.stop_token_ids) == stops
  call = {'id': 'call_1', 'type': 'function'}
  call['function'] = {'name': 'add', 'arguments': {'a': 1}}
  reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  tokens, mask = chat.encode_with_mask([QUESTION, reply])
  learned = tokens[mask]
  assert text_of(chat, learned[-1:]) == end
  assert not chat.ends_turn(learned[-2:-1])
  result = {'role': 'tool', 'name': 'add', 'tool_call_id': 'call_1', 'content': '317'}
  assert '317' in text_of(chat, chat.encode_next_prompt([result], reply=learned))


def test_a_template_that_writes_calls_only_without_a_content():
  """DeepSeek V3's own: its content must be None, and its arguments text."""
  chat = ChatTokenizer(real.load_tokenizer('deepseek_v3'))
  assert chat.tool_format is not None and chat.tool_format.name == 'DeepSeek V3'
  made = [{'name': 'add', 'arguments': {'a': i, 'b': 'é "x"'}} for i in range(2)]
  for number in (1, 2):
    calls = [
      {'id': f'c{i}', 'type': 'function', 'function': made[i]} for i in range(number)
    ]
    reply = {'role': 'assistant', 'content': '', 'tool_calls': calls}
    tokens, mask = chat.encode_with_mask([QUESTION, reply])
    assert read(chat, chat.decode(tokens[mask])) == ('', made[:number])
    result = {'role': 'tool', 'content': '7', 'tool_call_id': 'c0'}
    assert '"b": "é' in chat.decode(chat.encode_prompt([QUESTION, reply, result]))
  with pytest.raises(ValueError, match='leaves out its tool calls'):
    chat.encode_with_mask([QUESTION, {**reply, 'content': 'I add.'}])


def test_the_last_token_of_a_step(chat):
  """The tokens up to it hold the whole step, and those before it do not."""
  step_end = '\n\n'
  reply = 'First, 3 + 4 = 7.\n\nThen 7 × 6 = 42 🙂.\n\n\n\nSo it is **42**.\n\n'
  tokens = [*chat.encode(reply), chat.end_id]
  text, steps = split_steps(chat, tokens, step_end)
  assert text.strip() == reply.strip() and steps[-1][1] == len(tokens) - 1
  assert len(steps) >= 3
  for end, token in steps[:-1]:
    assert text[:end].endswith(step_end)
    assert len(chat.decode(tokens[: token + 1])) >= end
    assert len(chat.decode(tokens[:token])) < end
