"use strict";
// The explorer. `state` says what is shown; `draw` shows it in every panel: models are linked through it.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const state = { case: 0, token: 0, hover: null, layer: null, head: -1, kind: null };
const NAMES = { A: "A", A1: "A₁", A2: "A₂", mix: "result", change: "change", plain: "plain" };
const HINTS = {
  A: "the attention map", A1: "the first map", A2: "the second map, subtracted", mix: "what is left of both",
  change: "result − A₁: what the subtraction adds and removes", plain: "the map of the base model without adapter",
};
const SIGNED = new Set(["mix", "change"]);
const percent = (value, digits = 1) => (100 * value).toFixed(digits) + " %";
let panels = [];

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Maps: of each map a block holds six numbers (see quantized in page.py) and, after those of all, 8 bits a weight

async function decode(entry, model, token, part) {
  const bytes = Uint8Array.from(atob(token[part]), (letter) => letter.charCodeAt(0));
  const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const [layers, heads, keys] = model.shape, [first, slots] = entry.picture;
  const rows = part === "mean" ? layers : layers * heads;
  const numbers = new Float32Array(buffer, 0, 6 * rows * model.kinds.length);
  return (kind, row) => {
    const map = model.kinds.indexOf(kind) * rows + row, start = 4 * numbers.length + map * keys;
    const [Levels, top] = kind === "mix" ? [Int8Array, 127] : [Uint8Array, 255];
    const [picture, text, ...sums] = numbers.subarray(6 * map, 6 * map + 6);
    const scale = (key) => (key >= first && key < first + slots ? picture : text);
    return { weights: Float32Array.from(new Levels(buffer, start, keys), (level, key) => (level * scale(key)) / top), sums };
  };
}

async function load({ entry, model }, token) {
  for (const part of ["mean", "heads"]) if (token[part] && !token[part + "Maps"]) token[part + "Maps"] = await decode(entry, model, token, part);
}

// The weights (S) of a kind in a layer and a head, -1 for the mean over heads, and their sums over picture, prompt and
// answer, and that of the first token; null where they were left out
function mapOf(model, token, kind, layer, head) {
  if (kind === "change") {
    const mix = mapOf(model, token, "mix", layer, head), first = mapOf(model, token, "A1", layer, head);
    const minus = (name) => mix[name].map((value, n) => value - first[name][n]);
    return mix && { weights: minus("weights"), sums: minus("sums") };
  }
  if (!model.kinds.includes(kind)) return null;
  if (head < 0) return token.meanMaps ? token.meanMaps(kind, layer) : null;
  return token.headsMaps ? token.headsMaps(kind, layer * model.shape[1] + head) : null;
}

const weights = (...which) => mapOf(...which)?.weights;
const kindsOf = (model) => ["A1", "A2", "A", "mix", "change", "plain"].filter((kind) =>
  model.kinds.includes(kind) || (kind === "change" && model.kinds.includes("mix")));
const shownKind = (model) => (kindsOf(model).includes(state.kind) ? state.kind : "A"); // beside a model with two maps

// Bytes of a letter that the vocabulary lacks: the letter stands at the last of them
function spellBytes(model) {
  let bytes = [];
  for (const [key, text] of Object.entries(model.words)) {
    const byte = text.match(/^<0x(..)>$/), token = model.tokens[key - model.prompt];
    if (!byte) { bytes = []; continue; }
    bytes.push(parseInt(byte[1], 16));
    const letter = new TextDecoder().decode(Uint8Array.from(bytes)), isWhole = !letter.includes("\ufffd");
    model.words[key] = isWhole ? letter : "";
    if (token) token.text = letter;
    if (isWhole) bytes = [];
  }
}

// Drawing: the picture in gray, and over it the weights, interpolated linearly between patches

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (name) => color(name).match(/\w\w/g).map((part) => parseInt(part, 16));

