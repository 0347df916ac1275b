"""The worker process of `verifiers_env` plays a taskset's episodes, each in a fork.

It is started by path, with a Python that has verifiers, and imports nothing else but
the standard library. A socket passes it one JSON object, which says what to load, and
gets one back: the number of tasks, or an error. After that, each message on the socket
brings the descriptor of an episode's own connection. The episode's request and its
result are one line of JSON each. When the other end of a connection is closed, the
processes of the episode are killed, whatever they are doing.
"""

import asyncio
import contextlib
import copy
import importlib
import importlib.util
import json
import os
import pathlib
import resource
import select
import signal
import socket
import sys
from typing import Any

MAX_REQUEST_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 20
_MAX_GIVEN_CHARS = 2000
_CHECK_INTERVAL_MS = 100  # between looks at whether an episode's process has ended
# Harness programs do not inherit variables whose names contain API_KEY.
_KEY_VARIABLE = 'JAXRL_EPISODE_API_KEY'
Spec = dict[str, Any]  # the options of `VerifiersEnv` by name
_NAMESPACES = pathlib.Path(__file__).parents[1] / 'sandbox' / 'namespaces.py'


class TasksetError(ValueError):
  """Reports what is wrong with the options, in words for the user."""


def load(spec: Spec) -> tuple[Any, list[Any]]:
  """Builds the environment and its tasks.

  Args:
    spec: The options of `VerifiersEnv` by name.

  Returns:
    The environment of verifiers, and its tasks.

  Raises:
    TasksetError: If an option is wrong.
  """
  taskset, env_id = _module_name(spec, 'taskset'), _module_name(spec, 'env')
  config: Any = importlib.import_module('verifiers.v1.configs.agent')
  loaders: Any = importlib.import_module('verifiers.v1.utils.loaders')
  data = copy.deepcopy(spec['arguments'])
  data['taskset'] = {**data.get('taskset', {}), 'id': taskset}
  if env_id:
    data['id'] = env_id
  fields = loaders.env_config_type(taskset, env_id).model_fields.items()
  for role, field in fields:
    # By default, programs run in a cloud's sandboxes.
    if isinstance(field.default, config.AgentConfig) and (
      field.default.runtime.type == 'prime'
    ):
      role_data = data.setdefault(role, {})
      if isinstance(role_data, dict):
        role_data.setdefault('runtime', {'type': 'subprocess'})
  env = loaders.load_environment(loaders.resolve_env_config(data))
  _check_origin(spec, 'taskset', type(env.taskset))
  _check_roles(env, spec, config, loaders)
  tasks = env.taskset
  if spec['select']:
    select_config: Any = importlib.import_module('verifiers.v1.configs.select')
    tasks = tasks.select(select_config.SelectConfig.model_validate(spec['select']))
  if not tasks.bounded:
    raise TasksetError("select: the taskset has no end; set select={'limit': …}")
  return env, list(tasks)


def _module_name(spec: Spec, option: str) -> str:
  """Returns the module of a taskset or environment, which may be given by its path."""
  name = spec[option]
  path = pathlib.Path(name).resolve()
  if not name or not (name.endswith('.py') or os.sep in name):
    return name
  if not path.exists() and not name.endswith('.py') and name.count(os.sep) == 1:
    return name  # the owner and the name of an installed package
  if not path.exists():
    raise TasksetError(f'{option}={name!r}: there is no such file')
  module = path.stem.replace('-', '_')
  if (path / module / '__init__.py').exists():  # as vf-init lays out a project
    path = path / module
  elif path.is_dir() and not (path / '__init__.py').exists():
    raise TasksetError(f'{option}={name!r}: has no {module}/__init__.py')
  if path.stem != module or module != module.lower():
    raise TasksetError(
      f'{option}={name!r}: name it in small letters and underscores, as a module'
    )
  sys.path.insert(0, str(path.parent))
  # The servers of tools are started as modules.
  places = [str(path.parent), os.environ.get('PYTHONPATH', '')]
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, places))
  return module


