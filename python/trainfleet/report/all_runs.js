// The page of all runs. Strings of a run are untrusted: they only become text, never markup.
"use strict";
const MOST = 14, FIRST_ROWS = 300, EVERY = 10000, HEIGHT = 200, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 34;
const NO = "—", SVG = "http://www.w3.org/2000/svg", $ = query => document.querySelector(query), isNumber = value => typeof value === "number" && isFinite(value);

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) key in node ? node[key] = value : node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Numbers as report/history.py writes them
const digits = (value, count) => String(+value.toPrecision(count));
function quantity(value) {
  if (!isNumber(value)) return NO;
  const [size, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= 0.9995 * size) || [1, ""];
  return digits(value / size, 3) + unit;
}
function duration(seconds) {
  if (!isNumber(seconds)) return NO;
  const whole = Math.round(seconds);
  for (const [size, unit, rest, of] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]])
    if (whole >= size) return `${Math.floor(whole / size)} ${unit} ${String(Math.floor(whole % size / rest)).padStart(2, "0")} ${of}`;
  return whole < 10 && seconds % 1 ? `${digits(seconds, 2)} s` : `${whole} s`;
}
function ago(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= 2 * size) || [1, "s"];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit}`;
}
const fixed = value => isNumber(value) ? value.toFixed(3) : NO, whole = value => isNumber(value) ? value.toLocaleString("en") : NO;
const dollars = value => isNumber(value) ? `$${value >= 1000 || !value ? Math.round(value).toLocaleString("en") : value.toFixed(2)}` : NO;

const COLUMNS = {
  name: ["run", run => run.name], status: ["state", run => run.status],
  step: ["step", run => run.step > 0 ? `${whole(run.step)} / ${whole(run.steps)}` : NO],
  loss: ["loss", run => fixed(run.loss)], valid_loss: ["validation", run => fixed(run.valid_loss)],
  tokens_per_second: ["tokens/s", run => quantity(run.tokens_per_second)], usd: ["cost", run => dollars(run.usd)],
  nodes: ["nodes", run => whole(run.nodes)], model: ["model", run => run.model || NO], updated: ["age", run => ago(now - run.updated)],
};
const STATES = ["running", "not started", "finished", "stopped", "failed", "interrupted", "unreadable"];
const RISING = ["name", "status", "loss", "valid_loss", "model", "updated"];  // columns that a first click sorts upwards
const FIGURES = {
  loss: ["Training loss", "nats per token", value => digits(value, 4), fixed], valid_loss: ["Validation loss", "nats per token", value => digits(value, 4), fixed],
  lr: ["Learning rate", "", value => digits(value, 3), value => value.toPrecision(3)],
  grad_norm: ["Gradient norm", "before clipping", value => digits(value, 3), value => value.toPrecision(3)],
  tokens_per_second: ["Throughput", "tokens per second, all ranks", quantity, quantity],
};
const SMOOTHED = ["loss", "tokens_per_second"];
const AXES = {step: ["Step", quantity], tokens: ["Tokens", quantity], elapsed: ["Time", value => duration(value).replace(/ 00 .*/, "")], usd: ["Dollars", dollars]};
const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000];  // seconds between ticks
const TITLES = {step: "step", tokens: "tokens", elapsed: "training time", usd: "cost, spread evenly over the training time"};
let runs = [], now = 0, total = 0, rows = new Map(), curves = new Map(), close = new Map(), all = false, range = null, asked = "", pending = new Set();
const saved = (() => { try { return JSON.parse(decodeURIComponent(location.hash.slice(1))); } catch { return {}; } })();
let sort = Object.hasOwn(COLUMNS, saved.sort) ? saved.sort : "updated", down = saved.down === true;
let axis = Object.hasOwn(AXES, saved.axis) ? saved.axis : "step";
const chosen = new Map(), logs = new Set(Array.isArray(saved.logs) ? saved.logs : []);  // run id → color

function keep() {
  const state = {sort, down, axis, logs: [...logs], filter: $("#filter").value, runs: [...chosen.keys()]};
  history.replaceState(null, "", `${location.pathname}${location.search}#${encodeURIComponent(JSON.stringify(state))}`);
}
async function ask(path) {
  const answer = await fetch(path).catch(() => { throw new Error("it no longer answers"); });
  if (!answer.ok) throw new Error(answer.status === 403 ? "open this page with the full address that make watch printed" : `the server answered ${answer.status}`);
  return answer.json();
}
const isShown = run => $("#filter").value.toLowerCase().split(/\s+/).every(word => `${run.name} ${run.where} ${run.status} ${run.model || ""} ${run.note || ""}`.toLowerCase().includes(word));
function ordered() {
  const value = run => sort === "updated" ? now - run.updated : run[sort];
  const known = run => value(run) !== undefined && value(run) !== null && value(run) !== "";
  const compare = (a, b) => typeof value(a) === "string" ? value(a).localeCompare(value(b), "en", {numeric: true}) : value(a) - value(b);
  return runs.filter(isShown).sort((a, b) => known(b) - known(a) || (known(a) ? (down ? -1 : 1) * compare(a, b) : 0));
}

