"""A digest of tensors that is taken where they lie."""

import pytest

torch = pytest.importorskip('torch')


def test_a_sum_tells_places_and_bits():
  from jaxrl.rollout.vllm.sums import Sums, checksum

  x = torch.arange(100, dtype=torch.float32)
  others = [x + 1, x.flip(0), x.to(torch.float64), x[:-1], -x]
  assert len({checksum(y) for y in [x, *others]}) == 6
  assert checksum(x) == checksum(x.clone()) == checksum(x.view(10, 10).T.contiguous().T)
  assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
  one, two = Sums(), Sums()
  for name, sums in (('a', one), ('b', one), ('b', two), ('a', two)):
    sums.add(name, x)
  assert one.digest() == two.digest()
  two.add('a', x.view(50, 2))
  assert one.digest() != two.digest()
