"""The pages of the live view in a real browser, as a person uses them."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from launch.logging.metric_sinks import JsonLines
from launch.logging.workdir import Workdir, write_atomically
from launch.report import samples
from launch.report.view_server import serve_view
from tests.browser import CHROMIUM, open_browser
from tests.launch.test_view import EVIL, PIXEL, TOKEN, play, write_dump

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(CHROMIUM is None, reason='needs chromium, to show the pages'),
]
AXE = importlib.util.find_spec('axe_core_python')
ATTACKED = 'document.scripts.length > 1 || document.querySelector("img[src=x]")'


def make_run(folder, seed=0, steps=5):
  """A run of a few steps that still goes on; returns its log and its folder's lock."""
  config = {'seed': seed, 'num_steps': 50, 'algorithm': {'name': 'grpo'}, 'lr': 0.1}
  workdir = Workdir(folder, config)
  workdir.record()
  log = JsonLines(folder / 'metrics.jsonl')
  log.phase('train', 50)
  for step in range(steps):
    write_step(log, step, seed)
  return log, workdir


def write_step(log, step, seed=0):
  times = {'time/step': 1.0, 'time/rollout': 0.5, 'time/train': 0.25}
  log.write(
    step,
    {
      'reward/mean': (step + seed) / 10,
      f'loss/{EVIL}': 1.0 / (step + 1),
      'queue/played': step,
      'compile/recompiles': 0.0,
      'rollout/engines_replaced': float(step == 2),
      'memory/worker_gb': 0.5,
      **times,
    },
  )


def fill(folder):
  """A dump with everything that is drawn in a way of its own."""
  call = '<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'
  groups = [
    [
      play(f'{EVIL} {call}', sample=m, score=m / 2, extras={'frame': PIXEL})
      for m in (0, 1)
    ],
    [play('an apple', group=1, tag='lake', turn=t) for t in (0, 1)],
    *([play(f'number {i}', group=i, score=i / 100)] for i in range(2, 130)),
  ]
  write_dump(folder, groups, step=3)
  snapshot = samples.make_snapshot(
    'train', 3, groups[:1], [np.full(6, 0.5)] * 2, lambda ids: EVIL
  )
  (folder / 'samples.json').write_text(json.dumps([snapshot]))


