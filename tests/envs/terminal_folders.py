"""Two tiny tasks in each of Terminal-Bench's forms, written to folders."""

from tests.envs.swe_repos import write

RUN = '#!/bin/bash\npytest -rA $TEST_DIR/test_outputs.py\n'
SCORE = """#!/bin/bash
if pytest -rA /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
COUNT_TESTS = """from pathlib import Path


def test_there_is_a_count():
  assert Path('/app/count.txt').is_file()


def test_it_is_right():
  assert Path('/app/count.txt').read_text().strip() == '2'
"""
COUNT = (
  'Count the lines of /app/words.txt that hold an "a"; write it to /app/count.txt.'
)
COUNT_SOLUTION = '#!/bin/bash\ngrep -c a /app/words.txt > /app/count.txt\n'
COUNT_DOCKERFILE = """FROM ubuntu:24.04
# what the agent finds
WORKDIR /app
COPY words.txt \\
     ./
ENV GREETING="good day" PLACE=here
RUN echo "$GREETING from $PLACE" > greeting.txt
"""
SCRIPT_TESTS = """import subprocess


def test_it_sorts():
  done = subprocess.run(
    ['sh', '/app/bin/by_size.sh'],
    input='bbb\\na\\ncc\\n',
    capture_output=True,
    text=True,
  )
  assert done.stdout.split() == ['a', 'cc', 'bbb']
"""
SCRIPT = 'Mend /app/bin/by_size.sh: it is to sort the lines it reads by their length.'
SCRIPT_SOLUTION = """cat > /app/bin/by_size.sh <<'EOF'
awk '{print length, $0}' | sort -n | cut -d' ' -f2-
EOF
"""


def _yaml(instruction):
  return f"""instruction: |-
  {instruction}
author_name: somebody
author_email: somebody@example.org
difficulty: easy
category: files
tags:
  - files
parser_name: pytest
max_agent_timeout_sec: 300.0
max_test_timeout_sec: 100.0
run_tests_in_same_shell: false
"""


def count(tasks):
  files = {
    'task.yaml': _yaml(COUNT),
    'Dockerfile': COUNT_DOCKERFILE,
    'words.txt': 'apple\nplum\npear\n',
    'run-tests.sh': RUN,
    'tests/test_outputs.py': COUNT_TESTS,
    'solution.sh': COUNT_SOLUTION,
  }
  write(tasks / 'count', files)
  return 'count', COUNT_SOLUTION


def script(tasks):
  files = {
    'task.yaml': _yaml(SCRIPT),
    'Dockerfile': 'FROM ubuntu:24.04\nWORKDIR /app\nCOPY bin bin\n',
    'bin/by_size.sh': 'sort\n',
    'run-tests.sh': RUN,
    'tests/test_outputs.py': SCRIPT_TESTS,
    'solution.sh': SCRIPT_SOLUTION,
  }
  write(tasks / 'script', files)
  return 'script', SCRIPT_SOLUTION


def _toml(seconds):
  return f"""version = "1.0"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = {seconds}

[verifier]
timeout_sec = 100.0
"""


def newer_count(tasks):
  files = {
    'task.toml': _toml(300.0),
    'instruction.md': COUNT,
    'environment/Dockerfile': COUNT_DOCKERFILE,
    'environment/words.txt': 'apple\nplum\npear\n',
    'tests/test.sh': SCORE,
    'tests/test_outputs.py': COUNT_TESTS,
    'solution/solve.sh': COUNT_SOLUTION,
  }
  write(tasks / 'newer_count', files)
  return 'newer_count', COUNT_SOLUTION


def newer_script(tasks):
  files = {
    'task.toml': _toml(300.0),
    'instruction.md': SCRIPT,
    'environment/Dockerfile': 'FROM ubuntu:24.04\nWORKDIR /app\nCOPY bin/ /app/bin/\n',
    'environment/bin/by_size.sh': 'sort\n',
    'tests/test.sh': SCORE,
    'tests/test_outputs.py': SCRIPT_TESTS,
    'solution/solve.sh': SCRIPT_SOLUTION,
  }
  write(tasks / 'newer_script', files)
  return 'newer_script', SCRIPT_SOLUTION
