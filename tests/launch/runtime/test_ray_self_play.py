"""Under Ray, games of several players are those of one process."""

import pytest

from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import RAY, same
from tests.launch.test_self_play import record

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
OPTIONS = ('--config.eval.interval=0', '--config.num_steps=1')


@pytest.mark.parametrize('opponent', ['', 'random(replies="pass, bet")'])
def test_games_are_those_of_one_process(ray, tmp_path, opponent):
  options = (*OPTIONS, f'--config.env.kuhn.opponent={opponent}')
  one = record(tmp_path / 'one', *options)
  same(one, record(tmp_path / 'two', *options, *RAY))
  assert runs.weights(tmp_path / 'one') == runs.weights(tmp_path / 'two')


@pytest.mark.slow
def test_a_model_plays_the_other_side_from_an_actor_of_its_own(ray, tmp_path):
  record(tmp_path / 'first', *OPTIONS)
  call = f'model(checkpoint="{tmp_path}/first/export", max_tokens=2, max_length=256)'
  options = (*OPTIONS, f'--config.env.kuhn.opponent={call}')
  one = record(tmp_path / 'one', *options)
  same(one, record(tmp_path / 'two', *options, *RAY))
