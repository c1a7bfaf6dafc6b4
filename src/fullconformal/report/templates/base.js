// What both pages share. A page's own script follows it and gives `curves`, `number` and `draw`.
const $ = (id) => document.getElementById(id);
const all = (selector) => document.querySelectorAll(selector);
const data = JSON.parse($("data").textContent);
const { levels, methods } = data;
const L = levels.length, Z = 1.959963984540054;
const state = { at: data.start, part: data.part, allParts: false };

// Words and elements ---------------------------------------------------------------------------------------------------

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const floats = (text) => new Float32Array(bytes(text).buffer);
const percent = (x, digits = 1) => (Number.isFinite(x) ? `${(100 * x).toFixed(digits)}\u00a0%` : "–");
const wholePercent = (x) => `${Number((100 * x).toPrecision(4))} %`;
const grouped = (x) => x.toLocaleString("en");
const levelText = (at) => `${Number((100 * levels[at]).toPrecision(6))}\u00a0%`;
// Six colours by three styles of line; the style changes from line to line, for people with colour blindness.
const look = (k) => `line-${k % 6} dash-${(k + Math.floor(k / 6)) % 3}`;
const nameOf = (i) => (data.identifiers ? data.identifiers[i] : null);

// Text is always set as text: whatever a label holds is shown, never run.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function put(element, name, x) {
  element.style.setProperty(name, `${(100 * x).toFixed(2)}%`);
  return element;
}

// Wilson's interval of a share, at 95 %.
function wilson(count, of) {
  const q = count / of, z = (Z * Z) / of, middle = (q + z / 2) / (1 + z);
  const half = (Z / (1 + z)) * Math.sqrt((q * (1 - q)) / of + z / (4 * of));
  return [count === 0 ? 0 : middle - half, count === of ? 1 : middle + half];
}

// Numbers --------------------------------------------------------------------------------------------------------------

const SHARE = /^(coverage|singleton|empty|infinite)/;
const textOf = (name, x) => (SHARE.test(name) ? percent(x) : number(x));

function write(element, name, of) {
  element.value = String(of[name]);
  element.textContent = textOf(name, of[name]);
}

function drawNumbers() {
  const now = curves[0][state.at], level = levels[state.at], said = levelText(state.at), low = now.coverage_high < level;
  all("[data-level]").forEach((element) => { element.textContent = said; });
  all("[data-epsilon]").forEach((element) => { element.textContent = String(Number((1 - level).toPrecision(6))); });
  all("[data-number]").forEach((element) => write(element, element.dataset.number, now));
  all("[data-brief]").forEach((element) => write(element, element.dataset.brief, now));
  all("tr[data-method]").forEach((row) => row.querySelectorAll("[data-cell]").forEach((element) =>
    write(element, element.dataset.cell, curves[Number(row.dataset.method)][state.at])));
  all("[data-verdict]").forEach((element) => {
    element.textContent = low ? "Too low: more misses than chance explains."
      : now.coverage_low > level ? "Above the level, by more than chance." : "At the level, up to chance.";
    element.classList.toggle("bad", low);
  });
  all("[data-legend]").forEach((element) => element.replaceChildren(...methods.map((name, k) => make("span", {},
    make("i", { class: `swatch ${look(k)}` }), make("span", { class: "name" }, name),
    make("b", {}, textOf(element.dataset.legend, curves[k][state.at][element.dataset.legend]))))));
  const slider = $("level");
  slider.value = state.at;
  slider.setAttribute("aria-valuetext", `${said} confidence`);
  slider.style.setProperty("--done", `${(100 * state.at) / Math.max(1, L - 1)}%`);
  all(".presets button").forEach((button) => button.setAttribute("aria-pressed", Number(button.value) === state.at));
}

let speech;
function speak() {
  clearTimeout(speech);
  speech = setTimeout(() => {
    const said = [...all("[data-brief]")].map((element) => `${element.dataset.brief} ${element.textContent}`).join(", ");
    $("spoken").textContent = `At ${levelText(state.at)} confidence: ${said}.`;
  }, 400);
}

