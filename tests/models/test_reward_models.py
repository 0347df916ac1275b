"""Reward models: equal to transformers' sequence classifiers, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.rewards.reward_model import score_rows
from tests.marks import TORCH
from tests.models import small
from tests.models.test_huggingface import COMMON

pytestmark = TORCH
FAMILIES = {
  'Qwen2': {'tie_word_embeddings': False},
  'Qwen3': {'head_dim': 16},
  'Llama': {'head_dim': 16},
}


@pytest.fixture(scope='module', params=FAMILIES)
def classifier(request, tmp_path_factory):
  """A random classifier of transformers with one label, and its folder."""
  torch = pytest.importorskip('torch')
  import transformers

  family = request.param
  config = getattr(transformers, f'{family}Config')(
    **COMMON, **FAMILIES[family], num_labels=1, pad_token_id=0
  )
  torch.manual_seed(0)
  kind = getattr(transformers, f'{family}ForSequenceClassification')
  theirs = kind(config).float().eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  folder = tmp_path_factory.mktemp('scorer') / family
  theirs.save_pretrained(folder)
  return theirs, folder


def test_scores_equal_transformers(classifier):
  torch = pytest.importorskip('torch')
  theirs, folder = classifier
  config, params = huggingface.load_scorer(folder)
  lengths = np.array([1, 5, 11, 7])
  tokens = np.maximum(small.tokens(4, 11), 1)  # no padding within
  tokens[np.arange(11) >= lengths[:, None]] = 0
  with torch.no_grad():
    mask = torch.tensor(tokens != 0)
    wanted = theirs(torch.tensor(tokens, dtype=torch.long), attention_mask=mask).logits
  scores = score_rows(TransformerLM(config), params, tokens, lengths)
  assert np.ptp(scores) > 0.05  # they differ at all
  np.testing.assert_allclose(scores, wanted[:, 0].numpy(), atol=2e-5, rtol=2e-5)
  assert huggingface.pad_id(folder) == 0


def test_a_critics_head_scores_the_state_after_the_last_token(tmp_path):
  model, params = small.model_and_params(value_head=True)
  huggingface.save(tmp_path / 'critic', model.config, params)
  config, loaded = huggingface.load_scorer(tmp_path / 'critic')
  tokens, lengths = small.tokens(2, 8), np.array([8, 5])
  scores = score_rows(TransformerLM(config), loaded, tokens, lengths)
  # A token more, and the critic's own column speaks of the state before it.
  longer = np.pad(tokens, ((0, 0), (0, 1)))
  values = jax.jit(model.policy_outputs)(params, longer, jnp.ones_like(longer)).values
  np.testing.assert_allclose(scores, values[np.arange(2), lengths], atol=1e-5)
  assert huggingface.pad_id(tmp_path / 'critic') is None


def test_what_scores_nothing_is_refused(tmp_path, classifier):
  model, params = small.model_and_params()
  huggingface.save(tmp_path / 'plain', model.config, params)
  with pytest.raises(
    ValueError, match=r'plain is not a reward model: config\.json names no'
  ):
    huggingface.load_scorer(tmp_path / 'plain')
  folder = tmp_path / 'labels'
  folder.mkdir()
  source = classifier[1]
  (folder / 'config.json').write_text((source / 'config.json').read_text())
  tensors = load_file(source / 'model.safetensors')
  head = tensors.pop('score.weight')
  save_file(tensors, folder / 'model.safetensors')
  with pytest.raises(ValueError, match=r'missing tensor score\.weight'):
    huggingface.load_scorer(folder)
  save_file(
    {**tensors, 'score.weight': np.tile(head, (2, 1))}, folder / 'model.safetensors'
  )
  with pytest.raises(
    ValueError, match=r'shape \[2, 24\]; a reward model has one label'
  ):
    huggingface.load_scorer(folder)
  settings = json.loads((folder / 'config.json').read_text())
  assert settings['architectures'][0].endswith('ForSequenceClassification')
