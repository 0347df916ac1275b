// Draws curves as SVG. A chart is drawn in the units of its own viewBox; pointing at a
// step in one chart reads all charts of its group at that step.

import {formatNumber, make} from './dom.js';

const SVG = 'http://www.w3.org/2000/svg';
const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 20;
const TONES = 8;  // colours of style.css
const NOISE = 1e-14;
const MAX_LOST = 50;  // marks of missing values in a curve

// Returns the range to show: from 0 if the values lie near it, and never empty.
export const valueRange = (values) => {
  if (!values.length) return [0, 1];
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low >= 0 && low <= 0.6 * high) low = 0;
  // Rounding around 0, as of a sum that cancels, is no curve.
  if (Math.max(Math.abs(low), Math.abs(high)) < NOISE) return [0, 1];
  const blur = 1e-5 * Math.max(Math.abs(low), Math.abs(high));  // less is rounding
  if (low !== high && high - low < blur) [low, high] = [low - blur, high + blur];
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || 1;
    [low, high] = low > 0 && pad === 1 ? [0, high] : [low - pad, high + pad];
  }
  return [low, high];
};

// Returns about `count` round numbers that cover the range from `low` to `high`.
export const niceTicks = (low, high, count = 3) => {
  const rough = (high - low) / Math.max(count, 1);
  const power = rough > 0 ? 10 ** Math.floor(Math.log10(rough)) : 1;
  const step = [1, 2, 2.5, 5, 10].map((m) => power * m).find((s) => s >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  const ticks = [];
  for (let i = first; i <= Math.max(last, first + 1); i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
};

// Returns powers of ten that cover positive values, with 2 and 5 between few of them.
export const logTicks = (low, high) => {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.max(Math.ceil(Math.log10(high) - 1e-9), first + 1);
  const every = Math.ceil((last - first) / 6);
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    ticks.push(Number(`1e${power}`));
    if (last - first === 1 && power < last) {
      ticks.push(Number(`2e${power}`), Number(`5e${power}`));
    }
  }
  if (ticks[ticks.length - 1] < high) ticks.push(Number(`1e${last}`));
  return ticks;
};

// Formats a tick with as many decimals as distinguish it from its neighbours.
export const formatTick = (value, step) => {
  const size = Math.max(Math.abs(value), step);
  if (size < 1e-3 || size >= 1e4) return formatNumber(value);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = value.toFixed(digits);
  return Math.abs(Number(text) - value) <= step / 100 ? text
    : String(Number(value.toPrecision(6)));
};

// Averages each point with `reach` points on both sides; missing values stay missing.
export const smoothPoints = (points, reach) => {
  if (reach < 1) return null;
  const sums = [0], counts = [0];
  points.forEach(([, y], i) => {
    sums.push(sums[i] + (y ?? 0));
    counts.push(counts[i] + (y === null ? 0 : 1));
  });
  return points.map(([x, y], i) => {
    if (y === null) return [x, null];
    const from = Math.max(0, i - reach), to = Math.min(points.length, i + reach + 1);
    return [x, (sums[to] - sums[from]) / (counts[to] - counts[from])];
  });
};

const autoReach = (points) => Math.floor(points.length / 40);

// Returns where a chart's values are drawn: its axes, ticks and the functions that map
// steps and values to coordinates.
export const layout = (series, {width, height, logX = false, logY = false}) => {
  const xs = series.flatMap((s) => s.points.map(([x]) => x));
  const ys = series.flatMap((s) => [
    ...s.points.map(([, y]) => y), ...(s.band ?? []).flatMap(([, a, b]) => [a, b]),
  ]).filter((y) => y !== null && (!logY || y > 0));
  const usableX = logX ? xs.filter((x) => x > 0) : xs;
  let [xLow, xHigh] = [Infinity, -Infinity];
  for (const x of usableX) {
    if (x < xLow) xLow = x;
    if (x > xHigh) xHigh = x;
  }
  if (xLow === Infinity) [xLow, xHigh] = logX ? [1, 10] : [0, 1];
  if (xHigh <= xLow) xHigh = logX ? xLow * 10 : xLow + 1;
  const positive = logY && ys.length > 0;
  const [low, high] = positive
    ? [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))]
    : valueRange(ys);
  const ticks = positive ? logTicks(low, high)
    : niceTicks(low, high, Math.max(2, Math.floor(height / 50)));
  const [yLow, yHigh] = [ticks[0], ticks[ticks.length - 1]];
  const box = [LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM];
  const share = (v, a, b, log) => log
    ? (Math.log(v) - Math.log(a)) / (Math.log(b) - Math.log(a)) : (v - a) / (b - a);
  const round = (v) => Math.round(v * 10) / 10;
  const inner = (logX ? logTicks(xLow, xHigh) : niceTicks(xLow, xHigh, 4)).filter(
    (t) => t >= xLow && t <= xHigh);
  return {
    box, width, height, ticks, xTicks: inner, x: [xLow, xHigh], y: [yLow, yHigh], logX,
    logY: positive,
    toX: (x) => round(box[0] + share(x, xLow, xHigh, logX) * box[2]),
    toY: (y) => round(box[1] + (1 - share(y, yLow, yHigh, positive)) * box[3]),
    fromX: (px) => {
      const at = Math.min(1, Math.max(0, (px - box[0]) / box[2]));
      return logX ? xLow * (xHigh / xLow) ** at : xLow + at * (xHigh - xLow);
    },
    shows: (x, y) => y !== null && (!positive || y > 0) && (!logX || x > 0),
  };
};

