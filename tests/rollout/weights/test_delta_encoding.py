import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.rollout.weights import delta_encoding
from jaxrl.rollout.weights.shards import as_uint_view
from jaxrl.rollout.weights.transport import CorruptWeightsError

KINDS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


def encode(old, new):
  return delta_encoding.encode_delta(old, new, delta_encoding.find_changes(old, new))


@st.composite
def pairs(draw):
  """Two arrays that differ in few places, by anything."""
  kind = draw(KINDS)
  old = draw(hnp.arrays(kind, draw(st.integers(1, 2000)), fill=st.just(kind(7))))
  new = old.copy()
  top = int(np.iinfo(kind).max)
  for place in draw(st.lists(st.integers(0, old.size - 1), max_size=30)):
    new[place] = draw(st.integers(0, top))
  return old, new


@given(pairs())
def test_what_was_encoded_comes_back_to_the_bit(pair):
  old, new = pair
  data = encode(old, new)
  if data is None:
    return
  assert len(data) < new.nbytes
  patched = old.copy()
  delta_encoding.apply_delta(patched, data)
  np.testing.assert_array_equal(patched, new)


def test_any_bits_are_numbers_like_others():
  odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1.0]
  for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn):
    old = np.ones(10_000, dtype)
    new = old.copy()
    new[::97] = np.resize(np.array(odd), new[::97].shape).astype(dtype)
    new.view(f'u{new.itemsize}')[5] = np.iinfo(f'u{new.itemsize}').max  # a NaN's bits
    data = encode(as_uint_view(old), as_uint_view(new))
    back = as_uint_view(old).copy()
    delta_encoding.apply_delta(back, data)
    assert back.tobytes() == new.tobytes()


def test_a_step_of_one_unit_in_a_hundred_weights_takes_little():
  draw = np.random.default_rng(0)
  old = as_uint_view(draw.standard_normal(1 << 20).astype(ml_dtypes.bfloat16))
  moves = draw.random(old.size) < 0.01
  new = old + np.where(moves, draw.choice([1, -1], old.size), 0).astype(np.uint16)
  data = encode(old, new)
  # 7.2 bits of place and one of direction are the least; a delta may take a third more.
  assert 8.2 / 8 < len(data) / moves.sum() < 1.35
  assert len(data) < 0.007 * new.nbytes


@pytest.mark.parametrize('place', [0, 254, 255, 256, 509, 510, 511, 99_999])
def test_gaps_of_any_length(place):
  old = np.zeros(100_000, np.uint16)
  new = old.copy()
  new[place] = 1
  patched = old.copy()
  delta_encoding.apply_delta(patched, encode(old, new))
  np.testing.assert_array_equal(patched, new)


def test_what_changed_everywhere_is_no_delta():
  draw = np.random.default_rng(0)
  old, new = draw.integers(0, 1 << 16, (2, 5000), np.uint16)
  assert encode(old, new) is None
  assert encode(old[:1], old[:1] + np.uint16(1)) is None


@given(pairs(), st.data())
def test_spoilt_bytes_end_in_corrupt_or_nothing_worse(pair, data):
  old, new = pair
  sent = encode(old, new)
  if sent is None:
    return
  spoilt = bytearray(sent)
  for _ in range(data.draw(st.integers(1, 3))):
    place = data.draw(st.integers(0, len(sent) - 1))
    spoilt[place] ^= data.draw(st.integers(1, 255))
  spoilt = spoilt[: data.draw(st.sampled_from([len(sent), len(sent) // 2, 5]))]
  with contextlib.suppress(CorruptWeightsError):
    delta_encoding.apply_delta(old.copy(), bytes(spoilt))


def test_a_head_that_lies_is_refused_before_memory_is_taken():
  huge = delta_encoding._HEADER.pack(10, 1 << 31, 4) + bytes(100)
  with pytest.raises(CorruptWeightsError, match='10 changes for 64 elements'):
    delta_encoding.apply_delta(np.zeros(64, np.uint16), huge)
  with pytest.raises(CorruptWeightsError, match='past the end'):
    old, new = np.zeros((2, 4000), np.uint16)
    new[3500] = 1
    delta_encoding.apply_delta(np.zeros(3400, np.uint16), encode(old, new))
