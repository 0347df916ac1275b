"""Runs the rules by which lm-eval and OpenCompass grade replies, from their packages.

Each rule scores a reply 1 or 0. Their filters run as they are; of modules that need
more than is installed, only the functions of a rule are run.
"""

import __future__

import ast
import functools
import importlib
import json
import re
import string
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from tests.real import find

Rule = Callable[[Sequence[str], Sequence[str]], list[float]]
ChoiceRule = Callable[[Sequence[str], str, Sequence[str]], list[float]]
LM_EVAL, OPEN_COMPASS = 'rules/lm_eval/tasks', 'rules/opencompass'


class _Loader(yaml.SafeLoader):
  """Reads a task's file without the functions that it names."""


_Loader.add_constructor('!function', lambda _, node: node.value)


@functools.cache
def functions_of(path: str) -> Mapping[str, Any]:
  """Returns the functions and constants of a module, without its other imports.

  Args:
    path: The file below `.real/`.
  """
  with warnings.catch_warnings(action='ignore'):  # of their escapes
    tree = ast.parse(find(path).read_text(encoding='utf-8'))
  kept: list[ast.stmt] = []
  for node in tree.body:
    # Of classes, the methods that need no instance.
    functions = node.body if isinstance(node, ast.ClassDef) else [node]
    for function in functions:
      if isinstance(function, ast.FunctionDef):
        function.decorator_list = []
        kept.append(function)
    if isinstance(node, ast.Assign) and _is_literal(node.value):
      kept.append(node)
  scope: dict[str, Any] = {'np': np, 're': re, 'string': string}
  # Annotations name what was not imported.
  flags = __future__.annotations.compiler_flag
  exec(compile(ast.Module(kept, []), path, 'exec', flags), scope)
  return scope


def _is_literal(node: ast.expr) -> bool:
  try:
    ast.literal_eval(node)
  except ValueError:
    return False
  return True


@functools.cache
def _task(file: str) -> Mapping[str, Any]:
  return yaml.load(find(f'{LM_EVAL}/{file}').read_text(encoding='utf-8'), _Loader)


def lm_eval_scores(
  file: str,
  name: str,
  replies: Sequence[str],
  targets: Sequence[str],
  choices: Sequence[str] = (),
) -> list[float]:
  """Returns what a task of lm-eval scores replies, by one of its lists of filters.

  Args:
    file: The task's file, such as 'gsm8k/gsm8k.yaml'.
    name: The list of filters, such as 'strict-match'.
    replies: The replies, which are cut where the task stops a model.
    targets: The right answers as the task has them.
    choices: The texts of the choices, for filters that read them.
  """
  folder = str(find('rules'))
  if folder not in sys.path:
    sys.path.append(folder)
  get_filter = importlib.import_module('lm_eval.filters').get_filter
  task, cut = _task(file), list(replies)
  for stop in task['generation_kwargs']['until']:
    cut = [reply.partition(stop)[0] for reply in cut]
  (filters,) = [
    entry['filter'] for entry in task['filter_list'] if entry['name'] == name
  ]
  found: Any = [[reply] for reply in cut]
  docs = [{'choices': choices}] * len(cut)
  for entry in filters:
    options = dict(entry)
    made = get_filter(options.pop('function'))(**options)
    found = list(made.apply(found, docs))
  (metric,) = task['metric_list']
  metric = {k: v for k, v in metric.items() if k.startswith(('ignore', 'regexes'))}
  match = functions_of('rules/lm_eval/api/metrics.py')['exact_match_hf_evaluate']
  return [
    float(match(predictions=[given], references=[target], **metric)['exact_match'])
    for given, target in zip(found, targets, strict=True)
  ]


def _final(answer: str) -> str:
  return answer.rpartition('####')[2].strip()


def _gsm8k(file: str, name: str) -> Rule:
  return lambda replies, answers: lm_eval_scores(
    f'gsm8k/{file}', name, replies, answers
  )