def _check_origin(spec: Spec, option: str, cls: type) -> None:
  name = spec[option]
  if name.endswith('.py') or pathlib.Path(name).is_dir():
    file = getattr(sys.modules[cls.__module__], '__file__', '') or ''
    place = pathlib.Path(name).resolve()
    found = pathlib.Path(file).resolve()
    if place not in (found, *found.parents):
      raise TasksetError(
        f'{option}={name!r}: a module of the same name was found first, {file}'
      )


def _check_roles(env: Any, spec: Spec, config: Any, loaders: Any) -> None:
  harnesses = env.config.agent_harnesses()
  retries = [('retries', env.config.retries)]
  for role, agent in config.agent_config_fields(env.config).items():
    retries.append((f'{role}.retries', agent.retries))
    harness = harnesses[role]
    runs_code = loaders.harness_class(harness.id).EXECUTES_CODE
    if runs_code and agent.runtime.type == 'subprocess' and not spec['unsafe']:
      raise TasksetError(
        f'the harness {harness.id!r} of {role!r} runs what the model writes on this '
        f"machine: set arguments={{'{role}': {{'harness': {{'id': 'null'}}}}}}, "
        'another runtime, or unsafe=True'
      )
  for name, rule in retries:
    if rule.max_retries or rule.rules:
      raise TasksetError(
        f'arguments: leave {name} out; a failed episode is retried by '
        'rollout.max_retries'
      )


async def play(env: Any, task: object, base_url: str, api_key: str) -> dict[str, Any]:
  """Plays one episode.

  Args:
    env: The environment of verifiers.
    task: One of its tasks.
    base_url: The URL of the model's endpoint.
    api_key: The key of the episode.

  Returns:
    What an agent returns: reward, metrics and given.

  Raises:
    RuntimeError: If the episode failed.
  """
  clients: Any = importlib.import_module('verifiers.v1.clients')
  configs: Any = importlib.import_module('verifiers.v1.configs.client')
  os.environ[_KEY_VARIABLE] = api_key
  endpoint = configs.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
  context = clients.ModelContext(model='policy', client=endpoint)
  async with env.serving():
    (slot,) = env.slots(task, 1)
    episode = await env.run_slot(slot, context)
  error = episode.last_error
  for trace in episode.traces:
    error = error or (None if trace.ok else trace.last_error)
  if error is not None or not episode.ok:
    raise RuntimeError(_describe(error) if error else 'the episode failed')
  own = [t for t in episode.traces if t.agent.config.client.base_url == base_url]
  if len(own) != 1 or not own[0].agent.trainable:
    roles = ', '.join(t.agent.name for t in own) or 'none'
    raise RuntimeError(
      f'one trainable agent must play with the policy, but {roles} did: give the '
      'others a model and client of their own in arguments'
    )
  return summarize(own[0])


def _describe(error: Any) -> str:
  """Returns an error in one line; of a long one, such as a traceback, both ends."""
  text = f'{error.type}: {" ".join(error.message.split())}'
  return text if len(text) < 500 else f'{text[:100]} … {text[-400:]}'


def summarize(trace: Any) -> dict[str, Any]:
  """Summarizes a trace.

  Args:
    trace: The trace of verifiers, which has been scored.

  Returns:
    Its reward, its rewards and metrics by name, and its last reply.
  """
  rewards = {f'reward/{k}': v.value for k, v in trace.rewards.items() if v is not None}
  metrics = {k: float(v) for k, v in trace.metrics.items() if v is not None}
  return {
    'reward': float(trace.reward),
    'metrics': {**metrics, **rewards, 'turns': float(trace.num_turns)},
    'given': trace.last_reply[:_MAX_GIVEN_CHARS],
  }


