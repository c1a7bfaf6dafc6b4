"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { levels, classes, truth, methods } = data;
  const m = truth.length, C = classes.length, L = levels.length;
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  // By method, (m, C): the first position of the slider at which a label is in the set.
  const entry = data.entry.map(bytes);
  // (shown, C), of the first method.
  const p = new Float32Array(bytes(data.p).buffer);
  const shown = data.shown || truth.map((_, i) => i);
  const PAGE = 12, BARS = 5, MANY_CLASSES = 20, Z = 1.959963984540054;
  const state = { at: data.start, filter: "all", truth: "", order: "size", page: 0, allClasses: false };

  // Words and elements ---------------------------------------------------------------------------------------------------

  const $ = (id) => document.getElementById(id);
  const all = (selector) => document.querySelectorAll(selector);
  const percent = (x, digits = 1) => (Number.isFinite(x) ? `${(100 * x).toFixed(digits)}\u00a0%` : "–");
  const number = (x) => (Number.isFinite(x) ? x.toFixed(3) : "–");
  // Six colours by three styles of line; the style changes from line to line, for people with colour blindness.
  const look = (k) => `line-${k % 6} dash-${(k + Math.floor(k / 6)) % 3}`;
  const grouped = (x) => x.toLocaleString("en");
  const wholePercent = (x) => `${Number((100 * x).toPrecision(4))} %`;
  const levelText = (at) => `${Number((100 * levels[at]).toPrecision(6))}\u00a0%`;
  const epsilon = (at) => Number((1 - levels[at]).toPrecision(6));
  const small = (x) => (x >= 0.01 ? x.toFixed(3) : x > 0 ? String(Number(x.toPrecision(2))) : "0");

  // Text is always set as text: whatever a label holds is shown, never run.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "circle", "text", "rect", "title"].includes(tag) && attributes.svg !== false;
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "svg" || value === undefined || value === null || value === false) continue;
      element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // Numbers --------------------------------------------------------------------------------------------------------------

  // Running totals over the slider's positions, by method: covered, sum of sizes, of their squares, sets of one, empty sets.
  function totals(entries) {
    const sum = () => new Float64Array(L + 1);
    const out = { covered: sum(), size: sum(), squares: sum(), one: sum(), empty: sum() };
    out.empty[0] = m;
    for (let i = 0; i < m; i++) {
      const row = entries.slice(i * C, (i + 1) * C).sort();
      out.covered[entries[i * C + truth[i]]] += 1;
      for (let s = 0; s < C; s++) {
        out.size[row[s]] += 1;
        // (s + 1)² − s²
        out.squares[row[s]] += 2 * s + 1;
      }
      out.empty[row[0]] -= 1;
      out.one[row[0]] += 1;
      if (C > 1) out.one[row[1]] -= 1;
    }
    for (const totals of Object.values(out)) for (let k = 1; k <= L; k++) totals[k] += totals[k - 1];
    return out;
  }

  const share = (count, of) => ({ value: count / of, se: of > 1 ? Math.sqrt(((count / of) * (1 - count / of)) / (of - 1)) : NaN });

  // Wilson's interval of a share, at 95 %.
  function wilson(count, of) {
    const q = count / of, z = (Z * Z) / of;
    const middle = (q + z / 2) / (1 + z);
    const half = (Z / (1 + z)) * Math.sqrt((q * (1 - q)) / of + z / (4 * of));
    return [count === 0 ? 0 : middle - half, count === of ? 1 : middle + half];
  }

  const sums = entry.map(totals);
  function numbers(method, at) {
    const of = sums[method], mean = of.size[at] / m;
    const variance = m > 1 ? Math.max(0, of.squares[at] - m * mean * mean) / (m - 1) : NaN;
    return {
      coverage: share(of.covered[at], m), size: { value: mean, se: Math.sqrt(variance / m) },
      singleton: share(of.one[at], m), empty: share(of.empty[at], m), interval: wilson(of.covered[at], m),
    };
  }
  const curves = methods.map((_, k) => levels.map((_, at) => numbers(k, at)));

  const objects = new Array(C).fill(0);
  truth.forEach((k) => { objects[k] += 1; });
  const present = [...objects.keys()].filter((k) => objects[k] > 0);
  function coveredByClass(at) {
    const covered = new Array(C).fill(0);
    for (let i = 0; i < m; i++) if (entry[0][i * C + truth[i]] <= at) covered[truth[i]] += 1;
    return covered;
  }

  // The numbers on the page ----------------------------------------------------------------------------------------------

  function write(element, name, of) {
    const [key, se] = name.split("_");
    const x = se ? of[key].se : of[key].value;
    element.value = String(x);
    element.textContent = key === "size" ? number(x) : percent(x);
  }

  function drawNumbers() {
    const now = curves[0][state.at], text = levelText(state.at), [low, high] = now.interval;
    all("[data-level]").forEach((element) => { element.textContent = text; });
    all("[data-epsilon]").forEach((element) => { element.textContent = String(epsilon(state.at)); });
    all("[data-number]").forEach((element) => write(element, element.dataset.number, now));
    all("tr[data-method]").forEach((row) => row.querySelectorAll("[data-cell]").forEach((element) =>
      write(element, element.dataset.cell, curves[Number(row.dataset.method)][state.at])));
    all("[data-brief]").forEach((element) => write(element, element.dataset.brief, now));
    const level = levels[state.at];
    const verdict = high < level ? "Too low: more misses than chance explains."
      : low > level ? "Above the level, by more than chance." : "At the level, up to chance.";
    all("[data-verdict]").forEach((element) => {
      element.textContent = verdict;
      element.classList.toggle("bad", high < level);
    });
    const slider = $("level");
    slider.value = state.at;
    slider.setAttribute("aria-valuetext", `${text} confidence`);
    slider.style.setProperty("--done", `${(100 * state.at) / (L - 1)}%`);
    all(".presets button").forEach((button) => button.setAttribute("aria-pressed", Number(button.value) === state.at));
  }

  let speech;
  function speak() {
    clearTimeout(speech);
    speech = setTimeout(() => {
      const now = curves[0][state.at];
      $("spoken").textContent = `At ${levelText(state.at)} confidence: coverage ${percent(now.coverage.value)}, mean size ${number(now.size.value)}.`;
    }, 400);
  }

  // Charts ---------------------------------------------------------------------------------------------------------------

  function legend(kind) {
    const place = document.querySelector(`[data-legend="${kind}"]`);
    const value = (k) => (kind === "size" ? number(curves[k][state.at].size.value) : percent(curves[k][state.at].coverage.value));
    place.replaceChildren(...methods.map((name, k) =>
      make("span", {}, make("i", { class: `swatch ${look(k)}` }), make("span", { class: "name" }, name), make("b", {}, value(k)))));
  }

  function path(points) {
    return points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  }

  // One chart of curves against the level. `of` gives value, low and high at a position; `x` and `y` are the scales.
  function chart(place, { label, x, y, of, bands, diagonal, described }) {
    const width = Math.max(260, place.clientWidth), height = Math.round(Math.min(340, Math.max(240, width * 0.62)));
    const box = { left: 62, right: width - 14, top: 12, bottom: height - 44 };
    const X = (level) => box.left + x.scale(level) * (box.right - box.left);
    const Y = (v) => box.bottom - y.scale(v) * (box.bottom - box.top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": described });
    for (const v of y.ticks) {
      svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }));
      svg.append(make("text", { class: "tick", x: box.left - 8, y: Y(v) + 4, "text-anchor": "end" }, y.text(v)));
    }
    for (const v of x.ticks) {
      svg.append(make("line", { class: "mark", x1: X(v), x2: X(v), y1: box.bottom, y2: box.bottom + 4 }));
      const anchor = X(v) > box.right - 16 ? "end" : "middle";
      svg.append(make("text", { class: "tick", x: X(v), y: box.bottom + 18, "text-anchor": anchor }, wholePercent(v)));
    }
    svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    svg.append(make("text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, "confidence level"));
    svg.append(make("text", { class: "label", transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, label));
    const clamp = (v) => Math.min(box.bottom, Math.max(box.top, v));
    if (diagonal) {
      const first = levels[0];
      svg.append(make("line", { class: "diagonal", x1: X(first), y1: Y(first), x2: X(1), y2: Y(1) }));
      svg.append(make("text", { class: "note", x: box.left + 10, y: box.top + 24 }, "dotted: as promised"));
    }
    for (let k = methods.length - 1; k >= 0; k--) {
      if (k === 0 || bands) {
        const upper = levels.map((level, at) => [X(level), clamp(Y(of(k, at).high))]);
        const lower = levels.map((level, at) => [X(level), clamp(Y(of(k, at).low))]).reverse();
        svg.append(make("path", { class: `band ${look(k)}`, d: `${path(upper.concat(lower))}Z` }));
      }
    }
    for (let k = methods.length - 1; k >= 0; k--) {
      svg.append(make("path", { class: `curve ${look(k)}`, d: path(levels.map((level, at) => [X(level), clamp(Y(of(k, at).value))])) }));
    }
    const marker = make("g", { class: "marker" });
    svg.append(marker);
    place.replaceChildren(svg);
    svg.addEventListener("click", (event) => {
      const away = (level) => Math.abs(X(level) - (event.clientX - svg.getBoundingClientRect().left));
      choose(levels.reduce((best, level, at) => (away(level) < away(levels[best]) ? at : best), 0));
    });
    return () => {
      const here = X(levels[state.at]);
      marker.replaceChildren(make("line", { x1: here, x2: here, y1: box.top, y2: box.bottom }));
      for (let k = methods.length - 1; k >= 0; k--) {
        marker.append(make("circle", { class: `${look(k)}`, cx: here, cy: clamp(Y(of(k, state.at).value)), r: k ? 3.5 : 5 }));
      }
    };
  }

  let moveMarkers = [];
  function drawCharts() {
    const lowest = Math.min(levels[0], ...curves.flat().map((now) => now.interval[0]));
    const floor = Math.max(0, Math.floor(lowest * 10) / 10);
    const tens = (from) => [...Array(11).keys()].filter((v) => v / 10 >= from - 1e-9 && (from > 0.3 || v % 2 === 0)).map((v) => v / 10);
    const nines = (level) => Math.log((1 - levels[0]) / (1 - level)) / Math.log((1 - levels[0]) / (1 - levels[L - 1]));
    const largest = Math.max(1, ...curves.flat().map((now) => now.size.value));
    const least = Math.max(0.05, Math.min(0.8, ...curves.flat().map((now) => now.size.value)));
    const ends = [Math.log(least), Math.log(largest * 1.05)];
    const sizes = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].filter((v) => v >= least && v <= largest * 1.05);
    const nineTicks = $("chart-size").clientWidth > 450 ? [0.5, 0.8, 0.9, 0.95, 0.99, 0.999] : [0.5, 0.9, 0.99, 0.999];
    moveMarkers = [
      chart($("chart-coverage"), {
        label: "coverage", diagonal: true, bands: false, described: "Coverage against the confidence level; the values at the chosen level are in the numbers above.",
        x: { scale: (v) => (v - levels[0]) / (1 - levels[0]), ticks: tens(levels[0]) },
        y: { scale: (v) => (v - floor) / (1 - floor), ticks: tens(floor), text: wholePercent },
        of: (k, at) => ({ value: curves[k][at].coverage.value, low: curves[k][at].interval[0], high: curves[k][at].interval[1] }),
      }),
      chart($("chart-size"), {
        label: "mean set size", bands: true, described: "Mean set size against the confidence level; the values at the chosen level are in the numbers above.",
        x: { scale: nines, ticks: nineTicks.filter((v) => v >= levels[0] && v <= levels[L - 1]) },
        y: { scale: (v) => (Math.log(Math.max(v, least)) - ends[0]) / (ends[1] - ends[0]), ticks: sizes, text: String },
        of: (k, at) => {
          const { value, se } = curves[k][at].size, half = Number.isFinite(se) ? Z * se : 0;
          return { value, low: value - half, high: value + half };
        },
      }),
    ];
    moveMarkers.forEach((move) => move());
  }

  // Label by label -------------------------------------------------------------------------------------------------------

  function drawClasses() {
    const covered = coveredByClass(state.at), level = levels[state.at];
    const many = present.length > MANY_CLASSES;
    let order = present;
    if (many && !state.allClasses) {
      order = [...present].sort((a, b) => covered[a] / objects[a] - covered[b] / objects[b] || objects[b] - objects[a]).slice(0, 12);
    }
    const place = (element, name, x) => { element.style.setProperty(name, `${(100 * x).toFixed(2)}%`); return element; };
    $("class-rows").replaceChildren(...order.map((k) => {
      const share = covered[k] / objects[k], [low, high] = wilson(covered[k], objects[k]);
      const whisker = place(make("i", { class: "whisker" }), "left", low);
      const track = make("div", { class: "track" },
        place(make("i", { class: "bar" }), "width", share), place(whisker, "width", high - low), place(make("i", { class: "asked" }), "left", level));
      const value = make("data", { value: share, "data-class": k }, percent(share));
      return make("tr", { class: high < level ? "low" : null }, make("th", { scope: "row", title: classes[k] }, classes[k]), make("td", {}, track),
        make("td", {}, high < level ? make("b", { class: "flag" }, "low ") : null, value), make("td", {}, `${grouped(covered[k])} of ${grouped(objects[k])}`));
    }));
    const button = $("all-classes");
    button.hidden = !many;
    button.textContent = state.allClasses ? "Show the 12 lowest" : `Show all ${present.length} labels (these are the 12 lowest)`;
  }

  // Objects --------------------------------------------------------------------------------------------------------------

  const smallest = p.reduce((least, x) => (x > 0 && x < least ? x : least), 1 - levels[L - 1]);
  const foot = Math.log(Math.max(smallest, 1e-6) / 1.6);
  // 0 at the smallest p-value, 1 at p = 1.
  const along = (x) => (x > 0 ? Math.max(0, 1 - Math.log(x) / foot) : 0);

  const inSet = (i, k) => entry[0][i * C + k] <= state.at;
  const FILTERS = {
    all: ["All", () => true],
    missed: ["Missed", (o) => !o.covered],
    several: ["Several labels", (o) => o.size > 1],
    one: ["One label", (o) => o.size === 1],
    empty: ["Empty", (o) => o.size === 0],
  };
  const best = shown.map((_, j) => p.subarray(j * C, (j + 1) * C).reduce((a, b) => Math.max(a, b), 0));
  const second = shown.map((_, j) => (C > 1 ? Float32Array.from(p.subarray(j * C, (j + 1) * C)).sort()[C - 2] : 0));
  const ORDERS = {
    size: (a, b) => b.size - a.size || second[b.j] - second[a.j],
    miss: (a, b) => p[a.j * C + truth[a.i]] - p[b.j * C + truth[b.i]],
    strange: (a, b) => best[a.j] - best[b.j],
    index: () => 0,
  };

  function listed() {
    const found = shown.map((i, j) => {
      let size = 0;
      for (let k = 0; k < C; k++) size += inSet(i, k);
      return { i, j, size, covered: inSet(i, truth[i]) };
    }).filter((o) => state.truth === "" || truth[o.i] === Number(state.truth));
    const counts = Object.fromEntries(Object.entries(FILTERS).map(([name, [, keep]]) => [name, found.filter(keep).length]));
    return { counts, list: found.filter(FILTERS[state.filter][1]).sort((a, b) => ORDERS[state.order](a, b) || a.i - b.i) };
  }

  const longest = (names) => Math.max(0, ...names.map((name) => name.length));
  // The bars are beside the picture if the labels are short enough.
  const beside = data.sheet && longest(classes) <= 10;
  const CHIPS = longest(classes) <= 10 ? 12 : 6;
  // Long names get a line each.
  const features = data.rows && longest(data.rows.names) > 12 ? 6 : 8;
  const chip = (k, i) => make("span", { class: k === truth[i] ? "chip true" : "chip" }, classes[k]);

  function setOf({ i, j, size }) {
    const row = p.subarray(j * C, (j + 1) * C);
    const members = [...Array(C).keys()].filter((k) => inSet(i, k));
    if (members.length > CHIPS) members.sort((a, b) => row[b] - row[a] || a - b);
    const said = size === 0 ? make("span", { class: "nothing" }, "empty: no label fits") : null;
    const rest = members.length > CHIPS
      ? make("details", {}, make("summary", {}, `and ${members.length - CHIPS} more`), ...members.slice(CHIPS).map((k) => chip(k, i))) : null;
    return make("div", { class: "set" }, make("span", { class: "what" }, "set"), ...members.slice(0, CHIPS).map((k) => chip(k, i)), said, rest);
  }

  function barsOf({ i, j }) {
    const row = p.subarray(j * C, (j + 1) * C);
    const order = [...Array(C).keys()].sort((a, b) => row[b] - row[a] || a - b);
    const chosen = order.slice(0, BARS);
    if (!chosen.includes(truth[i])) chosen[chosen.length - 1] = truth[i];
    const threshold = along(1 - levels[state.at]);
    const lines = chosen.map((k) => {
      const bar = make("i", { class: inSet(i, k) ? "bar in" : "bar" }), line = make("i", { class: "threshold" });
      bar.style.setProperty("width", `${(100 * along(row[k])).toFixed(1)}%`);
      line.style.setProperty("left", `${(100 * threshold).toFixed(1)}%`);
      return make("li", { class: k === truth[i] ? "true" : null }, make("span", { class: "name", title: classes[k] }, classes[k]),
        make("span", { class: "track" }, bar, line), make("span", { class: "p" }, small(row[k])));
    });
    return make("ul", { class: "bars", "aria-label": "p-values" }, ...lines);
  }

  function lookOf({ i, j }) {
    if (data.sheet) {
      const { columns, rows } = data.sheet, across = j % columns, down = Math.floor(j / columns);
      const picture = make("div", { class: "picture", role: "img", "aria-label": `picture of object ${i}` });
      picture.style.setProperty("background-position",
        `${columns > 1 ? (100 * across) / (columns - 1) : 0}% ${rows > 1 ? (100 * down) / (rows - 1) : 0}%`);
      return picture;
    }
    if (!data.rows) return null;
    const { names, values, total } = data.rows;
    const cell = (v) => (v === null ? "missing" : String(v));
    const entries = names.map((name, k) => make("div", {}, make("dt", { title: name }, name), make("dd", { title: cell(values[j][k]) }, cell(values[j][k]))));
    const rest = entries.length > features ? make("details", {},
      make("summary", {}, total > names.length ? `${names.length} of ${total} features` : `all ${total} features`), make("dl", {}, ...entries.slice(features))) : null;
    return make("div", { class: features === 6 ? "row long" : "row" }, make("dl", {}, ...entries.slice(0, features)), rest);
  }

  function cardOf(object) {
    const { i, j, covered } = object;
    const guess = data.predicted
      ? make("span", {}, make("span", { class: "what" }, "model says"), make("b", {}, classes[data.predicted.label[j]]), ` ${percent(data.predicted.probability[j], 0)}`) : null;
    return make("li", { class: "card", "data-object": i },
      make("div", { class: "top" }, make("h3", {}, `Object ${i}`), make("span", { class: covered ? "state held" : "state missed" }, covered ? "✓ covered" : "✗ missed")),
      make("div", { class: beside ? "looks beside" : "looks" }, lookOf(object), barsOf(object)),
      setOf(object),
      make("div", { class: "facts" }, make("span", {}, make("span", { class: "what" }, "truth"), make("b", { class: "truth" }, classes[truth[i]])), guess));
  }

  function drawObjects() {
    const { counts, list } = listed();
    all(".filters button").forEach((button) => {
      button.setAttribute("aria-pressed", button.value === state.filter);
      button.lastChild.textContent = grouped(counts[button.value]);
    });
    const pages = Math.max(1, Math.ceil(list.length / PAGE));
    state.page = Math.min(state.page, pages - 1);
    const cards = list.slice(state.page * PAGE, (state.page + 1) * PAGE).map(cardOf);
    $("cards").replaceChildren(...(cards.length ? cards : [make("li", { class: "none" }, "There are no such objects at this level.")]));
    $("page").textContent = `Page ${state.page + 1} of ${pages}`;
    // A disabled button would lose the keyboard focus, so it is only marked as disabled.
    $("previous").setAttribute("aria-disabled", state.page === 0);
    $("next").setAttribute("aria-disabled", state.page === pages - 1);
  }

  // Control --------------------------------------------------------------------------------------------------------------

  function draw() {
    drawNumbers();
    legend("coverage");
    legend("size");
    moveMarkers.forEach((move) => move());
    drawClasses();
    drawObjects();
    speak();
  }

  function choose(at) {
    if (at === state.at) return;
    state.at = at;
    draw();
  }

  function turn(pages) {
    const last = Math.max(0, Math.ceil(listed().list.length / PAGE) - 1);
    state.page = Math.min(last, Math.max(0, state.page + pages));
    drawObjects();
  }

  function prepare() {
    const slider = $("level");
    slider.max = L - 1;
    slider.addEventListener("input", () => choose(Number(slider.value)));
    const near = (wanted) => levels.findIndex((level) => Math.abs(level - wanted) < 1e-9);
    const usual = [...new Set([0.8, 0.9, 0.95, 0.99, levels[data.start]].map(near))].filter((at) => at >= 0).sort((a, b) => a - b);
    document.querySelector(".presets").append(...usual.map((at) => make("button", { type: "button", value: at }, levelText(at))));
    document.querySelector(".presets").addEventListener("click", (event) => { if (event.target.value) choose(Number(event.target.value)); });

    document.querySelector(".filters").append(...Object.entries(FILTERS).map(([name, [text]]) =>
      make("button", { type: "button", value: name }, `${text} `, make("span", { class: "count" }))));
    document.querySelector(".filters").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) { state.filter = button.value; state.page = 0; drawObjects(); }
    });
    $("truth").append(...present.map((k) => make("option", { value: k }, classes[k])));
    for (const name of ["truth", "order"]) {
      $(name).addEventListener("change", () => { state[name] = $(name).value; state.page = 0; drawObjects(); });
    }
    $("previous").addEventListener("click", () => turn(-1));
    $("next").addEventListener("click", () => turn(1));
    $("all-classes").addEventListener("click", () => { state.allClasses = !state.allClasses; drawClasses(); });
  }

  const THEMES = ["auto", "light", "dark"];
  function theme(name) {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", name);
    $("theme").querySelector("span").textContent = name;
    $("theme").onclick = () => theme(THEMES[(THEMES.indexOf(name) + 1) % THEMES.length]);
  }

  all("[hidden].js, #control, #theme").forEach((element) => { element.hidden = false; });
  prepare();
  theme("auto");
  draw();
  let drawn = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width !== drawn) { drawn = contentRect.width; drawCharts(); }
  }).observe($("chart-coverage"));
})();
