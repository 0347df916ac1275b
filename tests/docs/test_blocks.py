"""Every code block of the docs is run by a test, or says above it why it is not.

Such a block comes after a comment, `<!-- not run: the reason -->`. What it names is
checked all the same: the commands, their flags and the config keys.
"""

import importlib
import re
import shlex

import pytest

from configs import base
from jaxrl.component_calls import ComponentCall
from jaxrl.envs import env_registry
from jaxrl.envs.graders.composite import GraderCalls, make_grader
from jaxrl.envs.tools.function_tool import FunctionTool
from launch.settings import command_line
from launch.settings.component_options import parse_grader_calls
from tests.docs.blocks import ROOT

MARKED = re.compile(
  r'^(?:<!-- not run: ([^\n]+) -->\n\n?)?```(\w*)\n(.*?)^```', re.MULTILINE | re.DOTALL
)
# Pages of which a test runs all blocks, but for those that say why not.
PAGES = {
  'README.md': 'tests/test_readme.py',
  'docs/agents.md': 'tests/launch/test_agents_docs.py',
  'docs/datasets.md': 'tests/docs/test_pages.py',
  'docs/extending.md': 'tests/launch/test_extensions.py',
  'docs/index.md': 'tests/docs/test_pages.py',
  'docs/memory.md': 'tests/docs/test_pages.py',
  'docs/self_play.md': 'tests/launch/test_self_play_docs.py',
  'docs/tutorial.md': 'tests/docs/test_pages.py',
}
# Single blocks, by their page and first line, and the tests that run them.
BLOCKS = {
  ('docs/distillation.md', '# lab/hint_context.py'): 'tests/launch/test_teachers.py',
  ('docs/environments.md', '# two_sources.py'): 'tests/launch/test_env_datasets.py',
  ('docs/environments.md', '# quiz_env.py'): 'tests/launch/test_environment_docs.py',
  ('docs/environments.md', 'python -m launch.play --config=quiz_env.py'): (
    'tests/launch/test_environment_docs.py'
  ),
  ('docs/environments.md', 'import json'): 'tests/launch/test_environment_docs.py',
  ('docs/environments.md', 'class Quiz:'): 'tests/docs/test_blocks.py',
  ('docs/gateway.md', '# ask_openai.py'): 'tests/rollout/gateway/test_gateway_docs.py',
  ('docs/gateway.md', '# ask_anthropic.py'): (
    'tests/rollout/gateway/test_gateway_docs.py'
  ),
  ('docs/tinker.md', '# train_with_tinker.py'): 'tests/tinker/test_tinker_docs.py',
  ('docs/tools.md', '# my_tools.py'): 'tests/docs/test_blocks.py',
  (
    'docs/swe.md',
    'python -m launch.rollout --config=configs/swe_rollout.py --check \\',
  ): 'tests/launch/test_task_check.py',
}
TARGETS = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
# Lines that call something, in blocks without a language.
CALLS = re.compile(r'^(?:--config|python |make |for )', re.MULTILINE)


def found_blocks():
  """(page, reason, language, text) of each block that calls something."""
  pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
  for page in pages:
    for reason, language, text in MARKED.findall(page.read_text()):
      # Diagrams, rows of data and what a command prints are shown, not run.
      if language in ('python', 'sh', 'bash') or CALLS.search(text):
        yield page.relative_to(ROOT).as_posix(), reason, language, text


FOUND = list(found_blocks())
SNIPPETS = [
  (page, text)
  for page, _, language, text in FOUND
  if language == 'python' and text.startswith('config.')
]


def commands(text):
  """The commands of a block, as words."""
  joined = re.sub(r'\\\n\s*', ' ', text)
  for line in joined.splitlines():
    words = shlex.split(line.removesuffix('&'), comments=True)
    while words and re.match(r'[A-Z_]+=', words[0]):
      words.pop(0)
    if words:
      yield words


def test_every_block_is_run_or_says_why_not():
  silent = [
    (page, text.splitlines()[0])
    for page, reason, language, text in FOUND
    if not reason
    and page not in PAGES
    and (page, text.splitlines()[0]) not in BLOCKS
    and (page, text) not in SNIPPETS
    and page != 'docs/recipes.md'  # see below
  ]
  assert not silent
  marked = [(page, reason) for page, reason, *_ in FOUND if reason]
  assert len(marked) > 10
  for page, reason in marked:
    assert len(reason.split()) > 2, (page, reason)


