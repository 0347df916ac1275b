"""Rows of published multiple-choice tasks: the model sees the choices."""

import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.data.dataset import GlobalDataset
from jaxrl.envs.math_env import MathEnv
from jaxrl.types import Task

# As the files have them: question, subject or id, choices, answer.
MMLU = {
  'question': 'What is the capital of Italy?',
  'subject': 'geography',
  'choices': ['Paris', 'Rome', 'Bern', 'Oslo'],
  'answer': 1,
}
ARC = {
  'id': 'Mercury_7175875',
  'question': 'What is the capital of Italy?',
  'choices': {'text': ['Paris', 'Rome', 'Bern'], 'label': ['A', 'B', 'C']},
  'answerKey': 'B',
}
MEDQA = {
  'question': 'What is the capital of Italy?',
  'answer': 'Rome',
  'options': {'A': 'Paris', 'B': 'Rome', 'C': 'Bern'},
  'answer_idx': 'B',
}
MMLU_PRO = {
  'question': 'What is the capital of Italy?',
  'options': ['Paris', 'Rome', 'Bern', 'N/A'],
  'answer': 'B',
  'answer_index': 1,
}
SHOWN = 'What is the capital of Italy?\n\nA. Paris\nB. Rome\nC. Bern'


def item(row, **keys):
  found = GlobalDataset([row], **keys).get_data_item(seed=0)
  assert found is not None
  return found


@pytest.mark.parametrize(
  ('row', 'shown'),
  [
    (MMLU, SHOWN + '\nD. Oslo'),
    (MMLU | {'choices': ['A) Paris', 'B) Rome', 'C) Bern']}, SHOWN),
    (ARC, SHOWN),
    (ARC | {'choices': ARC['choices'] | {'label': [*'123']}, 'answerKey': '2'}, SHOWN),
    (MEDQA, SHOWN),
    (MMLU_PRO, SHOWN),
    (MMLU_PRO | {'answer': 'Rome'}, SHOWN),
  ],
)  # fmt: skip
def test_choices_are_shown_and_the_answer_is_a_letter(row, shown):
  found = item(row)
  assert (found['question'], found['answer']) == (shown, 'B')
  env = MathEnv(grader=(ComponentCall('multiple_choice'),))
  observation, _ = env.reset(seed=0, options={'task': Task(0, 0, found)})
  assert observation == shown
  assert env.step('The answer is (B).')[1] == 1
  env.reset(seed=0, options={'task': Task(0, 0, found)})
  assert env.step('Answer: C')[1] == 0


def test_the_last_message_shows_them():
  system = {'role': 'system', 'content': 'Be brief.'}
  row = MMLU | {'question': [system, {'role': 'user', 'content': MMLU['question']}]}
  found = item(row)
  assert found['question'][0] == system and found['answer'] == 'B'
  assert found['question'][1]['content'] == SHOWN + '\nD. Oslo'


def test_a_filler_that_is_not_last_keeps_its_letter():
  found = item(MMLU_PRO | {'options': ['Paris', 'N/A', 'Rome', 'N/A'], 'answer': 'C'})
  assert found['question'].endswith('A. Paris\nB. N/A\nC. Rome')


def test_position_0_is_an_answer():
  assert item(MMLU | {'answer': 0})['answer'] == 'A'


@pytest.mark.parametrize(
  'row',
  [
    MMLU | {'question': SHOWN + '\nD. Oslo', 'answer': 'B'},  # shown already
    MMLU | {'answer': 'none of them'},
    MMLU | {'choices': ['Rome']},
    MMLU | {'choices': None},
    {'question': ['a', 'b'], 'answer': 'c'},
    {'question': ['a', 'b'], 'choices': ['c', 'd'], 'answer': 'c'},
  ],
)
def test_other_rows_stay_as_they_are(row):
  found = item(row)
  assert found['answer'] == row['answer']
  assert 'A. Paris' not in str(found['question']).removeprefix(SHOWN)


def test_a_digit_that_counts_from_0_or_from_1_is_refused():
  with pytest.raises(ValueError, match='0 or from 1; give a letter'):
    item(MMLU | {'answer': '1'})


def test_a_position_is_a_letter_also_where_the_question_shows_the_choices():
  found = item(MMLU | {'question': SHOWN + '\nD. Oslo'})
  assert (found['question'], found['answer']) == (SHOWN + '\nD. Oslo', 'B')


@pytest.mark.parametrize(
  ('choices', 'answer'),
  [
    ([1, 2, 3], 2),  # a value
    (['1', '2', '3'], 1),  # a position, as in MMLU
    (['1', '2', '3'], '2'),
    ({'label': ['1', '2', '3'], 'text': ['1', '2', '3']}, '2'),
  ],
)
def test_numbers_are_choices(choices, answer):
  found = item({'question': '1+1?', 'choices': choices, 'answer': answer})
  assert (found['question'], found['answer']) == ('1+1?\n\nA. 1\nB. 2\nC. 3', 'B')
