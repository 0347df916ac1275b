"""Runs of the debug config share rows and tokenizers, a second of computing each."""

import pytest


@pytest.fixture(scope='session', autouse=True)
def rows_are_drawn_once():
  """Draws the same rows of arithmetic once; each run gets copies that it may change."""
  from jaxrl.data import arithmetic

  draw, drawn = arithmetic._draw_distinct, {}

  def draw_once(rng, split, size, options):
    key = repr((rng.bit_generator.state, split, size, options))
    if key not in drawn:
      drawn[key] = draw(rng, split, size, options)
    return [dict(row) for row in drawn[key]]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(arithmetic, '_draw_distinct', draw_once)
    yield


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
