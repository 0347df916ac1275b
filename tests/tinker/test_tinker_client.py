"""The official client against a server in a process of its own."""

import contextlib
import os
import urllib.request

import numpy as np
import pytest

from tests.tinker import tiny

tinker = pytest.importorskip('tinker')
torch = pytest.importorskip('torch')
types = tinker.types
pytestmark = pytest.mark.clients

TEXT = 'the cat sat on the mat and the dog ran to the park'
WAIT = 300


@pytest.fixture(scope='module')
def service(server):
  client = tinker.ServiceClient(base_url=server.url, api_key=tiny.KEY)
  yield client
  client.close('success').result(timeout=WAIT)


@pytest.fixture(scope='module')
def rest(server):
  return tinker.RestClient(base_url=server.url, api_key=tiny.KEY)


@contextlib.contextmanager
def trainer(service, checkpoint, **options):
  """A training client whose place is freed at the end."""
  options = {'rank': 4, 'seed': 1} | options
  client = service.create_lora_training_client(str(checkpoint), **options)
  client = client.result(timeout=WAIT)
  try:
    yield client
  finally:
    unload(client)


def unload(client):
  from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

  async def send():
    body = {'model_id': client.model_id}
    with client.holder.aclient(ClientConnectionPoolType.TRAIN) as http:
      await http.post('/api/v1/unload_model', body=body, cast_to=types.UntypedAPIFuture)

  client.holder.run_coroutine_threadsafe(send()).result(timeout=WAIT)


def tokens(client, text=TEXT):
  return client.get_tokenizer().encode(text)


def datum(ids, **inputs):
  values = inputs or {'weights': [1.0] * (len(ids) - 1)}
  loss_inputs = {'target_tokens': ids[1:], **values}
  return types.Datum(types.ModelInput.from_ints(ids[:-1]), loss_inputs)


def rl_datum(ids, seed=0):
  rng = np.random.default_rng(seed)
  size = len(ids) - 1
  old = rng.uniform(-7, -4, size).astype(np.float32)
  return datum(ids, logprobs=old, advantages=rng.normal(size=size).astype(np.float32))


def test_what_the_server_says_of_itself(service, rest, checkpoint):
  capabilities = rest.get_server_capabilities().result(timeout=WAIT)
  (model,) = capabilities.supported_models
  assert model.model_name == str(checkpoint) and model.max_context_length == 64
  session = rest.get_session(service.holder.get_session_id()).result(timeout=WAIT)
  assert session.training_run_ids == []
  assert service.holder.get_session_id() in rest.list_sessions().result(WAIT).sessions


def test_supervised_training_and_sampling(service, rest, checkpoint):
  with trainer(service, checkpoint) as client:
    info = client.get_info()
    assert info.lora_rank == 4 and info.model_data.model_name == str(checkpoint)
    ids = tokens(client)
    base = service.create_sampling_client(base_model=str(checkpoint)).result(WAIT)
    prompt = types.ModelInput.from_ints(ids)
    before = base.compute_logprobs(prompt).result(timeout=WAIT)
    assert before[0] is None and len(before) == len(ids)
    data, losses = [datum(ids), datum(ids[:5])], []
    for _ in range(6):
      result = client.forward_backward(data, 'cross_entropy')
      step = client.optim_step(types.AdamParams(learning_rate=0.02))
      losses.append(result.result(timeout=WAIT).metrics['loss:sum'])
      assert step.result(timeout=WAIT).metrics['grad_norm:mean'] > 0
    assert losses[-1] < 0.7 * losses[0]
    output = client.forward(data, 'cross_entropy').result(timeout=WAIT)
    sampler = client.save_weights_and_get_sampling_client().result(timeout=WAIT)
    scored = sampler.compute_logprobs(prompt).result(timeout=WAIT)
    np.testing.assert_allclose(
      scored[1:], output.loss_fn_outputs[0]['logprobs'].tolist(), atol=1e-4
    )
    assert base.compute_logprobs(prompt).result(timeout=WAIT) == before
    assert sum(scored[1:]) > sum(before[1:])


