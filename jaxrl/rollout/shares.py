"""How many of a step's groups each environment tag plays."""

from collections.abc import Mapping

from jaxrl.signature import ConfigError


def share_groups(num_groups: int, shares: Mapping[str, float]) -> dict[str, int]:
  """Groups by tag, in proportion to `shares`, by largest remainder; ties to the first.

  Raises ConfigError for a share that is not positive, and where a tag gets no group.
  """
  for tag, share in shares.items():
    if not 0 < share < float('inf'):
      raise ConfigError(f'--config.env.{tag}.share={share}: must be positive')
  total = sum(shares.values())
  exact = {tag: num_groups * share / total for tag, share in shares.items()}
  found = {tag: int(value) for tag, value in exact.items()}
  left = sorted(found, key=lambda tag: found[tag] - round(exact[tag], 9))
  for tag in left[: num_groups - sum(found.values())]:
    found[tag] += 1
  without = [tag for tag in found if not found[tag]]
  if without:
    raise ConfigError(
      f'--config.batch.num_groups={num_groups}: each of the {len(found)} environment '
      f'tags needs a group of every step, and {", ".join(without)} gets none; raise '
      f'it, or --config.env.{without[0]}.share'
    )
  return found