def _each(score: Callable[[str, str], float]) -> Rule:
  return lambda replies, answers: [
    score(reply, answer) for reply, answer in zip(replies, answers, strict=True)
  ]


def minerva(reply: str, answer: str) -> float:
  """Scores by lm-eval's minerva_math, without its algebra."""
  rules = functions_of(f'{LM_EVAL}/minerva_math/utils.py')
  given = rules['normalize_final_answer'](rules['get_unnormalized_answer'](reply))
  return float(given == rules['normalize_final_answer'](_final(answer)))


def hendrycks(reply: str, answer: str) -> float:
  """Scores by lm-eval's hendrycks_math."""
  rules = functions_of(f'{LM_EVAL}/hendrycks_math/utils.py')
  doc = {'solution': rf'\boxed{{{_final(answer)}}}'}
  return float(rules['process_results'](doc, [reply])['exact_match'])


def aime(reply: str, answer: str) -> float:
  """Scores by lm-eval's aime."""
  rules = functions_of(f'{LM_EVAL}/aime/utils.py')
  return float(
    rules['process_results']({'answer': _final(answer)}, [reply])['exact_match']
  )


def compass_gsm8k(reply: str, answer: str) -> float:
  """Scores by OpenCompass's gsm8k: the last number, compared by value."""
  given = functions_of(f'{OPEN_COMPASS}/datasets/gsm8k.py')['gsm8k_postprocess'](reply)
  right = _final(answer).replace(',', '')
  try:
    return float(given == right or abs(float(given) - int(right)) < 1e-6)
  except ValueError:
    return 0.0


def compass_math(reply: str, answer: str) -> float:
  """Scores by OpenCompass's extraction for MATH, without its own algebra."""
  rules = functions_of(f'{OPEN_COMPASS}/datasets/math.py')
  normalize = rules['normalize_final_answer']
  given = normalize(rules['math_postprocess_v2'](reply))
  return float(given == normalize(_final(answer)))


# By name: (replies, right answers) → scores.
MATH: dict[str, Rule] = {
  'lm-eval, gsm8k, flexible-extract': _gsm8k('gsm8k.yaml', 'flexible-extract'),
  'lm-eval, gsm8k, strict-match': _gsm8k('gsm8k.yaml', 'strict-match'),
  'lm-eval, gsm8k_cot_llama, strict-match': _gsm8k(
    'gsm8k-cot-llama.yaml', 'strict-match'
  ),
  'lm-eval, minerva_math': _each(minerva),
  'lm-eval, hendrycks_math': _each(hendrycks),
  'lm-eval, aime': _each(aime),
  'OpenCompass, gsm8k': _each(compass_gsm8k),
  'OpenCompass, math v2': _each(compass_math),
}


def _choice(file: str, name: str, form: str = '{}') -> ChoiceRule:
  def score(replies: Sequence[str], letter: str, choices: Sequence[str]) -> list[float]:
    targets = [form.format(letter)] * len(replies)
    return lm_eval_scores(file, name, replies, targets, choices)

  return score


def compass_option(
  replies: Sequence[str], letter: str, choices: Sequence[str]
) -> list[float]:
  """Scores by OpenCompass's first_option_postprocess."""
  rules = functions_of(f'{OPEN_COMPASS}/utils/text_postprocessors.py')
  find_option, options = rules['first_option_postprocess'], 'ABCDEFGH'[: len(choices)]
  return [float(find_option(reply, options) == letter) for reply in replies]


