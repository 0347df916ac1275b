"""Made tokenizers that write spaces, beginnings and rare letters in each usual way."""

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

START, END, PAD = '<|im_start|>', '<|im_end|>', '<pad>'
TEXTS = [
  *(f'user assistant Tom has {i} pens, and  Ann\n#### {i}' for i in range(40)),
  'system: the answer is [INST] yes [/INST] "no".\n\nfor x in y:\n  return x',
  'User: Is it so?\nAssistant: It is. user\nassistant\n',
]
BYTES = [f'<0x{i:02X}>' for i in range(256)]
# As GPT-4's and Qwen's tokenizers split words.
WORDS = (
  r'[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+'
  r'|\s+(?!\S)|\s+'
)


def _bpe(trainer_options: dict[str, Any] | None = None, **model: Any) -> Any:
  options = {'vocab_size': 900, 'show_progress': False, **(trainer_options or {})}
  return Tokenizer(models.BPE(**model)), trainers.BpeTrainer(**options)


def _byte_level(add_prefix_space: bool, *, words: str = '') -> Callable[[], Tokenizer]:
  def make() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer, trainer = _bpe({'initial_alphabet': alphabet})
    parts = [pre_tokenizers.Split(Regex(words), 'isolated')] if words else []
    level = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=not words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer

  return make


def _metaspace(
  scheme: str, *, split: bool = True, unigram: bool = False
) -> Callable[[], Tokenizer]:
  def make() -> Tokenizer:
    if unigram:
      tokenizer = Tokenizer(models.Unigram())
      trainer: Any = trainers.UnigramTrainer(
        vocab_size=700,
        show_progress=False,
        unk_token='<unk>',
        special_tokens=['<unk>', *BYTES],
        initial_alphabet=['\n', '\t'],
      )
    else:
      tokenizer, trainer = _bpe(
        {'special_tokens': ['<unk>', *BYTES]}, unk_token='<unk>', byte_fallback=True
      )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace('▁', scheme, split)
    tokenizer.decoder = decoders.Sequence(
      [decoders.ByteFallback(), decoders.Metaspace('▁', scheme, split), decoders.Fuse()]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if unigram:
      vocab = json.loads(tokenizer.to_str())['model']['vocab']
      tokenizer.model = models.Unigram([(t, p) for t, p in vocab], 0, True)
    return tokenizer

  return make


def _prepend() -> Tokenizer:
  """As Llama 2's and Mistral's."""
  tokenizer, trainer = _bpe(
    {'special_tokens': ['<unk>', *BYTES]},
    unk_token='<unk>',
    byte_fallback=True,
    fuse_unk=True,
  )
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace('▁', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  return tokenizer


def _replaced() -> Tokenizer:
  """As Gemma's: spaces are replaced, and nothing is put before a text."""
  tokenizer, trainer = _bpe(
    {'special_tokens': ['<unk>', *BYTES]}, unk_token='<unk>', byte_fallback=True
  )
  tokenizer.normalizer = normalizers.Replace(' ', '▁')
  tokenizer.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  return tokenizer


def _word_piece() -> Tokenizer:
  """As BERT's, which forgets spaces and line ends."""
  tokenizer = Tokenizer(models.WordPiece(unk_token='<unk>'))
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece()
  tokenizer.train_from_iterator(
    TEXTS,
    trainers.WordPieceTrainer(
      vocab_size=500, show_progress=False, special_tokens=['<unk>']
    ),
  )
  return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
  'byte level': _byte_level(False),
  'byte level, prefix space': _byte_level(True),
  'byte level, words': _byte_level(False, words=WORDS),
  'metaspace first': _metaspace('first'),
  'metaspace always': _metaspace('always'),
  'metaspace never': _metaspace('never'),
  'metaspace first, whole': _metaspace('first', split=False),
  'metaspace always, whole': _metaspace('always', split=False),
  'metaspace never, whole': _metaspace('never', split=False),
  'unigram first': _metaspace('first', unigram=True),
  'unigram always': _metaspace('always', unigram=True),
  'prepend': _prepend,
  'replaced': _replaced,
  'word piece': _word_piece,
}
FORGETFUL = ('word piece',)  # whose ids do not decode to the text


@functools.cache
def make_tokenizer(kind: str, token_flags: str = '') -> Any:
  """Returns a made tokenizer with tokens for the ends of turns.

  Args:
    kind: One of KINDS.
    token_flags: What holds of these tokens: 'rstrip', 'lstrip', 'normalized', or ''.
  """
  from transformers import PreTrainedTokenizerFast

  tokenizer = KINDS[kind]()
  flags = dict.fromkeys(token_flags.split(), True)
  tokenizer.add_special_tokens(
    [AddedToken(text, **{'normalized': False, **flags}) for text in (START, END)]
  )
  tokenizer.add_special_tokens([PAD])
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token=END,
    pad_token=PAD,
    clean_up_tokenization_spaces=False,
  )
