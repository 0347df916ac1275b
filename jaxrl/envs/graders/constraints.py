"""Instructions whose keeping can be read off the reply: IFEval's, by its names.

Zhou et al. 2023, arXiv:2311.07911. Each function says whether a reply keeps to it;
names and options are that data set's. Words are runs of letters, digits and `_`;
sentences end at `.`, `!` or `?` before white space, where IFEval asks a tokenizer. Not
here: response_language, which takes a model to tell.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

Relation = Literal['at least', 'less than', 'at most', 'exactly']

_ANSWERS = ('My answer is yes.', 'My answer is no.', 'My answer is maybe.')


def _holds(count: int, relation: Relation, number: int) -> bool:
  return {
    'at least': count >= number,
    'less than': count < number,
    'at most': count <= number,
    'exactly': count == number,
  }[relation]


def _listed(words: str | Sequence[str]) -> list[str]:
  return [w.casefold() for w in ([words] if isinstance(words, str) else words)]


def _pieces(reply: str, mark: str) -> list[str]:
  """What stands between marks; a mark at either end sets off nothing."""
  pieces = [piece.strip() for piece in reply.strip().split(mark)]
  if len(pieces) > 1 and not pieces[0]:
    pieces = pieces[1:]
  return pieces[:-1] if len(pieces) > 1 and not pieces[-1] else pieces


# ---- keywords


def existence(reply: str, *, keywords: Sequence[str]) -> bool:
  """All of them occur, in small or large letters."""
  return all(word in reply.casefold() for word in _listed(keywords))


def frequency(
  reply: str, *, keyword: str, frequency: int, relation: Relation = 'at least'
) -> bool:
  """The keyword occurs so often."""
  return _holds(reply.casefold().count(keyword.casefold()), relation, frequency)


def forbidden_words(reply: str, *, forbidden_words: Sequence[str]) -> bool:
  """None of them occurs as a word of its own."""
  reply = reply.casefold()
  return not any(
    re.search(rf'(?<!\w){re.escape(word)}(?!\w)', reply)
    for word in _listed(forbidden_words)
  )


def letter_frequency(
  reply: str, *, letter: str, let_frequency: int, let_relation: Relation = 'at least'
) -> bool:
  """The letter occurs so often, small or large."""
  return _holds(reply.casefold().count(letter.casefold()), let_relation, let_frequency)


# ---- length


def number_words(
  reply: str, *, num_words: int, relation: Relation = 'at least'
) -> bool:
  """It has so many words."""
  return _holds(len(re.findall(r'\w+', reply)), relation, num_words)


def number_sentences(
  reply: str, *, num_sentences: int, relation: Relation = 'at least'
) -> bool:
  """It has so many sentences; what follows the last end mark is one too."""
  sentences = re.split(r'(?<=[.!?])["\')\]]*\s', reply.strip())
  count = sum(bool(re.search(r'\w', sentence)) for sentence in sentences)
  return _holds(count, relation, num_sentences)


def number_paragraphs(reply: str, *, num_paragraphs: int) -> bool:
  """It is just so many paragraphs with `***` between them, none empty."""
  pieces = _pieces(reply, '***')
  return all(pieces) and len(pieces) == num_paragraphs


def nth_paragraph_first_word(
  reply: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """Of its so many paragraphs, an empty line between them, the nth begins so."""
  paragraphs = [p.strip() for p in reply.split('\n\n') if p.strip()]
  if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
    return False
  word = re.match(r'["\'(*_]*([^\s.,?!"\']*)', paragraphs[nth_paragraph - 1])
  return word is not None and word.group(1).casefold() == first_word.casefold()


# ---- content and format


def number_placeholders(reply: str, *, num_placeholders: int) -> bool:
  """It has at least so many placeholders such as [address]."""
  return len(re.findall(r'\[[^\[\]\n]*\]', reply)) >= num_placeholders


def postscript(reply: str, *, postscript_marker: str = 'P.S.') -> bool:
  """It has a postscript that the marker begins."""
  marker = re.escape(postscript_marker.strip()).replace(r'\.', r'\.\s?')
  return re.search(rf'(?<!\w){marker}', reply, re.IGNORECASE) is not None


def number_bullet_lists(reply: str, *, num_bullets: int) -> bool:
  """Just so many of its lines are bullets, `* …` or `- …`."""
  lines = [line.lstrip() for line in reply.split('\n')]
  bullets = [x for x in lines if re.match(r'\*(?!\*)|-(?!-)', x) and x[1:].strip()]
  return len(bullets) == num_bullets


def constrained_response(reply: str) -> bool:
  """It says 'My answer is yes.', 'My answer is no.' or 'My answer is maybe.'"""
  return any(answer in reply for answer in _ANSWERS)


def number_highlighted_sections(reply: str, *, num_highlights: int) -> bool:
  """It has at least so many *highlighted* or **highlighted** parts."""
  found = re.findall(r'\*\*[^\n*]+\*\*|\*[^\n*]+\*', reply)
  return sum(bool(part.strip('* ')) for part in found) >= num_highlights


def multiple_sections(reply: str, *, section_spliter: str, num_sections: int) -> bool:
  """It has at least so many sections, headed as in 'Section 1'."""
  head = rf'(?<!\w){re.escape(section_spliter.strip())}\s?\d'
  return len(re.findall(head, reply)) >= num_sections


def json_format(reply: str) -> bool:
  """It is JSON as a whole, or in a ``` or ```json block."""
  text = reply.strip().removesuffix('```').strip()
  for fence in ('```json', '```Json', '```JSON', '```'):
    text = text.removeprefix(fence)
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


def title(reply: str) -> bool:
  """It has a title such as <<poem of joy>>."""
  for line in reply.split('\n'):
    start, end = line.find('<<'), line.rfind('>>')
    if 0 <= start < end and line[start:end].strip('<> '):
      return True
  return False


def two_responses(reply: str) -> bool:
  """It is two answers that differ, `******` between them."""
  pieces = _pieces(reply, '******')
  return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def repeat_prompt(reply: str, *, prompt_to_repeat: str) -> bool:
  """It begins with the prompt."""
  return reply.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


def end_checker(reply: str, *, end_phrase: str) -> bool:
  """It ends with the phrase, a quotation mark aside."""
  end = end_phrase.strip().strip('"').casefold()
  return reply.strip().strip('"').casefold().endswith(end)


def quotation(reply: str) -> bool:
  """All of it stands in double quotation marks."""
  reply = reply.strip()
  return len(reply) > 1 and reply[0] == reply[-1] == '"'


# ---- letters


def capital_word_frequency(
  reply: str, *, capital_frequency: int, capital_relation: Relation = 'at least'
) -> bool:
  """It has so many words all in CAPITALS."""
  words = re.findall(r"\w[\w'-]*", reply)
  count = sum(word.isupper() for word in words)
  return _holds(count, capital_relation, capital_frequency)


def english_capital(reply: str) -> bool:
  """All its letters are capitals; whether they are English is not asked."""
  return reply.isupper()


def english_lowercase(reply: str) -> bool:
  """None of its letters is a capital; whether they are English is not asked."""
  return reply.islower()


def no_comma(reply: str) -> bool:
  """It has no comma."""
  return ',' not in reply


CONSTRAINTS: dict[str, Callable[..., bool]] = {
  check.__name__: check
  for check in (
    *(existence, frequency, forbidden_words, letter_frequency),
    *(number_words, number_sentences, number_paragraphs, nth_paragraph_first_word),
    *(number_placeholders, postscript, number_bullet_lists, constrained_response),
    *(number_highlighted_sections, multiple_sections, json_format, title),
    *(two_responses, repeat_prompt, end_checker, quotation),
    *(capital_word_frequency, english_capital, english_lowercase, no_comma),
  )
}
