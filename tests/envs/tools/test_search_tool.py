"""Search over corpora of each kind, by the real index."""

import json
import threading

import pytest

from jaxrl.data.row_sources import DataError
from jaxrl.envs.tools import search_tool
from jaxrl.envs.tools.search_tool import SearchTool
from jaxrl.envs.tools.tool_api import ToolError

pytest.importorskip('bm25s')
ROWS = [
  {'title': 'Rivers', 'text': 'The Danube flows through Vienna and Budapest.'},
  {'title': 'Hills', 'text': 'The Kahlenberg is a hill near Vienna. ' * 40},
  {'title': 'Birds', 'text': 'Storks nest on chimneys.'},
]


@pytest.fixture
def corpus(tmp_path):
  file = tmp_path / 'corpus.jsonl'
  file.write_text('\n'.join(map(json.dumps, ROWS)))
  return str(file)


def ask(tool, query):
  tool.start()
  return tool.call('search', {'query': query}, seconds=60)


def test_the_best_come_first_and_only_what_matches(corpus):
  tool = SearchTool(corpus=corpus, top_k=3, snippet=60)
  output = ask(tool, 'Danube in Vienna')
  assert output.startswith('[1] Rivers\nThe Danube flows')
  assert '[2] Hills\n' in output and 'Storks' not in output
  assert len(output.splitlines()[4]) <= 62  # the snippet and its marks
  assert ask(tool, 'quokka') == 'Nothing was found.'
  assert 'Storks' in ask(SearchTool(corpus=corpus, top_k=1), 'storks chimneys Vienna')
  with pytest.raises(ToolError) as caught:
    ask(tool, 'the of')
  assert caught.value.kind == 'arguments'
  ask(tool, 'x' * 10**6)


def test_a_snippet_holds_the_word(tmp_path):
  file = tmp_path / 'long.md'
  file.write_text('filler ' * 300 + 'needle ' + 'filler ' * 300)
  output = ask(SearchTool(corpus=str(file), snippet=100), 'needle')
  assert 'needle' in output and len(output) < 130 and output.count('…') == 2


def test_a_folder_of_texts(tmp_path):
  (tmp_path / 'one.txt').write_text('about apples\n\nabout pears\n')
  (tmp_path / 'deep').mkdir()
  (tmp_path / 'deep' / 'two.md').write_text('about plums')
  tool = SearchTool(corpus=str(tmp_path), name='search', about='Fruit.')
  assert ask(tool, 'pears') == '[1] one\nabout pears'
  assert ask(tool, 'plums') == '[1] two\nabout plums'
  assert tool.start()[0]['function']['description'].startswith('Fruit. Returns')


def test_one_index_for_all(corpus, monkeypatch):
  builds = []
  plain = search_tool.SearchIndex.__init__
  monkeypatch.setattr(
    search_tool.SearchIndex,
    '__init__',
    lambda self, *args: (builds.append(1), plain(self, *args))[1],
  )
  search_tool._index.cache_clear()
  threads = [
    threading.Thread(target=ask, args=(SearchTool(corpus=corpus), 'Vienna'))
    for _ in range(8)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert builds == [1]


def test_wrong_options(corpus, tmp_path):
  for options in ({}, {'corpus': 'nowhere'}, {'corpus': corpus, 'top_k': 0}):
    with pytest.raises(ValueError):
      SearchTool(**options)
  with pytest.raises(DataError, match=r"'body'.*title, text"):
    SearchTool(corpus=corpus, text_key='body').start()
  empty = tmp_path / 'empty.txt'
  empty.write_text('\n\n')
  with pytest.raises(DataError, match='no text'):
    SearchTool(corpus=str(empty)).start()
