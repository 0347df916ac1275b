"""The codec against protobuf's own classes, and messages that are broken."""

import contextlib

import numpy as np
import pytest

from jaxrl.rollout.tinker import proto_codec
from jaxrl.rollout.tinker.proto_codec import ProtoError, SequenceMessage

CELLS = 10**6


def official():
  return pytest.importorskip('tinker').proto


def test_a_minimal_request():
  # Field 1 is 'm', field 2 is 7, field 4 is 'ppo', field 6 is true.
  data = b'\x0a\x01m\x10\x07\x22\x03ppo\x30\x01'
  message = proto_codec.read_forward_backward(data, CELLS)
  assert (message.model_id, message.seq_id, message.loss) == ('m', 7, 'ppo')
  assert message.forward_only and message.data == []


@pytest.mark.parametrize(
  'data',
  [
    b'\x0a',
    b'\x0a\x05ab',
    b'\xff' * 12,
    b'\x0b\x00',
    b'\x00\x01',
    b'\x0a\x02\xff\xfe',
    b'\x1a\x07\x0a\x05\x0a\x03\x0a\x01\x01',  # a third of a token
    b'\x08\x01',
  ],
)
def test_broken_messages_are_refused(data):
  with pytest.raises(ProtoError):
    proto_codec.read_forward_backward(data, CELLS)


def test_no_bytes_end_in_another_error():
  rng = np.random.default_rng(0)
  start = (
    b'\x0a\x01m\x10\x07\x1a\x0e\x0a\x06\x0a\x04\x0a\x02\x01\x00\x12\x04\x0a\x01w\x12'
  )
  for _ in range(2000):
    data = bytearray(start + rng.bytes(12))
    data[rng.integers(len(data))] = rng.integers(256)
    with contextlib.suppress(ProtoError):
      proto_codec.read_forward_backward(bytes(data), CELLS)


def test_large_tensors_are_refused():
  tensor = b'\x18\x01\x20\x80\x80\x80\x80\x10'  # of 2³² elements
  with pytest.raises(ProtoError, match='not possible'):
    proto_codec.read_tensor(tensor, CELLS)


def test_sparse_tensors_whose_parts_contradict_each_other():
  rows = np.array([1.0]), np.array([0, 1, 1]), np.array([5])
  with pytest.raises(ProtoError, match='contradict'):
    proto_codec.from_csr(*rows, (2, 3), 0)
  dense = proto_codec.from_csr(rows[0], rows[1], np.array([2]), (2, 3), -1)
  np.testing.assert_array_equal(dense, [[-1, -1, 1], [-1, -1, -1]])


@pytest.mark.clients
def test_requests_of_the_official_client_are_read():
  tinker = pytest.importorskip('tinker')
  torch = pytest.importorskip('torch')
  from tinker.proto.request_conv import forward_backward_request_to_proto

  types = tinker.types
  sparse = torch.zeros((3, 40))
  sparse[1, 7] = 2.5
  data = [
    types.Datum(
      types.ModelInput(
        chunks=[
          types.EncodedTextChunk(tokens=[1, 2]),
          types.EncodedTextChunk(tokens=[3]),
        ]
      ),
      {
        'target_tokens': [[4, 5], [6, 7], [8, 9]],
        'weights': types.TensorData.from_torch_sparse(sparse),
      },
    )
  ]
  body = types.ForwardBackwardInput(data, 'ppo', {'clip_low_threshold': 0.5, 'x': 'y'})
  request = types.ForwardBackwardRequest(body, model_id='run', seq_id=300)
  encoded = forward_backward_request_to_proto(request).SerializeToString()
  message = proto_codec.read_forward_backward(encoded, CELLS)
  assert (message.model_id, message.seq_id, message.loss) == ('run', 300, 'ppo')
  assert message.loss_config == {'clip_low_threshold': 0.5, 'x': 'y'}
  (datum,) = message.data
  assert datum.tokens.tolist() == [1, 2, 3] and not datum.other_chunk
  assert datum.inputs['target_tokens'].tolist() == [[4, 5], [6, 7], [8, 9]]
  np.testing.assert_array_equal(datum.inputs['weights'], sparse.numpy())


@pytest.mark.clients
def test_results_are_read_by_the_official_client():
  pytest.importorskip('tinker')
  from tinker.proto import response_conv

  outputs = [
    {'logprobs': np.array(x, np.float32)}
    for x in ([-1.0, -2.0], [-3.0], [[-1.0, -2.0], [-3.0, -4.0]])
  ]
  data = proto_codec.write_forward_backward(outputs, {'loss:sum': 1.5})
  read = response_conv.deserialize_forward_backward_output(data)
  assert read.metrics == {'loss:sum': 1.5}
  assert [x['logprobs'].tolist() for x in read.loss_fn_outputs] == [
    x['logprobs'].tolist() for x in outputs
  ]
  topk = np.array([[3, 4]]), np.array([[-0.5, -1.0]])
  sequence = SequenceMessage(
    np.array([7]), np.array([-0.5], np.float32), proto_codec.STOP, topk
  )
  dense = np.array([[-1.0, 0.0]], np.float32)
  data = proto_codec.write_sample(
    [sequence],
    prompt_logprobs=np.array([np.nan, -1.0]),
    topk_prompt=(np.array([[0], [5]]), np.array([[-99999.0], [-0.1]])),
    target_prompt=proto_codec.write_tensor(dense),
    alternatives=(np.array([[1, 2]]), dense),
  )
  sample = response_conv.deserialize_sample_response(data)
  assert sample.sequences[0].tokens == [7]
  assert sample.sequences[0].stop_reason == 'stop'
  assert sample.sequences[0].topk_logprobs == [[(3, -0.5), (4, -1.0)]]
  assert sample.prompt_logprobs == [None, -1.0]
  assert sample.topk_prompt_logprobs[0] is None
  assert sample.target_prompt_logprobs.tolist() == [[-1.0, 0.0]]
  assert sample.prompt_alt_tokens.tokens.tolist() == [[1, 2]]
  csr = np.array([0, 1]), np.array([1])
  sparse = proto_codec.write_sparse(np.array([-2.0]), *csr, (1, 3))
  sample = response_conv.deserialize_sample_response(
    proto_codec.write_sample([], target_prompt=sparse)
  )
  assert sample.target_prompt_logprobs.tolist() == [[0.0, -2.0, 0.0]]