def test_samples(service, checkpoint):
  base = service.create_sampling_client(base_model=str(checkpoint)).result(WAIT)
  ids = base.get_tokenizer().encode(TEXT)[:6]
  prompt = types.ModelInput.from_ints(ids)

  def draw(number=2, **options):
    params = {'max_tokens': 6, 'seed': 3, 'stop': []} | options.pop('params', {})
    sampling = types.SamplingParams(**params)
    return base.sample(prompt, number, sampling, **options).result(timeout=WAIT)

  first = draw()
  assert [len(s.tokens) for s in first.sequences] == [6, 6]
  assert [s.stop_reason for s in first.sequences] == ['length', 'length']
  assert first.sequences[0].tokens != first.sequences[1].tokens
  assert len({s.sequence_id for s in first.sequences}) == 2
  again = draw()
  assert [s.tokens for s in again.sequences] == [s.tokens for s in first.sequences]
  assert draw(params={'seed': 4}).sequences[0].tokens != first.sequences[0].tokens
  stop = first.sequences[0].tokens[2]
  stopped = draw(1, params={'stop': [stop]}).sequences[0]
  assert stopped.stop_reason == 'stop' and stopped.tokens[-1] == stop
  greedy = [draw(1, params={'temperature': 0.0, 'seed': n}) for n in (1, 2)]
  assert greedy[0].sequences[0].tokens == greedy[1].sequences[0].tokens
  sequence = first.sequences[0]
  whole = types.ModelInput.from_ints(ids + sequence.tokens)
  scored = base.compute_logprobs(whole).result(timeout=WAIT)
  np.testing.assert_allclose(scored[len(ids) :], sequence.logprobs, atol=1e-4)


def test_what_is_said_of_a_prompt(service, checkpoint):
  base = service.create_sampling_client(base_model=str(checkpoint)).result(WAIT)
  ids = base.get_tokenizer().encode(TEXT)[:6]
  prompt, params = types.ModelInput.from_ints(ids), types.SamplingParams(max_tokens=2)
  wanted = torch.full((5, 2), -1, dtype=torch.int64)
  wanted[:, 0] = torch.tensor(ids[1:])
  result = base.sample(
    prompt,
    1,
    params,
    include_prompt_logprobs=True,
    topk_prompt_logprobs=3,
    topk_sample_logprobs=2,
    target_prompt_logprobs=types.TensorData.from_torch(wanted),
    prompt_alt_tokens_k=2,
  ).result(timeout=WAIT)
  logprobs = result.prompt_logprobs
  assert logprobs[0] is None and all(x < 0 for x in logprobs[1:])
  best = result.topk_prompt_logprobs
  assert best[0] is None and all(len(x) == 3 for x in best[1:])
  for own, (first, second, third) in zip(logprobs[1:], best[1:], strict=True):
    assert first[1] >= second[1] >= third[1] and own <= first[1] + 1e-6
  targets = result.target_prompt_logprobs.to_torch().numpy()
  np.testing.assert_allclose(targets[:, 0], logprobs[1:], atol=1e-6)
  assert not targets[:, 1].any()
  drawn = result.prompt_alt_tokens
  assert drawn.tokens.to_torch().shape == (5, 2)
  assert drawn.logprobs.to_torch().max() < 0
  sequence = result.sequences[0]
  assert [len(x) for x in sequence.topk_logprobs] == [2] * len(sequence.tokens)
  sparse = types.TensorData.from_torch_sparse(wanted, pad_value=-1)
  last = base.sample(
    prompt,
    1,
    params,
    include_prompt_logprobs=True,
    prompt_logprobs_last_n=2,
    target_prompt_logprobs=sparse,
  ).result(timeout=WAIT)
  assert last.prompt_logprobs[:4] == [None] * 4
  np.testing.assert_allclose(last.prompt_logprobs[4:], logprobs[4:], atol=1e-6)
  np.testing.assert_allclose(
    last.target_prompt_logprobs.to_torch().numpy(), targets, atol=1e-6
  )


@pytest.mark.parametrize(
  'loss, config',
  [
    ('importance_sampling', None),
    ('ppo', {'clip_low_threshold': 0.9, 'clip_high_threshold': 1.1}),
    ('cispo', {'clip_high_threshold': 2.0}),
    ('dro', {'beta': 0.1}),
    ('gspo', None),
  ],
)
def test_losses_of_reinforcement(service, checkpoint, loss, config):
  with trainer(service, checkpoint) as client:
    data = [rl_datum(tokens(client), i) for i in range(2)]
    result = client.forward_backward(data, loss, config)
    step = client.optim_step(types.AdamParams()).result(timeout=WAIT)
    assert np.isfinite(result.result(timeout=WAIT).metrics['loss:sum'])
    assert step.metrics['grad_norm:mean'] > 0


