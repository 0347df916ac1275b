"""Custom losses: graphs of allowed operations, and those of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.tinker import request_bodies
from jaxrl.rollout.tinker.custom_losses import CustomLoss
from jaxrl.rollout.tinker.pending_results import RequestError

REF = [{'ref': 'logprobs'}]


def node(op, name, target, *args, **kwargs):
  return {
    'op': op,
    'name': name,
    'target': target,
    'args': list(args),
    'kwargs': kwargs,
  }


def make(*nodes, output=None, ranks=(('logprobs', 1), ('advantages', 1))):
  inputs = [{'name': name, 'rank': rank} for name, rank in ranks]
  places = [node('placeholder', name, name) for name, _ in ranks]
  output = {'tuple': [{'ref': 'loss'}, {'dict': {}}]} if output is None else output
  nodes = [*places, *nodes, node('output', 'output', 'output', output)]
  body = {
    'session_id': 's',
    'custom_loss_seq_id': 0,
    'name': 'mine',
    'inputs': inputs,
    'graph': {'nodes': nodes},
  }
  return CustomLoss.parse(
    request_bodies.msgspec.convert(body, request_bodies.CreateCustomLoss)
  )


def test_a_graph_computes_what_it_says():
  loss = make(
    node('call_function', 'ratio', 'torch.exp', *REF),
    node('call_function', 'low', 'torch.clamp', {'ref': 'ratio'}, 0.5, max=2.0),
    node(
      'call_function', 'both', 'operator.mul', {'ref': 'low'}, {'ref': 'advantages'}
    ),
    node('call_method', 'total', 'sum', {'ref': 'both'}),
    node('call_function', 'loss', 'operator.neg', {'ref': 'total'}),
    output={
      'tuple': [{'ref': 'loss'}, {'dict': {'custom/total:sum': {'ref': 'total'}}}]
    },
  )
  logprobs, advantages = jnp.array([-1.0, 0.2, 3.0]), jnp.array([1.0, -2.0, 0.5])

  def plain(logprobs):
    return -jnp.sum(jnp.clip(jnp.exp(logprobs), 0.5, 2.0) * advantages)

  gradient = jax.grad(lambda x: loss.evaluate(x, advantages)[0])(logprobs)
  np.testing.assert_allclose(gradient, jax.grad(plain)(logprobs), atol=1e-6)
  value, metrics = loss.evaluate(logprobs, advantages)
  np.testing.assert_allclose(value, plain(logprobs), rtol=1e-6)
  np.testing.assert_allclose(metrics['custom/total:sum'], -plain(logprobs), rtol=1e-6)


@pytest.mark.parametrize(
  'bad, message',
  [
    (node('call_function', 'loss', 'os.system', 'ls'), 'may not call'),
    (node('call_function', 'loss', 'torch.load', 'file'), 'may not call'),
    (node('call_function', 'loss', 'builtins.eval', '1'), 'may not call'),
    (node('call_function', 'loss', 'getattr', *REF, '__class__'), 'may not read'),
    (node('call_method', 'loss', '__reduce__', *REF), 'may not use'),
    (node('call_method', 'loss', 'tolist', *REF), 'may not use'),
    (node('call_module', 'loss', 'linear', *REF), 'may not use'),
    (node('get_attr', 'loss', 'weight'), 'may not use'),
    (node('call_function', 'loss', 'torch.exp', {'ref': 'later'}), 'not valid'),
    (node('call_function', 'loss', 'torch.exp', {'eval': '1'}), 'not valid'),
    (node('call_function', 'loss', 'torch.exp'), 'fails at torch.exp'),
    (node('call_function', 'loss', 'torch.exp', *REF), 'must return a scalar'),
    (node('call_method', 'loss', 'expand', *REF, 100_000, 100_000, 2), 'more than'),
    (node('placeholder', 'loss', 'secret'), 'unknown input'),
  ],
)
def test_other_operations_are_refused(bad, message):
  with pytest.raises(RequestError, match=message):
    make(bad)


def test_inputs_are_checked():
  with pytest.raises(RequestError, match='logprobs first'):
    make(ranks=(('advantages', 1),))
  with pytest.raises(RequestError, match='rank 0, 1 or 2'):
    make(ranks=(('logprobs', 3),))
  total = node('call_method', 'loss', 'sum', *REF)
  output = {'tuple': [{'ref': 'loss'}, {'dict': {'loss:sum': {'ref': 'loss'}}}]}
  with pytest.raises(RequestError, match='metric'):
    make(total, output=output)
  with pytest.raises(RequestError, match='from 1 to'):
    make(*[total] * 600)


@pytest.mark.clients
def test_traced_losses_compute_what_torch_does():
  pytest.importorskip('tinker')
  torch = pytest.importorskip('torch')
  from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

  def ppo(logprobs, old, advantages):
    d = (logprobs - old).clamp(-20, 20)
    ratio = torch.exp(d)
    clipped = torch.where(ratio > 1.2, torch.full_like(ratio, 1.2), ratio)
    weight = torch.sigmoid(ratio.detach()) * torch.nn.functional.softplus(advantages)
    value = -(torch.minimum(ratio * advantages, clipped * advantages) * weight)
    loss = value[1:].sum() / value.shape[0] + 0.1 * d.pow(2).mean() ** 0.5
    return loss, {'custom/ratio:mean': ratio.mean()}

  ranks = {'logprobs': 1, 'old': 1, 'advantages': 1}
  handle = trace_loss(ppo, ranks, 'session')
  body = {
    'session_id': 's',
    'custom_loss_seq_id': 0,
    'name': 'ppo',
    'inputs': [{'name': x.name, 'rank': x.rank} for x in handle.inputs],
    'graph': encode_graph(handle).model_dump(),
  }
  loss = CustomLoss.parse(
    request_bodies.msgspec.convert(body, request_bodies.CreateCustomLoss)
  )
  rng = np.random.default_rng(0)
  arrays = [rng.normal(size=9).astype(np.float32) for _ in ranks]
  own, gradient = jax.value_and_grad(lambda *x: loss.evaluate(*x)[0])(*arrays)
  tensors = [torch.tensor(x) for x in arrays]
  tensors[0].requires_grad_(True)
  expected, _ = ppo(*tensors)
  expected.backward()
  np.testing.assert_allclose(own, expected.item(), rtol=1e-5)
  np.testing.assert_allclose(gradient, tensors[0].grad.numpy(), atol=1e-6)
