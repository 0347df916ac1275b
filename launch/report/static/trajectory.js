// One trajectory as a conversation and token by token, and the samples of a group.

import {ask, link, setAddress} from './api.js';
import {definitions, formatNumber, make, pictures, segment} from './dom.js';
import {conversation} from './messages.js';
import {legend, MODES, repaint, summarize, tokenBox} from './tokens.js';
import {pickFilters} from './trajectories.js';

const flatten = (tree, prefix = '') => Object.entries(tree).flatMap(([key, value]) =>
  value !== null && typeof value === 'object' && !Array.isArray(value)
    ? flatten(value, `${prefix}${key}.`)
    : [[prefix + key, typeof value === 'string' ? value : JSON.stringify(value)]]);

const facts = (row) => {
  const meta = make('div', 'meta');
  const fact = (name, value) => {
    if (value === null || value === undefined || value === '') return;
    meta.append(make('span', '', `${name} `, make('b', '', String(value))));
  };
  fact('score', row.score === null ? null : formatNumber(row.score));
  fact('step', row.step);
  fact('environment', row.tag);
  fact('mode', row.mode);
  fact('ended by', row.stop);
  fact('sample', row.sample);
  if (row.turn) fact('turn', row.turn);
  fact('tokens', row.length === null ? null
    : `${row.length}, ${row.actions} written by the model`);
  if (row.tools) fact('tool calls', row.tools);
  fact('weights of step', row.version);
  return meta;
};

export class TrajectoryPage {
  constructor({parts: [, run, , id], parameters}) {
    this.run = run;
    this.id = id;
    this.filters = pickFilters(parameters);
    this.title = id;
    this.trail = [[run, link(['run', run])],
      ['trajectories', link(['run', run, 'trajectories'], this.filters)], [id, null]];
    this.view = this.chosen = parameters.view ?? '';
    this.mode = parameters.colour ?? 'mask';
    this.node = make('div');
  }

  async refresh() {
    if (this.shown) return;
    this.shown = await ask('trajectory', {run: this.run, id: this.id, ...this.filters});
    const {messages, tokens} = this.shown;
    const usable = {conversation: messages.length > 0, tokens: tokens.length > 0};
    if (!usable[this.view]) this.view = usable.conversation ? 'conversation' : 'tokens';
    this.#draw();
  }

  #draw() {
    const {shown} = this;
    this.links = [];
    const step = (label, id) => id ? this.#link(id, label, 'button')
      : make('button', {class: 'plain', type: 'button', disabled: true}, label);
    const views = ['conversation', 'tokens'];
    const usable = [shown.messages.length > 0, shown.tokens.length > 0];
    const set = segment('view', views, views.indexOf(this.view), (i) => usable[i],
      (i) => this.#show(views[i]));
    this.copied = make('span', {class: 'note', role: 'status'});
    this.node.replaceChildren(
      make('div', 'bar-row', make('h1', '', shown.id)),
      facts(shown),
      make('div', 'bar-row', set, step('← before', shown.before),
        step('after →', shown.after),
        make('a', {class: 'button', href: link(['run', this.run, 'group', shown.grp])},
          'Samples of its group'),
        make('button', {class: 'plain', type: 'button', click: () => this.#copy()},
          'Copy link'), this.copied,
        make('span', 'keys', make('kbd', '', 'j'), ' ', make('kbd', '', 'k'),
          ' after, before  ', make('kbd', '', 't'), ' tokens  ', make('kbd', '', 'u'),
          ' back to the table')),
      this.#branches(), this.view === 'tokens' ? this.#tokens() : this.#messages(),
      this.#images(), this.#more());
  }

  // Returns the address of a trajectory, shown as this one is.
  #address(id) {
    return link(['run', this.run, 't', id], this.#parameters());
  }

  #parameters() {
    const colour = this.mode === MODES[0] ? '' : this.mode;
    return {...this.filters, view: this.chosen, colour};
  }

  #link(id, label, kind = '') {
    const node = make('a', {class: kind, href: this.#address(id)}, label);
    this.links.push([node, id]);
    return node;
  }

  // Keeps what is shown in the address, so that a link leads to the same.
  #keepAddress() {
    setAddress(['run', this.run, 't', this.id], this.#parameters());
    for (const [node, id] of this.links) node.href = this.#address(id);
  }

  #show(view) {
    this.view = this.chosen = view;
    this.#keepAddress();
    this.#draw();
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      this.copied.textContent = 'copied';
    } catch {
      this.copied.textContent = location.href;
    }
  }