def test_stable_reinforce_with_the_provenance_of_samples(service, checkpoint):
  with trainer(service, checkpoint) as client:
    ids = tokens(client)[:5]
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
    params = types.SamplingParams(max_tokens=4, stop=[])
    prompt = types.ModelInput.from_ints(ids)
    reply = sampler.result(timeout=WAIT).sample(prompt, 1, params).result(timeout=WAIT)
    (sample,) = reply.sequences
    size, length = len(ids) - 1, len(sample.tokens)
    data = datum(
      ids + sample.tokens,
      logprobs=[0.0] * size + sample.logprobs,
      advantages=[0.0] * size + [1.0] * length,
    ).with_provenance(
      model_input=[
        types.PromptProvenanceSpan(sequence_id=sample.sequence_id, length=len(ids)),
        types.SampledProvenanceSpan(sequence_id=sample.sequence_id, length=length - 1),
      ],
      loss_fn_inputs=[
        types.PromptProvenanceSpan(
          sequence_id=sample.sequence_id, offset=1, length=size
        ),
        types.SampledProvenanceSpan(sequence_id=sample.sequence_id, length=length),
      ],
    )
    result = client.forward_backward([data], 'stable_reinforce').result(timeout=WAIT)
    # The policy is the one that sampled, so that every ratio is 1.
    np.testing.assert_allclose(result.metrics['loss:sum'], -length, rtol=1e-4)
    step = client.optim_step(types.AdamParams()).result(timeout=WAIT)
    assert step.metrics['grad_norm:mean'] > 0


def test_states_and_checkpoints(service, rest, checkpoint, tmp_path):
  with trainer(service, checkpoint) as client:
    ids = tokens(client)
    adam = types.AdamParams(learning_rate=0.01)

    def train(trained):
      trained.forward_backward([datum(ids)], 'cross_entropy')
      trained.optim_step(adam).result(timeout=WAIT)
      output = trained.forward([datum(ids)], 'cross_entropy').result(timeout=WAIT)
      return output.loss_fn_outputs[0]['logprobs'].tolist()

    train(client)
    state = client.save_state('one', user_metadata={'step': '1'}).result(timeout=WAIT)
    expected = train(client)
    resumed = service.create_training_client_from_state_with_optimizer(state.path)
    resumed = resumed.result(timeout=WAIT)
    assert train(resumed) == expected
    unload(resumed)
    fresh = service.create_training_client_from_state(state.path).result(timeout=WAIT)
    assert train(fresh) != expected  # Adam's moments are new
    unload(fresh)
    with pytest.raises(tinker.RequestFailedError, match='already'):
      client.save_state('one').result(timeout=WAIT)
    client.save_state('one', overwrite=True, ttl_seconds=3600).result(timeout=WAIT)
    saved = client.save_weights_for_sampler('named').result(timeout=WAIT)
    listed = rest.list_checkpoints(client.model_id).result(timeout=WAIT).checkpoints
    assert {x.checkpoint_id for x in listed} == {'weights/one', 'sampler_weights/named'}
    assert next(x for x in listed if x.checkpoint_type == 'training').expires_at
    known = rest.get_weights_info_by_tinker_path(saved.path).result(timeout=WAIT)
    assert known.lora_rank == 4 and known.base_model == str(checkpoint)
    run = rest.get_training_run(client.model_id).result(timeout=WAIT)
    assert run.last_checkpoint.tinker_path == state.path
    sampler = service.create_sampling_client(saved.path).result(timeout=WAIT)
    assert sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result(WAIT)
    assert rest.get_sampler(sampler._sampling_session_id).result(WAIT).model_path
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, 7200).result(timeout=WAIT)
    rest.delete_checkpoint_from_tinker_path(saved.path).result(timeout=WAIT)
    with pytest.raises(tinker.NotFoundError, match='no checkpoint'):
      service.create_sampling_client(saved.path).result(timeout=WAIT)
    assert rest.list_user_checkpoints().result(timeout=WAIT).cursor.total_count >= 1


