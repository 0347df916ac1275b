"""Hub names stand for models and data sets of the Hugging Face Hub, as paths do.

`owner/name`, `owner/name@revision` and, for data sets, `owner/name:part` are downloaded
by `huggingface_hub`, with its cache, token and offline mode (`HF_HOME`, `HF_TOKEN`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`). A folder of that name on this machine goes first.
"""

import functools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl.options import ConfigError, Keywords

log = logging.getLogger(__name__)

Kind = Literal['model', 'dataset']
_NAME = re.compile(
  r'(?:https://huggingface\.co/(?:datasets/)?)?'
  r'(?P<repo>[A-Za-z0-9][\w.\-]*/[\w.\-]+)(?:@(?P<revision>[\w./\-]+))?'
  r'(?::(?P<part>[^:]+))?/?'
)
# Endings of files, which no repository's name has.
_FILES = re.compile(
  r'\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|gz|bz2|xz|zst|zip|txt|py|safetensors|gguf)'
  r'$',
  re.IGNORECASE,
)
CONFIG_FILES = ('config.json', 'preprocessor_config.json', 'processor_config.json')
_WEIGHTS, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_MODEL_FILES = (
  *(*CONFIG_FILES, 'generation_config.json', 'chat_template.jinja'),
  *('chat_template.json', 'tokenizer.json', 'tokenizer_config.json'),
  *('special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt'),
  *('tokenizer.model', 'spiece.model', 'vocab.txt', 'value_head/model.safetensors'),
)
_OTHER_WEIGHTS = ('.bin', '.gguf', '.pth', '.pt', '.h5', '.msgpack', '.onnx')


class HubError(ConfigError):
  """Reports what of the Hub cannot be had, why, and what to do."""


class HubName(NamedTuple):
  """Names a repository.

  Attributes:
    repo: Owner and name, such as 'openai/gsm8k'.
    revision: A branch, a tag or a commit; '' for the main branch.
    part: A configuration, a folder or a file inside a data set; '' for all.
  """

  repo: str
  revision: str = ''
  part: str = ''

  def __str__(self) -> str:
    revision = f'@{self.revision}' if self.revision else ''
    return f'{self.repo}{revision}{f":{self.part}" if self.part else ""}'


def parse_name(text: str) -> HubName | None:
  """Parses a name on the Hub; None for a text that can only be a path.

  Args:
    text: The name, or the address of its page.
  """
  match = _NAME.fullmatch(text.strip())
  if match is None or _FILES.search(match['repo']):
    return None
  return HubName(match['repo'], match['revision'] or '', match['part'] or '')


class HubRepo:
  """Holds one commit of a repository, and downloads files of it.

  Attributes:
    name: The name.
    files: The paths of its files; without a connection, of those in the cache.
    commit: The commit.
  """

  def __init__(self, name: HubName, kind: Kind):
    """Asks the Hub for the commit and its files.

    Args:
      name: The name.
      kind: What the repository holds.

    Raises:
      HubError: If it cannot be reached, or there is no such repository.
    """
    from huggingface_hub import HfApi

    self.name = name
    self._kind: Kind = kind
    self._cached: Path | None = None
    try:
      info: Any = HfApi().repo_info(
        name.repo, revision=name.revision or None, repo_type=kind
      )
      self.commit = str(info.sha)
      self.files = [file.rfilename for file in info.siblings or ()]
    except Exception as error:
      if not _is_unreachable(error):
        raise _hub_error(name, kind, error) from error
      self._cached = self._find_cached(error)
      self.commit = self._cached.name
      self.files = sorted(
        file.relative_to(self._cached).as_posix()
        for file in self._cached.rglob('*')
        if file.is_file()
      )

  def download(self, files: Sequence[str]) -> Path:
    """Downloads files that are not in the cache yet.

    Args:
      files: Their paths in the repository.

    Returns:
      The folder that holds them.

    Raises:
      HubError: If one cannot be had.
    """
    if self._cached is not None:
      for file in files:
        if file not in self.files:
          raise HubError(
            f'{self._label}: {file} is not in the cache, and the Hub cannot be reached'
          )
      return self._cached
    from huggingface_hub import hf_hub_download

    options: Keywords = {'repo_id': self.name.repo, 'repo_type': self._kind}
    folder = Path()
    try:
      # By its own name once, so that it is found without a connection too.
      hf_hub_download(filename=files[0], revision=self.name.revision or None, **options)
      for file in files:
        path = hf_hub_download(filename=file, revision=self.commit, **options)
        folder = Path(path.removesuffix(file))
    except Exception as error:
      raise _hub_error(self.name, self._kind, error) from error
    return folder

  @property
  def is_cached(self) -> bool:
    """Returns whether the snapshot came from the cache, without a connection."""
    return self._cached is not None

  def read_text(self, file: str) -> str:
    """Returns the text of a file.

    Args:
      file: Its path in the repository.

    Raises:
      HubError: If it cannot be had.
    """
    return (self.download([file]) / file).read_text('utf-8', 'replace')

  @property
  def _label(self) -> str:
    return f'{self.name._replace(part="")} (a {self._kind} on the Hub)'

  def _find_cached(self, cause: Exception) -> Path:
    """Returns the folder of the commit that was downloaded before."""
    from huggingface_hub import snapshot_download

    try:
      folder = snapshot_download(
        self.name.repo,
        revision=self.name.revision or None,
        repo_type=self._kind,
        local_files_only=True,
        allow_patterns=['no file'],  # those that are needed are checked one by one
      )
    except Exception as error:
      raise _hub_error(self.name, self._kind, cause) from error
    log.warning('%s: the Hub cannot be reached: taken from the cache', self._label)
    return Path(folder)


