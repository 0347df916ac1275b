"""Trajectories survive JSON to the last bit, and nothing else is read as one."""

import base64
import dataclasses
import json
import zlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxrl import group_stats
from jaxrl.data import json_codec, trajectory_codec
from jaxrl.data.images import ImageFolder, as_image
from jaxrl.types import STOP_REASONS, Trajectory

DTYPES = ('bool', 'int8', 'int32', 'uint16', 'int64', 'float16', 'float32', 'float64')
ANY_ARRAY = st.sampled_from(DTYPES).flatmap(
  lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0))
)
LEAVES = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(-(2**70), 2**70),
  st.floats(),
  st.text(),
  st.binary(max_size=20),
  ANY_ARRAY,
  st.floats(width=32).map(np.float32),
  st.integers(-5, 5).map(np.int64),
)
KEYS = st.one_of(st.text(), st.just('$array'), st.integers())
VALUES = st.recursive(
  LEAVES,
  lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.lists(inner, max_size=3).map(tuple),
    st.dictionaries(KEYS, inner, max_size=3),
  ),
  max_leaves=6,
)


@st.composite
def rows(draw):
  length = draw(st.integers(0, 12))

  def column(dtype):
    return draw(arrays.arrays(dtype, length))

  seeds = st.integers(-(2**63), 2**64)
  return Trajectory(
    tokens=column('int32'),
    action_mask=column('bool'),
    rollout_logprobs=column('float32'),
    rewards=column('float32'),
    weights_version=column('int32'),
    env_group=draw(seeds),
    episode_id=draw(seeds),
    sample_index=draw(seeds),
    turn=draw(seeds),
    tag=draw(st.text()),
    episode_seed=draw(seeds),
    stop_reason=draw(st.sampled_from(STOP_REASONS)),
    is_expert=draw(st.booleans()),
    is_greedy=draw(st.booleans()),
    weight=draw(st.floats()),
    messages=draw(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=2)),
    metrics=draw(st.dictionaries(st.text(), st.floats(), max_size=3)),
    columns=draw(st.dictionaries(st.text(), VALUES, max_size=3)),
    extras=draw(st.dictionaries(st.text(), VALUES, max_size=3)),
  )


def same(a, b):
  """Equal type and bits, all the way down."""
  assert type(a) is type(b)
  if isinstance(a, np.ndarray | np.generic):
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
  elif isinstance(a, float):
    assert repr(a) == repr(b)
  elif isinstance(a, dict):
    assert list(a) == list(b)
    for key in a:
      same(a[key], b[key])
  elif isinstance(a, list | tuple):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
      same(x, y)
  else:
    assert a == b


def same_row(a, b):
  for field in dataclasses.fields(Trajectory):
    same(getattr(a, field.name), getattr(b, field.name))


@hypothesis.given(rows())
@hypothesis.settings(max_examples=100, deadline=None)
def test_a_round_trip_keeps_every_bit_of_every_field(row):
  text = json.dumps(trajectory_codec.to_json(row), allow_nan=False)
  same_row(row, trajectory_codec.from_json(json.loads(text)))


@hypothesis.given(st.lists(st.lists(rows(), max_size=2), max_size=3))
@hypothesis.settings(max_examples=30, deadline=None)
def test_groups_survive_packing(groups):
  restored = trajectory_codec.unpack(trajectory_codec.pack(groups))
  assert [len(group) for group in restored] == [len(group) for group in groups]
  for one, other in zip(groups, restored, strict=True):
    for a, b in zip(one, other, strict=True):
      same_row(a, b)


def a_row(**changes):
  return Trajectory(
    tokens=np.arange(4, dtype=np.int32),
    action_mask=np.array([False, True, True, True]),
    rollout_logprobs=np.full(4, -1.5, np.float32),
    rewards=np.zeros(4, np.float32),
    weights_version=np.array([-1, 3, 2, 5], np.int32),
    **changes,
  )


def test_arrays_are_little_endian_whatever_they_were():
  row = a_row(extras={'x': np.arange(3, dtype='>i4')})
  text = trajectory_codec.to_json(row)['extras']['x']['$array']
  assert text['dtype'] == '<i4'
  assert base64.b64decode(text['data']) == np.arange(3, dtype='<i4').tobytes()


def test_what_json_cannot_hold_is_named():
  with pytest.raises(TypeError, match=r"extras\['image'\] is a object"):
    trajectory_codec.to_json(a_row(extras={'image': object()}))
  with pytest.raises(TypeError, match='which is not a number'):
    trajectory_codec.to_json(a_row(extras={'names': np.array(['a'])}))
  deep = []
  for _ in range(100):
    deep = [deep]
  with pytest.raises(TypeError, match='64 levels'):
    trajectory_codec.to_json(a_row(extras={'x': deep}))


def array(dtype='<i4', shape: object = (4,), data: bytes | str = b'\0' * 16):
  text = data if isinstance(data, str) else base64.b64encode(data).decode()
  shape = list(shape) if isinstance(shape, tuple) else shape
  return {'$array': {'dtype': dtype, 'shape': shape, 'data': text}}


