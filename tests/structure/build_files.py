"""The BUILD files, as the imports imply them: one target a module.

`python -m tests.structure.build_files` writes them; a test compares.
"""

import pathlib

from tests.structure.imports import ROOT, first_party, modules

HEADER = '# Written by `python -m tests.structure.build_files` from the imports.\n\n'
VISIBILITY = 'package(default_visibility = ["//visibility:public"])\n'
RUNNER = 'tests.structure.run_pytest'


def label(name: str) -> str:
  """The target of a module: a package's `__init__` is named as its folder."""
  file = modules()[name]
  folder = file.parent.relative_to(ROOT).as_posix()
  target = file.parent.name if file.stem == '__init__' else file.stem
  return f'//{folder}:{target}'


def is_test(file: pathlib.Path) -> bool:
  return file.stem.startswith('test_') and file.parts[len(ROOT.parts)] == 'tests'


def _list(name: str, values: list[str]) -> list[str]:
  if not values:
    return []
  if len(values) == 1:
    return [f'    {name} = ["{values[0]}"],']
  return [f'    {name} = [', *(f'        "{value}",' for value in values), '    ],']


def _short(dep: str) -> str:
  """`//a/b:b` is written `//a/b`."""
  folder, target = dep.split(':')
  return folder if folder.endswith(f'/{target}') else dep


def _order(dep: str) -> str:
  """Buildifier's: a folder's own targets come before those of its folders."""
  return dep.replace(':', '!')


def _rule(name: str) -> str:
  file = modules()[name]
  deps = {label(other) for other in first_party(file)}
  rule = 'py_test' if is_test(file) else 'py_library'
  lines = [f'{rule}(', f'    name = "{label(name).split(":")[1]}",']
  srcs = [file.name]
  if rule == 'py_test':
    srcs.append('//tests/structure:run_pytest.py')
    lines += _list('args', [file.relative_to(ROOT).as_posix()])
    lines = [lines[0], lines[1], *_list('srcs', srcs), *lines[2:]]
    lines.append('    main = "//tests/structure:run_pytest.py",')
  else:
    lines += _list('srcs', srcs)
  folder = label(name).split(':')[0]
  local = sorted(d.removeprefix(folder) for d in deps if d.split(':')[0] == folder)
  rest = {_short(d) for d in deps if d.split(':')[0] != folder}
  lines += _list('deps', local + sorted(rest, key=_order))
  return '\n'.join([*lines, ')\n'])


def contents() -> dict[pathlib.Path, str]:
  """Path of each BUILD file → its text."""
  by_folder: dict[pathlib.Path, list[str]] = {}
  for name, file in modules().items():
    by_folder.setdefault(file.parent, []).append(name)
  files = {}
  for folder, names in by_folder.items():
    text = HEADER + VISIBILITY
    if RUNNER in names:
      text += '\nexports_files(["run_pytest.py"])\n'
    order = sorted(names, key=lambda n: label(n))
    files[folder / 'BUILD'] = text + ''.join(f'\n{_rule(name)}' for name in order)
  return files


if __name__ == '__main__':
  for path, text in contents().items():
    path.write_text(text)
    print(path.relative_to(ROOT))
