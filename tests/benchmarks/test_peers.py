"""The tables of `make bench-peers`, and that a peer that is lacking stops nothing."""

import sys

import pytest

from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers import shape


def figures(step: float, decode: float) -> dict[str, list[float]]:
  medians = {'step_s': [step, 2 * step], 'generate_s': [step / 4, step / 2]}
  medians |= {'train_s': [3 * step / 4, 3 * step / 2], 'decode_s': [decode] * 2}
  return medians | {'mib': [100.0, 200.0]}


def test_ratios_are_taken_by_round_and_held_against_the_aims():
  ours = figures(0.5, 0.4)
  theirs = {'trl': figures(1.0, 0.5), 'tunix': figures(0.8, 0.8)}
  vllm = {**figures(1.0, 1.6), 'step_s': []}
  results = {'peers': {'ours': ours, **theirs, 'vllm': vllm}, 'flops': [300e9] * 2}
  results |= {'size': 'toy'}
  lines = peers.judge(results)
  assert lines == [
    'jaxrl: step, of TRL, Hugging Face: 0.50, aim 0.45: missed',
    'jaxrl: memory, of TRL, Hugging Face: 1.00, aim 0.6: missed',
    'jaxrl: step, of Tunix: 0.62, aim 0.45: missed',
    'jaxrl: memory, of Tunix: 1.00, aim 0.6: missed',
    'jaxrl: decode, of the best, TRL, Hugging Face: 0.80, aim 0.45: missed',
  ]
  results['peers']['narrow'] = figures(0.4, 0.2)
  narrow = 'jaxrl, bf16 decode: decode, of the best, TRL, Hugging Face: 0.40'
  assert peers.judge(results)[-1] == f'{narrow}, aim 0.45: reached'
  del results['peers']['narrow']
  head, first, *_, last = peers.table(results)
  assert head[5] == 'ours/its'
  assert first[:6] == ['jaxrl', '0.750', '0.188', '0.562', '74%', '1.00']
  assert last[1:6] == ['–'] * 5 and last[8] == '0.25'


def test_a_peer_that_is_lacking_or_dies_is_left_out_with_its_reason(tmp_path):
  broken = tmp_path / 'python'
  broken.write_text('#!/bin/sh\necho no such module >&2\n')
  broken.chmod(0o755)
  names = {'trl': str(tmp_path / 'none'), 'tunix': str(broken)}
  results = peers.measure(list(names), names, 1)
  assert results['peers'] == {}
  assert 'make bench-peers' in results['failed']['trl']
  assert results['failed']['tunix'].endswith("'step': no such module")


def test_peers_as_installed_are_not_tuned(monkeypatch, tmp_path):
  monkeypatch.setattr(peers.process_env, 'tuned', lambda env: {**env, 'TUNED': '1'})
  monkeypatch.delenv('OMP_NUM_THREADS', raising=False)

  def variables(name, as_installed):
    setting = peers.Setting('mid', as_installed=as_installed)
    env = peers.environment(name, str(tmp_path), setting)
    assert env['PEER_SIZE'] == 'mid'
    return env.keys() & {'TUNED', 'OMP_NUM_THREADS'}

  assert not any(variables(name, True) for name in peers.OTHERS)
  assert all('TUNED' in variables(name, True) for name in (*peers.OWN, 'rates'))
  assert variables('trl', False) == {'TUNED', 'OMP_NUM_THREADS'}


def test_prompts_are_those_of_their_seed():
  rows = shape.prompts(3, 2, 2)
  assert rows == shape.prompts(3, 2, 2) and rows[0] == rows[1] != rows[2]
  assert {len(row) for row in rows} == {shape.PROMPT}
  assert all(0 < token < shape.MODEL['vocab_size'] for row in rows for token in row)


@pytest.mark.slow
@pytest.mark.extended
def test_this_package_runs_as_a_peer():
  results = peers.measure(['ours'], {'ours': sys.executable}, 1)
  assert not results['failed']
  ours = results['peers']['ours']
  assert 0 < ours['generate_s'][0] < ours['step_s'][0]
  assert ours['decode_s'][0] > 0 and results['flops'][0] > 1e9