async def test_runs_curves_and_following(tmp_path):
  root = tmp_path / 'runs'
  log, workdir = make_run(root / 'one')
  make_run(root / 'two', seed=1)[1].close()
  async with serve_view(root, TOKEN) as url, open_browser(tmp_path) as page:
    await page.open(f'{url}#/?runs=one%0Atwo')
    assert await page.value('document.querySelectorAll(".runs tbody tr").length') == 2
    await page.until('document.querySelector(".pill.running")')
    await page.until('document.querySelectorAll(".plot path.line").length > 3')
    assert (
      await page.value('document.querySelectorAll(".plot .c1 path.line").length') > 1
    )
    # Smoothing, logarithmic axes, a search over metrics, the mean over seeds.
    curve = 'document.querySelector(".plot path.line").getAttribute("d")'
    drawn = {await page.value(curve)}
    for change in (
      """const box = document.querySelector('[type=range]');
         box.value = 2; box.dispatchEvent(new Event('input'));""",
      """[...document.querySelectorAll('.check')].find(
         (label) => label.textContent === 'log y').click();""",
      """[...document.querySelectorAll('.check')].find(
         (label) => label.textContent === 'log x').click();""",
    ):
      await page.value(f'(() => {{ {change} }})()')
      drawn.add(await page.value(curve))
    assert len(drawn) == 4  # each draws the curve anew
    await page.value('document.querySelector("section [data-search]").focus()')
    for letter in 'reward':
      await page.press(letter)
    await page.until('document.querySelectorAll(".plot").length === 1')
    await page.value("""[...document.querySelectorAll('.check')].find(
      (label) => label.textContent.startsWith('mean')).click()""")
    await page.until('document.querySelector(".plot path.spread")')
    await page.value("""[...document.querySelectorAll('.check')].find(
      (label) => label.textContent === 'by time').click()""")
    assert await page.value('!!document.querySelector(".plot path.spread")')
    assert await page.value('document.querySelectorAll(".plot path.line").length') == 1
    # What the run writes appears by itself.
    before = await page.value('document.querySelector(".runs tbody").innerText')
    write_step(log, 5)
    await page.until(
      f'document.querySelector(".runs tbody").innerText !== {json.dumps(before)}'
    )
    assert '5 / 50' in await page.value('document.querySelector(".runs").innerText')
    workdir.end('failed')
    workdir.close()
    await page.until('document.querySelector(".pill.failed")')
    href = await page.value('document.querySelector("a.button").getAttribute("href")')
    await page.open(url + href)
    assert 'seed\t0\t1' in await page.value('document.querySelector("table").innerText')
    await page.open(f'{url}#/run/one/system')
    shares = await page.value('document.querySelector(".shares").innerText')
    assert 'rollout: waiting for groups 50%' in shares and 'other 25%' in shares
    system = await page.value('document.body.innerText')
    assert 'engines replaced: 1' in system and 'memory/worker_gb' in system
    await page.open(f'{url}#/run/one')
    assert not await page.value(ATTACKED)
    # Samples come while the run goes on.
    snapshots = [
      samples.make_snapshot('train', step, [[play()]], None, lambda ids: 'x')
      for step in (3, 4)
    ]
    steps = 'document.querySelector("#samples [aria-label=step]")?.textContent'
    for count in (1, 2):
      text = json.dumps(snapshots[:count])
      write_atomically(root / 'one' / 'samples.json', text)
      await page.until(f'{steps} === {json.dumps("34"[:count])}')
    assert page.problems == []


async def test_trajectories_by_mouse_and_keyboard(tmp_path):
  root = tmp_path / 'runs'
  make_run(root / 'one')[1].close()
  fill(root / 'one')
  async with serve_view(root, TOKEN) as url, open_browser(tmp_path) as page:
    await page.open(f'{url}#/run/one/trajectories')
    rows = 'document.querySelectorAll(".list tbody tr").length'
    note = 'document.querySelector(".pager").innerText'
    await page.until(f'{rows} === 50 && {note}.includes("1–50 of 132")')
    await page.press('n')
    await page.until(f'{note}.includes("51–100 of 132")')
    await page.press('p')
    await page.until(f'{note}.includes("1–50 of 132")')
    await page.value('document.querySelector("[data-sort=grp]").click()')
    await page.until('location.hash.includes("sort=grp")')
    group = 'a[aria-label="samples of group train_3_lake_1_0_0"]'
    await page.until(f"document.querySelectorAll('.list {group}').length === 2")
    await page.value('document.querySelector("[data-sort=score]").click()')
    await page.value('document.querySelector("[data-sort=score]").click()')
    await page.until(
      'document.querySelector("[aria-sort=descending]")?.innerText === "score"'
    )
    await page.press('/')  # the keys that follow are letters of the search
    for letter in 'an apple':
      await page.press(letter)
    await page.until(f'{rows} === 2')
    await page.press('Escape')
    await page.press('j')
    await page.press('j')
    await page.press('k')
    await page.press('Enter')
    await page.until('location.hash.includes("/t/train_3_lake_1_0_0_0_0")')
    await page.until('document.querySelector(".message.assistant")')
    assert 'parts at token 4' in await page.value(
      'document.querySelector("main").innerText'
    )
    await page.press('j')  # the one after it in the same search
    await page.until('document.querySelector("h1").innerText.endsWith("_0_1")')
    await page.press('t')
    await page.until('document.querySelectorAll(".t.a").length === 3')
    # The address leads to the same again, and the colours go along to the next one.
    await page.value("""[...document.querySelectorAll('.seg button')].find(
      (button) => button.innerText === 'log-prob').click()""")
    address = await page.value('location.hash')
    assert 'view=tokens' in address and 'colour=log-prob' in address
    await page.press('k')
    await page.until('document.querySelector("h1").innerText.endsWith("_0_0")')
    await page.open(f'{url}#/')
    await page.open(url + address)
    shown = 'document.querySelector("[aria-label=\\"colour by\\"] [aria-pressed=true]")'
    assert await page.value(f'{shown}.innerText') == 'log-prob'
    assert await page.value('document.querySelector("h1").innerText.endsWith("_0_1")')
    await page.value('document.querySelector(".tokens").focus()')
    await page.press('ArrowRight')
    await page.until('document.querySelector(".tip:not([hidden])")')
    assert 'given to it' in await page.value('document.querySelector(".tip").innerText')
    await page.value('document.activeElement.blur()')
    await page.press('u')
    await page.until(f'location.hash.includes("text=an+apple") && {rows} === 2')
    assert page.problems == []


