"""The bodies of the Tinker API's JSON requests, and what makes rows of its data.

Bodies are msgspec structs. Fields that are unknown are passed over, as newer clients
may send some, but not where they say how to train or to draw: there they would change
the result, and are refused by name, as is what this server cannot do.
"""

import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from jaxrl.options import JsonObject
from jaxrl.rollout.tinker import tenant_losses
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.proto_codec import DatumMessage, ProtoError, from_csr
from jaxrl.rollout.tinker.tenant_learner import TrainingRow

T = TypeVar('T')
_MAX_PROJECT = 200
_MAX_METADATA = 64 << 10  # bytes of JSON


class LoraBody(msgspec.Struct, forbid_unknown_fields=True):
  """Which adapters a run trains."""

  rank: int
  seed: int | None = None
  train_unembed: bool = True
  train_mlp: bool = True
  train_attn: bool = True


class CreateSession(msgspec.Struct):
  """Begins a client's session."""

  sdk_version: str
  tags: list[str] = []
  user_metadata: JsonObject | None = None
  project_id: str | None = None
  display_name: str | None = None


class SessionBody(msgspec.Struct):
  """Names a session."""

  session_id: str


class CreateModel(msgspec.Struct):
  """Begins a training run."""

  session_id: str
  model_seq_id: int
  base_model: str
  user_metadata: JsonObject | None = None
  lora_config: LoraBody | None = None
  optimizer_config: JsonObject | None = None


class ModelBody(msgspec.Struct):
  """Names a training run."""

  model_id: str


class AdamBody(msgspec.Struct, forbid_unknown_fields=True):
  """The hyperparameters of one step of AdamW."""

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0


class DimuonBody(msgspec.Struct, forbid_unknown_fields=True):
  """The hyperparameters of one step of Dimuon."""

  type: Literal['dimuon']
  learning_rate: float
  beta1: float = 0.9
  grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
  """Takes an optimizer step."""

  model_id: str
  seq_id: int
  adam_params: AdamBody | None = None
  optimizer_params: JsonObject | None = None


class SaveWeights(msgspec.Struct):
  """Saves a run's state, or weights to be exported."""

  model_id: str
  seq_id: int
  path: str | None = None
  ttl_seconds: int | None = None
  overwrite: bool = False
  user_metadata: dict[str, str] | None = None
  age_encryption_recipients: list[str] | None = None


class SaveForSampler(msgspec.Struct):
  """Saves weights to sample from, under a name or for one client."""

  model_id: str
  seq_id: int
  path: str | None = None
  sampling_session_seq_id: int | None = None
  kind: str = 'snapshot'
  ttl_seconds: int | None = None
  user_metadata: dict[str, str] | None = None


class LoadWeights(msgspec.Struct):
  """Loads a checkpoint into a run, or begins a run with it."""

  path: str
  optimizer: bool
  model_id: str | None = None
  seq_id: int | None = None
  session_id: str | None = None
  model_seq_id: int | None = None
  base_model: str | None = None
  user_metadata: JsonObject | None = None
  optimizer_config: JsonObject | None = None
  weights_access_token: str | None = None


class CreateSamplingSession(msgspec.Struct):
  """Begins to sample from a checkpoint or from the model itself."""

  session_id: str
  sampling_session_seq_id: int
  base_model: str | None = None
  model_path: str | None = None


class JoinSamplingSession(msgspec.Struct):
  """Adds a client to a sampling session."""

  sampling_session_id: str


class PromptChunk(msgspec.Struct):
  """A piece of a prompt; only text is taken."""

  type: str = 'encoded_text'
  tokens: list[int] = []


class PromptBody(msgspec.Struct):
  """A prompt in pieces."""

  chunks: list[PromptChunk]

  def read(self, vocab_size: int) -> np.ndarray:
    """Returns the prompt's token ids, int32.

    Args:
      vocab_size: The model's.

    Raises:
      RequestError: If there are none, or some are neither text nor tokens of the model.
    """
    for chunk in self.chunks:
      if chunk.type != 'encoded_text':
        raise RequestError(
          f'chunks of type {chunk.type!r} are not supported; send text'
        )
    tokens = [token for chunk in self.chunks for token in chunk.tokens]
    return check_tokens(np.asarray(tokens, np.int64), vocab_size, 'the prompt')


class TensorBody(msgspec.Struct):
  """A tensor as JSON."""

  data: list[float]
  dtype: str
  shape: list[int] | None = None
  sparse_crow_indices: list[int] | None = None
  sparse_col_indices: list[int] | None = None


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
  """How tokens are drawn."""

  max_tokens: int | None = None
  seed: int | None = None
  stop: str | list[str | int] | None = None
  temperature: float = 1.0
  top_k: int = -1
  top_p: float = 1.0


