"""Stand-ins for the rule repositories that Bazel 4 would fetch from the network.

Only native rules are used here, so each stand-in merely hands the native rule on.
`python -m tests.structure.bazel_stubs FOLDER` writes them and prints Bazel's flags.
"""

import pathlib
import sys

RULES = {
  'rules_cc/cc': 'cc_binary cc_import cc_library cc_proto_library cc_test cc_toolchain '
  'cc_toolchain_suite objc_library',
  'rules_java/java': 'java_binary java_import java_library java_lite_proto_library '
  'java_package_configuration java_plugin java_proto_library java_runtime java_test '
  'java_toolchain',
  'rules_python/python': 'py_binary py_library py_runtime py_test',
  'remote_coverage_tools/.': '',
}
COVERAGE = (
  'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])'
)


def write(folder: pathlib.Path) -> list[str]:
  """Writes the stand-ins below `folder`; returns the flags that point Bazel there."""
  flags = []
  for place, names in RULES.items():
    repo = place.split('/')[0]
    package = folder / place
    package.mkdir(parents=True, exist_ok=True)
    (folder / repo / 'WORKSPACE').write_text(f'workspace(name = "{repo}")\n')
    (folder / repo / 'BUILD').write_text(f'{COVERAGE}\n' if not names else '')
    if names:
      (package / 'BUILD').touch()
      rules = ''.join(f'{name} = native.{name}\n' for name in names.split())
      (package / 'defs.bzl').write_text(rules)
    flags.append(f'--override_repository={repo}={(folder / repo).resolve()}')
  return flags


if __name__ == '__main__':
  print(' '.join(write(pathlib.Path(sys.argv[1]))))
