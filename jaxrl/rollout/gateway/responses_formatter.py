"""ResponsesFormatter writes results as OpenAI's Responses API, whole or as events."""

from collections.abc import Sequence

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.choice_runner import ChoiceResult, ChoiceRunner, ReplyDelta
from jaxrl.rollout.gateway.formatter_base import Event, FormatterBase
from jaxrl.rollout.gateway.generation_request import ApiError
from jaxrl.rollout.gateway.response_formatter import format_logprobs
from jaxrl.rollout.gateway.responses_requests import ECHOED_FIELDS, encrypt_thought


class ResponsesFormatter(FormatterBase):
  """Formats a result as a response with its items, or as the events of one."""

  names_events = True

  def __post_init__(self):
    """Prepares for a stream's first item."""
    self._name = self._key = ''
    self._num_events = 0
    self._items: list[JsonObject] = []  # those that are done
    self._open: JsonObject | None = None  # the item that is being written

  def full_response(self, results: Sequence[ChoiceResult]) -> JsonObject:
    """Formats the body of a response that is not streamed."""
    (result,) = results
    self._name, self._key = result.name, result.name.removeprefix('resp_')
    items = []
    status = _status(result)
    if result.thought:
      items.append(self._thought_item(result.thought, 'completed'))
    if result.text or not (result.thought or result.tool_calls):
      items.append(self._text_item(result.text, status, self._logprobs(result)))
    items += [self._call_item(i, 'completed', c) for i, c in _numbered(result)]
    return self._response(items, result)

  # ---- streams

  def opening_events(self, choices: Sequence[ChoiceRunner]) -> list[Event]:
    """Returns the events that open a stream."""
    (choice,) = choices
    self._name, self._key = choice.name, choice.key
    return [
      self._event(kind, response=self._response([], None))
      for kind in ('response.created', 'response.in_progress')
    ]

  def delta_events(self, index: int, delta: ReplyDelta) -> list[Event]:
    """Returns the events of what is new."""
    events = []
    if delta.thought:
      if self._open is None:
        events += self._begin(self._thought_item('', 'in_progress'))
      events.append(self._delta('response.reasoning_text.delta', delta.thought))
    if delta.text:
      if self._open is None or self._open['type'] != 'message':
        events += self._end('completed')
        events += self._begin(self._text_item('', 'in_progress'))
      events.append(self._delta('response.output_text.delta', delta.text, logprobs=[]))
    return events

  def result_events(self, index: int, result: ChoiceResult) -> list[Event]:
    """Returns the events that end a reply, with its tool calls."""
    events = []
    if self._open is None and not (result.thought or result.tool_calls):
      events += self._begin(self._text_item('', 'in_progress'))
    if self._open is not None and self._open['type'] == 'message':
      self._open['content'][0]['logprobs'] = self._logprobs(result)
      events += self._end(_status(result))
    events += self._end('completed')
    for i, call in _numbered(result):
      arguments = call['function']['arguments']
      events += self._begin(self._call_item(i, 'in_progress', call) | {'arguments': ''})
      events.append(self._delta('response.function_call_arguments.delta', arguments))
      events += self._end('completed')
    return events

  def closing_events(self, results: Sequence[ChoiceResult]) -> list[Event]:
    """Returns the events that end a stream."""
    response = self._response(self._items, results[0])
    return [self._event(f'response.{response["status"]}', response=response)]

  def error_events(self, error: ApiError) -> list[Event]:
    """Returns the events of an error in a stream."""
    code = 'rate_limit_exceeded' if error.status == 429 else 'server_error'
    if error.status < 500 and error.status != 429:
      code = 'invalid_prompt'
    failure = {'status': 'failed', 'error': {'code': code, 'message': str(error)}}
    response = self._response(self._items, None) | failure
    return [self._event('response.failed', response=response)]

  def _event(self, kind: str, **fields: object) -> Event:
    event = {'type': kind, 'sequence_number': self._num_events, **fields}
    self._num_events += 1
    return event

  def _place(self) -> JsonObject:
    assert self._open is not None
    return {'item_id': self._open['id'], 'output_index': len(self._items)}

  def _begin(self, item: JsonObject) -> list[Event]:
    """Opens an item and, if it has content, its one part."""
    parts = item.pop('content', None)
    self._open = item if parts is None else item | {'content': parts}
    # Copies, here and of the part: the item itself grows before this is sent.
    shown = dict(item) if parts is None else item | {'content': []}
    events = [
      self._event(
        'response.output_item.added', output_index=len(self._items), item=shown
      )
    ]
    if parts is not None:
      place = self._place() | {'content_index': 0}
      part = dict(parts[0])
      events.append(self._event('response.content_part.added', **place, part=part))
    return events

  def _delta(self, kind: str, text: str, **fields: object) -> Event:
    """Appends to the open item."""
    assert self._open is not None
    place = self._place()
    if 'content' in self._open:
      self._open['content'][0]['text'] += text
      place['content_index'] = 0
    else:
      self._open['arguments'] += text
    return self._event(kind, **place, delta=text, **fields)

  def _end(self, status: str) -> list[Event]:
    """Closes the open item, if there is one."""
    item = self._open
    if item is None:
      return []
    place, kind = self._place(), item['type']
    if kind == 'function_call':
      done = {'name': item['name'], 'arguments': item['arguments']}
      events = [self._event('response.function_call_arguments.done', **place, **done)]
    else:
      (part,) = item['content']
      place['content_index'] = 0
      is_text = kind == 'message'
      more = {'logprobs': part['logprobs']} if is_text else {}
      name = 'output_text' if is_text else 'reasoning_text'
      events = [
        self._event(f'response.{name}.done', **place, text=part['text'], **more),
        self._event('response.content_part.done', **place, part=part),
      ]
    if kind == 'reasoning' and self.request.encrypts_thoughts:
      item['encrypted_content'] = encrypt_thought(item['content'][0]['text'])
    item['status'] = status
    index = len(self._items)
    events.append(
      self._event('response.output_item.done', output_index=index, item=item)
    )
    self._items.append(item)
    self._open = None
    return events

  # ---- items

  def _thought_item(self, thought: str, status: str) -> JsonObject:
    item = {
      'id': f'rs_{self._key}',
      'type': 'reasoning',
      'status': status,
      'summary': [],
      'content': [{'type': 'reasoning_text', 'text': thought}],
    }
    if thought and self.request.encrypts_thoughts:
      item['encrypted_content'] = encrypt_thought(thought)
    return item

  def _text_item(
    self, text: str, status: str, logprobs: Sequence[object] = ()
  ) -> JsonObject:
    part = {'type': 'output_text', 'text': text, 'annotations': []}
    return {
      'id': f'msg_{self._key}',
      'type': 'message',
      'role': 'assistant',
      'status': status,
      'content': [part | {'logprobs': list(logprobs)}],
    }

  def _call_item(self, index: int, status: str, call: JsonObject) -> JsonObject:
    return {
      'id': f'fc_{self._key}_{index}',
      'type': 'function_call',
      'status': status,
      'call_id': call['id'],
      **call['function'],
    }

  def _logprobs(self, result: ChoiceResult) -> list[JsonObject]:
    if not self.request.logprobs:
      return []
    return format_logprobs(result.completion, self.decode)

  def _response(
    self, items: list[JsonObject], result: ChoiceResult | None
  ) -> JsonObject:
    """Formats the response as far as there is one."""
    request = self.request
    body: JsonObject = {
      'id': self._name,
      'object': 'response',
      'created_at': self.created,
      'model': self.model,
      'status': 'in_progress' if result is None else _status(result),
      'error': None,
      'incomplete_details': None,
      'output': list(items),
      **dict.fromkeys(ECHOED_FIELDS),
      **{'tool_choice': 'auto', 'tools': [], 'metadata': {}, 'truncation': 'disabled'},
      **{'background': False, 'parallel_tool_calls': True, 'usage': None},
      **request.echo,
    }
    if result is None:
      return body
    if body['status'] == 'incomplete':
      body['incomplete_details'] = {'reason': 'max_output_tokens'}
    num_prompt, num_reply = len(result.prompt), len(result.completion.tokens)
    body['usage'] = {
      'input_tokens': num_prompt,
      'input_tokens_details': {'cached_tokens': 0, 'cache_write_tokens': 0},
      'output_tokens': num_reply,
      'output_tokens_details': {'reasoning_tokens': result.num_thought_tokens},
      'total_tokens': num_prompt + num_reply,
    }
    if request.return_token_ids:
      body['prompt_token_ids'] = result.prompt
      body['token_ids'] = result.completion.tokens.tolist()
    return body


def _status(result: ChoiceResult) -> str:
  return 'incomplete' if result.finish_reason == 'length' else 'completed'


def _numbered(result: ChoiceResult) -> list[tuple[int, JsonObject]]:
  return list(enumerate(result.tool_calls))
