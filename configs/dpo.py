r"""Preferences from files of pairs: DPO, or ipo or cdpo by name.

    python -m launch.train --config=configs/dpo.py --config.dataset.path=pairs.jsonl \
      --config.model.checkpoint=FOLDER

Rows have chosen and rejected: answers to a prompt, or whole conversations that begin
alike. The reference is the checkpoint that training starts from; let it be one that
was fine-tuned on such answers, by configs/sft.py. The hinge of SLiC instead:
--config.algorithm.policy_loss='hinge(beta=.1)'.
"""

from configs import base
from jaxrl.config import Config


def get_config(algorithm: str = 'dpo') -> Config:
  """Returns the config for learning from preference pairs."""
  config = base.get_config(algorithm)
  config.num_epochs = 1.0
  config.batch.update(num_groups=32, max_length=1024)  # 32 pairs, 64 rows
  config.optimizer.update(learning_rate=5e-7, warmup_steps=10, lr_schedule='linear')
  config.checkpoint.update(save_interval=200, export=True)
  return config
