"use strict";
// The simulator behind the page: a worker, which is ended and replaced when it gives no answer in time.

const START_MS = 120000;

class Simulator {
  #base;
  #worker = null;
  #ready = null;
  #waiting = null;
  #number = 0;
  starts = 0;
  /** The time of an answer. It begins when the worker has started. */
  answerMs = 10000;

  /** `onState` is called with {doing, share} while the worker starts, and with {python} when it has. */
  constructor(base, onState) { this.#base = base; this.onState = onState; }

  /** Start the worker, if there is none. */
  start() {
    this.#ready ||= this.#started();
    return this.#ready;
  }

  async #started() {
    if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly: open the page in a newer one");
    this.starts += 1;
    const source = await (await fetch(`${this.#base}worker.js`)).blob();
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    this.#worker = new Worker(address, { type: "module" });
    await new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error("Python has not started within two minutes: load the page again")), START_MS);
      this.#worker.onerror = (event) => reject(new Error(explained(event.message || "the worker could not start")));
      this.#worker.onmessage = ({ data }) => {
        if (data.failed) { clearTimeout(late); reject(new Error(explained(data.failed))); return; }
        this.onState(data);
        if (data.python) { clearTimeout(late); resolve(); }
      };
      this.#worker.postMessage({ base: this.#base });
    });
    URL.revokeObjectURL(address);
    this.#worker.onerror = () => this.#end("the simulator ended: make the set-up smaller");
    this.#worker.onmessage = ({ data }) => { if (data.number === this.#number) this.#settle(data.answer); };
  }

  /** Ask one question; the next one may come when this is answered. Returns an answer, or {problem}. */
  async ask(question) {
    try { await this.start(); } catch (why) { this.#end(); return { problem: why.message }; }
    this.#number += 1;
    return new Promise((resolve) => {
      const late = setTimeout(() => this.#end(`there was no answer within ${this.answerMs / 1000} s: the lines may loop for ever, or the set-up is too large`), this.answerMs);
      this.#waiting = (answer) => { clearTimeout(late); resolve(answer); };
      this.#worker.postMessage({ number: this.#number, question: JSON.stringify(question) });
    });
  }

  #settle(answer) {
    const waiting = this.#waiting;
    this.#waiting = null;
    if (answer.ended) this.#end();
    waiting?.(answer);
  }

  /** End the worker; the next question starts a new one. */
  #end(problem) {
    this.#worker?.terminate();
    this.#worker = this.#ready = null;
    if (problem && this.#waiting) { const waiting = this.#waiting; this.#waiting = null; waiting({ problem }); }
  }
}

/** Why Python could not start, as something that a reader can do. */
function explained(message) {
  if (/memory|allocat/i.test(message)) return "this browser has too little memory for Python: close other pages and load this one again";
  if (/fetch|import|: \d{3}$/i.test(message)) return "a file of the playground is missing: serve its whole folder over HTTP";
  return message;
}
