"""A chat template renders messages to text, with its options and places for images."""

import copy
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
from jinja2 import nodes

from jaxrl.data.model_text.turn_end import ChatOptionError, reply_with_calls
from jaxrl.options import Keywords, OptionValues, closest_match
from jaxrl.types import Message

# Arguments of `apply_chat_template` that are not options of a template.
_RESERVED = frozenset(
  'conversation messages documents chat_template add_generation_prompt '
  'continue_final_message tokenize padding truncation max_length return_tensors '
  'return_dict return_assistant_tokens_mask tokenizer_kwargs'.split()
)
# Where messages have a thought; templates differ in which one they read.
THOUGHT_KEYS = ('reasoning_content', 'reasoning', 'thinking')
# What every template is given or may call; none of it is an option of this one.
_GIVEN = frozenset(
  'messages tools documents add_generation_prompt continue_final_message '
  'bos_token eos_token unk_token sep_token pad_token cls_token mask_token '
  'additional_special_tokens raise_exception strftime_now range namespace dict'.split()
)
_QUESTION: Message = {'role': 'user', 'content': 'Which one?'}
_WRITTEN_PART = re.compile(r"""["']text["']:""")  # Python's or JSON's way
_GENERATION_TAG = re.compile(r'\{%-?\s*(?:end)?generation\s*-?%\}')


class _CallForm(NamedTuple):
  """What a template reads of a message with tool calls.

  Attributes:
    has_arguments_as_text: Whether arguments are JSON, rather than objects.
    has_no_content: Whether an empty content is None: DeepSeek V3's template writes
      calls only then.
  """

  has_arguments_as_text: bool
  has_no_content: bool


_CALL_FORMS = (
  _CallForm(False, False),
  _CallForm(True, False),
  _CallForm(False, True),
  _CallForm(True, True),
)


