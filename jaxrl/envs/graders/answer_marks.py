r"""Answer marks show which part of a reply is its final answer.

Marks are `####`, `\boxed{}` or `\fbox{}`, and `<answer>` tags. Models also write `####`
as a heading in Markdown, so a mark counts only if it holds an answer.
"""

import re
import unicodedata
from collections.abc import Iterator

from jaxrl.envs.graders.answer_numbers import (
  NumberToken,
  clean_text,
  is_number_like,
  iter_numbers,
  parse_quantity,
)
from jaxrl.envs.reply_parsing import without_thought

MAX_ANSWER_CHARS = 1000  # characters of an answer that are looked at
_MAX_MARKS = 100  # marks that are looked at, from the last one on
_MAX_CUE_CHARS = 200  # characters after 'the answer is' that are looked at

_MARK = re.compile(
  r'####|\\(?:boxed|fbox|framebox)(?![a-zA-Z])|<answer>|</answer>', re.IGNORECASE
)
_UNBRACED = re.compile(
  r'\s*(\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|[^\s{}$\\][^{}$\\\n]*)'
)
_JOINT = re.compile(
  r'[\s$*]*(?:,|;|&|\b(?:and|or)\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})[\s$*]*'
  r'(?:and|or)?[\s$*]*'
)
_SPECIAL_TOKEN = re.compile(
  r'<[|｜][^|｜<>]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>|<(?:eos|bos|pad)>'
)
# What sets an answer and says nothing itself.
_LAYOUT = re.compile(
  r'\\(?:[hv]?phantom|[hv]space\*?|begin|end)\s*\{[^{}]*\}|\\(?:text\w*|math\w+|mbox'
  r'|boxed|fbox|framebox|underline|left|right|q?quad|displaystyle|[lc]?dots)(?![a-zA-Z])'
  r'|\\[ ,;:!()\[\]_$]|&nbsp;|<br\s*/?>|</?answer>|[\s$*_`#~.…]'
  r'|[\u200b-\u200d\u2060\ufeff]'
)
_PLACEHOLDER = re.compile(
  r'(?:(?:your|the|my|our|an?|final|correct|numerical|so|insert|put|write)\s+)*'
  r'(?:answer|result|solution|number|letter)(?:\s+(?:is|are|goes|here|below))*'
  r'|here|below',
  re.IGNORECASE,
)

