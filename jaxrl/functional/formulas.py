r"""Formulas of the components of an algorithm, in LaTeX, for the documentation site.

The symbols are those of the docstrings: p_t, o_t and q_t are the log-probs of token t
by the policy, by the policy that sampled it and by the reference; r_t = e^{p_t − o_t};
A_t is the advantage and R the episode's return; μ and s are mean and sample standard
deviation of its group; sg stops the gradient. Indices of rows are left out.
"""

RATIO = r'r_t = e^{p_t - o_t}'
GROUP_RELATIVE = r'A_t = \frac{R - \mu}{s + 10^{-6}}'
EXPERT_MIXTURE = (
  r'L_t = \begin{cases} (1 - \mu)\,L_t^{\text{PPO}} & \text{on rollouts} \\ '
  r'-\mu\,%sp_t & \text{on rows of an expert} \end{cases}'
)
K3 = r'e^{q_t - p_t} - 1 - (q_t - p_t)'
PHI = r'\operatorname{sg}\left(e^{p_t}(1 - e^{p_t})\right)'
TRUST_REGION = (
  r'L_t = -A_t\,\operatorname{sg}\left(\min(r_t, C)\,\text{keep}_t\right) p_t, \quad '
  + RATIO
)

ADVANTAGES = {
  'asymre': r'A_t = R - (\mu + \text{shift})',
  'best_of_group': r'A_t = \mathbf{1}\left[R = \max_{\text{group}} R\right]',
  'clip_b': (
    r'A_t = A_t^{\text{grpo}}\,\mathbf{1}\left[A_t \geq 0 \lor S_t \geq \bar{S} - '
    r'\mu\,\sigma_S\right], \quad S_t = e^{p_t}(H_t + p_t)'
  ),
  'clip_v': (
    r'A_t = A_t^{\text{grpo}}\,\mathbf{1}\left[A_t \geq 0 \lor D_t \leq '
    r'\mu\,\sigma_D\right], \quad D_t = \text{NEC}_t - S_t'
  ),
  'grpo': GROUP_RELATIVE,
  'opmd': (
    r'A_t = R - b, \quad b = \frac{1}{n}\sum_i R_i \quad\text{or}\quad '
    r'b = \tau \log \frac{1}{n}\sum_i e^{R_i / \tau}'
  ),
  'gdpo': (
    r'A_t = \operatorname{whiten}\left(\sum_k w_k\,'
    r'\frac{R_k - \mu_k}{s_k + 10^{-6}}\right)'
  ),
  'hierarchical_grpo': r'A_t = R - \mu_{\text{peers}}',
  'optimal_token_baseline': (
    r'A_t = G_t - \frac{\sum_i G_t W_t}{\sum_i W_t}, \quad W_t = \sum_{j \leq t}'
    r'\left(1 - 2\pi_j + \sum_v \pi(v)^2\right)'
  ),
  'rae': r'A_t = R - b_{\text{role}}, \quad b \leftarrow d\,b + (1 - d)\,R',
  'maxrl': r'A_t = \frac{R - \mu}{\mu}',
  'rec': r'A_t = R - \mu',
  'rloo': r'A_t = \frac{n}{n - 1}(R - \mu) = R - \frac{1}{n - 1}\sum_{j \neq i} R_j',
  'normalise': r'A_t = \frac{R - \text{mean}}{\text{std} + 10^{-6}}',
  'agentic_reinforce': r'A_t = \sum_{j \geq k} \gamma^{j - k} r_j, \quad t \in '
  r'\text{turn } k',
  'gae': (
    r'A_t = \delta_t + \gamma\lambda A_{t+1}, \quad '
    r'\delta_t = r_t + \gamma V_{t+1} - V_t'
  ),
  'grpo_distill': (
    r'A_t = A_t^{\text{grpo}} - c\,\left(\log \pi_{\text{student}} - '
    r'\log \pi_{\text{teacher}}\right)'
  ),
  'jsd': (
    r'A_t = \frac{c}{\beta}\log\left(1 - \beta + \beta e^{d_t}\right), \quad '
    r'd_t = \log \pi_{\text{teacher}} - \log \pi_{\text{student}}'
  ),
  'on_policy_distill': (
    r'A_t = c\,\left(\log \pi_{\text{teacher}} - \log \pi_{\text{student}}\right)'
  ),
  'process_grpo': (
    r'A_t = \sum_{k:\, \text{step } k \text{ ends at } t \text{ or later}} '
    r'\frac{r_k - \mu_{\text{steps}}}{s_{\text{steps}} + 10^{-6}}'
  ),
  'reinforce': r'A_t = R',
  'reinforce_plus_plus': (
    r'A_t = \operatorname{whiten}\left(\sum_{k \geq 0} \gamma^k r_{t+k}\right)'
  ),
  'remax': r'A_t = \sum_{k \geq 0} \gamma^k r_{t+k} - R_{\text{greedy}}',
  'cod': r'A_t = G_k - \frac{1}{n}\sum_i G_k^{(i)}',
  'gigpo': (
    r'A_t = \frac{R - \mu}{s + 10^{-6}} + '
    r'\omega\,\frac{G - \mu_{\text{state}}}{s_{\text{state}} + 10^{-6}}'
  ),
  'step_reinforce': (
    r'A_t = \frac{G_k - \text{mean}}{\text{std} + 10^{-6}}, \quad '
    r'G_k = \sum_{j \geq k} \gamma^{j - k} r_j'
  ),
  'step_wise_grpo': r'A_t = \frac{R_{\text{last}} - \mu}{s + 10^{-6}}',
}