class ChatTemplate:
  """Renders messages by a tokenizer's template, or one in its place.

  Args:
    tokenizer: A Hugging Face tokenizer.
    source: The template; '' for the tokenizer's own.
    options: Options passed to the template.
    date: The day that the template takes for today; None for the clock's.
    image_processor: Says how many tokens an image takes; None for a model that sees
      none.

  Raises:
    ValueError: If there is no template, or it has no such option.
  """

  def __init__(
    self,
    tokenizer: Any,
    source: str,
    options: OptionValues,
    date: datetime.date | None = None,
    image_processor: Any = None,
  ):
    self._source = source or None  # None for the tokenizer's own
    if self._source is None and tokenizer.chat_template is None:
      raise ValueError(
        'the tokenizer has no chat template: name a file with one in the option '
        'chat_template, or set tokenizer.chat_template'
      )
    self._tokenizer = tokenizer
    # The day that it writes as today's; None if it writes none, or the clock's.
    self.date = date if 'strftime_now' in self.source else None
    # What a template calls for the time.
    self._clock: dict[str, Any] = {'strftime_now': date.strftime} if date else {}
    self._call_form: _CallForm | None = None  # until a call is rendered
    # Until a message is rendered.
    self._content_form: Callable[[Message], Message] | None = None
    self._images = image_processor
    self._placeholder = ''  # the text of the token that stands for a piece of an image
    if image_processor is not None:
      ids = [image_processor.image_token_id]
      self._placeholder = tokenizer.convert_ids_to_tokens(ids)[0]
    self._broken_placeholder = _broken(self._placeholder)
    self._options: Keywords = {}
    self._set_options(options)

  @property
  def source(self) -> str:
    """Returns the template's text; the text of all templates if there are several."""
    source = self._source or self._tokenizer.chat_template
    return '\n'.join(source.values()) if isinstance(source, Mapping) else str(source)

  def with_options(self, options: OptionValues) -> 'ChatTemplate':
    """Returns a template with additional options.

    Args:
      options: The options.

    Raises:
      ValueError: If the template has no such option.
    """
    changed = copy.copy(self)
    changed._set_options(options)
    return changed

  def _set_options(self, options: OptionValues) -> None:
    """Adds template options, which must be ones that the template reads."""
    names = [str(name) for name in options if name != 'tools']
    known, usual = _find_options(self.source) if names else (set(), set())
    for name in names:
      option = f'template_options.{name}'
      if name in _RESERVED or not name.isidentifier():
        problem = f'{name!r} cannot be an option of the chat template'
        raise ChatOptionError(option, problem)
      if name not in known:
        near = closest_match(name, usual)
        hint = f'Did you mean {near!r}? ' if near else ''
        there_are = f'It has: {", ".join(sorted(usual))}' if usual else 'It has none'
        problem = f'the chat template has no option {name!r}. '
        raise ChatOptionError(option, problem + hint + there_are)
    self._options = {**self._options, **options}

  def render(self, messages: Sequence[Message], prompt: bool) -> str:
    """Renders messages.

    Args:
      messages: The messages.
      prompt: Whether to append the header that asks for a reply.

    Returns:
      The text.

    Raises:
      ValueError: If the template refuses the messages.
    """
    options: OptionValues = self._options
    messages = list(map(_with_every_thought_key, messages))
    if self._placeholder:
      messages = self._without_placeholders(messages)
      options = self._without_placeholders(options)
    try:
      return self._apply_template(list(messages), prompt, options)
    except Exception as error:  # a template is a program of its own
      roles = ', '.join(str(message.get('role')) for message in messages)
      raise ValueError(
        f'the chat template refuses messages of the roles {roles}: {error}'
      ) from error

  def _apply_template(
    self, messages: list[Message], prompt: bool, options: OptionValues
  ) -> str:
    """Applies the template to messages in the form in which it reads them."""
    if self._content_form is None:
      self._content_form = self._find_content_form(options)
    messages = list(map(self._content_form, messages))
    if any(message.get('tool_calls') for message in messages):
      if self._call_form is None:
        self._call_form = self._find_call_form(options)
      messages = [_in_form(message, self._call_form) for message in messages]
    return self._write(messages, options, prompt)

  def _write(
    self, messages: list[Message], options: OptionValues, prompt: bool = False
  ) -> str:
    """Returns what the template writes for messages as they are."""
    return self._tokenizer.apply_chat_template(
      messages,
      tokenize=False,
      add_generation_prompt=prompt,
      chat_template=self._source,
      **self._clock,
      **options,
    )

  def _find_content_form(self, options: OptionValues) -> Callable[[Message], Message]:
    """Returns a function that converts content into the form that the template writes.

    Most write a text and a list of parts alike, some only a text, and SmolVLM's only a
    list.
    """
    is_written = []
    for question in (_QUESTION, _in_parts(_QUESTION)):
      try:
        text = self._write([question], options)
        is_list = _WRITTEN_PART.search(text)
        is_written.append(text.count(_QUESTION['content']) == 1 and not is_list)
      except Exception:  # such as from reading a letter as a part
        is_written.append(False)
    if is_written == [False, True]:
      return _in_parts
    return _joined if is_written == [True, False] else _as_it_is

  def _find_call_form(self, options: OptionValues) -> _CallForm:
    """Returns the first form of a message in which the template writes its calls."""
    usable = []
    for form in _CALL_FORMS:
      try:
        messages = [_QUESTION, _in_form(reply_with_calls(1), form)]
        text = self._write(messages, options)
      except Exception:  # such as from adding an object to a text
        continue
      # No model writes objects as Python does.
      if 'place' in text and 'Rome' in text and "'place'" not in text:
        return form
      usable.append(form)
    return usable[0] if usable else _CALL_FORMS[0]

  def _without_placeholders(self, value: object) -> Any:
    """Breaks up the placeholder in every text of a value, so that it is not a token.

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

  def expand(self, text: str, messages: Sequence[Message]) -> str:
    """Writes the placeholder once for each token of the images in a rendered text.

    Args:
      text: The rendered text, or a part of it.
      messages: The messages whose images are in it.

    Returns:
      The text.

    Raises:
      ValueError: If the model sees no images, or the template leaves some out.
    """
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


@functools.lru_cache(maxsize=16)  # parsing takes milliseconds, and requests ask for it
def _find_options(source: str) -> tuple[set[str], set[str]]:
  """Finds the options of a template.

  Args:
    source: The template.

  Returns:
    All names that a template may read from outside; and those of them that it does not
    also set by itself without asking for them before.
  """
  environment = jinja2.Environment(extensions=['jinja2.ext.loopcontrols'])
  try:
    tree = environment.parse(_GENERATION_TAG.sub('', source))
  except jinja2.TemplateSyntaxError:  # a tag that only the tokenizer's reader knows
    return {*re.findall(r'\b[A-Za-z_]\w*', source)} - _GIVEN, set()
  known = jinja2.meta.find_undeclared_variables(tree) - _GIVEN
  asked = [test for test in tree.find_all(nodes.Test) if 'defined' in test.name]
  asked += [one for one in tree.find_all(nodes.Filter) if one.name == 'default']
  names = {one.node.name for one in asked if isinstance(one.node, nodes.Name)}
  names |= known - {n.name for n in tree.find_all(nodes.Name) if n.ctx == 'store'}
  return known, names & known


def _with_every_thought_key(message: Message) -> Message:
  """Returns a message whose thought stands under each key that templates read."""
  thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), None)
  return message if thought is None else message | dict.fromkeys(THOUGHT_KEYS, thought)


def _in_parts(message: Message) -> Message:
  """Returns a message whose text is the only part of a list."""
  content = message.get('content')
  if not isinstance(content, str):
    return message
  return {**message, 'content': [{'type': 'text', 'text': content}]}


def _joined(message: Message) -> Message:
  """Returns a message whose content is one text, if all of its parts are texts."""
  content = message.get('content')
  if not isinstance(content, list) or has_images([message]):
    return message
  return {**message, 'content': ''.join(part['text'] for part in content)}


def _as_it_is(message: Message) -> Message:
  return message


def _in_form(message: Message, form: _CallForm) -> Message:
  """Returns a message as a template reads it, if it has tool calls."""
  calls = []
  for call in message.get('tool_calls') or ():
    function = dict(call.get('function') or call)
    arguments = read_call_arguments(function)
    function['arguments'] = (
      json.dumps(arguments, ensure_ascii=False)
      if form.has_arguments_as_text
      else arguments
    )
    calls.append({**call, 'function': function} if 'function' in call else function)
  if not calls:
    return message
  written = {**message, 'tool_calls': calls}
  if form.has_no_content and not message.get('content'):
    written['content'] = None
  return written


def read_call_arguments(function: Mapping[str, object]) -> Any:
  """Returns the arguments of a message's tool call, which may be JSON text.

  Args:
    function: The call's name and arguments; '' and None stand for no arguments.

  Raises:
    ValueError: If the text is not JSON.
  """
  arguments = function.get('arguments')
  if not isinstance(arguments, str):
    return {} if arguments is None else arguments
  try:
    return json.loads(arguments, strict=False) if arguments.strip() else {}
  except ValueError as error:
    raise ValueError(
      f'the arguments of the call of {function.get("name")!r} are no JSON: {error}'
    ) from error


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
