"""IFEval constraints: instructions whose fulfilment can be verified from the reply.

Zhou et al. 2023, arXiv:2311.07911. Each function returns whether a reply fulfils its
constraint; names and options are those of the dataset. Words are runs of letters,
digits and `_`; sentences end at `.`, `!` or `?` before white space, where IFEval uses a
tokenizer. langdetect, as in IFEval, tells the language of a reply.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from jaxrl.component_table import ComponentTable
from jaxrl.options import require_package

Relation = Literal['at least', 'less than', 'at most', 'exactly']

_ANSWERS = ('My answer is yes.', 'My answer is no.', 'My answer is maybe.')


def _compare(count: int, relation: Relation, number: int) -> bool:
  return {
    'at least': count >= number,
    'less than': count < number,
    'at most': count <= number,
    'exactly': count == number,
  }[relation]


def _casefolded(words: str | Sequence[str]) -> list[str]:
  return [w.casefold() for w in ([words] if isinstance(words, str) else words)]


def _split_nonempty(reply: str, separator: str) -> list[str]:
  """Splits at marks; a mark at either end separates nothing."""
  pieces = [piece.strip() for piece in reply.strip().split(separator)]
  if len(pieces) > 1 and not pieces[0]:
    pieces = pieces[1:]
  return pieces[:-1] if len(pieces) > 1 and not pieces[-1] else pieces


# ---- keywords


def existence(reply: str, *, keywords: Sequence[str]) -> bool:
  """Checks that all keywords occur, regardless of case.

  Args:
    reply: The reply.
    keywords: The keywords that must occur.

  Returns:
    True if the reply fulfils the constraint.
  """
  return all(word in reply.casefold() for word in _casefolded(keywords))


def frequency(
  reply: str, *, keyword: str, frequency: int, relation: Relation = 'at least'
) -> bool:
  """Checks how often the keyword occurs.

  Args:
    reply: The reply.
    keyword: The keyword.
    frequency: The number to compare with.
    relation: How the count compares with the number.

  Returns:
    True if the reply fulfils the constraint.
  """
  return _compare(reply.casefold().count(keyword.casefold()), relation, frequency)


def forbidden_words(reply: str, *, forbidden_words: Sequence[str]) -> bool:
  """Checks that none of the words occurs as a separate word.

  Args:
    reply: The reply.
    forbidden_words: The words that must not occur.

  Returns:
    True if the reply fulfils the constraint.
  """
  reply = reply.casefold()
  return not any(
    re.search(rf'(?<!\w){re.escape(word)}(?!\w)', reply)
    for word in _casefolded(forbidden_words)
  )


def letter_frequency(
  reply: str, *, letter: str, let_frequency: int, let_relation: Relation = 'at least'
) -> bool:
  """Checks how often the letter occurs, regardless of case.

  Args:
    reply: The reply.
    letter: The letter.
    let_frequency: The number to compare with.
    let_relation: How the count compares with the number.

  Returns:
    True if the reply fulfils the constraint.
  """
  return _compare(
    reply.casefold().count(letter.casefold()), let_relation, let_frequency
  )


# ---- length


def number_words(
  reply: str, *, num_words: int, relation: Relation = 'at least'
) -> bool:
  """Checks the number of words.

  Args:
    reply: The reply.
    num_words: The number to compare with.
    relation: How the count compares with the number.

  Returns:
    True if the reply fulfils the constraint.
  """
  return _compare(len(re.findall(r'\w+', reply)), relation, num_words)


def number_sentences(
  reply: str, *, num_sentences: int, relation: Relation = 'at least'
) -> bool:
  """Checks the number of sentences; what follows the last end mark counts as one.

  Args:
    reply: The reply.
    num_sentences: The number to compare with.
    relation: How the count compares with the number.

  Returns:
    True if the reply fulfils the constraint.
  """
  sentences = re.split(r'(?<=[.!?])["\')\]]*\s', reply.strip())
  count = sum(bool(re.search(r'\w', sentence)) for sentence in sentences)
  return _compare(count, relation, num_sentences)


def number_paragraphs(reply: str, *, num_paragraphs: int) -> bool:
  """Checks the number of paragraphs, separated by `***` and none empty.

  Args:
    reply: The reply.
    num_paragraphs: The exact number of paragraphs.

  Returns:
    True if the reply fulfils the constraint.
  """
  pieces = _split_nonempty(reply, '***')
  return all(pieces) and len(pieces) == num_paragraphs


def nth_paragraph_first_word(
  reply: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """Checks the number of paragraphs and the first word of the nth one.

  Args:
    reply: The reply.
    num_paragraphs: The exact number of paragraphs.
    nth_paragraph: Which paragraph to check, counted from 1.
    first_word: The first word of that paragraph.

  Returns:
    True if the reply fulfils the constraint.
  """
  paragraphs = [p.strip() for p in reply.split('\n\n') if p.strip()]
  if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
    return False
  word = re.match(r'["\'(*_]*([^\s.,?!"\']*)', paragraphs[nth_paragraph - 1])
  return word is not None and word.group(1).casefold() == first_word.casefold()


# ---- content and format


def number_placeholders(reply: str, *, num_placeholders: int) -> bool:
  """Checks for a minimum number of placeholders such as [address].

  Args:
    reply: The reply.
    num_placeholders: The minimum number of placeholders.

  Returns:
    True if the reply fulfils the constraint.
  """
  return len(re.findall(r'\[[^\[\]\n]*\]', reply)) >= num_placeholders


def postscript(reply: str, *, postscript_marker: str = 'P.S.') -> bool:
  """Checks for a postscript that begins with the marker.

  Args:
    reply: The reply.
    postscript_marker: What the postscript begins with.

  Returns:
    True if the reply fulfils the constraint.
  """
  marker = re.escape(postscript_marker.strip()).replace(r'\.', r'\.\s?')
  return re.search(rf'(?<!\w){marker}', reply, re.IGNORECASE) is not None


def number_bullet_lists(reply: str, *, num_bullets: int) -> bool:
  """Checks for an exact number of bullets, `* …` or `- …`.

  Args:
    reply: The reply.
    num_bullets: The exact number of bullets.

  Returns:
    True if the reply fulfils the constraint.
  """
  lines = [line.lstrip() for line in reply.split('\n')]
  bullets = [x for x in lines if re.match(r'\*(?!\*)|-(?!-)', x) and x[1:].strip()]
  return len(bullets) == num_bullets


def constrained_response(reply: str) -> bool:
  """Checks for one of the answers 'My answer is yes.', '… no.' and '… maybe.'.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  return any(answer in reply for answer in _ANSWERS)


