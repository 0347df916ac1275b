"""The options of a Tinker server: how much it takes on at the same time."""

import dataclasses

from jaxrl.options import Options, option


@dataclasses.dataclass(frozen=True)
class TinkerOptions(Options):
  """The sizes and limits of a Tinker server."""

  max_tenants: int = option(
    4, 'Training runs at the same time; each takes room for four adapters.', low=1
  )
  max_rank: int = option(
    32, 'The largest LoRA rank; the adapters of all are padded to it.', low=1
  )
  max_samplers: int = option(
    4, 'Adapters that are sampled from at the same time; others wait.', low=1
  )
  max_length: int = option(
    2048, 'Tokens of a sequence, prompt and reply together.', low=32
  )
  step_tokens: int = option(
    2048,
    'Tokens of one training program, with padding; rows of several tenants share it.',
    low=32,
  )
  max_num_seqs: int = option(32, 'Sequences decoded at the same time.', low=1)
  max_sessions: int = option(256, 'Clients at the same time.', low=1)
  session_timeout: float = option(
    120.0,
    "Seconds without a heartbeat after which a client's places are freed.",
    above=0,
  )
  max_pending: int = option(4096, 'Requests that wait or run.', low=1)
  max_samples: int = option(
    4096, 'Sequences that wait or are decoded; clients beyond it wait.', low=1
  )
  max_datums: int = option(2048, 'Datums of one request.', low=1)
  max_targets: int = option(
    64, 'Targets of one position, and likeliest tokens told of one.', low=1
  )
  max_body: int = option(64 << 20, 'Bytes of one request.', low=1024)
  body_timeout: float = option(
    120.0, 'Seconds that a client may take to send one request.', above=0
  )
  poll_seconds: float = option(
    20.0, 'Seconds for which a poll waits for a result.', above=0
  )
  keep_seconds: float = option(600.0, 'Seconds for which results are kept.', above=0)
  max_kept_bytes: int = option(1 << 30, 'Bytes of results that are kept.', low=1)
  stable_reinforce: str = option(
    '',
    "What computes the loss of this name: 'r1_reward', the paper's (arXiv 2505.02835); "
    "'' refuses it, because the API's own has not been published.",
    choices=('', 'r1_reward'),
  )
  dimuon: str = option(
    '',
    "Which steps the optimizer of this name takes: 'muon', Muon's for the matrices of "
    "adapters; '' refuses it, because the API's own has a preconditioner that has not "
    'been published.',
    choices=('', 'muon'),
  )
  max_checkpoints: int = option(10_000, 'Checkpoints on the disk.', low=1)
