"""What was sent before is recognised by its bytes, and read as if it had not been."""

import itertools
import json
import random

import pytest

from jaxrl.rollout.gateway import openai_requests
from jaxrl.rollout.gateway.openai_requests import ApiError
from jaxrl.rollout.gateway.request_cache import RequestCache


def user(text, **more):
  return {'role': 'user', 'content': text, **more}


def body(messages, **more):
  return json.dumps({'model': 'm', 'messages': messages, **more}).encode()


def plain(data):
  """The request as one that is seen for the first time."""
  return openai_requests.parse_cached_chat(data, RequestCache())


def test_the_same_objects_stand_for_what_came_before():
  seen = RequestCache()
  first = openai_requests.parse_cached_chat(body([user('a'), user('b')]), seen)
  second = openai_requests.parse_cached_chat(
    body([user('a'), user('b'), user('c')], n=2), seen
  )
  assert second == plain(body([user('a'), user('b'), user('c')], n=2))
  assert [one is two for one, two in zip(first.messages, second.messages)] == [True] * 2  # noqa: B905
  again = openai_requests.parse_cached_chat(
    body([user('a'), user('b'), user('c')]), seen
  )
  assert again.messages[2] is second.messages[2]


def test_a_conversation_is_read_alike_however_it_is_sent():
  """Branches, changed beginnings and other ways to write JSON, drawn at random."""
  rng, hits = random.Random(7), 0
  for _ in range(60):
    seen, known = RequestCache(), [[user('start')]]
    for turn in range(12):
      messages = list(rng.choice(known))
      if rng.random() < 0.2:
        messages[0] = user(f'other {turn}')
      if rng.random() < 0.8:
        content = rng.choice(['"messages": [', 'é\ud83d\ude00', '],[', f'{turn}', '\\'])
        messages.append({'role': 'assistant', 'content': content})
        messages.append(user(rng.choice(['1', 'x"y', '[0, '])))
      known.append(messages)
      more = rng.choice([{}, {'n': 2}, {'metadata': {'messages': [user('m')]}}])
      style = rng.choice([{}, {}, {'separators': (',', ':')}, {'indent': 1}])
      value = {'messages': messages, **more}
      if rng.random() < 0.3:
        value = {**more, 'messages': messages}
      data = json.dumps(value, **style).encode()
      before = list(map(id, itertools.chain(*(one.values() for one in seen._requests))))
      request = openai_requests.parse_cached_chat(data, seen)
      assert request == plain(data)
      hits += id(request.messages[0]) in before
  assert hits > 100


@pytest.mark.parametrize(
  'first, second',
  [
    ('{"messages":[A],"messages":[B]}', '{"messages":[A,B],"messages":[B]}'),
    (
      '{"metadata":{"messages":[A]},"messages":[B]}',
      '{"metadata":{"messages":[A,A]},"messages":[A]}',
    ),
    ('{"messages":[A]}', '{"messages":[A  ,B]}'),
    ('{"messages":[A]}', '{"messages":[ A,B]}'),
    ('{"messages":[A],"stop":"x"}', '{"messages":[A],"stop":"y","messages":[B,A]}'),
    ('{"tools":[],"messages":[A]}', '{"tools":[],"messages":[B,A]}'),
    ('{"n":1,"messages":[ A ] }', '{"n":1,"messages":[ A ,B] }'),
  ],
)
def test_bodies_that_would_deceive_are_read_as_they_are(first, second):
  texts = [json.dumps(user(name)) for name in 'ab']
  first, second = (
    text.replace('A', texts[0]).replace('B', texts[1]).encode()
    for text in (first, second)
  )
  seen = RequestCache()
  assert openai_requests.parse_cached_chat(first, seen) == plain(first)
  assert openai_requests.parse_cached_chat(second, seen) == plain(second)


@pytest.mark.parametrize(
  'tail, words',
  [
    (b',{"role":"nobody","content":"x"}]}', 'message 1'),
    (b',7]}', 'message 1'),
    (b',]}', 'not JSON'),
    (b',NaN]}', 'not JSON'),
    (b',{"role":"user","content":"\\ud800"}]}', 'not JSON'),
    (b'],"n":0}', 'n:'),
    (b'', 'not JSON'),
    (b',{"role":"user","content":"\xff"}]}', 'not JSON'),
    (b',' + b'[' * 100_000, 'deep'),
  ],
)
def test_what_is_wrong_after_a_known_beginning_is_told_as_ever(tail, words):
  seen, head = RequestCache(), b'{"messages":[{"role":"user","content":"a"}'
  openai_requests.parse_cached_chat(head + b']}', seen)
  for known in (seen, RequestCache()):
    with pytest.raises(ApiError, match=words):
      openai_requests.parse_cached_chat(head + tail, known)
  assert openai_requests.parse_cached_chat(head + b']}', seen).messages == [user('a')]
