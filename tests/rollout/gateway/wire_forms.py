"""Conversations in the forms in which clients of three APIs send and receive them.

A conversation is a list of ('system', text), ('user', text), ('tool', id, text) and
replies.
"""

import dataclasses
import json

from tests.rollout.gateway.agents import events, named_events, post

APIS = ('chat', 'responses', 'messages')
PATHS = {
  'chat': '/v1/chat/completions',
  'responses': '/v1/responses',
  'messages': '/v1/messages',
}
LIMITS = {
  'chat': 'max_tokens',
  'responses': 'max_output_tokens',
  'messages': 'max_tokens',
}
STOPS = {'chat': 'stop', 'responses': 'stop', 'messages': 'stop_sequences'}


@dataclasses.dataclass
class Reply:
  """A reply as a client got it. calls: (id, name, arguments as JSON)."""

  name: str
  api: str
  thought: str = ''
  text: str = ''
  calls: list = dataclasses.field(default_factory=list)
  items: list = dataclasses.field(default_factory=list)
  is_instructed: bool = False


def chat_body(entries):
  return {'messages': [chat_message(entry) for entry in entries]}


def chat_message(entry):
  if isinstance(entry, Reply):
    message = {'role': 'assistant', 'content': entry.text}
    if entry.thought:
      message['reasoning_content'] = entry.thought
    if entry.calls:
      message['tool_calls'] = [
        {'id': i, 'type': 'function', 'function': {'name': name, 'arguments': text}}
        for i, name, text in entry.calls
      ]
    return message
  if entry[0] == 'tool':
    return {'role': 'tool', 'tool_call_id': entry[1], 'content': entry[2]}
  return {'role': entry[0], 'content': entry[1]}


def responses_body(entries, rng):
  """With instructions or without, the whole conversation or only what is new."""
  body, instructions = {}, None
  if not isinstance(entries[0], Reply) and entries[0][0] == 'system':
    instructions = entries[0][1]
  last = max((i for i, e in enumerate(entries) if isinstance(e, Reply)), default=None)
  if last is not None and entries[last].name and rng.random() < 0.4:
    body['previous_response_id'] = entries[last].name
    if entries[last].is_instructed:
      body['instructions'] = instructions
    entries = entries[last + 1 :]
  elif instructions is not None and rng.random() < 0.5:
    body['instructions'] = instructions
    entries = entries[1:]
  if len(entries) == 1 and entries[0][0] == 'user' and rng.random() < 0.5:
    return {**body, 'input': entries[0][1]}
  return {**body, 'input': [i for e in entries for i in responses_items(e, rng)]}


def responses_items(entry, rng):
  if not isinstance(entry, Reply):
    if entry[0] == 'tool':
      output = {'type': 'function_call_output', 'call_id': entry[1]}
      return [{**output, 'output': entry[2]}]
    if rng.random() < 0.5:
      return [{'role': entry[0], 'content': entry[1]}]
    parts = [{'type': 'input_text', 'text': entry[1]}]
    return [{'type': 'message', 'role': entry[0], 'content': parts}]
  if entry.items and rng.random() < 0.7:
    return entry.items
  items = []
  if entry.thought:
    content = [{'type': 'reasoning_text', 'text': entry.thought}]
    items.append({'type': 'reasoning', 'summary': [], 'content': content})
  if entry.text or not (entry.thought or entry.calls):
    items.append({'role': 'assistant', 'content': entry.text})
  for i, name, text in entry.calls:
    call = {'type': 'function_call', 'call_id': i, 'name': name, 'arguments': text}
    items.append(call)
  return items


def messages_body(entries, rng):
  messages, body = [], {'max_tokens': 400}
  for entry in entries:
    if isinstance(entry, Reply):
      messages.append({'role': 'assistant', 'content': blocks(entry)})
    elif entry[0] == 'system':
      text = entry[1]
      body['system'] = rng.choice([text, [{'type': 'text', 'text': text}]])
    elif entry[0] == 'tool':
      result = {'type': 'tool_result', 'tool_use_id': entry[1], 'content': entry[2]}
      if messages[-1]['role'] == 'user':
        messages[-1]['content'].append(result)
      else:
        messages.append({'role': 'user', 'content': [result]})
    elif messages and messages[-1]['role'] == 'user':
      messages[-1]['content'].append({'type': 'text', 'text': entry[1]})
    else:
      messages.append({'role': 'user', 'content': entry[1]})
  return {**body, 'messages': messages}


def blocks(reply):
  thoughts = [{'type': 'thinking', 'thinking': reply.thought, 'signature': 'x'}]
  texts = [{'type': 'text', 'text': reply.text}]
  calls = [
    {'type': 'tool_use', 'id': i, 'name': name, 'input': json.loads(text)}
    for i, name, text in reply.calls
  ]
  return thoughts * bool(reply.thought) + texts * bool(reply.text) + calls


