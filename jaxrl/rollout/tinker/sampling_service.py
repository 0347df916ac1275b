"""Sampling service: what the Tinker API does with sampling clients."""

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable

import numpy as np

from jaxrl.data.seeds import fold_seed
from jaxrl.options import JsonObject
from jaxrl.rollout.tinker import proto_codec, request_bodies
from jaxrl.rollout.tinker.checkpoint_store import SAMPLER, CheckpointStore, parse_path
from jaxrl.rollout.tinker.pending_results import (
  PendingResult,
  PendingResults,
  RequestError,
  TooManyRequestsError,
)
from jaxrl.rollout.tinker.proto_codec import SequenceMessage
from jaxrl.rollout.tinker.request_bodies import SampleBody
from jaxrl.rollout.tinker.row_adapters import Adapters
from jaxrl.rollout.tinker.sessions import SessionTable
from jaxrl.rollout.tinker.tenant_engine import BASE, TenantEngine, TenantSampling
from jaxrl.rollout.tinker.tenant_learner import ALPHA
from jaxrl.rollout.tinker.tenant_losses import NO_STABLE_REINFORCE
from jaxrl.rollout.tinker.tinker_model import TinkerModel
from jaxrl.rollout.tinker.tinker_options import TinkerOptions

MAX_SAMPLES_OF_REQUEST = 1024


