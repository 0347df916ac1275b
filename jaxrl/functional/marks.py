"""Marks on parts: what they carry between batches, what they read of a whole one.

A mark is an attribute of the part's function, so a user's own part can bear it too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar('Part', bound=Callable[..., Any])


def stateful(init: Callable[[], Any]) -> Callable[[Part], Part]:
  """The part reads a column `state` of its own; `init()` is what it starts from.

  init: takes nothing, returns a pytree of arrays. The part returns its next state:
  an advantage in `Advantages.state`, a controller as its result.
  """

  def mark(part: Part) -> Part:
    vars(part)['init_state'] = init
    return part

  return mark


def over_batch(make: Callable[..., dict[str, Any]]) -> Callable[[Part], Part]:
  """The part reads columns that `make` computes from the whole optimizer batch.

  make: `(columns by name, *, options) -> {name: column}`, called before the batch is
  split, with the part's own options wherever names are equal. A column is `[B, …]`
  or a scalar. Where `make` reads `logprobs`, the whole batch is scored for it first;
  it also may read `aggregation`, the mode's name. No gradient flows through it.
  """

  def mark(part: Part) -> Part:
    vars(part)['make_columns'] = make
    return part

  return mark


def init_state(function: Callable[..., Any]) -> Callable[[], Any] | None:
  """What `stateful` put on a plain function; None without."""
  return getattr(function, 'init_state', None)


def make_columns(
  function: Callable[..., Any],
) -> Callable[..., dict[str, Any]] | None:
  """What `over_batch` put on a plain function; None without."""
  return getattr(function, 'make_columns', None)