function head() {
  const pick = el("input", {type: "checkbox", ariaLabel: `Choose the first ${MOST} runs shown`, checked: chosen.size > 0, onchange: () => {
    chosen.clear();
    if (pick.checked) ordered().slice(0, MOST).forEach(run => choose(run.id, true));
    changed();
  }});
  const titles = Object.entries(COLUMNS).map(([key, [title]]) => {
    const cell = el("th", {className: key, scope: "col"}, el("button", {textContent: title, onclick: () => { down = sort === key ? !down : RISING.indexOf(key) < 0; sort = key; keep(); list(); }}));
    if (key === sort) cell.ariaSort = down ? "descending" : "ascending";
    return cell;
  });
  return [el("th", {className: "pick"}, pick), ...titles, el("th", {className: "links"})];
}
function links(run) {
  const made = (path, word) => el("a", {href: `${path}?run=${run.id}`, target: "_blank", rel: "noopener", textContent: word, ariaLabel: `${word} of ${run.name}`});
  return [...(run.report ? [made("/report", "report")] : []), ...(run.log ? [made("/log", "log")] : [])];
}
function row(run) {
  const box = el("input", {type: "checkbox", id: `run-${run.id}`, onchange: () => { choose(run.id, box.checked); changed(); }});
  const cells = Object.keys(COLUMNS).map(key => el("td", {className: key}));
  const label = el("label", {htmlFor: box.id}), sub = el("small", {className: "sub"}), note = el("small");
  cells[0].append(label, sub, note), cells[1].append(el("span"));
  const line = el("tr", {}, el("td", {className: "pick"}, box), ...cells, el("td", {className: "links"}));
  return {line, box, cells, label, sub, note, last: line.lastChild, said: ""};
}
function fill(made, run) {
  Object.values(COLUMNS).slice(2).forEach(([, show], index) => { const said = show(run), cell = made.cells[index + 2]; if (cell.textContent !== said) cell.textContent = said; });
  made.box.checked = chosen.has(run.id);
  made.box.disabled = !chosen.has(run.id) && chosen.size >= MOST;
  made.box.style.setProperty("--k", chosen.has(run.id) ? `var(--c${chosen.get(run.id) % 7})` : "");
  const said = JSON.stringify(run);
  if (said === made.said) return;
  made.said = said;
  made.label.textContent = run.name;
  made.sub.textContent = [run.where, run.model, isNumber(run.nodes) && `${run.nodes} node${run.nodes > 1 ? "s" : ""}`, run.step > 0 && (run.step === run.steps ? `${whole(run.step)} steps` : `step ${quantity(run.step)} / ${quantity(run.steps)}`)].filter(Boolean).join(" · ");
  Object.assign(made.note, {textContent: run.note || "", className: ["running", "not started"].includes(run.status) ? "" : "bad"});
  Object.assign(made.cells[1].firstChild, {textContent: run.status, className: run.status});
  made.last.replaceChildren(...links(run));
}
function list() {
  const found = ordered(), shown = all ? found : found.slice(0, FIRST_ROWS), body = $("tbody"), focus = document.activeElement;
  $("thead tr").replaceChildren(...head());
  if (focus.closest?.("thead")) $(`thead .${focus.parentNode.className} > *`)?.focus();
  const lines = shown.map(run => {
    if (!rows.has(run.id)) rows.set(run.id, row(run));
    fill(rows.get(run.id), run);
    return rows.get(run.id).line;
  });
  if (lines.length !== body.children.length || lines.some((line, index) => line !== body.children[index])) body.replaceChildren(...lines);
  if (body.contains(focus)) focus.focus({preventScroll: true});
  const states = Object.fromEntries(STATES.map(state => [state, runs.filter(run => run.status === state).length]).filter(([, count]) => count));
  const newest = total > runs.length ? [`newest ${whole(runs.length)} of ${whole(total)} runs`] : [`${whole(total)} run${total === 1 ? "" : "s"}`];
  $("#counts").textContent = [...newest, ...Object.entries(states).map(([state, count]) => `${whole(count)} ${state}`), ...(found.length < runs.length ? [`${whole(found.length)} shown`] : [])].join(" · ");
  $(".empty").hidden = found.length > 0;
  $(".empty").textContent = runs.length ? "No run matches the filter." : "No runs in this folder yet. The first make train adds one.";
  $("#more").hidden = shown.length === found.length;
  $("#more").textContent = `Show all ${whole(found.length)} runs`;
}