class SampleBody(msgspec.Struct):
  """Asks for samples."""

  prompt: PromptBody
  sampling_params: SamplingBody
  num_samples: int = 1
  base_model: str | None = None
  model_path: str | None = None
  sampling_session_id: str | None = None
  seq_id: int | None = None
  prompt_logprobs: bool | None = None
  topk_prompt_logprobs: int = 0
  topk_sample_logprobs: int = 0
  target_prompt_logprobs: TensorBody | None = None
  prompt_alt_tokens_k: int = 0
  prompt_logprobs_last_n: int | None = None
  record_stability_info: bool | None = None


class RetrieveFuture(msgspec.Struct):
  """Polls for one result."""

  request_id: str
  allow_metadata_only: bool = False


class PathBody(msgspec.Struct):
  """Names a checkpoint."""

  tinker_path: str


class TtlBody(msgspec.Struct):
  """Sets when a checkpoint expires."""

  ttl_seconds: int | None = None


class ProjectBody(msgspec.Struct):
  """Names a project."""

  project_id: str


class CopyBody(msgspec.Struct):
  """Copies a checkpoint to a session or to a project."""

  source_path: str
  session_id: str | None = None
  model_seq_id: int | None = None
  destination_project_id: str | None = None
  ttl_seconds: int | None = None
  weights_access_token: str | None = None


class SearchOwner(msgspec.Struct):
  """Whose sessions are searched."""

  type: Literal['own', 'accessible', 'user'] = 'own'
  owner_urns: list[str] = []


class StatusQuery(msgspec.Struct):
  """A status that sessions may have."""

  type: Literal['active', 'cancelled', 'failed', 'client_finished']
  reasons: list[str] | None = None

  def matches(self, status: JsonObject | None) -> bool:
    """Returns whether a session's status is one of these.

    Args:
      status: As the API shows it.
    """
    if status is None or status['type'] != self.type:
      return False
    return self.reasons is None or status['reason']['type'] in self.reasons


class SearchCursor(msgspec.Struct):
  """Where a page of a search ended."""

  last_created_at: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
  last_session_id: str


class SearchBody(msgspec.Struct):
  """Searches sessions."""

  session_id: str | None = None
  project_ids: list[str] | None = None
  user_metadata: dict[str, str] = {}
  display_name: str | None = None
  owner: SearchOwner = msgspec.field(default_factory=SearchOwner)
  statuses: list[StatusQuery] | None = None
  limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
  cursor: SearchCursor | None = None


class FinishReason(msgspec.Struct):
  """Why a session ends."""

  type: Literal['success', 'errored', 'interrupted'] = 'success'


class FinishSession(msgspec.Struct):
  """Ends a session."""

  reason: FinishReason | None = None
  detail: str | None = None


class CustomLossInput(msgspec.Struct):
  """An input of a custom loss."""

  name: str
  rank: int


class CustomLossNode(msgspec.Struct):
  """A node of a custom loss's graph."""

  op: str
  name: str
  target: str
  args: list[Any] = []
  kwargs: JsonObject = {}


class CustomLossGraph(msgspec.Struct):
  """The graph of a custom loss."""

  nodes: list[CustomLossNode]
  format: int = 1


class CreateCustomLoss(msgspec.Struct):
  """Stores a custom loss."""

  session_id: str
  custom_loss_seq_id: int
  name: str
  inputs: list[CustomLossInput]
  graph: CustomLossGraph


def parse_body(data: bytes, kind: type[T]) -> T:
  """Parses a JSON body.

  Args:
    data: The body.
    kind: One of the structs here.

  Raises:
    RequestError: If it is not valid; the message names the field.
  """
  try:
    return msgspec.json.decode(data or b'{}', type=kind)
  except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
    raise RequestError(f'the body is not valid: {str(error)[:300]}') from error


def convert_body(value: JsonObject, kind: type[T], what: str) -> T:
  """Makes a struct of a part of a body.

  Args:
    value: The part.
    kind: One of the structs here.
    what: The part's name, for the error.

  Raises:
    RequestError: If it is not valid; the message names the field.
  """
  try:
    return msgspec.convert(value, kind)
  except msgspec.ValidationError as error:
    raise RequestError(f'{what}: {str(error)[:300]}') from error


def check_metadata(value: JsonObject | None) -> dict[str, str] | None:
  """Returns metadata as the API shows it, if it is small.

  Args:
    value: What the client sent.
  """
  if value is None:
    return None
  if len(msgspec.json.encode(value)) > _MAX_METADATA:
    raise RequestError(f'user_metadata has more than {_MAX_METADATA} bytes')
  return {key: x if isinstance(x, str) else str(x) for key, x in value.items()}


def check_project(name: str | None) -> str | None:
  """Returns a project's name, if it can be one: it is a label, and nothing more.

  Args:
    name: What the client sent.
  """
  if name is not None and not 1 <= len(name) <= _MAX_PROJECT:
    raise RequestError(f'project_id must have from 1 to {_MAX_PROJECT} characters')
  return name


def check_tokens(tokens: np.ndarray, vocab_size: int, what: str) -> np.ndarray:
  """Returns token ids as int32.

  Args:
    tokens: Integers.
    vocab_size: The model's.
    what: What they are, for the error.

  Raises:
    RequestError: If there are none, or one is not a token of the model.
  """
  if not tokens.size:
    raise RequestError(f'{what} has no tokens')
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise RequestError(f'{what} has token ids outside 0 … {vocab_size - 1}')
  return tokens.astype(np.int32)


