"""This package's own learner, engine and weight store, driven like a peer."""

import asyncio
from typing import Literal

from jaxrl.models.transformer_lm import MAX_UNROLLED_LAYERS
from tests.benchmarks import toy
from tests.benchmarks.peers.shape import Turns


def main(weights_dtype: Literal['', 'bfloat16'] = '') -> None:
  wait = asyncio.new_event_loop().run_until_complete
  # What model.remat='auto' chooses on a CPU.
  shallow = toy.CONFIG.num_layers <= MAX_UNROLLED_LAYERS
  remat = 'none' if shallow else 'products'
  options = {'share': True, 'remat': remat, 'weights_dtype': weights_dtype}
  run = toy.Toy(decode_steps=64, **options)
  wait(run.start())

  def decode(rows: list[list[int]], lengths: list[int]) -> int:
    return sum(len(done.tokens) for done in wait(run.generate(rows, lengths)))

  turns, step = Turns(decode), 0
  while turns.next():
    phases = wait(run.step(step))
    turns.generate_s, step = phases['generate'], step + 1
  run.device_thread.close()


if __name__ == '__main__':
  main()
