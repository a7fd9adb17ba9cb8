// The statistics that the page knows of the buffers in sight.

/** Names in one request: the server computes for a bounded number of bytes, the rest with the next request. */
const MAX_NAMES = 300;

/** Buffers of a group whose statistics are asked for: for more, their norm together is not shown. */
const MAX_MEMBERS = 100;

/** Norms that a small curve shows. */
const MAX_NORMS = 30;

/** Statistics by the names of buffers. */
export class Known {
  constructor(api, signal) {
    Object.assign(this, { api, signal });
    this.statistics = new Map();
    this.curves = new Map();
    this.busy = false;
  }

  /** Return the statistics of a row: of a buffer, or of all buffers of a group together, or null. */
  of(row) {
    if (row.info) return this.statistics.get(row.name) ?? null;
    if (row.members.length > MAX_MEMBERS) return null;
    const each = row.members.map((info) => this.statistics.get(info.name));
    return each.every(Boolean) ? together(each) : null;
  }

  norms(name) {
    return this.curves.get(name) ?? [];
  }

  /** Ask for the statistics of these rows that have changed since. Return whether any came. */
  async ask(rows) {
    const infos = rows.flatMap((row) => (row.info ? [row.info] : row.members.length > MAX_MEMBERS ? [] : row.members));
    const names = infos.filter((info) => this.isOld(info)).map((info) => info.name);
    if (!names.length || this.busy) return false;
    this.busy = true;
    try {
      const wanted = { names: [...new Set(names)].slice(0, MAX_NAMES) };
      const { statistics } = await this.api.post("v1/buffers/statistics", wanted, { signal: this.signal });
      return Object.entries(statistics).filter(([name, each]) => each && this.learn(name, each)).length > 0;
    } finally {
      this.busy = false;
    }
  }

  isOld(info) {
    const known = this.statistics.get(info.name);
    return !known || known.epoch !== info.epoch || known.version !== info.version;
  }

  /** Keep the statistics. The server may answer those of an earlier state again, which are no news. */
  learn(name, statistics) {
    const known = this.statistics.get(name);
    if (known && known.epoch === statistics.epoch && known.version === statistics.version) return false;
    this.statistics.set(name, statistics);
    if (statistics.norm !== null) this.curves.set(name, [...this.norms(name), statistics.norm].slice(-MAX_NORMS));
    return true;
  }

  /** Forget the buffers that are gone. */
  keep(names) {
    for (const name of this.statistics.keys()) {
      if (!names.has(name)) {
        this.statistics.delete(name);
        this.curves.delete(name);
      }
    }
  }
}

function together(each) {
  const sum = (name) => each.reduce((all, one) => all + one[name], 0);
  const norm = Math.sqrt(each.reduce((all, one) => all + (one.norm ?? 0) ** 2, 0));
  return { norm, nan: sum("nan"), infinite: sum("infinite"), size: sum("size") };
}
