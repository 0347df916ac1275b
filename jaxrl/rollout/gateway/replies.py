"""Answers as the JSON that OpenAI's API has: whole, or piece by piece."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.rollout.gateway.choice import Answer
from jaxrl.rollout.gateway.requests import Ask


class Replies:
  """The answers to one request.

  text: ids → their text. created: seconds since the epoch.
  """

  def __init__(
    self, ask: Ask, text: Callable[[list[int]], str], model: str, created: int
  ):
    self._ask, self._text = ask, text
    self._chat = ask.messages is not None
    self._head = {'created': created, 'model': model}

  def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of a request that does not stream."""
    choices = []
    for i, answer in enumerate(answers):
      choice = {'index': i, **self._end(answer)}
      if self._chat:
        choice['message'] = _told(answer)
      else:
        choice['text'] = answer.message['content']
      choices.append(choice)
    body = {
      'id': answers[0].name,
      'object': 'chat.completion' if self._chat else 'text_completion',
      **self._head,
      'choices': choices,
      'usage': usage(answers),
    }
    if self._ask.ids:
      body['prompt_token_ids'] = answers[0].prompt
    return body

  def first(self, name: str, index: int) -> dict[str, Any] | None:
    """The chunk that opens a choice; there is none for bare completions."""
    delta = {'role': 'assistant', 'content': ''}
    return self._chunk(name, {'index': index, 'delta': delta}) if self._chat else None

  def piece(self, name: str, index: int, text: str) -> dict[str, Any]:
    """A chunk of text."""
    own = {'delta': {'content': text}} if self._chat else {'text': text}
    return self._chunk(name, {'index': index, **own})

  def last(self, answer: Answer, index: int) -> dict[str, Any]:
    """The chunk that ends a choice, with its tool calls."""
    own: dict[str, Any] = {'delta': {}} if self._chat else {'text': ''}
    if calls := answer.message.get('tool_calls'):
      own['delta'] = {'tool_calls': [{'index': i, **c} for i, c in enumerate(calls)]}
    return self._chunk(answer.name, {'index': index, **own, **self._end(answer)})

  def count(self, answers: Sequence[Answer]) -> dict[str, Any]:
    """The chunk that ends a stream, where it is asked for."""
    return {**self._chunk(answers[0].name), 'usage': usage(answers)}

  def _chunk(self, name: str, *choices: dict[str, Any]) -> dict[str, Any]:
    kind = 'chat.completion.chunk' if self._chat else 'text_completion'
    filled = [{'finish_reason': None, 'logprobs': None, **c} for c in choices]
    return {'id': name, 'object': kind, **self._head, 'choices': filled}

  def _end(self, answer: Answer) -> dict[str, Any]:
    end: dict[str, Any] = {'finish_reason': answer.finish, 'logprobs': None}
    if self._ask.logprobs:
      end['logprobs'] = self._logprobs(answer)
    # A request of several choices has an id, of which each choice here has its own.
    end['completion_id'] = answer.name
    if self._ask.ids:
      end['token_ids'] = answer.said.tokens.tolist()
    return end

  def _logprobs(self, answer: Answer) -> dict[str, Any]:
    texts = [self._text([token]) for token in answer.said.tokens.tolist()]
    values = answer.said.logprobs.tolist()
    if not self._chat:
      nothing = {'top_logprobs': None, 'text_offset': None}
      return {'tokens': texts, 'token_logprobs': values, **nothing}
    content = [
      {'token': t, 'logprob': v, 'bytes': list(t.encode()), 'top_logprobs': []}
      for t, v in zip(texts, values, strict=True)
    ]
    return {'content': content, 'refusal': None}


def usage(answers: Sequence[Answer]) -> dict[str, int]:
  """Tokens of the prompt, counted once, and of all choices."""
  prompt = len(answers[0].prompt)
  said = sum(len(answer.said.tokens) for answer in answers)
  return {
    'prompt_tokens': prompt,
    'completion_tokens': said,
    'total_tokens': prompt + said,
  }


def _told(answer: Answer) -> dict[str, Any]:
  """The message; beside tool calls OpenAI has null for no text."""
  message = answer.message
  empty = 'tool_calls' in message and not message['content']
  return {**message, 'content': None if empty else message['content'], 'refusal': None}
