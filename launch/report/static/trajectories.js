// The table of trajectories: filters, order, pages, and keys to walk through it.

import {ask, link, setAddress} from './api.js';
import {formatNumber, make} from './dom.js';
import {runTabs} from './runs.js';

const PAGE = 50;
const WAIT_MS = 200;  // after a letter, before the filter is asked
// Returns the name of a row's group without what other columns say.
const shortGroup = ({grp, mode, step, tag}) => {
  const start = `${mode}_${step}_${tag}_`;
  return grp?.startsWith(start) ? grp.slice(start.length) : grp ?? '–';
};
// Columns: the name by which the server sorts, the title, and the text of a row.
const COLUMNS = [
  ['step', 'step', (r) => r.step ?? '–', 'num'],
  ['score', 'score', (r) => formatNumber(r.score), 'num'],
  ['tag', 'tag', (r) => r.tag ?? '–', ''],
  ['mode', 'mode', (r) => r.mode ?? '–', 'optional'],
  ['stop', 'ended by', (r) => r.stop ?? '–', ''],
  ['length', 'tokens', (r) => r.length ?? '–', 'num'],
  ['actions', 'written', (r) => r.actions ?? '–', 'num optional'],
  ['tools', 'tool calls', (r) => r.tools ?? '–', 'num optional'],
  ['grp', 'group', (r) => shortGroup(r), 'optional'],
  ['sample', 'sample', (r) => r.sample ?? '–', 'num optional'],
  ['version', 'weights', (r) => r.version ?? '–', 'num optional'],
];
export const FILTERS = ['text', 'tag', 'mode', 'stop', 'group', 'step_min', 'step_max',
  'score_min', 'score_max', 'length_min', 'length_max', 'sort', 'order'];

// Returns the parameters of an address that say which trajectories are shown.
export const pickFilters = (parameters) => Object.fromEntries(
  FILTERS.filter((name) => parameters[name]).map((name) => [name, parameters[name]]));

