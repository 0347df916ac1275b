"""A placement group reserves a run's devices and puts actors where they belong."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxrl.options import ConfigError, Keywords
from launch.runtime.placement import (
  ActorResources,
  ClusterNode,
  Placement,
  visible_devices_env,
)
from launch.settings.cluster_settings import PLACEMENT as KEY

PATIENCE_S = 60.0  # to wait until the devices are free


class InsufficientResources(ConfigError):
  """The cluster does not have the devices that a run asks for, or not now."""


def list_nodes(ray: Any, avoid: Collection[str] = ()) -> list[ClusterNode]:
  """Returns the machines that are up, except for those with given node ids."""
  nodes = [node for node in ray.nodes() if node['NodeID'] not in avoid]
  resources = [node['Resources'] for node in nodes if node['Alive']]
  return [ClusterNode(int(r.get('GPU', 0)), int(r.get('TPU', 0))) for r in resources]


class PlacementGroup:
  """Reserves the devices of a run together.

  Args:
    placement: Which devices each part has.
    env: Environment variables that every actor is started with.
    avoid: Ids of nodes that do not answer, though Ray takes them for alive.

  Raises:
    InsufficientResources: They are not free in time.

  Attributes:
    placement: Which devices each part has.
  """

  def __init__(
    self,
    placement: Placement,
    env: Mapping[str, str] | None = None,
    *,
    avoid: Collection[str] = (),
  ):
    from ray import get_runtime_context
    from ray.util import placement_group

    self._own_node = get_runtime_context().get_node_id()
    self.placement = placement
    self._env = dict(env or {})
    self._group: Any = None
    self._device_names: dict[int | None, list[str]] = {}  # of bundles that are shared
    if placement.bundles:
      # On as many machines as there are, so that a lost one takes little with it.
      bundles = [dict(bundle) for bundle in placement.bundles]
      selector = {'ray.io/node-id': f'!in({",".join(avoid)})'} if avoid else {}
      self._group = placement_group(
        bundles, strategy='SPREAD', bundle_label_selector=[selector] * len(bundles)
      )
      if not self._group.wait(PATIENCE_S):
        self.close()
        raise InsufficientResources(
          f'{KEY}: the cluster had no room for {bundles} within {PATIENCE_S:g} s; '
          'other runs may be using its devices'
        )
      try:
        self._device_names = self._find_device_names()
      except Exception:
        self.close()
        raise

  def _find_device_names(self) -> dict[int | None, list[str]]:
    """Returns the names of the devices of each bundle that actors share."""
    import ray
    from ray.exceptions import GetTimeoutError

    actors = (*self.placement.learners, *self.placement.engines)
    shared = {resources.bundle for resources in actors if resources.devices}
    bundles = {i: b for i, b in enumerate(self.placement.bundles) if i in shared}
    probe = ray.remote(_gpu_names)
    names = []
    for bundle, claims in bundles.items():
      options = self.actor_options(ActorResources(bundle=bundle, claims=claims))
      names.append(probe.options(**options).remote())
    try:
      return dict(zip(bundles, ray.get(names, timeout=PATIENCE_S), strict=True))
    except GetTimeoutError as error:
      raise InsufficientResources(
        f'{KEY}: no process reported its devices within {PATIENCE_S:g} s'
      ) from error

  def actor_options(
    self, resources: ActorResources | None, node_id: str | None = None
  ) -> Keywords:
    """Returns the options of a Ray actor.

    Args:
      resources: Of the actor; None for what has no devices and cannot be replaced. It
        stays on the machine of the run's own process, without which there is no run.
      node_id: Where it is to run if it needs no devices; None leaves that to Ray.
    """
    from ray.util.scheduling_strategies import (
      NodeAffinitySchedulingStrategy,
      PlacementGroupSchedulingStrategy,
    )

    stays_here = resources is None
    resources = resources or self.placement.others
    claims = dict(resources.claims)
    options: Keywords = {'num_cpus': 0, 'num_gpus': claims.pop('GPU', 0)}
    if claims:
      options['resources'] = claims
    device_names = self._device_names.get(resources.bundle, ())
    visible = visible_devices_env(resources, device_names)
    env = {**self._env, **resources.env, **visible}
    if env:
      options['runtime_env'] = {'env_vars': env}
    if stays_here:
      options['scheduling_strategy'] = NodeAffinitySchedulingStrategy(
        self._own_node, soft=False
      )
    elif resources.bundle is None and node_id is not None:
      # With soft=True, Ray would start actors that claim nothing on any machine.
      options['scheduling_strategy'] = NodeAffinitySchedulingStrategy(
        node_id, soft=False
      )
    elif resources.bundle is None:
      options['scheduling_strategy'] = 'SPREAD'
    else:
      options['scheduling_strategy'] = PlacementGroupSchedulingStrategy(
        self._group, placement_group_bundle_index=resources.bundle
      )
    return options

  def close(self) -> None:
    """Releases the devices."""
    from ray.util import remove_placement_group

    if self._group is not None:
      remove_placement_group(self._group)
      self._group = None


def _gpu_names() -> list[str]:
  """Returns the GPUs of the bundle it runs in, as `CUDA_VISIBLE_DEVICES` has them."""
  from ray import get_runtime_context

  ids = get_runtime_context().get_accelerator_ids()['GPU']
  return sorted(map(str, ids), key=lambda name: (len(name), name))
