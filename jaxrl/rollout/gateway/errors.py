"""What goes wrong, in the form that clients of OpenAI's API expect."""

from typing import Any


class ApiError(Exception):
  """An answer other than the one asked for.

  status: of HTTP. param: the field that is at fault. code: for programs.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
  ):
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  @property
  def body(self) -> dict[str, Any]:
    """As JSON: {'error': {'message', 'type', 'param', 'code'}}."""
    kinds = {
      401: 'authentication_error',
      404: 'not_found_error',
      429: 'rate_limit_error',
    }
    default = 'server_error' if self.status >= 500 else 'invalid_request_error'
    kind = kinds.get(self.status, default)
    error = {'message': str(self), 'type': kind, 'param': self.param, 'code': self.code}
    return {'error': error}


def wrong(param: str, message: str, code: str = 'invalid_value') -> ApiError:
  """The error for a field that cannot be taken as it is."""
  return ApiError(400, f'{param}: {message}', param=param, code=code)