// Rows of a table with bars: a label, how many of how many are covered, and the level ----------------------------------------

function track(share, interval, level) {
  const parts = [put(make("i", { class: "bar" }), "width", share)];
  if (interval) parts.push(put(put(make("i", { class: "whisker" }), "left", interval[0]), "width", interval[1] - interval[0]));
  if (level) parts.push(put(make("i", { class: "asked" }), "left", level));
  return make("div", { class: "track" }, ...parts);
}

// The part of all parts that is shown: of many the twelve with the lowest coverage, unless all are asked for.
function drawParts(parts) {
  const level = levels[state.at], many = parts.length > 20;
  const lowest = () => [...parts].sort((a, b) => a.count / a.of - b.count / b.of || b.of - a.of).slice(0, 12);
  $("group-rows").replaceChildren(...(many && !state.allParts ? lowest() : parts).map(({ label, count, of, bin }) => {
    const share = count / of, interval = wilson(count, of), low = interval[1] < level;
    return make("tr", { class: low ? "low" : null }, make("th", { scope: "row", title: label }, label),
      make("td", {}, track(share, interval, level)),
      make("td", {}, low ? make("b", { class: "flag" }, "low ") : null, make("data", { value: share, "data-bin": bin }, percent(share))),
      make("td", {}, `${grouped(count)} of ${grouped(of)}`));
  }));
  const button = $("all-parts");
  if (!button) return;
  button.hidden = !many;
  button.textContent = state.allParts ? "Show the 12 lowest" : `Show all ${parts.length} (these are the 12 lowest)`;
}

// Charts ---------------------------------------------------------------------------------------------------------------

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const linear = (low, high) => (v) => (v - low) / (high - low || 1);

// About `count` round numbers from low to high.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw) || power;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * step; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