def number_highlighted_sections(reply: str, *, num_highlights: int) -> bool:
  """Checks for a minimum number of *highlighted* or **highlighted** parts.

  Args:
    reply: The reply.
    num_highlights: The minimum number of highlighted parts.

  Returns:
    True if the reply fulfils the constraint.
  """
  highlighted = re.findall(r'\*\*[^\n*]+\*\*|\*[^\n*]+\*', reply)
  return sum(bool(part.strip('* ')) for part in highlighted) >= num_highlights


def multiple_sections(reply: str, *, section_spliter: str, num_sections: int) -> bool:
  """Checks for a minimum number of sections, headed as in 'Section 1'.

  Args:
    reply: The reply.
    section_spliter: The word that heads a section.
    num_sections: The minimum number of sections.

  Returns:
    True if the reply fulfils the constraint.
  """
  head = rf'(?<!\w){re.escape(section_spliter.strip())}\s?\d'
  return len(re.findall(head, reply)) >= num_sections


def json_format(reply: str) -> bool:
  """Checks that the reply is JSON, on its own or in a ``` or ```json block.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  text = reply.strip().removesuffix('```').strip()
  for fence in ('```json', '```Json', '```JSON', '```'):
    text = text.removeprefix(fence)
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


def title(reply: str) -> bool:
  """Checks for a title such as <<poem of joy>>.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  for line in reply.split('\n'):
    start, end = line.find('<<'), line.rfind('>>')
    if 0 <= start < end and line[start:end].strip('<> '):
      return True
  return False


def two_responses(reply: str) -> bool:
  """Checks for two different answers, separated by `******`.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  pieces = _split_nonempty(reply, '******')
  return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def repeat_prompt(reply: str, *, prompt_to_repeat: str) -> bool:
  """Checks that the reply begins with the prompt.

  Args:
    reply: The reply.
    prompt_to_repeat: The prompt.

  Returns:
    True if the reply fulfils the constraint.
  """
  return reply.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


def end_checker(reply: str, *, end_phrase: str) -> bool:
  """Checks that the reply ends with the phrase, ignoring a quotation mark.

  Args:
    reply: The reply.
    end_phrase: The phrase.

  Returns:
    True if the reply fulfils the constraint.
  """
  end = end_phrase.strip().strip('"').casefold()
  return reply.strip().strip('"').casefold().endswith(end)


def quotation(reply: str) -> bool:
  """Checks that the whole reply is in double quotation marks.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  reply = reply.strip()
  return len(reply) > 1 and reply[0] == reply[-1] == '"'


# ---- letters


def capital_word_frequency(
  reply: str, *, capital_frequency: int, capital_relation: Relation = 'at least'
) -> bool:
  """Checks the number of words all in CAPITALS.

  Args:
    reply: The reply.
    capital_frequency: The number to compare with.
    capital_relation: How the count compares with the number.

  Returns:
    True if the reply fulfils the constraint.
  """
  words = re.findall(r"\w[\w'-]*", reply)
  count = sum(word.isupper() for word in words)
  return _compare(count, capital_relation, capital_frequency)


def english_capital(reply: str) -> bool:
  """Checks that all letters are capitals, in whatever language.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  return reply.isupper()


def english_lowercase(reply: str) -> bool:
  """Checks that no letter is a capital, in whatever language.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  return reply.islower()


def no_comma(reply: str) -> bool:
  """Checks that there is no comma.

  Args:
    reply: The reply.

  Returns:
    True if the reply fulfils the constraint.
  """
  return ',' not in reply


# ---- language


def response_language(reply: str, *, language: str) -> bool:
  """Checks that the reply is in a language.

  As in IFEval, a reply whose language cannot be detected, such as digits, fulfils it.

  Args:
    reply: The reply.
    language: The language's code in ISO 639-1, such as 'de'.

  Returns:
    True if the reply fulfils the constraint.

  Raises:
    ValueError: If langdetect is not installed.
  """
  require_package('langdetect', "the instruction 'response_language'", 'envs')
  import langdetect

  langdetect.DetectorFactory.seed = 0  # else it draws anew for each reply
  try:
    return langdetect.detect(reply) == language
  except langdetect.LangDetectException:
    return True


CONSTRAINTS = ComponentTable[Callable[..., bool]](
  'constraint',
  "grader 'instructions'",
  {
    check.__name__: check
    for check in (
      *(existence, frequency, forbidden_words, letter_frequency),
      *(number_words, number_sentences, number_paragraphs, nth_paragraph_first_word),
      *(number_placeholders, postscript, number_bullet_lists, constrained_response),
      *(number_highlighted_sections, multiple_sections, json_format, title),
      *(two_responses, repeat_prompt, end_checker, quotation),
      *(capital_word_frequency, english_capital, english_lowercase, no_comma),
      response_language,
    )
  },
)