# What introduces an answer, as in "The final answer is: ".
_LEAD = re.compile(
  r"""
  (?:(?:so|thus|therefore|hence|finally|in\ conclusion)\b[,:]?\s*)?
  (?:(?:the|my|our|your|its|this)\s+)?(?:(?:final|correct|right|exact|numerical)\s+)*
  (?:answer|result|solution|ans)\b(?:\s+(?:to|of|for)\s+[^:=.\n]{1,60}?)?
  (?:\s*\([^()\n]{0,40}\))?\s*(?:\bis\b|\bare\b|\bwas\b|\bwould\ be\b|\bwill\ be\b|
  \bequals\b|[:：=→-])*\s*
  """,
  re.VERBOSE | re.IGNORECASE,
)
_CUE = re.compile(
  r"""
  \b(?:answer|result|ans)\b['"*_\s]*(?:\s(?:to|of|for)\s[^:=.\n]{1,60}?)?
  (?:\([^()\n]{0,40}\)\s*)?[\s*_]*
  (?:\b(?:is|are|was|equals|(?:would|will|should|must)\ be)\b|[:：=≈→])
  (?:\s+(?:equal\ to|thus|then|therefore|simply|just|exactly))?[\s*_:：]*
  |答案(?:应该|应当)?(?:是|为|：|:)\s*
  |\brespuesta(?:\s+final)?\s+es\b[\s*:]*|\bréponse(?:\s+finale)?\s+est\b[\s*:]*
  |\bAntwort\s+(?:ist|lautet)\b[\s*:]*
  """,
  re.VERBOSE | re.IGNORECASE,
)
# What says that the number before it is the answer, as in '18 is the final answer'.
_CUE_BEHIND = re.compile(
  r'[*$_`)\]]*\s+(?:is|are|must\s+be)\s+(?:\w+\s+)?(?:the|my|our)\s+'
  r'(?:(?:final|correct|right)\s+)*answer\b',
  re.IGNORECASE,
)
_MINUS = re.compile(r'^(\W{0,4}?)(?:[-−–]\s+|(?:negative|minus)\s+)(?=[$€£\\]?[\d.])')
_ASIDE = re.compile(r'\s\(([^()]{1,100})\)\.?$')
_LABEL = re.compile(
  r'^\\text\s*\{\s*(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*\}\s*', re.I
)
_NUMBERED_HEADING = re.compile(
  r"""
  (?:step|part|case|method|option|section|problem|question|approach|scenario|phase
  |example|day|week|year|month|hour|stage|round|note|chapter|task|exercise|equation
  |attempt|solution|way|plan|check|verification|summary|conclusion)
  s?\b\s*(?:\#|no\.?\s*)?(?:\d|[A-Z]\b|[IVX]+\b|one\b|two\b|three\b)
  |\d+[.)]\s+[^\W\d]|\d+[:：]\s*[^\W\d]|\(\d+\)\s*[^\W\d]|\d+(?:\.\d+)+\.?\s+[A-Z]
  """,
  re.VERBOSE | re.IGNORECASE,
)
_HEADING = re.compile(
  r"""
  (?:final|detailed|quick|key|initial|brief|overall|double|my|the|your|problem|step)?
  [\s-]*(?:steps?|check(?:ing)?|verif(?:y|ication|ying)|conclusions?|explanations?
  |summary|solutions?|answers?|results?|analysis|notes?|reasoning|calculations?
  |overview|introduction|given|approach|proof|examples?|set-?up|background|details?
  |understanding|breakdown|observations?|assumptions?|references?|remarks?|method
  |thoughts?|computations?|working|workings|interpretation|justification|by\s+step
  |let's|let\s+us|now|next|first|second|third|finally|here(?:'s|\s+is)|calculate
  |compute|find|determine|simplify|solve|substitute|evaluate|identify|combine|confirm)
  (?=$|[\s:：.!?,(\d&-])
  """,
  re.VERBOSE | re.IGNORECASE,
)
_FORMULA_SIGNS = re.compile(r'[\\/^+*=√π∞<>]')
_FORMULA = re.compile(
  r'\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]', re.DOTALL
)
_BOLD = re.compile(r'\*\*([^*\n]{1,200})\*\*|(?<!\w)__([^_\n]{1,200})__(?!\w)')


def marked_answer(text: str, like: str = '') -> str:
  r"""Returns the answer that a reply marks as final.

  It is what the last mark that holds an answer marks. A heading such as `#### Step 2`
  holds none, and neither does an empty mark. If the right answer is a number, `####`
  must mark one, with at most words around it.

  Args:
    text: The reply.
    like: The right answer, of which only the kind matters: a number or not.

  Returns:
    The answer; '' if none is marked.
  """
  text = without_thought(text)
  return next((answer for _, answer in iter_marked(text, like)), '')


def iter_marked(text: str, like: str = '') -> Iterator[tuple[int, str]]:
  """Yields the marked answers of a reply, from the last one on.

  Boxes that only a comma, 'and' or 'or' separates are one answer.

  Args:
    text: The reply without its thought.
    like: The right answer, of which only the kind matters: a number or not.

  Yields:
    Where the mark is, and the answer that it holds.
  """
  is_number, end_of_tag = is_number_like(like), len(text)
  boxes: tuple[int, str] | None = None  # of the boxes found so far
  for mark in reversed(list(_MARK.finditer(text))[-_MAX_MARKS:]):
    name, answer = mark[0].lower(), ''
    if name == '</answer>':
      end_of_tag = mark.start()
    elif name.startswith('\\'):
      answer, end = _boxed(text, mark.end())
      answer = _LABEL.sub('', answer)
      if not _holds_answer(answer, like):
        continue
      if boxes is not None and not _JOINT.fullmatch(text[end : boxes[0]]):
        yield boxes
        boxes = None
      boxes = mark.start(), f'{answer}, {boxes[1]}' if boxes else answer
      continue
    elif name == '<answer>':
      content = text[mark.end() : end_of_tag].strip()
      is_closed, end_of_tag = end_of_tag < len(text), len(text)
      answer = final_answer(content, like) if content and is_closed else ''
    else:
      answer = _answer_after_hashes(text[mark.end() :], is_number=is_number)
    if answer and _holds_answer(answer, like):
      if boxes is not None:
        yield boxes
        boxes = None
      yield mark.start(), answer
  if boxes is not None:
    yield boxes


