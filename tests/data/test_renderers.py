"""The hand-written renderers of the package `renderers` write and read what we do."""

import base64
import copy
import json

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl.data.chat_tokenizer import ChatTokenizer
from tests import real
from tests.marks import slow_except

pytestmark = pytest.mark.real
GEMMA4 = (
  '<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> '
  '<|channel> <channel|> <|think|> <|tool> <tool|> <|image> <image|> <|image|> '
  '<|audio|> <|video|> <|"|>'
)
GLM = (
  '<|user|> <|assistant|> <|observation|> <|system|> [gMASK] <sop> '
  '<arg_key> </arg_key> <arg_value> </arg_value> /nothink'
)
# The renderer, our tokenizer, its template ('' for its own), tokens that it lacks.
FAMILIES = {
  'qwen3': ('qwen3', 'qwen3', '', ''),
  'qwen3_vl': ('qwen3-vl', 'qwen3', 'qwen3_vl', ''),
  'qwen3_5_think': ('qwen3.5', 'qwen3', 'qwen3_5_think', ''),
  'qwen3_6': ('qwen3.6', 'qwen3', 'qwen3_6', ''),
  'qwen3_8': ('qwen3.8', 'qwen3', 'qwen3_8', ''),
  'gemma4_v5': ('gemma4', 'gemma3', 'gemma4_v5', GEMMA4),
  'deepseek_v3': ('deepseek-v3', 'deepseek_v3', '', ''),
  'deepseek_r1': ('deepseek-r1', 'deepseek_v3', 'deepseek_r1_distill', ''),
  'glm4_5': ('glm-4.5', 'qwen3', 'glm4moe', GLM),
  'llama3_1': ('llama-3', 'llama3_1', 'llama3_1', '<|eom_id|>'),
  'nemotron3_nano': ('nemotron-3', 'qwen3', 'nemotron_3_nano', ''),
  'nemotron3_super': ('nemotron-3', 'qwen3', 'nemotron_3_super', ''),
}
# Those of the models, where our tokenizer has another.
EOS = {'gemma4_v5': '<eos>', 'glm4_5': '<|endoftext|>'}
ADD = {
  'type': 'function',
  'function': {
    'name': 'add',
    'description': 'Adds two numbers.',
    'parameters': {
      'type': 'object',
      'properties': {'a': {'type': 'integer'}, 'b': {'type': 'string'}},
      'required': ['a'],
    },
  },
}
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
ASK = {'role': 'user', 'content': 'What is 2+2?'}
ANSWER = {'role': 'assistant', 'content': 'It is 4.'}


def calling(*arguments, **more):
  calls = [
    {'id': f'call_{i}', 'type': 'function', 'function': {'name': 'add', 'arguments': a}}
    for i, a in enumerate(arguments)
  ]
  return {'role': 'assistant', 'content': '', 'tool_calls': calls, **more}


RESULT = {'role': 'tool', 'name': 'add', 'tool_call_id': 'call_0', 'content': '4'}
PROMPTS = {
  'user': [ASK],
  'system': [SYSTEM, ASK],
  'turns': [SYSTEM, ASK, ANSWER, {'role': 'user', 'content': 'And 3+3?\n'}],
  'result': [ASK, calling({'a': 1, 'b': 'two "words"'}), RESULT],
}
REPLIES = {
  'answer': ANSWER,
  'thought': ANSWER | {'reasoning_content': 'Two and two.'},
  'call': calling({'a': 1, 'b': 'two "words"'}),
  'calls': calling({'a': 1, 'b': 'x'}, {'a': -2, 'b': 'é\n<b>'}),
  'thought and call': calling({'a': 1, 'b': ''}, reasoning_content='I add.'),
}
SHOWS_NO_TOOLS = {'deepseek_v3', 'deepseek_r1'}
HAS_NO_THOUGHTS = {'deepseek_v3', 'deepseek_r1', 'llama3_1', 'qwen3_vl'}
HAS_ONE_CALL = {'llama3_1'}
# The template closes the calls only after a second one; the renderer does always.
OTHER_PROMPTS = {('deepseek_v3', 'result'), ('deepseek_r1', 'result')}


def load(name):
  real.import_packages()
  renderers = pytest.importorskip('renderers')
  kind, source, template, tokens = FAMILIES[name]
  tokenizer = copy.deepcopy(real.load_tokenizer(source))
  if tokens:
    tokenizer.add_special_tokens(
      {'additional_special_tokens': tokens.split()},
      replace_extra_special_tokens=False,
    )
  tokenizer.eos_token = EOS.get(name, tokenizer.eos_token)
  if template:
    tokenizer.chat_template = real.read_template(template)
  renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(kind))
  return ChatTokenizer(tokenizer), renderer


