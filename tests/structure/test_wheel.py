"""The wheel has what it needs: it trains from another folder, without the checkout.

And a wheel is built with every file beside the modules.
"""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ['jaxrl', 'kernels', 'launch', 'configs']
UV = str(pathlib.Path(sys.executable).with_name('uv'))


def run(*command, cwd=ROOT):
  done = subprocess.run(
    command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def data_files(root):
  """The files of our packages below a folder that are no modules."""
  files = (file for name in PACKAGES for file in (root / name).rglob('*'))
  return {
    str(file.relative_to(root))
    for file in files
    if file.is_file()
    and file.suffix not in ('.py', '.pyc', '.ipynb')
    and file.name != 'BUILD'
  }


def test_a_wheel_has_every_file_beside_the_modules(tmp_path):
  run(sys.executable, 'setup.py', '--quiet', 'build_py', '--build-lib', str(tmp_path))
  built = data_files(tmp_path)
  assert built == data_files(ROOT)
  assert {'kernels/native/row_product.c', 'launch/report/static/style.css'} <= built


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
  assert set(PACKAGES) <= {file.parent.name for file in typed}
  obstacle = (
    "from kernels.native import row_product; print(row_product.obstacle('cpu'))"
  )
  said = run(python, '-c', obstacle, cwd=elsewhere)
  assert said == run(sys.executable, '-c', obstacle)
