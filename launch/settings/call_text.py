"""Write call strings: the config's text with other options."""

from typing import Any

from jaxrl.call_strings import parse_call


def with_options(text: str, **options: Any) -> str:
  """Returns a call string with some of its options set.

  Args:
    text: a call string such as `first_fit(tokens=8192)`.
    **options: options to add or replace.
  """
  name, given = parse_call(text)
  listing = ', '.join(f'{key}={value!r}' for key, value in {**given, **options}.items())
  return f'{name}({listing})'
