"""Self-teachers of a run need columns of the task and a prompt for each row."""

import functools
import pathlib
from typing import Any

from jaxrl.rollout.queue.reward_shaping import RewardShaper
from launch.settings.run_settings import RunSettings


def manager_options(settings: RunSettings) -> dict[str, Any]:
  """Returns the options of env managers that a self-teacher asks for."""
  teacher = settings.algorithm.self_teacher
  if teacher is None:
    return {}
  from jaxrl.rollout.queue import teacher_contexts  # few algorithms have one

  return {'task_keys': teacher_contexts.task_keys(teacher.context)}


def add_prompts(
  settings: RunSettings, folder: pathlib.Path, shaper: RewardShaper | None
) -> Any:
  """Returns a shaper that first gives each row the prompt of its teacher.

  Args:
    settings: Settings of the run.
    folder: The folder of the policy's tokenizer.
    shaper: What is done to groups afterwards; returned as it is without a self-teacher.
  """
  teacher = settings.algorithm.self_teacher
  if teacher is None:
    return shaper
  from jaxrl.rollout.queue.teacher_contexts import TeacherPrompts

  make_chat = functools.partial(
    _make_chat, pathlib.Path(folder).absolute(), settings.chat
  )
  return TeacherPrompts(teacher, make_chat, shaper)


def _make_chat(folder: pathlib.Path, options: Any) -> Any:
  from jaxrl.data.chat_tokenizer import ChatTokenizer
  from jaxrl.data.tokenizer import load_tokenizer

  return ChatTokenizer(load_tokenizer(folder), options)
