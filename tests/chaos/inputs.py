"""Broken files and settings: one line that says what is wrong, or a run that works."""

import contextlib
import io
import json
import shutil

from configs import debug
from jaxrl.options import ConfigError
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from launch.settings.validation import validate
from tests.chaos.kills import compare
from tests.chaos.trials import Trials, judge
from tests.launch import runs

ROW = {'question': '1+1=', 'answer': '2'}
GOOD = json.dumps(ROW).encode()
DATA = {
  'an empty file': b'',
  'only blank lines': b'\n\n\n',
  'noise': bytes(range(256)) * 40,
  'not UTF-8': b'\xff\xfe' + GOOD,
  'a cut line': GOOD[:-4],
  'a cut line in the middle': GOOD + b'\n' + GOOD[:-4] + b'\n' + GOOD,
  'JSON of 100,000 levels': b'[' * 100_000,
  'an object of 100,000 levels': b'{"a":' * 100_000,
  'a number of 5,000 digits': b'{"question": "1", "answer": %s}' % (b'9' * 5000),
  'numbers that are none': b'{"question": "1", "answer": NaN}',
  'a list in place of a row': b'[1, 2]',
  'a text in place of a row': b'"hello"',
  'null in place of a row': b'null',
  'rows without a question': b'{"q": "1", "answer": "2"}',
  'a question that is null': b'{"question": null, "answer": "2"}',
  'a question that is an object': b'{"question": {"a": 1}, "answer": "2"}',
  'a line of 8 MB': b'{"question": "%s", "answer": "2"}' % (b'x' * 8_000_000),
  'surrogates': b'{"question": "\\ud800", "answer": "2"}',
  'control characters': b'{"question": "\\u0000\\u001b[31m", "answer": "2"}',
  'CSV': b'question,answer\n1+1=,2\n',
  'HTML': b'<!doctype html><p>404',
  'a pickle': b'\x80\x04\x95',
}
MODELS = {
  'no config.json': None,
  'config.json is empty': '',
  'config.json is a list': '[]',
  'an unknown family': '{"model_type": "gpt5"}',
  'no model_type': '{"hidden_size": 8}',
  'a negative size': {'hidden_size': -8},
  'a size of 0': {'num_hidden_layers': 0},
  'an absurd size': {'hidden_size': 10**9},
  'a size that is a text': {'vocab_size': 'many'},
  'heads that do not divide': {'num_attention_heads': 7},
  'an unknown activation': {'hidden_act': 'sin'},
  'an unknown RoPE scaling': {'rope_scaling': {'rope_type': 'other', 'factor': 2}},
}
WEIGHTS = {
  'no weights': None,
  'empty weights': b'',
  'a header of 2^60 bytes': (1 << 60).to_bytes(8, 'little') + b'{}',
  'a header that is no JSON': (8).to_bytes(8, 'little') + b'notjson!',
  'cut weights': 'cut',
}
KEYS = {
  'algorithm.policy_loss': 'ppo_clip(clip_low=0.2, clip_high=0.28)',
  'algorithm.advantage': 'grpo(scale_by_std=False)',
  'rollout.engine': 'jax(decode_steps=4)',
  'rollout.group_filter': 'reward_std() + accuracy(right=0.9)',
  'rollout.rewards': 'env + format(tags="think", weight=0.1)',
  'dataset.path': 'generate:arithmetic(max_number=9)',
  'dataset.curriculum': 'mixture(weights=(3, 1))',
  'model.random': 'qwen3(num_layers=2)',
  'optimizer.name': 'adamw(weight_decay=0.1)',
  'weight_sync.policy': 'trainer(interval=2)',
  'mesh': 'fsdp=8, tensor=2',
  'batch.packing': 'first_fit(tokens=64)',
}
LETTERS = '()[]{}=,.:+\'"\\ \n\0-019eE_axπ'


def data_files(rng, folder) -> Trials:
  """Every kind of broken data file, and random damage to a good one."""
  kinds = dict(DATA)
  for number in range(200):
    data = bytearray(b'\n'.join([GOOD] * 8))
    for place in rng.integers(0, len(data), size=rng.integers(1, 6)):
      data[place] = rng.integers(0, 256)
    kinds[f'random damage {number}'] = bytes(data)
  for number, (name, data) in enumerate(kinds.items()):

    def attempt(number=number, data=data) -> str:
      path = folder / f'data{number}.jsonl'
      path.write_bytes(data)
      return _start(folder / f'run{number}', f'--config.dataset.path={path}')

    yield name, attempt


