"""Plays one episode for people to read: `python -m launch.play --config=FILE.py`.

Shows every turn as it happens, and every token as the model reads or writes it: its
text, its id, its mask and its log-prob. `--config.model.checkpoint=…` names the model
and `--episode=3` the episode; the same command plays the same episode.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from launch.logging.console import Console
from launch.logging.error_pages import print_error, report_user_error
from launch.report.samples import token_texts
from launch.runtime import process_env
from launch.runtime.signal_handler import run_command
from launch.settings import command_line

if TYPE_CHECKING:
  from jaxrl.data.images import Image
  from jaxrl.rollout.env_manager import EnvManager
  from jaxrl.rollout.episodes.rollout_cache import RolloutCache
  from jaxrl.types import Trajectory

FLAGS = {'episode': '0', 'sample': '0', 'ids': 'true'}
USAGE = """\
python -m launch.play --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE]

  --episode=0    which episode; it draws the task
  --sample=0     which of the group's attempts; it draws the replies
  --ids=true     token ids below each piece of text
"""
MAX_IMAGE_COLUMNS = 64  # characters that an image is wide
# Neighbouring tokens differ in shade, so that their bounds are seen.
PROMPT_STYLES, RESPONSE_STYLES = ('grey50', 'grey66'), ('on blue', 'on dark_blue')


class EpisodeScreen:
  """Shows an episode on the console while it grows."""

  def __init__(
    self, console: Console, decode: Callable[[list[int]], str], *, ids: bool = True
  ):
    self._console, self._decode, self._ids = console, decode, ids
    self._turns = 0
    self._shown: dict[int, int] = {}  # tokens of each conversation, by identity
    self._last_player = -1

  def watch(self, manager: 'EnvManager') -> None:
    """Makes a manager show here what each of its steps adds."""
    reset, decide, step = manager.reset, manager.make_decision, manager.step

    async def shown_reset(lease: Any) -> Any:
      cache = await reset(lease)
      if cache is not None:
        self._console.say(f'episode seed {cache.seed}', style='bold')
        if cache.task is not None and cache.task.index is not None:
          self._console.fact('task', f'row {cache.task.index}: {cache.task.item}')
        self._show(cache)
      return cache

    async def shown_decision(cache: Any) -> Any:
      completion = await decide(cache)
      self._show(cache)
      for branch in getattr(cache, 'branches', ()):  # an agent's conversations
        self.show_new_tokens(branch)
      return completion

    async def shown_step(cache: Any, completion: Any) -> None:
      player = getattr(cache, 'player', cache)  # the one of several who moves
      await step(cache, completion)
      self._console.fact('reward', f'{player.turns[-1].reward:g}')
      self._show(cache)

    manager.reset = shown_reset  # pyright: ignore[reportAttributeAccessIssue]
    manager.make_decision = shown_decision  # pyright: ignore[reportAttributeAccessIssue]
    manager.step = shown_step  # pyright: ignore[reportAttributeAccessIssue]

  def _show(self, cache: Any) -> None:
    """Shows what is new of an episode, or of each of its players' conversations."""
    for player in getattr(cache, 'players', ()):
      if len(player.tokens) > self._shown.get(id(player), 0):
        if player.role != self._last_player:
          self._last_player = player.role
          self._console.say()
          self._console.say(f'player of role {player.role}', style='bold')
        self.show_new_tokens(player)
    if not getattr(cache, 'players', ()):
      self.show_new_tokens(cache)

  def show_new_tokens(self, cache: 'RolloutCache') -> None:
    """Shows the tokens that were added since the last call."""
    start, stop = self._shown.get(id(cache), 0), len(cache.tokens)
    self._shown[id(cache)] = stop
    while start < stop:
      end = start
      while end < stop and cache.mask[end] == cache.mask[start]:
        end += 1
      self._show_span(cache, start, end)
      start = end

  def _show_span(self, cache: 'RolloutCache', start: int, end: int) -> None:
    self._console.say()
    written = cache.mask[start]
    count = f'{end - start} token{"s" * (end - start > 1)}, {start} to {end - 1}'
    if written:
      self._turns += 1
      logprob = sum(cache.logprobs[start:end]) / (end - start)
      versions = sorted(set(cache.versions[start:end]))
      self._console.say(
        f'turn {self._turns}: the model wrote {count} · mask 1 · '
        f'mean log-prob {logprob:.3f} · weights of step '
        f'{", ".join(map(str, versions))}',
        style='bold',
      )
    else:
      self._console.say(f'the model is given {count} · mask 0', style='bold')
    for stop, image in cache.images:
      if start < stop <= end:
        self._show_image(stop, image)
    ids = list(cache.tokens[start:end])
    self._console.terminal.print(
      self._text(ids, RESPONSE_STYLES if written else PROMPT_STYLES)
    )
    if self._ids:
      self._console.say(' '.join(map(str, ids)), style='dim')

  def _show_image(self, stop: int, image: 'Image') -> None:
    """Shows an image, in colour on a terminal, and where it ends among the tokens."""
    self._console.say(
      f'image of {image.width} × {image.height} pixels, up to token {stop - 1} · '
      f'{image.mark[:19]}…',
      style='bold',
    )
    if self._console.live:
      self._console.terminal.print(_blocks(image))

  def _text(self, ids: list[int], styles: tuple[str, str]) -> Text:
    """Returns the tokens side by side; without colour, with bars between them."""
    text = Text()
    for i, piece in enumerate(token_texts(ids, self._decode)):
      visible = piece.replace('\n', '↵\n').replace('\t', '⇥\t') or '·'
      if not self._console.live and i:
        text.append('|')
      text.append(visible, style=styles[i % 2])
    return text

  def show_ending(self, rows: 'Sequence[Trajectory]') -> None:
    """Shows how the episode ended and which rows it would be trained on."""
    last = rows[-1]
    tokens = sum(len(row.tokens) for row in rows)
    actions = sum(int(row.action_mask.sum()) for row in rows)
    facts = {
      'score': f'{sum(row.score for row in rows):g}',
      'rows': f'{len(rows)}, of {tokens} tokens; {actions} written by the model',
      **{name: f'{value:g}' for name, value in last.metrics.items()},
      **{name: str(value) for name, value in last.columns.items() if value != ''},
    }
    if last.failed:
      facts['dropped'] = 'a failed episode is not trained on'
    if 'error' in last.extras:
      facts['error'] = str(last.extras['error'])
    self._console.closing(f'Ended by {last.stop_reason}.', facts)


