"""Options: frozen dataclasses that check their values, whoever makes them."""

import dataclasses
import pickle

import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.options import OptionError, Options, descriptions, option, section


@dataclasses.dataclass(frozen=True)
class Inner(Options):
  """Options inside others."""

  size: int = option(1, 'A size.', low=1)


@dataclasses.dataclass(frozen=True)
class Outer(Options):
  """Options of each kind."""

  rate: float = option(0.5, 'A rate.', above=0, high=1)
  count: int | None = option(None, 'A number, or none.', low=-1)
  mode: str = option('fast', 'A mode.', choices=('fast', 'slow'))
  loss: ComponentCall | None = option(None, 'A component.')
  filters: tuple[ComponentCall, ...] = option((), 'Components.')
  lengths: tuple[int, ...] = option((), 'Lengths.')
  inner: Inner = section(Inner, 'More options.', size=2)


def test_values_are_read_as_the_type_of_their_field():
  made = Outer(rate=1, loss='clip(low=.1)', filters='a + b(x=1)', lengths=[1, 2])
  assert made.rate == 1.0 and isinstance(made.rate, float)
  assert made.loss == ComponentCall('clip', {'low': 0.1})
  assert made.filters == (ComponentCall('a'), ComponentCall('b', {'x': 1}))
  assert made.lengths == (1, 2)
  assert Outer(loss='').loss is None and Outer().inner.size == 2
  assert Outer(loss=made.loss).loss is made.loss


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'rate': 0}, r'rate=0.0: must be in \(0, 1\]'),
    ({'rate': 1.5}, r'rate=1.5: must be in \(0, 1\]'),
    ({'rate': 'x'}, "rate='x': must be a number"),
    ({'rate': None}, 'rate=None: must be a number'),
    ({'rate': True}, 'rate=True: must be a number'),
    ({'count': -2}, 'count=-2: must be at least -1'),
    ({'count': 1.5}, 'count=1.5: must be a whole number or none'),
    ({'mode': 'fsat'}, "mode='fsat': is not one of fast, slow; did you mean 'fast'"),
    ({'loss': 'clip('}, 'loss=clip.: cannot read'),
    ({'filters': 'a +'}, 'filters=a .: cannot read'),
    ({'lengths': 3}, 'lengths=3: must be a list'),
    ({'lengths': (1, 'x')}, "'x' in it must be a whole number"),
  ],
)
def test_a_wrong_value_is_told_with_its_option(values, message):
  with pytest.raises(OptionError, match=message) as caught:
    Outer(**values)
  assert caught.value.option == next(iter(values))


def test_an_error_comes_whole_out_of_another_process():
  with pytest.raises(OptionError) as caught:
    Outer(rate=2)
  again = pickle.loads(pickle.dumps(caught.value))
  assert str(again) == str(caught.value) and again.option == 'rate'


def test_options_are_frozen_hold_their_descriptions_and_are_replaced_whole():
  made = Outer(rate=0.25)
  with pytest.raises(dataclasses.FrozenInstanceError):
    made.rate = 0.75  # pyright: ignore[reportAttributeAccessIssue]
  assert made.replace(count=3) == Outer(rate=0.25, count=3)
  with pytest.raises(OptionError, match='count=-2'):
    made.replace(count=-2)
  assert descriptions(Outer)['rate'] == 'A rate.'
  assert set(descriptions(Outer)) == set(made.as_dict())
