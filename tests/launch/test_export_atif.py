"""Tests of `launch.report.export_atif`: a dump becomes ATIF documents."""

import json

import atif
import numpy as np

from jaxrl.data.images import as_image
from jaxrl.data.trajectory_writers.writer import DumpOptions, open_dump
from launch.report import export_atif
from tests.data.trajectory_writers.dumps import row


def test_a_dump_becomes_documents(tmp_path, capsys):
  run, out = tmp_path / 'run', tmp_path / 'out'
  run.mkdir()
  (run / 'config.json').write_text(json.dumps({'config': {}}))
  assert export_atif.main([str(run), str(out)]) == 2
  assert 'no dump on this machine' in capsys.readouterr().err
  columns, writer = open_dump('train', run)
  writer.check(fresh=True)
  trajectories = [
    row(sample_index=i, messages=[{'role': 'assistant', 'content': 'Yes.'}])
    for i in range(3)
  ]
  writer.write('t-step000001', columns.rows(trajectories, step=1, mode='train'))
  assert export_atif.main([str(run), str(out)]) == 0
  paths = sorted((out / 'train-t-step000001').iterdir())
  documents = [atif.Trajectory.model_validate_json(path.read_text()) for path in paths]
  assert [one.steps[0].message for one in documents] == ['Yes.'] * 3
  assert [one.steps[0].metrics.completion_token_ids for one in documents] == [[4]] * 3
  (file,) = (run / 'trajectories').iterdir()
  assert export_atif.main([str(file), str(tmp_path / 'again')]) == 0
  again = sorted((tmp_path / 'again' / file.stem).iterdir())
  assert [p.read_bytes() for p in again] == [p.read_bytes() for p in paths]
  file.write_text('{"a": 1}\n')
  assert export_atif.main([str(file), str(out)]) == 2
  assert 'save_content' in capsys.readouterr().err


def test_images_are_files_beside_the_documents(tmp_path):
  image = as_image(np.full((4, 4, 3), 7, np.uint8))
  content = [{'type': 'text', 'text': 'See'}, {'type': 'image', 'image': image}]
  trajectory = row(messages=[{'role': 'user', 'content': content}])
  run, live, out = tmp_path / 'run', tmp_path / 'live', tmp_path / 'out'
  run.mkdir()
  (run / 'config.json').write_text(json.dumps({'config': {}}))
  for path in ('', f'atif://{live}'):
    columns, writer = open_dump('train', run, DumpOptions(path))
    writer.check(fresh=True)
    writer.write('t-step000001', columns.rows([trajectory], step=1, mode='train'))
  assert export_atif.main([str(run), str(out)]) == 0
  for folder in (live, out):
    (file,) = (folder / 'train-t-step000001').iterdir()
    document = atif.Trajectory.model_validate_json(file.read_text())
    text, picture = document.steps[0].message
    assert text.text == 'See' and picture.source.media_type == 'image/png'
    assert (file.parent / picture.source.path).read_bytes() == image.png


def test_the_command_says_what_it_takes(tmp_path, capsys):
  assert export_atif.main(['--help']) == 0
  assert 'usage' in capsys.readouterr().out
  assert export_atif.main([str(tmp_path)]) == 2
  assert export_atif.main([str(tmp_path), str(tmp_path)]) == 2
