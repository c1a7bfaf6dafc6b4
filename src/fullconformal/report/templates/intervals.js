// The page on intervals.
const { truth, names, groupings } = data;
// Behind the objects that are drawn there are others that are missed.
const n = data.drawn;
// (objects, L) of the first method; infinite where a level needs more points, NaN where an interval is empty.
const lower = floats(data.lower), upper = floats(data.upper);
Object.assign(state, { order: "truth" });
// Whole numbers as they are: they may be codes, or amounts that people know.
const number = (x) => (!Number.isFinite(x) ? "–" : Number.isInteger(x) && Math.abs(x) < 1e9 ? String(x) : String(Number(x.toPrecision(4))));
// By method and level, numbers by name; null is not finite.
const curves = data.numbers.map((of) => of.map((row) => Object.fromEntries(names.map((name, k) => [name, row[k] === null ? NaN : row[k]]))));

function drawCharts() {
  const widest = 1.05 * Math.max(1e-300, ...curves.flat().map((now) => now.width).filter(Number.isFinite));
  moveMarkers = [
    coverageChart(),
    chart($("chart-width"), {
      label: "mean width", bands: true,
      x: { scale: linear(levels[0], Math.max(levels[L - 1], levels[0] + 1e-6)), ticks: ticks(levels[0], Math.max(levels[L - 1], levels[0] + 1e-6), 5), text: wholePercent },
      y: { scale: linear(0, widest), ticks: ticks(0, widest, 5), text: number },
      of: ({ width, width_se: se }) => ({ value: width, low: width - Z * (se || 0), high: width + Z * (se || 0) }),
    }),
  ];
  moveMarkers.forEach((move) => move());
}

// Intervals against the truth ------------------------------------------------------------------------------------------

const endsOf = (i) => [lower[i * L + state.at], upper[i * L + state.at]];
const covered = (i) => { const [from, to] = endsOf(i); return from <= truth[i] && truth[i] <= to; };
const wordsOf = ([from, to]) => (Number.isNaN(from) ? "empty" : `${from === -Infinity ? "−∞" : number(from)} to ${to === Infinity ? "∞" : number(to)}`);
const titleOf = (i) => nameOf(i) ?? `object ${data.shown[i]}`;

function drawIntervals() {
  const objects = [...Array(n).keys()], ends = objects.map(endsOf);
  const key = {
    truth: (i) => truth[i], middle: (i) => (data.prediction ? data.prediction[i] : (ends[i][0] + ends[i][1]) / 2),
    width: (i) => (Number.isNaN(ends[i][0]) ? 0 : ends[i][1] - ends[i][0]), index: (i) => i,
  }[state.order];
  const finite = [...truth.slice(0, n), ...ends.flat()].filter(Number.isFinite);
  const least = Math.min(...finite), most = Math.max(...finite), room = 0.03 * (most - least || 1), low = least - room, high = most + room;
  const missed = objects.filter((i) => !covered(i)).length;
  const described = `Intervals and true values of ${n} objects at ${levelText(state.at)} confidence; ${missed} are missed.`;
  const { svg, box, X, Y } = axes($("chart-intervals"), {
    x: { scale: linear(-0.5, n - 0.5), ticks: [], text: number }, y: { scale: linear(low, high), ticks: ticks(low, high, 6), text: number },
    described, xlabel: `objects in the order of ${$("order").selectedOptions[0].textContent}`, ylabel: "value",
  });
  svg.classList.add("objects");
  objects.sort((a, b) => key(a) - key(b) || a - b).forEach((i, k) => {
    const [from, to] = ends[i], hit = covered(i);
    const said = `${titleOf(i)}: ${number(truth[i])}, interval ${wordsOf(ends[i])}`;
    const group = make("g", { class: hit ? "object" : "object missed", "data-object": data.shown[i] }, make("title", {}, said));
    if (!Number.isNaN(from)) {
      group.append(make("line", { x1: X(k), x2: X(k), y1: from === -Infinity ? box.bottom : Y(from), y2: to === Infinity ? box.top : Y(to) }));
    }
    group.append(make("circle", { cx: X(k), cy: Y(truth[i]), r: hit ? 1.8 : 3.2 }));
    svg.append(group);
  });
  $("missed-count").textContent = `${missed} of ${n} drawn are missed`;
}

function drawMissed() {
  const outside = (i) => { const [from, to] = endsOf(i); return Number.isNaN(from) ? Infinity : Math.max(from - truth[i], truth[i] - to); };
  const worst = truth.map((_, i) => i).filter((i) => !covered(i)).sort((a, b) => outside(b) - outside(a) || a - b).slice(0, 12);
  const rows = worst.map((i) => make("tr", { "data-missed": data.shown[i] }, make("th", { scope: "row" }, titleOf(i)), make("td", {}, number(truth[i])),
    make("td", {}, wordsOf(endsOf(i))), make("td", {}, number(outside(i)))));
  $("missed-rows").replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 4 }, "No object is missed at this level."))]));
}

// All ------------------------------------------------------------------------------------------------------------------

function drawGroups() {
  const group = groupings[state.part];
  if (group) drawParts(group.labels.map((label, bin) => ({ label, bin, count: group.covered[state.at][bin], of: group.points[bin] })));
}

function draw() {
  drawIntervals();
  drawMissed();
  drawGroups();
}

$("order").addEventListener("change", () => { state.order = $("order").value; drawIntervals(); });
start({ names: groupings.map((group) => group.name), redrawParts: drawGroups, redraw: () => { drawCharts(); drawIntervals(); } });
