"""Selects the trajectories that the report shows, and what it stores of them.

A snapshot holds a few groups of one step, and a few samples of each group: their tokens
as text with mask, log-prob, advantage and reward. It is plain JSON.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.logging.metric_sinks import Decode

if TYPE_CHECKING:
  from jaxrl.types import Group, Trajectory

MAX_GROUPS, MAX_SAMPLES, MAX_TOKENS, MAX_SNAPSHOTS = 2, 4, 640, 8
MAX_IMAGES, MAX_IMAGE_BYTES = 4, 64 << 10  # of a trajectory


def make_snapshot(
  phase: str,
  step: int,
  groups: 'Sequence[Group]',
  advantages: Any = None,
  decode: Decode | None = None,
  kind: str = 'train',
  *,
  logprobs: Any = None,
) -> dict[str, Any]:
  """Selects the groups whose scores differ most, and their best and worst samples.

  Args:
    phase: Name of the training phase.
    step: Step of the phase.
    groups: The groups of the step.
    advantages: Advantages `[rows, tokens]` in the order of the groups' rows, or None.
    decode: Turns token ids into text.
    kind: 'train' or 'eval'.
    logprobs: The learner's log-probs, rows as those of `advantages`, or None.

  Returns:
    The snapshot as JSON data.
  """
  if hasattr(advantages, '__array__'):  # on a device until now
    advantages = np.asarray(advantages)
  if hasattr(logprobs, '__array__'):
    logprobs = np.asarray(logprobs)
  starts = np.cumsum([0, *(len(group) for group in groups)])
  spread = [-float(np.std([t.score for t in group])) for group in groups]
  chosen = sorted(np.argsort(spread, kind='stable')[:MAX_GROUPS].tolist())
  per_token = advantages, logprobs
  group_records = []
  for index in chosen:
    group = groups[index]
    order = sorted(range(len(group)), key=lambda m: -group[m].score)
    half = MAX_SAMPLES // 2
    picked = order if len(order) <= MAX_SAMPLES else order[:half] + order[-half:]
    rows = [
      [None if array is None else array[starts[index] + m] for array in per_token]
      for m in picked
    ]
    group_records.append(
      {
        'task': group[0].group_name,
        'size': len(group),
        'scores': [round(t.score, 4) for t in group],
        'members': [
          trajectory_record(group[m], own_advantages, decode, logprobs=own_logprobs)
          for m, (own_advantages, own_logprobs) in zip(picked, rows, strict=True)
        ],
      }
    )
  return {'phase': phase, 'step': step, 'kind': kind, 'groups': group_records}


def trajectory_record(
  trajectory: 'Trajectory',
  advantages: Any = None,
  decode: Decode | None = None,
  *,
  logprobs: Any = None,
) -> dict[str, Any]:
  """Returns one trajectory as JSON data.

  Args:
    trajectory: The trajectory.
    advantages: Advantages `[tokens]`, or None.
    decode: Turns token ids into text.
    logprobs: The learner's log-probs `[tokens]`, or None.

  Returns:
    A dictionary whose `tokens` are those of `token_row`, without the last entry if
    there are no `logprobs`; and whose `images`, if it has any, are [name, data URL].
  """
  count = len(trajectory.tokens)
  ids = [int(token) for token in trajectory.tokens]
  texts = token_texts(ids, decode)
  positions = list(range(count))
  if count > MAX_TOKENS:  # the middle is left out
    positions = [*range(MAX_TOKENS // 2), *range(count - MAX_TOKENS // 2, count)]
  arrays = {**vars(trajectory), 'advantages': advantages, 'old_logprobs': logprobs}
  tokens = [token_row(arrays, t, texts[t]) for t in positions]
  if logprobs is None:
    tokens = [token[:-1] for token in tokens]
  versions = trajectory.weights_version[trajectory.weights_version >= 0]
  pictures = _pictures(trajectory)
  return {
    'id': trajectory.trajectory_id,
    'tag': trajectory.tag,
    'member': trajectory.sample_index,
    'score': round_finite(trajectory.score),
    'stop': trajectory.stop_reason,
    'length': count,
    'actions': int(np.sum(trajectory.action_mask)),
    'versions': sorted({int(v) for v in versions}),
    'gap': MAX_TOKENS // 2 if count > MAX_TOKENS else None,
    'tokens': tokens,
    **({'images': pictures} if pictures else {}),
  }


def token_row(arrays: Mapping[str, Any], at: int, text: str) -> list[Any]:
  """Returns a token as static/tokens.js takes it.

  Args:
    arrays: Arrays `[tokens]` by their names in a trajectory. `advantages` and the
      learner's `old_logprobs` may be absent, or None.
    at: Place of the token in them.
    text: Its text.

  Returns:
    [text, id, mask, log-prob, advantage, reward, weights version, by how much the
    learner's log-prob is larger]. None stands for what is not known.
  """
  token, acts = int(arrays['tokens'][at]), bool(arrays['action_mask'][at])
  reward = round_finite(arrays['rewards'][at]) or 0
  if not acts:
    return [text, token, 0, None, None, reward, None, None]
  logprob = float(arrays['rollout_logprobs'][at])
  advantages, learner = arrays.get('advantages'), arrays.get('old_logprobs')
  advantage = None if advantages is None else round_finite(advantages[at])
  mismatch = None if learner is None else round_finite(float(learner[at]) - logprob)
  version = int(arrays['weights_version'][at])
  return [text, token, 1, round_finite(logprob), advantage, reward, version, mismatch]


def _pictures(trajectory: 'Trajectory') -> list[tuple[str, str]]:
  """Returns the names and data URLs of the first small images of a trajectory."""
  return [
    (f'image {number}: {image.width} × {image.height}', image.data_url())
    for number, image in enumerate(trajectory.images[:MAX_IMAGES], 1)
    if len(image.png) <= MAX_IMAGE_BYTES
  ]


def token_texts(ids: list[int], decode: Decode | None) -> list[str]:
  """Returns each token's text; a character of several tokens is at the last one.

  Args:
    ids: Token ids.
    decode: Turns token ids into text; without it, ids are shown.
  """
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


def round_finite(value: Any) -> float | None:
  """Rounds to four significant digits, and returns None for what is not finite."""
  value = float(value)
  return float(f'{value:.4g}') if np.isfinite(value) else None


def is_snapshot_due(step: int, total: int | None) -> bool:
  """Returns whether to take a snapshot, about MAX_SNAPSHOTS times in a phase."""
  every = max(1, (total or 400) // MAX_SNAPSHOTS)
  return step % every == 0 or step + 1 == total


def limit_snapshots(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Keeps at most MAX_SNAPSHOTS of a phase and kind, spread evenly over the steps."""
  result: list[dict[str, Any]] = []
  for phase_and_kind in dict.fromkeys((s['phase'], s.get('kind')) for s in snapshots):
    series = [s for s in snapshots if (s['phase'], s.get('kind')) == phase_and_kind]
    while len(series) > MAX_SNAPSHOTS:
      gaps = [
        series[i + 1]['step'] - series[i - 1]['step'] for i in range(1, len(series) - 1)
      ]
      del series[1 + int(np.argmin(gaps))]
    result += series
  return result