function choose(id, is) {
  if (!is) return chosen.delete(id);
  const taken = new Set(chosen.values());
  if (chosen.size < MOST) chosen.set(id, [...Array(MOST).keys()].find(color => !taken.has(color)));
}
function changed() {
  if (!chosen.size) range = null;
  for (const update of [keep, list, side, load]) update();
}
const paint = (node, id) => { node.style.setProperty("--k", `var(--c${chosen.get(id) % 7})`); if (chosen.get(id) > 6) node.classList.add("dashed"); return node; };
const swatch = id => paint(el("span", {className: "line"}), id);
const known = () => [...chosen.keys()].map(id => runs.find(run => run.id === id)).filter(Boolean);

async function load() {
  for (const run of known().filter(run => curves.get(run.id)?.updated !== run.updated && !pending.has(run.id))) {
    pending.add(run.id);
    ask(`/curves.json?run=${run.id}`).catch(error => ({fault: error.message, updated: null})).then(found => {
      pending.delete(run.id);
      curves.set(run.id, {updated: run.updated, ...found});
      if (chosen.has(run.id)) side();
    });
  }
  const names = known().map(run => `run=${run.id}`).join("&");
  if (names === asked) return;
  asked = names;
  const found = known().length > 1 ? await ask(`/differences.json?${names}`).catch(error => ({fault: error.message})) : {};
  if (asked === names) differences(found);
}
async function zoom() {
  const wanted = range;
  for (const run of known()) {
    const curve = curves.get(run.id), [steps, xs] = clock(curve);
    if (!(curve.loss?.[0].length > 990)) continue;
    const [begin, end] = wanted.map(x => Math.max(0, Math.round(axis === "step" ? x : between(x, xs, steps))));
    const found = await ask(`/curves.json?run=${run.id}&begin=${begin}&end=${end}`).catch(() => null);
    if (range !== wanted) return;
    if (found && !found.fault) close.set(run.id, found);
  }
  side();
}
function differences(found) {
  const names = known().map(run => el("th", {scope: "col"}, swatch(run.id), run.name));
  const lines = Object.entries(found.keys || {}).map(([key, values]) => el("tr", {}, el("td", {className: "key", textContent: key}), ...values.map(value => el("td", {textContent: value}))));
  const body = lines.length ? el("div", {className: "scroll", tabIndex: 0}, el("table", {}, el("tr", {}, el("th"), ...names), ...lines)) : el("p", {textContent: found.fault || "none"});
  $("#differences").replaceChildren(...(found.keys || found.fault ? [el("h2", {textContent: "Config differences"}), body] : []));
}

