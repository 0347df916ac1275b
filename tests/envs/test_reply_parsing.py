"""The part of a reply that counts."""

import pytest

from jaxrl.envs.reply_parsing import tagged_answer


@pytest.mark.parametrize(
  'reply, answer',
  [
    ('so\n<answer> 7 </answer> I say', '7'),
    ('<answer>1</answer> no, <answer>2\n3</answer>', '2\n3'),
    ('<answer>1</answer> or <answer>2', '1'),
    ('first\nthen \n\n', 'then'),
    ('</answer>\nlast', 'last'),
    ('<answer>never closed', '<answer>never closed'),
    ('', ''),
    ('<think><answer>1</answer></think>2', '2'),
    ('```\n1 2\n```', '1 2'),
  ],
)
def test_answer(reply, answer):
  assert tagged_answer(reply) == answer


def test_a_reply_of_open_tags_takes_no_time():
  assert tagged_answer('<answer>' * 500_000 + '</answer>') == ''
