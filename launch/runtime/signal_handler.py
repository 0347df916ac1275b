"""Ctrl-C and SIGTERM: the first asks the run to stop, the second ends it at once.

`run_command` runs a command's `main` and ends the process with its exit status,
whatever still runs in it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

# Called before a second signal ends the process, which runs no other clean-up.
BEFORE_ABORT: list[Callable[[], None]] = []
NAMES = {signal.SIGINT: 'Ctrl-C', signal.SIGTERM: 'SIGTERM'}


class SignalHandler:
  """While entered, signals set a flag; calling the object reads it.

  Args:
    tell: Takes one line for the user.
    last: Called before a second signal ends the process, to restore the terminal.
    how: How the run stops, in words for the user.
  """

  def __init__(
    self,
    tell: Callable[[str], None],
    last: Callable[[], None],
    *,
    how: str = 'after this step, with a checkpoint',
  ):
    self._tell, self._last, self._how = tell, last, how
    self.signal: int | None = None
    self._old: dict[int, object] = {}

  def __call__(self) -> bool:
    """Returns whether a signal asked the run to stop."""
    return self.signal is not None

  @property
  def status(self) -> int:
    """The exit status by the shell's custom: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + self.signal if self.signal else 0

  def __enter__(self) -> 'SignalHandler':
    for number in NAMES:
      self._old[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exc: object) -> None:
    for number, handler in self._old.items():
      signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

  def _handle(self, number: int, frame: object) -> None:
    if self.signal is not None:
      for call in (self._last, *BEFORE_ABORT):
        with contextlib.suppress(Exception):
          call()
      os._exit(128 + number)
    self.signal = number
    name = NAMES[signal.Signals(number)]
    text = f'{name}: stopping {self._how}. Once more ends it at once.'
    try:
      self._tell(text)
    except RuntimeError:  # the signal has interrupted another line that is written
      threading.Thread(target=self._tell, args=(text,), daemon=True).start()


EXIT_TIMEOUT_S = 30.0  # for threads and processes that hold up the end of a command


def exit_process(status: int) -> NoReturn:
  """Ends the process, even if environments have left threads or processes running.

  Args:
    status: The exit status.
  """

  def give_up() -> None:
    with contextlib.suppress(Exception):
      sys.stdout.flush()
      message = 'warning: ended, though threads or processes of environments still run'
      print(message, file=sys.stderr, flush=True)
    os._exit(status)

  timer = threading.Timer(EXIT_TIMEOUT_S, give_up)
  timer.daemon = True
  timer.start()
  sys.exit(status)


def run_command(main: Callable[[Sequence[str]], int]) -> NoReturn:
  """Runs a command with the process's arguments, and ends the process.

  If nobody reads what it prints any more, as after `| head`, it ends quietly with 141,
  the shell's status for SIGPIPE. That signal itself stays ignored, because it would end
  a run whenever the other side closes a socket.

  Args:
    main: Takes the arguments and returns the exit status.
  """
  try:
    try:
      status = main(sys.argv[1:])
    finally:
      with contextlib.suppress(AttributeError, ValueError):  # None, or already closed
        sys.stdout.flush()
  except BrokenPipeError:
    if not _stdout_is_closed():
      raise
    # Otherwise Python tries to write the rest at exit, and complains once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 128 + signal.SIGPIPE
  exit_process(status)


def _stdout_is_closed() -> bool:
  """Returns whether standard output is a pipe that nobody reads any more."""
  try:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
  except (AttributeError, OSError, ValueError):  # replaced, or on another system
    return False
  return any(event & select.POLLERR for _, event in poll.poll(0))


@contextlib.contextmanager
def preserve_handlers() -> Iterator[None]:
  """Installs the handlers of both signals again on leaving.

  Ray replaces them by its own, which end the process without a checkpoint.
  """
  handlers = {number: signal.getsignal(number) for number in NAMES}
  try:
    yield
  finally:
    if threading.current_thread() is threading.main_thread():
      for number, handler in handlers.items():
        if handler is not None:  # None: it was not installed by Python
          signal.signal(number, handler)