def test_exported_adapters_are_those_of_peft(service, rest, checkpoint, tmp_path):
  safetensors = pytest.importorskip('safetensors.numpy')
  with trainer(service, checkpoint, train_mlp=False) as client:
    path = client.save_weights_external('final').result(timeout=WAIT).path
    links = rest.get_external_weights_urls(path).result(timeout=WAIT)
    for name, url in links.urls.items():
      urllib.request.urlretrieve(url, tmp_path / name)
    names = set(safetensors.load_file(tmp_path / 'adapter_model.safetensors'))
    prefix = 'base_model.model.'
    assert f'{prefix}model.layers.1.self_attn.q_proj.lora_A.weight' in names
    assert f'{prefix}lm_head.lora_B.weight' in names
    assert not any('mlp' in name for name in names)
    with pytest.raises(urllib.error.HTTPError, match='403'):
      urllib.request.urlopen(url.replace('/files/', '/files/0'))


def test_custom_losses_run_here_and_there(service, checkpoint):
  def loss(logprobs, advantages):
    ratio = torch.exp(logprobs + 5.0)
    value = -torch.minimum(ratio * advantages, torch.clamp(ratio, 0.5, 2.0)).sum()
    return value, {'custom/ratio:mean': ratio.mean()}

  def on_client(data, logprobs_list):
    values = [
      loss(own, one.loss_fn_inputs['advantages'].to_torch())[0]
      for one, own in zip(data, logprobs_list, strict=True)
    ]
    return torch.stack(values).sum(), {}

  handle = service.create_custom_loss(loss, {'logprobs': 1, 'advantages': 1})
  handle = handle.result(timeout=WAIT)
  assert handle.loss_id
  ends = []
  for function in (handle, on_client):
    with trainer(service, checkpoint) as client:
      ids = tokens(client)
      data = [
        datum(x, advantages=np.linspace(-1, 1, len(x) - 1, dtype=np.float32))
        for x in (ids, ids[:6])
      ]
      result = client.forward_backward_custom(data, function)
      step = client.optim_step(types.AdamParams()).result(timeout=WAIT)
      metrics = result.result(timeout=WAIT).metrics
      ends.append((metrics['loss:sum'], step.metrics['grad_norm:mean']))
  np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4)


def test_errors_come_in_the_categories_of_the_client(service, checkpoint):
  user = types.RequestErrorCategory.User
  with trainer(service, checkpoint) as client:
    ids = tokens(client)
    failing = {
      'no gradients': lambda: client.optim_step(types.AdamParams()),
      'no option': lambda: client.forward_backward([datum(ids)], 'ppo', {'clip': 1.0}),
      'no option .kl_coeff': lambda: client.forward_backward(
        [rl_datum(ids)], 'stable_reinforce', {'kl_coeff': 0.01}
      ),
      'needs logprobs': lambda: client.forward([datum(ids)], 'ppo'),
      'token ids outside': lambda: client.forward([datum([1, 10**6])], 'cross_entropy'),
      'more than 64': lambda: client.forward([datum([1] * 70)], 'cross_entropy'),
      'must be below 1': lambda: client.optim_step(types.AdamParams(beta1=1.0)),
    }
    for message, call in failing.items():
      with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        call().result(timeout=WAIT)
      assert caught.value.category is user
    huge = datum(ids, weights=[1e38] * (len(ids) - 1))
    client.forward_backward([huge], 'cross_entropy')
    with pytest.raises(tinker.RequestFailedError, match='not finite') as caught:
      client.optim_step(types.AdamParams()).result(timeout=WAIT)
    assert caught.value.category is user
    # The run goes on.
    client.forward_backward([datum(ids)], 'cross_entropy')
    assert client.optim_step(types.AdamParams()).result(timeout=WAIT).metrics
  with pytest.raises(tinker.BadRequestError, match='rank=99'):
    service.create_lora_training_client(str(checkpoint), rank=99).result(timeout=WAIT)
  with pytest.raises(tinker.NotFoundError, match='no model'):
    service.create_lora_training_client('other/model').result(timeout=WAIT)


