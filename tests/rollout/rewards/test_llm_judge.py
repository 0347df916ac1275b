"""A judge: prompt, verdict, votes; what cannot be read is told, and never a 0."""

import pytest

from jaxrl.envs.reply_parsing import SCORE_PATTERN, last_number
from jaxrl.rollout.rewards.llm_judge import LLMJudge
from jaxrl.rollout.rewards.reward_pipeline import RewardInput, ScoringError
from jaxrl.rollout.thread_pool import ThreadPool

ITEM = {'question': 'What is {1+1}?', 'answer': '2'}


class Oracle:
  """Answers in turn with what it was given; keeps what it was asked."""

  def __init__(self, *answers):
    self.answers, self.requests = answers, []

  async def ask(self, name, messages, **sampling):
    answer = self.answers[len(self.requests) % len(self.answers)]
    self.requests.append((name, messages, sampling))
    if isinstance(answer, Exception):
      raise answer
    return answer


@pytest.fixture
def played():
  pool = ThreadPool(1)
  messages = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'What is it?'},
    {'role': 'assistant', 'content': 'It is {two}. Score: 10'},
  ]
  yield RewardInput(messages, ITEM, seed=5, name='t/0/0/7/1/0', pool=pool)
  pool.close()


async def test_what_it_is_asked_and_how_a_verdict_counts(played):
  oracle = Oracle('Fine.\nScore: 3\nNo: **Score:** 7.5')
  judge = LLMJudge(oracle, system='You judge.', max_tokens=9)
  word = await judge(played)
  assert (word.score, word.error, word.text) == (0.75, '', oracle.answers[0])
  assert word.metrics == {'unparsable': 0, 'failed': 0}
  ((name, messages, sampling),) = oracle.requests
  assert name.startswith('t/0/0/7/1/0/')
  assert messages[0] == {'role': 'system', 'content': 'You judge.'}
  text = messages[1]['content']
  for part in ('What is {1+1}?', 'It is {two}. Score: 10', 'from 0, worthless, to 10'):
    assert part in text
  assert (sampling['temperature'], sampling['max_tokens']) == (0, 9)
  await judge(played)
  assert oracle.requests[1][2]['seed'] == sampling['seed']  # of the episode alone


async def test_templates_of_ones_own(played, tmp_path):
  oracle = Oracle('grade <4>')
  text = '{answer}|{reference}|{low}-{high}|{conversation}'
  (tmp_path / 'prompt.txt').write_text(text)
  for template in (text, str(tmp_path / 'prompt.txt')):
    judge = LLMJudge(oracle, template=template, pattern='<([0-9]+)>', scale=(1, 5))
    assert (await judge(played)).score == 0.75
    prompt = oracle.requests[-1][1][-1]['content']
    assert prompt.startswith('2|2|1-5|system: Be brief.\n\nuser: What is it?\n\n')


async def test_votes_are_averaged_and_those_lost_are_counted(played):
  oracle = Oracle(
    'Score: 2', 'I cannot say', ScoringError('gone'), 'Score: 11', 'Score: 4'
  )
  word = await LLMJudge(oracle, votes=5, temperature=0.7)(played)
  assert word.score == pytest.approx(0.3)
  assert word.metrics == {'unparsable': 2, 'failed': 1}
  seeds = [sampling['seed'] for _, _, sampling in oracle.requests]
  assert len(set(seeds)) == 5
  oracle.requests.clear()
  word = await LLMJudge(oracle, votes=5, quorum=3, temperature=0.7)(played)
  assert word.score is None
  assert word.error.startswith('2 of 5 votes count; ')


async def test_an_answer_that_cannot_be_read_is_no_score(played):
  for answer, fault in (
    ('Hm.', "no verdict in 'Hm.'"),
    ('Score: 11', 'the verdict 11 is off the scale'),
    (ScoringError('no answer in 3 s'), 'ScoringError: no answer in 3 s'),
  ):
    word = await LLMJudge(Oracle(answer))(played)
    assert (word.score, word.error) == (None, f'0 of 1 votes count; {fault}')


async def test_a_pattern_without_end_costs_its_time_and_no_more(played):
  judge = LLMJudge(Oracle('a' * 60), pattern='((?:a|a)*)b')
  word = await judge(played)
  assert word.score is None and 'no answer within 1 s' in word.error


@pytest.mark.parametrize(
  ('verdict', 'score'),
  [
    ('Score: 7', 7),
    ('**Score:** 7.5', 7.5),
    ('**Score: 7**', 7),
    ('Score: **7**', 7),
    ('score = 7/10', 7),
    ('Score: 7 out of 10', 7),
    ('Score: .5', 0.5),
    ('Score: -4.5.', -4.5),
    ('{"reason": "good", "score": 7}', 7),
    ("{'score': 7}", 7),
    ('Final score - [[7]]', 7),
    ('Score: [7]', 7),
    ('Score (0-10): 7', 7),
    ('So the score is 7.', 7),
    ('I give it a score of 7.', 7),
    (r'Score: $\boxed{7}$', 7),
    ('Score: `7`', 7),
    ('Score:\n7', 7),
    ('Score: 7-8', None),
    ('Score: 7 to 8', None),
    ('Score: high', None),
    ('scores: 3, underscore: 2', None),
    ('7', None),
    ('', None),
  ],
)
def test_verdicts_as_judges_write_them(verdict, score):
  assert last_number(SCORE_PATTERN, verdict) == score


def test_the_last_number_counts():
  assert last_number(SCORE_PATTERN, 'score: 3 … Score = -4.5') == -4.5
  assert last_number(SCORE_PATTERN, 'scores: 3, underscore: 2') is None
  assert last_number('is (one)|it', 'is one') is None  # no number
  assert last_number('is (1)|it', 'it') is None  # the group took no part


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'template': '{replies} {reply}'}, "no field 'replies'. Did you mean 'reply'"),
    ({'template': '{question}'}, 'shows neither {reply} nor {conversation}'),
    ({'template': 'no_such_file.txt'}, 'has no field, so it must name a file'),
    ({'template': '{reply} {'}, 'for a literal brace'),
    ({'pattern': 'Score: [0-9]'}, 'needs a (group)'),
    ({'pattern': '('}, 'pattern'),
    ({'scale': (5, 5)}, 'scale=(5, 5); write two numbers'),
    ({'scale': 3}, 'scale=3; write two numbers'),
    ({'votes': 3}, 'votes=3 at temperature=0 would all be the same'),
    ({'votes': 2, 'quorum': 3, 'temperature': 1.0}, 'quorum=3 must lie in 1'),
    ({'temperature': -1.0}, 'temperature must be'),
  ],
)
def test_what_cannot_be_is_said_at_once(options, message):
  with pytest.raises(ValueError) as caught:
    LLMJudge(None, **options)
  assert message in str(caught.value)