// Returns an SVG path; a value that is missing leaves a gap.
export const path = (place, points) => {
  let pen = 'M', text = '';
  for (const [x, y] of points) {
    if (!place.shows(x, y)) {
      pen = 'M';
      continue;
    }
    text += `${pen}${place.toX(x)} ${place.toY(y)}`;
    pen = 'L';
  }
  return text;
};

const draw = (tag, attributes, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

const axes = (place, formatX) => {
  const {ticks, xTicks, width, box, y: [yLow], logY} = place;
  const nodes = [];
  for (const tick of ticks) {
    const y = place.toY(tick);
    nodes.push(
      draw('line', {class: 'rule', x1: LEFT, x2: width - RIGHT, y1: y, y2: y}),
      draw('text', {x: LEFT - 6, y: y + 3, 'text-anchor': 'end'},
        logY ? formatNumber(tick) : formatTick(tick, ticks[1] - ticks[0])));
  }
  for (const tick of xTicks) {
    if (!formatX && !Number.isInteger(tick)) continue;
    nodes.push(draw('text', {
      x: place.toX(tick), y: box[1] + box[3] + 14, 'text-anchor': 'middle',
    }, (formatX ?? formatNumber)(tick, yLow)));
  }
  return nodes;
};

const bandPath = (place, band) => {
  const inside = band.filter(([x, a, b]) => place.shows(x, a) && place.shows(x, b));
  if (inside.length < 2) return '';
  const there = inside.map(([x, , b]) => `${place.toX(x)} ${place.toY(b)}`);
  const back = inside.map(([x, a]) => `${place.toX(x)} ${place.toY(a)}`).reverse();
  return `M${[...there, ...back].join('L')}Z`;
};

const curve = (place, series, reach) => {
  const {points} = series;
  const group = draw('g', {class: `c${series.tone}`});
  if (series.kind === 'dots' || points.length === 1) {
    group.classList.add('dots');
    group.append(draw('path', {class: 'faint', d: path(place, points)}));
    for (const [x, y] of points) {
      if (place.shows(x, y)) {
        group.append(draw('circle', {cx: place.toX(x), cy: place.toY(y), r: 3.2}));
      }
    }
    return group;
  }
  if (series.band) {
    group.append(draw('path', {class: series.fill ?? 'spread',
      d: bandPath(place, series.band)}));
  }
  const smooth = series.fill ? null : smoothPoints(points, reach ?? autoReach(points));
  if (smooth) group.append(draw('path', {class: 'faint', d: path(place, points)}));
  if (series.fill !== 'area') {
    group.append(draw('path', {class: 'line', d: path(place, smooth ?? points)}));
  }
  const base = place.box[1] + place.box[3];
  points.filter(([, y]) => y === null).slice(0, MAX_LOST).forEach(([x]) => {
    group.append(draw('path', {class: 'lost', d: `M${place.toX(x) - 3} ${base}h6l-3-6z`}));
  });
  return group;
};

// Draws curves over a common step axis.
//
// A series has a name, points ([step, value], null where it was not finite), a kind
// ('dots' for few measurements) and optionally a tone (number of its colour) and a band
// ([step, low, high]). `reach` is how many points each side are averaged; by default a
// twentieth of the curve.
export const drawChart = (series, options = {}) => {
  const {width = 340, height = 150, reach, formatX} = options;
  const toned = series.map((s, i) => ({...s, tone: (s.tone ?? i) % TONES}));
  const place = layout(toned, {...options, width, height});
  const svg = draw('svg', {
    viewBox: `0 0 ${width} ${height}`, role: 'img',
    'aria-label': series.map((s) => s.name).join(', ') || 'no values',
  });
  const cross = draw('line', {
    class: 'cross', y1: TOP, y2: TOP + place.box[3], x1: -9, x2: -9,
  });
  const spots = toned.map((s) => draw('circle', {class: `spot c${s.tone}`, r: 3.2}));
  svg.append(...axes(place, formatX), ...toned.map((s) => curve(place, s, reach)), cross,
    ...spots);
  return {svg, place, series: toned, cross, spots};
};

const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (points[mid][0] < x) low = mid; else high = mid;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x)
    ? points[low] : points[high];
};

