"""The gauge: what people see while episodes are played."""

import io
import re

from launch.logging.console import Console
from launch.logging.progress import RolloutProgress
from tests.data.trajectory_writers.dumps import row


def test_lines_in_a_pipe_tell_count_rate_score_and_time_left():
  stream = io.StringIO()
  gauge = RolloutProgress(Console(stream), 'rollout', 8, start=2, every=0)
  gauge.group([row(0), row(0, sample_index=1, turn=0), row(0, sample_index=1, turn=1)])
  gauge.group([row(1, rewards=(0, 0), stop_reason='env_error'), row(1, sample_index=1)])
  gauge.close()
  first, *lines = stream.getvalue().splitlines()
  assert first == 'rollout: 8 episodes, 2 of them played before'
  assert re.fullmatch(r'rollout 4/8  score 0\.750  .* left', lines[0])
  assert re.fullmatch(r'rollout 6/8  score 0\.500  failed 1  .* left', lines[1])
  assert gauge.score == 0.5
  assert gauge.summary() == {
    'episodes': '6 of 8, 4 of them just now',
    'score': '0.5000, of those just played',
    'failed': '1 × env_error',
  }


def test_few_lines_in_a_pipe_but_the_last():
  stream = io.StringIO()
  gauge = RolloutProgress(Console(stream), 'rollout', 3)
  for number in range(3):
    gauge.group([row(number)])
  assert len(stream.getvalue().splitlines()) == 2
