"use strict";
// Where the data come from: a server that reads the run's files, or the file itself that was written by --output.

class ServedSource {
  isLive = true;
  #etags = new Map();

  async #ask(address) {
    const reply = await fetch(address);
    if (!reply.ok) throw new Error(await reply.text());
    return reply;
  }

  /** What an address answers; null if that is what it answered before. */
  async #news(address) {
    const reply = await this.#ask(address), etag = reply.headers.get("ETag");
    if (etag === this.#etags.get(address)) return null;
    this.#etags.set(address, etag);
    return reply.json();
  }

  figures(run) { return this.#news(`runs/${run}`); }
  record(run) { return this.#news(`runs/${run}/record`); }
  async faster(run) { return (await this.#ask(`runs/${run}/faster`)).json(); }
  async figure(run, name) { return (await this.#ask(`runs/${run}/figure?name=${encodeURIComponent(name)}`)).json(); }
  async window(run, from, to, bins) { return (await this.#ask(`runs/${run}/window?from=${from}&to=${to}&bins=${bins}`)).json(); }
  async sample(run, id) { return (await this.#ask(`runs/${run}/sample?id=${encodeURIComponent(id)}`)).json(); }
  async samples(run, kind, lastRound, search) {
    const asked = new URLSearchParams({ kind, search });
    if (lastRound !== null) asked.set("last_round", lastRound);
    return (await this.#ask(`runs/${run}/samples?${asked}`)).json();
  }
}

class EmbeddedSource {
  isLive = false;
  #runs;

  constructor(runs) { this.#runs = runs; }

  async figures(run) { return this.#runs[run].figures; }
  async record(run) { return this.#runs[run].record; }
  async faster(run) { return this.#runs[run].faster; }
  async figure(run, name) { return this.#runs[run].figures.y[name] || [[]]; }

  /** The shortest of the ranges that the file has and that covers the one asked for. */
  async window(run, from, to) {
    const covers = this.#runs[run].windows.filter((each) => each.from <= from && each.to >= to);
    return covers.reduce((one, other) => (other.to - other.from < one.to - one.from ? other : one), covers[0] || this.#runs[run].windows[0]);
  }

  async samples(run, kind, lastRound, search) {
    const wanted = search.toLowerCase();
    const has = (row) => [row.id, row.prompt, row.text, row.failure].some((text) => (text || "").toLowerCase().includes(wanted));
    return { samples: this.#runs[run].samples[kind].filter((row) => (lastRound === null || row.round <= lastRound) && has(row)), defects: [] };
  }

  async sample(run, id) {
    const found = this.#runs[run].sample[id];
    const note = "this file has the newest samples only; `tailrace view RUN` shows every one";
    return found || { id, source: "", record: {}, spans: [], tokens: null, requests: [], note };
  }
}
