"""KuhnPoker is poker with three cards and two players, whose best play is known.

Each player pays 1 and gets one of the cards J < Q < K. In turn they pass or bet 1 more.
Two passes or two bets end the game, and the higher card wins what was paid; who passes
after a bet has lost. The first player loses 1/18 a game if both play well (Kuhn, 1950).
"""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxrl.envs.env_registry import Info, MessageParts, ResetOptions
from jaxrl.envs.reply_parsing import tagged_answer

CARDS = ('J', 'Q', 'K')
MOVES = {'p': 'pass', 'b': 'bet'}
GAME_VALUE = -1 / 18  # of the first player
FORFEIT = 2.0  # what an illegal move costs: the most that a player can lose
RULES = (
  'Kuhn poker: two players get one card each of J < Q < K and pay 1. In turn they pass '
  'or bet 1 more. After two passes or two bets the higher card wins; who passes after '
  'a bet loses.\n'
)
ENDS = ('pp', 'bp', 'bb', 'pbp', 'pbb')  # histories that end a game
_ASKED = {
  '': 'You begin',
  'p': 'The other player passes',
  'b': 'The other player bets',
  'pb': 'You passed, the other player bets',
}


class InfoSet(NamedTuple):
  """An information set is what a player knows when it is to move.

  Attributes:
    card: The player's card, 0 for J to 2 for K.
    history: The moves so far, 'p' or 'b' each.
  """

  card: int
  history: str

  @property
  def role(self) -> int:
    """The player, 0 for the one who begins."""
    return len(self.history) % 2

  @property
  def name(self) -> str:
    """The card and the moves, such as 'J' or 'Q_pb'."""
    return '_'.join(filter(None, (CARDS[self.card], self.history)))


INFO_SETS = tuple(InfoSet(card, history) for history in _ASKED for card in range(3))


class MoveChances(NamedTuple):
  """Probabilities of what a player does at an information set; else it passes.

  Attributes:
    bet: Of a bet.
    illegal: Of a reply that is not a move.
  """

  bet: float
  illegal: float = 0.0


class KuhnPokerEnv:
  """Deals the cards of a seed, and lets two players move in turn.

  A reply's answer must be `pass` or `bet`. Any other is an illegal move: it ends the
  game, and the player pays 2, the most that can be lost, to the other. Metrics:
  `illegal`, 1 for a game that ended so. Column: `moves`, such as 'pbb'.

  Args:
    show_rules: Whether a player's first observation begins with the rules.
    probe: Whether an episode is a single move, at the information set that the seed
      counts; nothing is earned. An evaluation of 12 tasks then reports how often each
      move is made, `bet/SET` and `illegal/SET`, and what follows from that:
      `exploitability`, `nash_conv` and `first_return`. Where the player has moved
      before, the observation is the messages so far, which templates leave alone.
  """

  uses_dataset = False  # its tasks are seeds
  num_players = 2
  columns: ClassVar[dict[str, str]] = {'moves': 'string'}

  def __init__(self, *, show_rules: bool = True, probe: bool = False):
    self._show_rules = show_rules
    self._probe = probe
    self._cards: tuple[int, int] | None = None
    self._history = ''

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[Any, Info]:
    """Deals the cards; the first player is asked."""
    deal = [int(card) for card in np.random.default_rng(seed).permutation(3)]
    self._cards, self._history = (deal[0], deal[1]), ''
    if not self._probe:
      return self._ask(), {'role': 0}
    at = INFO_SETS[seed % len(INFO_SETS)]
    other = deal[0] if deal[0] != at.card else deal[1]
    self._cards = (at.card, other) if at.role == 0 else (other, at.card)
    messages = []
    for length in range(at.role, len(at.history), 2):
      self._history = at.history[:length]
      messages += [
        {'role': 'user', 'content': self._ask()},
        {'role': 'assistant', 'content': MOVES[at.history[length]]},
      ]
    self._history = at.history
    text, info = self._ask(), {'role': at.role}
    return [*messages, {'role': 'user', 'content': text}] if messages else text, info

  def _ask(self) -> str:
    """Returns what the player who is to move is shown."""
    assert self._cards is not None
    role = len(self._history) % 2
    rules = RULES if self._show_rules and len(self._history) < 2 else ''
    asked = _ASKED[self._history]
    return f'{rules}Your card is {CARDS[self._cards[role]]}. {asked}: pass or bet?'

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Makes the move of a reply."""
    if self._cards is None:
      raise RuntimeError('call reset before step')
    role = len(self._history) % 2
    answer = tagged_answer(action).lower().strip(' .!"\'*')
    move = next((key for key, name in MOVES.items() if name == answer), '')
    if self._probe:
      name = InfoSet(self._cards[role], self._history).name
      chances = {f'bet/{name}': move == 'b', f'illegal/{name}': not move}
      info = {'metrics': {key: float(value) for key, value in chances.items()}}
      return '', 0.0, True, False, info
    self._history += move
    info: Info = {
      'metrics': {'illegal': float(not move)},
      'columns': {'moves': self._history + ('' if move else '?')},
    }
    if move and self._history not in ENDS:
      return self._ask(), 0.0, False, False, {**info, 'role': 1 - role}
    won = payoff(self._cards, self._history) if move else FORFEIT * (2 * role - 1)
    returns = (won, -won)
    info['rewards'] = {1 - role: returns[1 - role]}
    return '', returns[role], True, False, info

  @staticmethod
  def evaluation_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns what follows from how often each move was made in an evaluation.

    Args:
      metrics: Means over the evaluation's episodes, by name.

    Returns:
      `exploitability`, `nash_conv` and `first_return`; nothing unless all information
      sets were probed.
    """
    if not all(f'bet/{at.name}' in metrics for at in INFO_SETS):
      return {}
    strategy = {
      at: MoveChances(metrics[f'bet/{at.name}'], metrics[f'illegal/{at.name}'])
      for at in INFO_SETS
    }
    gap = nash_conv(strategy)
    return {
      'exploitability': gap / 2,
      'nash_conv': gap,
      'first_return': expected_return(strategy, strategy),
    }