// Returns y at x by linear interpolation, for ascending xs.
function between(x, xs, ys) {
  let low = 0, high = xs.length - 1;
  if (high < 1 || x <= xs[0]) return ys[0] ?? NaN;
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low] || 1);
}
// Returns the steps of a curve, and where they are on the horizontal axis.
function clock(curve) {
  if (!curve || curve.fault) return [[], []];
  if (axis === "tokens") return curve.tokens;
  const [steps, seconds] = curve.elapsed, last = seconds[seconds.length - 1];
  if (axis === "elapsed") return [steps, seconds];
  if (axis === "usd") return isNumber(curve.usd) && last ? [steps, seconds.map(value => value * curve.usd / last)] : [[], []];
  return [curve.loss[0], curve.loss[0]];
}
function points(id, name) {
  const curve = curves.get(id), [steps, xs] = clock(curve), [at, ys] = (range && close.get(id) || curve)?.[name] || [[], []];
  if (!steps.length) return [[], []];
  return [axis === "step" ? at : at.map(step => between(step, steps, xs)), ys];
}
function ticks(low, high, count, steps = []) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough)), found = [];
  const step = steps.find(step => step >= rough) || [1, 2, 5, 10].find(factor => factor * power >= rough) * power;
  for (let value = Math.ceil(low / step); value * step <= high + step / 1e6 && found.length < 50; value++) found.push(value * step);
  return found;
}
// A moving average over 2 % of the points, as in the report. The window narrows at both ends.
function smooth(points) {
  const sums = [0], last = points.length - 1, most = Math.max(Math.floor(points.length / 100), 2);
  for (const [, y] of points) sums.push(sums[sums.length - 1] + y);
  return points.map(([x], index) => { const half = Math.min(index, last - index, most); return [x, (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)]; });
}
function powers(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) for (const factor of high / low > 100 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  const inside = found.filter(value => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 3);
}

