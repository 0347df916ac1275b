"""What an agent leaves is unpacked with care; tests are restored, patches applied."""

import io
import os
import tarfile

import pytest

from jaxrl.envs.terminal import git_repository, submission, test_results
from jaxrl.envs.terminal.swe_tasks import SweTask
from tests.envs import swe_repos
from tests.envs.swe_repos import git, write


def archive(*members):
  """(name, content or link) each, or a TarInfo."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w') as tar:
    for member in members:
      if isinstance(member, tarfile.TarInfo):
        tar.addfile(member)
        continue
      name, content = member
      info = tarfile.TarInfo(name)
      if isinstance(content, bytes):
        info.size = len(content)
      else:
        info.type, info.linkname = tarfile.SYMTYPE, content
      tar.addfile(info, io.BytesIO(content if isinstance(content, bytes) else b''))
  return buffer.getvalue()


def files(folder):
  return sorted(
    os.path.relpath(os.path.join(parent, name), folder)
    for parent, folders, names in os.walk(folder)
    for name in (*names, *folders)
  )


def test_what_leads_outside_or_is_guarded_stays_out(tmp_path):
  device = tarfile.TarInfo('device')
  device.type = tarfile.CHRTYPE
  tree = tmp_path / 'tree'
  tree.mkdir()
  packed = archive(
    ('./src/a.py', b'a'),
    ('../outside', b'x'),
    ('/absolute', b'x'),
    ('link', '/etc/passwd'),
    ('up', '../..'),
    ('fine', 'src/a.py'),
    ('./.git/config', b'x'),
    ('deep/conftest.py', b'x'),
    ('deep/__pycache__/a.pyc', b'x'),
    ('pytest.py', b'x'),
    ('src/pytest.py', b'fine'),
    ('tests/test_a.py', b'x'),
    device,
  )
  guarded = submission.protected_path_filter(
    submission.PROTECTED_FILES, {'tests/test_a.py'}
  )
  submission.unpack_submission(packed, tree, guarded, 1000)
  assert files(tree) == ['absolute', 'fine', 'src', 'src/a.py', 'src/pytest.py']
  assert sorted(p.name for p in tmp_path.iterdir()) == ['tree']
  assert (tree / 'fine').readlink().name == 'a.py'


@pytest.mark.parametrize('packed', [b'', b'x' * 2000, archive(('a', b'x' * 2000))])
def test_what_cannot_be_unpacked_is_the_agents_fault(tmp_path, packed):
  with pytest.raises(submission.SubmissionError, match='cannot be unpacked'):
    submission.unpack_submission(
      packed, tmp_path, submission.protected_path_filter((), ()), 1000
    )


def linked(name, to):
  info = tarfile.TarInfo(name)
  info.type, info.linkname = tarfile.LNKTYPE, to
  return info


def test_nothing_is_written_through_a_link(tmp_path, monkeypatch):
  # Some versions of tarfile can be brought to let such links pass, CVE-2025-4517.
  monkeypatch.setattr(tarfile, 'data_filter', lambda member, where: member)
  tree, other = tmp_path / 'tree', tmp_path / 'other'
  tree.mkdir()
  write(other, {'kept': 'k'})
  packed = archive(
    ('up', '../other'),
    ('up/new', b'x'),
    ('file', '../other/kept'),
    ('file', b'x'),
    linked('hard', 'up/kept'),
    linked('again', 'file'),
    ('again', b'x'),
    ('src/../up/more', b'x'),
    ('src/a.py', b'a'),
    linked('b.py', './src/a.py'),
  )
  submission.unpack_submission(
    packed, tree, submission.protected_path_filter((), ()), 1000
  )
  assert files(other) == ['kept']
  assert (other / 'kept').read_text() == 'k'
  assert (tree / 'b.py').read_text() == 'a'
  assert files(tree) == ['again', 'b.py', 'file', 'src', 'src/a.py', 'up']


def test_hard_links_count_as_the_copies_that_they_become(tmp_path):
  many = [linked(f'b{i}', 'a' if i == 0 else f'b{i - 1}') for i in range(9)]
  packed = archive(('a', b'x' * 150), *many)
  with pytest.raises(submission.SubmissionError, match='too large'):
    submission.unpack_submission(
      packed, tmp_path, submission.protected_path_filter((), ()), 1000
    )


def test_guarded_files_are_restored_through_no_link(tmp_path):
  base, tree, other = tmp_path / 'base', tmp_path / 'tree', tmp_path / 'other'
  write(base, {'tests/sub/test_a.py': 'right', 'conftest.py': 'right', 'src/a.py': '1'})
  write(tree, {'src/a.py': '2', 'conftest.py/x': ''})
  other.mkdir()
  (tree / 'tests').symlink_to(other)
  guarded = submission.protected_path_filter(['conftest.py'], {'tests/sub/test_a.py'})
  submission.restore_protected(base, tree, guarded)
  assert (tree / 'tests/sub/test_a.py').read_text() == 'right'
  assert (tree / 'conftest.py').read_text() == 'right'
  assert (tree / 'src/a.py').read_text() == '2'
  assert files(other) == []


def test_a_patch_is_applied_to_plain_files_even_within_a_repository(tmp_path):
  git(tmp_path, 'init', '-q')
  swe_repos.write(tmp_path / 'in', {'kept': 'k\n', 'old name': 'o\n', 'gone': 'g\n'})
  patch = """diff --git a/old name b/new name
