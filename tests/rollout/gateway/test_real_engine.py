"""A session in three APIs with the engine that trains: the learner sees its tokens."""

import random

import aiohttp
import jax
import numpy as np

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.http_server import GatewayServer, serve_gateway
from tests.rollout.gateway.agents import KEY, post
from tests.rollout.gateway.wire_forms import APIS, ask

TEXTS = ['what is it then? it is the one that was there before. ' * 20]


async def test_replies_are_those_that_the_model_drew():
  tokenizer = train_tokenizer(TEXTS, 320)
  config = ModelConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
  )
  model = TransformerLM(config)
  params = jax.tree.map(lambda x: x * 3, model.init(jax.random.key(0)))
  device_thread = DeviceThread()
  engine = JaxEngine(
    model, tokenizer, device_thread=device_thread, max_num_seqs=4, max_length=512
  )
  await engine.load(5, params)
  delivered = {}
  chat = ChatTokenizer(tokenizer)
  gateway = Gateway(
    engine, chat, deliver=delivered.__setitem__, max_length=512, fixed_sampling=True
  )
  rng, entries, texts = random.Random(3), [('user', 'what is it?')], []
  try:
    async with (
      serve_gateway(GatewayServer(gateway, [KEY])) as url,
      aiohttp.ClientSession(url, headers={'Authorization': f'Bearer {KEY}'}) as client,
    ):
      for turn in range(6):
        api = APIS[turn % 3]
        (reply,) = await ask(client, api, entries, rng, session='s', max_tokens=8)
        texts.append(reply.text)
        entries += [reply, ('user', f'and {turn}?')]
      body = {'input': 'x', 'top_logprobs': 2}
      status, response = await post(client, '/v1/responses', body)
      assert (status, response['error']['param']) == (400, 'top_logprobs')
      await post(client, '/feedback', {'reward': 1.0}, x_session_id='s')
  finally:
    gateway.close()
    device_thread.close()
  (row,) = delivered['0/s']  # no conversation was taken for another one
  starts = np.flatnonzero(np.diff(row.action_mask.astype(int), prepend=0) == 1)
  assert len(starts) == 6
  for start, text in zip(starts, texts, strict=True):
    tokens = row.tokens[start : start + 8][row.action_mask[start : start + 8]]
    assert chat.decode(tokens) == text
  assert set(row.weights_version[row.action_mask]) == {5}
  segments = np.ones((1, len(row.tokens)), np.int32)
  learners = model.policy_outputs(params, row.tokens[None], segments).logprobs
  gap = np.abs(np.asarray(learners)[0] - row.rollout_logprobs)[row.action_mask]
  assert len(gap) > 20 and gap.max() < 1e-4
