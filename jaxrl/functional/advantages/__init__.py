"""Advantages: `fn(rewards, mask, task_ids, run_ids, …, *, …) -> Advantages`.

Parameters before the `*` name the columns an estimator reads; after it come its
options. Groups are told apart by ids and may differ in size and lie in any order.
"""

from jaxrl.functional.advantages.group import grpo, opmd
from jaxrl.functional.advantages.temporal import gae

__all__ = ['gae', 'grpo', 'opmd']
