"""This package as in `ours`, the matrices of its engine in bfloat16."""

from tests.benchmarks.peers import ours

if __name__ == '__main__':
  ours.main('bfloat16')
