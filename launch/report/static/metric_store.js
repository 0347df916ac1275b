// Holds the metrics of a run, and follows them while the run writes.

export class MetricStore {
  constructor(run, ask) {
    this.run = run;
    this.ask = ask;
    this.clear();
  }

  clear() {
    this.file = '';
    this.position = 0;
    this.phase = [];
    this.step = [];
    this.wall = [];
    this.metrics = new Map();
    this.changes = 0;
  }

  // Reads what is new; returns whether anything has changed.
  async update() {
    const answer = await this.ask('metrics',
      {run: this.run, since: this.position, file: this.file});
    const before = this.changes;
    this.take(answer);
    return this.changes !== before;
  }

  take(answer) {
    if (answer.all) {
      const {changes} = this;
      this.clear();
      this.changes = changes + 1;
    }
    const places = answer.step.map((step, i) => this.#place(answer, i));
    for (const [name, values] of Object.entries(answer.metrics)) {
      if (!this.metrics.has(name)) this.metrics.set(name, []);
      const mine = this.metrics.get(name);
      values.forEach((value, i) => {
        if (value !== null && mine[places[i]] !== value) {
          mine[places[i]] = value;
          this.changes++;
        }
      });
    }
    this.file = answer.file;
    this.position = answer.position;
  }

  // Returns where a row goes; the last one may come again, with more in it.
  #place(answer, i) {
    const last = this.step.length - 1;
    const same = last >= 0 && this.step[last] === answer.step[i]
      && this.phase[last] === answer.phase[i];
    const place = same ? last : last + 1;
    this.phase[place] = answer.phase[i];
    this.step[place] = answer.step[i];
    this.wall[place] = answer.wall[i];
    return place;
  }

  phases() {
    return [...new Set(this.phase)];
  }

  // Returns the points of a metric in a phase: by step, or by minutes since the start.
  points(name, phase, byTime = false) {
    const values = this.metrics.get(name) ?? [];
    const points = [];
    values.forEach((value, i) => {
      if (this.phase[i] !== phase) return;
      const x = byTime ? this.#minutes(i) : this.step[i];
      points.push([x, value === 'nan' ? null : value]);
    });
    return points;
  }

  // Returns the minutes since the start at each step of a phase.
  minutes(phase) {
    return this.step.map((step, i) => [step, this.#minutes(i)]).filter(
      (_, i) => this.phase[i] === phase);
  }

  #minutes(i) {
    return (this.wall[i] - this.wall[0]) / 60;
  }

  // Returns names of metrics that a phase has.
  names(phase) {
    const rows = this.phase.map((p, i) => p === phase ? i : -1).filter((i) => i >= 0);
    return [...this.metrics].filter(
      ([, values]) => rows.some((i) => values[i] !== undefined)).map(([name]) => name);
  }
}

// Averages runs that differ in their seed: the mean at each step, and a band of one
// standard deviation on both sides. Steps that fewer than two runs have no band.
export const meanAndSpread = (curves) => {
  const byStep = new Map();
  for (const points of curves) {
    for (const [x, y] of points) {
      if (y === null) continue;
      if (!byStep.has(x)) byStep.set(x, []);
      byStep.get(x).push(y);
    }
  }
  const points = [], band = [];
  for (const [x, values] of [...byStep].sort(([a], [b]) => a - b)) {
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    points.push([x, mean]);
    if (values.length > 1) {
      const variance = values.reduce((sum, y) => sum + (y - mean) ** 2, 0)
        / (values.length - 1);
      band.push([x, mean - Math.sqrt(variance), mean + Math.sqrt(variance)]);
    }
  }
  return {points, band};
};

// Moves an average over steps to the time at which runs reach each step on average.
export const byMeanTime = ({points, band}, minutes) => {
  const time = new Map();
  let latest = 0;  // a slow run that ends early must not take the others back
  for (const [step, mean] of meanAndSpread(minutes).points) {
    latest = Math.max(latest, mean);
    time.set(step, latest);
  }
  const moved = (rows) => rows.map(([step, ...values]) => [time.get(step), ...values]);
  return {points: moved(points), band: moved(band)};
};
