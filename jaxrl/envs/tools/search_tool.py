"""SearchTool searches a corpus on this machine's disk by BM25.

Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, as computed by the
library bm25s, https://github.com/xhluca/bm25s.
"""

import dataclasses
import functools
import threading
from pathlib import Path

from jaxrl.data.row_sources import DataError, load_rows
from jaxrl.envs.tools.tool_api import (
  ToolArguments,
  ToolError,
  ToolSchema,
  check_arguments,
  tool_schema,
)
from jaxrl.options import require_package

TEXTS = ('.txt', '.md')
_LOCK = threading.Lock()  # so that environments that start together build one index


@dataclasses.dataclass(frozen=True)
class Passage:
  """A passage of the corpus, with the title of what it comes from."""

  title: str
  text: str


class SearchIndex:
  """BM25 over passages; may be used from many threads.

  Args:
    passages: The passages.
    stopwords: The language whose common words are ignored; '' for none.
  """

  def __init__(self, load_passages: list[Passage], stopwords: str):
    import bm25s

    self.passages = load_passages
    self._stopwords = stopwords or []
    self._bm25 = bm25s.BM25(backend='numpy')
    texts = [f'{passage.title}\n{passage.text}' for passage in load_passages]
    self._bm25.index(self._words(texts), show_progress=False)

  def _words(self, texts: list[str]) -> list[list[str]]:
    import bm25s

    words = bm25s.tokenize(
      texts, stopwords=self._stopwords, return_ids=False, show_progress=False
    )
    assert isinstance(words, list)  # of lists of words, as return_ids=False has it
    return words

  def words(self, text: str) -> list[str]:
    """Returns the words of a text that count.

    Args:
      text: The text.

    Returns:
      The words.
    """
    return self._words([text])[0]

  def best(self, words: list[str], count: int) -> list[Passage]:
    """Returns the passages that contain any of the words, the best first.

    Args:
      words: The words.
      count: The maximum number of passages.

    Returns:
      The passages.
    """
    known = [word for word in words if word in self._bm25.vocab_dict]
    if not known:
      return []
    count = min(count, len(self.passages))
    indices, scores = self._bm25.retrieve(
      [known], k=count, show_progress=False, n_threads=0
    )
    ranked = zip(indices[0], scores[0], strict=True)
    return [self.passages[i] for i, score in ranked if score > 0]


@functools.cache
def _index(path: str, key: str, title: str, stopwords: str) -> SearchIndex:
  return SearchIndex(load_passages(path, key, title), stopwords)


def shared_index(path: str, key: str, title: str, stopwords: str) -> SearchIndex:
  """Returns the index of a corpus; a process builds it once.

  Args:
    path: The corpus.
    key: The key of a row's text.
    title: The key of a row's title.
    stopwords: The language whose common words are ignored.

  Returns:
    The index.
  """
  with _LOCK:
    return _index(path, key, title, stopwords)


def load_passages(path: str, key: str, title: str) -> list[Passage]:
  """Loads a corpus's passages: rows of a data file or paragraphs of texts.

  Args:
    path: The corpus.
    key: The key of a row's text.
    title: The key of a row's title.

  Returns:
    The passages.

  Raises:
    DataError: If a row lacks `key` or there is no passage.
  """
  location = Path(path).expanduser()
  if location.suffix in TEXTS:
    files = [location]
  elif location.is_dir():
    files = sorted(file for file in location.rglob('*') if file.suffix in TEXTS)
  else:
    files = []
  if files:
    passages = [
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
    passages = [Passage(str(row.get(title) or ''), row[key]) for row in rows]
  if not passages:
    raise DataError(f'corpus {path!r} holds no text')
  return passages


class SearchTool:
  """Finds passages of a corpus by the words of a query.

  Args:
    corpus: A .txt or .md file, or a folder of them, whose paragraphs are the passages;
      or any data file, whose rows are.
    top_k: The number of passages of an answer.
    snippet: The number of characters shown of each, from shortly before the first word
      that was found.
    text_key: The key of a row's text.
    title_key: The key of a row's title, which may be missing.
    stopwords: A language whose common words are ignored, by bm25s's names; '' for none.
    about: What the corpus is, for the model.
    name: The name of the tool.

  Raises:
    ValueError: If bm25s is not installed or an option is wrong.
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
    require_package('bm25s', "the tool 'search'", 'tools')
    if not corpus:
      raise ValueError("option 'corpus' must name a file or folder")
    if not Path(corpus).expanduser().exists():
      raise ValueError(f'corpus={corpus!r}: there is no such file or folder')
    if min(top_k, snippet) < 1:
      raise ValueError('top_k and snippet must be at least 1')
    self._source = (corpus, text_key, title_key, stopwords)
    self._top_k = top_k
    self._snippet = snippet
    about = about or 'Searches a collection of texts'
    query = {'query': {'type': 'string', 'description': 'words to look for'}}
    text = f'{about.rstrip(".")}. Returns the passages that match best.'
    self._schema = tool_schema(name, text, query, ['query'])

  def start(self) -> list[ToolSchema]:
    """Builds the index if needed and returns the schema."""
    shared_index(*self._source)
    return [self._schema]

  def call(self, name: str, arguments: ToolArguments, *, seconds: float) -> str:
    """Searches within milliseconds, since a long query is cut."""
    check_arguments(self._schema, arguments)
    index = shared_index(*self._source)
    words = index.words(arguments['query'][:1000])
    if not words:
      raise ToolError('arguments', "'query' has no word to look for")
    passages = index.best(words, self._top_k)
    if not passages:
      return 'Nothing was found.'
    excerpts = (self._show(passage, words) for passage in passages)
    return '\n\n'.join(f'[{i}] {text}' for i, text in enumerate(excerpts, 1))

  def _show(self, passage: Passage, words: list[str]) -> str:
    text, size, lowered = passage.text, self._snippet, passage.text.lower()
    positions = [at for word in words if (at := lowered.find(word)) >= 0]
    start = max(0, min(positions, default=0) - size // 4) if len(text) > size else 0
    start = min(start, max(0, len(text) - size))
    excerpt = text[start : start + size]
    excerpt = '…' * (start > 0) + excerpt + '…' * (start + size < len(text))
    return f'{passage.title}\n{excerpt}' if passage.title else excerpt

  def close(self) -> None:
    """Does nothing."""
    pass
