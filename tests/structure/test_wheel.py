"""The wheel has what it needs: it trains from another folder, without the checkout."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
UV = str(pathlib.Path(sys.executable).with_name('uv'))


def run(*command, cwd=ROOT):
  done = subprocess.run(
    command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.wheel
@pytest.mark.timeout(1800)
def test_an_empty_environment_trains_with_the_wheel(tmp_path):
  run(UV, 'build', '--wheel', '--out-dir', str(tmp_path / 'dist'))
  (wheel,) = (tmp_path / 'dist').glob('*.whl')
  python = str(tmp_path / 'venv' / 'bin' / 'python')
  run(UV, 'venv', '--python', sys.executable, str(tmp_path / 'venv'))
  constraints = ('--constraint', str(ROOT / 'constraints.txt'))
  run(UV, 'pip', 'install', '--python', python, *constraints, str(wheel))
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  version = 'import jaxrl, launch; print(jaxrl.__version__, jaxrl.__file__)'
  said = run(python, '-c', version, cwd=elsewhere)
  assert said.startswith('0.1.0 ') and str(tmp_path / 'venv') in said
  command = ('-m', 'launch.train', '--config=configs/debug.py', '--config.num_steps=2')
  said = run(python, *command, cwd=elsewhere)
  assert 'Finished.' in said
  assert (elsewhere / 'runs' / 'debug' / 'report.html').is_file()
  typed = [*(tmp_path / 'venv').glob('lib/*/site-packages/*/py.typed')]
  assert {'jaxrl', 'kernels', 'launch', 'configs'} <= {
    file.parent.name for file in typed
  }
