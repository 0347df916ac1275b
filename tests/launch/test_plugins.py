"""`--config.plugins=FOLDER`: own algorithms and parts, from the command line."""

import numpy as np
import pytest

from launch.settings import command_line as configs
from tests.algorithms.test_plugins import LOSSES, WHOLE
from tests.launch import runs


@pytest.fixture
def folder(tmp_path):
  place = tmp_path / 'plugins'
  place.mkdir()
  (place / 'my_losses.py').write_text(LOSSES)
  (place / 'whole.py').write_text(WHOLE)
  return place


def test_a_run_with_ones_own_algorithm_and_loss(folder, tmp_path):
  """The algorithm by its bare name, a loss by its own, an advantage by dotted path."""
  options = (
    f'--config.plugins={folder}',
    '--config.algorithm.policy_loss=steep(slope=3.0)',
    f'--config.algorithm.advantage={folder}/whole.py:halved(share=.25)',
    '--config.num_steps=1',
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
  )
  workdir = tmp_path / 'run'
  assert runs.main(workdir, *options, config=f'{runs.DEBUG}:whole') == 0
  (row,) = runs.rows(workdir)
  assert np.isfinite(row['loss/policy']) and 'loss/kl' in row


def test_a_config_holds_full_names(folder):
  command = configs.parse(
    [
      f'--config={runs.DEBUG}:other',
      f'--config.plugins={folder}',
      '--config.algorithm.kl_loss=cubic(coef=.5)',
    ]
  )
  config = configs.load(command)
  configs.check_algorithm(config)
  assert config.algorithm.name == f'{folder}/whole.py:other'
  assert config.algorithm.kl_loss == f'{folder}/whole.py:cubic(coef=.5)'


def test_a_plugin_that_fails_to_import_stops_the_run(folder, tmp_path):
  """With its own traceback and a status that is not 0, before anything is made."""
  (folder / 'broken.py').write_text('import math\nlimit = math.sqrt(-1)\n')
  workdir = tmp_path / 'run'
  option = f'--config.plugins={folder}'
  said = runs.run(workdir, option, config=runs.DEBUG, status=2)
  assert f'File "{folder}/broken.py", line 2' in said
  assert 'ValueError' in said and 'Traceback' in said
  assert not workdir.exists()


def test_a_config_file_may_name_the_folder(folder, tmp_path):
  (tmp_path / 'mine.py').write_text(
    'from configs import base\n'
    'def get_config(algorithm="grpo"):\n'
    '  config = base.get_config(algorithm)\n'
    f'  config.plugins = {str(folder)!r}\n'
    '  config.algorithm.policy_loss = "steep"\n'
    '  return config\n'
  )
  config = configs.load(configs.parse([f'--config={tmp_path}/mine.py']))
  assert config.algorithm.policy_loss == f'{folder}/my_losses.py:steep'
