// The page on sets of labels.
const { classes, truth } = data;
const m = truth.length, C = classes.length;
// By method, (m, C): the first position of the slider at which a label is in the set.
const entry = data.entry.map(bytes);
// (shown, C), of the first method.
const p = floats(data.p);
const shown = data.shown || truth.map((_, i) => i);
const PAGE = 12, BARS = 5, TOGETHER = 12;
Object.assign(state, { filter: "all", truth: "", order: "missed", page: 0 });
const number = (x) => (Number.isFinite(x) ? x.toFixed(3) : "–");
const small = (x) => (x >= 0.01 ? x.toFixed(3) : x > 0 ? String(Number(x.toPrecision(2))) : "0");

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

function share(name, count) {
  const [low, high] = wilson(count, m);
  return { [name]: count / m, [`${name}_low`]: low, [`${name}_high`]: high };
}

const curves = entry.map(totals).map((of) => levels.map((_, at) => {
  const mean = of.size[at] / m, variance = m > 1 ? Math.max(0, of.squares[at] - m * mean * mean) / (m - 1) : NaN;
  return {
    ...share("coverage", of.covered[at]), ...share("singleton", of.one[at]), ...share("empty", of.empty[at]),
    size: mean, size_se: Math.sqrt(variance / m),
  };
}));

const inSet = (i, k) => entry[0][i * C + k] <= state.at;
const sizeOf = (i) => {
  let size = 0;
  for (let k = 0; k < C; k++) size += inSet(i, k);
  return size;
};

// Charts ---------------------------------------------------------------------------------------------------------------

function drawCharts() {
  const nines = (level) => Math.log((1 - levels[0]) / (1 - level)) / Math.log((1 - levels[0]) / (1 - levels[L - 1]));
  const sizes = curves.flat().map((now) => now.size);
  const largest = 1.05 * Math.max(1, ...sizes), least = Math.max(0.05, Math.min(0.8, ...sizes));
  const round = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].filter((v) => v >= least && v <= largest);
  const nineTicks = $("chart-size").clientWidth > 450 ? [0.5, 0.8, 0.9, 0.95, 0.99, 0.999] : [0.5, 0.9, 0.99, 0.999];
  const logarithm = linear(Math.log(least), Math.log(largest));
  moveMarkers = [
    coverageChart(),
    chart($("chart-size"), {
      label: "mean set size", bands: true,
      x: { scale: nines, ticks: nineTicks.filter((v) => v >= levels[0] && v <= levels[L - 1]), text: wholePercent },
      y: { scale: (v) => logarithm(Math.log(Math.max(v, least))), ticks: round, text: String },
      of: ({ size, size_se: se }) => ({ value: size, low: size - Z * (se || 0), high: size + Z * (se || 0) }),
    }),
  ];
  moveMarkers.forEach((move) => move());
}

// Set by set size ------------------------------------------------------------------------------------------------------

function drawSizes() {
  // Larger sets are counted together.
  const most = Math.min(C, TOGETHER);
  const sets = new Array(most + 1).fill(0), covered = new Array(most + 1).fill(0);
  for (let i = 0; i < m; i++) {
    const size = Math.min(sizeOf(i), most);
    sets[size] += 1;
    covered[size] += inSet(i, truth[i]);
  }
  const label = (size) => (size === 0 ? "none" : `${size}${size === most && most < C ? " or more" : ""}`);
  const rows = sets.map((count, size) => ({ count, size })).filter(({ count }) => count > 0);
  $("size-rows").replaceChildren(...rows.map(({ count, size }) => {
    const [low, high] = wilson(covered[size], count);
    return make("tr", { "data-size": size }, make("th", { scope: "row" }, label(size)), make("td", {}, track(count / m)),
      make("td", {}, make("data", { value: count / m, "data-share": size }, percent(count / m))),
      make("td", {}, make("data", { value: covered[size] / count, "data-covered": size }, percent(covered[size] / count)),
        make("small", {}, ` ${percent(low, 0)} to ${percent(high, 0)}`)),
      make("td", {}, `${grouped(covered[size])} of ${grouped(count)}`));
  }));
}

// Labels that occur together -------------------------------------------------------------------------------------------