def _blocks(image: 'Image') -> Text:
  """Returns an image as half blocks, each of which is two pixels."""
  pixels = image.array()
  step = max(1, -(-image.width // MAX_IMAGE_COLUMNS))
  pixels = pixels[step // 2 :: step, step // 2 :: step]
  text = Text()
  for upper, lower in itertools.zip_longest(pixels[::2], pixels[1::2]):
    for i, colour in enumerate(upper):
      style = f'rgb({",".join(map(str, colour))})'
      if lower is not None:
        style += f' on rgb({",".join(map(str, lower[i]))})'
      text.append('▀', style=style)
    text.append('\n')
  return text


async def play_one_episode(
  job: Any, screen: EpisodeScreen, episode: int, sample: int
) -> int:
  """Plays one episode.

  Returns:
    The exit status: 0, 1 for a failed episode, 2 if there is no such episode.
  """
  from jaxrl.rollout.queue.group_state import EpisodeLease

  screen.watch(job.manager)
  lease = EpisodeLease(0, episode, sample, 0, 0)
  rows = await job.run(lambda: job.manager.play_episode(lease, base_seed=job.base_seed))
  if rows is None:
    print_error(f'--episode={episode}: the data set ends before it')
    return 2
  screen.show_ending(rows)
  return 1 if rows[-1].failed else 0


def main(argv: Sequence[str]) -> int:
  """Plays one episode from a command line; returns the exit status."""
  if not argv or '--help' in argv:
    print(USAGE)
    return 0
  try:
    command = command_line.parse(argv, FLAGS)
    config = command_line.load(command)
    command_line.check_algorithm(config)
    episode, sample = command.flag('episode', int), command.flag('sample', int)
    ids = command.flag('ids', bool)
    from launch.rollouts.inference_job import Player  # imports JAX: seconds
    from launch.settings.resolve import resolve_settings

    console = Console()
    job = Player(resolve_settings(config))
    screen = EpisodeScreen(console, job.decode, ids=ids)
  except (ValueError, OSError) as error:
    print_error(error)
    return 2
  except Exception as error:
    return report_user_error(error)
  try:
    return asyncio.run(play_one_episode(job, screen, episode, sample))
  except Exception as error:
    return report_user_error(error)


if __name__ == '__main__':
  process_env.apply()
  run_command(main)
