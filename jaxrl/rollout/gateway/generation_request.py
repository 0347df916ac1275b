"""A generation request is what a client asks for, through whichever API.

`ApiError` refuses one, in the form that clients of OpenAI's API expect.
"""

import dataclasses

from jaxrl.options import JsonObject
from jaxrl.types import Message

_ERROR_TYPES = {
  401: 'authentication_error',
  404: 'not_found_error',
  429: 'rate_limit_error',
}


class ApiError(Exception):
  """Refuses a request, in the form that clients of OpenAI's API expect.

  Attributes:
    status: The HTTP status.
    param: The field that is at fault, if any.
    code: A code for programs, if any.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
  ):
    """Creates an error.

    Args:
      status: The HTTP status.
      message: What is wrong, for people.
      param: The field that is at fault.
      code: A code for programs.
    """
    super().__init__(message)
    self.status = status
    self.param = param
    self.code = code

  @property
  def body(self) -> JsonObject:
    """Returns the response as JSON: {'error': {'message', 'type', 'param', 'code'}}."""
    default = 'server_error' if self.status >= 500 else 'invalid_request_error'
    error = {
      'message': str(self),
      'type': _ERROR_TYPES.get(self.status, default),
      'param': self.param,
      'code': self.code,
    }
    return {'error': error}


def invalid_field(param: str, message: str, code: str = 'invalid_value') -> ApiError:
  """Creates the error for a field whose value is not accepted.

  Args:
    param: The field.
    message: What is wrong with it.
    code: A code for programs.

  Returns:
    The error, with status 400.
  """
  return ApiError(400, f'{param}: {message}', param=param, code=code)


@dataclasses.dataclass(frozen=True)
class ApiForm:
  """Says in what an API's form of requests and responses differs from others.

  Attributes:
    id_prefix: The beginning of the ids of replies.
    prompt_field: The field of a request that holds the prompt.
    format_field: The field that says what kind of text a reply is.
    splits_thoughts: Whether thoughts stand apart from the text.
  """

  id_prefix: str
  prompt_field: str
  format_field: str = 'response_format'
  splits_thoughts: bool = False


API_FORMS = {
  'chat': ApiForm('chatcmpl-', 'messages'),
  'completions': ApiForm('cmpl-', 'prompt'),
  'responses': ApiForm('resp_', 'input', 'text.format', splits_thoughts=True),
  'messages': ApiForm('msg_', 'messages', 'output_config.format', splits_thoughts=True),
}


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
  """Holds one request for completions; None means that the client did not say.

  Attributes:
    messages: The conversation of a chat request.
    prompt: The text, or the ids, of a plain completion request.
    tools: The tools that the client offers.
    n: How many replies are wanted.
    stream: Whether the reply is streamed.
    include_usage: Whether a stream ends with a count of tokens.
    logprobs: Whether log-probabilities are wanted.
    return_token_ids: Whether token ids are wanted too.
    max_tokens: Tokens a reply may have.
    temperature: Sampling temperature.
    top_p: Nucleus sampling.
    top_k: Keeps the k likeliest tokens.
    stop: Strings that end a reply.
    seed: Seed of the replies.
    template_options: Options of the chat template, such as enable_thinking.
    api: The API whose form the request and its response have; one of `API_FORMS`.
    has_instructions: Whether the first message is the request's instructions, which a
      conversation that goes on from its reply does not have.
    thinking: Whether the model shall think; None leaves it to the chat template.
    forced_tools: Names of the tools of which the reply must call some; empty if it need
      not call any.
    json_schema: The JSON schema of the value that the reply must be; None for any text.
    top_logprobs: How many of the likeliest tokens are told in each place.
    encrypts_thoughts: Whether thoughts are also wanted as encrypted content.
    echo: Fields that the response repeats.
  """

  messages: list[Message] | None = None
  prompt: str | list[int] | None = None
  tools: list[JsonObject] = dataclasses.field(default_factory=list)
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  return_token_ids: bool = False
  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  stop: tuple[str, ...] = ()
  seed: int | None = None
  template_options: JsonObject = dataclasses.field(default_factory=dict)
  api: str = 'chat'
  has_instructions: bool = False
  thinking: bool | None = None
  forced_tools: tuple[str, ...] = ()
  json_schema: JsonObject | None = None
  top_logprobs: int = 0
  encrypts_thoughts: bool = False
  echo: JsonObject = dataclasses.field(default_factory=dict)

  @property
  def form(self) -> ApiForm:
    """The form of the API that it was sent to."""
    return API_FORMS[self.api]