POLICY_LOSSES = {
  'a3po': (
    r'L_t = \operatorname{sg}(w_t)\max\left(-A_t r_t,\; -A_t\,\operatorname{clip}(r_t, '
    r'1 - \varepsilon_{\text{low}}, 1 + \varepsilon_{\text{high}})\right), \quad '
    r'w_t = e^{x_t - o_t}, \; r_t = e^{p_t - \operatorname{sg}(x_t)}, \; '
    r'x_t = p_t + \frac{o_t - p_t}{\max(d_t, 1)}'
  ),
  'clip_cov': (
    r'L_t = L_t^{\text{PPO}}\,\mathbf{1}[\text{keep}_t], \quad '
    r'\text{cov}_t = (A_t - \bar{A})(p_t - \bar{p})'
  ),
  'dppo_kl': TRUST_REGION,
  'dppo_tv': TRUST_REGION,
  'dro': r'L_t = -A_t p_t + \frac{\beta}{2}(p_t - o_t)^2',
  'gmpo': (
    r'L_t = -A_t\,e^{\frac{1}{T}\sum_u d_u}, \quad d_u = \begin{cases} '
    r'\min(p_u - o_u, \varepsilon_{\text{high}}) & A_u > 0 \\ '
    r'\max(p_u - o_u, -\varepsilon_{\text{low}}) & A_u < 0 \end{cases}'
  ),
  'kl_cov': (
    r'L_t = -A_t r_t + c\,|p_t - o_t|\,\mathbf{1}[\text{penalised}_t], \quad '
    r'\text{cov}_t = (A_t - \bar{A})(p_t - \bar{p})'
  ),
  'probability_band': (
    r'L_t = -A_t r_t\,\mathbf{1}\left[\left|e^{p_t} - e^{o_t}\right| \leq '
    r'\delta\right] + c\,(p_t - o_t)^2'
  ),
  'stable_reinforce': (
    r'L_t = \max\left(-A_t r_t,\; -A_t\,\operatorname{clip}(r_t, '
    r'1 - \varepsilon_{\text{low}}, 1 + \varepsilon_{\text{high}})\right), \quad '
    r'r_t = e^{\operatorname{clip}(p_t - o_t, \log\rho_{\text{low}}, '
    r'\log\rho_{\text{high}})}'
  ),
  'vespo': (
    r'L_t = -A_t\,\operatorname{sg}\left(w^k e^{\lambda(1 - w)}\right) p_t, \quad '
    r'w = e^{\sum_u (p_u - o_u)}'
  ),
  'cispo': (
    r'L_t = -A_t\,\operatorname{sg}\left(\operatorname{clip}(r_t, '
    r'1 - \varepsilon_{\text{low}}, 1 + \varepsilon_{\text{high}})\,'
    r'\text{keep}_t\right) p_t'
  ),
  'gspo': (
    r'L_t = \max\left(-A_t s_t,\; -A_t\,\operatorname{clip}(s_t, '
    r'1 - \varepsilon_{\text{low}}, 1 + \varepsilon_{\text{high}})\right), \quad '
    r's_t = e^{p_t - \operatorname{sg}(p_t) + '
    r'\operatorname{sg}\left(\frac{1}{T}\sum_u (p_u - o_u)\right)}'
  ),
  'ppo_clip': (
    r'L_t = \max\left(-A_t r_t,\; -A_t\,\operatorname{clip}(r_t, '
    r'1 - \varepsilon_{\text{low}}, 1 + \varepsilon_{\text{high}})\right), \quad '
    + RATIO
  ),
  'sapo': (
    r'L_t = -A_t\,\frac{4}{\tau}\,\sigma\left(\tau(r_t - 1)\right), \quad ' + RATIO
  ),
  'distill': (
    r'L_t = D(\pi_{\text{teacher}}, \pi_{\text{student}}), \quad '
    r'\text{KL}(a \,\|\, b) = \sum_v a_v \log\frac{a_v}{b_v}'
  ),
  'mix': EXPERT_MIXTURE % '',
  'mix_chord': EXPERT_MIXTURE % (PHI + r'\,'),
  'importance_sampling': r'L_t = -A_t r_t, \quad ' + RATIO,
  'kimi': r'L_t = -A_t p_t + \frac{\tau}{2}(p_t - o_t)^2',
  'm2po': r'L_t = -A_t r_t\,\mathbf{1}[\text{keep}_t]',
  'rec': (
    r'L_t = -A_t\,\operatorname{sg}(w_t)\,p_t\,\mathbf{1}[\text{keep}_t] + '
    r'\text{regulariser}_t'
  ),
  'sppo': (
    r'L_t = -A_t (p_t - o_t)\,\mathbf{1}\left[\frac{1}{1 + \varepsilon} \leq r_t \leq '
    r'1 + \varepsilon\right]'
  ),
  'tis': r'L_t = -A_t\,\operatorname{sg}\left(\min(r_t, C)\right) p_t',
  'topr': (
    r'L_t = -\operatorname{sg}(\alpha_t) A_t p_t, \quad \alpha_t = \begin{cases} '
    r'1 & A_t > 0 \\ \operatorname{clip}(r_t, 0, 1) & \text{elsewhere} \end{cases}'
  ),
  'opmd': r'L_t = -\frac{A_t p_t}{1 + \tau}',
  'sft': r'L_t = -p_t',
  'sft_is': r'L_t = -\operatorname{sg}\left(e^{p_t}\right) p_t',
  'sft_phi': r'L_t = -' + PHI + r'\,p_t',
  'vanilla': r'L_t = -A_t p_t',
  'dpo': (
    r'L = -(1 - \text{ls})\log\sigma(\beta\Delta) - '
    r'\text{ls}\,\log\sigma(-\beta\Delta), \quad '
    r'\Delta = \sum_t (p_t - q_t)_{\text{chosen}} - '
    r'\sum_t (p_t - q_t)_{\text{rejected}}'
  ),
  'hinge': r'L = \max(0, 1 - \beta\Delta)',
  'ipo': r'L = \left(\bar{\Delta} - \frac{1}{2\beta}\right)^2',
}

