"""Formats are chosen by real chat templates, and read what these write."""

import pathlib

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxrl.data.tool_formats import detect_thought_format, detect_tool_format

FOLDER = pathlib.Path(__file__).parents[3] / '.real' / 'templates'
EXPECTED = {
  'deepseekv3': ('DeepSeek V3', '<think>'),
  'gemma3': (None, None),
  'gemma4_v5': ('Gemma 4', 'Gemma 4'),
  'glm4moe': ('GLM 4.5', '<think>'),
  'gptoss': ('GPT-OSS (harmony)', 'GPT-OSS (harmony)'),
  'lfm2_2_5': ('LFM2', '<think>'),
  'llama3': (None, None),
  'llama3_1': ('Llama 3', None),
  'muse_glimmer': ('Muse', None),
  'nemotron_3_nano': ('Qwen3-Coder', '<think>'),
  'phi3': (None, None),
  'qwen2_5': ('Hermes', None),
  'qwen2_5_vl': (None, None),
  'qwen3': ('Hermes', '<think>'),
  'qwen3_6': ('Qwen3-Coder', '<think>'),
}


@pytest.mark.real
@pytest.mark.parametrize('name', EXPECTED)
def test_the_format_of_a_published_template(name):
  path = FOLDER / f'{name}.jinja'
  if not path.exists():
    pytest.skip(f'{name}.jinja is not there: make env-real')
  template = path.read_text()

  def render(messages, prompt):
    texts, _ = render_jinja_template(
      [list(messages)],
      chat_template=template,
      add_generation_prompt=prompt,
      bos_token='<s>',
      eos_token='</s>',
      strftime_now=lambda form: form,
    )
    return texts[0]

  tool_format = detect_tool_format(template, render)
  thought_format = detect_thought_format(template, render)
  found = tool_format and tool_format.name, thought_format and thought_format.name
  assert found == EXPECTED[name]
