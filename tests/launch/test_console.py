"""What is printed, on a terminal and in a pipe."""

import io
import logging
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl.options import ConfigError
from launch.logging.console import Clock, Console, break_command, format_duration
from launch.settings.logging_settings import LEVELS, LoggingOptions


class Tty(io.StringIO):
  def isatty(self):
    return True


def play(stream, steps=3, total=3, **metrics):
  console = Console(stream, width=100)
  console.phase('rl', total)
  for step in range(steps):
    console.write(step, {'reward/mean': 0.25, 'loss/total': 0.01, **metrics})
  console.write(total, {'eval/math/mean': 0.5, 'time/evaluate': 3.0})
  console.closing('Finished.', {'report': 'runs/x/report.html'})
  return stream.getvalue()


def test_a_pipe_gets_one_plain_line_a_step():
  text = play(io.StringIO())
  assert '\x1b' not in text and '\r' not in text and '\b' not in text
  lines = text.splitlines()
  assert lines[0] == 'rl: 3 steps'
  assert lines[1].startswith('rl 1/3  reward 0.250  loss 0.0100')
  assert [line.split('  ')[0] for line in lines[1:4]] == ['rl 1/3', 'rl 2/3', 'rl 3/3']
  assert lines[4] == '  evaluation after 3 steps of rl  math  0.500'
  assert lines[-1].split() == ['report', 'runs/x/report.html']


def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  text = play(Tty())
  assert '\x1b[?25l' in text
  assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')
  assert 'reward' in text


def test_markup_in_a_value_is_printed_as_it_is():
  stream = io.StringIO()
  Console(stream).say('[red]x[/red] [/y]')
  assert stream.getvalue() == '[red]x[/red] [/y]\n'


def test_what_is_not_a_number_is_said():
  assert 'loss nan' in play(io.StringIO(), steps=1, **{'loss/total': None})


def test_a_long_phase_of_fast_steps_leaves_lines_out():
  lines = play(io.StringIO(), steps=500, total=500).splitlines()
  assert len(lines) < 30
  assert any(line.startswith('rl   1/500') for line in lines)
  assert any(line.startswith('rl 500/500') for line in lines)


def test_rate_and_time_left(monkeypatch):
  now = [100.0]
  monkeypatch.setattr('launch.logging.console.time.monotonic', lambda: now[0])
  clock = Clock(start=10)
  assert clock.pace(20) == ''
  for done in range(11, 16):
    now[0] += 30 if done < 13 else 2  # the first two compile
    clock.tick(done)
  assert clock.pace(20) == '2.00 s/step, 0:10 left'
  assert clock.pace(None) == '2.00 s/step'


@pytest.mark.parametrize(
  'seconds, text', [(0, '0:00'), (75.4, '1:15'), (4000, '1:06:40')]
)
def test_span(seconds, text):
  assert format_duration(seconds) == text


def test_environments_cannot_take_its_stream_away():
  code = """
import sys
from launch.logging.console import Console
print('before')
console = Console()
console.say('begun')
sys.stdout.close()
sys.stdout = None
console.say('on')
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  assert done.stdout.splitlines() == ['before', 'begun', 'on'], done.stderr


@pytest.mark.parametrize('width', [40, 60, 80, 100, 200])
def test_a_long_command_breaks_between_the_words_of_the_shell(width):
  words = ['python', '-m', 'launch.train', "--config.algorithm.kl_loss='k3(coef=.1)'"]
  words += ['--config.dataset.path=generate:arithmetic(kinds=(1, 2), form="a b")'] * 3
  text = break_command(shlex.join(words), width)
  assert shlex.split(text.replace('\\\n', ' ')) == words
  longest = max(len(shlex.quote(word)) for word in words)
  assert all(len(line) <= max(width, longest + 8) for line in text.splitlines())


@pytest.mark.parametrize('level', ['debug', 'info', 'warning', 'error'])
def test_the_console_shows_messages_from_its_level_on(level, capsys):
  assert LoggingOptions(level=level).level == level
  console, log = Console(), logging.getLogger('jaxrl.anything')
  with console.listening():
    console.set_level(level)
    for name in LEVELS:
      log.log(getattr(logging, name.upper()), 'from %s', name)
  output = capsys.readouterr().out
  shown = [name for name in LEVELS if f'from {name}' in output]
  assert shown == list(LEVELS[LEVELS.index(level) :])


def test_another_level_is_named_with_its_key():
  with pytest.raises(ConfigError, match=r"level='warn': is not one of debug"):
    LoggingOptions(level='warn')


@pytest.mark.parametrize('width', [80, 100])
def test_no_line_breaks_inside_a_word(width):
  """A terminal breaks what is longer than its width wherever it ends."""
  stream = Tty()
  console = Console(stream, width=width)
  sentence = 'in every group all samples have the same reward, so nothing is compared; '
  console.warn(3 * sentence)
  console.say(3 * sentence)
  path = '/' + 'a/long/folder/of/runs/' * 2 + 'and/some/more/report.html'
  command = "python -m launch.train --config=a.py --config.dataset.path='a b c' --x=1 "
  command += '--workdir=runs/a_rather_long_name_of_a_run'
  console.closing('Finished.', {'report': path, 'data': 2 * sentence, 'go on': command})
  lines = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', stream.getvalue()).splitlines()
  assert max(map(len, lines)) <= width
  words = {word for line in lines for word in line.split()}
  assert path in words and set(sentence.split()) <= words