KL = {
  'k1': r'\text{KL}_t = \text{coef}\,(p_t - q_t)',
  'k2': r'\text{KL}_t = \text{coef}\,\frac{1}{2}(p_t - q_t)^2',
  'mse': r'\text{KL}_t = \text{coef}\,\frac{1}{2}(p_t - q_t)^2',
  'k3': rf'\text{{KL}}_t = \text{{coef}}\,\left({K3}\right)',
  'low_var': (
    rf'\text{{KL}}_t = \text{{coef}}\,\operatorname{{clip}}\left({K3}, -10, '
    r'10\right)'
  ),
  'abs': r'\text{KL}_t = \text{coef}\,\left|p_t - q_t\right|',
  'corrected_k3': (
    r'\text{KL}_t = \text{coef}\,\operatorname{clip}(e^{p_t - o_t}, 0, 2)'
    rf'\left({K3}\right)'
  ),
}

CORRECTIONS = {
  'tis': r'w_t \leftarrow \min(w_t, C)',
  'mis': r'w_t \leftarrow \mathbf{1}[\text{low} \leq w_t \leq \text{high}]',
  'icepop': (r'w_t \leftarrow w_t\,\mathbf{1}[\text{low} \leq w_t \leq \text{high}]'),
  'train_infer_correction': (
    r'w_t \leftarrow \min(w_t, C)\,\mathbf{1}[\text{low} \leq w_t^{\prime} \leq '
    r'\text{high}]\,\mathbf{1}[|\Delta\pi_t| \leq \text{most}]'
  ),
}

# By the kind of the component, then by its name.
FORMULAS: dict[str, dict[str, str]] = {
  'advantage': ADVANTAGES,
  'policy_loss': POLICY_LOSSES,
  'kl_loss': KL,
  'kl_penalty': KL,
  'entropy_loss': {
    'entropy_loss': r'L_t = -\text{coef}\,H_t',
    'mix': r'L_t = -\text{coef}\,H_t \quad \text{on rollouts}',
  },
  'value_loss': {
    'value_loss': (
      r'L_t = \text{coef}\,\frac{1}{2}\max\left((V_t - G_t)^2,\; '
      r'\left(\operatorname{clip}(V_t, V_t^{\text{old}} - \varepsilon, '
      r'V_t^{\text{old}} + \varepsilon) - G_t\right)^2\right)'
    ),
  },
  'correction': CORRECTIONS,
}

# How losses L_t of tokens become one number, by the mode of `algorithm.aggregation`;
# m_t is 1 at action tokens, B the number of rows that have any.
AGGREGATIONS = {
  'token_mean': r'L = \frac{\sum m_t L_t}{\sum m_t}',
  'sequence_mean_token_sum': (r'L = \frac{1}{B}\sum_{\text{rows}} \sum_t m_t L_t'),
  'sequence_mean_token_mean': (
    r'L = \frac{1}{B}\sum_{\text{rows}} \frac{\sum_t m_t L_t}{\sum_t m_t}'
  ),
  'sequence_mean_token_sum_norm': (r'L = \frac{1}{B \cdot \text{length}}\sum m_t L_t'),
}