def serve(control: socket.socket) -> None:
  """Loads the taskset and forks a process for each episode, until the socket ends."""
  spec = read_line(control)
  try:
    env, tasks = load(spec)
    if not tasks:
      raise TasksetError('the taskset has no tasks')
  except Exception as error:  # reported to the run, which tells the user
    name = '' if isinstance(error, TasksetError) else f'{type(error).__name__}: '
    write_line(control, {'error': f'{name}{error}'})
    return
  write_line(control, {'num_tasks': len(tasks)})
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody need wait for them
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not message:
      return
    with socket.socket(fileno=descriptors[0]) as connection:
      if not os.fork():
        control.close()
        _run_episode(connection, env, tasks, spec['memory_gib'])


def _run_episode(
  connection: socket.socket, env: Any, tasks: list[Any], memory_gib: float
) -> None:
  """Forks the episode's process, waits for its end, kills what it left, and exits."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  namespaces = _load_namespaces()
  if namespaces:  # what the episode's programs leave running becomes this one's child
    namespaces.call_libc('prctl', namespaces.SUBREAPER, 1, 0, 0, 0)
  child = os.fork()
  if not child:
    os._exit(_answer(connection, env, tasks, memory_gib))
  poll = select.poll()
  poll.register(connection, select.POLLHUP | getattr(select, 'POLLRDHUP', 0))
  status = None
  while status is None and not poll.poll(_CHECK_INTERVAL_MS):
    pid, code = os.waitpid(child, os.WNOHANG)
    status = code if pid else None
  if status is None:
    with contextlib.suppress(ProcessLookupError):
      os.kill(child, signal.SIGKILL)
  if namespaces:
    namespaces.kill_children()
  if status:
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
      write_line(connection, {'error': f"the episode's process ended with {code}"})
  os._exit(0)


def _load_namespaces() -> Any:
  if sys.platform != 'linux':
    return None
  spec = importlib.util.spec_from_file_location('_jaxrl_namespaces', _NAMESPACES)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _answer(
  connection: socket.socket, env: Any, tasks: list[Any], memory_gib: float
) -> int:
  """Plays the episode of the request and writes its result; returns an exit code."""
  try:
    if memory_gib:
      size = int(memory_gib * 2**30)
      resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    request = read_line(connection)
    task = tasks[request['task']]
    result = asyncio.run(play(env, task, request['base_url'], request['api_key']))
    answer = {'result': result}
    if len(json.dumps(answer)) > MAX_ANSWER_BYTES:
      raise RuntimeError(f'the result has more than {MAX_ANSWER_BYTES} bytes')
  except BaseException as error:  # SystemExit in a reward, too: it is one episode's
    name = '' if type(error) is RuntimeError else f'{type(error).__name__}: '
    answer = {'error': f'{name}{error}'[:2000]}
  with contextlib.suppress(OSError):
    write_line(connection, answer)
  return 0


def read_line(connection: socket.socket, limit: int = MAX_REQUEST_BYTES) -> Any:
  """Reads one line of JSON.

  Args:
    connection: The socket.
    limit: The most bytes that the line may have.

  Returns:
    The value.

  Raises:
    EOFError: If the connection ended before the line did.
    ValueError: If the line is too long or no JSON.
  """
  data = b''
  while not data.endswith(b'\n'):
    part = connection.recv(1 << 16)
    if not part:
      raise EOFError('the connection ended')
    data += part
    if len(data) > limit:
      raise ValueError(f'a line of more than {limit} bytes')
  return json.loads(data)


def write_line(connection: socket.socket, value: object) -> None:
  """Writes one line of JSON.

  Args:
    connection: The socket.
    value: The value.
  """
  connection.sendall(json.dumps(value).encode() + b'\n')


if __name__ == '__main__':
  sys.path.pop(0)  # the folder of this file, whose modules are none of verifiers' own
  serve(socket.socket(fileno=int(sys.argv[1])))