def read_targets(body: TensorBody, length: int, max_targets: int) -> np.ndarray:
  """Returns the ids whose prompt log-probs are asked for, −1 where none is.

  Args:
    body: The tensor.
    length: The prompt's.
    max_targets: The most ids of a position.

  Raises:
    RequestError: If it is not a matrix `[length − 1, K]` of ids.
  """
  shape = body.shape or []
  if body.dtype != 'int64' or len(shape) != 2 or shape[0] != length - 1:
    raise RequestError(
      f'target_prompt_logprobs must be int64 of shape [{length - 1}, K], not '
      f'{body.dtype} of {shape}'
    )
  if not 1 <= shape[1] <= max_targets:
    raise RequestError(f'target_prompt_logprobs may have up to {max_targets} columns')
  values = np.asarray(body.data, np.float64).astype(np.int64)
  if body.sparse_crow_indices is not None:
    starts = np.asarray(body.sparse_crow_indices, np.int64)
    columns = np.asarray(body.sparse_col_indices or [], np.int64)
    try:
      return from_csr(values, starts, columns, shape, -1)
    except ProtoError as error:
      raise RequestError(f'target_prompt_logprobs: {error}') from error
  if values.size != shape[0] * shape[1]:
    raise RequestError(f'target_prompt_logprobs has {values.size} values for {shape}')
  return values.reshape(shape)


def training_row(
  datum: DatumMessage,
  loss: str,
  options: dict[str, float],
  *,
  vocab_size: int,
  max_length: int,
  max_targets: int,
) -> TrainingRow:
  """Makes a row of a datum.

  Args:
    datum: The datum.
    loss: The loss; `tenant_losses.CUSTOM` reads any inputs.
    options: The loss's options.
    vocab_size: The model's.
    max_length: The most tokens.
    max_targets: The most targets of a position.

  Raises:
    RequestError: If it lacks something that the loss needs, or is too large.
  """
  if datum.other_chunk:
    raise RequestError(f'chunks of {datum.other_chunk} are not supported; send text')
  tokens = check_tokens(datum.tokens, vocab_size, 'model_input')
  if len(tokens) > max_length:
    raise RequestError(f'{len(tokens)} tokens are more than {max_length}')
  is_custom, inputs = loss == tenant_losses.CUSTOM, dict(datum.inputs)
  needed = tenant_losses.RL_INPUTS
  if is_custom or loss == tenant_losses.CROSS_ENTROPY:
    needed = ('target_tokens',)
  if missing := [name for name in needed if name not in inputs]:
    raise RequestError(f'{loss} needs {", ".join(missing)} in loss_fn_inputs')
  raw = inputs.pop('target_tokens')
  if raw.dtype.kind != 'i' or raw.ndim not in (1, 2) or len(raw) != len(tokens):
    raise RequestError(
      f'target_tokens must be int64 of shape [{len(tokens)}] or [{len(tokens)}, K], '
      f'not {raw.dtype} of {list(raw.shape)}'
    )
  targets = raw.reshape(len(tokens), -1)
  if not 1 <= targets.shape[1] <= max_targets:
    raise RequestError(f'target_tokens may have up to {max_targets} columns')
  is_flat = raw.ndim == 1
  takes_many = is_custom or loss == tenant_losses.CROSS_ENTROPY
  if not is_flat and not takes_many:
    raise RequestError(f'{loss} takes target_tokens of shape [{len(tokens)}]')
  targets = check_tokens(targets, vocab_size, 'target_tokens')
  if is_custom:
    return TrainingRow(tokens, targets, inputs=inputs, is_flat=is_flat)
  arrays = _loss_inputs(inputs, targets.shape, loss, options, is_flat=is_flat)
  return TrainingRow(tokens, targets, loss, options, arrays, is_flat)


def _loss_inputs(
  inputs: dict[str, np.ndarray],
  shape: tuple[int, ...],
  loss: str,
  options: dict[str, float],
  *,
  is_flat: bool,
) -> dict[str, np.ndarray]:
  known = {'weights'}
  if loss != tenant_losses.CROSS_ENTROPY:
    known |= {'logprobs', 'advantages'} | (options.keys() - {'beta'})
  if loss == 'gspo':
    known |= {'sequence_ratio_mask'}
  if unknown := sorted(inputs.keys() - known):
    raise RequestError(f'{loss} has no input {unknown[0]!r} in loss_fn_inputs')
  arrays = {}
  for name, value in inputs.items():
    wanted = shape if name == 'weights' and not is_flat else shape[:1]
    if value.shape != wanted:
      raise RequestError(
        f'{name} must be of shape {list(wanted)}, as target_tokens, not '
        f'{list(value.shape)}'
      )
    array = value.astype(np.float32)
    if not np.isfinite(array).all():
      raise RequestError(f'{name} has values that are not finite')
    arrays[name] = array.reshape(shape) if name == 'weights' else array
  return arrays