// One chart. `shape` is what it last drew: its scales, and the points of each run.
class Chart {
  constructor(name) {
    this.name = name;
    this.svg = draw("svg", {tabindex: 0, role: "img"});
    this.tip = el("div", {className: "tip", hidden: true});
    this.log = el("button", {textContent: "log", title: "Logarithmic vertical axis", onclick: () => { logs.has(name) ? logs.delete(name) : logs.add(name); keep(); this.show(); }});
    this.node = el("figure", {}, el("header", {}, el("h2", {textContent: FIGURES[name][0]}, el("small", {textContent: FIGURES[name][1]})), this.log), this.svg, this.tip);
    this.svg.onpointerdown = event => { if (event.button) return; this.from = this.x(event); try { this.svg.setPointerCapture(event.pointerId); } catch { /* the pointer is gone */ } };
    this.svg.onpointermove = event => this.hover(this.x(event));
    this.svg.onpointerup = event => { const from = this.from, x = this.x(event); this.from = undefined; if (from !== undefined && Math.abs(x - from) > 8) see([this.value(Math.min(x, from)), this.value(Math.max(x, from))]); else this.hover(x); };
    this.svg.onpointerleave = this.svg.onblur = this.svg.onpointercancel = () => { this.from = undefined; this.hover(); };
    this.svg.ondblclick = () => see(null);
    this.svg.onkeydown = event => this.key(event);
  }
  x(event) { const box = this.svg.getBoundingClientRect(); return Math.min(Math.max(event.clientX - box.left, LEFT), box.width - RIGHT); }
  value(x) { const {left, right, width} = this.shape; return left + (x - LEFT) / width * (right - left); }
  show() {
    const isLog = logs.has(this.name), width = Math.max(60, this.node.clientWidth - LEFT - RIGHT), height = HEIGHT - TOP - BOTTOM;
    const lines = [...chosen.keys()].map(id => [id, ...points(id, this.name)]).filter(([, xs]) => xs.length);
    this.node.hidden = !lines.length;
    this.log.setAttribute("aria-pressed", isLog);
    if (!lines.length) return;
    const [left, right] = range || [Math.min(0, ...lines.map(([, xs]) => xs[0])), Math.max(...lines.map(([, xs]) => xs[xs.length - 1])) || 1];
    let low = Infinity, high = -Infinity;
    for (const [, xs, ys] of lines) for (let index = 0; index < xs.length; index++) if (xs[index] >= left && xs[index] <= right && (!isLog || ys[index] > 0)) { low = Math.min(low, ys[index]); high = Math.max(high, ys[index]); }
    if (low > high) [low, high] = isLog ? [1, 10] : [0, 1];
    const pad = isLog ? (high / low) ** 0.05 : (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    [low, high] = isLog ? [low / Math.max(pad, 1.01), high * Math.max(pad, 1.01)] : [low >= 0 && low < (high - low) / 2 ? 0 : low - pad, high + pad];
    const at = x => LEFT + (x - left) / (right - left || 1) * width;
    const scale = isLog ? y => Math.log(y / low) / Math.log(high / low) : y => (y - low) / (high - low);
    const up = y => TOP + height - Math.min(Math.max(scale(y), -1), 2) * height;
    this.shape = {left, right, width, height, lines, at, up, isLog};
    const parts = (isLog ? powers(low, high) : ticks(low, high, 5)).flatMap(y => [draw("line", {class: "grid", x1: LEFT, x2: LEFT + width, y1: up(y), y2: up(y)}), draw("text", {x: LEFT - 7, y: up(y) + 4, "text-anchor": "end"}, FIGURES[this.name][2](y))]);
    for (const x of ticks(left, right, Math.max(2, width / 90), axis === "elapsed" ? TIMES : [])) parts.push(draw("text", {x: at(x), y: TOP + height + 16, "text-anchor": at(x) > LEFT + width - 14 ? "end" : "middle"}, AXES[axis][1](x)));
    parts.push(draw("text", {x: LEFT + width, y: HEIGHT - 3, "text-anchor": "end"}, TITLES[axis]));
    const cut = `cut-${this.name}`, clip = draw("clipPath", {id: cut}), over = draw("g", {"clip-path": `url(#${cut})`});
    clip.append(draw("rect", {x: LEFT, y: TOP - 2, width, height: height + 4}));
    for (const [id, xs, ys] of lines) {
      const kept = ys.map((y, index) => [xs[index], y]).filter(([, y]) => !isLog || y > 0);
      const curve = (points, kind) => paint(draw("path", {class: `curve ${kind}`, d: points.map(([x, y], index) => `${index ? "L" : "M"}${at(x).toFixed(1)} ${up(y).toFixed(1)}`).join("")}), id);
      if (SMOOTHED.includes(this.name) && kept.length > 50) over.prepend(curve(kept, "raw")), over.append(curve(smooth(kept), ""));
      else over.append(curve(kept, this.name === "grad_norm" && kept.length > 500 ? "fine" : ""));
      if (kept.length && kept.length < 13) over.append(...kept.map(([x, y]) => paint(draw("circle", {cx: at(x), cy: up(y), r: 2.5}), id)));
    }
    this.above = draw("g", {});
    this.svg.replaceChildren(clip, ...parts, over, this.above);
    this.svg.setAttribute("aria-label", `${FIGURES[this.name][0]} of ${lines.length} runs by ${TITLES[axis]}. Arrow keys move the cursor, plus and minus zoom, Escape shows all.`);
    this.hover();
  }
  hover(x) {
    this.cursor = x;
    this.tip.hidden = x === undefined || !this.shape;
    if (this.tip.hidden) return this.above?.replaceChildren();
    const {lines, at, up, height, width, isLog} = this.shape, value = this.value(x), found = [];
    for (const [id, xs, ys] of lines) {
      let low = 0, high = xs.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= value) low = middle; else high = middle; }
      const index = Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
      if (Math.abs(at(xs[index]) - x) < 24 && (!isLog || ys[index] > 0)) found.push([id, xs[index], ys[index]]);
    }
    const marks = found.map(([id, x, y]) => paint(draw("circle", {cx: at(x), cy: up(y), r: 4}), id));
    const zone = this.from === undefined ? [] : [draw("rect", {class: "zoom", x: Math.min(x, this.from), y: TOP, width: Math.abs(x - this.from), height})];
    this.above.replaceChildren(...zone, draw("line", {class: "at", x1: x, x2: x, y1: TOP, y2: TOP + height}), ...marks);
    const names = new Map(runs.map(run => [run.id, run.name])), exact = found.length ? found[0][1] : value;
    const lines_ = found.sort((a, b) => b[2] - a[2]).map(([id, , y]) => el("p", {}, swatch(id), el("span", {textContent: names.get(id)}), el("b", {textContent: FIGURES[this.name][3](y)})));
    this.tip.replaceChildren(el("p", {textContent: `${AXES[axis][0]} ${axis === "step" ? whole(Math.round(exact)) : AXES[axis][1](exact)}`}), ...lines_);
    const wide = this.tip.offsetWidth, left = x > LEFT + width / 2 ? x - 14 - wide : x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(left, LEFT + width + RIGHT - wide))}px`;
  }
  key(event) {
    const {left, right, width} = this.shape, x = this.cursor ?? LEFT + width / 2, value = this.value(x), span = right - left;
    const moves = {ArrowLeft: -width / 100, ArrowRight: width / 100}, zooms = {"+": 0.5, "=": 0.5, "-": 2};
    if (moves[event.key]) this.hover(Math.min(Math.max(x + moves[event.key], LEFT), LEFT + width));
    else if (zooms[event.key]) see([Math.max(0, value - span * zooms[event.key] / 2), value + span * zooms[event.key] / 2]);
    else if (event.key === "Escape") see(null);
    else return;
    event.preventDefault();
  }
}
const charts = Object.keys(FIGURES).map(name => new Chart(name));
function see(wanted) {
  range = wanted;
  close.clear();
  side();
  if (range) zoom();
}
function side() {
  $("main").classList.toggle("chosen", chosen.size > 0);
  $("#side").hidden = !chosen.size;
  $("#whole").hidden = !range;
  if (!chosen.size) return;
  $(".legend").replaceChildren(...known().map(run => {
    const curve = curves.get(run.id), off = el("button", {textContent: "×", title: "Remove", ariaLabel: `Remove ${run.name}`, onclick: () => { choose(run.id, false); changed(); }});
    const fault = !curve ? "reading…" : curve.fault || (!curve.loss[0].length ? run.note || "no step logged yet" : !clock(curve)[0].length ? `no ${AXES[axis][0].toLowerCase()} recorded` : "");
    return el("li", {}, swatch(run.id), el("b", {textContent: run.name, title: run.name}), el("span", {className: curve?.fault ? "fault" : "", textContent: fault, hidden: !fault}), ...links(run), off);
  }));
  for (const chart of charts) chart.show();
}
async function look() {
  let said = "";
  try {
    ({now, total, runs, faults: said} = await ask("/runs.json"));
    for (const id of Array.isArray(saved.runs) ? saved.runs : []) if (runs.some(run => run.id === id)) choose(id, true);
    saved.runs = null;
    for (const update of [list, side, load]) update();
  } catch (error) { said = `This is the last state that make watch sent: ${error.message}.`; }
  $("#trouble").textContent = [].concat(said).join("\n");
  $("#trouble").hidden = !said.length;
}

$("fieldset").append(...Object.entries(AXES).map(([key, [title]]) => el("label", {}, el("input", {type: "radio", name: "axis", checked: key === axis, onchange: () => { axis = key; keep(); see(null); }}), title)));
$("#filter").value = typeof saved.filter === "string" ? saved.filter : "";
$("#filter").oninput = () => { all = false; keep(); list(); };
$("#more").onclick = () => { all = true; list(); };
$("#whole").onclick = () => see(null);
$("#clear").onclick = () => { chosen.clear(); changed(); };
$(".figures").append(...charts.map(chart => chart.node));
new ResizeObserver(() => { for (const chart of charts) if (chosen.size) chart.show(); }).observe($(".figures"));
new ResizeObserver(() => document.documentElement.style.setProperty("--top", `${$("body > header").offsetHeight}px`)).observe($("body > header"));
setInterval(() => { if (!document.hidden) look(); }, EVERY);
look();