def test_the_tests_that_run_blocks_read_the_pages():
  assert set(BLOCKS) <= {(page, text.splitlines()[0]) for page, _, _, text in FOUND}
  single = ((page, test) for (page, _), test in BLOCKS.items())
  for page, test in [*PAGES.items(), *single]:
    stem = page.rpartition('/')[2].removesuffix('.md')
    assert stem in (ROOT / test).read_text(), (page, test)


def test_the_commands_of_recipes_name_what_there_is():
  (text,) = [text for page, _, _, text in FOUND if page == 'docs/recipes.md']
  for words in commands(text):
    if words[0] == 'make':
      assert words[1] in TARGETS
    else:
      assert words[:3] == ['python', '-m', 'recipes']


@pytest.mark.parametrize(
  ('page', 'text'), SNIPPETS, ids=[page.rpartition('/')[2] for page, _ in SNIPPETS]
)
def test_a_piece_of_a_config_can_be_executed(page, text):
  config = base.get_config()
  exec(text, {'config': config, 'base': base})
  assert config.env or config.dataset.columns.answer
  for section in config.env.values():
    assert section.env_type in env_registry.ENVS


def test_the_grader_of_an_environment_of_ones_own():
  ((_, _, _, text),) = [one for one in FOUND if one[3].startswith('class Quiz:')]
  names = {
    'GraderCalls': GraderCalls,
    'ComponentCall': ComponentCall,
    'make_grader': make_grader,
  }
  exec(text, names)
  calls = re.findall(r"grader='(.*?)'\.", text)
  quiz = names['Quiz'](grader=parse_grader_calls(calls[0]))
  assert quiz._grade('<answer>4</answer>', {'answer': '4'}).score > 0


def test_the_tool_of_ones_own(tmp_path):
  ((_, _, _, text),) = [one for one in FOUND if one[3].startswith('# my_tools.py')]
  (tmp_path / 'my_tools.py').write_text(text)
  (tool,) = FunctionTool(f'{tmp_path}/my_tools.py:shout', {'mark': '?'}).start()
  assert tool['function']['description'] == 'Says it aloud.'


def load(module, words):
  """Reads a command line as its command does; what files it names need not exist."""
  flags = {'workdir': ''}
  if module != 'launch.train':
    flags = importlib.import_module(module).FLAGS
  stands_alone = 'checkpoint' if module == 'launch.tinker' else 'benchmark'
  command = command_line.parse(words, flags, without=stands_alone)
  config = command.config or 'configs/debug.py'
  if (ROOT / config).exists():  # it may be the reader's own
    keys = [word for word in words if word.startswith('--config.')]
    command = command_line.parse([f'--config={ROOT / config}', *keys])
    command_line.load(command, dumps=True)


@pytest.mark.parametrize('page', sorted({page for page, reason, *_ in FOUND if reason}))
def test_what_is_not_run_names_what_there_is(page):
  checked = 0
  for _, reason, _, text in (one for one in FOUND if one[0] == page):
    for words in commands(text) if reason else ():
      if words[0] == 'make':
        assert words[1] in TARGETS
      elif words[0].startswith('--config'):
        load('launch.train', ['--config=configs/gsm8k.py', *words])
      elif words[1:2] == ['-m']:
        assert (ROOT / f'{words[2].replace(".", "/")}.py').exists()
        if all(word.startswith('--') for word in words[3:]):
          load(words[2], words[3:])
      else:
        continue
      checked += 1
  assert checked or page == 'docs/cluster.md'


def module_exists(name):
  path = ROOT / name.replace('.', '/')
  return path.with_suffix('.py').exists() or (path / '__main__.py').exists()


def test_commands_in_sentences_name_what_there_is():
  extras = (ROOT / 'setup.py').read_text()
  pages = [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')]
  spans = set()
  for page in pages:
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
    spans |= {
      (span, page.name) for span in re.findall(r'`((?:make|\S*python|pip) .+?)`', text)
    }
  assert len(spans) > 40
  for span, page in spans:
    words = span.split()
    if words[0] == 'make':
      assert words[1] in TARGETS, (page, span)
    elif words[0] == 'pip':
      for extra in re.findall(r'[a-z-]+', span.partition('[')[2]):
        assert f"'{extra}'" in extras, (page, span)
    elif words[1] == '-m' and words[2] != 'pytest':
      assert module_exists(words[2]), (page, span)
      for part in re.findall(r'tests\.benchmarks --only=(\w+)', span):
        assert module_exists(f'tests.benchmarks.{part}'), (page, span)
