"""Choosing among implementations of a kernel."""

import logging

import jax
import pytest

from kernels import dispatch
from kernels.dispatch import choose, only_on, platform_of


def run():
  """Stands for an implementation."""


def candidates(platform):
  return {
    'mosaic': only_on('tpu', run, platform=platform),
    'cudnn': only_on('gpu', run, platform=platform),
    'chunked': run,
    'reference': run,
  }


@pytest.mark.parametrize(
  'platform, requested, name',
  [
    ('tpu', 'auto', 'mosaic'),
    ('gpu', 'auto', 'cudnn'),
    ('cpu', 'auto', 'chunked'),
    ('tpu', 'reference', 'reference'),
    ('cpu', 'reference', 'reference'),
  ],
)
def test_the_first_that_fits_is_taken(platform, requested, name):
  assert choose('k', candidates(platform), platform=platform, option=requested) == name


def test_each_choice_is_logged_once_with_its_reason(caplog):
  dispatch._log_choice.cache_clear()
  with caplog.at_level(logging.INFO, 'kernels'):
    for _ in range(3):
      choose('some_kernel', candidates('gpu'), platform='gpu')
    choose('some_kernel', candidates('cpu'), platform='cpu')
    choose('some_kernel', candidates('gpu'), platform='gpu', option='reference')
  assert [record.message for record in caplog.records] == [
    'some_kernel on gpu: cudnn (mosaic is for tpu, not gpu)',
    'some_kernel on cpu: chunked (mosaic is for tpu, not cpu; cudnn is for gpu, not '
    'cpu)',
    'some_kernel on gpu: reference (asked for)',
  ]


def test_what_cannot_be_is_refused_with_every_reason():
  with pytest.raises(ValueError, match="kernels='fast' is not one of auto, reference"):
    choose('k', candidates('cpu'), platform='cpu', option='fast')
  none = {'mosaic': 'is for tpu', 'reference': 'is not written'}
  with pytest.raises(ValueError, match=r'nothing can be used on cpu.*is for tpu'):
    choose('k', none, platform='cpu')
  with pytest.raises(ValueError, match=r'no reference to use on cpu.*is not written'):
    choose('k', none, platform='cpu', option='reference')


def test_platforms_go_by_one_name():
  assert platform_of('cuda') == platform_of('gpu') == 'gpu'
  assert platform_of('tpu') == 'tpu'
  assert platform_of(None) == jax.default_backend()