_FLAN = 'mmlu/flan_cot_zeroshot/_mmlu_flan_cot_zeroshot_template_yaml'
_GPQA = 'gpqa/cot_zeroshot/_gpqa_cot_zeroshot_yaml'
_MMLU, _ARC = 'mmlu/generative/_default_template_yaml', 'arc/arc_challenge_chat.yaml'
_PRO = 'mmlu_pro/_default_template_yaml'
# By name: (replies, right letter, choices) → scores.
CHOICE: dict[str, ChoiceRule] = {
  'lm-eval, mmlu_generative': _choice(_MMLU, 'get_response'),
  'lm-eval, arc_challenge_chat': _choice(_ARC, 'remove_whitespace'),
  'lm-eval, mmlu_flan_cot, strict-match': _choice(_FLAN, 'strict-match', '({})'),
  'lm-eval, mmlu_flan_cot, flexible-extract': _choice(
    _FLAN, 'flexible-extract', '({})'
  ),
  'lm-eval, gpqa_cot, strict-match': _choice(_GPQA, 'strict-match', '({})'),
  'lm-eval, gpqa_cot, flexible-extract': _choice(_GPQA, 'flexible-extract', '({})'),
  'lm-eval, mmlu_pro': _choice(_PRO, 'custom-extract'),
  'OpenCompass, first option': compass_option,
}


def mbpp_program(reply: str) -> str:
  """Returns the program of lm-eval's mbpp_instruct, whose prompt opens the fence."""
  rules = functions_of(f'{LM_EVAL}/mbpp/utils.py')
  return rules['extract_code_blocks'](reply)


def compass_mbpp_program(reply: str) -> str:
  """Returns the program that OpenCompass's mbpp finds in a reply."""
  find_program = functions_of(f'{OPEN_COMPASS}/datasets/mbpp.py')['_process_answer']
  return find_program(None, reply)


def humaneval_program(reply: str, version: str = '_instruct') -> str:
  """Returns what lm-eval's humaneval, or humaneval_instruct, adds to its prompt."""
  rules = functions_of(f'{LM_EVAL}/humaneval/utils.py')
  (program,) = rules[f'build_predictions{version}']([[reply]], [{'prompt': ''}])[0]
  return program


def compass_program(reply: str, version: int = 2) -> str:
  """Returns OpenCompass's program: the first block (version 2), or the last one (3)."""
  rules = functions_of(f'{OPEN_COMPASS}/datasets/humaneval.py')
  return rules[f'humaneval_postprocess_v{version}'](reply)


# By name: reply → program. Those of `HUMANEVAL` go on with the prompt.
CODE: dict[str, Callable[[str], str]] = {
  'lm-eval, mbpp_instruct': mbpp_program,
  'OpenCompass, mbpp': compass_mbpp_program,
  'OpenCompass, humaneval v2': compass_program,
  'OpenCompass, humaneval v3': functools.partial(compass_program, version=3),
}
HUMANEVAL: dict[str, Callable[[str], str]] = {
  'lm-eval, humaneval': functools.partial(humaneval_program, version=''),
  'lm-eval, humaneval_instruct': humaneval_program,
  'OpenCompass, humaneval v2': compass_program,
  'OpenCompass, humaneval v3': functools.partial(compass_program, version=3),
}
# Each program in a scope of its own, since a process for each would take a minute.
_RUN = """
import contextlib, io, json, signal, sys
def end(*_): raise TimeoutError
signal.signal(signal.SIGALRM, end)
passed = []
for program in json.load(sys.stdin):
  signal.alarm(2)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      exec(program, {'__name__': 'program'})
    passed.append(1)
  except BaseException:
    passed.append(0)
  signal.alarm(0)
print(json.dumps(passed))
"""


def run_programs(programs: Sequence[str]) -> list[int]:
  """Returns 1 for each program that ends without an error, else 0.

  Args:
    programs: The programs with their tests, which run in one sandbox.
  """
  sandbox = LocalSandbox()
  sandbox.start()
  try:
    command = [PYTHON_PATH, '-c', _RUN]
    ran = sandbox.exec(command, stdin=json.dumps(programs).encode(), seconds=60)
  finally:
    sandbox.stop()
  return json.loads(ran.stdout)