  #branches() {
    const {branches, id} = this.shown;
    if (!branches.length) return '';
    return make('nav', {class: 'card pad', 'aria-label': 'Rows of this episode'},
      make('div', 'role', `${branches.length} rows of one episode`),
      make('div', 'shares', ...branches.map((row) => row.id === id
        ? make('b', {'aria-current': 'true'}, `row ${row.turn}, this one`)
        : make('span', '', this.#link(row.id, `row ${row.turn}`),
        row.parts_at === null ? '' : ` parts at token ${row.parts_at}`))));
  }

  #messages() {
    return make('div', 'card more', conversation(this.shown.messages));
  }

  #tokens() {
    const {shown} = this;
    const ranges = summarize(shown.tokens);
    if (!ranges.usable[MODES.indexOf(this.mode)]) this.mode = 'mask';
    const box = tokenBox(shown.tokens, this.mode, ranges, {gap: shown.gap,
      left: shown.num_tokens - shown.tokens.length});
    const bars = make('div', 'bars card');
    const drawBars = () => bars.replaceChildren(
      make('span', 'set', 'colour by', segment('colour by', MODES,
        MODES.indexOf(this.mode), (i) => ranges.usable[i], (i) => {
          this.mode = MODES[i];
          this.#keepAddress();
          repaint(box, this.mode, ranges);
          drawBars();
          bars.querySelector('[aria-pressed=true]').focus();
        })), legend(this.mode));
    drawBars();
    const left = shown.gap === null ? shown.num_tokens - shown.tokens.length : 0;
    const more = left > 0 ? make('button', {class: 'plain', type: 'button',
      click: () => this.#moreTokens()}, `Show more of the other ${left} tokens`) : '';
    const ids = shown.decoded ? '' : make('p', 'note',
      'The tokenizer of the run was not found: ids are shown.');
    return make('div', 'whole more', bars, ids,
      make('div', 'card more', make('div', 'sample', box, more)));
  }

  async #moreTokens() {
    const {shown} = this;
    const next = await ask('trajectory',
      {run: this.run, id: this.id, start: shown.tokens.length});
    shown.tokens.push(...next.tokens);
    this.#draw();
  }

  #images() {
    const {images} = this.shown;
    return images.length ? make('div', 'card more', pictures(images)) : '';
  }

  #more() {
    const {columns, metrics, extras} = this.shown;
    const lists = [['Columns', columns], ['Metrics', metrics], ['Extras', extras]].filter(
      ([, tree]) => Object.keys(tree).length);
    return make('div', 'more', ...lists.map(([name, tree]) => make('details', 'card',
      make('summary', '', name), definitions(flatten(tree)))));
  }

  key(key) {
    const {shown} = this;
    const next = {j: shown?.after, k: shown?.before}[key];
    if (next) location.hash = this.#address(next);
    else if (key === 'u') {
      location.hash = link(['run', this.run, 'trajectories'], this.filters);
    } else if (key === 't' && shown?.tokens.length && shown.messages.length) {
      this.#show(this.view === 'tokens' ? 'conversation' : 'tokens');
    } else return false;
    return true;
  }
}

export class GroupPage {
  constructor({parts: [, run, , group]}) {
    this.run = run;
    this.group = group;
    this.title = group;
    this.trail = [[run, link(['run', run])],
      ['trajectories', link(['run', run, 'trajectories'])], [group, null]];
    this.node = make('div');
  }

  async refresh() {
    if (this.node.childElementCount) return;
    const {members} = await ask('group', {run: this.run, group: this.group});
    const scores = members.map((row) => row.score).filter((score) => score !== null);
    const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
    this.node.replaceChildren(
      make('div', 'bar-row', make('h1', '', this.group), make('span', 'note',
        `${members.length} samples${scores.length ? `, mean score ${formatNumber(mean)}`
          : ''}`)),
      make('div', {class: 'side', tabindex: 0, role: 'region',
        'aria-label': 'Samples side by side'}, ...members.map((row) =>
        make('section', {class: 'card', 'aria-label': `sample ${row.sample}`},
          make('h2', '', make('a', {href: link(['run', this.run, 't', row.id])},
            `sample ${row.sample ?? '–'}${row.turn ? `, row ${row.turn}` : ''}`)),
          facts({...row, step: null, tag: null, mode: null, sample: null, turn: null}),
          conversation(row.messages)))));
  }
}
