"""`python -m tests.benchmarks.gpu.offline_wheels`: wheels for where no network is.

Downloads what jaxrl requires, or each --package, and a machine lacks, with what that
requires in turn. --machine=FILE lists what it has, a line a package, as `pip freeze`
prints it; where it has another version than a wheel requires, the list says so. By
default that is an image with CUDA 13, PyTorch 2.11 and JAX, `machine.txt`. --without
leaves packages out: Ray, which a run in one process does not import.

On the machine, install them beside what it has:

    python3 -m pip install --no-index --no-deps --target=/tmp/site .wheels/*.whl
    export PYTHONPATH=/tmp/site

--pieces=60 also cuts the wheels into numbered folders of at most so many MiB, for ways
that take no more at once. On the machine, `python3 join.py FOLDER…`, which is in each
of them, puts wheels together once all their pieces are there.
"""

import argparse
import email
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

UV = pathlib.Path(sys.executable).parent / 'uv'  # `make env` installs it
PLATFORM = 'x86_64-manylinux_2_39'
MACHINE = pathlib.Path(__file__).parent / 'machine.txt'
GLIBC = range(39, 4, -1)  # minor versions of glibc 2 that wheels may be built for
JOIN = '''"""Joins the pieces of wheels in the folders given, in their order."""
import pathlib, sys
out = pathlib.Path('wheels')
out.mkdir(exist_ok=True)
for folder in sys.argv[1:]:
  for piece in sorted(pathlib.Path(folder).glob('*.piece*')):
    name, _, number = piece.name.rpartition('.piece')
    with open(out / name, 'ab' if int(number) else 'wb') as file:
      file.write(piece.read_bytes())
'''


def read_machine(lines: Iterable[str]) -> dict[str, str]:
  """Packages of a machine by name, with their versions, '' where none is told."""
  packages = {}
  for line in lines:
    name, _, version = line.partition('#')[0].strip().partition('==')
    if name:
      packages[canonicalize_name(name)] = version.partition('+')[0]
  return packages


def resolve(
  wanted: Iterable[str], machine: Iterable[str], python: str, without: Iterable[str]
) -> list[str]:
  """Packages that are wanted and that the machine lacks, as name==version.

  What the machine's own packages require, it has.
  """
  with tempfile.TemporaryDirectory() as folder:
    excluded = pathlib.Path(folder) / 'excluded.txt'
    excluded.write_text('\n'.join([*machine, *without]))
    line = [UV, 'pip', 'compile', '-', f'--excludes={excluded}', '--quiet']
    line += [f'--python={sys.executable}']
    line += [f'--python-version={python}', f'--python-platform={PLATFORM}']
    line += ['--only-binary=:all:', '--no-header', '--no-annotate']
    text = '\n'.join(wanted)
    done = subprocess.run(
      line, input=text, stdout=subprocess.PIPE, text=True, check=True
    )
  return done.stdout.split()


def download(packages: Iterable[str], python: str, folder: pathlib.Path) -> None:
  """Downloads the wheels of these packages alone."""
  platforms = [f'--platform=manylinux_2_{minor}_x86_64' for minor in GLIBC]
  platforms += ['--platform=manylinux2014_x86_64', '--platform=manylinux1_x86_64']
  line = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
  line += ['--only-binary=:all:', f'--python-version={python}', '--implementation=cp']
  subprocess.run([*line, *platforms, f'--dest={folder}', *packages], check=True)


def unmet(wheel: pathlib.Path, machine: dict[str, str], python: str) -> list[str]:
  """What a wheel requires in other versions than the machine says that it has."""
  with zipfile.ZipFile(wheel) as file:
    (path,) = (n for n in file.namelist() if n.endswith('.dist-info/METADATA'))
    message = email.message_from_bytes(file.read(path))
  environment = {**default_environment(), 'python_version': python, 'extra': ''}
  found = []
  for text in message.get_all('Requires-Dist') or []:
    requirement = Requirement(text)
    version = machine.get(canonicalize_name(requirement.name))
    if requirement.marker and not requirement.marker.evaluate(environment):
      continue
    if version and not requirement.specifier.contains(version, prereleases=True):
      found.append(f'{requirement.name}{requirement.specifier}, not {version}')
  return found


def own_requirements() -> list[str]:
  """What jaxrl requires without any extra."""
  return [text for text in metadata.requires('jaxrl') or [] if 'extra' not in text]


def cut(wheels: Iterable[pathlib.Path], size: int, folder: pathlib.Path) -> int:
  """Cuts wheels into pieces in `folder/1`, `folder/2`, … of at most `size` bytes.

  Returns the number of folders.
  """
  shutil.rmtree(folder, ignore_errors=True)
  number, free = 0, 0
  for wheel in wheels:
    data, part = wheel.read_bytes(), 0
    while data:
      if not free:
        number, free = number + 1, size - len(JOIN)
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / 'join.py').write_text(JOIN)
      piece, data = data[:free], data[free:]
      (folder / str(number) / f'{wheel.name}.piece{part:03}').write_bytes(piece)
      free, part = free - len(piece), part + 1
  return number


def main() -> None:
  parser = argparse.ArgumentParser(prog='offline_wheels', description=__doc__)
  parser.add_argument('--machine', type=pathlib.Path, default=MACHINE)
  parser.add_argument('--python', default='3.12', help='of the machine')
  parser.add_argument('--package', action='append', default=[])
  parser.add_argument('--without', default='ray', help='packages, with commas between')
  parser.add_argument('--to', type=pathlib.Path, default=pathlib.Path('.wheels'))
  parser.add_argument('--pieces', type=int, default=0, help='MiB; 0 cuts nothing')
  flags = parser.parse_args()
  machine = read_machine(flags.machine.read_text().splitlines())
  shutil.rmtree(flags.to, ignore_errors=True)
  flags.to.mkdir(parents=True)
  wanted = flags.package or own_requirements()
  packages = resolve(wanted, machine, flags.python, flags.without.split(','))
  if packages:
    download(packages, flags.python, flags.to)
  sizes = {wheel: wheel.stat().st_size for wheel in sorted(flags.to.glob('*.whl'))}
  for wheel, size in sizes.items():
    kind = 'any machine' if wheel.name.endswith('-none-any.whl') else 'x86-64 Linux'
    print(f'{size / 2**20:8.1f} MiB  {wheel.name}  ({kind})')
    for problem in unmet(wheel, machine, flags.python):
      print(f'              requires {problem}')
  print(f'{sum(sizes.values()) / 2**20:8.1f} MiB in {len(sizes)} wheels in {flags.to}')
  if flags.pieces:
    folder = flags.to / 'pieces'
    print(f'{cut(sizes, flags.pieces << 20, folder)} folders of pieces in {folder}')


if __name__ == '__main__':
  main()