function base(panel, width, height) {
  const name = `${width}×${height}`;
  if (!panel.bases.has(name)) {
    const context = make("canvas", { width, height }).getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.drawImage(panel.image, 0, 0, width, height);
    const pixels = context.getImageData(0, 0, width, height), keep = +color("--keep"), veil = +color("--veil");
    for (let i = 0; i < pixels.data.length; i += 4) {
      const gray = 0.299 * pixels.data[i] + 0.587 * pixels.data[i + 1] + 0.114 * pixels.data[i + 2];
      pixels.data.fill(keep * gray + (1 - keep) * veil, i, i + 3);
    }
    panel.bases.set(name, pixels.data);
  }
  return panel.bases.get(name);
}

function paint(panel, canvas, values, limit) {
  const width = Math.max(1, Math.round((canvas.clientWidth || 60) * Math.min(2, devicePixelRatio || 1)));
  const [w, h] = panel.entry.size, height = Math.max(1, Math.round((width * h) / w)), { columns, rows } = panel;
  Object.assign(canvas, { width, height });
  const pixels = new ImageData(new Uint8ClampedArray(base(panel, width, height)), width, height);
  const grid = values && patches(panel, values), colors = [rgb("--more"), rgb("--less")];
  const between = (size, count) => Array.from({ length: size }, (_, n) => {
    const at = Math.min(count - 1, Math.max(0, ((n + 0.5) * count) / size - 0.5)), low = Math.floor(at);
    return [low, Math.min(count - 1, low + 1), at - low];
  });
  const across = between(width, columns);
  if (grid) between(height, rows).forEach(([top, bottom, down], y) => {
    const row = Array.from({ length: columns }, (_, n) => grid[top * columns + n] * (1 - down) + grid[bottom * columns + n] * down);
    across.forEach(([left, right, part], x) => {
      const value = row[left] * (1 - part) + row[right] * part, opacity = 0.85 * Math.min(1, Math.abs(value) / limit);
      const ink = colors[value < 0 ? 1 : 0], i = 4 * (y * width + x);
      for (let c = 0; c < 3; c++) pixels.data[i + c] += opacity * (ink[c] - pixels.data[i + c]);
    });
  });
  const context = canvas.getContext("2d");
  context.putImageData(pixels, 0, 0);
  if (canvas.classList.contains("big")) outline(context, panel, width, height);
}

function outline(context, panel, width, height) {
  context.lineWidth = 2;
  context.strokeStyle = color("--ink");
  for (const box of panel.entry.boxes) {
    const [left, top, right, bottom] = box.map((value, side) => (value * (side % 2 ? height : width)) / panel.entry.size[side % 2]);
    context.strokeRect(left, top, right - left, bottom - top);
  }
  if (panel.patch === null) return;
  const { columns, rows } = panel, size = [width / columns, height / rows], at = [panel.patch % columns, Math.floor(panel.patch / columns)];
  context.strokeRect(at[0] * size[0], at[1] * size[1], ...size);
}

const patches = (panel, values) => values.slice(panel.entry.picture[0], panel.entry.picture[0] + panel.entry.picture[1]);
const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

// Full color is the largest weight on the picture of all unsigned maps, at least an even share of all keys
function limitOf(panel, kind, layer, head) {
  const of = SIGNED.has(kind) ? [kind] : kindsOf(panel.model).filter((one) => !SIGNED.has(one));
  const maps = of.map((one) => weights(panel.model, panel.token, one, layer, head)).filter(Boolean);
  return Math.max(0, ...maps.map((map) => largest(patches(panel, map))), (kind === "change" ? 0.1 : 1) / panel.model.shape[2]);
}

// Numbers

const lookedAt = (entry) => (entry.text ? "marked words" : "picture");

function drawMasses(panel, [picture, prompt, answer, first], kind) {
  const list = $("dl", panel.root), bar = $(".bar", panel.root), mass = { picture, prompt, answer, first, total: picture + prompt + answer };
  const sign = kind === "change" ? (value) => (value < 0 ? "−" : "+") + percent(Math.abs(value)).replace("%", "points") : percent;
  const rows = [["picture", lookedAt(panel.entry), 1], ["prompt", "prompt (prefix)", 2], ["answer", "answer so far (suffix)", 3]];
  bar.replaceChildren(...rows.map(([name, , number]) => {
    const part = make("i");
    part.style.cssText = `width:${100 * Math.max(0, mass[name])}%;background:var(--mass-${number})`;
    return part;
  }));
  bar.hidden = kind === "change";
  list.replaceChildren(...rows.flatMap(([name, title, number]) => {
    const term = make("dt", { textContent: title });
    term.style.setProperty("--swatch", `var(--mass-${number})`);
    return [term, make("dd", { textContent: sign(mass[name]) })];
  }), make("dt", { textContent: "in all" }), make("dd", { textContent: sign(mass.total) }),
  make("dt", { textContent: "first token (sink)" }), make("dd", { textContent: sign(mass.first) }));
  return mass;
}

