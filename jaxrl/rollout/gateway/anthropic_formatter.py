"""AnthropicFormatter writes a result as Anthropic's messages, or as their events."""

import json
from collections.abc import Sequence
from typing import ClassVar

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.anthropic_requests import error_body
from jaxrl.rollout.gateway.choice_runner import (
  ChoiceResult,
  ChoiceRunner,
  ReplyDelta,
  tool_input,
)
from jaxrl.rollout.gateway.formatter_base import Event, FormatterBase
from jaxrl.rollout.gateway.generation_request import ApiError

_STOP_REASONS = {'length': 'max_tokens', 'tool_calls': 'tool_use'}


class AnthropicFormatter(FormatterBase):
  """Formats a result as a message, or as the events of one."""

  heartbeat: ClassVar[Event | None] = {'type': 'ping'}
  names_events = True

  def __post_init__(self):
    """Prepares for a stream's first block."""
    self._key = ''
    self._num_blocks = 0
    self._open = ''  # the type of the block that is being written

  def full_response(self, results: Sequence[ChoiceResult]) -> JsonObject:
    """Formats the body of a response that is not streamed."""
    (result,) = results
    blocks: list[JsonObject] = []
    if result.thought:
      signature = result.name.removeprefix('msg_')
      thought = {'type': 'thinking', 'thinking': result.thought}
      blocks.append(thought | {'signature': signature})
    if result.text:
      blocks.append({'type': 'text', 'text': result.text})
    for call in result.tool_calls:
      blocks.append(_call_block(call) | {'input': tool_input(call)})
    usage = _usage(len(result.prompt), result)
    body = self._message(result.name, blocks, usage) | _stop_fields(result)
    if self.request.return_token_ids:
      body['prompt_token_ids'] = result.prompt
      body['token_ids'] = result.completion.tokens.tolist()
    return body

  # ---- streams

  def opening_events(self, choices: Sequence[ChoiceRunner]) -> list[Event]:
    """Returns the events that open a stream."""
    (choice,) = choices
    self._key = choice.key
    usage = _usage(choice.num_prompt_tokens, None)
    message = self._message(choice.name, [], usage)
    return [{'type': 'message_start', 'message': message}, {'type': 'ping'}]

  def delta_events(self, index: int, delta: ReplyDelta) -> list[Event]:
    """Returns the events of what is new."""
    events = []
    if delta.thought:
      empty = {'type': 'thinking', 'thinking': '', 'signature': ''}
      events += self._begin('thinking', empty)
      new = {'type': 'thinking_delta', 'thinking': delta.thought}
      events.append(self._delta(new))
    if delta.text:
      events += self._begin('text', {'type': 'text', 'text': ''})
      events.append(self._delta({'type': 'text_delta', 'text': delta.text}))
    return events

  def result_events(self, index: int, result: ChoiceResult) -> list[Event]:
    """Returns the events that end a reply, with its tool calls."""
    events = []
    for call in result.tool_calls:
      block = _call_block(call)
      events += self._begin(block['id'], block | {'input': {}})
      text = json.dumps(tool_input(call), ensure_ascii=False)
      events.append(self._delta({'type': 'input_json_delta', 'partial_json': text}))
    events += self._end()
    usage = _usage(len(result.prompt), result)
    delta = _stop_fields(result)
    return [*events, {'type': 'message_delta', 'delta': delta, 'usage': usage}]

  def closing_events(self, results: Sequence[ChoiceResult]) -> list[Event]:
    """Returns the events that end a stream."""
    return [{'type': 'message_stop'}]

  def error_events(self, error: ApiError) -> list[Event]:
    """Returns the events of an error in a stream."""
    return [error_body(error)]

  def _begin(self, name: str, block: JsonObject) -> list[Event]:
    """Opens a block, unless it is open, and closes the one before it."""
    if self._open == name:
      return []
    events = self._end()
    self._open = name
    start = {'type': 'content_block_start', 'index': self._num_blocks}
    return [*events, {**start, 'content_block': block}]

  def _delta(self, delta: JsonObject) -> Event:
    return {'type': 'content_block_delta', 'index': self._num_blocks, 'delta': delta}

  def _end(self) -> list[Event]:
    """Closes the open block, if there is one."""
    if not self._open:
      return []
    events = []
    if self._open == 'thinking':
      signature = {'type': 'signature_delta', 'signature': self._key}
      events.append(self._delta(signature))
    events.append({'type': 'content_block_stop', 'index': self._num_blocks})
    self._open = ''
    self._num_blocks += 1
    return events

  def _message(
    self, name: str, blocks: list[JsonObject], usage: JsonObject
  ) -> JsonObject:
    return {
      'id': name,
      'type': 'message',
      'role': 'assistant',
      'model': self.model,
      'content': blocks,
      'stop_reason': None,
      'stop_sequence': None,
      'usage': usage,
    }


def _call_block(call: JsonObject) -> JsonObject:
  return {'type': 'tool_use', 'id': call['id'], 'name': call['function']['name']}


def _stop_fields(result: ChoiceResult) -> JsonObject:
  """Returns why a reply ended."""
  reason = _STOP_REASONS.get(result.finish_reason, 'end_turn')
  is_string = reason == 'end_turn' and bool(result.stop_string)
  return {
    'stop_reason': 'stop_sequence' if is_string else reason,
    'stop_sequence': result.stop_string if is_string else None,
  }


def _usage(num_prompt_tokens: int, result: ChoiceResult | None) -> JsonObject:
  """Counts the tokens, of which a reply that only begins has none."""
  usage: JsonObject = {
    'input_tokens': num_prompt_tokens,
    'output_tokens': 0 if result is None else len(result.completion.tokens),
    'cache_creation_input_tokens': 0,
    'cache_read_input_tokens': 0,
  }
  if result is not None:
    details = {'thinking_tokens': result.num_thought_tokens}
    usage['output_tokens_details'] = details
  return usage