// Axes of a chart: the svg, its box, and the places of values; `x` and `y` have a scale to [0, 1], ticks and their text.
function axes(place, { x, y, described, xlabel, ylabel }) {
  const width = Math.max(260, place.clientWidth), height = Math.round(Math.min(340, Math.max(240, width * 0.62)));
  const box = { left: 66, right: width - 14, top: 12, bottom: height - 44 };
  const X = (v) => box.left + x.scale(v) * (box.right - box.left);
  const Y = (v) => Math.min(box.bottom, Math.max(box.top, box.bottom - y.scale(v) * (box.bottom - box.top)));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": described });
  for (const v of y.ticks) {
    svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }));
    svg.append(make("text", { class: "tick", x: box.left - 8, y: Y(v) + 4, "text-anchor": "end" }, y.text(v)));
  }
  for (const v of x.ticks) {
    svg.append(make("line", { class: "mark", x1: X(v), x2: X(v), y1: box.bottom, y2: box.bottom + 4 }));
    const anchor = X(v) > box.right - 16 ? "end" : "middle";
    svg.append(make("text", { class: "tick", x: X(v), y: box.bottom + 18, "text-anchor": anchor }, x.text(v)));
  }
  svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  svg.append(make("text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, xlabel));
  svg.append(make("text", { class: "label", transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, ylabel));
  place.replaceChildren(svg);
  return { svg, box, X, Y };
}

// Curves of all methods against the level, where they are finite; `of` gives value, low and high. Returns what moves the marker.
function chart(place, { label, x, y, of, bands, diagonal }) {
  const described = `${label} against the confidence level; the values at the chosen level are in the numbers above.`;
  const { svg, box, X, Y } = axes(place, { x, y, described, xlabel: "confidence level", ylabel: label });
  if (diagonal) {
    svg.append(make("line", { class: "diagonal", x1: X(levels[0]), y1: Y(levels[0]), x2: X(1), y2: Y(1) }));
    svg.append(make("text", { class: "note", x: box.left + 10, y: box.top + 24 }, "dotted: as promised"));
  }
  const known = methods.map((_, k) => levels.map((_, at) => at).filter((at) => Number.isFinite(of(curves[k][at]).value)));
  // The first method is drawn last.
  const order = methods.map((_, k) => k).reverse();
  for (const k of order) {
    const edge = (side) => known[k].map((at) => [X(levels[at]), Y(of(curves[k][at])[side])]);
    if (known[k].length && (k === 0 || bands)) svg.append(make("path", { class: `band ${look(k)}`, d: `${path(edge("high").concat(edge("low").reverse()))}Z` }));
  }
  for (const k of order) {
    svg.append(make("path", { class: `curve ${look(k)}`, d: path(known[k].map((at) => [X(levels[at]), Y(of(curves[k][at]).value)])) }));
  }
  const marker = make("g", { class: "marker" });
  svg.append(marker);
  svg.addEventListener("click", (event) => {
    const away = (level) => Math.abs(X(level) - (event.clientX - svg.getBoundingClientRect().left));
    choose(levels.reduce((best, level, at) => (away(level) < away(levels[best]) ? at : best), 0));
  });
  return () => {
    const here = X(levels[state.at]);
    marker.replaceChildren(make("line", { x1: here, x2: here, y1: box.top, y2: box.bottom }));
    for (const k of order) {
      const { value } = of(curves[k][state.at]);
      if (Number.isFinite(value)) marker.append(make("circle", { class: look(k), cx: here, cy: Y(value), r: k ? 3.5 : 5 }));
    }
  };
}

let moveMarkers = [];

// Coverage against the level, the same on both pages.
function coverageChart() {
  const floor = Math.max(0, Math.floor(10 * Math.min(levels[0], ...curves.flat().map((now) => now.coverage_low))) / 10);
  return chart($("chart-coverage"), {
    label: "coverage", diagonal: true, bands: false, of: (now) => ({ value: now.coverage, low: now.coverage_low, high: now.coverage_high }),
    x: { scale: linear(levels[0], 1), ticks: ticks(levels[0], 1, $("chart-coverage").clientWidth > 450 ? 5 : 3), text: wholePercent },
    y: { scale: linear(floor, 1), ticks: ticks(floor, 1, 5), text: wholePercent },
  });
}

// Control --------------------------------------------------------------------------------------------------------------

function drawAll() {
  drawNumbers();
  moveMarkers.forEach((move) => move());
  draw();
  speak();
}

function choose(at) {
  if (at === state.at) return;
  state.at = at;
  drawAll();
}

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
  $("theme").querySelector("span").textContent = name;
  $("theme").onclick = () => theme(THEMES[(THEMES.indexOf(name) + 1) % THEMES.length]);
}

// `redrawParts` draws the parts of another grouping, `redraw` the charts for another width.
function start({ names, redrawParts, redraw }) {
  all("[hidden].js, #control, #theme").forEach((element) => { element.hidden = false; });
  const slider = $("level"), presets = document.querySelector(".presets");
  slider.max = L - 1;
  slider.addEventListener("input", () => choose(Number(slider.value)));
  const near = (wanted) => levels.findIndex((level) => Math.abs(level - wanted) < 1e-9);
  const usual = [...new Set([0.8, 0.9, 0.95, 0.99, levels[data.start]].map(near))].filter((at) => at >= 0).sort((a, b) => a - b);
  presets.append(...usual.map((at) => make("button", { type: "button", value: at }, levelText(at))));
  presets.addEventListener("click", (event) => { if (event.target.value) choose(Number(event.target.value)); });
  $("grouping").append(...names.map((name, k) => make("option", { value: k }, name)));
  $("grouping").value = state.part;
  $("grouping").addEventListener("change", () => { state.part = Number($("grouping").value); redrawParts(); });
  theme("auto");
  drawAll();
  let drawn = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width !== drawn) { drawn = contentRect.width; redraw(); }
  }).observe($("chart-coverage"));
}
