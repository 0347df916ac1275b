"""The rates of the machine, in a process of their own: no peer holds their arrays."""

from tests.benchmarks import machine
from tests.benchmarks.peers.shape import Turns


def main() -> None:
  turns = Turns(peak=lambda: (machine.matmul_peak(), machine.memory_rate()))
  while turns.next():
    raise RuntimeError('no peer: it has no steps')


if __name__ == '__main__':
  main()
