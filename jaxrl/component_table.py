"""Component tables: the built-in components of a kind, and how one of them is built.

What names a component is looked up in its table: a name of the table, a user's own
`package.module:name` or `path/file.py:name`, or the function or class itself.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jaxrl.component_calls import ComponentCall
from jaxrl.options import (
  ConfigError,
  Configurable,
  Keywords,
  check_options,
  error_prefix,
  unknown_name_error,
  unwrap,
)
from jaxrl.user_code import import_object

# What names a component: a call; the function or class itself, also as a
# `functools.partial` with options; or the name of a component without options.
Component = ComponentCall | Configurable | str
T = TypeVar('T', bound=Configurable | str)


class ComponentTable(Mapping[str, T], Generic[T]):
  """Maps the names of the built-in components of a kind to them, or to where they are.

  Attributes:
    what: What one is called in errors, such as 'sampler'.
    option: The option that names one, such as 'algorithm.sampler'.
  """

  def __init__(
    self,
    what: str,
    option: str,
    components: Mapping[str, T] | None = None,
    *,
    base: type | str = '',
  ):
    """Initializes the table.

    Args:
      what: See class.
      option: See class.
      components: The built-in ones, or where each is as for `import_object`; none by
        default, where all are users' own.
      base: A class or protocol whose public methods a class must have, or where it is.
    """
    self.what, self.option = what, option
    self._components = dict(components or {})
    self._base = base

  def __getitem__(self, name: str) -> T:
    return self._components[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._components)

  def __len__(self) -> int:
    return len(self._components)

  def find(
    self, component: Component, where: str = ''
  ) -> tuple[str, Configurable, Keywords]:
    """Finds the function or class of a component, and checks its options.

    Args:
      component: The component.
      where: What errors begin with, such as an option and its value; by default the
        table's option for an unknown name, else the kind and the name.

    Returns:
      The name, the function or class, and a copy of the options.

    Raises:
      ConfigError: If there is no such component, it does not take these options, or it
        is a class that lacks methods.
    """
    name = component_name(component)
    if not isinstance(component, str | ComponentCall):
      options, function = _own_options(component), unwrap(component)
    else:
      options = dict(as_call(component).options)
      if name not in self and ':' not in name:
        raise unknown_name_error(name, self, self.what, where or self.option)
      target: Configurable | str = self._components.get(name, name)
      function = import_object(target, where) if isinstance(target, str) else target
    where = where or f'{self.what} {name!r}'
    if self._base and isinstance(function, type):
      base = import_object(self._base) if isinstance(self._base, str) else self._base
      required = [key for key in vars(base) if not key.startswith('_')]
      if missing := [key for key in required if not hasattr(function, key)]:
        raise ConfigError(
          f'{where}: {name} has no {", ".join(missing)}; derive it from '
          f'{base.__module__}.{base.__qualname__}'
        )
    check_options(function, options, where)
    return name, function, options

  def build(
    self, component: Component, *arguments: object, where: str = '', **keywords: object
  ) -> Any:
    """Calls a component with its options.

    Args:
      component: The component.
      *arguments: What it is given before its options.
      where: What errors begin with; by default the table's option and the component.
      **keywords: What it is given by name beside its options.

    Returns:
      What the function returns, or the object of the class.

    Raises:
      ConfigError: If there is no such component, or it refuses its options.
    """
    where = where or f'{self.option}={component_name(component, whole=True)}'
    _, function, options = self.find(component, where)
    with error_prefix(where):
      return function(*arguments, **keywords, **options)

  def calls(
    self, components: Sequence[Component] | Component
  ) -> list[tuple[str, Keywords]]:
    """Returns the names and options of components that are given by name.

    Other processes run these, so that each has to be found again by its name.

    Args:
      components: The components; a single one need not be in a sequence.

    Raises:
      ConfigError: If one is not given by name.
    """
    named = []
    for component in as_calls(components):
      if not isinstance(component, ComponentCall):
        raise ConfigError(
          f'{self.what} {component!r}: name a {self.what} of your own by where it is, '
          "ComponentCall('path/file.py:name')"
        )
      named.append((component.name, dict(component.options)))
    return named


def as_call(component: Component) -> ComponentCall:
  """Returns the call of a component: its name and options.

  Args:
    component: The component; a text is the name of one without options.
  """
  if isinstance(component, ComponentCall):
    return component
  return ComponentCall(component_name(component), _own_options(component))


def _own_options(component: Component) -> Keywords:
  """Returns the options of a component that is not a call."""
  is_partial = isinstance(component, functools.partial)
  return dict(component.keywords) if is_partial else {}


def as_calls(
  components: Sequence[Component] | Component,
) -> tuple[Component, ...]:
  """Returns components as a tuple; a single one need not be in a sequence, '' is none.

  Args:
    components: The components.
  """
  if isinstance(components, str) and not components.strip():
    return ()
  if isinstance(components, str | ComponentCall) or callable(components):
    components = (components,)
  return tuple(as_call(c) if isinstance(c, str) else c for c in components)


def join_calls(components: Iterable[Component]) -> str:
  """Returns how messages show several components: joined by ' + '.

  Args:
    components: The components.
  """
  return ' + '.join(component_name(c, whole=True) for c in components)


def component_name(component: Component, *, whole: bool = False) -> str:
  """Returns the name of a component.

  Args:
    component: The component.
    whole: Whether to show its options too.
  """
  if isinstance(component, str):
    return component
  if isinstance(component, ComponentCall):
    return str(component) if whole else component.name
  name = getattr(unwrap(component), '__name__', repr(component))
  return str(ComponentCall(name, _own_options(component))) if whole else name
