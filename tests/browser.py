"""A real browser for tests: headless Chromium, driven by its own protocol."""

import asyncio
import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
FLAGS = (
  '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run '
  '--disable-background-networking --disable-component-update --disable-sync '
  '--disable-extensions --remote-debugging-port=0 --window-size=1280,900'
).split()
KEYS = {'Enter': '\r', 'Tab': '\t'}
LIMIT_S = 30.0


class Page:
  """One tab of the browser.

  Attributes:
    problems: errors of scripts, and what the page's policy has blocked.
  """

  def __init__(self, socket: aiohttp.ClientWebSocketResponse):
    self._socket = socket
    self._number = 0
    self._answers: dict[int, asyncio.Future] = {}
    self.problems: list[str] = []

  async def listen(self) -> None:
    async for message in self._socket:
      event = json.loads(message.data)
      if 'id' in event:
        self._answers.pop(event['id']).set_result(event)
      elif event['method'] == 'Runtime.exceptionThrown':
        details = event['params']['exceptionDetails']
        self.problems.append(details.get('exception', details).get('description', ''))
      elif event['method'] == 'Log.entryAdded':
        entry = event['params']['entry']
        if entry['level'] == 'error':
          self.problems.append(entry['text'])

  async def call(self, method: str, **parameters: Any) -> Any:
    self._number += 1
    answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
    message = {'id': self._number, 'method': method, 'params': parameters}
    await self._socket.send_str(json.dumps(message))
    async with asyncio.timeout(LIMIT_S):
      reply = await answer
    assert 'error' not in reply, (method, reply)
    return reply['result']

  async def value(self, script: str) -> Any:
    """What an expression is, as JSON."""
    reply = await self.call(
      'Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True
    )
    assert 'exceptionDetails' not in reply, (script, reply)
    return reply['result'].get('value')

  async def until(self, script: str) -> Any:
    """Waits until an expression is true, and returns it; true for a node."""
    script = f'(() => {{ const v = {script}; return v instanceof Node || v; }})()'
    try:
      async with asyncio.timeout(LIMIT_S):
        while not (value := await self.value(script)):
          await asyncio.sleep(0.05)
    except TimeoutError:
      text = await self.value('document.body.innerText.slice(0, 2000)')
      raise AssertionError(f'never true: {script}\n{text}\n{self.problems}') from None
    return value

  async def open(self, url: str) -> None:
    """Shows a page of the view, and waits until it has been drawn."""
    await self.call('Page.navigate', url=url)
    address = json.dumps(f'#{url.partition("#")[2]}')
    await self.until(f'document.getElementById("main")?.dataset.shown === {address}')
    assert await self.value('!!document.querySelector("main > div")'), await self.value(
      'document.body.innerText'
    )

  async def press(self, key: str) -> None:
    """Presses a key, as a person does."""
    text = KEYS.get(key, key if len(key) == 1 else '')
    code = {'Enter': 13, 'Tab': 9, 'Escape': 27, 'ArrowRight': 39, 'ArrowDown': 40}
    facts = {'key': key, 'windowsVirtualKeyCode': code.get(key, ord(key[0].upper()))}
    await self.call(
      'Input.dispatchKeyEvent',
      type='keyDown' if text else 'rawKeyDown',
      text=text,
      **facts,
    )
    await self.call('Input.dispatchKeyEvent', type='keyUp', **facts)

  async def resize(self, width: int, height: int) -> None:
    await self.call(
      'Emulation.setDeviceMetricsOverride',
      width=width, height=height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip

  async def prefer(self, scheme: str) -> None:
    """Sets what the system prefers: 'light' or 'dark'."""
    features = [{'name': 'prefers-color-scheme', 'value': scheme}]
    await self.call('Emulation.setEmulatedMedia', features=features)


@contextlib.asynccontextmanager
async def open_browser(folder: pathlib.Path) -> AsyncIterator[Page]:
  """Starts a browser, whose profile is in a folder, and yields its tab."""
  assert CHROMIUM
  profile = folder / 'profile'
  command = [CHROMIUM, *FLAGS, f'--user-data-dir={profile}', 'about:blank']
  process = subprocess.Popen(
    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  try:
    file = profile / 'DevToolsActivePort'
    async with asyncio.timeout(LIMIT_S):
      while not (file.exists() and file.read_text().count('\n')):
        await asyncio.sleep(0.05)
    port = file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
      async with session.get(f'http://127.0.0.1:{port}/json/list') as response:
        tabs = [tab for tab in await response.json() if tab['type'] == 'page']
      address = tabs[0]['webSocketDebuggerUrl']
      async with session.ws_connect(address, max_msg_size=1 << 26) as socket:
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        for domain in ('Page', 'Runtime', 'Log'):
          await page.call(f'{domain}.enable')
        yield page
        listening.cancel()
  finally:
    process.terminate()
    process.wait()
