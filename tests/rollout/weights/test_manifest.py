import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from jaxrl.rollout.weights.manifest import (
  RAW,
  SPARSE,
  BlobPacker,
  Chunk,
  Manifest,
  Payload,
  checksum,
  decode_record,
  encode_record,
  read_payload,
)
from jaxrl.rollout.weights.shards import Region
from jaxrl.rollout.weights.transport import CorruptWeightsError

BOX = Region('layers.q.kernel', 'bfloat16', (8, 6), (4, 0), (4, 6))


def manifest(version=3, base=2):
  full = Payload(RAW, 1, 0, 20, 'a' * 32)
  delta = Payload(SPARSE, 0, 7, 9, 'b' * 32)
  chunks = (Chunk(0, 10, 'a' * 32, full, delta), Chunk(10, 14, 'c' * 32, None, full))
  return Manifest(version, base, ((BOX, chunks),))


def test_a_manifest_comes_back():
  sent = manifest()
  decoded = Manifest.decode(sent.encode())
  assert decoded == sent and decoded.digest == sent.digest
  assert not decoded.is_full
  assert decoded.chunk_layout() == [(BOX, [(0, 10), (10, 14)])]


def test_the_digest_is_of_contents_and_places_not_of_their_encoding():
  one = manifest()
  (box, chunks), *_ = one.regions
  bare = tuple(Chunk(c.start, c.count, c.digest) for c in chunks)
  assert Manifest(9, None, ((box, bare),)).digest == one.digest
  other = Region('layers.k.kernel', *list(BOX.__dict__.values())[1:])
  assert Manifest(3, 2, ((other, chunks),)).digest != one.digest


@given(st.integers(0), st.integers(1, 255))
def test_a_manifest_with_any_byte_changed_is_refused(place, change):
  sent = bytearray(manifest().encode())
  sent[place % len(sent)] ^= change
  with pytest.raises(CorruptWeightsError):
    Manifest.decode(bytes(sent))


def test_a_cut_manifest_is_refused():
  sent = manifest().encode()
  for size in range(len(sent)):
    with pytest.raises(CorruptWeightsError):
      Manifest.decode(sent[:size])


@pytest.mark.parametrize(
  'spoil',
  [
    lambda body: body.update(format='other'),
    lambda body: body.update(digest='0' * 32),
    lambda body: body['regions'][0].update(shape=[2, 6]),
    lambda body: body['regions'][0].update(dtype='float99'),
    lambda body: body['regions'][0].pop('chunks'),
    lambda body: body['regions'][0]['chunks'].pop(),
    lambda body: body['regions'][0]['chunks'][1].__setitem__(0, 11),
  ],
)
def test_a_manifest_that_contradicts_itself_is_refused(spoil):
  body = decode_record(manifest().encode())
  spoil(body)
  with pytest.raises(CorruptWeightsError):
    Manifest.decode(encode_record(body))


def test_blobs_are_bounded_and_any_safetensors_library_reads_them():
  region = Region('w', 'float32', (30,), (0,), (30,))
  data = np.arange(30, dtype=np.float32)
  packer, blobs, places = BlobPacker(60), {}, []
  for start in (0, 10, 20):
    part = data[start : start + 10]
    place, full = packer.add(f'w@{start}', region, RAW, part, checksum(part))
    places.append(place)
    blobs.update([full] if full else [])
  odd, full = packer.add('w@30', region, SPARSE, b'abc', checksum(b'abc'))
  blobs.update(b for b in (full, packer.finish()) if b)
  assert packer.finish() is None
  assert [(p.blob, p.offset, p.size) for p in (*places, odd)] == [
    (0, 0, 40),
    (1, 0, 40),
    (2, 0, 40),
    (2, 40, 3),
  ]
  blob = b''.join(blobs[2])
  assert int.from_bytes(blob[:8], 'little') % 8 == 0  # so that numbers are aligned
  loaded = safetensors.load(blob)
  np.testing.assert_array_equal(loaded['w@20'], data[20:])
  assert loaded['w@30'].tobytes() == b'abc'
  assert bytes(read_payload(memoryview(blob), odd)) == b'abc'
  with pytest.raises(CorruptWeightsError):
    read_payload(memoryview(blob)[:-1], odd)
  with pytest.raises(CorruptWeightsError):
    read_payload(memoryview(b'1234'), odd)
