"""Agents for tests: good ones and bad ones, of both kinds."""

import json
import sys
import time
import urllib.error
import urllib.request


def ask(base_url, api_key, messages, path='/chat/completions', **more):
  """A reply as the endpoint tells it, by plain HTTP."""
  body = {'model': 'policy', 'messages': messages, **more}
  if path == '/feedback':
    body = more
  request = urllib.request.Request(
    base_url + path,
    json.dumps(body).encode(),
    {'Authorization': f'Bearer {api_key}', 'Content-Type': 'application/json'},
  )
  with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
    request, timeout=30
  ) as response:
    return json.load(response)


def say(base_url, api_key, text, **more):
  messages = [{'role': 'user', 'content': text}]
  return ask(base_url, api_key, messages, **more)['choices'][0]['message']['content']


def good(task, base_url, api_key, *, turns=2):
  """Asks so often in one conversation; the reward is how many letters came back."""
  messages = [{'role': 'user', 'content': task['question']}]
  for _ in range(turns):
    completion = ask(base_url, api_key, messages, temperature=0.1, seed=7)
    reply = completion['choices'][0]['message']
    messages += [reply, {'role': 'user', 'content': 'more'}]
  return {'reward': len(reply['content']), 'metrics': {'asked': turns}, 'given': 'x'}


def branches(task, base_url, api_key):
  """Two conversations that begin alike, and a third of its own."""
  messages = [{'role': 'user', 'content': task['question']}]
  reply = ask(base_url, api_key, messages)['choices'][0]['message']
  for text in ('left', 'right'):
    ask(base_url, api_key, [*messages, reply, {'role': 'user', 'content': text}])
  say(base_url, api_key, 'other')
  ask(base_url, api_key, None, '/feedback', reward=0.5, done=False)
  return 2


def crashes(task, base_url, api_key):
  say(base_url, api_key, 'hi')
  raise RuntimeError('the agent fell over')


def hangs(task, base_url, api_key, *, seconds=60.0):
  say(base_url, api_key, 'hi')
  time.sleep(seconds)


def silent(task, base_url, api_key):
  return 1.0


def garbage(task, base_url, api_key):
  say(base_url, api_key, 'hi')
  return {'reward': 'much'}


def greedy(task, base_url, api_key):
  say(base_url, api_key, 'hi')
  return 1e300


def endless(task, base_url, api_key):
  """Goes on until it is told that it may not."""
  messages = [{'role': 'user', 'content': task['question']}]
  while True:
    messages.append(ask(base_url, api_key, messages)['choices'][0]['message'])
    messages.append({'role': 'user', 'content': 'more'})


def small_letters(task, base_url, api_key):
  """One reply; the reward is the share of small letters in it."""
  text = say(base_url, api_key, task['question'][:20])
  return sum(letter.islower() for letter in text) / max(len(text), 1)


async def with_client(task, client):
  """By OpenAI's client: tools, an answer of one, and a branch.

  The reward is how many different letters there are in what came back.
  """
  tools = [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]
  create, messages = client.chat.completions.create, []
  messages.append({'role': 'user', 'content': task['question'][:20]})
  options = {'model': 'any', 'tools': tools, 'temperature': 0.3}
  first = (await create(messages=messages, **options)).choices[0].message
  heard = [{'role': 'user', 'content': 'on'}]
  if first.tool_calls:
    heard = [
      {'role': 'tool', 'tool_call_id': call.id, 'content': '2'}
      for call in first.tool_calls
    ]
  second = (await create(messages=[*messages, first, *heard], **options)).choices[0]
  branch = {'role': 'user', 'content': 'again'}
  third = await create(messages=[*messages, first, branch], **options)
  replies = [first, second.message, third.choices[0].message]
  return len(set(''.join(message.content or '' for message in replies)))


def main():
  """A program: plays as it is told by its argument."""
  import os

  where = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']
  task, how = json.load(sys.stdin), sys.argv[1]
  if how == 'hang':
    say(*where, 'hi')
    os.system(f'sleep 60 & echo $! > {sys.argv[2]}; sleep 60')
  elif how == 'flood':
    say(*where, 'hi')
    print('x' * (1 << 22), flush=True)
  elif how == 'memory':
    print(len(bytearray(1 << 32)))
  text = good(task, *where)
  print('some words')
  print(json.dumps(text))


if __name__ == '__main__':
  main()
