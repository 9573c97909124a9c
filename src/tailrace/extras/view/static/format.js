"use strict";
// Elements, numbers and colours.

const byId = (id) => document.getElementById(id);

/** Make an element with properties and children: texts and elements. */
function element(tag, properties = {}, ...children) {
  const { style, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  if (style) for (const [name, value] of Object.entries(style)) made.style.setProperty(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** The value of a colour of palette.css now, in the light or in the dark. */
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888888");
  return colours.get(name);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.clear());
const causeColour = (cause) => colour(`cause-${cause}`);
const NUM_RUN_COLOURS = 7;
const runColour = (number) => colour(`run-${number % NUM_RUN_COLOURS}`);
const key = (background, kind = "") => element("i", { className: `key ${kind}`, style: { background } });

/** Four significant digits, and thousands. */
function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size)) : 4 });
}
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;

/** A time in hours, minutes and seconds: "0.42 s", "57 s", "15 h 56 min"; `unit`: the seconds to which it is rounded. */
function duration(seconds, unit = seconds < 1 ? 0.01 : seconds < 10 ? 0.1 : seconds < 7200 ? 1 : 60) {
  const whole = Math.round(seconds / unit) * unit, hours = Math.floor(whole / 3600), minutes = Math.floor(whole % 3600 / 60), rest = whole - 3600 * hours - 60 * minutes;
  const digits = Math.min(4, Math.max(0, -Math.floor(Math.log10(unit) + 1e-9))), left = rest >= unit / 2 ? `${+rest.toFixed(digits)} s` : "";
  return [hours && `${hours} h`, minutes && `${minutes} min`, left].filter(Boolean).join(" ") || "0 s";
}
/** The seconds to which times are rounded in a range of time. */
const unitOf = (span) => (span > 7200 ? 60 : span > 60 ? 1 : 10 ** Math.floor(Math.log10(span / 600)));

/** A bar that is divided by shares, in [cause, share]. */
function sharesBar(parts) {
  return element("div", { className: "bar" }, ...parts.map(([cause, share]) => element("i", { title: cause, style: { background: causeColour(cause), width: percent(share, 2) } })));
}

/** A table of cells: strings, numbers, elements. `onOpen` is called with the number of a row. */
function table(heads, rows, onOpen) {
  const cell = (tag, content, isNumber) => element(tag, { className: isNumber ? "number" : "" }, content);
  const isNumber = heads.map((_, at) => rows.length > 0 && typeof rows[0][at] === "number");
  const body = rows.map((cells, number) => {
    const row = element("tr", {}, ...cells.map((content, at) => cell("td", typeof content === "number" ? format(content) : content, isNumber[at])));
    if (onOpen) {
      Object.assign(row, { className: "opens", tabIndex: 0, onclick: () => onOpen(number), onkeydown: (event) => { if (event.key === "Enter") onOpen(number); } });
    }
    return row;
  });
  return element("div", { className: "scroll" }, element("table", {}, element("tr", {}, ...heads.map((head, at) => cell("th", head, isNumber[at]))), ...body));
}

/** Buttons of which one is pressed. */
function segments(label, choices, chosen, onChoose) {
  const group = element("div", { className: "segments", role: "group", ariaLabel: label });
  for (const [value, text] of choices) {
    const button = element("button", { type: "button", value, ariaPressed: String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const each of group.children) each.ariaPressed = String(each === button);
      onChoose(value);
    });
    group.append(button);
  }
  return group;
}

/** Shares in steps of 1/255, from base64. */
function bytesOf(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** A canvas of a size in CSS pixels, cleared, sharp on the screen. */
function canvasOf(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
