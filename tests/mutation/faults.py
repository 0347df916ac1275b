"""Faults to plant: one line of source each, and the tests that should notice.

`before` occurs exactly once in the Python files below `jaxrl/`; a fault is therefore
found wherever its line has moved to. `tests` are the names of test files, anywhere
below `tests/`, that run first; the rest of the fast suite runs only when they pass.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
  """One wrong line.

  Attributes:
    area: The part of the library that is hurt: functional, training, rollout, weights
      or data.
    before: The text to replace; it occurs once in the source.
    after: What it becomes.
    tests: Stems of the test files to run first.
  """

  area: str
  before: str
  after: str
  tests: tuple[str, ...]


def _faults(area: str, *rows: tuple[str, str, str]) -> list[Fault]:
  return [
    Fault(area, before, after, tuple(names.split())) for before, after, names in rows
  ]


FUNCTIONAL = _faults(
  'functional',
  (
    'return m / jnp.maximum(jnp.sum(m), 1)',
    'return m / m.size',
    'test_aggregation',
  ),
  (
    'return m / (rows * jnp.maximum(tokens, 1))',
    'return m / jnp.maximum(tokens, 1)',
    'test_aggregation',
  ),
  (
    'return coef * 0.5 * jnp.square(logprobs - ref_logprobs)',
    'return coef * jnp.square(logprobs - ref_logprobs)',
    'test_losses',
  ),
  (
    'return coef * _excess(ref_logprobs - logprobs)',
    'return coef * _excess(logprobs - ref_logprobs)',
    'test_losses',
  ),
  (
    'ratio = jnp.clip(clipped_exp(logprobs - old_logprobs), 0, 2)',
    'ratio = jnp.clip(clipped_exp(old_logprobs - logprobs), 0, 2)',
    'test_losses',
  ),
  (
    'return -coef * entropy\n',
    'return coef * entropy\n',
    'test_shaping_and_entropy',
  ),
  (
    'clipped = -a * jnp.clip(r, 1 - clip_low, 1 + clip_high)',
    'clipped = -a * jnp.clip(r, 1 - clip_high, 1 + clip_low)',
    'test_losses',
  ),
  (
    'ceiling = jnp.where(a < 0, -dual_clip * a, jnp.inf)',
    'ceiling = jnp.where(a > 0, dual_clip * a, jnp.inf)',
    'test_losses',
  ),
  (
    'tau = jnp.where(a > 0, tau_positive, tau_negative)',
    'tau = jnp.where(a > 0, tau_negative, tau_positive)',
    'test_known_faults',
  ),
  (
    'mean = p - jax.lax.stop_gradient(p) + jax.lax.stop_gradient(mean)',
    'mean = p - jax.lax.stop_gradient(p) + mean',
    'test_losses',
  ),
  (
    'loss = loss - label_smoothing * jax.nn.log_sigmoid(-x)',
    'loss = loss - label_smoothing * jax.nn.log_sigmoid(x)',
    'test_preference',
  ),
  (
    'return _pair_loss(jnp.square(x - 1 / (2 * beta)), x, pair_ids)',
    'return _pair_loss(jnp.square(x - 1 / beta), x, pair_ids)',
    'test_preference',
  ),
  (
    'loss = 0.5 * (_kl(t, m) + _kl(s, m))',
    'loss = 0.5 * (_kl(m, t) + _kl(m, s))',
    'test_losses',
  ),
  (
    'others = (returns - stats.mean) * n / jnp.maximum(n - 1, 1)',
    'others = returns - stats.mean',
    'test_advantages',
  ),
  (
    'advantage = reward + gamma * next_value - value + gamma * lam * next_advantage',
    'advantage = reward + gamma * next_value - value + lam * next_advantage',
    'test_advantages',
  ),
  (
    'total = jnp.where(action, reward + gamma * carry[0], carry[0])',
    'total = reward + gamma * carry[0]',
    'test_advantages',
  ),
  (
    'capped = jnp.where(mask, jnp.minimum(w, cap), 0)',
    'capped = jnp.where(mask, jnp.maximum(w, cap), 0)',
    'test_corrections',
  ),
  (
    'weights = jnp.where(outside, 0, jnp.where(mask, w, 0))',
    'weights = jnp.where(outside, 1, jnp.where(mask, w, 0))',
    'test_corrections',
  ),
  (
    'fall = valley + (peak - valley) * 0.5 * (1 + jnp.cos(jnp.pi * share))',
    'fall = valley + (peak - valley) * 0.5 * (1 - jnp.cos(jnp.pi * share))',
    'test_losses',
  ),
  (
    'over = lengths - (max_length - cache)',
    'over = lengths - max_length',
    'test_shaping',
  ),
)

TRAINING = _faults(
  'training',
  (
    'return [rows[ids == ids[i]] for i in np.sort(first)]',
    'return [rows[ids == ids[i]] for i in first]',
    'test_minibatches test_batch_shapes',
  ),
  (
    'order = np.random.default_rng([seed, step, epoch]).permutation(len(',
    'order = np.random.default_rng([seed, epoch]).permutation(len(',
    'test_minibatches test_batch_shapes',
  ),
  (
    'micro = num_assigned[mini].index(min(num_assigned[mini]))',
    'micro = num_assigned[mini].index(max(num_assigned[mini]))',
    'test_minibatches test_batch_shapes',
  ),
  (
    'scale = jnp.where(norm > limit, limit / norm, 1.0)',
    'scale = jnp.where(norm > limit, 1.0 / norm, 1.0)',
    'test_optimizers',
  ),
  (
    'return self.learning_rate * (step + 1) / self.warmup_steps',
    'return self.learning_rate * step / self.warmup_steps',
    'test_optimizers',
  ),
  (
    'return self.learning_rate * (final + (1 - final) * remaining)',
    'return self.learning_rate * (1 - final) * remaining',
    'test_optimizers',
  ),
  (
    'scale, optax.add_decayed_weights(',
    'optax.add_decayed_weights(',
    'test_optimizers test_component_states',
  ),
  (
    'high = ((bits + noise) >> 16).astype(jnp.uint16)',
    'high = (bits >> 16).astype(jnp.uint16)',
    'test_optimizers test_component_states',
  ),
  (
    'sampled = mask & ~batch.expert_mask[:, None]',
    'sampled = mask',
    'test_train_step test_kl_penalty test_offline_rows',
  ),
  (
    "changed['action_mask'] = mask & result.keep",
    "changed['action_mask'] = mask",
    'test_train_step test_learner',
  ),
  (
    'return jnp.where(sampled, penalty, 0)',
    'return penalty',
    'test_kl_penalty test_train_step',
  ),
  (
    "token = weights['rollout' if 'expert_mask' in",
    "token = weights['mean' if 'expert_mask' in",
    'test_train_step test_offline_rows test_learner',
  ),
  (
    'share = 1.0 if metric.ndim else 1.0 / num_micro_batches',
    'share = 1.0',
    'test_train_step test_invariance test_whole_batch',
  ),
  (
    'too_old = sampled & (host_batch.weights_version < limit.oldest_allowed(step))',
    'too_old = sampled & (host_batch.weights_version <= limit.oldest_allowed(step))',
    'test_staleness',
  ),
  (
    'target = jnp.where(rows < 0, num_rows, rows)  # beyond',
    'target = jnp.maximum(rows, 0)  # beyond',
    'test_packing test_invariance test_batch_shapes',
  ),
  (
    "selected['mask'] &= is_row[:, None]",
    "selected['mask'] &= True",
    'test_whole_batch',
  ),
  (
    'is_missing = is_sampled & ~(routed >= 0).any(axis=(1, 2, 3))',
    'is_missing = is_sampled & (routed >= 0).any(axis=(1, 2, 3))',
    'test_router_replay',
  ),
  (
    'if step in self._steps():',
    'if False:',
    'test_checkpointing',
  ),
  (
    'values[is_token] = np.concatenate([getattr(row, name) for row in rows])',
    'values[is_token] = np.concatenate([getattr(row, name) for row in rows[::-1]])',
    'test_batch_builder',
  ),
  (
    'ids[i, : len(row.tokens)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)',
    'ids[i, : len(row.tokens)] = np.repeat(np.arange(len(sizes)), sizes)',
    'test_packing',
  ),
)

ROLLOUT = _faults(
  'rollout',
  (
    'rewards[turn.stop - 1] += turn.reward',
    'rewards[turn.start] += turn.reward',
    'test_packed_turns_loss test_env_manager',
  ),
  (
    'mask[turn.start : turn.stop] = True',
    'mask[turn.start : turn.stop - 1] = True',
    'test_packed_turns_loss test_env_manager',
  ),
  (
    'temperature=0.0 if lease.greedy else self._sampling.temperature',
    'temperature=self._sampling.temperature',
    'test_env_manager',
  ),
  (
    'seed = fold_seed(self._base_seed, cache.seed, lease.sample_index, turn, 0)',
    'seed = fold_seed(self._base_seed, cache.seed, lease.sample_index, 0)',
    'test_env_manager',
  ),
  (
    'elif truncated or len(cache.turns) >= self.max_steps:',
    'elif truncated or len(cache.turns) > self.max_steps:',
    'test_env_manager',
  ),
  (
    'return math.ceil(round((1 + self.async_ratio) * self.num_groups, 6))',
    'return math.ceil(round((2 + self.async_ratio) * self.num_groups, 6))',
    'test_group_queue test_async',
  ),
  (
    'oldest_step = step - math.ceil(self.async_ratio)',
    'oldest_step = step - math.ceil(self.async_ratio) - 1',
    'test_group_queue test_async',
  ),
  (
    'candidates = sorted([*self._active, *self._ready]) if self._in_order else ready',
    'candidates = ready',
    'test_group_queue test_async',
  ),
  (
    'if deadline > now:',
    'if deadline < now:',
    'test_group_queue',
  ),
  (
    "'pending': sorted([*self._active, *self._ready]),",
    "'pending': sorted(self._active),",
    'test_group_queue',
  ),
  (
    'std = 0.0 if scores.max() == scores.min() else float(scores.std())',
    'std = float(scores.std()) + self._threshold',
    'test_group_filters',
  ),
  (
    'return 0 < rate < 1',
    'return 0 <= rate < 1',
    'test_group_filters',
  ),
  (
    'return 1.0 - math.comb(n - passed, k) / math.comb(n, k)',
    'return 1.0 - math.comb(n - passed, k) / math.comb(n, k - 1)',
    'test_pass_at_k',
  ),
  (
    'rewards[action_positions[-1] if len(action_positions) else -1] += amount',
    'rewards[action_positions[0] if len(action_positions) else -1] += amount',
    'test_reward_shaping',
  ),
  (
    'is_past = is_positive & (sums > (uniform * sums[:, -1])[:, None])',
    'is_past = is_positive & (sums >= (uniform * sums[:, -1])[:, None])',
    'test_token_sampling',
  ),
  (
    'return 2 * self.interval - 1',
    'return self.interval',
    'test_weight_sync',
  ),
  (
    'return step // interval > self._last_synced_step // interval',
    'return step % interval == 0',
    'test_weight_sync',
  ),
  (
    'max_tokens=self.sampling.max_tokens - len(generated_ids),',
    'max_tokens=self.sampling.max_tokens,',
    'test_router test_resumable_generation',
  ),
  (
    'picked = min(loads, key=lambda i: (loads[i], i))',
    'picked = max(loads, key=lambda i: (loads[i], i))',
    'test_router',
  ),
  (
    'allocated, key=lambda tag: allocated[tag] - round(exact[tag], 9)',
    'allocated',
    'test_group_allocation',
  ),
)

WEIGHTS = _faults(
  'weights',
  (
    'target[indices] += _unpack_values(planes, target.dtype)',
    'target[indices] = _unpack_values(planes, target.dtype)',
    'test_delta_encoding',
  ),
  (
    'gaps = np.diff(indices, prepend=-1) - 1',
    'gaps = np.diff(indices, prepend=0) - 1',
    'test_delta_encoding',
  ),
  (
    'return indices[low:high] - start',
    'return indices[low:high]',
    'test_device_deltas test_publish_and_subscribe test_delta_encoding',
  ),
  (
    "header += b' ' * (-len(header) % 8)",
    "header += b' ' * (len(header) % 8)",
    'test_shared_memory',
  ),
  (
    "if manifest.digest != body['digest']:",
    'if False:',
    'test_manifest test_repairs',
  ),
  (
    'return hashlib.sha256(data).hexdigest()[:32]',
    'return hashlib.sha256(data).hexdigest()[:8]',
    'test_manifest test_repairs',
  ),
  (
    'low, high = max(wanted.start, start), min(wanted.stop, start + size)',
    'low, high = max(wanted.start, start), min(wanted.stop, size)',
    'test_shards test_publish_and_subscribe',
  ),
  (
    'return [s for s in array.addressable_shards if s.replica_id == 0]',
    'return list(array.addressable_shards)',
    'test_shards test_publish_and_subscribe',
  ),
  (
    'if now - since > self._patience:',
    'if now - since < self._patience:',
    'test_versions test_repairs',
  ),
  (
    'return all(chunk.full for chunk in self.chunks())',
    'return any(chunk.full for chunk in self.chunks())',
    'test_manifest test_versions test_publish_and_subscribe',
  ),
)

DATA = _faults(
  'data',
  (
    'return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)',
    'return int(np.random.SeedSequence(words).generate_state(1)[0])',
    'test_seeds',
  ),
  (
    "return fold_seed(run_seed, 'episodes', mode, tag)",
    "return fold_seed(run_seed, 'episodes', mode)",
    'test_seeds test_dataset',
  ),
  (
    'priority = entry.version - self._decay * entry.uses',
    'priority = entry.version + self._decay * entry.uses',
    'test_samplers',
  ),
  (
    'entry.ready = step + self._cooldown',
    'entry.ready = step',
    'test_samplers',
  ),
  (
    'remaining = [entry for entry in self._entries if entry.uses < self._use_limit]',
    'remaining = list(self._entries)',
    'test_samplers',
  ),
  (
    'groups = await self._source.take(step, step - self._max_staleness)',
    'groups = await self._source.take(step, step)',
    'test_samplers',
  ),
  (
    'return step >= self._steps\n',
    'return step > self._steps\n',
    'test_samplers',
  ),
  (
    'return text.partition(MARK)[2]',
    'return text.rpartition(MARK)[2]',
    'test_chat_tokenizer',
  ),
  (
    "mask += [bool(message.get('train', True))] * len(reply_ids)",
    'mask += [True] * len(reply_ids)',
    'test_file_sampler',
  ),
  (
    'if last is not None and (is_end',
    'if last is None and (is_end',
    'test_chat_tokenizer',
  ),
  (
    'return int(versions.min()) if versions.size else None',
    'return int(versions.max()) if versions.size else None',
    'test_trajectory_codec test_samplers',
  ),
  (
    'epoch, index = divmod(block * int(self._quota[source]) + draws_before, len(rows))',
    'epoch, index = divmod(int(self._quota[source]) + draws_before, len(rows))',
    'test_curricula',
  ),
)

FAULTS = [*FUNCTIONAL, *TRAINING, *ROLLOUT, *WEIGHTS, *DATA]
