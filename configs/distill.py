"""A small student learns from a larger teacher, on a laptop, in minutes.

    python -m launch.train --config=configs/quickstart.py --workdir=/tmp/teacher
    python -m launch.train --config=configs/distill.py \
        --config.teacher.checkpoint=/tmp/teacher/export

The first command makes the teacher; any Hugging Face folder serves. The student is half
as wide. A short supervised start shows it the careless lessons that the teacher began
with; then it writes, and the teacher says how likely each token was. Answers are not
graded, but for the evaluations: what it gets better at, it has from the teacher.

`configs/distill.py:jsd` weighs likely and unlikely tokens otherwise. `:distill` matches
the teacher's likeliest tokens on written conversations, and on the student's own with
--config.algorithm.data_format=rollout. An environment tag may have a teacher of its
own: --config.teacher.by_tag.arithmetic=FOLDER.
"""

from configs import quickstart
from jaxrl.config import Config


def get_config(algorithm: str = 'on_policy_distill') -> Config:
  """Returns the config of a student that is half as wide as its teacher."""
  config = quickstart.get_config(algorithm)
  config.model.random = 'qwen3(hidden_size=64, num_layers=2, intermediate_size=192)'
  return config
