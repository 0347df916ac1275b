"""Sampler endpoint: OpenAI's and Anthropic's APIs for the model and its checkpoints.

A request's `model` is the model's name, or the path of a checkpoint that was saved for
sampling, `tinker://RUN/sampler_weights/NAME`. Each gets a gateway of its own.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.rollout.engine.engine_base import EngineTraits
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.generation_request import ApiError
from jaxrl.rollout.gateway.http_server import GatewayServer
from jaxrl.rollout.gateway.request_cache import parse_strict_json
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.sampling_service import SamplingService
from jaxrl.rollout.tinker.tenant_engine import TenantEngine, TenantSampling
from jaxrl.rollout.tinker.tinker_model import TinkerModel
from jaxrl.types import Completion, Pixels, SamplingParams, TokenGenerator

MAX_GATEWAYS = 16


class SamplerEngine:
  """Draws with one checkpoint's adapters, as a rollout engine.

  Attributes:
    traits: Those of the engine.
  """

  traits = EngineTraits()

  def __init__(self, engine: TenantEngine, sampling: SamplingService, path: str | None):
    """Creates the engine of a checkpoint.

    Args:
      engine: Draws for all.
      sampling: Knows the checkpoints.
      path: The checkpoint; None for the model itself.
    """
    self._engine = engine
    self._name, self._load = sampling.weights_of(path)

  def _id(self, request_id: str) -> str:
    return f'{self._name}/{request_id}'

  async def generate(
    self,
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    images: Sequence[Pixels] = (),
  ) -> Completion:
    """Generates a completion; see `EngineBase.generate`."""
    fields = {x.name: getattr(sampling, x.name) for x in dataclasses.fields(sampling)}
    own = TenantSampling(**fields, adapters=self._name)
    async with self._engine.adapters(self._name, self._load):
      return await self._engine.generate(self._id(request_id), token_ids, own, images)

  async def progress(self, request_ids: Sequence[str]) -> dict[str, Completion]:
    """Returns what requests have generated so far; see `EngineBase.progress`."""
    by_id = {self._id(request_id): request_id for request_id in request_ids}
    found = await self._engine.progress(list(by_id))
    return {by_id[name]: completion for name, completion in found.items()}

  async def abort(self, request_id: str) -> None:
    """Ends a request; see `EngineBase.abort`."""
    await self._engine.abort(self._id(request_id))


class SamplerEndpoint:
  """Answers requests below /v1/."""

  def __init__(
    self,
    key: str,
    model: TinkerModel,
    engine: TenantEngine,
    tokenizer: Any,
    sampling: SamplingService,
    max_length: int,
  ):
    """Creates no gateway yet.

    Args:
      key: The key that clients send.
      model: The model.
      engine: Draws from it.
      tokenizer: Its tokenizer.
      sampling: Knows the checkpoints.
      max_length: Tokens of prompt and reply together.
    """
    self._key, self._model, self._engine = key, model, engine
    self._tokenizer, self._sampling, self._max_length = tokenizer, sampling, max_length
    self._gateways: collections.OrderedDict[str, GatewayServer] = (
      collections.OrderedDict()
    )

  async def answer(self, request: web.Request) -> web.StreamResponse:
    """Answers a request with the gateway of the model that it names.

    Args:
      request: The request, whose key is checked before anything of it is read.
    """
    front = self._gateway(self._model.name)

    async def dispatch(request: web.Request) -> web.StreamResponse:
      name: Any = self._model.name
      if request.method == 'POST':
        try:
          body = parse_strict_json(await front.read_body(request))
          name = (body.get('model') if isinstance(body, dict) else None) or name
        except ValueError:
          pass  # the gateway says what is wrong
      try:
        server = self._gateway(str(name))
      except RequestError as error:
        options = {'param': 'model', 'code': 'model_not_found'}
        raise ApiError(404, f'model: {error}'[:300], **options) from error
      return await server.answer(request)

    return await front.admit(request, dispatch)

  def _gateway(self, name: str) -> GatewayServer:
    path = name if name.startswith('tinker://') else None
    if path is None:
      self._model.check_name(name)
    self._sampling.check_path(path)
    key = self._sampling.weights_of(path)[0]
    server = self._gateways.pop(key, None)
    if server is None:
      try:
        chat = ChatTokenizer(self._tokenizer)
      except ValueError as error:
        raise RequestError(f'the model has no chat: {error}') from error
      # A gateway needs no more of an engine than these can do.
      engine: TokenGenerator = SamplerEngine(self._engine, self._sampling, path)
      gateway = Gateway(
        engine,
        chat,
        model=name,
        max_length=self._max_length,
        max_tokens=self._max_length,
        evict_idle=True,
        traits=SamplerEngine.traits,
      )
      server = GatewayServer(gateway, [self._key])
    self._gateways[key] = server
    if len(self._gateways) > MAX_GATEWAYS:
      self._gateways.popitem(last=False)
    return server
