"""Choice parsing finds the letter that a reply to a multiple-choice question chooses.

The article A and the pronoun I are not choices, and neither is one of several letters.
"""

import re
from collections.abc import Sequence

from jaxrl.envs.graders.answer_marks import MAX_ANSWER_CHARS, iter_marked
from jaxrl.envs.graders.answer_matching import answers_match
from jaxrl.envs.graders.answer_numbers import MAX_SEARCHED_CHARS, clean_text
from jaxrl.envs.reply_parsing import without_thought

_MAX_CUES = 100  # phrases that are looked at, from the last one on
HEDGED = '?'  # in place of a letter where a reply names several

# What introduces a choice: its match ends where the choice begins.
_CUE = re.compile(
  r"""
  (?:
    \b(?:answer|ans|option|choice|response|solution|conclusion)s?\b['"*_\s]*
    (?:\s(?:to|of|for)\s[^:=.\n]{1,80}?|\s(?:choice|option|letter)\b)?
    (?:\([^()\n]{2,40}\)\s*)?[\s*_]*
    (?:\b(?:is|are|was)\b|\b(?:would|will|should|must)\s+be\b|[:：=→]|\s[-–—]\s)
    |\b(?:i|we)(?:\s+(?:would|will|'d|must|should|can))?(?:'d|'ll)?\s+
     (?:choose|select|pick|go\s+with|chose|selected|picked|answer)\b
    |\b(?:choose|select|pick|mark)\s+(?=\(?(?:option|choice|answer)?\s*\(?[A-Z]\b)
    |\b(?:corresponds|corresponding|matches|points|leads)\s+(?:to\s+)?
     (?=(?:the\s+)?(?:option|choice|answer|letter|\([A-Z]\)))
    |\banswer\s+(?=\(?[A-Z]\b(?!['’\s]*[a-z]))
    |\b(?:which|that|this|it)(?:\s+is|['’]s)\s+(?=(?:option|choice|answer|letter)\b)
    |答案(?:选项)?(?:应该|应当|应)?(?:是|为|选)?[：:\s]*|(?:故|应|因此|所以)?选择?项?[：:\s]*(?=[A-Z])
    |\b(?:respuesta|réponse|risposta|resposta|Antwort|Ответ)(?:\s+\w+)?\s*
     (?:\b(?:es|est|è|é|ist|lautet)\b|[:：])
    |정?답(?:은|는|[:：])|(?:正解|答え)(?:は|[:：])
    |\b(?:(?:it|that|this)(?:['’]s|\s+is|\s+(?:must|should|would|has\s+to)\s+be)
     |so|thus|therefore|hence)\b[,:]?\s(?=[*_("'\[]*[A-Z][*_)"'\]]*[.!]?\s*(?:\n|\Z))
  )[\s:：*_]*
  """,
  re.VERBOSE | re.IGNORECASE,
)
# A choice that stands before what says that it is right.
_RIGHT = re.compile(
  r"""
  (?:\b(?:option|choice|answer|statement)\s+)?[*_$(\[]{0,6}\b([A-Z])\b[)\]*_$.]*
  (?:\s*\([^()\n]{1,60}\)|\s*[:：][^\n.]{1,80}?)?
  \s+(?:is|must\s+be|would\s+be|seems|appears\s+to\s+be)\s+(?:indeed\s+|therefore\s+|
  thus\s+|clearly\s+)?(?:(?:the|our|my)\s+)?(?:most\s+)?
  (?:(?:only|single|best|correct|right|accurate|appropriate|likely|valid|true)\b
  |answer\b)
  |([A-Z])\s?是?正确
  """,
  re.VERBOSE,
)
_NEGATED = re.compile(
  r"\s*(?:not|n't|neither|never|incorrect|wrong|none\s+of\s+the\s+(?:options|choices)"
  r'|unclear|unknown|not\s+\w+)\b',
  re.IGNORECASE,
)
_FILLER = re.compile(
  r"""
  (?:(?:thus|then|therefore|clearly|definitely|probably|likely|most\s+likely|simply|just
  |indeed|still|also|actually|that|i\s+(?:think|believe|guess|would\s+say)|it['’]s|it\s+is
  |so|hence|the|correct|right|best|final|letter|option|choice|answer|is|:|：|=|->|→)
  (?![\w'’])[\s,*_:]*)+
  """,
  re.VERBOSE | re.IGNORECASE,
)
_OPENED = r'[\s*_$`"\'“‘(（「【\[{<]*'
_LETTER = re.compile(
  rf"""
  {_OPENED}(?:(?:option|choice|letter|answer)\s*{_OPENED})?
  (?P<letter>[A-Za-z])(?![0-9A-Za-zÀ-ɏ]|['’]\w)(?P<closed>[*_$`"'”’)）」】\]}}>]*)
  """,
  re.VERBOSE | re.IGNORECASE,
)
_NEXT_LETTER = re.compile(
  r'[\s*_$]*(?:,?\s*\b(?:and/or|or|and|also|as\s+well\s+as|but\s+also)\b|[,/&+;]|\\&)'
  r'\s*(?:(?:also|maybe|perhaps|possibly|option|choice|both)\s*)*[\s*_$(\[]*'
  r'([A-Z])(?![\w\'’])(?!\s+(?:is|are|was|has|would|cannot|and|does)\b)[)\]*_$]*'
  r'(?=\s*(?:[,.;/&)]|$|\n|\b(?:or|and|are|both)\b))'
)
_AFTER_LETTER = re.compile(
  r"""
  \s*(?:$|\n|[.,:;!?)\]/|—–]|\s-|\(|[^\x00-ɏ])
  |\s+(?:because|since|as|due|which|given|for|based|where|with|is|in\ the|according|and
  |so|from|by|if|therefore)\b
  """,
  re.VERBOSE,
)
_STYLE = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}'
)
_BOLD = re.compile(r'\*\*([^*\n]{1,200})\*\*')
_NEGATION = re.compile(
  r"\bnot\b|n['’]t\b|\bwrong\b|\bincorrect|\bunlike\b|\brather\b", re.I
)


