"""PictureQuiz: the picture says the answer, the seed says the picture."""

import numpy as np
import pytest

from jaxrl.envs.games.picture_quiz_env import PictureQuizEnv, demonstrations


def image_of(observation):
  (image,) = [part['image'] for part in observation if part['type'] == 'image']
  return image


def texts(observation):
  return [part['text'] for part in observation if part['type'] == 'text']


def test_pictures_are_a_function_of_the_seed_and_tell_the_answer():
  seen = {}
  for seed in range(40):
    env = PictureQuizEnv(side=3, split=('train', 'test')[seed % 2])
    observation, _ = env.reset(seed=seed)
    again, _ = PictureQuizEnv(side=3, split=('train', 'test')[seed % 2]).reset(
      seed=seed
    )
    assert observation == again
    pixels = image_of(observation).array()
    seen.setdefault(seed % 2, set()).add(image_of(observation).digest)
    corners = pixels[1::16, 1::16].reshape(-1, 3).astype(int)  # beside any dot
    red = int(np.argmax(corners[:, 0] - corners[:, 1:].max(axis=1))) + 1
    dark = (pixels.max(axis=2) == 15).reshape(3, 16, 3, 16).any((1, 3)).sum()
    (question,) = texts(observation)
    answer = red if 'red' in question else dark
    assert env.step(f'It is {answer}.')[1:4] == (1.0, True, False)
    env.reset(seed=seed)
    assert env.step(f'{answer}, no, {answer + 1}')[1] == 0.0
  assert not seen[0] & seen[1]


def test_exchanged_pictures_tell_nothing_of_the_answer():
  plain, control = PictureQuizEnv(), PictureQuizEnv(exchanged=True)
  same = 0
  for seed in range(60):
    shown, other = (env.reset(seed=seed)[0] for env in (plain, control))
    assert texts(shown) == texts(other) and image_of(shown) != image_of(other)
    assert plain._answer == control._answer
    same += control.step(str(plain._answer))[1] == 1.0
  assert same == 60


def test_a_hasty_guide_often_says_one():
  rows = demonstrations(size=200, haste=0.5)
  answers = [row['messages'][1]['content'] for row in rows]
  assert 0.5 < np.mean([word == '1' for word in answers]) < 0.75
  assert rows == demonstrations(size=200, haste=0.5)
  assert len(set(answers)) == 4


@pytest.mark.parametrize(
  'options, words',
  [
    ({'side': 1}, 'side must be'),
    ({'questions': 'blue'}, "'blue'"),
    ({'split': 'val'}, 'split must be'),
  ],
)
def test_errors(options, words):
  with pytest.raises(ValueError, match=words):
    PictureQuizEnv(**options)
  with pytest.raises(RuntimeError, match='reset'):
    PictureQuizEnv().step('1')
