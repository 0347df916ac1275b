"""The ledger: every item once, wherever a process ends."""

import random

import pytest

from jaxrl.data.trajectory_writers.dump_journal import DumpJournal
from tests.data.trajectory_writers.dumps import Memory


def items(sink):
  return sorted(row['i'] for rows in sink.parts.values() for row in rows)


def test_parts_are_written_when_whole_and_in_order(tmp_path):
  sink = Memory()
  ledger = DumpJournal(tmp_path, sink, part_size=3)
  for i in (2, 0, 4, 1, 1):
    ledger.add('a/b', i, [{'i': i}, {'i': i}])
    ledger.flush()
  assert sink.parts == {'a%2Fb-00000': [{'i': i} for i in (0, 0, 1, 1, 2, 2)]}
  assert (
    ledger.played_items('a/b') == {0, 1, 2, 4} and ledger.played_items('a') == set()
  )
  assert ledger.flush(all_played=True) == 1 and ledger.flush(all_played=True) == 0
  assert sink.parts['a%2Fb-00001'] == [{'i': 4}, {'i': 4}]


def test_a_torn_line_is_played_again(tmp_path):
  sink = Memory()
  ledger = DumpJournal(tmp_path, sink, part_size=3)
  ledger.add('t', 0, [{'i': 0}])
  ledger.add('t', 1, [{'i': 1}])
  file = tmp_path / 't-00000.jsonl'
  file.write_bytes(file.read_bytes()[:-4])
  ledger = DumpJournal(tmp_path, sink, part_size=99)
  assert ledger.part_size == 3 and ledger.played_items('t') == {0}
  for i in (1, 2):
    ledger.add('t', i, [{'i': i}])
  ledger.flush()
  assert items(sink) == [0, 1, 2]
  assert sink.checked == [True, False]


@pytest.mark.parametrize('after', [True, False])
def test_a_sink_that_fails_gets_the_part_again(tmp_path, after):
  sink = Memory(fail=1, after=after)
  ledger = DumpJournal(tmp_path, sink, part_size=2)
  ledger.add('t', 0, [{'i': 0}])
  ledger.add('t', 1, [{'i': 1}])
  with pytest.raises(OSError):
    ledger.flush()
  assert DumpJournal(tmp_path, sink).played_items('t') == {0, 1}
  assert items(sink) == [0, 1]


def test_every_item_once_however_often_it_is_cut(tmp_path):
  """Every prefix of the bytes that a run wrote is a state a kill may leave."""
  rng, sink, left = random.Random(0), Memory(), list(range(20))
  for _ in range(60):
    ledger = DumpJournal(tmp_path, sink, part_size=4)
    left = [i for i in range(20) if i not in ledger.played_items('t')]
    if not left:
      break
    for i in rng.sample(left, min(3, len(left))):
      ledger.add('t', i, [{'i': i}])
    if rng.random() < 0.5:
      ledger.flush()
    for file in tmp_path.glob('*.jsonl'):
      data = file.read_bytes()
      if rng.random() < 0.3:
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
  assert not left and items(sink) == list(range(20))


def test_what_no_ledger_wrote_is_refused(tmp_path):
  DumpJournal(tmp_path, Memory())
  (tmp_path / 't-00000.jsonl').write_text('not json\n')
  with pytest.raises(ValueError, match=r', line \d+: not a journal'):
    DumpJournal(tmp_path, Memory())
