"""Chat tokenization turns messages into token ids and never re-tokenizes model output.

The history of an episode only grows: first the ids of the opening prompt, then
alternately the ids that the engine returned and the ids of the new messages alone.
"""

import copy
import dataclasses
import datetime
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.data.model_text.chat_template import ChatTemplate, has_images
from jaxrl.data.model_text.render_checks import check_reply, check_results
from jaxrl.data.model_text.turn_end import (
  MARK,
  QUESTION,
  AddedTokens,
  TurnEnd,
  describe_tokens,
  find_turn_end,
)
from jaxrl.data.tool_formats import (
  UNKNOWN,
  ReplyParts,
  ThoughtFormat,
  ToolFormat,
  detect_thought_format,
  detect_tool_format,
  read_arguments,
  split_reply,
)
from jaxrl.data.tool_formats.tool_format import Tools
from jaxrl.options import OptionValues
from jaxrl.types import Message

# Characters for each token that is needed; an English word has four or five. Encoding
# takes some 400 bytes of memory per character, so that a text is not encoded far beyond
# what is needed.
CHARS_PER_TOKEN = 8
_SPARE_TOKENS = 64  # at the end of a cut text, where the cut may change the tokens
_REPLY: Message = {'role': 'assistant', 'content': MARK}  # whose ids already exist
# After these a text is encoded whose beginning would share a token with what stands
# before it. The last is hardly ever part of a token of several characters.
_CONTEXT_ENDS = ('', '\n', '\x02')
_NUM_RENDERINGS = 256
_OPENED = re.compile(r'<')  # where an opened thought or channel begins


@dataclasses.dataclass(frozen=True)
class ChatOptions:
  """Says what of a checkpoint's way of writing conversations is changed.

  Attributes:
    template_options: Options passed to the template, such as `enable_thinking=False`.
    chat_template: A template in place of the tokenizer's own; '' keeps that.
    stop_token_ids: The tokens that end a reply, in place of those that are found; ()
      keeps those.
    date: The day that a template takes for today; None for the clock's.
  """

  template_options: OptionValues = dataclasses.field(default_factory=dict)
  chat_template: str = ''
  stop_token_ids: tuple[int, ...] = ()
  date: datetime.date | None = None


