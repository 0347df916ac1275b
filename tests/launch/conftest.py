"""Runs of the debug config train one tokenizer, half a second of computing each."""

import pytest


@pytest.fixture(scope='session', autouse=True)
def tokenizers_are_trained_once():
  """Trains one tokenizer for each set of texts; a run saves it and loads its own."""
  from jaxrl import model_loading

  train, trained = model_loading.train_tokenizer, {}

  def train_once(texts, vocab_size, **options):
    key = tuple(texts), vocab_size, *options.items()
    if key not in trained:
      trained[key] = train(key[0], vocab_size, **options)
    return trained[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(model_loading, 'train_tokenizer', train_once)
    yield
