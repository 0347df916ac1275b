import jax
import pytest
from jax.sharding import AxisType

from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh, single_device_mesh


def test_minus_one_is_what_is_left():
  rest = {'tensor': 1, 'context': 1, 'expert': 1}
  assert dict(make_mesh().shape) == {'data': 8, 'fsdp': 1} | rest
  mesh = make_mesh(MeshOptions(data=2, fsdp=-1, context=2))
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2} | rest | {'context': 2}
  assert mesh.axis_types == (AxisType.Auto,) * 5


def test_single_device_mesh_is_the_first_device():
  assert list(single_device_mesh().devices.flat) == jax.devices()[:1]


@pytest.mark.parametrize(
  'sizes, message',
  [
    ({'data': -1, 'fsdp': 3}, '3, does not divide .* 8; one of 1, 2, 4, 8 does'),
    ({'data': 2, 'fsdp': 2}, 'product of the sizes, 4, is not the number of .* 8'),
    ({'tensor': -1, 'fsdp': -1}, 'only one axis can be -1'),
    ({'tensor': 0}, 'tensor=0: must be at least 1'),
    ({'data': 4, 'tensor': 4}, 'product of the sizes, 16, is not'),
  ],
)
def test_a_mesh_that_does_not_divide_says_the_numbers(sizes, message):
  with pytest.raises(ValueError, match=message):
    make_mesh(MeshOptions(**sizes))
