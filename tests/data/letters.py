"""A chat that can be read by hand: letters are tokens, messages are `<role:text>`."""

from jaxrl.data.chat_tokenizer import ChatTokenizer

END = '>'


class Letters:
  """As much of a tokenizer as a chat needs."""

  chat_template, eos_token, eos_token_id = 'by hand', END, ord(END)
  added_tokens_decoder = {ord(END): END}  # noqa: RUF012

  def encode(self, text, add_special_tokens=True):
    return [ord(letter) for letter in text]

  def decode(self, ids, skip_special_tokens=False, **_):
    return ''.join(map(chr, ids)).replace(END, '' if skip_special_tokens else END)

  def convert_ids_to_tokens(self, token):
    return chr(token)

  def apply_chat_template(
    self, messages, *, add_generation_prompt=False, tools=(), **_
  ):
    names = ','.join(tool['name'] for tool in tools)
    text = f'<tools:{names}>' if tools else ''
    for message in messages:
      calls = [f'call {call["name"]}' for call in message.get('tool_calls', ())]
      text += f'<{message["role"]}:{"".join(calls) or message["content"]}>'
    return text + '<assistant:' * add_generation_prompt


def letters():
  return ChatTokenizer(Letters())