def model_folders(rng, folder) -> Trials:
  """Every kind of broken model folder."""
  whole = folder / 'whole'
  runs.run(whole, '--config.num_steps=1', '--config.sft.num_steps=0')
  good = whole / 'export'
  config = json.loads((good / 'config.json').read_text())
  for number, (name, change) in enumerate([*MODELS.items(), *WEIGHTS.items()]):

    def attempt(number=number, name=name, change=change) -> str:
      place = folder / f'model{number}'
      shutil.copytree(good, place)
      if name in MODELS:
        text = json.dumps(config | change) if isinstance(change, dict) else change
        _write(place / 'config.json', None if text is None else text.encode())
      else:
        (weights,) = place.glob('*.safetensors')
        data = weights.read_bytes()
        _write(weights, data[: len(data) // 2] if change == 'cut' else change)
      return _start(folder / f'run{number}', f'--config.model.checkpoint={place}')

    yield name, attempt


def component_calls(rng, folder) -> Trials:
  """Settings with random letters changed, inserted and removed."""
  del folder
  for _ in range(3000):
    key = list(KEYS)[rng.integers(len(KEYS))]
    letters = list(KEYS[key])
    for _ in range(rng.integers(1, 5)):
      place, letter = rng.integers(len(letters)), LETTERS[rng.integers(len(LETTERS))]
      kind = rng.integers(3)
      letters[place : place + (kind != 1)] = [letter] if kind else []
    text = ''.join(letters)

    def attempt(key=key, text=text) -> str:
      config = debug.get_config()
      try:
        command_line.override(config, key, text)
        validate(resolve_settings(config, warn=False))
      except ConfigError as error:
        return '' if str(error) else 'an error without a word'
      return ''

    yield f'--config.{key}={text!r}', attempt


def checkpoints(rng, folder) -> Trials:
  """Damage to the newest checkpoint; the run goes on from it or from the one before."""
  options = (
    '--config.sft.num_steps=0',
    '--config.eval.interval=0',
    '--config.checkpoint.save_interval=1',
  )
  whole, begun = folder / 'whole', folder / 'begun'
  for place, steps in ((whole, 4), (begun, 3)):  # on the same devices as the attempts
    with contextlib.redirect_stdout(io.StringIO()):
      number = f'--config.num_steps={steps}'
      assert runs.main(place, *options, number, config=runs.VARIED) == 0
  for number in range(100):
    place = folder / f'run{number}'
    kind = ('truncated', 'empty', 'missing', 'a flipped bit')[number % 4]
    draw = int(rng.integers(1 << 30))

    def attempt(place=place, kind=kind, draw=draw) -> str:
      shutil.copytree(begun, place)
      newest = max(
        (path for path in (place / 'checkpoints' / 'train').iterdir() if path.is_dir()),
        key=lambda path: int(path.name) if path.name.isdigit() else -1,
      )
      files = sorted(path for path in newest.rglob('*') if path.is_file())
      damage(files[draw % len(files)], kind, draw)
      output = io.StringIO()
      with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = runs.main(place, *options, '--config.num_steps=4', config=runs.VARIED)
      if status:
        return judge(status, output.getvalue())
      return compare(whole, place)

    yield f'{kind} file', attempt


def damage(path, kind: str, draw: int) -> None:
  """Damages a file."""
  data = bytearray(path.read_bytes())
  if kind == 'missing':
    path.unlink()
    return
  if kind == 'empty':
    data = bytearray()
  elif kind == 'truncated':
    data = data[: len(data) // 2]
  elif data:
    data[draw % len(data)] ^= 1 << draw % 8
  path.write_bytes(data)


def _write(path, data: bytes | None) -> None:
  if data is None:
    path.unlink()
  else:
    path.write_bytes(data)


def _start(folder, *options: str) -> str:
  """Runs one step in this process."""
  output = io.StringIO()
  options = (*options, '--config.num_steps=1', '--config.sft.num_steps=0')
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
    status = runs.main(folder, *options, '--config.eval.interval=0')
  return judge(status, output.getvalue())