function drawWords(panel, values) {
  const most = Math.max(largest(Object.keys(panel.model.words).map((key) => values[key])), 1 / panel.model.shape[2]);
  $(".text", panel.root).replaceChildren(...Object.entries(panel.model.words).flatMap(([key, text]) => {
    const span = make("span", { textContent: text.includes("\n") ? "↵" : text.trim() || text, title: percent(values[key], 2) });
    const name = values[key] < 0 ? "--less" : "--more", share = Math.round((85 * Math.abs(values[key])) / most);
    span.style.background = `color-mix(in srgb, var(${name}) ${share}%, transparent)`;
    if (+key >= panel.model.prompt) span.className = +key < panel.model.prompt + panel.number ? "new" : "new later";
    if (panel.entry.text && +key >= panel.entry.picture[0] && +key < panel.entry.picture[0] + panel.columns) span.classList.add("mark");
    return /^[ ‹]./.test(text) || +key === panel.model.prompt ? [" ", span] : [span];
  }));
}

function drawLaws(panel) {
  const svg = $("svg", panel.root), laws = Object.entries(panel.model.laws), layers = panel.model.shape[0], all = laws.flatMap(([, values]) => values);
  const low = Math.floor(Math.min(...all) / 10) * 10, high = Math.max(low + 10, Math.ceil(Math.max(...all) / 10) * 10);
  const x = (layer) => 34 + (layers > 1 ? (layer / (layers - 1)) * 370 : 185), y = (value) => 166 - ((value - low) / (high - low)) * 150;
  const lines = [low, (low + high) / 2, high].map((v) => `<line class="grid" x1="34" x2="404" y1="${y(v)}" y2="${y(v)}"/><text x="28" y="${y(v) + 4}" text-anchor="end">${v}</text>`);
  const ends = laws.map(([, values]) => y(values[layers - 1]));
  const order = ends.map((_, n) => n).sort((a, b) => ends[a] - ends[b]);
  order.forEach((n, place) => { if (place) ends[n] = Math.max(ends[n], ends[order[place - 1]] + 14); });
  const curves = laws.map(([kind, values], n) => `<polyline class="curve" stroke="var(--series-${n + 1})" points="${values.map((v, layer) => `${x(layer)},${y(v)}`).join(" ")}"/>`
    + `<text x="412" y="${ends[n] + 4}" style="fill:var(--series-${n + 1})">${NAMES[kind]} ${values[layers - 1].toFixed(0)} %</text>`);
  svg.innerHTML = lines.join("") + `<line class="now" x1="${x(state.layer)}" x2="${x(state.layer)}" y1="12" y2="166"/>` + curves.join("")
    + `<text x="34" y="184">layer 1</text><text x="404" y="184" text-anchor="end">${layers}</text>`;
  svg.setAttribute("aria-label", "LAWS by layer. " + laws.map(([kind, values]) => `${NAMES[kind]}: ${values.map((v) => v.toFixed(0)).join(", ")}`).join(". "));
}

// A button with a small map on it
function thumb(label, pressed, hint, onclick) {
  const canvas = make("canvas"), button = make("button", { type: "button", title: hint, onclick }, canvas, make("span", { textContent: label }));
  button.setAttribute("aria-pressed", pressed);
  button.setAttribute("aria-label", `${label}, ${hint}`);
  return button;
}

function drawStrip(panel, selector, items) {
  const strip = $(selector, panel.root);
  if (strip.children.length !== items.length) strip.replaceChildren(...items.map((item) => thumb(item.label, false, item.hint, item.choose)));
  items.forEach((item, n) => {
    const button = strip.children[n];
    button.onclick = item.choose;
    button.setAttribute("aria-pressed", item.on);
    $("span", button).textContent = item.label;
    paint(panel, $("canvas", button), item.values, item.limit);
  });
}