@pytest.mark.parametrize(
  'field, value, message',
  [
    ('tokens', array(data=b'\0' * 12), '12 bytes are not an array of shape'),
    ('tokens', array(shape=(2**40,)), '16 bytes are not an array of shape'),
    ('tokens', array(shape=(-4,)), 'is not a shape'),
    ('tokens', array(shape='4'), 'is not a shape'),
    ('tokens', array('|O', (2,)), 'dtype of numbers'),
    ('tokens', array('>i4'), 'dtype of numbers'),
    ('tokens', array('nonsense'), 'dtype of numbers'),
    ('tokens', array(data='?'), 'not base64'),
    ('tokens', array('<f4'), 'array of numbers'),
    ('tokens', array(shape=(2, 2)), r'both must be \[T\]'),
    ('rewards', array('<f4', (3,), b'\0' * 12), r'both must be \[T\]'),
    ('rewards', [0.0] * 4, 'array of numbers'),
    ('weight', {'$float': '1'}, 'must be nan, inf or -inf'),
    ('weight', True, 'weight cannot be a bool'),
    ('tag', 3, 'tag cannot be a int'),
    ('extras', {'x': {'$pickle': ''}}, 'no type is encoded'),
    ('extras', {'x': {'$tuple': 3}}, 'a tuple must be'),
    ('extras', {'$items': [[[], 1]]}, 'not pairs'),
    ('extras', {'x': {'$scalar': array()['$array']}}, 'a scalar must have'),
    ('extras', {'x': array(shape=(1,) * 40)}, 'is not a shape'),
  ],
)
def test_what_is_wrong_is_refused_by_name(field, value, message):
  data = trajectory_codec.to_json(a_row())
  with pytest.raises(ValueError, match=message) as raised:
    trajectory_codec.from_json(data | {field: value})
  assert field in str(raised.value)


def test_absent_and_unknown_fields_are_named():
  data = trajectory_codec.to_json(a_row())
  del data['tag']
  with pytest.raises(ValueError, match='missing or unknown: tag, tags'):
    trajectory_codec.from_json(data | {'tags': ''})


def test_files_with_the_names_of_earlier_versions_are_read():
  data = trajectory_codec.to_json(a_row(sample_index=3, turn=2))
  data['member'], data['step'] = data.pop('sample_index'), data.pop('turn')
  row = trajectory_codec.from_json(data)
  assert (row.sample_index, row.turn) == (3, 2)


def test_packed_groups_have_a_limit():
  text = trajectory_codec.pack([[a_row(extras={'x': np.zeros(10**6)})]])
  assert len(text) < 10**5
  with pytest.raises(ValueError, match='larger than 1000000 bytes'):
    trajectory_codec.unpack(text, 10**6)
  with pytest.raises(ValueError, match='truncated'):
    half = base64.b64encode(base64.b64decode(text)[:-200]).decode()
    trajectory_codec.unpack(half)
  for text in ('?', base64.b64encode(b'123').decode()):
    with pytest.raises(ValueError, match='not what pack writes'):
      trajectory_codec.unpack(text)
  deep = base64.b64encode(zlib.compress(b'[' * 10**5)).decode()
  with pytest.raises(ValueError):
    trajectory_codec.unpack(deep)


def test_the_oldest_version_is_of_an_action():
  assert group_stats.oldest_weights_version([a_row(), a_row()]) == 2
  written = dataclasses.replace(a_row(), weights_version=np.full(4, -1, np.int32))
  assert group_stats.oldest_weights_version([written]) is None
  assert json_codec.decode_value(json_codec.encode_value({})) == {}


def image(seed):
  return as_image(np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8))


def seeing(*seeds, **changes):
  """A row with images, which its first message shows."""
  pictures = [image(seed) for seed in seeds]
  parts = [{'type': 'image', 'image': one} for one in pictures]
  parts.append({'type': 'text', 'text': 'What is it?'})
  messages = [{'role': 'user', 'content': parts}]
  return a_row(messages=messages, images=pictures, **changes)


def test_images_are_stored_once_and_come_back():
  groups = [[seeing(0, 1), seeing(0, 0)], [a_row(), seeing(1)]]
  data = trajectory_codec.to_bytes(groups)
  restored = trajectory_codec.from_bytes(data)
  assert restored[0][0].images == [image(0), image(1)] and not restored[1][0].images
  assert restored[0][1].messages == groups[0][1].messages
  text = json.loads(zlib.decompress(data))
  assert set(text['images']) == {image(0).mark, image(1).mark}
  assert b'$bytes' not in json.dumps(text['groups']).encode()
  # Rows of text are stored as ever.
  assert isinstance(
    json.loads(zlib.decompress(trajectory_codec.to_bytes([[a_row()]]))), list
  )


def test_images_of_a_row_must_be_given_and_be_what_their_names_say(tmp_path):
  row = seeing(3)
  data = json.loads(json.dumps(trajectory_codec.to_json(row)))
  with pytest.raises(ValueError, match=f'images: the row needs {row.images[0].mark}'):
    trajectory_codec.from_json(data)
  for wrong in (7, ['x'], [3], None):
    with pytest.raises(ValueError, match='images'):
      trajectory_codec.from_json(data | {'images': wrong}, {})
  path = tmp_path / f'{row.images[0].digest}.png'
  path.write_bytes(row.images[0].png)
  known = ImageFolder(tmp_path)
  assert list(known) == [row.images[0].mark] and 'sha256:../x' not in known
  same_row(row, trajectory_codec.from_json(data, known))
  path.write_bytes(image(4).png)
  with pytest.raises(ValueError, match='not those of its name'):
    trajectory_codec.from_json(data, known)
  whole = json.loads(zlib.decompress(trajectory_codec.to_bytes([[row]])))
  whole['images'][row.images[0].mark] = json_codec.encode_value(image(4).png)
  with pytest.raises(ValueError, match='not those of its name'):
    trajectory_codec.from_bytes(zlib.compress(json.dumps(whole).encode()))
