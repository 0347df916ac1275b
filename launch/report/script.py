"""Holds the page's only script, which reads curves and shows tokens.

It builds every node with textContent, so that text of a run is never markup.
"""

JS = r"""
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const show = (v) => {
  if (v === null || v === undefined) return '–';
  const a = Math.abs(v);
  if (v === 0) return '0';
  if (a < 1e-3 || a >= 1e6) return v.toExponential(2);
  return a >= 1e4 ? v.toLocaleString('en', {maximumFractionDigits: 0})
    : String(Number(v.toPrecision(a >= 100 ? 4 : 3)));
};

// Curves: a pointer over one chart reads all charts of its phase at that step.
const plots = [...document.querySelectorAll('[data-chart]')].map((figure) => {
  const chart = data.charts[figure.dataset.chart];
  const svg = figure.querySelector('svg');
  const spots = chart.series.map((_, i) => {
    const dot = document.createElementNS(SVG, 'circle');
    dot.setAttribute('r', 3.2);
    dot.setAttribute('class', 'spot c' + (i % 4));
    dot.style.display = 'none';
    svg.append(dot);
    return dot;
  });
  return {figure, svg, chart, spots, cross: svg.querySelector('.cross'),
    read: figure.querySelector('.read'),
    rest: [...figure.querySelector('.read').childNodes], phase: figure.dataset.phase};
});
const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (points[mid][0] < x) low = mid; else high = mid;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x)
    ? points[low] : points[high];
};
const readAt = (plot, step) => {
  const {box: [left, top, width, height], x, y, series} = plot.chart;
  const px = (v) => left + (v - x[0]) / (x[1] - x[0]) * width;
  plot.svg.classList.add('active');
  plot.cross.setAttribute('x1', px(step));
  plot.cross.setAttribute('x2', px(step));
  plot.read.textContent = '';
  const head = make('em', '', 'step ' + step + '  ');
  plot.read.append(head);
  series.forEach((one, i) => {
    const point = one.points.length ? nearest(one.points, step) : [0, null];
    const spot = plot.spots[i];
    spot.style.display = point[1] === null ? 'none' : '';
    if (point[1] !== null) {
      spot.setAttribute('cx', px(point[0]));
      spot.setAttribute('cy', top + (1 - (point[1] - y[0]) / (y[1] - y[0])) * height);
    }
    if (i) plot.read.append(make('em', '', '  ·  '));
    plot.read.append(show(point[1]));
  });
};
const leave = (phase) => plots.filter((p) => p.phase === phase).forEach((plot) => {
  plot.read.replaceChildren(...plot.rest);
  plot.svg.classList.remove('active');
  plot.spots.forEach((s) => { s.style.display = 'none'; });
});
for (const plot of plots) {
  plot.svg.addEventListener('pointermove', (event) => {
    const {box: [left, , width], x, series} = plot.chart;
    const frame = plot.svg.getBoundingClientRect();
    const scale = plot.svg.viewBox.baseVal.width / frame.width;
    const at = ((event.clientX - frame.left) * scale - left) / width;
    const raw = x[0] + Math.min(1, Math.max(0, at)) * (x[1] - x[0]);
    const filled = series.filter((s) => s.points.length);
    const all = filled.map((s) => nearest(s.points, raw)[0]);
    if (!all.length) return;
    const step = all.reduce((a, b) => Math.abs(b - raw) < Math.abs(a - raw) ? b : a);
    plots.filter((p) => p.phase === plot.phase).forEach((p) => readAt(p, step));
  });
  plot.svg.addEventListener('pointerleave', () => leave(plot.phase));
}

// Trajectories.
const MODES = ['mask', 'log-prob', 'advantage'];
const allSeries = [...new Set(data.snapshots.map((s) => s.series))];
const last = data.snapshots[data.snapshots.length - 1];
const state = {series: last ? last.series : '', at: Infinity, mode: 'mask'};
const rgb = {act: 'var(--act)', rare: 'var(--rare)', up: 'var(--up)',
  down: 'var(--down)'};
const tip = make('div', 'tip');
tip.hidden = true;
document.body.append(tip);

const paint = (span, token, limit) => {
  const [, , acts, logprob, advantage] = token;
  if (!acts) return;
  let tone = rgb.act, strength = .2;
  if (state.mode === 'log-prob') {
    tone = rgb.rare;
    strength = logprob === null ? 0 : .78 * Math.min(1, -logprob / 5);
  } else if (state.mode === 'advantage') {
    tone = advantage < 0 ? rgb.down : rgb.up;
    strength = advantage === null ? 0 : .46 * Math.min(1, Math.abs(advantage) / limit);
  }
  span.style.setProperty('--tone', tone);
  span.style.setProperty('--v', strength.toFixed(3));
};
const shown = (text) => text.replace(/\n/g, '↵\n').replace(/\t/g, '⇥\t') || '·';
const sampleNode = (member, limit) => {
  const node = make('div', 'sample');
  const meta = make('div', 'meta');
  const fact = (name, value) => {
    const item = make('span', '', name + ' ');
    item.append(make('b', '', value));
    meta.append(item);
  };
  fact('score', show(member.score));
  fact('member', member.member);
  fact('ended by', member.stop);
  fact('tokens', member.length + ', ' + member.actions + ' written by the model');
  if (member.versions.length) fact('weights of step', member.versions.join(', '));
  if (member.tag) fact('environment', member.tag);
  node.append(meta);
  const body = make('div', 'tokens');
  member.tokens.forEach((token, i) => {
    if (member.gap === i) {
      const left = member.length - member.tokens.length;
      body.append(make('span', 'gap', ' … ' + left + ' tokens left out … '));
    }
    const span = make('span', 't' + (token[2] ? ' a' : '') + (token[5] ? ' r' : ''),
      shown(token[0]));
    span.token = token;
    paint(span, token, limit);
    body.append(span);
  });
  node.append(body);
  return node;
};
const legend = () => {
  const node = make('span', 'legend');
  const ramp = (css) => {
    const box = make('span', 'ramp');
    box.style.background = css;
    return box;
  };
  if (state.mode === 'mask') {
    node.append(ramp(`rgba(${rgb.act}, .22)`), 'written by the model, and trained on');
  } else if (state.mode === 'log-prob') {
    node.append('expected', ramp(
      `linear-gradient(90deg, rgba(${rgb.rare}, 0), rgba(${rgb.rare}, .78))`),
      'surprising (log-prob ≤ −5)');
  } else {
    const [down, up] = [rgb.down, rgb.up];
    node.append('worse than its group', ramp(`linear-gradient(90deg, rgba(${down}, .46),
      rgba(${down}, 0), rgba(${up}, 0), rgba(${up}, .46))`), 'better');
  }
  return node;
};
const segment = (names, active, usable, pick) => {
  const box = make('span', 'seg');
  names.forEach((name, i) => {
    const button = make('button', '', name);
    button.type = 'button';
    button.setAttribute('aria-pressed', i === active);
    button.disabled = !usable(i);
    button.addEventListener('click', () => { pick(i); draw(); });
    box.append(button);
  });
  return box;
};
const draw = () => {
  const home = document.getElementById('samples');
  if (!home || !data.snapshots.length) return;
  const steps = data.snapshots.filter((s) => s.series === state.series);
  const at = Math.min(state.at, steps.length - 1);
  const snap = steps[at];
  const tokens = snap.groups.flatMap((g) => g.members.flatMap((m) => m.tokens));
  const sizes = tokens.map((t) => t[4]).filter((a) => a !== null).map(Math.abs);
  const rated = sizes.length > 0;
  if (!rated && state.mode === 'advantage') state.mode = 'mask';
  const limit = Math.max(1e-9, ...sizes);
  home.textContent = '';
  const bars = make('div', 'bars card');
  const set = (label, node) => {
    const item = make('span', 'set', label);
    item.append(node);
    bars.append(item);
  };
  if (allSeries.length > 1) {
    set('played in', segment(allSeries, allSeries.indexOf(state.series), () => true,
      (i) => { state.series = allSeries[i]; }));
  }
  set('step', segment(steps.map((s) => s.step), at, () => true,
    (i) => { state.at = i; }));
  set('colour by', segment(MODES, MODES.indexOf(state.mode), (i) => i < 2 || rated,
    (i) => { state.mode = MODES[i]; }));
  bars.append(legend());
  home.append(bars);
  for (const group of snap.groups) {
    const card = make('div', 'card');
    card.style.marginTop = '12px';
    const meta = make('div', 'meta');
    meta.style.cssText = 'padding: 12px 16px 0; margin: 0 0 10px';
    const item = make('span', '', 'group ');
    item.append(make('b', '', group.task));
    const whose = group.size > 1 ? `scores of its ${group.size} members ` : 'score ';
    const scores = make('span', '', whose);
    scores.append(make('b', '', group.scores.map(show).join(' · ')));
    meta.append(item, scores);
    card.append(meta, ...group.members.map((m) => sampleNode(m, limit)));
    home.append(card);
  }
};
document.addEventListener('pointerover', (event) => {
  const token = event.target.token;
  tip.hidden = !token;
  if (!token) return;
  const [text, id, acts, logprob, advantage, reward] = token;
  const table = make('table');
  const row = (name, value) => {
    const line = make('tr');
    line.append(make('td', '', name), make('td', '', value));
    table.append(line);
  };
  row('token', JSON.stringify(text));
  row('id', id);
  row('mask', acts ? '1, written by the model' : '0, given to it');
  if (logprob !== null) {
    row('log-prob', show(logprob) + '  (p = ' + show(Math.exp(logprob)) + ')');
  }
  if (advantage !== null) row('advantage', show(advantage));
  if (reward) row('reward', show(reward));
  tip.replaceChildren(table);
  const box = event.target.getClientRects()[0];
  const size = tip.getBoundingClientRect();
  const x = Math.min(box.left, innerWidth - size.width - 12);
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = Math.max(8, x) + 'px';
  tip.style.top = (below ? box.bottom + 6 : box.top - size.height - 6) + 'px';
});
draw();
"""