function drawStrips(panel) {
  const { model, token } = panel, { layer, head } = state, kind = shownKind(model), [layers, heads] = model.shape;
  const item = (label, hint, on, choose, one, at, of) => ({ label, hint, on, choose, values: weights(model, token, one, at, of), limit: limitOf(panel, one, at, of) });
  drawStrip(panel, ".strip.kinds", kindsOf(model).map((one) => item(NAMES[one], HINTS[one], one === kind, () => set({ kind: one }), one, layer, head)));
  drawStrip(panel, ".layers .strip", Array.from({ length: layers }, (_, n) => item(`${n + 1}`, `layer ${n + 1}`, n === layer, () => set({ layer: n }), kind, n, head)));
  const factor = model.factor && model.factor[panel.number][layer], symbol = model.formula.includes("μ") ? "μ" : "λ";
  $(".missing", panel.root).textContent = token.heads ? "" : "Single heads of this token are left out to keep the file small.";
  drawStrip(panel, ".heads .strip", token.heads ? Array.from({ length: heads + 1 }, (_, n) => n - 1).map((n) => {
    const value = factor && (n < 0 ? factor.reduce((a, b) => a + b) / heads : factor[n]);
    return item((n < 0 ? "mean" : `${n + 1}`) + (factor ? `\n${symbol} ${value.toFixed(2)}` : ""), n < 0 ? "mean over heads" : `head ${n + 1}`, n === head, () => set({ head: n }), kind, layer, n);
  }) : []);
}

function drawPanel(panel, full) {
  const { model, root } = panel;
  [...$(".tokens", root).children].forEach((button, n) => {
    button.setAttribute("aria-checked", n === panel.number);
    button.tabIndex = n === panel.number ? 0 : -1;
  });
  const head = panel.token.heads ? state.head : -1, kind = shownKind(model), map = mapOf(model, panel.token, kind, state.layer, head);
  if (!map) return "";
  const values = map.weights;
  // models beside each other share a scale
  const limit = Math.max(...panels.map((one) => limitOf(one, shownKind(one.model), state.layer, one.token.heads ? state.head : -1)));
  const big = $(".big", root);
  paint(panel, big, values, limit);
  const signed = SIGNED.has(kind), bar = $(".scale i", root), plain = `color-mix(in srgb, var(--more) 85%, transparent)`;
  bar.style.background = signed ? `linear-gradient(90deg, var(--less), transparent, var(--more))` : `linear-gradient(90deg, transparent, ${plain})`;
  const unit = kind === "change" ? "points" : "% of the attention", top = +(100 * limit).toPrecision(2);
  $(".low", root).textContent = signed ? `−${top}` : "0";
  $(".high", root).textContent = `${signed ? "+" : ""}${top} ${unit}`;
  const mass = drawMasses(panel, map.sums, kind), best = patches(panel, values).reduce((at, value, n, all) => (value > all[at] ? n : at), 0);
  const at = panel.patch ?? best, value = patches(panel, values)[at];
  const row = Math.floor(at / panel.columns) + 1, column = (at % panel.columns) + 1;
  const place = panel.entry.text ? `“${model.words[panel.entry.picture[0] + at].trim() || "␣"}”` : `row ${row}, column ${column} of ${panel.columns}`;
  $(".where", root).textContent = `${panel.patch === null ? "Most on" : "On"} ${place}: ${percent(value, 2)}`;
  drawWords(panel, values);
  if (full) { drawStrips(panel); drawLaws(panel); }
  const summary = `${model.name}: token ${panel.token.text.trim()}, ${HINTS[kind]}, layer ${state.layer + 1}, ${head < 0 ? "mean over heads" : `head ${head + 1}`}: ${percent(mass.picture)} on the ${lookedAt(panel.entry)}, ${percent(mass.first)} on the first token. ${$(".where", root).textContent}.`;
  big.setAttribute("aria-label", summary);
  return summary;
}