class SamplingService:
  """Answers the requests of sampling clients."""

  def __init__(
    self,
    model: TinkerModel,
    engine: TenantEngine,
    stop_token_ids: tuple[int, ...],
    store: CheckpointStore,
    sessions: SessionTable,
    pending: PendingResults,
    options: TinkerOptions,
  ):
    """Creates a service.

    Args:
      model: The model.
      engine: Draws from it.
      stop_token_ids: What ends a reply, unless a request says otherwise.
      store: Keeps the checkpoints.
      sessions: The clients.
      pending: Their requests.
      options: The limits.
    """
    self._model, self._engine, self._store = model, engine, store
    self._stop_token_ids, self._sessions = stop_token_ids, sessions
    self._pending, self._options = pending, options
    self._num_samples = 0
    self._tasks: dict[str, asyncio.Task] = {}

  # ---- sampling sessions

  def find_sampler(self, sampler_id: str) -> str | None:
    """Returns the checkpoint that a sampling session draws from; None for the model.

    Args:
      sampler_id: The sampling session.

    Raises:
      RequestError: If there is no such session.
    """
    session_id = sampler_id.partition(':')[0]
    session = self._sessions.find(session_id)
    facts = session.facts if session else self._store.find_session(session_id)
    if facts is None or sampler_id not in facts['samplers']:
      raise RequestError(f'there is no sampler {sampler_id[:80]!r}')
    return facts['samplers'][sampler_id]

  def get_sampler(self, sampler_id: str) -> JsonObject:
    """Describes a sampling session."""
    path = self.find_sampler(sampler_id)
    name = self._model.name
    return {'sampler_id': sampler_id, 'base_model': name, 'model_path': path}

  def check_path(self, path: str | None) -> None:
    """Checks that a checkpoint can be sampled from.

    Args:
      path: The checkpoint; None for the model itself.

    Raises:
      RequestError: If it cannot.
    """
    if path is not None:
      record = self._store.find(path)
      if parse_path(path)[1] != SAMPLER:
        raise RequestError(f'{path} was saved to train on; save_weights_for_sampler()')
      if record['rank'] > self._options.max_rank:
        raise RequestError(f'{path} has rank {record["rank"]}, which is too large')

  def weights_of(
    self, path: str | None
  ) -> tuple[str, Callable[[], Awaitable[tuple[Adapters, float]]]]:
    """Returns the name of a checkpoint's adapters, and what loads them.

    Args:
      path: The checkpoint; None for the model itself.
    """
    record = None if path is None else self._store.find(path)

    async def load() -> tuple[Adapters, float]:
      assert path is not None and record is not None
      snapshot = await asyncio.to_thread(self._store.load, path)
      return snapshot.adapters, ALPHA / record['rank']

    return BASE if record is None else record['folder'], load

  # ---- samples

  def sample(self, body: SampleBody) -> JsonObject:
    """Begins to draw samples."""
    request_id = f'sample:{uuid.uuid4().hex}'
    owner, path = '', body.model_path
    if body.sampling_session_id is not None:
      owner = body.sampling_session_id.partition(':')[0]
      path = self.find_sampler(body.sampling_session_id)
      self._sessions.touch(owner)
      if body.seq_id is not None:
        request_id = f'sample:{body.sampling_session_id}:{body.seq_id}'
    if (known := self._pending.find(request_id)) is not None and not known.failed:
      return {'request_id': request_id, **known.answer}
    self._model.check_name(body.base_model)
    self.check_path(path)
    self._check(body)
    if self._num_samples + body.num_samples > self._options.max_samples:
      raise TooManyRequestsError(f'{self._num_samples} samples are waiting; try again')
    ids = [f'{request_id}:{i}' for i in range(body.num_samples)]
    result = self._pending.add(request_id, owner, sample_sequence_ids=ids)
    self._num_samples += body.num_samples
    self._tasks[request_id] = asyncio.get_running_loop().create_task(
      self._run(result, body, path)
    )
    return {'request_id': request_id, **result.answer}

  def _check(self, body: SampleBody) -> None:
    params, limits = body.sampling_params, self._options
    if body.record_stability_info and not limits.stable_reinforce:
      raise RequestError(f'record_stability_info is refused: {NO_STABLE_REINFORCE}')
    if not 1 <= body.num_samples <= MAX_SAMPLES_OF_REQUEST:
      raise RequestError(f'num_samples must be from 1 to {MAX_SAMPLES_OF_REQUEST}')
    if params.max_tokens is not None and params.max_tokens < 1:
      raise RequestError('max_tokens must be 1 or more')
    if params.seed is not None and not 0 <= params.seed < 2**63:
      raise RequestError('seed must lie in 0 … 2**63 − 1')
    if not 0 <= params.temperature <= 100 or not 0 < params.top_p <= 1:
      raise RequestError('temperature must lie in 0 … 100, and top_p in (0, 1]')
    widths = {
      'topk_prompt_logprobs': body.topk_prompt_logprobs,
      'topk_sample_logprobs': body.topk_sample_logprobs,
      'prompt_alt_tokens_k': body.prompt_alt_tokens_k,
    }
    most = min(limits.max_targets, self._model.config.vocab_size)
    for name, width in widths.items():
      if not 0 <= width <= most:
        raise RequestError(f'{name} must be from 0 to {most}')
    prompt = body.prompt.read(self._model.config.vocab_size)
    if len(prompt) >= limits.max_length:
      raise RequestError(
        f'the prompt of {len(prompt)} tokens leaves no room in {limits.max_length}'
      )
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < len(prompt)):
      raise RequestError(
        'prompt_logprobs_last_n needs prompt_logprobs, and must be from 1 to '
        'len(prompt) − 1'
      )

  async def _run(
    self, result: PendingResult, body: SampleBody, path: str | None
  ) -> None:
    try:
      name, load = self.weights_of(path)
      async with self._engine.adapters(name, load):
        result.succeed(await self._draw(result.request_id, body, name))
    except ValueError as error:  # the engine says what it cannot do
      result.fail(RequestError(str(error)))
    except asyncio.CancelledError:
      result.fail(RequestError('the request was cancelled'))
      raise
    except Exception as error:
      result.fail(error)
    finally:
      self._num_samples -= body.num_samples
      del self._tasks[result.request_id]

  async def _draw(self, request_id: str, body: SampleBody, name: str) -> bytes:
    prompt = body.prompt.read(self._model.config.vocab_size)
    seed = body.sampling_params.seed
    seed = secrets.randbits(63) if seed is None else seed
    token_ids = prompt.tolist()
    about_prompt = await self._score_prompt(prompt, body, name, seed)

    async def one(i: int) -> SequenceMessage:
      sampling = self._sampling(body, name, fold_seed(seed, f'sample {i}'), prompt)
      done = await self._engine.generate(f'{request_id}:{i}', token_ids, sampling)
      is_stop = done.finish_reason == 'stop'
      reason = proto_codec.STOP if is_stop else proto_codec.LENGTH
      topk = None
      if body.topk_sample_logprobs:
        whole = np.concatenate([prompt, done.tokens])
        row = whole[:-1], whole[1:, None]
        scores = await self._engine.score([row], name, top_k=body.topk_sample_logprobs)
        start = len(prompt) - 1
        topk = scores[0][1][start:], scores[0][2][start:]
      return SequenceMessage(done.tokens, done.logprobs, reason, topk)

    sequences = await asyncio.gather(*(one(i) for i in range(body.num_samples)))
    return proto_codec.write_sample(sequences, **about_prompt)

  def _sampling(
    self, body: SampleBody, name: str, seed: int, prompt: np.ndarray
  ) -> TenantSampling:
    params = body.sampling_params
    stop, stop_ids = (), self._stop_token_ids
    if isinstance(params.stop, str):
      stop = (params.stop,)
    elif params.stop is not None:
      # An empty list means no stop at all.
      stop = tuple(x for x in params.stop if isinstance(x, str))
      stop_ids = stop_ids if stop else ()
      stop_ids += tuple(x for x in params.stop if not isinstance(x, str))
    room = self._options.max_length - len(prompt)
    return TenantSampling(
      max_tokens=min(params.max_tokens or room, room),
      temperature=params.temperature,
      top_p=params.top_p,
      top_k=max(params.top_k, 0),
      stop=stop,
      stop_token_ids=stop_ids,
      seed=seed,
      adapters=name,
    )

  async def _score_prompt(
    self, prompt: np.ndarray, body: SampleBody, name: str, seed: int
  ) -> JsonObject:
    """Returns what is asked about the prompt, as `write_sample` takes it."""
    top_k, draws = body.topk_prompt_logprobs, body.prompt_alt_tokens_k
    wanted = body.target_prompt_logprobs
    if not (body.prompt_logprobs or top_k or draws or wanted):
      return {}
    length, about = len(prompt), {}
    targets = prompt[1:, None]
    ids = None
    if wanted is not None:
      ids = request_bodies.read_targets(wanted, length, self._options.max_targets)
      if ids.min() < -1 or ids.max() >= self._model.config.vocab_size:
        raise RequestError('target_prompt_logprobs has ids that are not tokens')
      targets = np.concatenate([targets, np.maximum(ids, 0).astype(np.int32)], axis=1)
    none = np.zeros((0, 1)), np.zeros((0, top_k), np.int32), np.zeros((0, top_k))
    scored = (*none, np.zeros((0, draws), np.int32), np.zeros((0, draws)))
    if length > 1:
      temperature = body.sampling_params.temperature
      options = {'top_k': top_k, 'draws': draws, 'seed': seed % 2**32}
      scored = (
        await self._engine.score(
          [(prompt[:-1], targets)], name, temperature=temperature, **options
        )
      )[0]
    own, best, best_logprobs, drawn, drawn_logprobs = scored
    skipped = length - (body.prompt_logprobs_last_n or length)
    if body.prompt_logprobs:
      logprobs = np.concatenate([[np.nan], own[:, 0]]).astype(np.float32)
      logprobs[:skipped] = np.nan
      about['prompt_logprobs'] = logprobs
    if top_k:
      first = np.zeros((1, top_k), np.int32), np.full((1, top_k), -99999.0)
      ids_all = np.concatenate([first[0], best])
      logprobs_all = np.concatenate([first[1], best_logprobs])
      ids_all[:skipped], logprobs_all[:skipped] = 0, -99999.0
      about['topk_prompt'] = ids_all, logprobs_all
    if wanted is not None and ids is not None:
      values = np.where(ids < 0, 0, own[:, 1:]).astype(np.float32)
      about['target_prompt'] = _like_request(wanted, ids, values)
    if draws:
      about['alternatives'] = drawn, drawn_logprobs
    return about

  # ---- ends

  def cancel(self, request_id: str) -> None:
    """Gives a request up; ignores one that has ended."""
    if (task := self._tasks.get(request_id)) is not None:
      task.cancel()

  def cancel_owner(self, owner: str) -> None:
    """Gives all requests of a session up."""
    for request_id in list(self._tasks):
      result = self._pending.find(request_id)
      if result is not None and result.owner == owner:
        self._tasks[request_id].cancel()

  async def stop(self) -> None:
    """Gives all requests up."""
    tasks = list(self._tasks.values())
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _like_request(
  wanted: request_bodies.TensorBody, ids: np.ndarray, values: np.ndarray
) -> bytes:
  """Writes log-probs in the layout of the tensor that asked for them."""
  if wanted.sparse_crow_indices is None:
    return proto_codec.write_tensor(values)
  starts = np.asarray(wanted.sparse_crow_indices, np.int64)
  columns = np.asarray(wanted.sparse_col_indices or [], np.int64)
  rows = np.repeat(np.arange(len(ids)), np.diff(starts))
  return proto_codec.write_sparse(values[rows, columns], starts, columns, values.shape)