async def test_text_of_a_trajectory_is_shown_as_text(tmp_path):
  root = tmp_path / 'runs'
  make_run(root / 'one')[1].close()
  fill(root / 'one')
  name = 'train_3_math_0_0_0_1_0'
  async with serve_view(root, TOKEN) as url, open_browser(tmp_path) as page:
    for place in ('trajectories', f't/{name}', 'group/train_3_math_0_0_0', ''):
      await page.open(f'{url}#/run/one/{place}'.rstrip('/'))
      await page.until(f'document.body.innerText.includes({json.dumps(EVIL[:30])})')
      assert not await page.value(ATTACKED), place
    await page.open(f'{url}#/run/one/t/{name}')
    call = await page.value('document.querySelector(".call").innerText')
    assert 'python' in call and '"code": "6 * 7"' in call
    assert await page.until('document.querySelector(".images img").naturalWidth') == 2
    assert page.problems == []


async def test_light_dark_and_small_screens(tmp_path):
  root = tmp_path / 'runs'
  make_run(root / 'one')[1].close()
  fill(root / 'one')
  colour = 'getComputedStyle(document.body).backgroundColor'
  async with serve_view(root, TOKEN) as url, open_browser(tmp_path) as page:
    await page.open(f'{url}#/')
    await page.prefer('light')
    light = await page.value(colour)
    await page.prefer('dark')
    dark = await page.value(colour)
    assert light != dark
    await page.value('document.getElementById("theme").click()')
    assert await page.value(colour) == light  # chosen, whatever the system prefers
    await page.resize(400, 800)
    for place in places():
      await page.open(url + place)
      width = await page.value('document.documentElement.scrollWidth')
      assert width <= 400, (place, width)
    assert page.problems == []


def places():
  run = '#/run/one'
  name = 'train_3_math_0_0_0_1_0'
  return ('#/', run, f'{run}/trajectories', f'{run}/t/{name}', f'{run}/system',
          f'{run}/t/{name}?view=tokens&colour=log-prob', '#/compare?a=one&b=one',
          f'{run}/group/train_3_math_0_0_0', f'{run}/config')  # fmt: skip


@pytest.mark.skipif(AXE is None, reason='needs axe-core-python, the rules to check')
@pytest.mark.parametrize('scheme', ['light', 'dark'])
async def test_everything_has_a_name_and_enough_contrast(tmp_path, scheme):
  root = tmp_path / 'runs'
  make_run(root / 'one')[1].close()
  fill(root / 'one')
  assert AXE and AXE.origin
  axe = (pathlib.Path(AXE.origin).parent / 'axe.min.js').read_text()
  async with serve_view(root, TOKEN) as url, open_browser(tmp_path) as page:
    await page.prefer(scheme)
    for place in places():
      await page.open(url + place)
      await page.value(f'{axe}\n;0')
      violations = await page.value('axe.run(document).then((r) => r.violations)')
      bad = [(v['id'], [n['html'][:160] for n in v['nodes'][:3]]) for v in violations]
      assert bad == [], place
