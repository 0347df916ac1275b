"""Which trajectories the report shows, and what it keeps of them.

A snapshot is what was played at one step: a few groups, a few members each, their
tokens as text with mask, log-prob, advantage and reward. It is plain JSON.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.writers import Decode

if TYPE_CHECKING:
  from jaxrl.types import Group, Trajectory

GROUPS, MEMBERS, TOKENS, SNAPSHOTS = 2, 4, 640, 8


def snapshot(
  phase: str,
  step: int,
  groups: 'Sequence[Group]',
  advantages: Any = None,
  decode: Decode | None = None,
  kind: str = 'train',
) -> dict[str, Any]:
  """Picks the groups whose scores differ most, and of each its best and worst.

  advantages: rows in the order of `groups` laid end to end, or None.
  """
  if hasattr(advantages, '__array__'):  # on a device until now
    advantages = np.asarray(advantages)
  starts = np.cumsum([0, *(len(group) for group in groups)])
  spread = [-float(np.std([t.score for t in group])) for group in groups]
  chosen = sorted(np.argsort(spread, kind='stable')[:GROUPS].tolist())
  shown = []
  for index in chosen:
    group = groups[index]
    order = sorted(range(len(group)), key=lambda m: -group[m].score)
    half = MEMBERS // 2
    picked = order if len(order) <= MEMBERS else order[:half] + order[-half:]
    rows = [
      None if advantages is None else advantages[starts[index] + m] for m in picked
    ]
    shown.append(
      {
        'task': group[0].group_name,
        'size': len(group),
        'scores': [round(t.score, 4) for t in group],
        'members': [
          member(group[m], row, decode) for m, row in zip(picked, rows, strict=True)
        ],
      }
    )
  return {'phase': phase, 'step': step, 'kind': kind, 'groups': shown}


def member(
  trajectory: 'Trajectory', advantages: Any = None, decode: Decode | None = None
) -> dict[str, Any]:
  """One trajectory as JSON. tokens: [text, id, mask, log-prob, advantage, reward]."""
  count = len(trajectory.tokens)
  ids = [int(token) for token in trajectory.tokens]
  texts = pieces(ids, decode)
  kept = list(range(count))
  if count > TOKENS:  # the middle is left out
    kept = [*range(TOKENS // 2), *range(count - TOKENS // 2, count)]
  tokens = []
  for t in kept:
    acts = bool(trajectory.action_mask[t])
    advantage = number(advantages[t]) if advantages is not None and acts else None
    logprob = number(trajectory.rollout_logprobs[t]) if acts else None
    reward = number(trajectory.rewards[t]) or 0
    tokens.append([texts[t], ids[t], int(acts), logprob, advantage, reward])
  versions = trajectory.weights_version[trajectory.weights_version >= 0]
  return {
    'id': trajectory.trajectory_id,
    'tag': trajectory.tag,
    'member': trajectory.member,
    'score': number(trajectory.score),
    'stop': trajectory.stop_reason,
    'length': count,
    'actions': int(np.sum(trajectory.action_mask)),
    'versions': sorted({int(v) for v in versions}),
    'gap': TOKENS // 2 if count > TOKENS else None,
    'tokens': tokens,
  }


def pieces(ids: list[int], decode: Decode | None) -> list[str]:
  """The text of each token; a character spread over tokens shows at its last one."""
  if decode is None:
    return [f'‹{token}›' for token in ids]
  texts, pending = [], []
  for token in ids:
    pending.append(token)
    text = decode(pending)
    if text.endswith('\ufffd') and len(pending) < 4:
      texts.append('')
      continue
    if '\ufffd' in text[:-1]:  # the tokens before belong to no character
      texts[len(texts) - len(pending) + 1 :] = ['\ufffd'] * (len(pending) - 1)
      text = decode([token])
    texts.append(text)
    pending = []
  if pending:
    texts[-1] = decode(pending)
  return texts


def number(value: Any) -> float | None:
  """Four significant digits; None for what is not finite."""
  value = float(value)
  return float(f'{value:.4g}') if np.isfinite(value) else None


def due(step: int, total: int | None) -> bool:
  """Whether a snapshot is worth taking at `step`: about SNAPSHOTS in a phase."""
  every = max(1, (total or 400) // SNAPSHOTS)
  return step % every == 0 or step + 1 == total


def bounded(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """At most SNAPSHOTS of a phase and kind: first and last stay, crowded ones go."""
  kept: list[dict[str, Any]] = []
  for mark in dict.fromkeys((s['phase'], s.get('kind')) for s in snapshots):
    mine = [s for s in snapshots if (s['phase'], s.get('kind')) == mark]
    while len(mine) > SNAPSHOTS:
      gaps = [
        mine[i + 1]['step'] - mine[i - 1]['step'] for i in range(1, len(mine) - 1)
      ]
      del mine[1 + int(np.argmin(gaps))]
    kept += mine
  return kept
