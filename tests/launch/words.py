"""An environment whose rewards differ from reply to reply, whoever replies."""


class Words:
  """Asks a data set's question once; the reward is the reply's length, modulo five."""

  def reset(self, *, seed, options=None):
    return options['task'].item['question'], {}

  def step(self, action):
    info = {'metrics': {'length': len(action)}, 'columns': {'given': len(action) % 5}}
    return None, len(action) % 5 / 4, True, False, info