similarity index 100%
rename from old name
rename to new name
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-g
"""
  changed = git_repository.apply_patch(patch, tmp_path / 'in')
  assert changed == {'old name', 'new name', 'gone'}
  assert files(tmp_path / 'in') == ['kept', 'new name']
  assert git_repository.apply_patch('', tmp_path / 'in') == set()
  with pytest.raises(ValueError, match=r'git apply in .* failed'):
    git_repository.apply_patch(patch, tmp_path / 'in')


def test_clones_of_every_kind_are_found(tmp_path):
  row = swe_repos.spans(tmp_path / 'work')
  git(tmp_path, 'clone', '-q', '--bare', 'work/acme/spans', 'bare/acme__spans.git')
  git(tmp_path, 'clone', '-q', 'work/acme/spans', 'flat/spans')
  for repos in ('work', 'bare', 'flat'):
    clone = git_repository.find_clone(str(tmp_path / repos), 'acme/spans')
    out = tmp_path / f'out-{repos}'
    out.mkdir()
    git_repository.export_commit(clone, row['base_commit'], out)
    assert files(out) == files(tmp_path / 'out-work')
    assert 'tests/test_apart.py' in files(out)
    assert 'tests/test_merge.py' not in files(out)
    assert 'tests/test_merge.py' in files(tmp_path / 'work/acme/spans')
  assert git(tmp_path / 'work/acme/spans', 'status', '--short') == ''
  for name in ('acme/absent', '../work', '/etc'):
    with pytest.raises(ValueError, match=r'no repository|not the name'):
      git_repository.find_clone(str(tmp_path / 'work'), name)
  with pytest.raises(ValueError, match='is not a commit'):
    git_repository.export_commit(clone, '--help', out)


REPORT = b"""<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" file="tests/test_a.py"/>
<testcase classname="tests.test_a.TestB.TestC" name="test[a::b]" file="tests/test_a.py">
</testcase>
<testcase classname="test_d" name="test_skipped" file="test_d.py">
<skipped type="pytest.skip"/></testcase>
<testcase classname="test_d" name="test_x" file="test_d.py">
<skipped type="pytest.xfail"/></testcase>
<testcase classname="test_d" name="test_twice" file="test_d.py"><error/></testcase>
<testcase classname="test_d" name="test_twice" file="test_d.py"/>
</testsuite></testsuites>"""


def test_reports():
  assert test_results.parse_junit_report(REPORT) == {
    'tests/test_a.py::test_one': True,
    'tests/test_a.py::TestB::TestC::test[a::b]': True,
    'test_d.py::test_skipped': False,
    'test_d.py::test_x': True,
    'test_d.py::test_twice': False,
  }
  inherited = REPORT.replace(b'file="tests/test_a.py"', b'file="tests/base.py"')
  ids = ['tests/test_a.py::test_one', 'tests/test_a.py::TestB::TestC::test[a::b]']
  results = test_results.parse_junit_report(inherited, ids)
  assert all(results[test] for test in ids) and len(results) == 5
  assert test_results.parse_junit_report(REPORT[:-1]) == {}
  assert test_results.parse_junit_report(b'') == {}
  bomb = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><testsuites/>'
  assert test_results.parse_junit_report(bomb) == {}


def test_logs():
  text = """tests/runtests.py
test_one (a.tests.OneTests) ... ok
test_two (a.tests.OneTests)
test_two (a.tests.OneTests.test_two) ... FAIL
test_three (a.tests.OneTests) ... skipped 'no'
test_four (a.tests.OneTests.test_four)
The fourth adds up. ... ok
test_five (a.tests.OneTests.test_five)
The fifth ... does not. ... FAIL
  Applying sites.0001_initial... OK
test_solve ok
test_slow F
PASSED tests/a.py::test_b[1 - 2]
FAILED tests/a.py::test_c - assert 1 == 2
PASSED tests/a.py::test_c
"""
  assert test_results.parse_test_log(text) == {
    'test_one (a.tests.OneTests)': True,
    'test_two (a.tests.OneTests.test_two)': False,
    'test_three (a.tests.OneTests)': False,
    'The fourth adds up.': True,
    'The fifth ... does not.': False,
    'test_solve': True,
    'test_slow': False,
    'tests/a.py::test_b[1 - 2]': True,
    'tests/a.py::test_c': False,
  }
  before = 'ERROR of a program\n== short test summary info ==\nPASSED a::b\n'
  assert test_results.parse_pytest_summary(before) == {'a::b': True}
  later = f'{before}FAILED a::c - why\n== short test summary info ==\nPASSED a::c\n'
  assert test_results.parse_pytest_summary(later) == {'a::b': True, 'a::c': False}
  assert test_results.parse_pytest_summary('PASSED a::b') == {}


def test_files_of_tests():
  ids = ('a/b.py::test_c', 'a/b.py::test_d', 'test_e (f.G)')
  instance = SweTask('', '', '', '', '', ids[:1], ids[1:])
  assert instance.files == ('a/b.py',)