def tools_of(api, tools):
  functions = [tool['function'] for tool in tools]
  if api == 'responses':
    return [{'type': 'function', 'strict': True, **one} for one in functions]
  if api == 'messages':
    return [{'name': f['name'], 'input_schema': f['parameters']} for f in functions]
  return tools


async def ask(client, api, entries, rng, *, tools=(), n=1, **options):
  """The replies to a conversation, whole or put together from a stream."""
  session, is_streamed = options.pop('session'), rng.random() < 0.3
  body = {
    'chat': lambda: chat_body(entries) | {'n': n},
    'responses': lambda: responses_body(entries, rng),
    'messages': lambda: messages_body(entries, rng),
  }[api]()
  body['tools'] = tools_of(api, tools)
  for names, key in ((LIMITS, 'max_tokens'), (STOPS, 'stop')):
    if key in options:
      body[names[api]] = options[key]
  send = {'chat': streamed_chat, 'responses': streamed_response,
          'messages': streamed_message}[api]  # fmt: skip
  if is_streamed:
    replies = await send(client, body, session)
  else:
    status, response = await post(client, PATHS[api], body, x_session_id=session)
    assert status == 200, response
    replies = READ[api](response)
  for reply in replies:
    reply.is_instructed = 'instructions' in body
  return replies


# ---- what is received


def read_chat(response):
  return [
    chat_reply(choice['completion_id'], choice['message'])
    for choice in response['choices']
  ]


def chat_reply(name, message):
  functions = [(c['id'], c['function']) for c in message.get('tool_calls') or ()]
  calls = [(i, one['name'], one['arguments']) for i, one in functions]
  return Reply(name, 'chat', '', message['content'] or '', calls)


def read_response(response):
  reply = Reply(response['id'], 'responses', items=response['output'])
  for item in response['output']:
    if item['type'] == 'reasoning':
      reply.thought += item['content'][0]['text']
    elif item['type'] == 'message':
      reply.text += item['content'][0]['text']
    else:
      reply.calls.append((item['call_id'], item['name'], item['arguments']))
  return [reply]


def read_message(response):
  reply = Reply(response['id'], 'messages')
  for block in response['content']:
    if block['type'] == 'thinking':
      reply.thought += block['thinking']
    elif block['type'] == 'text':
      reply.text += block['text']
    else:
      # As programs in JavaScript send a number: 1, not 1.0.
      reply.calls.append((block['id'], block['name'], json.dumps(block['input'])))
  return [reply]


READ = {'chat': read_chat, 'responses': read_response, 'messages': read_message}


async def streamed_chat(client, body, session):
  messages = [{'content': ''} for _ in range(body['n'])]
  names = [''] * body['n']
  for chunk in await events(client, PATHS['chat'], body, x_session_id=session):
    for choice in chunk['choices']:
      message, delta = messages[choice['index']], choice['delta']
      names[choice['index']] = choice.get('completion_id', '')
      message['content'] += delta.get('content') or ''
      for call in delta.get('tool_calls', ()):
        call.pop('index')
        message.setdefault('tool_calls', []).append(call)
  return [chat_reply(*pair) for pair in zip(names, messages, strict=True)]


async def streamed_response(client, body, session):
  """Puts the items together from the deltas; the last event must have the same."""
  texts = {}
  sent = await named_events(client, PATHS['responses'], body, x_session_id=session)
  assert [event['sequence_number'] for event in sent] == list(range(len(sent)))
  kinds = [event['type'] for event in sent]
  assert kinds[:2] == ['response.created', 'response.in_progress']
  for event in sent:
    if event['type'].endswith('.delta'):
      at = event['output_index']
      texts[at] = texts.get(at, '') + event['delta']
  last = sent[-1]
  assert last['type'] in ('response.completed', 'response.incomplete')
  output = last['response']['output']
  for at, item in enumerate(output):
    text = item['arguments'] if 'arguments' in item else item['content'][0]['text']
    assert texts.get(at, '') == text
  done = [e['item'] for e in sent if e['type'] == 'response.output_item.done']
  assert done == output
  return read_response(last['response'])


async def streamed_message(client, body, session):
  sent = await named_events(client, PATHS['messages'], body, x_session_id=session)
  sent = [event for event in sent if event['type'] != 'ping']
  assert sent[0]['type'] == 'message_start' and sent[-1]['type'] == 'message_stop'
  found, message = [], sent[0]['message']
  for event in sent[1:-2]:
    if event['type'] == 'content_block_start':
      assert event['index'] == len(found)
      found.append(dict(event['content_block']))
      text = ''
    elif event['type'] == 'content_block_delta':
      delta, block = event['delta'], found[event['index']]
      kind = delta['type'].removesuffix('_delta')
      if kind == 'input_json':
        text += delta['partial_json']
        block['input'] = json.loads(text)
      else:
        block[kind] = block[kind] + delta[kind]
    else:
      assert event == {'type': 'content_block_stop', 'index': len(found) - 1}
  assert sent[-2]['type'] == 'message_delta' and sent[-2]['usage']['output_tokens'] > 0
  return read_message({**message, 'content': found})
