"""VerifiersEnv plays tasksets and environments of verifiers through the endpoint.

See https://github.com/PrimeIntellect-ai/verifiers. Its pins are others than ours, so it
runs in the Python that `python` names, in processes of its own.
"""

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any, ClassVar

from jaxrl.data.seeds import fold_seed
from jaxrl.envs.adapters import verifiers_worker
from jaxrl.envs.agents.agent_env import AgentResult, validate_result
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.options import OptionValues, require_package

_INSTALL = (
  'python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0 '
  "uv, and set python='.venv-verifiers/bin/python'"
)
# Tasksets may fetch a data set when they are loaded.
_LOAD_TIMEOUT_S = 600.0
_CHECK_TIMEOUT_S = 60.0
_workers: weakref.WeakValueDictionary[str, 'TasksetWorker'] = (
  weakref.WeakValueDictionary()
)
_workers_lock = threading.Lock()


class VerifiersEnv:
  """Plays tasks of a taskset, each with the taskset's own harness, tools and rewards.

  The seed of an episode says which of the tasks it plays. The harness calls the run's
  endpoint, as agents do. The reward is that of the episode's trace, as in an evaluation
  of verifiers, plus what was sent to /feedback.

  Args:
    taskset: A taskset, by its module or package, or by the path of its file or folder.
    env: An environment that plays the taskset, given likewise; '' means the taskset's
      own, which usually is the one with a single agent.
    arguments: Further fields of the environment's config, such as {'taskset': {'split':
      'train'}, 'agent': {'harness': {'id': 'null'}}}.
    select: Which tasks are played, as in verifiers: include, exclude, shuffle, seed,
      skip, limit.
    python: The Python in which verifiers is installed; '' means that of the run.
    unsafe: Also allow harnesses that run what the model writes on this machine.
    memory_gib: The data that each process of an episode may have; 0 means unlimited.

  Raises:
    ValueError: If an option is wrong.
  """

  played_by_agent = True
  uses_dataset = False  # its tasks are the taskset's
  columns: ClassVar = {'given': 'string', 'task_index': 'int'}

  def __init__(
    self,
    *,
    taskset: str = '',
    env: str = '',
    arguments: OptionValues | None = None,
    select: OptionValues | None = None,
    python: str = '',
    unsafe: bool = False,
    memory_gib: float = 0.0,
  ):
    if not taskset:
      raise ValueError("option 'taskset' must name a taskset, by module or path")
    if memory_gib < 0:
      raise ValueError('memory_gib must not be negative')
    spec = {
      'taskset': taskset,
      'env': env,
      'arguments': dict(arguments or {}),
      'select': dict(select or {}),
      'unsafe': unsafe,
      'memory_gib': memory_gib,
    }
    try:
      self._spec = json.dumps(spec)
    except (TypeError, ValueError) as error:
      raise ValueError(f'arguments and select must be JSON: {error}') from error
    if len(self._spec) >= verifiers_worker.MAX_REQUEST_BYTES:
      raise ValueError(
        f'arguments and select have at most {verifiers_worker.MAX_REQUEST_BYTES} bytes '
        'as JSON'
      )
    self._python = python or sys.executable
    self._worker: TasksetWorker | None = None
    self._task = 0
    self._connection: socket.socket | None = None
    self._killed = False

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options.

    Raises:
      ValueError: If they are wrong, or verifiers is not installed.
    """
    require_package('aiohttp', 'the endpoint of agents', 'serve')
    cls(**options)
    _check_python(options.get('python', ''))

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Chooses the task of `seed`; loads the taskset if no environment has done so."""
    self._worker = _find_worker(self._python, self._spec)
    self._task = fold_seed(seed, 0) % self._worker.num_tasks
    return '', {}

  def run(self, base_url: str, api_key: str) -> AgentResult:
    """Plays the episode and blocks until it has its rewards.

    Args:
      base_url: The URL of the endpoint.
      api_key: The key of the session.

    Returns:
      The reward, metrics and last reply.

    Raises:
      EpisodeError: If the episode failed or was killed.
    """
    assert self._worker is not None, 'call reset before run'
    request = {'task': self._task, 'base_url': base_url, 'api_key': api_key}
    with self._worker.connect() as connection:
      self._connection = connection
      if self._killed:
        raise EpisodeError('the episode was cancelled before it began')
      try:
        verifiers_worker.write_line(connection, request)
        limit = verifiers_worker.MAX_ANSWER_BYTES
        answer = verifiers_worker.read_line(connection, limit)
      except (EOFError, OSError) as error:
        raise EpisodeError('the process of the episode is gone') from error
      finally:
        self._connection = None
    if 'error' in answer:
      raise EpisodeError(answer['error'])
    return validate_result(answer['result'])

  def judge(self, agent_result: AgentResult, reply: str, feedback: float) -> Info:
    """Computes the episode's reward and info.

    Args:
      agent_result: What `run` returned.
      reply: The last reply of the model.
      feedback: The sum of what was sent to /feedback.

    Returns:
      The reward, metrics and columns.
    """
    reward = float(agent_result.get('reward') or 0.0)
    metrics = {'reward/agent': reward, 'reward/feedback': feedback}
    given = str(agent_result.get('given') or reply)
    return {
      'reward': reward + feedback,
      'metrics': metrics | dict(agent_result.get('metrics') or {}),
      'columns': {'given': given, 'task_index': self._task},
    }

  def kill(self) -> None:
    """Ends the episode's processes; may be called from any thread."""
    self._killed = True
    connection = self._connection
    if connection is not None:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # a call under way sees its end


