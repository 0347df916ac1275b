"""Self-teachers of a run need columns of the task and a prompt for each row."""

import functools
import pathlib
from typing import Any

from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.rollout.queue import teacher_contexts
from jaxrl.rollout.queue.reward_shaping import RewardShaper
from launch.settings.run_settings import RunSettings


def manager_options(settings: RunSettings) -> dict[str, Any]:
  """Returns the options of env managers that a self-teacher asks for."""
  teacher = settings.algorithm.self_teacher
  assert teacher is not None
  return {'task_keys': teacher_contexts.task_keys(teacher.context)}


def add_prompts(
  settings: RunSettings, folder: pathlib.Path, shaper: RewardShaper | None
) -> Any:
  """Returns a shaper that first gives each row the prompt of its teacher.

  Args:
    settings: Settings of the run.
    folder: The folder of the policy's tokenizer.
    shaper: What is done to groups afterwards.
  """
  teacher = settings.algorithm.self_teacher
  assert teacher is not None
  make_chat = functools.partial(
    _make_chat, pathlib.Path(folder).absolute(), settings.chat
  )
  return teacher_contexts.TeacherPrompts(teacher, make_chat, shaper)


def _make_chat(folder: pathlib.Path, options: ChatOptions) -> ChatTokenizer:
  return ChatTokenizer(load_tokenizer(folder), options)