let drawing = 0;
async function draw() {
  const mine = ++drawing;
  const numberOf = ({ model }) => Math.min(state.hover ?? state.token, model.tokens.length - 1);
  for (const panel of panels) await load(panel, panel.model.tokens[numberOf(panel)]);
  if (mine !== drawing) return; // something else is to be shown by now
  for (const panel of panels) Object.assign(panel, { number: numberOf(panel), token: panel.model.tokens[numberOf(panel)] });
  const summaries = panels.map((panel) => drawPanel(panel, true));
  $("#layer").value = state.layer + 1;
  $("#layer").setAttribute("aria-valuetext", `layer ${state.layer + 1} of ${$("#layer").max}`);
  $("#layer-out").textContent = `${state.layer + 1} of ${$("#layer").max}`;
  $("#head").value = state.head;
  [...$("#kinds").children].forEach((button) => button.setAttribute("aria-pressed", button.dataset.kind === state.kind));
  if (state.hover === null && !playing) $("#live").textContent = summaries.join(" ");
  document.body.dataset.ready = "yes";
}

function set(change) {
  Object.assign(state, change);
  draw();
}

// A case: its panels and controls

function buildPanel(entry, model) {
  const root = $("#panel").content.firstElementChild.cloneNode(true);
  const grid = make("div", { className: "panel-grid" });
  grid.append(...[...root.children].slice(1));
  root.append(grid);
  const image = make("img", { src: entry.image });
  const rows = entry.text ? 1 : Math.round(Math.sqrt(entry.picture[1])), columns = entry.picture[1] / rows;
  const panel = { root, entry, model, image, columns, rows, patch: null, bases: new Map() };
  for (const what of root.querySelectorAll(".what")) what.textContent = lookedAt(entry);
  $("h2", root).textContent = model.name;
  $(".formula", root).textContent = model.formula || "A";
  $(".hint", root).textContent = kindsOf(model).map((kind) => `${NAMES[kind]}: ${HINTS[kind]}`).join(" · ");
  $(".tokens", root).append(...model.tokens.map((token, n) => tokenButton(token, n)));
  const big = $(".big", root);
  big.onpointermove = (event) => {
    const box = big.getBoundingClientRect(), part = (value, size, count) => Math.min(count - 1, Math.floor((count * value) / size));
    panel.patch = part(event.clientY - box.top, box.height, rows) * columns + part(event.clientX - box.left, box.width, columns);
    drawPanel(panel, false);
  };
  big.onpointerleave = () => { panel.patch = null; drawPanel(panel, false); };
  return panel;
}

function tokenButton(token, n) {
  const button = make("button", { type: "button", disabled: !token.mean }, token.text.trim() || "␣", make("small", { textContent: percent(token.p, 0) }));
  button.setAttribute("role", "radio");
  button.setAttribute("aria-label", `${token.text.trim() || "space"}, probability ${percent(token.p, 0)}`);
  button.title = token.mean ? `probability ${percent(token.p)}` : "left out to keep the file small";
  button.onpointerenter = (event) => { if (event.pointerType === "mouse" && !button.disabled) set({ hover: n }); };
  button.onpointerleave = () => set({ hover: null });
  button.onclick = button.onfocus = () => set({ token: n, hover: null });
  button.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = step && button.parentElement.children[n + step];
    if (next && !next.disabled) { event.preventDefault(); next.focus(); }
  };
  return button;
}

