"""Under Ray judges and reward models live in actors, and say what they say here."""

import pytest

from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import OPTIONS, RAY, same
from tests.launch.test_rewards import TINY, folders, learned, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group('ray')]
__all__ = ['folders']


@pytest.mark.extended
def test_rewards_are_those_of_one_process(ray, folders, tmp_path):
  model, scorer = folders
  with served(lambda body: f'Score: {body["seed"] % 11}') as (url, _):
    spec = (
      f'judge(url="{url}", model="m", weight=.5) + format(pattern=".*")'
      f' + judge(checkpoint="{model}", votes=2, temperature=1, max_tokens=4,'
      ' template="{reply}", otherwise=.25, max_length=256)'
      f' + reward_model(checkpoint="{scorer}", sigmoid=True)'
    )
    options = (*OPTIONS, *TINY, f'--config.rollout.rewards={spec}')
    here = runs.record(tmp_path / 'here', *options)
    there = runs.record(tmp_path / 'there', *options, *RAY)
  same(here, there)
  for one, other in zip(learned(here), learned(there), strict=True):
    names = {name for name in one if name.startswith('reward/')}
    assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert len({one[f'reward/{n}'] for n in ('judge', 'judge_2', 'reward_model')}) == 3
