"""ResponseFormatter writes results as the JSON of OpenAI's API, whole or in chunks."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.rollout.gateway.choice_runner import ChoiceResult
from jaxrl.rollout.gateway.openai_requests import GenerationRequest


class ResponseFormatter:
  """Formats the results of one request."""

  def __init__(
    self,
    request: GenerationRequest,
    decode: Callable[[list[int]], str],
    model: str,
    created: int,
  ):
    """Creates a formatter.

    Args:
      request: The request.
      decode: Turns token ids into text.
      model: The model's name.
      created: When the response was created, in seconds since the epoch.
    """
    self._request = request
    self._decode = decode
    self._is_chat = request.messages is not None
    self._head = {'created': created, 'model': model}

  def full_response(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
    """Formats the body of a response that is not streamed.

    Args:
      results: The result of each choice.

    Returns:
      The body.
    """
    choices = []
    for i, result in enumerate(results):
      choice = {'index': i, **self._final_fields(result)}
      if self._is_chat:
        choice['message'] = _format_message(result)
      else:
        choice['text'] = result.message['content']
      choices.append(choice)
    body = {
      'id': results[0].name,
      'object': 'chat.completion' if self._is_chat else 'text_completion',
      **self._head,
      'choices': choices,
      'usage': token_usage(results),
    }
    if self._request.return_token_ids:
      body['prompt_token_ids'] = results[0].prompt
    return body

  def first_chunk(self, name: str, index: int) -> dict[str, Any] | None:
    """Formats the chunk that opens a choice; plain completions have none.

    Args:
      name: The choice's id.
      index: The choice's index.

    Returns:
      The chunk, or None.
    """
    if not self._is_chat:
      return None
    delta = {'role': 'assistant', 'content': ''}
    return self._chunk(name, {'index': index, 'delta': delta})

  def text_chunk(self, name: str, index: int, text: str) -> dict[str, Any]:
    """Formats a chunk of text.

    Args:
      name: The choice's id.
      index: The choice's index.
      text: The new text.

    Returns:
      The chunk.
    """
    fields = {'delta': {'content': text}} if self._is_chat else {'text': text}
    return self._chunk(name, {'index': index, **fields})

  def last_chunk(self, result: ChoiceResult, index: int) -> dict[str, Any]:
    """Formats the chunk that ends a choice, with its tool calls.

    Args:
      result: The choice's result.
      index: The choice's index.

    Returns:
      The chunk.
    """
    fields: dict[str, Any] = {'delta': {}} if self._is_chat else {'text': ''}
    if calls := result.message.get('tool_calls'):
      indexed_calls = [{'index': i, **call} for i, call in enumerate(calls)]
      fields['delta'] = {'tool_calls': indexed_calls}
    choice = {'index': index, **fields, **self._final_fields(result)}
    return self._chunk(result.name, choice)

  def usage_chunk(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
    """Formats the chunk of token counts that ends a stream on request.

    Args:
      results: The result of each choice.

    Returns:
      The chunk.
    """
    return {**self._chunk(results[0].name), 'usage': token_usage(results)}

  def _chunk(self, name: str, *choices: dict[str, Any]) -> dict[str, Any]:
    kind = 'chat.completion.chunk' if self._is_chat else 'text_completion'
    defaults = {'finish_reason': None, 'logprobs': None}
    full_choices = [{**defaults, **choice} for choice in choices]
    return {'id': name, 'object': kind, **self._head, 'choices': full_choices}

  def _final_fields(self, result: ChoiceResult) -> dict[str, Any]:
    fields: dict[str, Any] = {'finish_reason': result.finish_reason, 'logprobs': None}
    if self._request.logprobs:
      fields['logprobs'] = self._format_logprobs(result)
    # The choices of a request share its id; each also has an id of its own.
    fields['completion_id'] = result.name
    if self._request.return_token_ids:
      fields['token_ids'] = result.completion.tokens.tolist()
    return fields

  def _format_logprobs(self, result: ChoiceResult) -> dict[str, Any]:
    texts = [self._decode([token]) for token in result.completion.tokens.tolist()]
    logprobs = result.completion.logprobs.tolist()
    if not self._is_chat:
      return {
        'tokens': texts,
        'token_logprobs': logprobs,
        'top_logprobs': None,
        'text_offset': None,
      }
    content = [
      {
        'token': text,
        'logprob': logprob,
        'bytes': list(text.encode()),
        'top_logprobs': [],
      }
      for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {'content': content, 'refusal': None}


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


def _format_message(result: ChoiceResult) -> dict[str, Any]:
  """Formats a reply; next to tool calls, OpenAI writes null for no text."""
  message = result.message
  is_empty = 'tool_calls' in message and not message['content']
  content = None if is_empty else message['content']
  return {**message, 'content': content, 'refusal': None}
