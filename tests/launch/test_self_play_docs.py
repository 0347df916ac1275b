"""The configs and the game of docs/self_play.md, as they stand there."""

import re

from jaxrl.envs.env_registry import num_players
from jaxrl.rollout.opponents import PlayerOptions
from launch.rollouts.preparation import check_run
from launch.settings.resolve import resolve_settings
from tests.calls import env_factory
from tests.launch.runs import ROOT
from tests.rollout.fakes import FakeEngine
from tests.rollout.test_multi_player import play, players

PAGE = (ROOT / 'docs' / 'self_play.md').read_text()
FILES = {
  text.split()[1]: text
  for text in re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
}


def test_its_configs_are_those_of_runs():
  first = {}
  exec(FILES['poker.py'], first)
  settings = resolve_settings(first['get_config']())
  check_run(settings, trains=True)
  assert settings.env['kuhn'].env_type == 'kuhn_poker'
  second = {}
  exec(FILES['probed.py'], second)
  settings = resolve_settings(second['config'])
  assert settings.evaluations['probe'].num_tasks == 12
  assert settings.training_tags == ['kuhn']


async def test_its_game_is_played(tmp_path):
  (tmp_path / 'nim_env.py').write_text(FILES['nim_env.py'])
  name = f'{tmp_path}/nim_env.py:Nim'
  assert num_players(name, {}) == 2
  make = env_factory(name, {'stones': 5})
  for replies, scores in (('32', [-1, 1]), ('221', [1, -1]), ('3x', [1, -1])):
    words = iter(replies)
    context = players(make, FakeEngine(lambda prompt, sampling, w=words: next(w)))
    assert context.players == PlayerOptions(2)
    rows = await play(context)
    assert [row.score for row in rows] == scores, replies
