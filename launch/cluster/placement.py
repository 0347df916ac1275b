"""Seats in a Ray cluster: what machines there are, and actors put where they belong."""

from collections.abc import Mapping
from typing import Any

from jaxrl.signature import ConfigError
from launch.placement import KEY, Node, Placement, Seat, visible


class NoRoom(ConfigError):
  """The cluster has not, or not now, the devices that a run asks for."""


def nodes(ray: Any) -> list[Node]:
  """The machines that are up."""
  found = [node['Resources'] for node in ray.nodes() if node['Alive']]
  return [Node(int(r.get('GPU', 0)), int(r.get('TPU', 0))) for r in found]


class Seats:
  """The devices of a run, reserved together. env: what every actor is started with.

  patience: seconds to wait until they are free. Raises NoRoom when they are not.
  """

  def __init__(
    self,
    placement: Placement,
    env: Mapping[str, str] | None = None,
    *,
    patience: float = 60.0,
  ):
    from ray import get_runtime_context
    from ray.util import placement_group

    self._home = get_runtime_context().get_node_id()
    self.placement, self._env = placement, dict(env or {})
    self._group: Any = None
    self._devices: dict[int | None, list[str]] = {}  # of each bundle, where seats ask
    if placement.bundles:
      # Apart as far as machines go: one that is lost takes as little as can be.
      bundles = [dict(bundle) for bundle in placement.bundles]
      self._group = placement_group(bundles, strategy='SPREAD')
      if not self._group.wait(patience):
        self.close()
        raise NoRoom(
          f'{KEY}: the cluster has no room for {bundles} within {patience:g} s: other '
          'runs may hold its devices'
        )
      try:
        self._devices = self._found(patience)
      except Exception:
        self.close()
        raise

  def _found(self, patience: float) -> dict[int | None, list[str]]:
    """What the devices are called of the bundles where a seat asks for some."""
    import ray
    from ray.exceptions import GetTimeoutError

    seats = (*self.placement.learners, *self.placement.engines)
    shared = {seat.bundle for seat in seats if seat.devices}
    asked = {i: b for i, b in enumerate(self.placement.bundles) if i in shared}
    probe = ray.remote(_gpus)
    told = [
      probe.options(**self.options(Seat(bundle=bundle, claims=claims))).remote()
      for bundle, claims in asked.items()
    ]
    try:
      return dict(zip(asked, ray.get(told, timeout=patience), strict=True))
    except GetTimeoutError as error:
      raise NoRoom(
        f'{KEY}: no process said within {patience:g} s which devices it was given'
      ) from error

  def options(self, seat: Seat | None) -> dict[str, Any]:
    """Of a Ray actor that is to live there.

    None is for what has no devices and cannot be replaced: it stays with the run's own
    process, without which there is no run either.
    """
    from ray.util.scheduling_strategies import (
      NodeAffinitySchedulingStrategy,
      PlacementGroupSchedulingStrategy,
    )

    home, seat = seat is None, seat or self.placement.others
    claims = dict(seat.claims)
    options: dict[str, Any] = {'num_cpus': 0, 'num_gpus': claims.pop('GPU', 0)}
    if claims:
      options['resources'] = claims
    env = {**self._env, **seat.env, **visible(seat, self._devices.get(seat.bundle, ()))}
    if env:
      options['runtime_env'] = {'env_vars': env}
    if home:
      options['scheduling_strategy'] = NodeAffinitySchedulingStrategy(
        self._home, soft=False
      )
    elif seat.bundle is None:
      options['scheduling_strategy'] = 'SPREAD'
    else:
      options['scheduling_strategy'] = PlacementGroupSchedulingStrategy(
        self._group, placement_group_bundle_index=seat.bundle
      )
    return options

  def close(self) -> None:
    """Gives the devices back."""
    from ray.util import remove_placement_group

    if self._group is not None:
      remove_placement_group(self._group)
      self._group = None


def _gpus() -> list[str]:
  """Run with all GPUs of a bundle: their names as `CUDA_VISIBLE_DEVICES` has them."""
  from ray import get_runtime_context

  found = get_runtime_context().get_accelerator_ids()['GPU']
  return sorted(map(str, found), key=lambda name: (len(name), name))
