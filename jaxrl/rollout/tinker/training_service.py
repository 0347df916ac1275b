"""Training service: what the Tinker API does with runs and their checkpoints."""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxrl.device_thread import DeviceThread
from jaxrl.options import JsonObject
from jaxrl.rollout.tinker import (
  checkpoint_store,
  request_bodies,
  row_adapters,
  tenant_losses,
)
from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore
from jaxrl.rollout.tinker.custom_losses import CustomLoss, run_custom_loss
from jaxrl.rollout.tinker.pending_results import (
  SERVER,
  PendingResult,
  PendingResults,
  RequestError,
)
from jaxrl.rollout.tinker.proto_codec import ForwardBackwardMessage
from jaxrl.rollout.tinker.sessions import ClientSession, SessionTable
from jaxrl.rollout.tinker.tenant_learner import (
  Tenant,
  TenantLearner,
  TenantSnapshot,
  TrainingRow,
)
from jaxrl.rollout.tinker.tinker_model import (
  ADAMW,
  DIMUON,
  TinkerModel,
  optimizer_config,
  peft_files,
  trained_layers,
)
from jaxrl.rollout.tinker.tinker_options import TinkerOptions
from jaxrl.rollout.tinker.training_queue import TrainingQueue

NO_DIMUON = (
  "use adamw. How the API's dimuon preconditions its steps has not been published, and "
  'Muon has no such part. A server that was started with --dimuon=muon takes steps of '
  'Muon under this name'
)
MAX_AHEAD = 10_000  # numbers by which requests may be out of order
# Weights that were saved for one client, without a name, are kept for a day.
UNNAMED_SECONDS = 24 * 3600
Call = Callable[[], Awaitable[JsonObject]]


def check_optimizer(config: Mapping[str, Any] | None, dimuon: str = '') -> str:
  """Returns the optimizer that a run has.

  Args:
    config: What the client asks for; None for AdamW.
    dimuon: 'muon', if steps of Muon are taken under the name of Dimuon.

  Raises:
    RequestError: If there is no such optimizer.
  """
  config = config or {}
  kind, version = config.get('type', ADAMW), config.get('version', 1)
  if kind == ADAMW:
    return ADAMW
  if kind != DIMUON or not dimuon:
    raise RequestError(f'optimizer {str(kind)[:40]!r} is not supported: {NO_DIMUON}')
  if version != 1:
    raise RequestError(f'dimuon: version {str(version)[:40]!r} is not known; use 1')
  return DIMUON


def step_options(body: request_bodies.OptimStep, optimizer: str) -> dict[str, float]:
  """Returns the hyperparameters of a step.

  Args:
    body: The request.
    optimizer: The run's.

  Raises:
    RequestError: If they are another optimizer's, or one is out of range.
  """
  params, kind = body.optimizer_params, ADAMW
  adam = body.adam_params or request_bodies.AdamBody()
  options: dict[str, float] = msgspec.structs.asdict(adam)
  if params is not None:
    kind = params.get('type')
    if kind == DIMUON:
      dimuon = request_bodies.convert_body(
        params, request_bodies.DimuonBody, 'optimizer_params'
      )
      options = msgspec.structs.asdict(dimuon)
      del options['type']
      options['grad_clip_norm'] = max(options['grad_clip_norm'], 0.0)  # below 0 is none
  if kind != optimizer:
    raise RequestError(
      f'the optimizer of this run is {optimizer}, and the step has the parameters of '
      f'{str(kind)[:40]!r}'
    )
  for name, value in options.items():
    if not math.isfinite(value) or value < 0:
      raise RequestError(f'{name}={value} must be a number of 0 or more')
  for name in ('beta1', 'beta2'):
    if options.get(name, 0) >= 1:
      raise RequestError(f'{name}={options[name]} must be below 1')
  return options