def chosen_letter(reply: str, choices: Sequence[str], *, strict: bool = False) -> str:
  """Returns the letter that a reply chooses.

  It is that of the last mark, or of the last phrase such as 'the answer is', that
  names a choice. Without them it is that of the last line, the first line, the only
  bold choice, or the only choice whose text the last line has.

  Args:
    reply: The reply.
    choices: The texts of the choices; may be empty.
    strict: Whether only a marked letter counts.

  Returns:
    The letter; '' for none, and `HEDGED` if the reply gives several.
  """
  reply = without_thought(reply)
  marked = [(start, _choice(text, choices)) for start, text in iter_marked(reply)]
  found = [(start, letter) for start, letter in marked if letter][:1]
  if not strict:
    found += _cued_letters(reply, choices)[-1:]
  if found:
    return max(found)[1]
  return '' if strict else _letter_by_place(reply, choices)


def only_letter(text: str) -> str:
  """Returns the letter that a text is, as in B, (b), **B.** or B) Paris; else ''.

  Args:
    text: The text.
  """
  letter = _choice(text, ())
  return '' if letter == HEDGED else letter


def _cued_letters(reply: str, choices: Sequence[str]) -> list[tuple[int, str]]:
  """Returns where phrases name a choice, and the choices, in order."""
  found, first = [], max(0, len(reply) - MAX_SEARCHED_CHARS)
  for cue in list(_CUE.finditer(reply, first))[-_MAX_CUES:]:
    rest = reply[cue.end() : cue.end() + MAX_ANSWER_CHARS]
    if not _NEGATED.match(rest):
      found.append((cue.start(), _choice(rest, choices, is_sentence=True)))
  for match in list(_RIGHT.finditer(reply, first))[-_MAX_CUES:]:
    letter = match[1] or match[2]
    before = reply[max(0, match.start() - 12) : match.start()]
    is_list = re.search(
      r'(?:\b(?:or|and|nor|neither|not)|\b[A-Z]\W{,3}[,/])\s*[*(]*$', before
    )
    if not is_list and _is_possible(letter, choices):
      found.append((match.start(), letter))
  return sorted(pair for pair in found if pair[1])


def _choice(text: str, choices: Sequence[str], *, is_sentence: bool = False) -> str:
  """Returns the letter of the choice that a text is or, as a sentence, begins with."""
  text = _plain(text[:MAX_ANSWER_CHARS])
  for _ in range(2):
    if letter := _choice_by_text(text, choices, is_sentence=is_sentence):
      return letter
    filler = _FILLER.match(text)
    if match := _LETTER.match(text):
      return _letter_of(match, text, choices)
    if re.match(r'(?:either|both|between)\b', text, re.IGNORECASE):
      rest = text.partition(' ')[2]
      named = _LETTER.match(rest)
      return HEDGED if named and _NEXT_LETTER.match(rest, named.end()) else ''
    if filler is None or filler.end() == 0:
      return ''
    text = text[filler.end() :]
  return ''


