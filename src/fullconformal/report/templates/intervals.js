"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { levels, methods, names, truth, groupings } = data;
  const L = levels.length, n = truth.length, Z = 1.959963984540054;
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  // (shown, L) of the first method; infinite where a level needs more points, NaN where an interval is empty.
  const lower = floats(data.lower), upper = floats(data.upper);
  const state = { at: data.start, order: "truth", grouping: 0 };
  // By method and level, numbers by name; null is not finite.
  const curves = data.numbers.map((of) => of.map((row) => Object.fromEntries(names.map((name, k) => [name, row[k] === null ? NaN : row[k]]))));

  const $ = (id) => document.getElementById(id);
  const all = (selector) => document.querySelectorAll(selector);
  const percent = (x, digits = 1) => (Number.isFinite(x) ? `${(100 * x).toFixed(digits)}\u00a0%` : "–");
  const plain = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(4))) : "–");
  const SHARES = ["coverage", "coverage_se", "infinite"];
  const text = (name, x) => (SHARES.includes(name) ? percent(x) : plain(x));
  const look = (k) => `line-${k % 6} dash-${(k + Math.floor(k / 6)) % 3}`;
  const levelText = (at) => `${Number((100 * levels[at]).toPrecision(6))}\u00a0%`;
  const wholePercent = (x) => `${Number((100 * x).toPrecision(4))} %`;

  // Text is always set as text: whatever a name holds is shown, never run.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  function wilson(count, of) {
    const q = count / of, z = (Z * Z) / of, middle = (q + z / 2) / (1 + z);
    const half = (Z / (1 + z)) * Math.sqrt((q * (1 - q)) / of + z / (4 * of));
    return [count === 0 ? 0 : middle - half, count === of ? 1 : middle + half];
  }

  // Numbers ------------------------------------------------------------------------------------------------------------

  function write(element, name, of) {
    element.value = String(of[name]);
    element.textContent = text(name, of[name]);
  }

  function drawNumbers() {
    const now = curves[0][state.at], said = levelText(state.at), level = levels[state.at];
    all("[data-level]").forEach((element) => { element.textContent = said; });
    all("[data-number]").forEach((element) => write(element, element.dataset.number, now));
    all("[data-brief]").forEach((element) => write(element, element.dataset.brief, now));
    all("tr[data-method]").forEach((row) => row.querySelectorAll("[data-cell]").forEach((element) =>
      write(element, element.dataset.cell, curves[Number(row.dataset.method)][state.at])));
    all("[data-verdict]").forEach((element) => {
      element.textContent = now.high < level ? "Too low: more misses than chance explains."
        : now.low > level ? "Above the level, by more than chance." : "At the level, up to chance.";
      element.classList.toggle("bad", now.high < level);
    });
    const slider = $("level");
    slider.value = state.at;
    slider.setAttribute("aria-valuetext", `${said} confidence`);
    slider.style.setProperty("--done", `${(100 * state.at) / Math.max(1, L - 1)}%`);
    all(".presets button").forEach((button) => button.setAttribute("aria-pressed", Number(button.value) === state.at));
    for (const kind of ["coverage", "width"]) {
      document.querySelector(`[data-legend="${kind}"]`).replaceChildren(...methods.map((name, k) => make("span", {},
        make("i", { class: `swatch ${look(k)}` }), make("span", { class: "name" }, name), make("b", {}, text(kind, curves[k][state.at][kind])))));
    }
  }

  let speech;
  function speak() {
    clearTimeout(speech);
    speech = setTimeout(() => {
      const now = curves[0][state.at];
      $("spoken").textContent = `At ${levelText(state.at)} confidence: coverage ${percent(now.coverage)}, mean width ${plain(now.width)}.`;
    }, 400);
  }

  // Charts -------------------------------------------------------------------------------------------------------------

  // About `count` round numbers from low to high.
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw) || power;
    const found = [];
    for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * step; v += step) found.push(Number(v.toPrecision(12)));
    return found;
  }

  // Axes of a chart: the svg, its box, and scales from values to places.
  function axes(place, { x, y, described, xlabel, ylabel }) {
    const width = Math.max(260, place.clientWidth), height = Math.round(Math.min(340, Math.max(240, width * 0.62)));
    const box = { left: 66, right: width - 14, top: 12, bottom: height - 44 };
    const X = (v) => box.left + ((v - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
    const Y = (v) => Math.min(box.bottom, Math.max(box.top, box.bottom - ((v - y.low) / (y.high - y.low || 1)) * (box.bottom - box.top)));
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": described });
    for (const v of y.ticks) {
      svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }));
      svg.append(make("text", { class: "tick", x: box.left - 8, y: Y(v) + 4, "text-anchor": "end" }, y.text(v)));
    }
    for (const v of x.ticks) {
      const anchor = X(v) > box.right - 16 ? "end" : "middle";
      svg.append(make("text", { class: "tick", x: X(v), y: box.bottom + 18, "text-anchor": anchor }, x.text(v)));
    }
    svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    svg.append(make("text", { class: "label", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, xlabel));
    svg.append(make("text", { class: "label", transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, ylabel));
    place.replaceChildren(svg);
    return { svg, box, X, Y };
  }

  const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  // Curves of all methods against the level, where they are finite; `of` gives value, low and high.
  function chart(place, of, y, label, diagonal) {
    const spread = { low: levels[0], high: Math.max(levels[L - 1], levels[0] + 1e-6) };
    const x = { ...spread, ticks: ticks(spread.low, spread.high, 5), text: wholePercent };
    const described = `${label} against the confidence level; the values at the chosen level are in the numbers above.`;
    const { svg, box, X, Y } = axes(place, { x, y, described, xlabel: "confidence level", ylabel: label });
    if (diagonal) svg.append(make("line", { class: "diagonal", x1: X(x.low), y1: Y(x.low), x2: X(x.high), y2: Y(x.high) }));
    const known = methods.map((_, k) => levels.map((_, at) => at).filter((at) => Number.isFinite(of(curves[k][at]).value)));
    for (let k = methods.length - 1; k >= 0; k--) {
      const edge = (side) => known[k].map((at) => [X(levels[at]), Y(of(curves[k][at])[side])]);
      if (known[k].length) svg.append(make("path", { class: `band ${look(k)}`, d: `${path(edge("high").concat(edge("low").reverse()))}Z` }));
    }
    for (let k = methods.length - 1; k >= 0; k--) {
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
      for (let k = methods.length - 1; k >= 0; k--) {
        const value = of(curves[k][state.at]).value;
        if (Number.isFinite(value)) marker.append(make("circle", { class: look(k), cx: here, cy: Y(value), r: k ? 3.5 : 5 }));
      }
    };
  }

  let moveMarkers = [];
  function drawCharts() {
    const floor = Math.max(0, Math.floor(10 * Math.min(levels[0], ...curves.flat().map((now) => now.low))) / 10);
    const widest = Math.max(1e-300, ...curves.flat().map((now) => now.width).filter(Number.isFinite));
    const half = (now) => (Number.isFinite(now.width_se) ? Z * now.width_se : 0);
    moveMarkers = [
      chart($("chart-coverage"), (now) => ({ value: now.coverage, low: now.low, high: now.high }),
        { low: floor, high: 1, ticks: ticks(floor, 1, 5), text: wholePercent }, "coverage", true),
      chart($("chart-width"), (now) => ({ value: now.width, low: now.width - half(now), high: now.width + half(now) }),
        { low: 0, high: widest * 1.05, ticks: ticks(0, widest * 1.05, 5), text: plain }, "mean width", false),
    ];
    moveMarkers.forEach((move) => move());
  }

  // Intervals against the truth ------------------------------------------------------------------------------------------

  function drawIntervals() {
    const ends = truth.map((_, i) => [lower[i * L + state.at], upper[i * L + state.at]]);
    const covered = (i) => ends[i][0] <= truth[i] && truth[i] <= ends[i][1];
    const key = {
      truth: (i) => truth[i], middle: (i) => (data.prediction ? data.prediction[i] : (ends[i][0] + ends[i][1]) / 2),
      width: (i) => (Number.isNaN(ends[i][0]) ? 0 : ends[i][1] - ends[i][0]), index: (i) => i,
    }[state.order];
    const order = truth.map((_, i) => i).sort((a, b) => key(a) - key(b) || a - b);
    const finite = [...truth, ...ends.flat()].filter(Number.isFinite);
    const low = Math.min(...finite), high = Math.max(...finite), room = 0.03 * (high - low || 1);
    const y = { low: low - room, high: high + room, ticks: ticks(low - room, high + room, 6), text: plain };
    const place = $("chart-intervals"), missed = truth.filter((_, i) => !covered(i)).length;
    const described = `Intervals and true values of ${n} objects at ${levelText(state.at)} confidence; ${missed} are missed.`;
    const { svg, box, X, Y } = axes(place, { x: { low: -0.5, high: n - 0.5, ticks: [], text: plain }, y, described,
      xlabel: `objects in the order of ${$("order").selectedOptions[0].textContent}`, ylabel: "value" });
    svg.classList.add("objects");
    order.forEach((i, k) => {
      const [from, to] = ends[i], hit = covered(i);
      const said = `object ${data.shown[i]}: ${plain(truth[i])}, interval ${Number.isNaN(from) ? "empty" : `${from === -Infinity ? "−∞" : plain(from)} to ${to === Infinity ? "∞" : plain(to)}`}`;
      const group = make("g", { class: hit ? "object" : "object missed", "data-object": data.shown[i] }, make("title", {}, said));
      if (!Number.isNaN(from)) {
        group.append(make("line", { x1: X(k), x2: X(k), y1: from === -Infinity ? box.bottom : Y(from), y2: to === Infinity ? box.top : Y(to) }));
      }
      group.append(make("circle", { cx: X(k), cy: Y(truth[i]), r: hit ? 1.8 : 3.2 }));
      svg.append(group);
    });
    $("missed-count").textContent = `${missed} of ${n} drawn are missed`;
  }

  // Part by part -------------------------------------------------------------------------------------------------------

  function drawGroups() {
    const group = groupings[state.grouping], level = levels[state.at];
    if (!group) return;
    const put = (element, name, x) => { element.style.setProperty(name, `${(100 * x).toFixed(2)}%`); return element; };
    $("group-rows").replaceChildren(...group.labels.map((label, b) => {
      const count = group.covered[state.at][b], of = group.points[b], share = count / of, [low, high] = wilson(count, of);
      const whisker = put(make("i", { class: "whisker" }), "left", low);
      const track = make("div", { class: "track" }, put(make("i", { class: "bar" }), "width", share), put(whisker, "width", high - low),
        put(make("i", { class: "asked" }), "left", level));
      return make("tr", { class: high < level ? "low" : null }, make("th", { scope: "row", title: label }, label), make("td", {}, track),
        make("td", {}, high < level ? make("b", { class: "flag" }, "low ") : null, make("data", { value: share, "data-bin": b }, percent(share))),
        make("td", {}, `${count.toLocaleString("en")} of ${of.toLocaleString("en")}`));
    }));
  }

  // All ----------------------------------------------------------------------------------------------------------------

  function draw() {
    drawNumbers();
    moveMarkers.forEach((move) => move());
    drawIntervals();
    drawGroups();
  }

  function choose(at) {
    state.at = at;
    draw();
    speak();
  }

  function prepare() {
    const slider = $("level");
    slider.max = L - 1;
    slider.addEventListener("input", () => choose(Number(slider.value)));
    const usual = [0.8, 0.9, 0.95, 0.99].map((level) => levels.findIndex((v) => Math.abs(v - level) < 1e-9)).filter((at) => at >= 0);
    document.querySelector(".presets").append(...usual.map((at) => make("button", { type: "button", value: at }, levelText(at))));
    document.querySelector(".presets").addEventListener("click", (event) => { if (event.target.value) choose(Number(event.target.value)); });
    $("grouping").append(...groupings.map((group, k) => make("option", { value: k }, group.name)));
    $("grouping").addEventListener("change", () => { state.grouping = Number($("grouping").value); drawGroups(); });
    $("order").addEventListener("change", () => { state.order = $("order").value; drawIntervals(); });
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
    if (contentRect.width !== drawn) { drawn = contentRect.width; drawCharts(); drawIntervals(); }
  }).observe($("chart-coverage"));
})();