async function openCase(number) {
  const entry = data.cases[number];
  let kinds = [...new Set(entry.models.flatMap(kindsOf))];
  if (kinds.includes("mix")) kinds = kinds.filter((kind) => kind !== "A");
  const layers = Math.max(...entry.models.map((model) => model.shape[0]));
  panels = entry.models.map((model) => buildPanel(entry, model));
  await Promise.all(panels.map((panel) => panel.image.decode()));
  $("#panels").replaceChildren(...panels.map((panel) => panel.root));
  $("#prompt").textContent = entry.prompt;
  $("#picture").src = entry.image;
  $("#picture").hidden = entry.text;
  const said = entry.models.map((model) => `${entry.models.length > 1 ? model.name + ": " : ""}${model.text || "(nothing)"}`).join(" · ");
  $("#verdict").textContent = said + (entry.truth ? ` · right: ${entry.truth}` : "");
  $("#verdict").className = entry.hit === null ? "soft" : entry.hit ? "soft hit" : "soft miss";
  $("#kinds").replaceChildren(...kinds.map((kind) => {
    const button = make("button", { type: "button", textContent: NAMES[kind], title: HINTS[kind], onclick: () => set({ kind }) });
    button.dataset.kind = kind;
    return button;
  }));
  $("#layer").max = Math.min(...entry.models.map((model) => model.shape[0]));
  const heads = Math.min(...entry.models.map((model) => model.shape[1]));
  $("#head").replaceChildren(make("option", { value: -1, textContent: "mean of all" }), ...Array.from({ length: heads }, (_, n) => make("option", { value: n, textContent: `head ${n + 1}` })));
  [...$("#cases").children].forEach((button) => button.setAttribute("aria-pressed", +button.dataset.number === number));
  const last = Math.min($("#layer").max, layers) - 1;
  Object.assign(state, { case: number, token: 0, hover: null, layer: state.layer === null ? null : Math.min(state.layer, last), head: Math.min(state.head, heads - 1), kind: kinds.includes(state.kind) ? state.kind : kinds.includes("mix") ? "mix" : kinds[0] });
  if (state.layer === null) { // begin where the first token takes most from one place that is no sink
    const [panel] = panels, { model } = panel, token = model.tokens[0];
    await load(panel, token);
    const rows = Array.from({ length: (last + 1) * heads }, (_, n) => (token.heads ? [Math.floor(n / heads), n % heads] : [n % (last + 1), -1]));
    const taken = ([layer, head]) => patches(panel, weights(model, token, shownKind(model), layer, head)).map((weight, n) => weight * model.apart[layer][n]);
    const peaks = rows.map((row) => Math.max(...taken(row)));
    [state.layer, state.head] = rows[peaks.indexOf(Math.max(...peaks))];
  }
  await draw();
}

// The gallery: hits and misses

function buildGallery() {
  if (data.cases.length < 2) return;
  $("#gallery").hidden = false;
  const names = { all: () => true, hits: (entry) => entry.hit === true, misses: (entry) => entry.hit === false };
  $("#filter").append(...Object.entries(names).map(([name, keeps]) => {
    const count = data.cases.filter(keeps).length;
    const button = make("button", { type: "button", textContent: `${name} ${count}` });
    button.setAttribute("aria-pressed", name === "all");
    button.onclick = () => {
      [...$("#filter").children].forEach((other) => other.setAttribute("aria-pressed", other === button));
      [...$("#cases").children].forEach((one) => { one.hidden = !keeps(data.cases[+one.dataset.number]); });
    };
    return button;
  }));
  $("#cases").append(...data.cases.map((entry, number) => {
    const text = make("span", { textContent: entry.models[0].text || "(nothing)", className: entry.hit === null ? "" : entry.hit ? "hit" : "miss" });
    const button = make("button", { type: "button", title: entry.prompt, onclick: () => { location.hash = number + 1; } }, make("img", { src: entry.image, alt: "" }), text);
    button.setAttribute("aria-label", `${entry.hit === null ? "" : entry.hit ? "hit: " : "miss: "}${entry.prompt} ${entry.models[0].text}`);
    button.dataset.number = number;
    return button;
  }));
  addEventListener("hashchange", () => openCase(caseOfHash()));
}

const caseOfHash = () => Math.min(data.cases.length, Math.max(1, parseInt(location.hash.slice(1), 10) || 1)) - 1;

let playing = 0;
function play() {
  clearInterval(playing);
  playing = playing ? 0 : setInterval(() => set({ layer: (state.layer + 1) % +$("#layer").max }), 700);
  $("#play").textContent = playing ? "Pause" : "Play";
  $("#play").setAttribute("aria-pressed", !!playing);
}

$("#play").onclick = play;
$("#layer").oninput = (event) => set({ layer: +event.target.value - 1 });
$("#head").onchange = (event) => set({ head: +event.target.value });
const redraw = () => { panels.forEach((panel) => panel.bases.clear()); if (state.layer !== null) draw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
document.title = data.title;
data.cases.forEach((entry) => entry.models.forEach(spellBytes));
buildGallery();
openCase(caseOfHash());
