"""vLLM samples as the learner scores, in every family, before and after an update."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.transport import FolderTransport
from tests.marks import extended
from tests.models.families import cases
from tests.rollout.vllm import family_cases, needs

pytestmark = [*needs.VLLM, pytest.mark.slow]
ROOT = pathlib.Path(__file__).parents[3]
# What the gate runs: biases, experts, sliding and latent attention.
GATE = ('qwen2', 'qwen3', 'qwen3-moe', 'gemma4', 'deepseek-v3')
LENGTHS, COUNT = (20, 7), 16  # of prompts, of which one exceeds the window; of samples


@pytest.fixture(scope='module')
def ask(tmp_path_factory):
  """Asks one process, which serves the models one after the other."""
  needs.prepare()
  log = tmp_path_factory.mktemp('vllm') / 'log'
  command = [sys.executable, '-m', 'tests.rollout.vllm.family_server']
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
  with (
    log.open('w') as errors,
    subprocess.Popen(command, cwd=ROOT, stderr=errors, **pipes) as process,
  ):

    def ask(**request):
      print(json.dumps(request), file=process.stdin, flush=True)
      line = process.stdout.readline()
      answer = json.loads(line) if line else {'error': log.read_text()[-2000:]}
      assert 'error' not in answer, answer['error']
      return answer

    yield ask
    process.stdin.close()


@jax.jit(static_argnums=0)
def score(model, params, rows, segment_ids):
  return model.policy_outputs(params, rows, segment_ids).logprobs


@pytest.mark.parametrize(
  'name',
  [name if name in GATE else extended(name) for name in family_cases.CASES],
)
def test_samples_have_the_learners_logprobs(name, ask, tmp_path):
  """The folder is read by vLLM, and a version arrives through a transport."""
  config, old, new = family_cases.make_case(name)
  huggingface.save(tmp_path / 'model', config, old)
  transport = FolderTransport(tmp_path / 'versions')
  VersionWriter(transport).publish(1, snapshot(new))
  prompts = [cases.tokens(length).tolist() for length in LENGTHS]
  answer = ask(
    folder=str(tmp_path / 'model'),
    address=str(transport.path),
    version=1,
    prompts=prompts,
    count=COUNT,
  )
  model, time = TransformerLM(config, unroll=1), np.arange(max(LENGTHS) + COUNT)
  for when, params in (('before', old), ('after', new)):
    ends = np.array(LENGTHS) + COUNT
    rows = np.zeros((len(prompts), len(time)), np.int32)
    for row, prompt, (tokens, _) in zip(rows, prompts, answer[when], strict=True):
      row[: len(prompt) + COUNT] = prompt + tokens
    wanted = np.asarray(score(model, params, rows, (time < ends[:, None]).astype(int)))
    for row, start, (_, logprobs) in zip(wanted, LENGTHS, answer[when], strict=True):
      np.testing.assert_allclose(logprobs, row[start : start + COUNT], atol=2e-4)
      assert np.ptp(logprobs) > 0.5