class EquilibriumPlayer:
  """Plays Kuhn poker well: nobody wins from it in the long run.

  Args:
    bluff: How often the first player bets with J; each value up to 1/3 gives another
      of the game's equilibria.

  Raises:
    ValueError: If `bluff` is out of range.
  """

  def __init__(self, *, bluff: float = 1 / 3):
    self._strategy = equilibrium(bluff)

  def reply(self, messages: MessageParts, *, role: int, seed: int) -> str:
    """Draws the move, from what the last message shows."""
    text = str(messages[-1]['content'])
    card = text[text.rindex('card is ') + len('card is ')]
    asked = next(key for key, value in _ASKED.items() if f'. {value}: ' in text)
    bet = self._strategy[InfoSet(CARDS.index(card), asked)].bet
    return MOVES['b' if np.random.default_rng(seed).random() < bet else 'p']


def payoff(cards: tuple[int, int], history: str) -> float:
  """Returns what the first player wins.

  Args:
    cards: The cards of both players.
    history: One of `ENDS`.
  """
  if history[-2:] == 'bp':
    return 1.0 if len(history) == 2 else -1.0
  stake = 2.0 if history[-1] == 'b' else 1.0
  return stake if cards[0] > cards[1] else -stake


def equilibrium(bluff: float = 1 / 3) -> dict[InfoSet, MoveChances]:
  """Returns an equilibrium of the game (Kuhn, 1950).

  Args:
    bluff: How often the first player bets with J, from 0 to 1/3.

  Raises:
    ValueError: If `bluff` is out of range.
  """
  if not 0 <= bluff <= 1 / 3:
    raise ValueError(f'bluff must be from 0 to 1/3, not {bluff}')
  bets = {
    '': (bluff, 0.0, 3 * bluff),
    'p': (1 / 3, 0.0, 1.0),
    'b': (0.0, 1 / 3, 1.0),
    'pb': (0.0, bluff + 1 / 3, 1.0),
  }
  return {at: MoveChances(bets[at.history][at.card]) for at in INFO_SETS}


def expected_return(
  first: Mapping[InfoSet, MoveChances], second: Mapping[InfoSet, MoveChances]
) -> float:
  """Computes what the first player wins on average.

  Args:
    first: The first player's strategy, at its six information sets or at all.
    second: The second player's.
  """

  def value(cards: tuple[int, int], history: str) -> float:
    if history in ENDS:
      return payoff(cards, history)
    role = len(history) % 2
    bet, illegal = (first, second)[role][InfoSet(cards[role], history)]
    forfeit = FORFEIT * (2 * role - 1)
    total = illegal * forfeit
    # A move that is never made is not looked into: most are not in a pure strategy.
    total += bet * value(cards, history + 'b') if bet else 0.0
    rest = 1 - bet - illegal
    return total + (rest * value(cards, history + 'p') if rest else 0.0)

  deals = list(itertools.permutations(range(3), 2))
  return sum(value((deal[0], deal[1]), '') for deal in deals) / len(deals)


def best_response(
  strategy: Mapping[InfoSet, MoveChances], role: int
) -> tuple[float, dict[InfoSet, MoveChances]]:
  """Finds a best answer to a strategy among the 64 pure ones, by trying them all.

  Args:
    strategy: The other player's strategy.
    role: Who answers, 0 or 1.

  Returns:
    What the answer wins on average, and the answer.
  """
  own = [at for at in INFO_SETS if at.role == role]
  answers = []
  for bets in itertools.product((0.0, 1.0), repeat=len(own)):
    pure = {at: MoveChances(bet) for at, bet in zip(own, bets, strict=True)}
    won = (
      expected_return(pure, strategy) if role == 0 else expected_return(strategy, pure)
    )
    answers.append((won if role == 0 else -won, pure))
  return max(answers, key=lambda answer: answer[0])


def nash_conv(strategy: Mapping[InfoSet, MoveChances]) -> float:
  """Computes what both players together could win by answering best.

  Args:
    strategy: The strategy of both players, at all information sets.

  Returns:
    Σ over roles of what a best answer wins from the strategy: 0 in an equilibrium. Half
    of it is the exploitability, as OpenSpiel has it.
  """
  return sum(best_response(strategy, role)[0] for role in (0, 1))