def test_dimuon_with_a_state_of_its_own(service, rest, checkpoint):
  """Steps of Muon, beside a run of AdamW, and again from its state."""
  user = types.RequestErrorCategory.User
  muon, adam = types.DimuonParams(learning_rate=0.05), types.AdamParams()
  dimuon = {'optimizer': types.DimuonOptimizerConfig()}

  def failing(call, message):
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
      call.result(timeout=WAIT)
    assert caught.value.category is user

  with (
    trainer(service, checkpoint) as other,
    trainer(service, checkpoint, **dimuon) as client,
  ):
    assert client.get_info().optimizer_config.type == 'dimuon'
    data, losses = [datum(tokens(client))], []
    for _ in range(6):
      result = client.forward_backward(data, 'cross_entropy')
      client.optim_step(muon)
      losses.append(result.result(timeout=WAIT).metrics['loss:sum'])
    assert losses[-1] < 0.7 * losses[0]
    failing(client.optim_step(adam), 'of this run is dimuon')
    failing(other.optim_step(muon), 'of this run is adamw')
    path = client.save_state('muon').result(timeout=WAIT).path
    info = rest.get_weights_info_by_tinker_path(path).result(timeout=WAIT)
    assert info.optimizer_config.type == 'dimuon'
    failing(other.load_state_with_optimizer(path), 'load its weights alone')
    make = service.create_training_client_from_state_with_optimizer(path)
    again = make.result(timeout=WAIT)
    ends = []
    for one in (client, again):
      one.forward_backward(data, 'cross_entropy')
      one.optim_step(muon)
      output = one.forward(data, 'cross_entropy').result(timeout=WAIT)
      ends.append(output.loss_fn_outputs[0]['logprobs'].tolist())
    unload(again)
  assert ends[0] == ends[1]


def test_places_are_freed(service, checkpoint):
  with contextlib.ExitStack() as stack:
    for _ in range(3):
      stack.enter_context(trainer(service, checkpoint))
    with pytest.raises(tinker.RequestFailedError, match='places') as caught:
      service.create_lora_training_client(str(checkpoint), rank=4).result(timeout=WAIT)
    assert caught.value.category is types.RequestErrorCategory.Server
  with trainer(service, checkpoint) as client:
    assert client.model_id


def test_tenants_at_the_same_time_get_what_each_gets_alone(service, checkpoint):
  adam = types.AdamParams(learning_rate=0.01)

  def start(client, seed):
    ids = tokens(client)
    futures = []
    for step in range(3):
      data = [datum(ids[i : i + 6 + seed]) for i in range(3 + step)]
      futures.append(client.forward_backward(data, 'cross_entropy'))
      client.optim_step(adam)
    futures.append(client.forward([datum(ids)], 'cross_entropy'))
    return futures

  def outputs(futures):
    results = [future.result(timeout=WAIT) for future in futures]
    return [[x['logprobs'].tolist() for x in r.loss_fn_outputs] for r in results]

  with trainer(service, checkpoint, seed=5, rank=4) as client:
    alone = outputs(start(client, 1))
  with (
    trainer(service, checkpoint, seed=9, rank=8) as other,
    trainer(service, checkpoint, seed=5, rank=4) as client,
  ):
    futures = start(other, 0), start(client, 1)
    assert outputs(futures[1]) == alone
    outputs(futures[0])


def test_a_wrong_key_is_refused(server):
  with pytest.raises(tinker.AuthenticationError):
    other = tinker.ServiceClient(base_url=server.url, api_key='tml-another')
    other.create_sampling_client(base_model='any').result(timeout=WAIT)
  with pytest.raises(urllib.error.HTTPError, match='401'):
    urllib.request.urlopen(f'{server.url}/api/v1/healthz')
  assert os.environ.get('TINKER_API_KEY') is None


def test_openai_s_client_samples_from_a_checkpoint(service, server, checkpoint):
  openai = pytest.importorskip('openai')
  chat = openai.OpenAI(base_url=f'{server.url}/v1', api_key=tiny.KEY)
  with trainer(service, checkpoint) as client:
    path = client.save_weights_for_sampler('chat').result(timeout=WAIT).path
  for model in (str(checkpoint), path):
    messages = [{'role': 'user', 'content': 'the cat'}]
    reply = chat.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert reply.model == model and reply.usage.completion_tokens <= 4
  with pytest.raises(openai.NotFoundError):
    chat.completions.create(model='tinker://a/sampler_weights/b', prompt='x')
  with pytest.raises(openai.AuthenticationError):
    openai.OpenAI(base_url=f'{server.url}/v1', api_key='no').models.list()
