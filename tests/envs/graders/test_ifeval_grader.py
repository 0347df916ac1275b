"""IFEval's instructions: for each a reply that keeps to it and one that does not."""

import time

import pytest

from jaxrl.envs.graders.ifeval_constraints import CONSTRAINTS
from jaxrl.envs.graders.ifeval_grader import make_instructions_grader
from jaxrl.options import ConfigError
from tests.calls import make_grader, parse_calls

CASES = [
  ("existence(keywords=['Sun', 'moon'])", 'sun and Moonlight', 'sun'),
  ("frequency(keyword='to', frequency=2)", 'To be or not to be', 'To be'),
  (
    "frequency(keyword='a', frequency=2, relation='less than')",
    'a b',
    'a a',
  ),
  ("forbidden_words(forbidden_words=['cat'])", 'a category', 'a Cat.'),
  ("letter_frequency(letter='q', let_frequency=2)", 'Quiq', 'Qui'),
  ("number_words(num_words=3, relation='at most')", 'one two, three', 'a b c d'),
  ("number_words(num_words=3, relation='less than')", 'one two', 'a b c'),
  ("number_words(num_words=3, relation='exactly')", 'a b c', 'a b'),
  ('number_sentences(num_sentences=2)', 'So 3.5 it is! "Well?" No', 'It is 3.5.'),
  ('number_paragraphs(num_paragraphs=2)', '***a\n***\nb', 'a *** *** b'),
  (
    "nth_paragraph_first_word(num_paragraphs=2, nth_paragraph=2, first_word='so')",
    'One.\n\n\n"So, two.',
    'So.\n\nTwo.',
  ),
  ('number_placeholders(num_placeholders=2)', '[name], [street 1]', '[[name]'),
  ('postscript', 'Yours.\nP. S. more', 'Yours. PS more'),
  ("postscript(postscript_marker='P.P.S')", 'p.p.s more', 'P.S. more'),
  ('number_bullet_lists(num_bullets=2)', 'a:\n* b\n  - c', '* a\n**b**\n---'),
  ('constrained_response', 'My answer is maybe.', 'My answer is perhaps.'),
  (
    'number_highlighted_sections(num_highlights=2)',
    '*one* and **two**',
    '**one** and ** *',
  ),
  (
    "multiple_sections(section_spliter='Section', num_sections=2)",
    'Section 1\na\nSection 2\nb',
    'Section 1\na\nSection B',
  ),
  ('json_format', '```json\n{"a": [1]}\n```', 'Here: {"a": 1}'),
  ('json_format', '[1, 2]', "{'a': 1}"),
  ('title', 'x\n<<a poem>> y', '<<>>'),
  ('two_responses', 'a\n******\nb', 'a\n******\na'),
  ("repeat_prompt(prompt_to_repeat='Say it. ')", 'say it. It.', 'It. Say it.'),
  ("end_checker(end_phrase='The end.')", '"… the end."', 'The end. No.'),
  ('quotation', ' "a" ', '"a'),
  ('capital_word_frequency(capital_frequency=2)', 'OH NO-ONE', 'OH no One'),
  ('english_capital', 'A, 1', 'Ab'),
  ('english_lowercase', 'a, 1', 'Ab'),
  ('no_comma', 'a; b', 'a, b'),
  (
    "response_language(language='de')",
    'Das ist ein ganz gewöhnlicher Satz über das Wetter.',
    'This is quite an ordinary sentence about the weather.',
  ),
]


def test_every_constraint_has_a_case():
  assert {rule.partition('(')[0] for rule, _, _ in CASES} == set(CONSTRAINTS)


@pytest.mark.parametrize(('rule', 'kept', 'broken'), CASES)
def test_constraints(rule, kept, broken):
  grade = make_instructions_grader(rules=parse_calls(rule))
  assert grade(kept, {}) == 1
  assert grade(broken, {}) == 0
  assert grade(' ', {}) == 0  # silence keeps to nothing


def test_a_reply_whose_language_cannot_be_told_is_in_any():
  rule = parse_calls("response_language(language='de')")
  assert make_instructions_grader(rules=rule)('1 2 3', {}) == 1


@pytest.mark.parametrize(
  ('reply', 'is_followed'),
  [
    ('Here it is:\n{"a": 1}', True),  # without its first line
    ('{"a": 1}\nThat is all.', True),  # without its last line
    ('Here:\n{"a": 1}\nThere.', True),  # without both
    ('**{"a": 1}**', True),  # without asterisks
    ('Here:\n**{"a": 1}**\nThere.', True),
    ('Here it is:\n\n{"a": 1}', True),
    ('{"a": 1}\n\nThat\nis all.', False),
  ],
)
def test_the_loose_score_forgives_what_frames_an_answer(reply, is_followed):
  rules = parse_calls('json_format')
  assert make_instructions_grader(rules=rules)(reply, {}) == 0
  assert make_instructions_grader(rules=rules, loose=True)(reply, {}) == is_followed
  assert make_instructions_grader(rules=rules, loose=True)(' ', {}) == 0


def test_the_share_that_is_kept_or_all():
  rules = "no_comma + english_capital + number_words(num_words=1, relation='exactly')"
  assert make_instructions_grader(rules=parse_calls(rules))('A B', {}) == pytest.approx(
    2 / 3
  )
  assert make_instructions_grader(rules=parse_calls(rules), strict=True)('A B', {}) == 0
  assert make_instructions_grader(rules=parse_calls(rules), strict=True)('A', {}) == 1
  grade = make_grader(f'instructions(rules="{rules}", weight=3)')
  assert grade('A B', {}).score == pytest.approx(2)


def test_a_task_of_ifevals_own_files():
  item = {
    'prompt': 'Write.',
    'instruction_id_list': ['punctuation:no_comma', 'length_constraints:number_words'],
    'kwargs': [{}, {'num_words': 3, 'relation': 'at least', 'keywords': None}],
  }
  assert make_instructions_grader()('a b c', item) == 1
  assert make_instructions_grader()('a b, c', item) == 0.5
  with pytest.raises(ValueError, match='has no instruction_id_list'):
    make_instructions_grader()('a', {})
  with pytest.raises(ValueError, match='kwargs for 1'):
    make_instructions_grader()('a', {**item, 'kwargs': [{}]})
  with pytest.raises(ConfigError, match="no constraint 'response_mood'"):
    name = 'language:response_mood'
    make_instructions_grader()('a', {'instruction_id_list': [name], 'kwargs': [{}]})


@pytest.mark.parametrize(
  ('rules', 'message'),
  [
    ('no_commas', "no constraint 'no_commas'. Did you mean 'no_comma'"),
    ('number_words', 'number_words: give it num_words=…'),
    ('number_words(words=3)', "no option 'words'"),
    ("number_words(num_words=3, relation='over')", 'is not one of at least'),
    ("number_words(num_words='3')", 'must be a whole number'),
  ],
)
def test_wrong_rules_are_refused_at_once(rules, message):
  with pytest.raises(ValueError, match=message):
    make_instructions_grader(rules=parse_calls(rules))


def test_long_replies_take_no_time():
  texts = [mark * 100_000 for mark in ('[', '*', '<<', '\n', 'a. ', '"', '{"a":', ' ')]
  begun = time.process_time()
  for rule, _, _ in CASES:
    grade = make_instructions_grader(rules=parse_calls(rule))
    for text in texts:
      grade(text, {})
  assert time.process_time() - begun < 10
