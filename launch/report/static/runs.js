// The pages of runs: the table of all, one run, and what differs between two configs.

import {ask, link, setAddress} from './api.js';
import {Curves} from './curves.js';
import {make, formatNumber} from './dom.js';
import {path, layout} from './chart.js';
import {MetricStore} from './metric_store.js';
import {evaluationTable, runFacts, runHead, Samples, tiles, warnings} from './run_parts.js';

const TONES = 8;
const SHOWN_AT_FIRST = 1;
const SVG = 'http://www.w3.org/2000/svg';

const spark = (points) => {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '40 8 300 60');
  svg.setAttribute('aria-hidden', 'true');
  svg.setAttribute('preserveAspectRatio', 'none');
  const line = document.createElementNS(SVG, 'path');
  const place = layout([{points}], {width: 350, height: 88});
  line.setAttribute('d', path(place, points));
  line.setAttribute('class', 'line c0');
  svg.append(line);
  return svg;
};

const duration = (seconds) => {
  if (seconds === null) return '–';
  const [h, m, s] = [seconds / 3600, seconds / 60 % 60, seconds % 60].map(Math.floor);
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
};

// Shows a time as written in config.json, '2026-11-23T10:20:30', to the minute.
const date = (text) => text ? text.replace('T', ' ').slice(0, 16) : '–';

const pill = (status) => make('span', `pill ${status}`, status);

// All runs below the folder, with the curves of those that are selected.
export class RunsPage {
  constructor({parameters}) {
    this.title = 'runs';
    this.trail = [];
    this.selected = parameters.runs?.split('\n').filter(Boolean) ?? null;
    this.filter = '';
    this.stores = new Map();
    this.body = make('tbody');
    this.compare = make('a', {class: 'button'}, 'Compare configs');
    this.count = make('span', 'note');
    this.node = make('div', '',
      make('div', 'bar-row', make('h1', '', 'Runs'), this.count,
        make('label', '', make('span', 'hidden', 'Filter runs'), make('input', {
          type: 'search', placeholder: 'filter runs  (/)', 'data-search': true,
          input: (event) => { this.filter = event.target.value; this.#draw(); },
        })), this.compare),
      make('div', {class: 'card scroll', tabindex: 0, role: 'region',
        'aria-label': 'Runs'},
      make('table', 'runs', make('thead', '', make('tr', '',
        make('th', '', make('span', 'hidden', 'shown')), make('th', '', 'run'),
        make('th', '', 'status'), make('th', 'optional', 'algorithm'),
        make('th', 'num optional', 'seed'), make('th', 'num', 'step'),
        make('th', 'num', 'reward'),
        make('td', {'aria-hidden': 'true', class: 'optional'}),
        make('th', 'optional', 'started'), make('th', 'num optional', 'time'))),
      this.body)));
  }

  async refresh() {
    const {runs, first, root} = await ask('runs');
    runs.sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0) || (a.name < b.name ? -1 : 1));
    this.runs = runs;
    this.root = root;
    if (!this.curves) {
      this.curves = new Curves(first);
      this.node.append(make('h2', '', 'Curves of the selected runs'), this.curves.node);
    }
    const known = new Set(runs.map((run) => run.name));
    const at_first = runs.filter((run) => run.step !== null).slice(0, SHOWN_AT_FIRST);
    this.selected = (this.selected ?? at_first.map((run) => run.name)).filter(
      (name) => known.has(name));
    this.#draw();
    await this.#updateCurves();
  }

  async #updateCurves() {
    const byName = new Map(this.runs.map((run) => [run.name, run]));
    const shown = this.selected.map((name, i) => {
      if (!this.stores.has(name)) this.stores.set(name, new MetricStore(name, ask));
      return {label: name, tone: i % TONES, repeats: byName.get(name).repeats,
        store: this.stores.get(name)};
    });
    await Promise.all(shown.map((run) => run.store.update()));
    this.curves.show(shown);
  }

  #toggle(name, on) {
    this.selected = on ? [...this.selected, name]
      : this.selected.filter((other) => other !== name);
    setAddress([], {runs: this.selected.join('\n')});
    this.#draw();
    this.#updateCurves();
  }

  #draw() {
    const words = this.filter.toLowerCase();
    const shown = this.runs.filter((run) => `${run.name} ${run.algorithm} ${run.status}`
      .toLowerCase().includes(words));
    const focused = document.activeElement?.dataset?.run;
    this.body.replaceChildren(...shown.map((run) => this.#row(run)));
    if (focused !== undefined) {
      [...this.body.querySelectorAll('[data-run]')].find(
        (box) => box.dataset.run === focused)?.focus();
    }
    this.count.textContent = this.runs.length ? `${this.runs.length} in ${this.root}`
      : `No run in ${this.root} yet.`;
    const [a, b] = this.selected;
    const two = this.selected.length === 2;
    this.compare.hidden = !two;
    if (two) this.compare.href = link(['compare'], {a, b});
  }

  #row(run) {
    const at = this.selected.indexOf(run.name);
    const box = make('input', {
      type: 'checkbox', 'data-run': run.name, 'aria-label': `show curves of ${run.name}`,
      change: (event) => this.#toggle(run.name, event.target.checked),
    });
    box.checked = at >= 0;
    const step = run.step === null ? '–'
      : run.total ? `${run.step} / ${run.total}` : String(run.step);
    return make('tr', '', make('td', '', box),
      make('td', 'wrap', make('span', `swatch ${at >= 0 ? `c${at % TONES}` : ''}`),
        make('a', {href: link(['run', run.name])}, run.name)),
      make('td', '', pill(run.status)), make('td', 'optional', run.algorithm),
      make('td', 'num optional', run.seed === null ? '–' : String(run.seed)),
      make('td', 'num', run.phase && run.phase !== 'train' ? `${run.phase} ` : '', step),
      make('td', 'num', formatNumber(run.reward)),
      make('td', 'optional', run.spark.length > 1 ? spark(run.spark) : null),
      make('td', 'optional', date(run.started)),
      make('td', 'num optional', duration(run.seconds)));
  }
}

