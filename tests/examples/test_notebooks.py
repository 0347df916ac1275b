"""The notebooks run from the first cell to the last, and are kept without outputs."""

import json
import os
import pathlib
import time

import pytest

from tests.launch import runs
from tests.marks import extended, slow

FILES = sorted((runs.ROOT / 'examples').glob('*.ipynb'))
ids = [file.stem for file in FILES]
LIMIT_S = 300.0  # of a whole notebook on two cores


def test_there_are_notebooks():
  assert len(FILES) >= 6


@pytest.mark.parametrize('file', FILES, ids=ids)
def test_a_notebook_is_small_and_has_no_outputs(file):
  notebook = json.loads(file.read_text())
  first = notebook['cells'][0]
  assert first['cell_type'] == 'markdown' and first['source'][0].startswith('# ')
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      assert not cell['outputs'] and cell['execution_count'] is None
  assert file.stat().st_size < 20_000
  assert set(notebook['metadata']) == {'kernelspec', 'language_info'}


@pytest.mark.parametrize(
  'file',
  [slow(file) if file.stem == 'first_run' else extended(file) for file in FILES],
  ids=ids,
)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
  nbformat = pytest.importorskip('nbformat')
  nbclient = pytest.importorskip('nbclient')
  for name, value in runs.environment().items():
    monkeypatch.setenv(name, value)
  path = os.pathsep.join(filter(None, [str(runs.ROOT), os.environ.get('PYTHONPATH')]))
  monkeypatch.setenv('PYTHONPATH', path)
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setenv('MPLBACKEND', 'agg')
  notebook = nbformat.read(file, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=240,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  )
  start = time.monotonic()
  client.execute()  # raises for the first cell that fails
  assert time.monotonic() - start < LIMIT_S
  executed = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert all(cell.execution_count for cell in executed)
  (folder,) = tmp_path.glob('jaxrl-*')  # where the notebook works
  assert any(pathlib.Path(folder).iterdir())
