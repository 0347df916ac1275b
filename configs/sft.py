r"""Fine-tuning on conversations of your own, no environment needed.

    python -m launch.train --config=configs/sft.py --config.dataset.path=chats.jsonl \
      --config.model.checkpoint=FOLDER

Rows are conversations (`messages`, `conversations`) or a prompt and a response; other
names are set as in --config.dataset.columns.prompt=ask. For plain texts, name the
algorithm cpt: --config=configs/sft.py:cpt. Rehearse without a checkpoint: a small
random model is trained, with a tokenizer of your texts.
"""

from configs import base
from jaxrl.config import Config


def get_config(algorithm: str = 'sft') -> Config:
  """Returns the config for supervised fine-tuning on conversations."""
  config = base.get_config(algorithm)
  config.num_epochs = 2.0
  config.batch.update(num_groups=64, max_length=1024)
  config.optimizer.update(learning_rate=1e-5, warmup_steps=10)
  config.optimizer.lr_schedule = 'cosine(final_fraction=.1)'
  config.checkpoint.update(save_interval=200, export=True)
  return config