// Reads charts together: a pointer over one shows the values of all at that step.
export class ChartGroup {
  constructor(label = (x) => `step ${x}`) {
    this.plots = [];
    this.label = label;
  }

  // Makes a figure of curves with a caption; several curves are named in it.
  figure(kind, title, series, options = {}) {
    const chart = drawChart(series, options);
    const names = options.keys ?? series.length > 1
      ? chart.series.map((s) => make('span', `key c${s.tone}`, s.label ?? s.name))
      : [title];
    const last = series.length === 1
      ? formatNumber(series[0].points.at(-1)?.[1] ?? null) : '';
    const read = make('span', 'read', last);
    const node = make('figure', kind, make('figcaption', '',
      make('span', 'name', ...(options.keys === false ? [title] : names)), read),
    chart.svg);
    const plot = {...chart, read, rest: last};
    this.plots.push(plot);
    chart.svg.addEventListener('pointermove', (event) => this.#move(plot, event));
    chart.svg.addEventListener('pointerleave', () => this.#leave());
    return node;
  }

  #move(plot, event) {
    const frame = plot.svg.getBoundingClientRect();
    const scale = plot.svg.viewBox.baseVal.width / frame.width;
    const raw = plot.place.fromX((event.clientX - frame.left) * scale);
    const all = plot.series.filter((s) => s.points.length).map(
      (s) => nearest(s.points, raw)[0]);
    if (!all.length) return;
    const step = all.reduce((a, b) => Math.abs(b - raw) < Math.abs(a - raw) ? b : a);
    this.plots.forEach((p) => this.#read(p, step));
  }

  #read(plot, step) {
    const {place, series, svg, cross, spots, read} = plot;
    if (place.logX && step <= 0) return;
    svg.classList.add('active');
    cross.setAttribute('x1', place.toX(step));
    cross.setAttribute('x2', place.toX(step));
    read.replaceChildren(make('em', '', this.label(step)));
    series.forEach((one, i) => {
      const [x, y] = one.points.length ? nearest(one.points, step) : [0, null];
      const shown = place.shows(x, y);
      spots[i].classList.toggle('on', shown);
      if (shown) {
        spots[i].setAttribute('cx', place.toX(x));
        spots[i].setAttribute('cy', place.toY(y));
      }
      const value = one.value ? one.value(x) : y;
      read.append('  ', series.length > 1
        ? make('span', `c${one.tone}`, formatNumber(value)) : formatNumber(value));
    });
  }

  #leave() {
    for (const {svg, read, rest} of this.plots) {
      read.replaceChildren(rest);
      svg.classList.remove('active');
    }
  }
}
