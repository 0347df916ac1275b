"""Runs pytest on the files named: the main program of every py_test target."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
