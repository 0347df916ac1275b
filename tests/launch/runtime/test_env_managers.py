"""Env managers of the user's own under Ray: the classes of docs/extending.md."""

import pytest

from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import OPTIONS, RAY, same
from tests.launch.test_env_managers import BROKEN, KEY, SCALED
from tests.launch.test_extensions import FILES

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray'), pytest.mark.slow]


def test_a_manager_plays_under_ray_as_in_one_process(ray, tmp_path):
  name = SCALED.partition(':')[0]
  (tmp_path / name).write_text(FILES[name])
  options = (*OPTIONS, '--config.num_steps=1', f'{KEY}={tmp_path}/{SCALED}')
  alone = runs.record(tmp_path / 'alone', *options)
  under_ray = runs.record(tmp_path / 'ray', *options, *RAY)
  same(alone, under_ray)


@pytest.mark.extended
def test_a_broken_manager_ends_a_run_under_ray_with_one_line(ray, tmp_path, capsys):
  (tmp_path / 'broken.py').write_text(BROKEN)
  options = (*OPTIONS, *RAY, f'{KEY}={tmp_path}/broken.py:OtherSample')
  assert runs.main(tmp_path / 'run', *options, config=runs.VARIED) == 2
  lines = capsys.readouterr().err.splitlines()
  (line,) = [x for x in lines if x.startswith('error: ')]
  assert 'put a row with sample_index=9' in line