export class TrajectoriesPage {
  constructor({parts: [, run], parameters}) {
    this.run = run;
    this.title = `trajectories of ${run}`;
    this.trail = [[run, link(['run', run])], ['trajectories', null]];
    this.query = pickFilters(parameters);
    this.offset = Number(parameters.offset ?? 0);
    this.at = -1;
    this.body = make('tbody');
    this.head = make('tr');
    this.note = make('span', {role: 'status'});
    this.filters = make('form', {class: 'filters card', 'aria-label': 'Filters',
      submit: (event) => event.preventDefault()});
    this.before = make('button', {type: 'button', class: 'plain',
      click: () => this.#turn(-1)}, '← before');
    this.after = make('button', {type: 'button', class: 'plain',
      click: () => this.#turn(1)}, 'after →');
    this.problems = make('p', 'warn');
    this.count = make('span', 'note');
    this.node = make('div', '',
      make('div', 'bar-row', make('h1', '', 'Trajectories'), this.count),
      runTabs(run, 'trajectories'),
      this.filters, this.problems,
      make('div', {class: 'card scroll more', tabindex: 0, role: 'region',
        'aria-label': 'Trajectories'},
      make('table', 'list', make('thead', '', this.head), this.body)),
      make('div', 'pager', this.before, this.after, this.note, make('span', 'keys',
        make('kbd', '', '/'), ' search  ', make('kbd', '', 'j'), ' ',
        make('kbd', '', 'k'), ' walk  ', make('kbd', '', 'Enter'), ' open  ',
        make('kbd', '', 'n'), ' ', make('kbd', '', 'p'), ' page')));
    this.#buildFilters();
    this.#drawHead();
  }

  #buildFilters() {
    const input = (name, kind, more = {}) => {
      const node = make('input', {type: kind, name, ...more,
        input: (event) => this.#set(name, event.target.value)});
      node.value = this.query[name] ?? '';
      return node;
    };
    const range = (label, name) => make('fieldset', '', make('legend', '', label),
      make('span', 'range',
        input(`${name}_min`, 'number', {step: 'any', 'aria-label': `${label}, least`,
          placeholder: 'min'}), '–',
        input(`${name}_max`, 'number', {step: 'any', 'aria-label': `${label}, most`,
          placeholder: 'max'})));
    this.choices = Object.fromEntries(['tag', 'mode', 'stop'].map((name) => [name,
      make('select', {name, change: (event) => this.#set(name, event.target.value)})]));
    this.filters.append(
      make('label', 'wide', 'Text', input('text', 'search', {'data-search': true,
        placeholder: 'in the conversation'})),
      make('label', '', 'Tag', this.choices.tag),
      make('label', '', 'Mode', this.choices.mode),
      make('label', '', 'Ended by', this.choices.stop),
      range('Step', 'step'), range('Score', 'score'), range('Tokens', 'length'),
      make('label', '', 'Group', input('group', 'search', {placeholder: 'its name, or the end'})),
      make('button', {type: 'button', class: 'plain', click: () => this.#clear()},
        'Clear'));
  }

  #clear() {
    this.query = {};
    this.filters.reset();
    for (const node of this.filters.querySelectorAll('input, select')) node.value = '';
    this.#ask();
  }

  #set(name, value) {
    this.query = {...this.query, [name]: value.trim()};
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#ask(), WAIT_MS);
  }

  #ask() {
    this.offset = 0;
    this.at = -1;
    this.refresh(true).catch((error) => { this.note.textContent = error.message; });
  }

  #sort(name) {
    const {sort = 'step', order} = this.query;
    this.query = {...this.query, sort: name,
      order: sort === name && order !== 'desc' ? 'desc' : 'asc'};
    this.#drawHead();
    this.head.querySelector(`[data-sort=${name}]`).focus();
    this.#ask();
  }

  #turn(pages) {
    const next = this.offset + pages * PAGE;
    if (next < 0 || next >= this.total) return;
    this.offset = next;
    this.at = -1;
    this.refresh(true);
  }

  #drawHead() {
    const {sort = 'step', order} = this.query;
    this.head.replaceChildren(...COLUMNS.map(([name, title, , kind]) => make('th', {
      class: kind, scope: 'col',
      'aria-sort': name === sort ? order === 'desc' ? 'descending' : 'ascending' : null,
    }, make('button', {type: 'button', 'data-sort': name,
      click: () => this.#sort(name)}, title))), make('th', '', 'what the model wrote'));
  }

  async refresh(asked = false) {
    const number = this.number = (this.number ?? 0) + 1;
    const query = pickFilters(this.query);
    const answer = await ask('trajectories',
      {run: this.run, ...query, offset: this.offset, limit: PAGE});
    if (number !== this.number) return;  // a later question has been asked
    setAddress(['run', this.run, 'trajectories'], {...query, offset: this.offset || ''});
    this.total = answer.total;
    const state = JSON.stringify([answer.rows, answer.total]);
    if (asked || state !== this.shown) {
      this.shown = state;
      this.rows = answer.rows;
      this.body.replaceChildren(...answer.rows.map((row, i) => this.#row(row, i)));
      this.#mark();
    }
    this.#drawFacets(answer.facets);
    this.#drawNotes(answer);
  }

  #drawFacets(facets) {
    for (const [name, values] of [['tag', facets.tags], ['mode', facets.modes],
      ['stop', facets.stops]]) {
      const state = JSON.stringify(values);
      const box = this.choices[name];
      if (box.dataset.state === state) continue;
      box.dataset.state = state;
      box.replaceChildren(new Option('any', ''), ...values.filter(
        ([value]) => value).map(
        ([value, count]) => make('option', {value}, `${value} (${count})`)));
      box.value = this.query[name] ?? '';
    }
  }

  #drawNotes({total, facets, indexing, pending, problems}) {
    const first = total ? this.offset + 1 : 0;
    const last = Math.min(this.offset + PAGE, total);
    this.count.textContent = total < facets.total
      ? `${total.toLocaleString('en')} of ${facets.total.toLocaleString('en')}`
      : `${total.toLocaleString('en')} in all`;
    this.note.textContent = [
      `${first}–${last} of ${total.toLocaleString('en')}`,
      total < facets.total ? ` (${facets.total.toLocaleString('en')} in all)` : '',
      indexing ? ` · indexing${pending ? `, ${pending} parts to go` : ''} …` : '',
      !facets.total && !indexing
        ? ' · Set --config.trajectory_dump.path to keep all trajectories of a run.' : '',
    ].join('');
    this.before.disabled = this.offset === 0;
    this.after.disabled = this.offset + PAGE >= total;
    this.problems.textContent = problems.map(([file, text]) => `${file}: ${text}`).join(
      '; ');
    this.problems.hidden = !problems.length;
  }

  #row(row, i) {
    const links = {
      step: [this.#address(row), `open ${row.id}`],
      grp: [link(['run', this.run, 'group', row.grp]), `samples of group ${row.grp}`],
    };
    const cells = COLUMNS.map(([name, , text, kind]) => {
      const [href, label] = links[name] ?? [];
      return make('td', kind, href && row[name] !== null
        ? make('a', {href, 'aria-label': label}, String(text(row))) : String(text(row)));
    });
    return make('tr', {click: (event) => {
      this.at = i;
      this.#mark();
      if (!event.target.closest('a') && !getSelection().toString()) this.#open();
    }}, ...cells, make('td', 'preview', row.preview ?? ''));
  }

  #address(row) {
    return link(['run', this.run, 't', row.id], pickFilters(this.query));
  }

  #open() {
    if (this.rows[this.at]) location.hash = this.#address(this.rows[this.at]);
  }

  #mark() {
    [...this.body.rows].forEach((row, i) => row.classList.toggle('on', i === this.at));
    const row = this.body.rows[this.at];
    row?.scrollIntoView({block: 'nearest'});
    row?.querySelector('a').focus({preventScroll: true});
  }

  // Answers a key; returns whether it has a meaning here.
  key(key) {
    const way = {j: 1, ArrowDown: 1, k: -1, ArrowUp: -1}[key];
    if (way) {
      this.at = Math.min(this.rows.length - 1, Math.max(0, this.at + way));
      this.#mark();
    } else if (key === 'n' || key === 'p') {
      this.#turn(key === 'n' ? 1 : -1);
    } else {
      return false;
    }
    return true;
  }
}
