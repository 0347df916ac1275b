"""Replies of a form, as models write them.

Each row is (reply, what the template wrote before it, score of `format(tags='think,
answer')`).
"""

OPENED = '<|im_start|>assistant\n<think>\n'
PLAIN = '<|im_start|>assistant\n'
THOUGHT = '6 × 7 = 42, as in the table.'
TAGGED = f'<think>{THOUGHT}</think><answer>42</answer>'
REST = f'{THOUGHT}</think><answer>42</answer>'

REPLIES = [
  (TAGGED, PLAIN, 1),
  (TAGGED, '', 1),
  (f'  {TAGGED}\n', PLAIN, 1),
  (TAGGED.replace('><', '>\n<'), PLAIN, 1),
  (TAGGED.replace('><', '>\n\n<'), PLAIN, 1),
  (f'<think>\n{THOUGHT}\n</think>\n\n<answer>\n42\n</answer>', PLAIN, 1),
  ('<think>a\n\nb\n- c</think>\n<answer>**42**</answer>', PLAIN, 1),
  ('<think>if a < b > c</think><answer>42</answer>', PLAIN, 1),
  (r'<think>a</think><answer>\boxed{42}</answer>', PLAIN, 1),
  ('<think>a</think><answer>```python\nx\n```</answer>', PLAIN, 1),
  ('<think>the <b>bold</b> one</think><answer>42</answer>', PLAIN, 1),
  ('<think>x</think><answer>答案</answer>', PLAIN, 1),
  ('<think>x</think>\t<answer>42</answer>\r\n', PLAIN, 1),
  # The prompt opened the thought.
  (REST, OPENED, 1),
  (f'\n{REST}', OPENED, 1),
  (f'{THOUGHT}\n</think>\n\n<answer>42</answer>\n', OPENED, 1),
  (REST, '<｜Assistant｜><think>\n', 1),
  (REST, '<｜Assistant｜><think>', 1),
  (REST, '<think>', 1),
  (TAGGED, OPENED, 1),  # the model opened it once more
  (REST, PLAIN, 0),
  (REST, '', 0),
  (REST, '<think>\n\n</think>\n\n', 0),
  (REST, '<|im_start|>assistant\n<thinking>\n', 0),
  (REST, '<think> hard:', 0),
  ('<answer>42</answer>', OPENED, 0),
  ('</think><answer>42</answer>', OPENED, 0),
  (' \n</think><answer>42</answer>', OPENED, 0),
  (THOUGHT, OPENED, 0),
  (f'{THOUGHT}</think>42', OPENED, 0),
  (f'{REST} indeed', OPENED, 0),
  (f'{THOUGHT}</think></think><answer>42</answer>', OPENED, 0),
  (f'{THOUGHT}</think><answer>42', OPENED, 0),
  (f'{THOUGHT}<think>b</think><answer>42</answer>', OPENED, 0),
  ('', OPENED, 0),
  ('42</answer>', '<|im_start|>assistant\n<answer>', 0),
  # What is missing, doubled, empty or out of place.
  (f'Well: {TAGGED}', PLAIN, 0),
  (f'{TAGGED} indeed', PLAIN, 0),
  (f'{TAGGED}.', PLAIN, 0),
  ('<think>a</think>so<answer>42</answer>', PLAIN, 0),
  ('<think>a</think>', PLAIN, 0),
  ('<answer>42</answer>', PLAIN, 0),
  ('<answer>42</answer><think>a</think>', PLAIN, 0),
  ('<think>a<answer>42</answer></think>', PLAIN, 0),
  ('<think><answer>42</answer></think>', PLAIN, 0),
  ('<think>a<answer>42</answer>', PLAIN, 0),
  ('<think>a</think><answer>42', PLAIN, 0),
  ('<think>a</think>42</answer>', PLAIN, 0),
  ('<think> </think><answer>42</answer>', PLAIN, 0),
  ('<think></think><answer>42</answer>', PLAIN, 0),
  ('<think>a</think><answer></answer>', PLAIN, 0),
  ('<think>a</think><answer>\n</answer>', PLAIN, 0),
  ('<think>a</think><think>b</think><answer>42</answer>', PLAIN, 0),
  (f'{TAGGED}<answer>43</answer>', PLAIN, 0),
  (f'{TAGGED}{TAGGED}', PLAIN, 0),
  ('<think>I write <answer> next</think><answer>42</answer>', PLAIN, 0),
  ('<Think>a</Think><answer>42</answer>', PLAIN, 0),
  ('< think >a</ think ><answer>42</answer>', PLAIN, 0),
  ('<thinking>a</thinking><answer>42</answer>', PLAIN, 0),
  ('<think>a<think><answer>42<answer>', PLAIN, 0),
  ('</think>a<think></answer>42<answer>', PLAIN, 0),
  ('[think]a[/think][answer]42[/answer]', PLAIN, 0),
  ('think: a\nanswer: 42', PLAIN, 0),
  ('42', PLAIN, 0),
  ('', PLAIN, 0),
]
