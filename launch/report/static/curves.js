// The curves of one run or of several: overlaid, smoothed, searched.

import {ChartGroup} from './chart.js';
import {formatNumber, make, segment} from './dom.js';
import {byMeanTime, meanAndSpread} from './metric_store.js';

const HIDDEN = /^time\/wall$/;
const MAX_CHARTS = 120;

// Returns whether a name has all words of a search.
export const matches = (name, words) => words.toLowerCase().split(/\s+/).every(
  (word) => name.toLowerCase().includes(word));

export class Curves {
  // `first` are the metrics that are shown without a search.
  constructor(first) {
    this.first = first;
    this.runs = [];
    this.phase = '';
    this.search = '';
    this.all = false;
    this.smooth = -1;  // as in the report
    this.logX = this.logY = this.byTime = this.average = false;
    this.drawn = '';
    this.controls = make('div', 'filters card');
    this.charts = make('div', 'grid');
    this.more = make('p', 'note');
    this.node = make('section', {'aria-label': 'Curves'}, this.controls, this.charts,
      this.more);
    this.#buildControls();
  }

  // Shows runs: each has a label, a tone, a key of its repetitions and a store.
  show(runs) {
    this.runs = runs;
    this.draw();
  }

  #buildControls() {
    const check = (label, name) => make('label', 'check', make('input', {
      type: 'checkbox', change: (event) => this.#set({[name]: event.target.checked}),
    }), label);
    this.phases = make('span', 'phases');
    this.averageBox = check('mean ± sd over seeds', 'average');
    this.controls.append(
      make('label', 'wide', 'Metrics', make('input', {
        type: 'search', placeholder: 'loss, eval mean …', 'data-search': true,
        input: (event) => this.#set({search: event.target.value.trim()}),
      })),
      make('label', '', 'Smoothing', make('input', {
        type: 'range', min: -1, max: 20, value: -1, title: 'far left: automatic',
        input: (event) => this.#set({smooth: Number(event.target.value)}),
      })),
      this.phases, check('log x', 'logX'), check('log y', 'logY'),
      check('by time', 'byTime'), this.averageBox, check('all metrics', 'all'));
  }

  #set(change) {
    Object.assign(this, change);
    this.draw();
  }

  // Draws what has changed; nothing if that is nothing.
  draw() {
    const state = JSON.stringify([this.search, this.all, this.smooth, this.logX,
      this.logY, this.byTime, this.average, this.phase,
      this.runs.map((r) => [r.label, r.tone, r.store.changes])]);
    if (state === this.drawn) return;
    this.drawn = state;
    const phases = [...new Set(this.runs.flatMap((r) => r.store.phases()))];
    if (!phases.includes(this.phase)) this.phase = phases.at(-1) ?? '';
    this.phases.replaceChildren(...phases.length > 1 ? [segment('phase', phases,
      phases.indexOf(this.phase), () => true, (i) => this.#set({phase: phases[i]}))] : []);
    this.averageBox.hidden = this.runs.length < 2;
    this.#drawCharts();
  }

  #drawCharts() {
    const names = [...new Set(this.runs.flatMap((r) => r.store.names(this.phase)))].filter(
      (name) => !HIDDEN.test(name));
    const rank = (name) => {
      const at = this.first.indexOf(name);
      return at < 0 ? this.first.length : at;
    };
    names.sort((a, b) => rank(a) - rank(b));
    // A curve that is 0 throughout says nothing, unless it is the reward or a score.
    const isZero = (name) => this.runs.every((run) => run.store.points(
      name, this.phase).every(([, value]) => value === 0));
    const isFirst = (name) => name === this.first[0]
      || (this.first.includes(name) && !isZero(name))
      || (name.startsWith('eval/') && name.endsWith('/mean'));
    const found = this.search ? names.filter((name) => matches(name, this.search))
      : this.all ? names : names.filter(isFirst);
    const shown = (found.length || this.search ? found : names).slice(0, MAX_CHARTS);
    const group = new ChartGroup((x) => this.byTime
      ? `${formatNumber(x)} min` : `step ${x}`);
    this.charts.replaceChildren(...shown.map((name) => group.figure('plot card', name,
      this.#series(name), {
        logX: this.logX, logY: this.logY, keys: false, title: name,
        reach: this.smooth < 0 ? undefined : this.smooth,
        formatX: this.byTime ? formatNumber : undefined,
      })));
    const left = names.length - shown.length;
    this.more.textContent = !this.runs.length ? 'Select runs to see their curves.'
      : !names.length ? 'Nothing has been measured yet.'
        : !shown.length ? `No metric has “${this.search}” in its name.`
          : left > 0 ? `${left} more metrics: search, or tick “all metrics”.` : '';
  }

  #series(name) {
    const kind = name.startsWith('eval/') ? 'dots' : 'line';
    const one = (run) => ({
      name: `${name}${this.runs.length > 1 ? `, ${run.label}` : ''}`, tone: run.tone, kind,
      points: run.store.points(name, this.phase, this.byTime),
    });
    if (!this.average) {
      return this.runs.map(one).filter((s) => s.points.length);
    }
    const groups = Map.groupBy(this.runs, (run) => run.repeats);
    return [...groups.values()].map((runs) => {
      const mean = meanAndSpread(runs.map(
        (run) => run.store.points(name, this.phase)));
      const shown = this.byTime ? byMeanTime(mean, runs.map(
        (run) => run.store.minutes(this.phase))) : mean;
      return {name: `${name}, mean of ${runs.length}`, tone: runs[0].tone,
        kind: runs.length > 1 ? 'line' : kind, ...shown};
    }).filter((s) => s.points.length);
  }
}
