"""Why a step must compile although the programs were warmed up."""

import logging
from collections.abc import Collection

from jaxrl.training.programs import Shape

log = logging.getLogger(__name__)


def why(shape: Shape, warm: Collection[Shape]) -> str:
  """What about `shape` none of the shapes that are compiled has."""
  if not warm:
    return 'nothing was compiled before'
  reasons = []
  most = max(other.rows for other in warm)
  if shape.rows > most:
    reasons.append(f'a batch of {shape.rows} rows, more than the usual {most}')
  if shape.length not in {other.length for other in warm}:
    usual = ', '.join(str(n) for n in sorted({other.length for other in warm}))
    reasons.append(f'rows of {shape.length} tokens, where so far they had {usual}')
  packs = [other.pack for other in warm if other.pack is not None]
  if shape.pack is not None and packs:
    micro = max(pack.micro for pack in packs)
    if shape.pack.micro > micro:
      reasons.append(
        f'room for {shape.pack.micro} micro-batches an update, more than {micro}'
      )
    if shape.pack.rows not in {pack.rows for pack in packs}:
      reasons.append(f'micro-batches of {shape.pack.rows} packed rows')
  micro = {other.micro_rows for other in warm}
  if not reasons and shape.micro_rows not in micro:
    reasons.append(f'micro-batches of {shape.micro_rows} rows')
  return '; '.join(reasons) or 'another combination of rows, length and micro-batches'


def tell(shape: Shape, warm: Collection[Shape], *, warmed: bool) -> None:
  """Logs that a shape is compiled: after warm-up as a warning, with the reason."""
  size = f'{shape.rows} rows of {shape.length} tokens'
  if shape.pack is not None:
    size += f', packed in {shape.pack.rows} × {shape.pack.length} slots a micro-batch'
    if shape.pack.abreast > 1:
      size += f', {shape.pack.abreast} of them at once'
  else:
    size += f', {shape.micro_rows} a micro-batch'
  if not warmed:
    log.info('compiling the train step for %s', size)
    return
  log.warning(
    'compiling the train step for %s, after warm-up: %s', size, why(shape, warm)
  )
