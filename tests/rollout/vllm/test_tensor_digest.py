"""A digest of tensors that is taken where they lie."""

import pytest


def test_a_sum_tells_places_and_bits():
  torch = pytest.importorskip('torch')
  from jaxrl.rollout.vllm.tensor_digest import TensorDigest, tensor_checksum

  x = torch.arange(100, dtype=torch.float32)
  others = [x + 1, x.flip(0), x.to(torch.float64), x[:-1], -x]
  assert len({tensor_checksum(y) for y in [x, *others]}) == 6
  assert (
    tensor_checksum(x)
    == tensor_checksum(x.clone())
    == tensor_checksum(x.view(10, 10).T.contiguous().T)
  )
  assert tensor_checksum(torch.zeros(3)) != tensor_checksum(torch.zeros(4))
  one, two = TensorDigest(), TensorDigest()
  for name, sums in (('a', one), ('b', one), ('b', two), ('a', two)):
    sums.add(name, x)
  assert one.digest() == two.digest()
  two.add('a', x.view(50, 2))
  assert one.digest() != two.digest()
