"""What is aimed at on one H200, and whether a run of `make bench-gpu` got there."""

from typing import Any

MFU = 0.6  # of a train step at 1.7B, with the best of the remat policies
# Logits held whole: rounded to the dtype of the states, and as precise as ours.
NAIVE = ('naive XLA', 'naive XLA, f32 logits')
DECODE = {1: 0.5, 32: 0.65, 256: 0.65}  # of the memory's rate at 1.7B, by slots


def verdicts(results: dict[str, Any]) -> list[str]:
  """A line an aim. results: by part, what was measured; parts may lack."""
  shares = {
    name: cases(results, name, 'Qwen3-1.7B', 'kernels auto')
    for name in ('train', 'decode')
  }
  lines = []
  if shares['train']:
    label, best = max(shares['train'].items(), key=lambda one: one[1]['mfu'])
    lines.append(_least(f'train, {label}: share of the products', best['mfu'], MFU))
  for label, case in shares['decode'].items():
    what = f'decode, {label}: share of the memory'
    slots = int(label.split(', ')[1].split()[0])
    lines.append(_least(what, case['share'], DECODE[slots]))
  for shape, table in results.get('logprobs', {}).get('shapes', {}).items():
    for name in NAIVE:
      if {'kernels', name} <= table.keys():
        lines += [_beside(shape, pass_, table, name) for pass_ in ('forward', 'both')]
  return lines


def cases(results: dict[str, Any], part: str, *words: str) -> dict[str, Any]:
  """Of a part, those whose label has all the words, and that could be measured."""
  return {
    label: case
    for label, case in results.get(part, {}).get('cases', {}).items()
    if 'failed' not in case and all(word in label for word in words)
  }


def _least(what: str, value: float, aim: float) -> str:
  verdict = 'reached' if value >= aim else 'missed'
  return f'{what}: {value:.0%}, aim {aim:.0%}: {verdict}'


def _beside(shape: str, pass_: str, table: dict[str, Any], name: str) -> str:
  """Our time beside that of the logits held whole."""
  run = {'forward': 'forward', 'both': 'with gradient'}[pass_]
  what = f'log-probs, {shape}, {run}: of the time of {name}'
  ours, naive = (table[key].get(pass_, table[key]) for key in ('kernels', name))
  if 'failed' in ours:
    return f'{what}: not measured'
  if 'failed' in naive:
    return f'{what}: it does not fit'
  ratio = ours['ms'] / naive['ms']
  return f'{what}: {ratio:.2f}, aim 1: {"reached" if ratio <= 1 else "missed"}'
