"""Images that clients send as data: URLs: to the engine, into rows, within limits."""

import base64
import re
import threading
import types

import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.images import as_image
from jaxrl.rollout.gateway import openai_requests
from tests.rollout.gateway import agents
from tests.rollout.gateway.agents import Engine, Tokens, endpoint, post

PATH = '/v1/chat/completions'
PAD = '§'
# An image takes a token for every 8 pixels of its width.
PROCESSOR = types.SimpleNamespace(
  image_token_id=ord(PAD), num_tokens=lambda image: image.width // 8
)


class ImageTokens(Tokens):
  """Renders an image as its placeholder between brackets."""

  def convert_ids_to_tokens(self, ids):
    return chr(ids) if isinstance(ids, int) else [chr(i) for i in ids]

  def apply_chat_template(self, messages, **options):
    def text(content):
      if isinstance(content, str):
        return content
      return ''.join(p.get('text', f'[{PAD}]') for p in content)

    plain = [{**m, 'content': text(m['content'])} for m in messages]
    return super().apply_chat_template(plain, **options)


class ImageEngine(Engine):
  """Keeps the images of every prompt."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.images = []

  async def generate(self, request_id, token_ids, sampling, images=()):
    self.images.append(tuple(images))
    return await super().generate(request_id, token_ids, sampling)


@pytest.fixture(autouse=True)
def chat_with_images(monkeypatch):
  monkeypatch.setattr(
    agents, 'ChatTokenizer',
    lambda _: ChatTokenizer(ImageTokens(), image_processor=PROCESSOR),
  )  # fmt: skip


def picture(seed, width=16):
  return as_image(np.random.default_rng(seed).integers(0, 256, (8, width, 3), np.uint8))


def shown(image, text='look'):
  part = {'type': 'image_url', 'image_url': {'url': image.data_url(), 'detail': 'low'}}
  return {'role': 'user', 'content': [part, {'type': 'text', 'text': text}]}


async def test_images_reach_the_engine_and_the_rows_in_order():
  engine = ImageEngine(lambda prompt, sampling: 'ok>', interrupt=1)
  first, second = picture(1), picture(2, width=24)
  async with endpoint(engine) as (client, delivered):
    messages = [shown(first)]
    status, response = await post(client, PATH, {'messages': messages})
    assert status == 200, response
    messages += [response['choices'][0]['message'], shown(second)]
    status, _ = await post(client, PATH, {'messages': messages})
    assert status == 200
    await post(client, '/feedback', {'reward': 1.0})
  assert engine.images == [(first,), (first,), (first, second), (first, second)]
  ((row,),) = delivered.values()
  text = ''.join(chr(token % agents.OWN) for token in row.tokens if token != ord(PAD))
  assert text.count('[]') == 2
  runs = ''.join('x' if token == ord(PAD) else ' ' for token in row.tokens).split()
  assert runs == ['xx', 'xxx']
  assert row.images == [first, second]
  assert row.messages[0]['content'][0] == {'type': 'image', 'image': first}


async def test_placeholders_that_a_client_writes_are_no_images():
  """In texts, in calls of tools and in their schemas, though this one has no bars."""
  engine = ImageEngine(lambda prompt, sampling: 'ok>')
  call = {'id': 'a', 'type': 'function'}
  call['function'] = {'name': 'see', 'arguments': f'{{"what": "{PAD}"}}'}
  schema = {'name': f'see{PAD}', 'description': PAD, 'parameters': {}}
  messages = [
    {'role': 'user', 'content': f'a {PAD} b'},
    {'role': 'assistant', 'content': None, 'tool_calls': [call]},
    {'role': 'tool', 'tool_call_id': 'a', 'content': PAD},
    shown(picture(1), text=f'{PAD}{PAD} look'),
  ]
  tools = [{'type': 'function', 'function': schema}]
  async with endpoint(engine) as (client, _):
    status, response = await post(client, PATH, {'messages': messages, 'tools': tools})
  assert status == 200, response
  ((_, prompt, *_),) = engine.calls
  assert list(prompt).count(ord(PAD)) == picture(1).width // 8
  assert engine.images == [(picture(1),)]


async def test_another_image_begins_another_conversation():
  engine = ImageEngine(lambda prompt, sampling: 'ok>')
  async with endpoint(engine) as (client, delivered):
    for image in (picture(1), picture(2)):  # equal tokens
      reply = {'role': 'assistant', 'content': 'ok'}
      await post(client, PATH, {'messages': [shown(image)]})
      more = [shown(image), reply, {'role': 'user', 'content': 'and?'}]
      assert (await post(client, PATH, {'messages': more}))[0] == 200
    await post(client, '/feedback', {'reward': 1.0})
  (rows,) = delivered.values()
  assert [row.images for row in rows] == [[picture(1)], [picture(2)]]
  assert [int(row.action_mask.sum()) for row in rows] == [6, 6]


def image_part(**value):
  return [{'role': 'user', 'content': [{'type': 'image_url', **value}]}]


def url(data, kind='png'):
  return {'url': f'data:image/{kind};base64,{base64.b64encode(data).decode()}'}


def bomb():
  """A PNG that says it has 30,000 × 30,000 pixels."""
  data = bytearray(picture(1).png)
  data[16:24] = (30_000).to_bytes(4, 'big') * 2
  return bytes(data)


@pytest.mark.parametrize(
  'messages, reason',
  [
    (image_part(), 'an image needs image_url'),
    (image_part(image_url={'url': 'http://127.0.0.1:9/x.png'}), 'nothing is fetched'),
    (image_part(image_url={'url': 'file:///etc/passwd'}), 'nothing is fetched'),
    (image_part(image_url=url(b'hello')), 'message 0: a broken image'),
    (image_part(image_url=url(picture(1).png[:90])), 'broken'),
    (image_part(image_url=url(bomb())), 'broken|too large|pixels'),
    (image_part(image_url={'url': 'data:image/png;base64,!!'}), 'base64'),
    (image_part(image_url=url(picture(1).png)) * 65, '65 images are too many'),
  ],
)
async def test_a_wrong_image_is_refused_with_the_reason(messages, reason):
  engine = ImageEngine()
  async with endpoint(engine) as (client, _):
    status, response = await post(client, PATH, {'messages': messages})
  assert status == 400 and response['error']['param'] == 'messages', response
  assert re.search(reason, response['error']['message']), response
  assert engine.calls == []


async def test_a_model_without_a_tower_refuses_images(monkeypatch):
  monkeypatch.setattr(agents, 'ChatTokenizer', lambda _: ChatTokenizer(ImageTokens()))
  async with endpoint(ImageEngine()) as (client, _):
    status, response = await post(client, PATH, {'messages': [shown(picture(1))]})
  assert status == 400 and 'model sees none' in response['error']['message']


async def test_images_are_decoded_on_the_tokenizers_thread(monkeypatch):
  """A slow image must not keep other clients waiting."""
  names = []
  parse = openai_requests.parse_chat_body

  def watched(data):
    names.append(threading.current_thread().name)
    return parse(data)

  monkeypatch.setattr(openai_requests, 'parse_chat_body', watched)
  engine = ImageEngine(lambda prompt, sampling: 'ok>')
  async with endpoint(engine) as (client, _):
    await post(client, PATH, {'messages': [shown(picture(1))]})
  assert len(names) == 1 and names[0].startswith('gateway-chat')


def shown_in(api, url):
  """A question with an image, as a body of another API."""
  text = {'type': 'text', 'text': 'look'}
  if api == '/v1/responses':
    parts = [{'type': 'input_image', 'detail': 'auto', 'image_url': url}]
    parts.append({'type': 'input_text', 'text': 'look'})
    return {'input': [{'role': 'user', 'content': parts}]}
  source = {'type': 'base64', 'media_type': 'image/png', 'data': url.partition(',')[2]}
  content = [{'type': 'image', 'source': source}, text]
  return {'max_tokens': 9, 'messages': [{'role': 'user', 'content': content}]}


@pytest.mark.parametrize('path', ['/v1/responses', '/v1/messages'])
async def test_other_apis_show_images_too(path):
  engine = ImageEngine(lambda prompt, sampling: 'ok>')
  image = picture(1)
  async with endpoint(engine) as (client, _):
    assert (await post(client, PATH, {'messages': [shown(image)]}))[0] == 200
    assert (await post(client, path, shown_in(path, image.data_url())))[0] == 200
    many = shown_in(path, image.data_url())
    (entries,) = (value for value in many.values() if isinstance(value, list))
    entries[:] = entries * 65
    status, response = await post(client, path, many)
    assert status == 400 and '65 images are too many' in response['error']['message']
    status, response = await post(
      client, path, shown_in(path, 'data:image/png;base64,eA==')
    )
    assert status == 400 and 'image' in response['error']['message']
  assert engine.calls[0][1] == engine.calls[1][1]
  assert engine.images[0][0].digest == engine.images[1][0].digest
