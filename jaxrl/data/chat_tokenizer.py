"""Chat tokenization turns messages into token ids and never re-tokenizes model output.

The history of an episode only grows: first the ids of the opening prompt, then
alternately the ids that the engine returned and the ids of the new messages alone.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.types import Message

# Characters for each token that is needed; an English word has four or five. Encoding
# takes some 400 bytes of memory per character, so that a text is not encoded far beyond
# what is needed.
CHARS_PER_TOKEN = 8
_SPARE_TOKENS = 64  # at the end of a cut text, where the cut may change the tokens
_REPLY_MARK = '\x02reply\x03'  # stands for the reply whose ids already exist


class ChatTokenizer:
  """Applies a tokenizer's chat template incrementally.

  Args:
    tokenizer: A Hugging Face tokenizer with a chat template and an eos token.
    template_options: Options passed to the template, such as `enable_thinking=False`.
    image_processor: Says how many tokens an image takes, as `PatchProcessor` does; by
      default what `load_tokenizer` found beside the tokenizer, which is None for a
      model that sees no images.

  Attributes:
    tokenizer: The tokenizer.
    eos_id: The id of the token that ends a turn.
  """

  def __init__(
    self,
    tokenizer: Any,
    *,
    template_options: dict[str, Any] | None = None,
    image_processor: Any = None,
  ):
    if tokenizer.chat_template is None:
      raise ValueError(
        'the tokenizer has no chat template; set tokenizer.chat_template'
      )
    if tokenizer.eos_token_id is None:
      raise ValueError(
        'the tokenizer has no eos token, which ends replies: set tokenizer.eos_token'
      )
    self.tokenizer = tokenizer
    self.eos_id: int = tokenizer.eos_token_id
    self._options = dict(template_options or {})
    self._images: Any = image_processor or getattr(tokenizer, 'image_processor', None)
    self._placeholder = ''  # the text of the token that stands for a piece of an image
    if self._images is not None:
      ids = [self._images.image_token_id]
      self._placeholder = tokenizer.convert_ids_to_tokens(ids)[0]
    self._broken_placeholder = _broken(self._placeholder)
    self._prefix = [
      {'role': 'user', 'content': 'x'},
      {'role': 'assistant', 'content': _REPLY_MARK},
    ]

  def with_options(self, **options: Any) -> 'ChatTokenizer':
    """Returns a chat tokenizer with additional template options.

    Args:
      **options: Template options, such as `tools=[…]`.

    Returns:
      The new chat tokenizer.
    """
    return ChatTokenizer(
      self.tokenizer,
      template_options=self._options | options,
      image_processor=self._images,
    )

  def with_tools(self, tools: Sequence[dict[str, Any]]) -> 'ChatTokenizer':
    """Returns a chat tokenizer whose first prompt announces `tools`.

    Args:
      tools: JSON schemas in the form of OpenAI's API.

    Returns:
      The new chat tokenizer.

    Raises:
      ValueError: If the chat template ignores tools, so that the model would never see
        them.
    """
    with_tools, question = self.with_options(tools=list(tools)), self._prefix[:1]
    if with_tools._render(question, prompt=True) == self._render(question, prompt=True):
      raise ValueError(
        "the tokenizer's chat template does not render tools: use a model "
        'whose template reads `tools`, or set tokenizer.chat_template'
      )
    return with_tools

  @functools.cached_property
  def generation_prompt(self) -> str:
    """What the template writes before a reply, such as `<|im_start|>assistant`."""
    question = self._prefix[:1]
    texts = [self._render(question, prompt=prompt) for prompt in (False, True)]
    return texts[1][len(os.path.commonprefix(texts)) :]

  def _render(self, messages: Sequence[Message], prompt: bool) -> str:
    options = self._options
    if self._placeholder:
      messages = self._without_placeholders(list(messages))
      options = self._without_placeholders(options)
    try:
      return self.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **options
      )
    except Exception as error:  # a template is a program of its own
      roles = ', '.join(str(message.get('role')) for message in messages)
      raise ValueError(
        f'the chat template refuses messages of the roles {roles}: {error}'
      ) from error

  def _without_placeholders(self, value: Any) -> Any:
    """Breaks up the placeholder in every text of a value, so that it is no token.

    `<|image_pad|>` loses its bars, `<image>` gets a space after its first character.
    """
    if isinstance(value, str):
      return value.replace(self._placeholder, self._broken_placeholder)
    if isinstance(value, list | tuple):
      return [self._without_placeholders(item) for item in value]
    if isinstance(value, Mapping):  # images are none
      return {
        self._without_placeholders(key): self._without_placeholders(item)
        for key, item in value.items()
      }
    return value

  def _expand(self, text: str, messages: Sequence[Message]) -> str:
    """Writes the placeholder once for each token of the images in a rendered text."""
    if not has_images(messages):
      return text
    from jaxrl.data.images import find_images  # text alone needs none

    if self._images is None:
      raise ValueError(
        'a message has an image, and the model sees none: use one with a vision tower, '
        'such as of family qwen3_vl'
      )
    images = list(find_images(messages))
    first, *others = text.split(self._placeholder)
    if len(images) != len(others):
      raise ValueError(
        f'the chat template renders {len(others)} of {len(images)} images, as '
        f'{self._placeholder}'
      )
    runs = [self._placeholder * self._images.num_tokens(image) for image in images]
    return first + ''.join(map(''.join, zip(runs, others, strict=True)))

  def image_ends(
    self, tokens: Sequence[int] | np.ndarray, messages: Sequence[Message]
  ) -> list[int]:
    """Finds where the images of messages end in their ids.

    Args:
      tokens: What one of the methods returned for `messages`, perhaps without its end.
      messages: The messages.

    Returns:
      For each image that is there as a whole, the index after its last token.
    """
    if not has_images(messages):
      return []
    from jaxrl.data.images import find_images

    sizes = [self._images.num_tokens(image) for image in find_images(messages)]
    places = np.flatnonzero(np.asarray(tokens) == self._images.image_token_id)
    return [int(places[n - 1]) + 1 for n in np.cumsum(sizes) if n <= len(places)]

  def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
    """Returns the ids of `text` without adding special tokens.

    Args:
      text: The text to encode.
      max_tokens: How many ids are needed. A text that is much longer is not encoded to
        its end, and has exactly this many; any other has all of its ids.

    Returns:
      The token ids.
    """
    if max_tokens is not None:
      num_needed = max_tokens + _SPARE_TOKENS
      size = CHARS_PER_TOKEN * num_needed
      while size < len(text):
        tokens = self.tokenizer.encode(text[:size], add_special_tokens=False)
        if len(tokens) >= num_needed:
          return tokens[:max_tokens]
        size *= 4  # tokens of many characters, such as spaces
    return self.tokenizer.encode(text, add_special_tokens=False)

  def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    """Decodes a reply, leaving out special tokens such as its end-of-turn token.

    Args:
      tokens: Token ids `[T]`.

    Returns:
      The text.
    """
    ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
    return self.tokenizer.decode(ids, skip_special_tokens=True)

  def encode_prompt(
    self, messages: Sequence[Message], *, max_tokens: int | None = None
  ) -> list[int]:
    """Encodes the opening messages and the header that asks for a reply.

    Args:
      messages: The messages before the first reply.
      max_tokens: How many ids are needed; see `encode`.

    Returns:
      The token ids.
    """
    text = self._expand(self._render(messages, prompt=True), messages)
    return self.encode(text, max_tokens=max_tokens)

  def encode_conversation(self, messages: Sequence[Message]) -> list[int]:
    """Encodes a complete conversation as the template renders it.

    Args:
      messages: All messages of the conversation.

    Returns:
      The token ids.
    """
    return self.encode(self._expand(self._render(messages, prompt=False), messages))

  def encode_next_prompt(
    self,
    messages: Sequence[Message],
    *,
    ended: bool,
    prompt: bool = True,
    max_tokens: int | None = None,
  ) -> list[int]:
    """Encodes only `messages`, to be appended to a history that ends in a reply.

    Args:
      messages: The new messages.
      ended: Whether the reply's ids include its end-of-turn token. If the reply was cut
        short, that token comes first.
      prompt: Whether to append the header that asks for another reply.
      max_tokens: How many ids are needed; see `encode`.

    Returns:
      The token ids to append.
    """
    text = self._render([*self._prefix, *messages], prompt=prompt)
    tail = text.partition(_REPLY_MARK)[2]  # the new messages may contain the mark
    end = self.tokenizer.eos_token
    if ended:
      tail = tail.removeprefix(end)
    elif not tail.startswith(end):
      tail = end + tail
    return self.encode(self._expand(tail, messages), max_tokens=max_tokens)

  def encode_with_mask(
    self, messages: Sequence[Message]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a written conversation as a rollout would have produced it.

    A message whose 'train' is False is left out of the mask. Messages after the last
    reply are left out altogether.

    Args:
      messages: The conversation, beginning with a message that is not a reply.

    Returns:
      A tuple of tokens `[T]` int32 and a mask `[T]` bool, which is True on the
      assistant's words and on the token that ends each of its turns.

    Raises:
      ValueError: If the conversation begins with a reply or has two replies in a row.
    """
    opening, rest = _split(messages)
    if rest and not opening:
      raise ValueError(
        'the conversation begins with an assistant message: put a user message '
        'before it'
      )
    tokens = self.encode_prompt(opening)
    mask = [False] * len(tokens)
    while rest:
      reply = [*self.encode(self._reply(rest[0])), self.eos_id]
      tokens += reply
      mask += [bool(rest[0].get('train', True))] * len(reply)
      others, rest = _split(rest[1:])
      if others and rest:
        new_ids = self.encode_next_prompt(others, ended=True)
        tokens += new_ids
        mask += [False] * len(new_ids)
      elif rest:
        raise ValueError('two assistant messages follow each other: join them')
    return np.asarray(tokens, np.int32), np.asarray(mask, bool)

  def _reply(self, message: Message) -> str:
    """Returns a reply's content, or its tool calls as the template renders them."""
    if not message.get('tool_calls'):
      return message['content']
    question = self._prefix[:1]
    header = self._render(question, prompt=True)
    rendered = self._render([*question, message], prompt=False)
    if not rendered.startswith(header):
      raise ValueError(
        'the chat template renders tool calls with another header than texts'
      )
    return rendered.removeprefix(header).partition(self.tokenizer.eos_token)[0]

  def encode_document(self, text: str) -> np.ndarray:
    """Encodes a text as in pretraining, between the tokenizer's start and end tokens.

    Args:
      text: The document.

    Returns:
      Token ids `[T]` int32.
    """
    ids = self.tokenizer.encode(text)
    return np.asarray(
      [*ids, self.eos_id] if ids[-1:] != [self.eos_id] else ids, np.int32
    )


def _broken(placeholder: str) -> str:
  """Returns a text that reads like a placeholder and does not contain it."""
  without_bars = placeholder.replace('|', '')
  if without_bars != placeholder:
    return without_bars
  first, rest = placeholder[:1], placeholder[1:]
  return f'{first} {rest}' if rest else ''


def has_images(messages: Sequence[Message]) -> bool:
  """Returns whether any message has an image as a part of its content.

  Args:
    messages: The messages.
  """
  return any(
    isinstance(part, Mapping) and part.get('type') == 'image'
    for message in messages
    if isinstance(content := message.get('content'), list)
    for part in content
  )


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
  """Splits messages before the first assistant message."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      return list(messages[:i]), list(messages[i:])
  return list(messages), []