class TrainingService:
  """Answers the requests of training clients."""

  def __init__(
    self,
    model: TinkerModel,
    learner: TenantLearner,
    device_thread: DeviceThread,
    store: CheckpointStore,
    sessions: SessionTable,
    pending: PendingResults,
    options: TinkerOptions,
  ):
    """Creates a service without runs.

    Args:
      model: The model.
      learner: Trains it.
      device_thread: Runs the learner's work.
      store: Keeps runs and checkpoints.
      sessions: The clients.
      pending: Their requests.
      options: The limits.
    """
    self._model, self._learner, self._store = model, learner, store
    self._device_thread, self._sessions = device_thread, sessions
    self._pending, self._options = pending, options
    self.queue = TrainingQueue(learner, device_thread)
    self._facts: dict[str, JsonObject] = {}  # of the runs that are open
    self._tasks: set[asyncio.Task] = set()

  # ---- helpers

  def _answer(self, result: PendingResult) -> JsonObject:
    return {'request_id': result.request_id, **result.answer}

  def _start(self, request_id: str, owner: str, call: Call) -> JsonObject:
    """Runs a call that is in no run's queue; answers at once."""
    if (known := self._pending.find(request_id)) is not None:
      return self._answer(known)
    result = self._pending.add(request_id, owner)

    async def run() -> None:
      try:
        result.succeed(await call())
      except Exception as error:
        result.fail(error)

    task = asyncio.get_running_loop().create_task(run())
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return self._answer(result)

  def _queue_call(self, run_id: str, number: int, call: Call) -> JsonObject:
    result, is_new = self._numbered(run_id, number)
    if is_new:
      self.queue.add_call(run_id, number, result, call)
    return self._answer(result)

  def _numbered(self, run_id: str, number: int) -> tuple[PendingResult, bool]:
    """Returns a run's request, and whether it is new."""
    facts, run = self._facts.get(run_id), self.queue.find(run_id)
    if facts is None or run is None:
      raise RequestError(
        f'run {run_id[:80]!r} is not open: its client vanished or finished, or the '
        'server was restarted. Create a client from its last saved state'
      )
    self._sessions.touch(facts['session_id'])
    request_id = f'{run_id}:{number}'
    if (known := self._pending.find(request_id)) is not None:
      return known, False
    if not run.next_number <= number < run.next_number + MAX_AHEAD:
      raise RequestError(
        f'request {number} of run {run_id} is out of order: {run.next_number} is next'
      )
    return self._pending.add(request_id, facts['session_id'], model_id=run_id), True

  # ---- runs

  def create_model(self, body: request_bodies.CreateModel) -> JsonObject:
    """Begins a training run."""
    session = self._sessions.touch(body.session_id)
    self._model.check_name(body.base_model)
    lora = body.lora_config
    if lora is None:
      raise RequestError('lora_config is missing: this server trains LoRA adapters')
    if not 1 <= lora.rank <= self._options.max_rank:
      raise RequestError(f'rank={lora.rank} must be from 1 to {self._options.max_rank}')
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
      raise RequestError('nothing would be trained: set train_attn, train_mlp or both')
    optimizer = check_optimizer(body.optimizer_config, self._options.dimuon)
    seed = uuid.uuid4().int % 2**31 if lora.seed is None else lora.seed
    if not 0 <= seed < 2**63:
      raise RequestError(f'seed={seed} must lie in 0 … 2**63 − 1')
    facts = {
      'rank': lora.rank,
      'seed': seed,
      'train_attn': lora.train_attn,
      'train_mlp': lora.train_mlp,
      'train_unembed': lora.train_unembed,
      'optimizer': optimizer,
      'user_metadata': request_bodies.check_metadata(body.user_metadata),
    }
    run_id = f'{body.session_id}:train:{body.model_seq_id}'

    async def create() -> JsonObject:
      layers = trained_layers(facts)
      adapters = await self._device_thread.run(
        row_adapters.init_adapters, self._model.config, lora.rank, seed, layers
      )
      await self._open(session, run_id, facts, TenantSnapshot(adapters))
      return {'model_id': run_id, 'type': 'create_model'}

    return self._start(f'{run_id}:0', body.session_id, create)

  async def _open(
    self,
    session: ClientSession,
    run_id: str,
    facts: JsonObject,
    snapshot: TenantSnapshot,
  ) -> None:
    if self._learner.num_free == 0:
      raise RequestError(
        f'all {self._options.max_tenants} places for training runs are taken; try '
        'again when another client has finished',
        SERVER,
      )
    if self._sessions.find(session.session_id) is not session:
      raise RequestError('the session has ended')
    tenant = await self._device_thread.run(self._learner.add, snapshot)
    now = time.time()
    record = {
      **facts,
      'session_id': session.session_id,
      'base_model': self._model.name,
      'created': now,
      'last_request': now,
    }
    self._store.save_run(run_id, record)
    self._facts[run_id] = record
    session.run_ids.append(run_id)
    self.queue.open(run_id, tenant)

  def close_run(self, run_id: str) -> None:
    """Frees a run's place; its checkpoints stay."""
    run = self.queue.find(run_id)
    if run is not None:
      self.queue.close(run_id)
      self._learner.remove(run.tenant)
      self._facts.pop(run_id, None)

  def unload_model(self, body: request_bodies.ModelBody) -> JsonObject:
    """Ends a training run."""
    self._run(body.model_id)

    async def unload() -> JsonObject:
      self.close_run(body.model_id)
      return {'model_id': body.model_id, 'type': 'unload_model'}

    owner = self._facts[body.model_id]['session_id']
    return self._start(f'{body.model_id}:unload', owner, unload)

  def _run(self, run_id: str) -> JsonObject:
    facts = self._facts.get(run_id) or self._store.find_run(run_id)
    if facts is None:
      raise RequestError(f'there is no run {run_id[:80]!r}')
    return facts

  def get_info(self, body: request_bodies.ModelBody) -> JsonObject:
    """Describes a run's model."""
    facts = self._run(body.model_id)
    return {
      'type': 'get_info',
      'model_data': {
        'arch': self._model.config.family,
        'model_name': self._model.name,
        'tokenizer_id': self._model.tokenizer_id,
      },
      'model_id': body.model_id,
      'optimizer_config': optimizer_config(facts),
      'is_lora': True,
      'lora_rank': facts['rank'],
      'model_name': self._model.name,
    }

  # ---- steps

  def forward_backward(self, body: ForwardBackwardMessage) -> JsonObject:
    """Runs data forward, and backward unless only forward is asked for."""
    result, is_new = self._numbered(body.model_id, body.seq_id)
    if not is_new:
      return self._answer(result)
    run_id, number = body.model_id, body.seq_id
    try:
      loss, rows = self._read_rows(body)
    except (RequestError, ValueError) as error:
      problem = error if isinstance(error, RequestError) else RequestError(str(error))
      self._reject(run_id, number, result, problem)
      return self._answer(result)
    backward = not body.forward_only
    if loss is None:
      self.queue.add_rows(run_id, number, result, rows, backward=backward)
      return self._answer(result)
    run = self.queue.find(run_id)
    assert run is not None  # it has just been found

    async def call() -> Any:
      return await self._device_thread.run(
        run_custom_loss, self._learner, run.tenant, loss, rows, backward=backward
      )

    self.queue.add_call(run_id, number, result, call)
    return self._answer(result)

  def _reject(
    self, run_id: str, number: int, result: PendingResult, error: RequestError
  ) -> None:
    """Fails a request in its turn, so that the requests after it are served."""

    async def call() -> JsonObject:
      raise error

    self.queue.add_call(run_id, number, result, call)

  def _read_rows(
    self, body: ForwardBackwardMessage
  ) -> tuple[CustomLoss | None, Sequence[TrainingRow]]:
    limits = self._options
    if not 1 <= len(body.data) <= limits.max_datums:
      raise RequestError(
        f'{len(body.data)} datums: send from 1 to {limits.max_datums} in a request'
      )
    custom, options = None, {}
    if body.loss == tenant_losses.CUSTOM:
      session = self._sessions.find(self._facts[body.model_id]['session_id'])
      loss_id = body.loss_config.get('loss_id')
      custom = session.losses.get(str(loss_id)) if session else None
      if custom is None:
        raise RequestError(f'this session has no custom loss {loss_id!r}')
    else:
      options = tenant_losses.check_loss(
        body.loss, body.loss_config, limits.stable_reinforce
      )
    sizes = {
      'vocab_size': self._model.config.vocab_size,
      'max_length': limits.max_length,
      'max_targets': limits.max_targets,
    }
    rows = []
    for i, datum in enumerate(body.data):
      try:
        row = request_bodies.training_row(datum, body.loss, options, **sizes)
        if custom is not None:
          custom.check(row)
        rows.append(row)
      except RequestError as error:
        raise RequestError(f'datum {i}: {error}') from error
    return custom, rows

  def optim_step(self, body: request_bodies.OptimStep) -> JsonObject:
    """Takes an optimizer step."""

    async def call() -> JsonObject:
      optimizer = self._run(body.model_id).get('optimizer', ADAMW)
      options = step_options(body, optimizer)
      tenant = self._tenant(body.model_id)
      if tenant.lost:
        raise RequestError(f'the gradients are lost: {tenant.lost}', SERVER)
      if tenant.has_dropped:  # a step with what is left would be another one
        await self._device_thread.run(self._learner.discard_gradients, tenant)
        tenant.has_dropped = False
        raise RequestError(
          'the gradients since the last step were dropped, as a request failed on the '
          'device: send the data of this step again',
          SERVER,
        )
      if not tenant.num_rows:
        raise RequestError('there are no gradients: call forward_backward before')
      is_muon = optimizer == DIMUON
      step = self._learner.muon_step if is_muon else self._learner.adam_step
      norm = await self._device_thread.run(step, tenant, options)
      if not math.isfinite(norm):
        raise RequestError('the gradient is not finite: the step was not taken')
      return {'metrics': {'grad_norm:mean': norm}}

    return self._queue_call(body.model_id, body.seq_id, call)

  def _tenant(self, run_id: str) -> Tenant:
    run = self.queue.find(run_id)
    if run is None:
      raise RequestError('the run was closed meanwhile')
    return run.tenant

  # ---- checkpoints

  def _checkpoint_facts(
    self, run_id: str, metadata: dict[str, str] | None
  ) -> JsonObject:
    facts = self._run(run_id)
    names = 'rank', 'train_attn', 'train_mlp', 'train_unembed', 'base_model'
    kept = {name: facts[name] for name in names}
    kept['optimizer'] = facts.get('optimizer', ADAMW)
    return {**kept, 'user_metadata': request_bodies.check_metadata(metadata)}

  async def _snapshot(self, run_id: str) -> TenantSnapshot:
    tenant = self._tenant(run_id)
    snapshot = await self._device_thread.run(self._learner.snapshot, tenant)
    if tenant.lost:
      raise RequestError(f'the run is lost: {tenant.lost}', SERVER)
    arrays = [x for pair in snapshot.adapters.values() for x in pair]
    if not all(np.isfinite(x).all() for x in arrays):
      raise RequestError('the weights are not finite: the run has diverged')
    return snapshot

  def save_weights(self, body: request_bodies.SaveWeights) -> JsonObject:
    """Saves a run's weights and optimizer state."""

    async def call() -> JsonObject:
      facts = self._checkpoint_facts(body.model_id, body.user_metadata)
      name = body.path or uuid.uuid4().hex
      path = await asyncio.to_thread(
        self._store.save,
        *(body.model_id, checkpoint_store.TRAINING, name),
        await self._snapshot(body.model_id),
        facts,
        overwrite=body.overwrite,
        ttl_seconds=body.ttl_seconds,
      )
      return {'path': path, 'type': 'save_weights'}

    return self._queue_call(body.model_id, body.seq_id, call)

  def save_for_sampler(self, body: request_bodies.SaveForSampler) -> JsonObject:
    """Saves a run's weights to sample from."""

    async def call() -> JsonObject:
      if body.kind != 'snapshot':
        raise RequestError(f"kind={body.kind!r} is not supported; use 'snapshot'")
      if body.path is None and body.sampling_session_seq_id is None:
        raise RequestError('path or sampling_session_seq_id is needed')
      facts = self._checkpoint_facts(body.model_id, body.user_metadata)
      snapshot = await self._snapshot(body.model_id)
      is_unnamed = body.path is None
      ttl = UNNAMED_SECONDS if is_unnamed else body.ttl_seconds
      name = (
        body.path or f'client-{body.sampling_session_seq_id}-{uuid.uuid4().hex[:8]}'
      )
      path = await asyncio.to_thread(
        self._store.save,
        *(body.model_id, checkpoint_store.SAMPLER, name),
        TenantSnapshot(snapshot.adapters, count=snapshot.count),
        facts,
        ttl_seconds=ttl,
      )
      answer: JsonObject = {'path': path, 'type': 'save_weights_for_sampler'}
      if is_unnamed:
        session = self._sessions.touch(self._facts[body.model_id]['session_id'])
        number = body.sampling_session_seq_id
        answer['sampling_session_id'] = self.add_sampler(session, number or 0, path)
        answer['path'] = None
      return answer

    return self._queue_call(body.model_id, body.seq_id, call)

  def add_sampler(self, session: ClientSession, number: int, path: str | None) -> str:
    """Adds a sampling session to a client's; returns its id.

    Args:
      session: The client's session.
      number: The sampling session's number in it.
      path: The checkpoint to sample from; None for the model itself.
    """
    sampler_id = f'{session.session_id}:sample:{number}'
    session.facts['samplers'][sampler_id] = path
    self._sessions.save(session)
    return sampler_id

  def save_external(self, body: request_bodies.SaveWeights) -> JsonObject:
    """Saves a run's adapters in the format of Hugging Face's PEFT."""

    async def call() -> JsonObject:
      if body.age_encryption_recipients:
        raise RequestError('age_encryption_recipients is not supported')
      facts = self._checkpoint_facts(body.model_id, body.user_metadata)
      snapshot = await self._snapshot(body.model_id)
      files = await asyncio.to_thread(peft_files, self._model, snapshot, facts)
      name = body.path or uuid.uuid4().hex
      path = await asyncio.to_thread(
        self._store.save,
        *(body.model_id, checkpoint_store.EXTERNAL, name, None, facts),
        ttl_seconds=body.ttl_seconds,
        files=files,
      )
      size = sum(map(len, files.values()))
      return {'path': path, 'size_bytes': size, 'type': 'save_weights_external'}

    return self._queue_call(body.model_id, body.seq_id, call)

  def load_weights(self, body: request_bodies.LoadWeights) -> JsonObject:
    """Loads a checkpoint into a run, or begins a run with it."""
    if body.model_id is not None and body.seq_id is not None:
      run_id = body.model_id

      async def load() -> JsonObject:
        record, snapshot = await self._read(body)
        tenant, facts = self._tenant(run_id), self._run(run_id)
        if body.optimizer:
          self._check_moments(body, record, facts.get('optimizer', ADAMW))
        if record['rank'] != tenant.rank:
          raise RequestError(
            f'{body.path} has rank {record["rank"]}, and the run rank {tenant.rank}'
          )
        await self._device_thread.run(self._learner.load, tenant, snapshot)
        return {'path': body.path, 'model_id': run_id, 'type': 'load_weights'}

      return self._queue_call(run_id, body.seq_id, load)
    if body.session_id is None or body.model_seq_id is None:
      raise RequestError(
        'model_id and seq_id, or session_id and model_seq_id are needed'
      )
    session = self._sessions.touch(body.session_id)
    optimizer = check_optimizer(body.optimizer_config, self._options.dimuon)
    self._model.check_name(body.base_model)
    run_id = f'{body.session_id}:train:{body.model_seq_id}'

    async def create() -> JsonObject:
      record, snapshot = await self._read(body)
      if record['rank'] > self._options.max_rank:
        raise RequestError(f'{body.path} has rank {record["rank"]}, which is too large')
      names = 'rank', 'train_attn', 'train_mlp', 'train_unembed'
      facts = {name: record[name] for name in names}
      facts['optimizer'] = optimizer
      if body.optimizer:
        if body.optimizer_config is not None:
          self._check_moments(body, record, optimizer)
        saved = optimizer_config(record)
        facts['optimizer'] = check_optimizer(saved, self._options.dimuon)
      facts['user_metadata'] = request_bodies.check_metadata(body.user_metadata)
      await self._open(session, run_id, facts, snapshot)
      return {'path': body.path, 'model_id': run_id, 'type': 'load_weights'}

    return self._start(f'{run_id}:0', body.session_id, create)

  def _check_moments(
    self, body: request_bodies.LoadWeights, record: JsonObject, optimizer: str
  ) -> None:
    saved = record.get('optimizer', ADAMW)
    if saved != optimizer:
      raise RequestError(
        f'{body.path} has the state of {saved}, and the optimizer of the run is '
        f'{optimizer}: load its weights alone'
      )

  async def _read(
    self, body: request_bodies.LoadWeights
  ) -> tuple[JsonObject, TenantSnapshot]:
    if body.weights_access_token:
      raise RequestError('weights_access_token is not supported: there is one key')
    record = self._store.find(body.path)
    snapshot = await asyncio.to_thread(
      self._store.load, body.path, moments=body.optimizer
    )
    sizes = row_adapters.layer_sizes(self._model.config)
    for name, (a, b) in snapshot.adapters.items():
      if name not in sizes or (a.shape[-2], b.shape[-1]) != sizes[name]:
        raise RequestError(f'{body.path} belongs to a model of another shape')
    return record, snapshot

  def create_custom_loss(self, body: request_bodies.CreateCustomLoss) -> JsonObject:
    """Stores a custom loss for a session."""
    session = self._sessions.touch(body.session_id)
    loss_id = f'{body.session_id}:loss:{body.custom_loss_seq_id}'

    async def create() -> JsonObject:
      session.losses[loss_id] = CustomLoss.parse(body)
      return {'loss_id': loss_id, 'type': 'create_custom_loss'}

    return self._start(loss_id, body.session_id, create)

  async def stop(self) -> None:
    """Ends the work after the step that is running."""
    await self.queue.stop()