// Makes the links to the pages of a run.
export const runTabs = (name, current) => make('nav', {class: 'tabs',
  'aria-label': 'Pages of the run'}, ...[['', 'Overview'],
  ['trajectories', 'Trajectories'], ['system', 'System'], ['config', 'Config'],
].map(([page, label]) => make('a', {
  href: link(['run', name, page].filter(Boolean)),
  'aria-current': page === current ? 'page' : null,
}, label)));

// Status, scores, curves and samples of one run.
export class RunPage {
  constructor({parts: [, name]}) {
    this.name = name;
    this.title = name;
    this.trail = [[name, null]];
    this.store = new MetricStore(name, ask);
    this.top = make('div');
    this.bottom = make('div');
    this.node = make('div', '', this.top, this.bottom);
    this.shown = this.newest = '';
  }

  async refresh() {
    const [run, {first}] = await Promise.all([ask('run', {run: this.name}), this.first
      ? {first: this.first} : ask('runs')]);
    this.first = first;
    if (!this.curves) {
      this.curves = new Curves(first);
      this.top.after(make('h2', '', 'Curves'), this.curves.node);
    }
    const state = JSON.stringify(run);
    if (state !== this.shown) {
      this.shown = state;
      this.top.replaceChildren(runHead(run), runTabs(this.name, ''), tiles(run),
        ...warnings(run), ...this.#error(run), ...evaluationTable(run));
    }
    if (run.samples !== this.newest) await this.#showSamples(run.samples);
    await this.store.update();
    this.curves.show([{label: this.name, tone: 0, repeats: '', store: this.store}]);
  }

  #error({error}) {
    return error ? [make('details', {class: 'card error more', open: true},
      make('summary', '', 'The error that ended it'), make('pre', {tabindex: 0}, error))]
      : [];
  }

  // Shows the samples of a version of their file; later, if they are being read.
  async #showSamples(version) {
    if (this.samples?.node.contains(document.activeElement)) return;
    const snapshots = await ask('samples', {run: this.name});
    this.newest = version;
    if (!snapshots.length) return;
    if (this.samples) {
      this.samples.update(snapshots);
    } else {
      this.samples = new Samples(snapshots);
      this.bottom.append(...this.samples.section());
    }
  }
}

// How a run was launched, each time, and its config.
export class ConfigPage {
  constructor({parts: [, name]}) {
    this.name = name;
    this.title = `config of ${name}`;
    this.trail = [[name, link(['run', name])], ['config', null]];
    this.node = make('div');
  }

  async refresh() {
    if (this.node.childElementCount) return;
    const run = await ask('run', {run: this.name});
    const launches = run.launches.length > 1 ? [make('h2', '', 'Launches'),
      make('div', {class: 'card scroll', tabindex: 0, role: 'region',
        'aria-label': 'Launches'},
      make('table', '', make('thead', '', make('tr', '', make('th', '', 'started'),
        make('th', '', 'ended'), make('th', '', 'command'))),
      make('tbody', '', ...run.launches.map((one) => make('tr', '',
        make('td', '', String(one.time ?? '–')), make('td', '', String(one.status ?? '–')),
        make('td', '', make('code', '', String(one.command ?? ''))))))))] : [];
    this.node.replaceChildren(runHead(run), runTabs(this.name, 'config'), ...launches,
      ...runFacts(run));
    for (const box of this.node.querySelectorAll('details')) box.open = true;
  }
}

// The keys in which the configs of two runs differ.
export class ComparePage {
  constructor({parameters: {a = '', b = ''}}) {
    this.runs = {a, b};
    this.title = `${a} and ${b}`;
    this.trail = [['compare', null]];
    this.node = make('div');
  }

  async refresh() {
    if (this.node.childElementCount) return;
    const {names, keys} = await ask('diff', this.runs);
    const text = (value) => value === null ? '(absent)' : JSON.stringify(value);
    const rows = keys.map(([key, first, second]) => make('tr', '', make('td', '', key),
      make('td', '', text(first)), make('td', '', text(second))));
    this.node.replaceChildren(
      make('div', 'bar-row', make('h1', '', 'Configs compared'), make('span', 'note',
        `${keys.length} key${keys.length === 1 ? '' : 's'} differ${
          keys.length === 1 ? 's' : ''}`)),
      make('div', {class: 'card scroll', tabindex: 0, role: 'region',
        'aria-label': 'Keys that differ'},
      make('table', 'changed', make('thead', '', make('tr', '', make('th', '', 'key'),
        ...names.map((name) => make('th', '',
          make('a', {href: link(['run', name])}, name))))),
      make('tbody', '', ...rows))));
  }
}