class EpisodeError(RuntimeError):
  """Reports that an episode of verifiers failed."""


class TasksetWorker:
  """The process that has loaded a taskset and forks one for each episode.

  Args:
    python: The Python that has verifiers.
    spec: The options of `VerifiersEnv` as JSON.

  Raises:
    ValueError: If the taskset cannot be loaded.
  """

  def __init__(self, python: str, spec: str):
    self._control, child_socket = socket.socketpair()
    with child_socket:
      self._process = subprocess.Popen(
        [python, verifiers_worker.__file__, str(child_socket.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[child_socket.fileno()],
        start_new_session=True,  # this process decides what Ctrl-C ends
      )
    # It ends when its socket does, so also when this process ends.
    self._finalizer = weakref.finalize(self, _end, self._control, self._process)
    self._lock = threading.Lock()
    self._control.settimeout(_LOAD_TIMEOUT_S)
    try:
      self._control.sendall(spec.encode() + b'\n')
      answer = verifiers_worker.read_line(self._control)
    except (EOFError, OSError, ValueError) as error:
      self._finalizer()
      what = f'took more than {_LOAD_TIMEOUT_S:.0f} seconds to load it'
      if not isinstance(error, TimeoutError):
        what = 'ended while it loaded it; its standard error says why'
      raise ValueError(f"option 'taskset': {python} {what}") from error
    if 'error' in answer:
      self._finalizer()
      raise ValueError(f'the taskset cannot be loaded: {answer["error"]}')
    self.num_tasks: int = answer['num_tasks']

  @property
  def alive(self) -> bool:
    """Returns whether the process runs."""
    return self._process.poll() is None

  def connect(self) -> socket.socket:
    """Returns the connection to a new process, which plays one episode.

    Raises:
      EpisodeError: If the worker process is gone.
    """
    connection, child_socket = socket.socketpair()
    with child_socket, self._lock:
      try:
        socket.send_fds(self._control, [b'.'], [child_socket.fileno()])
      except OSError as error:
        connection.close()
        raise EpisodeError('the process of the taskset is gone') from error
    return connection


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
  """Ends a worker and waits for it; it ends at once, as it only waits itself."""
  control.close()
  process.kill()
  process.wait()


def _find_worker(python: str, spec: str) -> TasksetWorker:
  """Returns the worker of a taskset, which environments of a process share."""
  key = json.dumps([python, spec])
  with _workers_lock:
    worker = _workers.get(key)
    if worker is None or not worker.alive:
      worker = _workers[key] = TasksetWorker(python, spec)
    return worker


def _check_python(python: str) -> None:
  """Checks that verifiers can be found. Raises ValueError."""
  where = f'python={python!r}'
  if not python:
    if sys.modules.get('verifiers') is None and not _has_verifiers(sys.executable):
      raise ValueError(f"the environment 'verifiers' needs verifiers: {_INSTALL}")
    return
  if shutil.which(python) is None:
    what = 'is not a program' if pathlib.Path(python).exists() else 'does not exist'
    raise ValueError(f"{where}: {what}; 'verifiers' needs: {_INSTALL}")
  if not _has_verifiers(python):
    raise ValueError(f'{where}: has no verifiers: {_INSTALL}')


def _has_verifiers(python: str) -> bool:
  code = (
    'import importlib.util, sys; '
    "sys.exit(importlib.util.find_spec('verifiers') is None)"
  )
  try:
    done = subprocess.run(
      [python, '-c', code],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=_CHECK_TIMEOUT_S,
      check=False,
    )
  except (OSError, subprocess.TimeoutExpired):
    return False
  return done.returncode == 0
