"""Parsing of replies: the part of the model's text that an environment acts on."""

import ast
import collections
import dataclasses
import functools
import re
import textwrap
import warnings

from markdown_it import MarkdownIt

MAX_PROGRAM_CHARS = 200_000  # longer ones are not read as Python
_MAX_FENCES = 40  # that are looked at for a fence within a string

# Matches `Score: 7`, `**Score:** 7.5`, `score = 7/10`, `Score: **7**`, `"score": 7`,
# `Final score - [[7]]` and `the score is 7`. A range such as 7-8 has no match.
SCORE_PATTERN = (
  r'(?i)\bscore\b["\'*_`\s]{0,4}(?:\([^()\n]{0,30}\)\s?)?(?:is|of|[:：=]|\s[-–—]\s)?'
  r'[\s:*=_`"\'\[($]{0,8}(?:\\boxed\{)?(-?(?:[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}))'
  r'(?![0-9.]*[0-9]|\s?(?:-|–|to)\s?[0-9])'
)


def without_thought(reply: str) -> str:
  """Returns what a reply says after its thought.

  Args:
    reply: The model's text.

  Returns:
    What follows the last `</think>`; the whole reply if nothing does.
  """
  answer = reply[reply.rfind('</think>') + len('</think>') :]
  return answer if '</think>' in reply and answer.strip() else reply


def tagged_answer(reply: str) -> str:
  """Returns the answer that a reply marks with `<answer>` tags.

  Args:
    reply: The model's text.

  Returns:
    The stripped content of the last `<answer>…</answer>`. Without such tags, the last
    line that holds text and is more than a fence. A thought before `</think>` is left
    out.
  """
  reply = without_thought(reply)
  end = reply.rfind('</answer>')
  start = reply.rfind('<answer>', 0, max(end, 0))
  if start >= 0:
    return reply[start + len('<answer>') : end].strip()
  lines = reply.rstrip().rstrip('`~').rstrip()
  return lines.rpartition('\n')[2].strip()


@dataclasses.dataclass(frozen=True)
class CodeBlock:
  """A fenced block of code.

  Attributes:
    language: The first word after the opening fence, in lower case.
    code: The lines between the fences.
    closed: Whether there is a closing fence.
  """

  language: str
  code: str
  closed: bool

  @property
  def is_python(self) -> bool:
    """Returns whether the block is labelled as Python."""
    return re.fullmatch(r'py|python[\d.]*|py\d', self.language) is not None


def code_blocks(reply: str) -> list[CodeBlock]:
  """Returns the fenced code blocks of a reply, as CommonMark reads them.

  Args:
    reply: The model's text.
  """
  text = re.sub(r'</?(?:answer|solution|code)>', '\n\n', reply)
  lines = text.split('\n')
  blocks = []
  for token in _markdown().parse(text):
    if token.type == 'code_block' and (
      '```' in token.content or '~~~' in token.content
    ):
      blocks += code_blocks(token.content)  # a fence that is indented too far
    if token.type != 'fence':
      continue
    assert token.map is not None
    last = lines[token.map[1] - 1].strip(' \t>') if token.map[1] <= len(lines) else ''
    closed = token.map[1] - token.map[0] > 1 and (
      len(last) >= len(token.markup) and set(last) == {token.markup[0]}
    )
    language = (token.info.strip().lower().split() or [''])[0].strip('{}.')
    blocks.append(CodeBlock(language, token.content, closed))
  return blocks


@functools.cache
def _markdown() -> MarkdownIt:
  """Returns a parser of blocks alone; tags on a line of their own hide no fences."""
  return MarkdownIt('commonmark').disable(['inline', 'html_block', 'reference'])


def last_code_block(reply: str) -> str:
  """Returns the content of the last closed fenced block of a reply.

  Args:
    reply: The model's text.

  Returns:
    The lines between the fences, or '' if no block was closed.
  """
  closed = [block.code for block in code_blocks(reply) if block.closed]
  return closed[-1] if closed else ''


