"""Self-teachers of a run need a prompt for each row, from the policy's tokenizer."""

import functools
import pathlib
from typing import Any

from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.rollout.queue import teacher_contexts
from jaxrl.rollout.queue.reward_shaping import RewardShaper
from jaxrl.types import SelfTeacher


def add_prompts(
  teacher: SelfTeacher,
  chat: ChatOptions,
  folder: pathlib.Path,
  shaper: RewardShaper | None,
) -> Any:
  """Returns a shaper that first gives each row the prompt of its teacher.

  Args:
    teacher: What the policy is shown as its own teacher.
    chat: How conversations are written.
    folder: The folder of the policy's tokenizer.
    shaper: What is done to groups afterwards.
  """
  make_chat = functools.partial(_make_chat, pathlib.Path(folder).absolute(), chat)
  return teacher_contexts.TeacherPrompts(teacher, make_chat, shaper)


def _make_chat(folder: pathlib.Path, options: ChatOptions) -> ChatTokenizer:
  return ChatTokenizer(load_tokenizer(folder), options)