class ChatTokenizer:
  """Knows how a model's conversations are written, as tokens and as text.

  It is made from the checkpoint's own tokenizer, template and generation config, and
  everything else asks it: how a prompt is rendered, which tokens end a reply, and how
  the text after a reply is encoded.

  Args:
    tokenizer: A Hugging Face tokenizer with a chat template.
    options: What is changed of it.
    template_options: Further options passed to the template.
    image_processor: Says how many tokens an image takes, as `PatchProcessor` does; by
      default what `load_tokenizer` found beside the tokenizer, which is None for a
      model that sees no images.

  Attributes:
    tokenizer: The tokenizer.
    stop_token_ids: The tokens that end a reply.
    turn_end: How a turn ends.

  Raises:
    ValueError: If there is no chat template, or nothing would end a reply.
    ChatOptionError: If an option does not suit the checkpoint.
  """

  def __init__(
    self,
    tokenizer: Any,
    options: ChatOptions | None = None,
    *,
    template_options: OptionValues | None = None,
    image_processor: Any = None,
  ):
    options = options or ChatOptions()
    self.tokenizer = tokenizer
    self._images: Any = image_processor or getattr(tokenizer, 'image_processor', None)
    self._template = ChatTemplate(
      tokenizer,
      options.chat_template,
      {**options.template_options, **(template_options or {})},
      options.date,
      self._images,
    )
    self._added = AddedTokens(tokenizer)
    self._formats: dict[str, Any] = {}  # shared by copies, found when first asked for
    self._generation_prompt: str | None = None  # until it is asked for
    self._renderings: dict[str, str] = {}  # of messages that hardly differ, by JSON
    self.turn_end: TurnEnd = find_turn_end(
      tokenizer, self._added, self._template.render, options.stop_token_ids
    )

  @property
  def stop_token_ids(self) -> tuple[int, ...]:
    """Returns the tokens that end a reply."""
    return self.turn_end.stop_ids

  @property
  def end_id(self) -> int:
    """Returns the token that ends a reply in the template, or else in the tokenizer."""
    return self.turn_end.closing_id

  @property
  def tool_format(self) -> ToolFormat | None:
    """Returns the template's format of tool calls; None if it is not a known one."""
    return self._find_format('calls', detect_tool_format)

  @property
  def thought_format(self) -> ThoughtFormat | None:
    """Returns the template's format of thoughts; None if it has none that is known."""
    return self._find_format('thoughts', detect_thought_format)

  @property
  def format_names(self) -> dict[str, str]:
    """Returns the names of `tool_format` and `thought_format`, as far as known."""
    found = {'tool_format': self.tool_format, 'thought_format': self.thought_format}
    return {key: one.name for key, one in found.items() if one is not None}

  def _find_format(self, name: str, detect: Callable[..., object]) -> Any:
    if name not in self._formats:
      template = self._template
      self._formats[name] = detect(template.source, template.render)
    return self._formats[name]

  def parse_reply(self, text: str, tools: Tools = ()) -> ReplyParts:
    """Splits a reply into its thought, its text and its tool calls.

    What looks like a call within a thought is none.

    Args:
      text: The reply, as `decode` returns it.
      tools: JSON schemas of the tools, which restore types in some formats.

    Returns:
      The parts; calls that cannot be read say why.
    """
    return split_reply(
      text,
      tools,
      thought_format=self.thought_format,
      tool_format=self.tool_format or UNKNOWN,
      opened=self.opens_thought,
    )

  @property
  def opens_thought(self) -> bool:
    """Returns whether a prompt ends inside of a thought, which replies go on with."""
    thoughts = self.thought_format
    return thoughts is not None and thoughts.is_opened_by(self.generation_prompt)

  def describe(self) -> str:
    """Returns a line for the user: what ends a reply, and how tools are called."""
    stops = describe_tokens(self.tokenizer, self.stop_token_ids)
    known = self.tool_format
    calls = f'as {known.name}' if known else 'in no known way: the template writes none'
    today = f'; today is {self._template.date}' if self._template.date else ''
    return f'end at {stops}; tools are called {calls}{today}'

  def ends_turn(self, tokens: Sequence[int] | np.ndarray) -> bool:
    """Returns whether a reply has ended, rather than having been cut short.

    Args:
      tokens: The reply's ids.
    """
    return len(tokens) > 0 and int(tokens[-1]) in self.turn_end.stop_ids

  def with_options(self, **options: object) -> 'ChatTokenizer':
    """Returns a chat tokenizer with additional template options.

    Args:
      **options: Template options, such as `tools=[…]`.

    Returns:
      The new chat tokenizer.

    Raises:
      ValueError: If the template has no such option.
    """
    changed = copy.copy(self)
    changed._template = self._template.with_options(options)
    changed._generation_prompt = None
    changed._renderings = {}
    return changed

  def opening(self) -> str:
    """Returns a conversation's beginning, which tools and template options change."""
    return self._template.render([QUESTION], prompt=False)

  @property
  def generation_prompt(self) -> str:
    """Returns the template's text before a reply, such as `<|im_start|>assistant`."""
    if self._generation_prompt is None:
      texts = [self.opening(), self._template.render([QUESTION], prompt=True)]
      self._generation_prompt = texts[1][len(os.path.commonprefix(texts)) :]
    return self._generation_prompt

  def with_tools(self, tools: Tools) -> 'ChatTokenizer':
    """Returns a chat tokenizer whose first prompt announces `tools`.

    Args:
      tools: JSON schemas in the form of OpenAI's API.

    Returns:
      The new chat tokenizer.

    Raises:
      ValueError: If the chat template ignores tools, so that the model would never see
        them.
    """
    with_tools = self.with_options(tools=list(tools))
    if with_tools.opening() == self.opening():
      raise ValueError(
        'the chat template does not render tools, so that the model would not see '
        'them: use a model whose template reads `tools`, or another chat_template'
      )
    return with_tools

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
    """Decodes a reply as the model wrote it, without the token that ends it.

    Other special tokens are kept: those of thoughts and tool calls mean something.

    Args:
      tokens: Token ids `[T]`.

    Returns:
      The text.
    """
    ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
    return self.decode_all(ids[:-1] if self.ends_turn(ids) else ids)

  def decode_all(self, tokens: Sequence[int]) -> str:
    """Decodes ids with every special token, and every space at their beginning.

    Args:
      tokens: Token ids `[T]`.

    Returns:
      The text.
    """
    # After this token, decoders that drop the first space keep it.
    anchor = self.end_id
    text = self._decode([anchor, *tokens])
    first = self._decode([anchor])
    return text[len(first) :] if text.startswith(first) else self._decode(list(tokens))

  def _decode(self, ids: list[int]) -> str:
    return self.tokenizer.decode(
      ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )

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
    text = self._template.expand(self._template.render(messages, prompt=True), messages)
    return self.encode(text, max_tokens=max_tokens)

  def encode_conversation(self, messages: Sequence[Message]) -> list[int]:
    """Encodes a complete conversation as the template renders it.

    Args:
      messages: All messages of the conversation.

    Returns:
      The token ids.
    """
    text = self._template.render(messages, prompt=False)
    return self.encode(self._template.expand(text, messages))

  def encode_next_prompt(
    self,
    messages: Sequence[Message],
    *,
    reply: Sequence[int] | np.ndarray,
    prompt: bool = True,
    max_tokens: int | None = None,
  ) -> list[int]:
    """Encodes only `messages`, to be appended to a history that ends in a reply.

    Args:
      messages: The new messages.
      reply: The reply's ids, or the last of them. If it was cut short, the token that
        ends it comes first.
      prompt: Whether to append the header that asks for another reply.
      max_tokens: How many ids are needed; see `encode`.

    Returns:
      The token ids to append.
    """
    before, text = self._after_reply(self._tail(messages, prompt), reply)
    return self._encode_after(before, self._template.expand(text, messages), max_tokens)

  def _tail(self, messages: Sequence[Message], prompt: bool) -> str:
    """Renders what follows the text of a reply."""
    tail = self._render_tail(messages, prompt)
    check_results(
      messages, tail, lambda others: self._once(self._render_tail, others, prompt)
    )
    return tail

  def _once(self, render: Callable[..., str], *args: object) -> str:
    """Renders messages, unless the same have been rendered before.

    Messages whose texts are marks are alike in each turn of an episode.
    """
    try:
      key = json.dumps([render.__name__, *args])
    except (TypeError, ValueError):  # images
      return render(*args)
    if (text := self._renderings.get(key)) is None:
      if len(self._renderings) >= _NUM_RENDERINGS:
        self._renderings.clear()
      text = self._renderings[key] = render(*args)
    return text

  def _render_tail(self, messages: Sequence[Message], prompt: bool) -> str:
    if messages and messages[0]['role'] == 'tool':
      tail = self._tail_of_call(messages, prompt)
      if tail is not None:
        return tail
    text = self._template.render([QUESTION, _REPLY, *messages], prompt=prompt)
    return text.partition(MARK)[2]  # the new messages may contain the mark

  def _tail_of_call(self, messages: Sequence[Message], prompt: bool) -> str | None:
    """Renders what follows a tool call, as some templates write only after one."""
    first = messages[0]
    function = {'name': str(first.get('name') or 'call'), 'arguments': {'x': 1}}
    call_id = str(first.get('tool_call_id') or 'abcdefghi')  # as long as Mistral's
    call = {'id': call_id, 'type': 'function', 'function': function}
    reply = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
    try:
      before = self._template.render([QUESTION, reply], prompt=False)
      whole = self._template.render([QUESTION, reply, *messages], prompt=prompt)
    except ValueError:
      return None
    end = self._added.find_last_end(before, self.stop_token_ids)
    if function['name'] not in before or end is None:
      return None
    start = end.start()
    return whole[start:] if whole[:start] == before[:start] else None

  def _after_reply(
    self, tail: str, reply: Sequence[int] | np.ndarray
  ) -> tuple[str, str]:
    """Splits what follows a reply's text: what its ids have already, and what is new.

    Returns:
      A text that ends with what is already there, and the text that is to be encoded.
    """
    found, end = self._added.find_first(tail), self.turn_end
    last = int(reply[-1]) if self.ends_turn(reply) else None
    stop = '' if last is None else self.tokenizer.convert_ids_to_tokens(last)
    if found is None:  # the template writes plain text after a reply
      return (stop, tail) if stop else ('', self._anchor + tail)
    is_end = tail.startswith(end.message_end) if end.message_end else False
    is_end |= end.is_written and self._added.ids[found[0]] in end.stop_ids
    if last is not None and (is_end or self._added.ids[found[0]] == last):
      return found[0], tail[found.end() :]
    if last is None and found.start():
      return f'{self._anchor}x', tail  # after any word
    return stop, tail

  @property
  def _anchor(self) -> str:
    """Returns the token that ends a turn; the text after it is encoded separately."""
    return self.tokenizer.convert_ids_to_tokens(self.end_id)

  def _encode_after(
    self, before: str, text: str, max_tokens: int | None = None
  ) -> list[int]:
    """Encodes a text as it is encoded after another one.

    Many tokenizers encode the beginning of a text otherwise than the same letters
    within it. Where the two texts would share a token, the second is encoded as after
    a token or a line that ends before it.

    Args:
      before: What stands before the text.
      text: The text.
      max_tokens: How many ids are needed; see `encode`.

    Returns:
      The ids of `text`, which follow those of `before`.
    """
    before = before[self._added.last_start(before) :]
    for context in (before, *(self._anchor + end for end in _CONTEXT_ENDS)):
      prefix = self.encode(context)
      needed = None if max_tokens is None else max_tokens + len(prefix)
      ids = self.encode(context + text, max_tokens=needed)
      if ids[: len(prefix)] != prefix:
        continue
      if context == before or self._decode(ids) == self._decode(prefix) + text:
        return ids[len(prefix) :]
    return self.encode(text, max_tokens=max_tokens)

  def encode_with_mask(
    self, messages: Sequence[Message]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a written conversation as a rollout would have produced it.

    Each reply is written as the template writes the last one, with its thought and its
    tool calls. A message whose 'train' is False is left out of the mask. Messages after
    the last reply are left out altogether.

    Args:
      messages: The conversation, beginning with a message that is not a reply.

    Returns:
      A tuple of tokens `[T]` int32 and a mask `[T]` bool, which is True on the
      assistant's words and on the token that ends each of its turns.

    Raises:
      ValueError: If the conversation begins with a reply or has two replies in a row,
        or the template leaves out something that a reply has.
    """
    opening, rest = _split(messages)
    if rest and not opening:
      raise ValueError(
        'the conversation begins with an assistant message: put a user message '
        'before it'
      )
    tokens: list[int] = []
    mask: list[bool] = []
    text = self._template.render(opening, prompt=True)
    before, text = '', self._template.expand(text, opening)
    while rest:
      message = rest[0]
      others, rest = _split(rest[1:])
      if rest and not others:
        raise ValueError('two assistant messages follow each other: join them')
      tail = self._tail(others, prompt=True) if rest else ''
      unwritten, reply = self._reply(message, tail)
      text = text.removesuffix(unwritten)
      new_ids = self._encode_after(before, text)
      reply_ids = self._encode_after(text, reply)
      tokens += new_ids + reply_ids
      mask += [False] * len(new_ids)
      mask += [bool(message.get('train', True))] * len(reply_ids)
      before, text = self._after_reply(tail, reply_ids)
      text = self._template.expand(text, others)
    return np.asarray(tokens, np.int32), np.asarray(mask, bool)

  def _reply(self, message: Message, tail: str) -> tuple[str, str]:
    """Renders a reply as the template writes it.

    Args:
      message: The reply.
      tail: What the template writes after it; '' if nothing follows.

    Returns:
      The end of the prompt's header that the template does not write before this reply,
      such as an opened thought, and the reply up to the token that ends it.
    """
    header = self._template.render([QUESTION], prompt=True)
    whole = self._template.render([QUESTION, message], prompt=False)
    cut = len(os.path.commonprefix([header, whole]))
    if cut < len(header):
      opened = [m.start() for m in _OPENED.finditer(header) if m.start() <= cut]
      cut = opened[-1] if opened else 0
      if cut <= len(self._template.render([QUESTION], prompt=False)):
        raise ValueError(
          'the chat template writes this reply with another header than the one that '
          'asks for a reply'
        )
    written = whole[cut:]
    end = self._added.find_last_end(written, self.stop_token_ids)
    if end is not None:
      text = written[: end.end()]
    else:
      following = self._added.find_first(tail)
      is_stop = following and self._added.ids[following[0]] in self.stop_token_ids
      text = written + (
        following[0] if following and is_stop else self.turn_end.closing
      )
    check_reply(
      message,
      whole,
      lambda other: self._once(self._render_reply, other),
      lambda: self._reads_calls(message, text),
    )
    return header[cut:], text

  def _render_reply(self, message: Message) -> str:
    return self._template.render([QUESTION, message], prompt=False)

  def _reads_calls(self, message: Message, text: str) -> bool:
    """Returns whether parsing the text of a reply gives the message's tool calls."""
    functions = [call.get('function') or call for call in message['tool_calls']]
    calls = [
      {'name': one['name'], 'arguments': read_arguments(one.get('arguments'))}
      for one in functions
    ]
    return self.parse_reply(text).calls == calls

  def encode_document(self, text: str) -> np.ndarray:
    """Encodes a text as in pretraining, between the tokenizer's start and end tokens.

    Args:
      text: The document.

    Returns:
      Token ids `[T]` int32.
    """
    ids, end = self.tokenizer.encode(text), self.tokenizer.eos_token_id
    end = self.end_id if end is None else end
    return np.asarray([*ids, end] if ids[-1:] != [end] else ids, np.int32)


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
  """Splits messages before the first assistant message."""
  for i, message in enumerate(messages):
    if message['role'] == 'assistant':
      return list(messages[:i]), list(messages[i:])
  return list(messages), []
