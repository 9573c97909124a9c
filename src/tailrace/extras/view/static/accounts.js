"use strict";
// Accounts: the fate of tokens and groups, ages, waste, money and checks of weights, in words and numbers.

class AccountsView {
  constructor(runs) { this.runs = runs; }

  draw() {
    if (byId("accounts").hidden) return;
    const known = this.runs.filter((run) => run.record && run.figures);
    byId("accounts").replaceChildren(...known.flatMap((run) => {
      const sections = accountsOf(run).map(([title, text, rows]) => element("div", { className: "card" }, element("h2", {}, title), text ? element("p", { className: "muted" }, text) : "", rows.length ? this.#rows(rows) : ""));
      const name = known.length > 1 ? [element("h2", { style: { margin: "0.8rem 0 0.5rem" } }, key(runColour(run.number)), run.figures?.name || "")] : [];
      return [...name, element("div", { className: "accounts" }, ...(sections.length ? sections : [element("div", { className: "empty" }, "Nothing is trained yet.")]))];
    }));
  }

  #rows(rows) {
    const bar = (share) => (share === null ? "" : element("div", { className: "bar" }, element("i", { style: { background: "var(--blue)", width: percent(share, 1) } })));
    const hasShares = rows.some(([, , share]) => share !== null);
    return element("table", {}, ...rows.map(([label, text, share]) => element("tr", {}, element("td", {}, label), element("td", { className: "number" }, text), ...(hasShares ? [element("td", { className: "number" }, share === null ? "" : percent(share, 1)), element("td", {}, bar(share))] : []))));
  }
}