def says_something(text: str) -> bool:
  """Returns whether a text is more than spaces, markup, dots and special tokens.

  Args:
    text: The text, such as what a tag encloses.
  """
  text = text.strip()[: 4 * MAX_ANSWER_CHARS]
  rest = _without_layout(text, '')
  return bool(rest.strip('{}') if re.search(r'\\[a-zA-Z]', text) else rest)


def _without_layout(text: str, between: str) -> str:
  return _LAYOUT.sub(between, _SPECIAL_TOKEN.sub(between, text))


def _holds_answer(text: str, like: str) -> bool:
  """Returns whether what is marked is an answer, and no mark alone or placeholder.

  Args:
    text: What is marked.
    like: The right answer: if it has no letter or digit, a sign is an answer.
  """
  if not says_something(text):
    return False
  if like and text.strip() == like.strip():
    return True
  plain = _without_layout(text, ' ')
  if _PLACEHOLDER.fullmatch(' '.join(re.findall(r'[^\W_]+', plain))):
    return False
  if like and _has_letters(like) and not re.search(r'\\\{\s*\\\}', text):
    return _has_letters(plain) and not plain.rstrip().endswith((':', '：', '='))
  return True


def _has_letters(text: str) -> bool:
  """Returns whether a text has a letter, a digit or a symbol such as ∞."""
  return any(c in '∞∅' or unicodedata.category(c)[0] in 'LN' for c in text)


def final_answer(text: str, like: str = '') -> str:
  """Returns the answer of a reply, marked or not.

  It is the marked answer. Without one it is what follows the last 'the answer is', and
  else, for a number, the last number, or the last bold one of its paragraph. For
  another answer, it is the last formula of the last paragraph, or the last line.

  Args:
    text: The reply.
    like: The right answer, of which only the kind matters: a number or not.

  Returns:
    The answer.
  """
  if marked := marked_answer(text, like):
    return marked
  text = without_thought(text)
  if like and not is_number_like(like):
    return _unmarked_text(text)
  return _unmarked_number(text) or text.strip()


def _boxed(text: str, start: int) -> tuple[str, int]:
  r"""Returns what a `\boxed` holds and where it ends; '' if it is not closed."""
  opening = re.compile(r'\s*\{').match(text, start)
  if opening is None:
    match = _UNBRACED.match(text, start)
    if match is None:
      return '', start
    plain = re.split(r'\.?\s*(?:\\[)\]]|$)|\.\s', match[1])[0]
    return plain.strip(), match.start(1) + len(plain)
  depth, position = 1, opening.end()
  while position < min(len(text), opening.end() + MAX_ANSWER_CHARS):
    sign = text[position]
    if sign == '\\':
      position += 1  # \{ is a brace of the formula
    depth += {'{': 1, '}': -1}.get(sign, 0)
    if depth == 0:
      return text[opening.end() : position].strip(), position + 1
    position += 1
  return '', start


def _answer_after_hashes(text: str, *, is_number: bool) -> str:
  """Returns the answer that `####` marks; '' if it is a heading."""
  first, _, rest = text[: 4 * MAX_ANSWER_CHARS].lstrip('#').strip().partition('\n')
  line = _without_markup(first)
  lead = _LEAD.match(line)
  if lead is not None and lead.end() == len(line):  # `#### Answer`, and then the answer
    line = _without_markup(rest.strip().partition('\n')[0])
    lead = _LEAD.match(line)
  is_introduced = lead is not None and lead.end() > 0
  if lead is not None:
    line = line[lead.end() :].strip()
  if is_number:
    return _marked_number(line, has_more=bool(rest.strip()), introduced=is_introduced)
  if not is_introduced and (_NUMBERED_HEADING.match(line) or _HEADING.match(line)):
    return ''
  return '' if line.endswith((':', '：')) else line


def _marked_number(line: str, *, has_more: bool, introduced: bool) -> str:
  """Returns the number or formula that a line holds; '' if it is a heading."""
  if cues := list(_CUE.finditer(line)):
    line, introduced = line[cues[-1].end() :].strip(), True
  if not introduced and _NUMBERED_HEADING.match(line):
    return ''
  is_titled = re.match(r'\d+\s+[A-Z][a-z]+\s+[a-zA-Z]', line) and has_more
  if parse_quantity(line) is not None:
    return '' if is_titled and not introduced else line
  aside = _ASIDE.search(line)
  if aside and parse_quantity(aside[1]) is None:  # 18 (9 × 2)
    before = line[: aside.start()]
    if parse_quantity(before) is not None:
      return before
  _, equals, right = line.rpartition('=')
  if equals and parse_quantity(right) is not None:
    return right.strip()
  cleaned = clean_text(line)
  tokens = list(iter_numbers(cleaned))
  if not tokens:
    return ''
  only = tokens[0]
  words = cleaned[: only.start] + cleaned[only.end :]
  if len(tokens) > 1 or only.quantity is None or _FORMULA_SIGNS.search(words):
    return line
  return only.text


