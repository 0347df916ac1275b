"""Answer numbers are read from text by value, as people and models write them.

Only the digits 0 to 9 make a number, as for math-verify. What merely looks like one
(1_000, 1,2, 2x, 3:30, other scripts' digits) is found as a whole and has no value, so
that no part of it counts.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

MAX_SEARCHED_CHARS = 20_000  # of a text, from its end, in which numbers are looked for
_MAX_NUMBER_CHARS = 64
_MAX_EXPONENT = 400

_SCALES = {
  **dict.fromkeys(['%', 'percent', 'per cent', 'pct'], Fraction(1, 100)),
  **dict.fromkeys(['dozen', 'dozens'], Fraction(12)),
  **dict.fromkeys(['hundred', 'hundreds'], Fraction(100)),
  **dict.fromkeys(['thousand', 'thousands', 'k'], Fraction(10**3)),
  **dict.fromkeys(['million', 'millions', 'mn'], Fraction(10**6)),
  **dict.fromkeys(['billion', 'billions', 'bn'], Fraction(10**9)),
  **dict.fromkeys(['trillion', 'trillions', 'tn'], Fraction(10**12)),
}
# Units by the name that they are compared by. Other words, as in 3 apples, are not.
_UNIT_ALIASES = {
  alias: name
  for name, aliases in {
    'dollar': '$ us$ usd buck',
    'euro': '€ eur',
    'pound': '£ gbp lb',
    'yen': '¥ jpy',
    'yuan': 'cny rmb',
    'rupee': '₹ inr rs rs.',
    'franc': 'chf',
    'cent': '¢ ct',
    'degree': '° deg ∘',
    'celsius': '°c ℃',
    'fahrenheit': '°f ℉',
    'millimeter': 'mm millimetre',
    'centimeter': 'cm centimetre',
    'meter': 'm metre',
    'kilometer': 'km kilometre',
    'inch': 'in inches',
    'foot': 'ft feet',
    'mile': 'mi',
    'milligram': 'mg',
    'gram': 'g',
    'kilogram': 'kg kilo',
    'ounce': 'oz',
    'liter': 'l litre',
    'milliliter': 'ml millilitre',
    'second': 's sec',
    'minute': 'min',
    'hour': 'h hr',
    'day': 'd',
    'week': 'wk',
    'month': '',
    'year': 'yr',
    'am': 'a.m a.m.',
    'pm': 'p.m p.m.',
    'kmh': 'kph km/h',
    'mph': 'mi/h',
    'kwh': '',
    'newton': 'n',
    'joule': 'j',
    'watt': 'w',
    'volt': 'v',
    'kelvin': 'k',
  }.items()
  for alias in [name, *aliases.split()]
}
UNIT_NAMES = frozenset(_UNIT_ALIASES)
# Those that are kept with a number in a text; 'in' is mostly no inch there.
_SHOWN_UNITS = UNIT_NAMES - set('a d n j k v w'.split()) - {'in', 'second', 'pound'}
_ORDINALS = ('st', 'nd', 'rd', 'th')
# A word after a number that makes more of it than a number with its unit.
_NO_UNITS = frozenset(
  'pi theta alpha beta phi sqrt sin cos tan log ln exp mod and or to than plus minus '
  'over divided not if but vs versus wrong incorrect'.split()
)
_CURRENCY = r'(?:US\$|[$€£¥₹]|(?:USD|EUR|GBP|INR|CNY|RMB|CHF|JPY|Rs\.?)(?=[\s\d]))'
_BRACED = r'\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}'  # at most three deep
_FRACTION = (
  r'\\[dtc]?frac\s*(?:\{\s*[-−]?\d++(?:\.\d++)?\s*\}|\d)\s*(?:\{\s*\d++\s*\}|\d)'
)
_FRACTION_PARTS = re.compile(
  r'\\[dtc]?frac\s*(?:\{\s*([-−]?[\d.]+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))'
)
_VULGAR = '[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]'
_POWER = r'(?:\^\s*(?:\{\s*[-−+]?\d++\s*\}|[-−+]?\d++)|\*\*\s*[-−+]?\d++|[⁰-⁹¹²³⁻⁺]++)'
_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺', '0123456789-+')
# A number with all that belongs to it, or a formula. `glued` makes a number a formula.
_TOKEN = re.compile(
  rf"""
  (?<![A-Za-z\d^])(?<![)\]}}](?=[-−–+]))(?<![A-Za-z]_)(?<!\^\{{)(?<!_\{{)
  (?P<sign>[-−–+])?
  (?P<currency>{_CURRENCY}\s?)?(?P<sign2>[-−])?
  (?:(?P<mixed>\d++)\s*(?P<part>{_FRACTION}|{_VULGAR}|(?<=\s)\d++[/⁄]\d++(?![\d/.]))
    |(?P<fraction>{_FRACTION}|{_VULGAR})
    |(?P<digits>\d{{1,3}}(?:[ ]\d{{3}})+(?!\d)(?:[.,]\d++)?
      |\d++(?:[.,:'’_]\d++)*+(?:(?<=\d:\d\d)\s?[aApP]\.?[mM]\b\.?)?|(?<![\d.])\.\d++))
  (?:(?P<exponent>[eE][-+−]?\d++(?![.\w]))
    |\s*(?:×|\*|x|X|·|⋅|\\times|\\cdot)\s*10\s*(?P<power>{_POWER}))?
  (?P<bottom>(?:\s?[/⁄]\s?\d++(?:\.\d++)?(?!\d|,\d))*+)
  (?P<glued>[²³¹⁰-⁹]++|\^(?!°)(?:\s*{_BRACED}|\s?.)|_(?:{_BRACED}|\w++)
    |!|\s?\\(?:sqrt|d?frac|pi|theta|ln|log|sin|cos|tan|alpha|beta|infty)\b
      (?:\[[^\][]*\])?(?:\s*{_BRACED})*
    |\s?[√π∞]|\((?=[^\W\d]))?
  (?P<word>\s?%|[^\W\d_][^\W_]*+|[-\s][^\W\d_]++(?:(?<=\sper)\s?cent\b)?(?:\^\{{?[23]\}}?)?)?
  |(?P<formula>(?:\\(?!(?:pm|approx|times|cdot|quad|begin|end)\b)[a-zA-Z]++
    (?:\s*(?:\[[^\][]*\]|{_BRACED}|[_^]\w))+)|[√∛]\s*\(?\d++)
  """,
  re.VERBOSE,
)
_ISO_DATE = re.compile(r'(?<!\d)\d{4}-\d\d-\d\d(?!\d)')
_TEXT_COMMAND = r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*'
_CLEANED = [
  (re.compile(r'\\!'), ''),
  (re.compile(r'\{,\}'), ','),
  (re.compile(r'(?<=\d)(?:\\[,;: ]|~|[\u00a0\u2007\u2009\u202f])(?=\d{3})'), ' '),
  (re.compile(r'[\u00a0\u2007\u2009\u202f]|\\[,;: ]|\\q?quad\b'), ' '),
  (re.compile(r'\\([%$#&])'), r'\1'),
  (re.compile(r'\^\s*\{?\s*(?:\\circ|∘|\\degree)\s*\}?|\\degree\b'), '°'),
  (re.compile(r'\\(?:left|right|displaystyle)\b'), ''),
  (re.compile(rf'(?<=\d){_TEXT_COMMAND}\{{([^{{}}]*)\}}'), r' \1'),
  (re.compile(rf'{_TEXT_COMMAND}\{{([^{{}}]*)\}}'), r'\1'),
]
_PLAIN = re.compile(r'\d+|\d*\.\d+')
_COMMA_GROUPS = re.compile(r'[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?')
_OTHER_GROUPS = re.compile(r"([1-9]\d{0,2}(?:['’ ]\d{3})+)(?:[.,](\d+))?")
_DOT_GROUPS = re.compile(r'([1-9]\d{0,2}(?:(?:\.\d{3}){2,}|\.\d{3}(?=,)))(?:,(\d+))?')
_APPROXIMATELY = re.compile(
  r'(?:(?:about|around|approximately|approx\.?|roughly|exactly|nearly|only|just'
  r'|a total of)\s+|[≈~]\s*|\\approx\s*)+',
  re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A number with its unit.

  Attributes:
    value: The number, without what a percent sign or a word such as million makes of
      it.
    scale: What they multiply it by.
    units: The known units after it, such as dollar and hour; empty for none.
  """

  value: Fraction
  scale: Fraction = Fraction(1)
  units: frozenset[str] = frozenset()

  def agrees_with(self, other: 'Quantity') -> bool:
    """Returns whether two quantities are the same answer.

    A unit, percent sign or word such as million that only one has may be missing in
    the other: 50% agrees with 50 and with 0.5, and 5 cm with 5 but not with 5 m.

    Args:
      other: The other quantity.
    """
    same_units = self.units <= other.units or other.units <= self.units
    if not same_units:  # no unit is a part of any
      return False
    if self.value * self.scale == other.value * other.scale:
      return True
    one_is_plain = self.scale != other.scale and 1 in (self.scale, other.scale)
    return one_is_plain and self.value == other.value


@dataclasses.dataclass(frozen=True)
class NumberToken:
  """What looks like a number in a text.

  Attributes:
    text: The whole of it, with its unit if that is a known one.
    quantity: Its value; None if it has none.
    start: Where it begins in the cleaned text.
    end: Where it ends, or its unit, if that is a known one.
    unit_start: Where a unit may begin.
  """

  text: str
  quantity: Quantity | None
  start: int
  end: int
  unit_start: int


def clean_text(text: str) -> str:
  """Returns a text without the LaTeX that only sets numbers and units.

  Args:
    text: The text.
  """
  for pattern, plain in _CLEANED:
    text = pattern.sub(plain, text)
  return text


def iter_numbers(text: str) -> Iterator[NumberToken]:
  """Yields what looks like a number, formulas with digits included.

  Args:
    text: A text that `clean_text` returned, at most `MAX_SEARCHED_CHARS` of which are
      read, from its end.
  """
  dates = {match.start(): match.end() for match in _ISO_DATE.finditer(text)}
  position = max(0, len(text) - MAX_SEARCHED_CHARS)
  while match := _TOKEN.search(text, position):
    if end := dates.get(match.start()):
      yield NumberToken(text[match.start() : end], None, match.start(), end, end)
      position = end
      continue
    token = _read_token(match)
    yield token
    position = max(token.end, match.start() + 1)


def parse_quantity(text: str) -> Quantity | None:
  r"""Parses a text that is a number and at most its unit.

  Args:
    text: The text, such as '$1,200.50 per day', '50\%' or '3 apples'.

  Returns:
    The quantity, or None if the text is something else.
  """
  text = re.sub(r'\\[()\[\]]', '', clean_text(text[:1000]))
  if text.count('$') > 1:  # they enclose a formula
    text = text.replace('$', '')
  text = text.strip(' \n\t*`"\'').rstrip('.,;:').strip(' *`')
  while match := re.fullmatch(r'\{([^{}]*)\}|\(([^()]*)\)', text):
    text = (match[1] or match[2] or '').strip()
  text = text[match.end() :] if (match := _APPROXIMATELY.match(text)) else text
  match = _TOKEN.match(re.sub(r'^([-−–+])\s+', r'\1', text))
  token = _read_token(match) if match is not None else None
  if match is None or token is None or token.quantity is None:
    return None
  units = _parse_units(match.string[token.unit_start :])
  if units is None:
    return None
  return dataclasses.replace(token.quantity, units=token.quantity.units | units)


def number_text(text: str) -> str:
  """Returns a number as it is written, without currency and unit; '' for other texts.

  Args:
    text: A number with at most its unit.
  """
  token = next(iter_numbers(clean_text(text[:1000])), None)
  if token is None or parse_quantity(text) is None:
    return ''
  digits = token.text[: token.unit_start - token.start]
  return re.sub(_CURRENCY, '', digits, count=1).strip()


def is_number_like(text: str) -> bool:
  """Returns whether a text is a number, a time of day, a date or a ratio.

  Args:
    text: The text.
  """
  if parse_quantity(text) is not None:
    return True
  return (
    re.fullmatch(r'\d[\d:./-]*\d(?:\s?[ap]\.?m\.?)?', text.strip(), re.I) is not None
  )


def parse_number(text: str) -> Fraction | None:
  """Parses a number, of which a percent sign or a unit does not change the value.

  Args:
    text: The text.

  Returns:
    The number, or None if the text is none.
  """
  quantity = parse_quantity(text)
  return quantity.value if quantity is not None else None


def _read_token(match: re.Match[str]) -> NumberToken:
  """Returns the token of a match of `_TOKEN`."""
  word, start, end = match['word'] or '', match.start(), match.end()
  if match['formula']:
    return NumberToken(match[0], None, start, end, end)
  is_separate = word[:1] in ('', ' ', '\n', '\t', '-', '%')
  name = re.sub(r'\^?\{?[23²³]\}?$', '', word.strip().lower())
  scale = Fraction(1)
  number_end = match.start('word') if word else end
  unit_start = end
  value = None if match['glued'] else _value(match)
  if name in _SCALES and (name != 'k' or not is_separate):
    scale = _SCALES[name]
  elif word in ('M', 'B'):
    scale = _SCALES['million' if word == 'M' else 'billion']
  elif is_separate or name in _UNIT_ALIASES:
    shown = name in _SHOWN_UNITS or name.removesuffix('s') in _SHOWN_UNITS
    end, unit_start = end if shown and word[:1] != '-' else number_end, number_end
  elif name not in _ORDINALS:
    value = None  # 2x, 0x2a, 10am
  currency = (match['currency'] or '').strip().lower()
  if currency == '$' and '$' in match.string[number_end : number_end + 8]:
    currency = ''  # they enclose a formula
  units = frozenset({_UNIT_ALIASES[currency]} if currency else ())
  quantity = Quantity(value, scale, units) if value is not None else None
  text = match.string[start:end].strip()
  return NumberToken(text, quantity, start, end, unit_start)


def _value(match: re.Match[str]) -> Fraction | None:
  """Returns the value of a number without percent sign and unit."""
  if match.end('bottom') - match.start() > _MAX_NUMBER_CHARS:
    return None
  if match['mixed']:
    whole, part = _digits_value(match['mixed']), _fraction_value(match['part'])
    if whole is None or part is None or not 0 <= part < 1:
      return None
    value = whole + part
  elif match['fraction']:
    value = _fraction_value(match['fraction'])
  else:
    value = _digits_value(match['digits'])
  if value is None:
    return None
  if power := match['exponent'] or match['power']:
    exponent = int(re.sub(r'[^-\d]', '', power.translate(_SUPERSCRIPTS)))
    if abs(exponent) > _MAX_EXPONENT:
      return None
    value *= Fraction(10) ** exponent
  if match['bottom']:
    bottom = match['bottom'].strip(' /⁄')
    divisor = _digits_value(bottom)
    if not divisor or match['mixed'] or match['fraction']:
      return None
    value /= divisor
  signs = [(match[name] or '').strip() for name in ('sign', 'sign2')]
  return -value if sum(sign in ('-', '−', '–') for sign in signs) == 1 else value


def _digits_value(text: str) -> Fraction | None:
  """Returns the value of digits with separators; None if these are ambiguous."""
  if not text.isascii() and not re.fullmatch('[0-9’., ]+', text):
    return None
  if _PLAIN.fullmatch(text):
    return Fraction(text)
  if _COMMA_GROUPS.fullmatch(text):
    return Fraction(text.replace(',', ''))
  match = _OTHER_GROUPS.fullmatch(text) or _DOT_GROUPS.fullmatch(text)
  if match is None:
    return None
  return Fraction(re.sub(r'\D', '', match[1]) + '.' + (match[2] or '0'))


def _fraction_value(text: str) -> Fraction | None:
  if len(text) == 1:
    return Fraction(unicodedata.numeric(text)).limit_denominator(10)
  if match := _FRACTION_PARTS.fullmatch(text):
    top = (match[1] or match[2]).replace('−', '-')
    bottom = match[3] or match[4]
  else:
    top, bottom = re.split('[/⁄]', text)
  if not (top + bottom).isascii() or int(bottom) == 0:
    return None
  return Fraction(top) / int(bottom)


def _parse_units(text: str) -> frozenset[str] | None:
  """Returns the words of a unit; None if the text is more than a unit."""
  text = text.strip(' \n\t$*.,;:"\'`{}()')
  if not text:
    return frozenset()
  if len(text) > 60 or re.search(
    r'[+=<>\\√π∞|\[\]{}@#&]|\*\*?\s*\d|\d{2}|\^\s*[-{]', text
  ):
    return None
  words = []
  parts = re.split(r'[\s/·*⋅-]+', text.lower())
  for word in parts:
    word = re.sub(r'\^?([23²³])$', lambda m: m[1].translate(_SUPERSCRIPTS), word)
    word = word.strip('.,;:()\'"')
    power = word[-1] if re.fullmatch(r'[^\d]+[23]', word) else ''
    word = word.removesuffix(power)
    if not word:
      continue
    if re.search(r'\d', word) or word in _NO_UNITS:
      return None
    singular = word.removesuffix('s') if len(word) > 2 else word
    name = _UNIT_ALIASES.get(word) or _UNIT_ALIASES.get(singular)
    if word == 'in' and len(words) < len(parts) and parts[-1].rstrip('.') != 'in':
      name = None  # as in 18 in total
    if name is None and len(word) == 1 and word != 'a':
      return None  # a variable
    words.append(name + power if name is not None else '')
  return frozenset(filter(None, words)) if len(words) <= 8 else None