def _letter_of(match: re.Match[str], text: str, choices: Sequence[str]) -> str:
  """Returns the letter of a match of `_LETTER`, unless it is a word of a sentence."""
  letter, rest = match['letter'].upper(), text[match.end() :]
  if not _is_possible(letter, choices):
    return ''
  if other := _NEXT_LETTER.match(rest):
    return letter if other[1] == letter else HEDGED
  name = re.match(r'[-–](\w.*)|\+|\#', rest)  # B-cells, C++, but B-Paris
  if name and _choice_by_text(name[1] or '', choices, is_sentence=True) != letter:
    return ''
  is_enclosed = bool(set(match['closed']) & set(')）」】]}>*_$`"'))
  opened = text[: match.start('letter')]
  is_named = re.search(r'option|choice|letter', opened, re.IGNORECASE) is not None
  if is_enclosed or _AFTER_LETTER.match(rest):
    return letter
  is_capital = match['letter'].isupper()
  return letter if is_capital and (is_named or letter not in 'AI') else ''


def _is_possible(letter: str, choices: Sequence[str]) -> bool:
  return not choices or ord(letter) - ord('A') < len(choices)


def _choice_by_text(text: str, choices: Sequence[str], *, is_sentence: bool) -> str:
  """Returns the letter of the choice whose text it is, or begins with."""
  folded = _fold(text)
  if not folded:
    return ''
  for number, choice in enumerate(choices):
    if folded == _fold(choice):
      return chr(ord('A') + number)
  line = text.partition('\n')[0].strip()
  for number, choice in enumerate(choices):
    if any(c.isdigit() for c in choice) and answers_match(line, choice):
      return chr(ord('A') + number)
  if not is_sentence:
    return ''
  beginning = [
    (len(_fold(choice)), chr(ord('A') + number))
    for number, choice in enumerate(choices)
    if len(_fold(choice)) > 1
    and re.match(
      rf'(?:the |an? )?{re.escape(_fold(choice))}(?!\w|[.,/^]\w|\s*[-+*/^=×]|\s+or\b)',
      folded,
    )
  ]
  return max(beginning)[1] if beginning else ''


def _letter_by_place(reply: str, choices: Sequence[str]) -> str:
  """Returns the choice that a reply without marks and phrases consists of."""
  reply = reply.strip()
  if len(reply) > MAX_SEARCHED_CHARS:
    reply = f'{reply[:MAX_ANSWER_CHARS]}\n{reply[-MAX_SEARCHED_CHARS:]}'
  lines = [line.strip() for line in reply.split('\n') if line.strip()]
  if not lines:
    return ''
  tail = re.sub(r'^(?:so|thus|therefore|hence)\b[,:]?\s*', '', lines[-1], flags=re.I)
  labelled = [line for line in lines if _labelled(line)]
  for line in (tail, lines[0]):
    letter = _choice(line, choices)
    if letter and (len(labelled) < 2 or not _labelled(line)) and _stands_alone(line):
      return letter
  if len(labelled) > 1:
    return ''
  bold = {_choice(match[1], choices) for match in _BOLD.finditer(reply)} - {''}
  if len(bold) == 1:
    return bold.pop()
  folded = _fold(lines[-1])
  named = [
    chr(ord('A') + number)
    for number, choice in enumerate(choices)
    if len(_fold(choice)) > 1
    and re.search(rf'(?<![\w.]){re.escape(_fold(choice))}(?!\w|[.,]\d)', folded)
  ]
  return named[0] if len(named) == 1 and not _NEGATION.search(lines[-1]) else ''


def _labelled(line: str) -> bool:
  """Returns whether a line is one of a list of choices, such as B) Paris."""
  return re.match(r'[\s*_-]*\(?[A-Z][).:]\s*\S', line) is not None


def _stands_alone(line: str) -> bool:
  """Returns whether a line is a choice and no sentence that begins with a letter."""
  text = _plain(line)
  match = _LETTER.match(text)
  if match is None:
    return True
  rest = text[match.end() :].strip(' .,!*_$)"\'')
  return not rest or bool(re.match(r'\s*[).:\]*_–—-]', text[match.end('letter') :]))


def _plain(text: str) -> str:
  """Removes the LaTeX around a choice."""
  text = re.sub(r'<\|[^|<>]{1,40}\|>|\\\(|\\\)|\\\[|\\\]|</?answer>', '', text)
  for _ in range(3):
    text = _STYLE.sub(r'\1', text)
  return text.replace('\\left', '').replace('\\right', '').strip(' \n\t:')


def _fold(text: str) -> str:
  """Returns a choice's text without case, quotes and spaces that do not matter."""
  text = ' '.join(_plain(clean_text(text)).casefold().split())
  return text.strip(' .$*_`"\'“”')