@functools.lru_cache
def open_repo(name: HubName, kind: Kind) -> HubRepo:
  """Returns a repository; the Hub is asked once for its commit.

  Args:
    name: The name, whose part does not matter.
    kind: What the repository holds.

  Raises:
    HubError: If it cannot be reached, or there is no such repository.
  """
  return HubRepo(name._replace(part=''), kind)


def find_checkpoint(text: str, *, only_config: bool = False) -> str:
  """Returns the folder of a checkpoint, which is downloaded if it is a name on the Hub.

  Args:
    text: A folder, or a name on the Hub.
    only_config: Whether only the files with the model's shape are needed.

  Returns:
    The folder; `text` itself if it is one, or cannot be a name on the Hub.

  Raises:
    HubError: If there is no such folder, and the Hub does not have it either.
  """
  if not text or Path(text).expanduser().exists():
    return text
  name = parse_name(text)
  if name is None or name.part:
    return text
  repo = open_repo(name, 'model')
  wanted = CONFIG_FILES if only_config else _MODEL_FILES
  files = [file for file in wanted if file in repo.files]
  if 'config.json' not in files:
    raise HubError(f'{name} on the Hub holds no config.json, so it is not a model')
  if not only_config:
    files += _weight_files(repo)
  return str(repo.download(files))


def describe_checkpoint(text: str) -> str:
  """Returns how messages name a checkpoint: with its commit if it is on the Hub.

  Args:
    text: A folder, or a name on the Hub.
  """
  name = None if Path(text).expanduser().exists() else parse_name(text)
  if name is None or not text:
    return text
  return f'{name} at {open_repo(name, "model").commit[:12]}'


def _weight_files(repo: HubRepo) -> Iterator[str]:
  if _WEIGHTS in repo.files:
    yield _WEIGHTS
  elif _INDEX in repo.files:
    yield _INDEX
    try:
      yield from sorted(set(json.loads(repo.read_text(_INDEX))['weight_map'].values()))
    except (ValueError, KeyError, AttributeError) as error:
      raise HubError(f'{repo.name} on the Hub: {_INDEX} cannot be read') from error
  else:
    others = [file for file in repo.files if file.endswith(_OTHER_WEIGHTS)]
    others.sort(key=lambda file: file.count('/'))
    has = f', but {others[0]}' if others else ''
    raise HubError(
      f'{repo.name} on the Hub holds no {_WEIGHTS}{has}: take a repository with '
      'weights in safetensors'
    )


# ---- Errors


def _is_unreachable(error: Exception) -> bool:
  """Returns whether an error means that there is no connection, or none is wanted."""
  import httpx
  from huggingface_hub import errors

  if isinstance(error, errors.OfflineModeIsEnabled | httpx.TransportError):
    return True
  response = getattr(error, 'response', None)
  return response is not None and response.status_code >= 500


def _hub_error(name: HubName, kind: Kind, error: Exception) -> HubError:
  """Returns an error of `huggingface_hub` in one line."""
  from huggingface_hub import constants, errors

  what = f'there is no {"folder" if kind == "model" else "file or folder"} {name.repo}'
  page = f'{constants.ENDPOINT}/{"datasets/" * (kind == "dataset")}{name.repo}'
  response = getattr(error, 'response', None)
  status = getattr(response, 'status_code', None)
  if isinstance(error, errors.GatedRepoError):
    reason = (
      f'it is gated: accept its terms at {page}, and set HF_TOKEN to a token of yours'
    )
  elif isinstance(error, errors.RepositoryNotFoundError):
    reason = f'there is no such {kind} either (a private one needs a token in HF_TOKEN)'
  elif isinstance(error, errors.RevisionNotFoundError):
    reason = f'it has no revision {name.revision or "main"!r}'
  elif isinstance(error, errors.RemoteEntryNotFoundError):
    reason = f'a file is missing: {_first_line(error)}'
  elif status in (401, 403):
    reason = 'it refuses the request: set HF_TOKEN to a token that may read it'
  elif isinstance(error, errors.OfflineModeIsEnabled):
    reason = 'it is not in the cache, and HF_HUB_OFFLINE is set: unset it, or download'
  elif isinstance(error, errors.HFValidationError):
    reason = f'it is not a name there: {_first_line(error)}'
  elif _is_unreachable(error):
    cause = f'it answers {status}' if status else _first_line(error)
    reason = (
      f'it is not in the cache, and {constants.ENDPOINT} cannot be reached: {cause}'
    )
  else:
    reason = _first_line(error)
  return HubError(f'{what}, and on the Hugging Face Hub: {reason}')


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
