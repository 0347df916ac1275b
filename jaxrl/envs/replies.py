"""What a reply says: the part of the model's text that an environment acts on."""


def answer(reply: str) -> str:
  """What the last `<answer>…</answer>` holds; without one, the last line with text."""
  end = reply.rfind('</answer>')
  start = reply.rfind('<answer>', 0, max(end, 0))
  if start >= 0:
    return reply[start + len('<answer>') : end].strip()
  return reply.rstrip().rpartition('\n')[2].strip()
