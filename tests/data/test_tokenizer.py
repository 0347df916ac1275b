"""The trained tokenizer: exact round trips, ChatML, a true Hugging Face folder."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.tokenizer import END, PAD, START, load_tokenizer, train_tokenizer

TEXTS = [f'Tom has {i} apples and buys {i * 7} more. #### {i * 8}' for i in range(99)]
MESSAGES = [
  {'role': 'user', 'content': 'Tom has 12 apples.'},
  {'role': 'assistant', 'content': '#### 12'},
]


@pytest.fixture(scope='module')
def tokenizer():
  return train_tokenizer(TEXTS, 320)


def test_special_tokens(tokenizer):
  assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
  assert [tokenizer.convert_tokens_to_ids(t) for t in (PAD, START, END)] == [0, 1, 2]
  assert tokenizer.encode(END, add_special_tokens=False) == [2]
  assert 259 < len(tokenizer) <= 320


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer, text):
  text = text.replace(START, '').replace(END, '').replace(PAD, '')
  ids = tokenizer.encode(text, add_special_tokens=False)
  assert tokenizer.decode(ids) == text


def test_merges_make_text_shorter_and_digits_stay_single(tokenizer):
  assert len(tokenizer.encode('apples and buys')) < len('apples and buys') / 2
  assert len(tokenizer.encode('1234')) == 4


def test_chat_template(tokenizer):
  text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
  assert text == (
    '<|im_start|>user\nTom has 12 apples.<|im_end|>\n'
    '<|im_start|>assistant\n#### 12<|im_end|>\n'
  )
  prompt = tokenizer.apply_chat_template(
    MESSAGES[:1], tokenize=False, add_generation_prompt=True
  )
  assert text.startswith(prompt) and prompt.endswith('assistant\n')


def test_training_is_deterministic(tokenizer):
  assert train_tokenizer(TEXTS, 320).get_vocab() == tokenizer.get_vocab()


def test_saved_folder_gives_the_same_tokenizer(tokenizer, tmp_path):
  tokenizer.save_pretrained(tmp_path)
  loaded = load_tokenizer(tmp_path)
  text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
  assert loaded.encode(text) == tokenizer.encode(text)
  assert loaded.apply_chat_template(MESSAGES, tokenize=False) == text
  assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 0)
  assert loaded.decode(loaded.encode('a  b , c')) == 'a  b , c'


def test_too_small_a_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r'vocab_size=100 is too small.*259'):
    train_tokenizer(TEXTS, 100)


def test_missing_folders_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='absent'):
    load_tokenizer(tmp_path / 'absent')
  with pytest.raises(FileNotFoundError, match='holds no tokenizer'):
    load_tokenizer(tmp_path)


def test_a_word_of_megabytes_does_not_hold_up_training():
  """A tokenizer of such texts took hours: time grew with the square of a word."""
  texts = ['1+1=2 ' * 50, 'x' * 3_000_000, ' ' * 3_000_000, 'a b']
  cut = ['1+1=2 ' * 50, 'x' * 1000, ' ' * 1000, 'a b']
  trained, wanted = train_tokenizer(texts, 300), train_tokenizer(cut, 300)
  assert trained.get_vocab() == wanted.get_vocab()


def test_what_reads_gguf_files_is_loaded_when_it_is_used(monkeypatch):
  """With torch, which takes a second to import, and which tokenizers do not need."""
  monkeypatch.delitem(sys.modules, tokenizers.GGUF_MODULE, raising=False)
  tokenizers.postpone_torch()
  postponed = sys.modules[tokenizers.GGUF_MODULE]
  monkeypatch.setitem(sys.modules, tokenizers.GGUF_MODULE, postponed)
  assert not hasattr(postponed, '__path__')
  with pytest.raises(Exception, match=r'(?i)gguf'):
    postponed.load_gguf_checkpoint('absent.gguf')
  real = sys.modules[tokenizers.GGUF_MODULE]
  assert real is not postponed
  assert postponed.GGUF_TO_TRANSFORMERS_MAPPING is real.GGUF_TO_TRANSFORMERS_MAPPING
