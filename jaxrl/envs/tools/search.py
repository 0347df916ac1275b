"""Search over a corpus on this machine's disk, by BM25.

Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009; as the library
bm25s computes it, https://github.com/xhluca/bm25s.
"""

import dataclasses
import functools
import importlib.util
import threading
from pathlib import Path
from typing import Any

from jaxrl.data.sources import DataError, load_rows
from jaxrl.envs.tools.base import Schema, ToolError, check, schema
from jaxrl.signature import ConfigError

TEXTS = ('.txt', '.md')
_LOCK = threading.Lock()  # so that environments that start together build one index


@dataclasses.dataclass(frozen=True)
class Passage:
  title: str
  text: str


class Index:
  """BM25 over passages; may be asked from many threads."""

  def __init__(self, passages: list[Passage], stopwords: str):
    import bm25s

    self.passages, self._stopwords = passages, stopwords or []
    self._bm25 = bm25s.BM25(backend='numpy')
    texts = [f'{passage.title}\n{passage.text}' for passage in passages]
    self._bm25.index(self._words(texts), show_progress=False)

  def _words(self, texts: list[str]) -> list[list[str]]:
    import bm25s

    words = bm25s.tokenize(
      texts, stopwords=self._stopwords, return_ids=False, show_progress=False
    )
    assert isinstance(words, list)  # of lists of words, as return_ids=False has it
    return words

  def words(self, text: str) -> list[str]:
    """Those of its words that count."""
    return self._words([text])[0]

  def best(self, words: list[str], count: int) -> list[Passage]:
    """The passages that have any of the words, the best first."""
    known = [word for word in words if word in self._bm25.vocab_dict]
    if not known:
      return []
    count = min(count, len(self.passages))
    found, scores = self._bm25.retrieve(
      [known], k=count, show_progress=False, n_threads=0
    )
    ranked = zip(found[0], scores[0], strict=True)
    return [self.passages[i] for i, score in ranked if score > 0]


@functools.cache
def _index(path: str, key: str, title: str, stopwords: str) -> Index:
  return Index(passages(path, key, title), stopwords)


def index(path: str, key: str, title: str, stopwords: str) -> Index:
  """The index of a corpus: one in a process, however many ask for it."""
  with _LOCK:
    return _index(path, key, title, stopwords)


def passages(path: str, key: str, title: str) -> list[Passage]:
  """What a corpus holds: the rows of a data file, or the paragraphs of texts.

  Raises DataError for a row without `key`, and for a corpus without a passage.
  """
  place = Path(path).expanduser()
  if place.suffix in TEXTS:
    files = [place]
  elif place.is_dir():
    files = sorted(file for file in place.rglob('*') if file.suffix in TEXTS)
  else:
    files = []
  if files:
    found = [
      Passage(file.stem, paragraph.strip())
      for file in files
      for paragraph in file.read_text(errors='replace').split('\n\n')
      if paragraph.strip()
    ]
  else:
    rows = load_rows(path)
    for i, row in enumerate(rows):
      if not isinstance(row.get(key), str):
        raise DataError(
          f'corpus {path!r}, row {i}: no text under the key {key!r}; there are '
          f'{", ".join(row)}'
        )
    found = [Passage(str(row.get(title) or ''), row[key]) for row in rows]
  if not found:
    raise DataError(f'corpus {path!r} holds no text')
  return found


class Search:
  """Finds passages of a `corpus` by the words of a query.

  corpus: a .txt or .md file, or a folder of them, whose paragraphs are the passages; or
  any data file, whose rows are, with their text under `text_key` and, if they have one,
  a title under `title_key`. top_k: passages of an answer. snippet: characters of each,
  from shortly before the first word that was found. stopwords: a language whose common
  words do not count, as bm25s has them; '' for none. about: told to the model: what the
  corpus is.
  """

  def __init__(
    self,
    *,
    corpus: str = '',
    top_k: int = 3,
    snippet: int = 500,
    text_key: str = 'text',
    title_key: str = 'title',
    stopwords: str = 'english',
    about: str = '',
    name: str = 'search',
  ):
    if importlib.util.find_spec('bm25s') is None:
      raise ConfigError("the tool 'search' needs bm25s: pip install 'jaxrl[tools]'")
    if not corpus:
      raise ConfigError("tool 'search': option 'corpus' has to name a file or folder")
    if not Path(corpus).expanduser().exists():
      raise ConfigError(f"tool 'search': there is no corpus {corpus!r}")
    if min(top_k, snippet) < 1:
      raise ConfigError("tool 'search': top_k and snippet start at 1")
    self._source = (corpus, text_key, title_key, stopwords)
    self._top_k, self._snippet = top_k, snippet
    about = about or 'Searches a collection of texts'
    query = {'query': {'type': 'string', 'description': 'words to look for'}}
    text = f'{about.rstrip(".")}. Returns the passages that match best.'
    self._schema = schema(name, text, query, ['query'])

  def start(self) -> list[Schema]:
    index(*self._source)
    return [self._schema]

  def call(self, name: str, arguments: dict[str, Any], *, seconds: float) -> str:
    """Takes milliseconds, whatever the query: a long one is cut."""
    check(self._schema, arguments)
    made = index(*self._source)
    words = made.words(arguments['query'][:1000])
    if not words:
      raise ToolError('arguments', "'query' has no word to look for")
    found = made.best(words, self._top_k)
    if not found:
      return 'Nothing was found.'
    shown = (self._show(passage, words) for passage in found)
    return '\n\n'.join(f'[{i}] {text}' for i, text in enumerate(shown, 1))

  def _show(self, passage: Passage, words: list[str]) -> str:
    text, size, low = passage.text, self._snippet, passage.text.lower()
    places = [at for word in words if (at := low.find(word)) >= 0]
    start = max(0, min(places, default=0) - size // 4) if len(text) > size else 0
    start = min(start, max(0, len(text) - size))
    cut = text[start : start + size]
    cut = '…' * (start > 0) + cut + '…' * (start + size < len(text))
    return f'{passage.title}\n{cut}' if passage.title else cut

  def close(self) -> None:
    pass