function drawTogether() {
  if (!$("together")) return;
  const shared = new Array(C).fill(0), several = [], alone = new Array(C).fill(0);
  for (let i = 0; i < m; i++) {
    const size = sizeOf(i);
    for (let k = 0; size > 0 && k < C; k++) {
      if (!inSet(i, k)) continue;
      if (size === 1) alone[k] += 1;
      else shared[k] += 1;
    }
    if (size > 1) several.push(i);
  }
  const order = [...Array(C).keys()];
  const kept = C <= TOGETHER ? order : order.sort((a, b) => shared[b] - shared[a] || a - b).slice(0, TOGETHER).sort((a, b) => a - b);
  const both = kept.map((a) => kept.map((b) => (a === b ? alone[a] : several.filter((i) => inSet(i, a) && inSet(i, b)).length)));
  const most = Math.max(1, ...both.flat());
  const head = make("tr", {}, make("td"), ...kept.map((k) => make("th", { scope: "col", title: classes[k] }, make("span", {}, classes[k]))));
  const rows = kept.map((a, row) => make("tr", {}, make("th", { scope: "row", title: classes[a] }, classes[a]), ...kept.map((b, column) => {
    const count = both[row][column];
    const said = a === b ? `${classes[a]} alone: ${count}` : `${classes[a]} and ${classes[b]}: ${count}`;
    const cell = make("td", { class: a === b ? "alone" : null, title: said, "data-pair": `${a} ${b}` }, count ? grouped(count) : "");
    cell.style.setProperty("--share", `${Math.round(50 * Math.sqrt(count / most))}%`);
    return cell;
  })));
  $("together").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  const pairs = kept.flatMap((a, row) => kept.slice(row + 1).map((b, k) => [both[row][row + 1 + k], a, b])).filter(([count]) => count > 0);
  const first = pairs.sort((x, y) => y[0] - x[0]).slice(0, 3).map(([count, a, b]) => `${classes[a]} with ${classes[b]} (${grouped(count)})`);
  $("pairs").textContent = first.length ? `Most often: ${first.join(", ")}.` : "No set holds two labels at this level.";
}

// Part by part ---------------------------------------------------------------------------------------------------------

const parts = [{ name: "true label", labels: classes, of: truth }, ...data.parts.map((part) => ({ ...part, of: bytes(part.of) }))];
function drawGroups() {
  const { labels, of } = parts[state.part];
  const found = labels.map((label, bin) => ({ label, bin, count: 0, of: 0 }));
  for (let i = 0; i < m; i++) {
    found[of[i]].of += 1;
    found[of[i]].count += inSet(i, truth[i]);
  }
  drawParts(found.filter((part) => part.of > 0));
}

// Objects --------------------------------------------------------------------------------------------------------------

const smallest = p.reduce((least, x) => (x > 0 && x < least ? x : least), 1 - levels[L - 1]);
const foot = Math.log(Math.max(smallest, 1e-6) / 1.6);
// 0 at the smallest p-value, 1 at p = 1.
const along = (x) => (x > 0 ? Math.max(0, 1 - Math.log(x) / foot) : 0);

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
  missed: (a, b) => a.covered - b.covered || ORDERS.size(a, b),
  size: (a, b) => b.size - a.size || second[b.j] - second[a.j],
  miss: (a, b) => p[a.j * C + truth[a.i]] - p[b.j * C + truth[b.i]],
  strange: (a, b) => best[a.j] - best[b.j],
  index: () => 0,
};

function listed() {
  const found = shown.map((i, j) => ({ i, j, size: sizeOf(i), covered: inSet(i, truth[i]) })).filter((o) => state.truth === "" || truth[o.i] === Number(state.truth));
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
    make("div", { class: "top" }, make("h3", { title: nameOf(j) }, nameOf(j) ?? `Object ${i}`), make("span", { class: covered ? "state held" : "state missed" }, covered ? "✓ covered" : "✗ missed")),
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

// All ------------------------------------------------------------------------------------------------------------------

function draw() {
  drawSizes();
  drawTogether();
  drawGroups();
  drawObjects();
}

function turn(pages) {
  const last = Math.max(0, Math.ceil(listed().list.length / PAGE) - 1);
  state.page = Math.min(last, Math.max(0, state.page + pages));
  drawObjects();
}

const filters = document.querySelector(".filters");
filters.append(...Object.entries(FILTERS).map(([name, [text]]) => make("button", { type: "button", value: name }, `${text} `, make("span", { class: "count" }))));
filters.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) { state.filter = button.value; state.page = 0; drawObjects(); }
});
$("truth").append(...classes.map((name, k) => [name, k]).filter(([, k]) => truth.includes(k)).map(([name, k]) => make("option", { value: k }, name)));
for (const name of ["truth", "order"]) {
  $(name).addEventListener("change", () => { state[name] = $(name).value; state.page = 0; drawObjects(); });
}
$("previous").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
$("all-parts").addEventListener("click", () => { state.allParts = !state.allParts; drawGroups(); });
start({ names: parts.map((part) => part.name), redrawParts: drawGroups, redraw: drawCharts });
