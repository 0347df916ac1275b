"""What is lost or spoilt on the way is sent again, and never loaded."""

import hashlib

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.rollout.weights import manifest_reader
from jaxrl.rollout.weights.manifest import encode_record, latest_key
from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import WeightsError
from tests.rollout.weights.helpers import (
  SMALL,
  MemoryTransport,
  Rough,
  halves,
  make,
  same,
  step,
)


def test_what_arrives_spoilt_once_is_asked_for_again():
  transport, params = Rough(), make()
  publisher, receiver = (
    VersionWriter(transport, **SMALL),
    VersionReader(transport, threads=1),
  )
  for version in range(3):
    publisher.publish(version, snapshot(params))
    broken = set()

    def once(name, data, broken=broken):
      if '-run-' not in name or name in broken:
        return data
      broken.add(name)
      return None if len(broken) % 2 else data[:-9] + b'x' + data[-8:]

    transport.spoil = once
    assert receiver.poll() == version and same(receiver.params(), params)
    assert receiver.load_report.repeats >= 2
    params = step(params, 0.01, version)


@pytest.mark.parametrize('what', ['.safetensors', '.json'])
def test_what_is_lost_is_sent_again(what):
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  held, params = params, step(params)
  publisher.publish(1, snapshot(params))
  lost = [n for n in transport.names('0-run-') if n.endswith(what) and '-1' in n[-20:]]
  for name in lost:
    transport.delete(name)
  assert lost and receiver.poll() is None
  assert receiver.problem is not None and receiver.version == 0
  assert same(receiver.params(), held)  # still served, whole
  publisher.repair()
  assert receiver.poll() == 1 and same(receiver.params(), params)
  assert receiver.problem is None and receiver.digests == (publisher.digest,)
  publisher.publish(2, snapshot(params))
  publisher.publish(3, snapshot(params))
  assert receiver.poll() == 3


def test_a_lost_head_is_written_again():
  transport = MemoryTransport()
  publisher, receiver = VersionWriter(transport), VersionReader(transport)
  publisher.publish(0, snapshot(make()))
  transport.put(latest_key(0), b'{"run":"x","version":99}')
  assert receiver.poll() is None
  publisher.repair()
  assert receiver.poll() == 0


HEADS = [
  b'',
  b'\0' * 99,
  encode_record([]),
  encode_record({'run': 'x', 'version': '?'}),
]
HEADS += [encode_record({'run': [], 'version': None}), encode_record(5)]


@pytest.mark.parametrize('head', HEADS)
def test_a_head_that_is_garbage_is_no_version(head):
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  transport.put(latest_key(0), head)
  assert receiver.poll() is None and receiver.version is None
  publisher.publish(1, snapshot(params))
  assert receiver.poll() == 1 and same(receiver.params(), params)


GARBAGE = {
  'empty': lambda data, other: b'',
  'cut': lambda data, other: data[:-1],
  'longer': lambda data, other: data + b'x',
  'noise': lambda data, other: hashlib.sha512(data).digest() * 9,
  'another name': lambda data, other: other,
  'a record of nonsense': lambda data, other: encode_record({'regions': 10**30}),
  'a size beyond all memory': lambda data, other: b'\xff' * 8 + data[8:],
}


@pytest.mark.parametrize('kind', GARBAGE)
@pytest.mark.parametrize('what', ['.json', '.safetensors'])
def test_garbage_in_the_place_of_a_version_is_not_loaded(kind, what):
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  held, params = params, step(params)
  publisher.publish(1, snapshot(params))
  names = [n for n in transport.names('0-run-') if n.endswith(what)]
  new = [n for n in names if '-1.' in n or '-1-' in n]
  other = bytes(transport.get(next(n for n in names if n not in new)))
  for name in new:
    transport.put(name, GARBAGE[kind](bytes(transport.get(name)), other))
  assert new and receiver.poll() in (None, 1)
  expected = held if receiver.version == 0 else params  # 'longer' changes no payload
  assert same(receiver.params(), expected)
  assert receiver.version == 0 or kind == 'longer'
  publisher.repair()
  assert receiver.poll() == 1 or receiver.version == 1
  assert same(receiver.params(), params)


