"""Parts of a run that are on other hosts than its own process: an agent and a judge."""

import http.server
import json
import pathlib
import socket
import sys

from configs import base
from tests.launch import agent_run
from tests.rollout.agent_cases import say

JUDGE_PORT = 8123


def play(task, base_url, api_key, *, notes=''):
  """Asks its host's endpoint once, and leaves a note of which host that is."""
  pathlib.Path(notes, socket.gethostname()).touch()
  return {'reward': len(say(base_url, api_key, task['question'])) % 5}


def get_config(algorithm='grpo'):
  config = agent_run.get_config(algorithm)
  config.eval.interval = 0
  config.algorithm.group_size = 6
  config.env.bot = base.env_section(
    'agent', max_tokens_per_step=12, env_config={'agent': f'{__file__}:play'}
  )
  return config


class Judge(http.server.BaseHTTPRequestHandler):
  """Gives every reply the same score, and notes who asks."""

  def do_POST(self):
    self.rfile.read(int(self.headers['Content-Length']))
    with open(self.server.notes, 'a') as file:
      file.write(f'{self.client_address[0]}\n')
    message = {'role': 'assistant', 'content': 'Score: 5'}
    body = json.dumps({'choices': [{'index': 0, 'message': message}]}).encode()
    self.send_response(200)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)


if __name__ == '__main__':
  server = http.server.ThreadingHTTPServer(('', JUDGE_PORT), Judge)
  server.notes = pathlib.Path(sys.argv[1])
  print('ready', flush=True)
  server.serve_forever()
