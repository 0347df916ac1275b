"""`python -m launch.algorithms` names every algorithm and explains each."""

import pytest

from jaxrl.algorithms import compose
from launch import algorithms


def test_lists_every_algorithm(capsys):
  assert algorithms.main([]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == compose.names()


@pytest.mark.parametrize('name', compose.names())
def test_explains_each(name, capsys):
  assert algorithms.main([name]) == 0
  text = capsys.readouterr().out
  for option in compose.maker_options(name):
    assert option in text or option in (*compose.PARTS, *compose.SETTINGS)
  assert 'policy_loss = ' in text


def test_answers_an_unknown_name_with_the_nearest(capsys):
  assert algorithms.main(['grp0']) == 2
  assert "Did you mean 'grpo'" in capsys.readouterr().err
