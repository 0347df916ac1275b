"""A real checkpoint that we exported: vLLM renders, stops and answers as others do."""

import json
import subprocess
import sys

import pytest

from jaxrl import model_loading
from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.models import huggingface
from tests import real
from tests.rollout.vllm.needs import VLLM

pytestmark = [*VLLM, pytest.mark.real]

CHATS = [
  [{'role': 'user', 'content': 'What is 3 + 4? Answer with the number alone.'}],
  [
    {'role': 'system', 'content': 'You answer in one word.'},
    {'role': 'user', 'content': 'Which animal barks?'},
    {'role': 'assistant', 'content': 'Dogs.'},
    {'role': 'user', 'content': 'And which one purrs?'},
  ],
]
# vLLM as its users start it: with the folder's own tokenizer, template and stop ids.
SERVE = """
import json, os, sys
answers = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
os.environ |= {'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'TORCHDYNAMO_DISABLE': '1'}
from vllm import LLM, SamplingParams
from jaxrl.models import huggingface
from jaxrl.rollout.vllm import vllm_options
folder, chats = sys.argv[1], json.loads(sys.argv[2])
options = vllm_options.cpu_options(huggingface.load_config(folder), {}, 64 << 20)
llm = LLM(folder, dtype='float32', max_model_len=256, max_num_seqs=2, **options)
rules = llm.get_default_sampling_params()
rules.temperature, rules.max_tokens = 0, 32
replies = [
  [list(r.prompt_token_ids), list(r.outputs[0].token_ids), r.outputs[0].finish_reason]
  for r in llm.chat(chats, rules, use_tqdm=False)
]
print(json.dumps(replies), file=answers)
"""


def test_vllm_renders_stops_and_answers_as_transformers_does(tmp_path):
  import torch
  import transformers

  source = str(real.find(f'checkpoints/{real.SMOLLM2}'))
  loaded = model_loading.load_model(
    source, value_head=False, dtype='float32', remat='none'
  )
  folder = tmp_path / 'export'
  huggingface.save(folder, loaded.model.config, loaded.params, loaded.tokenizer)
  done = subprocess.run(
    [sys.executable, '-c', SERVE, str(folder), json.dumps(CHATS)],
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  replies = json.loads(done.stdout)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  chat = ChatTokenizer(loaded.tokenizer)
  for messages, (prompt, reply, reason) in zip(CHATS, replies, strict=True):
    assert prompt == list(chat.encode_prompt(messages))
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == list(rendered['input_ids'])
    ids = torch.tensor([prompt])
    output = model.generate(ids, do_sample=False, max_new_tokens=32)
    assert reply == output[0, len(prompt) :].tolist()
    assert (reason == 'stop') == (reply[-1] in chat.stop_token_ids)
  assert any(reason == 'stop' for *_, reason in replies)