def find_program(reply: str, name: str = '') -> str:
  """Returns the Python program in a reply.

  It is the last block that defines what the tests call, else the longest Python block,
  else the longest one without a language, else one that is Python all the same. A block
  that was never closed counts if no other does, and so does a reply without blocks that
  is a program itself.

  Args:
    reply: The model's text.
    name: The function or the method of class Solution that the tests call; '' if they
      run the program.

  Returns:
    The program, or '' if there is none.
  """
  reply = without_thought(reply)
  every = [
    block
    for block in _with_inner_fences(reply, code_blocks(reply))
    if block.code.strip()
  ]
  for closed in (True, False):
    mine = [block for block in every if block.closed is closed]
    if defining := [block for block in mine if name and defines(block.code, name)]:
      return defining[-1].code
  for closed in (True, False):
    mine = [block for block in every if block.closed is closed]
    python = [block for block in mine if block.is_python]
    others = [block for block in mine if _is_program(block.code)]
    for group in (python, [block for block in mine if not block.language], others):
      parsed = [block for block in group if parse_python(block.code) is not None]
      if found := parsed or group:
        return max(found, key=lambda block: len(block.code.strip())).code
  is_program = _is_program(reply) and (not name or defines(reply, name))
  return reply if is_program else ''


def _with_inner_fences(reply: str, blocks: list[CodeBlock]) -> list[CodeBlock]:
  """Returns the blocks, and Python that a fence in one of its strings cut short."""
  if all(b.is_python is False or parse_python(b.code) is not None for b in blocks):
    return blocks
  lines, found = reply.split('\n'), list(blocks)
  fences = [i for i, line in enumerate(lines) if re.match(r'\s*(?:```|~~~)', line)]
  for start in fences[:_MAX_FENCES]:
    if not re.match(r'\s*(?:```|~~~)\s*(?:py|python)', lines[start]):
      continue
    ends = [end for end in fences if end > start and not lines[end].strip(' `~')]
    for end in ends[1:_MAX_FENCES]:
      code = textwrap.dedent('\n'.join(lines[start + 1 : end])) + '\n'
      if '```' in code and parse_python(code) is not None:
        found.append(CodeBlock('python', code, True))
        break
  return found


def parse_python(code: str) -> ast.Module | None:
  """Returns the syntax tree of a program; None if it is not Python.

  Args:
    code: The text.
  """
  if len(code) > MAX_PROGRAM_CHARS:
    return None
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of odd escapes in the model's strings
      return ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def defines(code: str, name: str) -> bool:
  """Returns whether a program defines a function, or a method of its class Solution.

  Args:
    code: The program.
    name: The name of the function.
  """
  tree = parse_python(code)
  if tree is None:
    return (
      re.search(rf'^\s*(?:async\s+)?def\s+{re.escape(name)}\b', code, re.M) is not None
    )
  for node in tree.body:
    nodes = [node]
    if isinstance(node, ast.ClassDef):
      nodes += node.body if node.name == 'Solution' else []
    for one in nodes:
      if getattr(one, 'name', None) == name:
        return True
      targets = one.targets if isinstance(one, ast.Assign) else []
      if any(isinstance(t, ast.Name) and t.id == name for t in targets):
        return True
  return False


def _is_program(text: str) -> bool:
  """Returns whether a text is Python that calls or defines anything."""
  kinds = (ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Lambda)
  tree = parse_python(text)
  return tree is not None and any(isinstance(node, kinds) for node in ast.walk(tree))


def last_number(pattern: str, text: str) -> float | None:
  """Returns the number in group 1 of the last match of a pattern.

  A user's own pattern may take forever to match, so call this in a process that can
  be killed.

  Args:
    pattern: A regular expression with one group.
    text: The text to search, such as a judge's verdict.

  Returns:
    The number, or None if nothing matched or group 1 is not a number.
  """
  last_match = collections.deque(re.finditer(pattern, text), maxlen=1)
  try:
    return float(last_match[0].group(1)) if last_match else None
  except (TypeError, ValueError):  # group 1 took no part in the match, or is a word
    return None