def test_weights_spoilt_in_the_receiver_are_not_built_upon():
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  receiver._parts[0]._front[1][17] ^= 1  # a bit flips in memory
  params = step(params)
  publisher.publish(1, snapshot(params))
  assert receiver.poll() is None
  assert 'another digest' in str(receiver.problem) or 'lost' in str(receiver.problem)
  publisher.repair()
  assert receiver.poll() == 1 and same(receiver.params(), params)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_spoilt_byte_is_ever_loaded(data):
  transport, params = MemoryTransport(), make(size=400)
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  late = data.draw(st.booleans())
  if not late:
    receiver.poll()
  held, params = params, step(params)
  publisher.publish(1, snapshot(params))
  targets = [n for n in transport.names('0-') if 'reader' not in n]
  for name in data.draw(st.lists(st.sampled_from(targets), min_size=1, max_size=3)):
    spoilt = bytearray(transport.get(name))
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= data.draw(st.integers(1, 255))
    transport.put(name, bytes(spoilt))
  got = receiver.poll()
  if got == 1:  # the byte was of nothing that matters: a blob's head, an older version
    assert same(receiver.params(), params)
  elif not late:
    assert receiver.version == 0 and same(receiver.params(), held)
  for _ in range(3):
    publisher.repair()
    receiver.poll()
  if receiver.problem is None:
    assert receiver.version == 1 and same(receiver.params(), params)
  # The next version gets everyone out of it.
  publisher.publish(2, snapshot(held))
  publisher.repair(), receiver.poll(), publisher.repair(), receiver.poll()
  assert receiver.version == 2 and same(receiver.params(), held)
  publisher.close(), receiver.close()


def test_a_transport_that_is_full_leaves_the_version_before():
  transport, params = Rough(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  before, put, room = set(transport.names('')), transport.put, [2]

  def full(name, *data):
    room[0] -= 1
    if room[0] < 0:
      raise WeightsError('no space')
    put(name, *data)

  transport.put = full
  with pytest.raises(WeightsError, match='no space'):
    publisher.publish(1, snapshot(make(1)))
  transport.put = put
  assert publisher.version == 0 and set(transport.names('')) == before
  assert receiver.poll() == 0 and same(receiver.params(), params)
  publisher.publish(1, snapshot(make(1)))
  assert receiver.poll() == 1 and same(receiver.params(), make(1))


def test_what_was_handed_out_lasts_through_the_next_version():
  transport = MemoryTransport()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(make(0)))
  with pytest.raises(LookupError):
    receiver.params()
  receiver.poll()
  first = receiver.params()
  publisher.publish(1, snapshot(make(1)))
  receiver.poll()
  assert same(first, make(0)) and same(receiver.params(), make(1))
  with pytest.raises(ValueError):
    first['norm'][0] = 3


def test_every_stored_blob_is_a_safetensors_file():
  transport, params = MemoryTransport(), halves(make())
  publisher = VersionWriter(transport, **SMALL)
  publisher.publish(0, snapshot(params))
  parts = {}
  for name in sorted(transport.names('0-run-')):
    if name.endswith('.safetensors'):
      parts |= dict(safetensors.deserialize(bytes(transport.get(name))))
  kernel = {int(n.split('@')[1]): x for n, x in parts.items() if 'kernel' in n}
  assert {piece['dtype'] for piece in kernel.values()} == {'BF16'}
  kernel_bytes = b''.join(bytes(kernel[start]['data']) for start in sorted(kernel))
  assert kernel_bytes == params['layers']['kernel'].tobytes()


def test_a_spoilt_difference_is_not_even_unpacked(monkeypatch):
  transport, params = Rough(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  publisher.publish(1, snapshot(step(params)))
  transport.spoil = lambda name, data: (
    data[:-200] + bytes(200) if name.endswith('.safetensors') else data
  )
  applied = []
  monkeypatch.setattr(
    manifest_reader, 'apply_delta', lambda out, data: applied.append(bytes(data))
  )
  assert receiver.poll() is None and receiver.version == 0
  assert applied and not any(data.endswith(bytes(8)) for data in applied)
