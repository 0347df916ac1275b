// Shows parts of a run's report, from the data that launch/report/page.py makes of it.

import {legend, MODES, summarize, tokenBox, trajectoryFacts} from './tokens.js';
import {definitions, formatGain, formatNumber, make, pictures, segment} from './dom.js';

// Makes the title of a run: its name and status, what it does, and its command.
export const runHead = (run) => {
  const facts = make('p', 'sub');
  run.facts.forEach(([name, value], i) => {
    facts.append(i ? ' · ' : '', name ? `${name} ` : '', name === 'algorithm'
      ? make('b', '', value) : value);
  });
  const parts = [
    make('div', 'head', make('h1', '', run.name),
      make('span', `pill ${run.status}`, run.status)),
    facts,
  ];
  if (run.command) parts.push(make('p', 'sub', make('code', '', run.command)));
  return make('header', '', ...parts);
};

// Makes the figures in large type: scores before and after, reward, times.
export const tiles = (run) => {
  if (!run.tiles.length) {
    return make('p', 'note', 'Nothing has been measured yet.');
  }
  return make('div', 'tiles', ...run.tiles.map((tile) => {
    const value = make('b');
    if (tile.before !== undefined) value.append(make('i', '', `${tile.before} →`), ' ');
    value.append(make('span', tile.tone ?? '',
      typeof tile.value === 'number' ? formatNumber(tile.value) : tile.value));
    return make('div', 'tile card', value, make('span', '', tile.label));
  }));
};

// Makes the warnings of a run.
export const warnings = (run) => run.warnings.map((line) => make('p', 'warn', `⚠ ${line}`));

const gainBar = (first, last) => {
  if (![first, last].every(({value}) => value >= 0 && value <= 1)) return null;
  const [a, b] = [first, last].map(({value}) => (6 + 148 * value).toFixed(1));
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 160 14');
  svg.setAttribute('aria-hidden', 'true');
  const add = (tag, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    Object.entries(attributes).forEach(([k, v]) => node.setAttribute(k, v));
    svg.append(node);
  };
  add('line', {class: 'track', x1: 6, x2: 154, y1: 7, y2: 7});
  add('line', {class: 'gain', x1: a, x2: b, y1: 7, y2: 7});
  add('circle', {class: 'from', cx: a, cy: 7, r: 4});
  add('circle', {class: 'to', cx: b, cy: 7, r: 5});
  return svg;
};

const scoreCell = ({value, step, interval}) => make('td', 'num', formatNumber(value),
  make('small', '', `${interval ? ` (${interval.map((end) => end.toFixed(2)).join(' – ')})`
    : ''} at ${step}`));

const scoreRow = ({name, first, last, is_score: isScore}) => {
  const gain = last ? last.value - first.value : 0;
  const tone = !isScore || !gain ? '' : gain > 0 ? 'good' : 'bad';
  const after = last
    ? [scoreCell(last), make('td', `num ${tone}`, formatGain(gain))]
    : [make('td', 'num', '–'), make('td', 'num', '–')];
  return make('tr', '', make('td', '', name), scoreCell(first), ...after,
    make('td', `bar ${tone}`, isScore ? gainBar(first, last ?? first) : null));
};

// Makes the table of evaluations before and after training; [] if there are none.
export const evaluationTable = (run) => {
  if (!run.evaluations.length) return [];
  const heads = ['before', 'after', 'change'].map((name) => make('th', 'num', name));
  const table = make('table', '',
    make('thead', '', make('tr', '', make('th', '', 'metric'), ...heads,
      make('td', {class: 'bar', 'aria-hidden': 'true'}))),
    make('tbody', '', ...run.evaluations.map(scoreRow)));
  return [
    make('h2', '', 'Evaluation', make('small', '',
      'with 95% intervals where the number of tasks is known')),
    make('div', {class: 'card scroll', tabindex: 0, role: 'region',
      'aria-label': 'Evaluation'}, table),
  ];
};

// Makes the lists of how a run was launched and of its resolved config.
export const runFacts = (run) => {
  const parts = [];
  if (run.launch.length) {
    const summary = make('summary', '', 'How it was launched');
    parts.push(make('h2', '', 'This run'), make('details', {class: 'card', open: true},
      summary, definitions(run.launch)));
  }
  if (run.config.length) {
    parts.push(make('details', 'card', make('summary', '', 'Resolved config'),
      definitions(run.config)));
  }
  return parts;
};

// Shows sample trajectories with buttons for their step and for what colours them.
export class Samples {
  constructor(snapshots) {
    this.snapshots = snapshots;
    this.series = snapshots.at(-1)?.series ?? '';
    this.step = null;  // the newest
    this.mode = 'mask';
    this.node = make('div', {id: 'samples'});
    this.draw();
  }

  // Makes the section of a page.
  section() {
    return [make('h2', '', 'Sample trajectories',
      make('small', '', 'the exact tokens; point at one for its numbers')), this.node];
  }

  // Takes the snapshots that a run has by now; a step that was chosen stays.
  update(snapshots) {
    this.snapshots = snapshots;
    this.draw();
  }

  draw() {
    const steps = this.snapshots.filter((s) => s.series === this.series);
    if (!steps.length) {  // the run began anew
      this.series = this.snapshots.at(-1).series;
      this.draw();
      return;
    }
    const chosen = steps.findIndex((s) => s.step === this.step);
    const at = chosen < 0 ? steps.length - 1 : chosen;
    const {groups} = steps[at];
    const ranges = summarize(groups.flatMap((g) => g.members.flatMap((m) => m.tokens)));
    if (!ranges.usable[MODES.indexOf(this.mode)]) this.mode = 'mask';
    this.node.replaceChildren(this.#bars(steps, at, ranges),
      ...groups.map((group) => this.#group(group, ranges)));
  }

  #bars(steps, at, ranges) {
    const all = [...new Set(this.snapshots.map((s) => s.series))];
    const set = (label, names, active, usable, pick) => make('span', 'set', label,
      segment(label, names, active, usable, (i) => {
        pick(i);
        this.draw();
        this.node.querySelector(`[aria-label="${label}"] [aria-pressed=true]`).focus();
      }));
    const modes = MODES.filter((_, i) => i < 3 || ranges.usable[i]);
    const parts = [
      set('step', steps.map((s) => s.step), at, () => true,
        (i) => { this.step = i < steps.length - 1 ? steps[i].step : null; }),
      set('colour by', modes, modes.indexOf(this.mode),
        (i) => ranges.usable[MODES.indexOf(modes[i])], (i) => { this.mode = modes[i]; }),
      legend(this.mode),
    ];
    if (all.length > 1) {
      parts.unshift(set('played in', all, all.indexOf(this.series), () => true,
        (i) => {
          this.series = all[i];
          this.step = null;
        }));
    }
    return make('div', 'bars card', ...parts);
  }

  #group(group, ranges) {
    const whose = group.size > 1 ? `scores of its ${group.size} members ` : 'score ';
    const meta = make('div', 'meta',
      make('span', '', 'group ', make('b', '', group.task)),
      make('span', '', whose,
        make('b', '', group.scores.map(formatNumber).join(' · '))));
    const members = group.members.map((one) => make('div', 'sample', trajectoryFacts(one),
      tokenBox(one.tokens, this.mode, ranges,
        {gap: one.gap, left: one.length - one.tokens.length}),
      one.images ? pictures(one.images) : ''));
    return make('div', 'card group', meta, ...members);
  }
}