def forms(name, chat):
  """Without tools, and with one if the template shows them."""
  yield chat, None
  if name not in SHOWS_NO_TOOLS:
    yield chat.with_tools([ADD]), [ADD]


every_family = pytest.mark.parametrize(
  'name', slow_except(('qwen3', 'glm4_5'), FAMILIES)
)


@every_family
def test_prompts_have_the_same_ids_and_replies_the_same_ends(name):
  chat, renderer = load(name)
  ours, theirs = {*chat.turn_end.stop_ids}, {*renderer.get_stop_token_ids()}
  assert ours <= theirs
  unwritten = chat.tokenizer.convert_ids_to_tokens(sorted(theirs - ours))
  assert {*unwritten} <= {'<|endoftext|>', '<|end_of_text|>', '<|eom_id|>', '<eos>'}
  for writer, tools in forms(name, chat):
    for what, messages in PROMPTS.items():
      if (name, what) in OTHER_PROMPTS:
        continue
      ours = list(writer.encode_prompt(messages))
      theirs = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
      assert ours == theirs, (what, chat.decode(ours), chat.decode(theirs))


@every_family
def test_replies_are_read_alike(name):
  chat, renderer = load(name)
  for writer, tools in forms(name, chat):
    for what, reply in REPLIES.items():
      if 'thought' in what and name in HAS_NO_THOUGHTS:
        continue
      if what == 'calls' and name in HAS_ONE_CALL:
        continue
      tokens, mask = writer.encode_with_mask([ASK, reply])
      start = int(np.flatnonzero(~mask)[-1]) + 1
      prompt, ids = tokens[:start].tolist(), tokens[start:].tolist()
      found = renderer.parse_response(ids, tools=tools, prompt_ids=prompt)
      calls = [call['function'] for call in reply.get('tool_calls', ())]
      parts = writer.parse_reply(writer.decode(ids), tools or ())
      content, our_calls = parts.text, parts.calls
      thoughts = chat.thought_format
      answer = content.rpartition(thoughts.closing)[2] if thoughts else content
      assert (answer.strip(), our_calls) == (reply['content'], calls), what
      assert found.content.strip() == reply['content'], what
      thought = (found.reasoning_content or '').strip()
      assert thought == reply.get('reasoning_content', ''), what
      # Without a schema, the package reads numbers of XML arguments as texts.
      if tools:
        read = [{'name': c.name, 'arguments': c.arguments} for c in found.tool_calls]
        assert read == calls, what


@pytest.mark.slow  # 12 s, most of them for the vocabulary
def test_replies_of_gpt_oss_are_read_as_openai_does(tmp_path, monkeypatch):
  """Its own package checks the vocabulary, which we write from the tokenizer's."""
  real.import_packages()
  openai_harmony = pytest.importorskip('openai_harmony')
  tokenizer = copy.deepcopy(real.load_tokenizer('gptoss'))
  tokenizer.chat_template = real.read_template('gptoss')
  vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())['model']['vocab']
  letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
  lines = [
    base64.b64encode(bytes(letters[x] for x in word)) + b' %d\n' % rank
    for word, rank in sorted(vocabulary.items(), key=lambda item: item[1])
  ]
  (tmp_path / 'o200k_base.tiktoken').write_bytes(b''.join(lines))
  monkeypatch.setenv('TIKTOKEN_ENCODINGS_BASE', str(tmp_path))
  role = openai_harmony.Role.ASSISTANT
  harmony = openai_harmony.load_harmony_encoding('HarmonyGptOss')
  chat = ChatTokenizer(tokenizer).with_tools([ADD])
  assert {*harmony.stop_tokens_for_assistant_actions()} == {*chat.turn_end.stop_ids}
  for what, reply in REPLIES.items():
    if what == 'calls':  # the template writes one
      continue
    tokens, mask = chat.encode_with_mask([ASK, reply])
    ids = tokens[int(np.flatnonzero(~mask)[-1]) + 1 :].tolist()
    said: dict[str, str] = {}
    for message in harmony.parse_messages_from_completion_tokens(ids, role):
      name = message.recipient or message.channel
      said[name] = ''.join(part.text for part in message.content)
    parts = chat.parse_reply(chat.decode(ids), [ADD])
    content, calls = parts.text, parts.calls
    expected = {f'functions.{c["name"]}': json.dumps(c['arguments']) for c in calls}
    expected |= {'final': content} if content else {}
    said.pop('analysis', '')
    assert said == expected, what