def _without_markup(line: str) -> str:
  """Removes the Markdown around and within a line, and the tokens after it."""
  line = _SPECIAL_TOKEN.sub('', line).replace('**', '').replace('__', '')
  line = re.sub(r'</?answer>', '', line.strip())
  line = line.strip().rstrip('#').strip()
  while len(line) > 1 and line[0] == line[-1] and line[0] in '*_`"\'':
    line = line[1:-1].strip()
  return re.sub(r'^<([^<>/]*\d[^<>]*)>$', r'\1', line)


def _unmarked_number(text: str) -> str:
  """Returns the number that an unmarked reply gives as its answer, or ''."""
  cleaned = clean_text(text)
  tokens = list(iter_numbers(cleaned))
  cues = [*_CUE.finditer(cleaned), *_CUE_BEHIND.finditer(cleaned)]
  for cue in sorted(cues, key=lambda match: match.start())[: -_MAX_MARKS - 1 : -1]:
    if cue.re is _CUE_BEHIND:
      found = next((t.text for t in tokens if t.end == cue.start()), '')
    else:
      sentence = cleaned[cue.end() : cue.end() + _MAX_CUE_CHARS]
      if '\n' not in cue[0]:  # there, a dash begins the item of a list
        sentence = _MINUS.sub(r'\1-', sentence)
      found = _number_after_cue(sentence)
    if found:
      return found
  if not tokens:
    return ''
  start = cleaned.rfind('\n\n', 0, tokens[-1].start) + 1
  bold = list(_BOLD.finditer(cleaned, start))
  for match in reversed(bold):
    inside = [t for t in tokens if match.start() < t.start and t.end <= match.end()]
    if len(inside) == 1 and parse_quantity(match[1] or match[2]) is not None:
      return inside[0].text
  return tokens[-1].text


def _number_after_cue(text: str) -> str:
  """Returns the number that a sentence begins or ends with, or ''."""
  sentence = re.split(r'\n|(?<!\d)\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[!?]+(?=\s|$)', text)[0]
  if re.match(r'\s*(?:not|n\'t|neither|between|unclear|unknown)\b', sentence):
    return ''
  tokens = list(iter_numbers(sentence))
  if not tokens:
    return ''
  first = tokens[0]
  _, equals, right = sentence.partition('=')
  if equals and first.start < sentence.index('='):
    after = [t for t in tokens if t.start >= sentence.rindex('=')]
    begins = re.fullmatch(r'[\s$*(\\[\w]*', sentence[: first.start]) is not None
    if after and (begins or right):
      return after[0].text if _is_sum(sentence, first) else first.text
  if len(tokens) > 1:
    between = sentence[first.end : tokens[1].start]
    if re.fullmatch(r'[\s$*\\)(]*(?:or|and|to|,|[-–])[\s$*\\)(]*', between):
      return sentence[first.start : tokens[1].end].strip()
  return first.text


def _is_sum(sentence: str, first: NumberToken) -> bool:
  """Returns whether a number is the first operand of a calculation."""
  return re.match(r'[^.,;\w]*[-+*/×÷=^\\]', sentence[first.end :]) is not None


def _unmarked_text(text: str) -> str:
  """Returns what an unmarked reply gives as its answer, a formula or words."""
  tail = text[-4 * MAX_ANSWER_CHARS :]
  for cue in reversed(list(_CUE.finditer(tail))[-_MAX_MARKS:]):
    line = tail[cue.end() :].strip().partition('\n')[0]
    formula = _FORMULA.match(line)
    if formula:
      return next(filter(None, formula.groups())).strip()
    sentence = re.split(r'\.(?=\s|$)', _without_markup(line))[0].strip()
    if says_something(sentence):
      return sentence
  lines = [line for line in tail.strip().split('\n') if line.strip()]
  if not lines:
    return ''
  formulas = _FORMULA.findall(tail.strip().rpartition('\n\n')[2])
  if formulas:
    return next(filter(None, formulas[-1])).strip()
  return _without_markup(lines[-1])
