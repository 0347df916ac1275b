"""Contains the commands and their settings, runtime, logging and planning."""

import importlib.util
import sys

# A command typed with a Python that lacks the packages ends with one line, instead of
# the traceback of an import.
if importlib.util.find_spec('jax') is None:
  sys.exit(
    f'error: the packages of jaxrl are not installed for {sys.executable}. In a '
    'checkout, run `make env` once and `source .venv/bin/activate` in each shell; '
    'elsewhere, `pip install -e PATH_OF_THE_CHECKOUT`'
  )
