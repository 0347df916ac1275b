"""ResponseFormatter writes results as the JSON of OpenAI's API, whole or in chunks."""

from collections.abc import Sequence

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway.choice_runner import ChoiceResult, ChoiceRunner, ReplyDelta
from jaxrl.rollout.gateway.formatter_base import Decode, FormatterBase
from jaxrl.rollout.gateway.generation_request import ApiError
from jaxrl.types import Completion


class ResponseFormatter(FormatterBase):
  """Formats results as chats or as plain completions."""

  last_line = 'data: [DONE]'

  def __post_init__(self):
    """Prepares what all chunks have."""
    self._is_chat = self.request.messages is not None
    self._head = {'created': self.created, 'model': self.model}
    self._names: list[str] = []  # of the choices

  def full_response(self, results: Sequence[ChoiceResult]) -> JsonObject:
    """Formats the body of a response that is not streamed."""
    choices = []
    for i, result in enumerate(results):
      choice = {'index': i, **self._final_fields(result)}
      if self._is_chat:
        choice['message'] = _format_message(result)
      else:
        choice['text'] = result.text
      choices.append(choice)
    body = {
      'id': results[0].name,
      'object': 'chat.completion' if self._is_chat else 'text_completion',
      **self._head,
      'choices': choices,
      'usage': token_usage(results),
    }
    if self.request.return_token_ids:
      body['prompt_token_ids'] = results[0].prompt
    return body

  def opening_events(self, choices: Sequence[ChoiceRunner]) -> list[JsonObject]:
    """Returns the chunks that open the choices; plain completions have none."""
    self._names = [choice.name for choice in choices]
    if not self._is_chat:
      return []
    delta = {'role': 'assistant', 'content': ''}
    return [
      self._chunk(name, {'index': i, 'delta': delta})
      for i, name in enumerate(self._names)
    ]

  def delta_events(self, index: int, delta: ReplyDelta) -> list[JsonObject]:
    """Returns the chunk of what is new."""
    fields: JsonObject = {'text': delta.text}
    if self._is_chat:
      fields = {'delta': {'content': delta.text}}
    return [self._chunk(self._names[index], {'index': index, **fields})]

  def result_events(self, index: int, result: ChoiceResult) -> list[JsonObject]:
    """Returns the chunk that ends a choice, with its tool calls."""
    fields: JsonObject = {'delta': {}} if self._is_chat else {'text': ''}
    if calls := result.tool_calls:
      indexed_calls = [{'index': i, **call} for i, call in enumerate(calls)]
      fields['delta'] = {'tool_calls': indexed_calls}
    choice = {'index': index, **fields, **self._final_fields(result)}
    return [self._chunk(result.name, choice)]

  def closing_events(self, results: Sequence[ChoiceResult]) -> list[JsonObject]:
    """Returns the chunk of token counts that ends a stream on request."""
    if not self.request.include_usage:
      return []
    return [{**self._chunk(results[0].name), 'usage': token_usage(results)}]

  def error_events(self, error: ApiError) -> list[JsonObject]:
    """Returns the chunk of an error in a stream."""
    return [error.body]

  def _chunk(self, name: str, *choices: JsonObject) -> JsonObject:
    kind = 'chat.completion.chunk' if self._is_chat else 'text_completion'
    defaults = {'finish_reason': None, 'logprobs': None}
    full_choices = [{**defaults, **choice} for choice in choices]
    return {'id': name, 'object': kind, **self._head, 'choices': full_choices}

  def _final_fields(self, result: ChoiceResult) -> JsonObject:
    fields: JsonObject = {'finish_reason': result.finish_reason, 'logprobs': None}
    if self.request.logprobs:
      fields['logprobs'] = self._format_logprobs(result)
    # The choices of a request share its id; each also has an id of its own.
    fields['completion_id'] = result.name
    if self.request.return_token_ids:
      fields['token_ids'] = result.completion.tokens.tolist()
    return fields

  def _format_logprobs(self, result: ChoiceResult) -> JsonObject:
    content = format_logprobs(result.completion, self.decode)
    if self._is_chat:
      return {'content': content, 'refusal': None}
    return {
      'tokens': [entry['token'] for entry in content],
      'token_logprobs': [entry['logprob'] for entry in content],
      'top_logprobs': None,
      'text_offset': None,
    }


def format_logprobs(completion: Completion, decode: Decode) -> list[JsonObject]:
  """Formats the log-probabilities of all tokens of a reply.

  Args:
    completion: The reply.
    decode: Turns token ids into text.

  Returns:
    For each token its text, log-probability and bytes, and the likeliest tokens in its
    place, if the engine was asked for them.
  """

  def entry(token: int, logprob: float) -> JsonObject:
    text = decode([token])
    return {'token': text, 'logprob': logprob, 'bytes': list(text.encode())}

  pairs = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
  top = completion.top_logprobs or [{}] * len(completion.tokens)
  return [
    entry(*pair) | {'top_logprobs': [entry(*one) for one in likeliest.items()]}
    for pair, likeliest in zip(pairs, top, strict=True)
  ]


def token_usage(results: Sequence[ChoiceResult]) -> dict[str, int]:
  """Counts the tokens of a request.

  Args:
    results: The result of each choice.

  Returns:
    The tokens of the prompt, counted once, of all choices, and their sum.
  """
  num_prompt = len(results[0].prompt)
  num_completion = sum(len(result.completion.tokens) for result in results)
  return {
    'prompt_tokens': num_prompt,
    'completion_tokens': num_completion,
    'total_tokens': num_prompt + num_completion,
  }


def _format_message(result: ChoiceResult) -> JsonObject:
  """Formats a reply; next to tool calls, OpenAI writes null for no text."""
  message = result.message
  is_empty = 'tool_calls' in message and not message['content']
  content = None if is_empty else message['content']
  return {**message, 'content': content, 'refusal': None}
