"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 6, LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 24;
const state = {
  hidden: new Set(), smoothing: 0, axis: "iteration", range: null,
  log: Object.fromEntries(data.panels.map((panel) => [panel.key, panel.scale === "log"])),
};
const colour = (run) => `var(--run${run % COLOURS})`;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(4))}${letter}`;
  }
  if (size > 0 && size < 0.01) return Number(value.toPrecision(4)).toExponential();
  return String(Number(value.toPrecision(4)));
}
const shown = (panel, value) => (panel.percent ? `${Number((value * 100).toPrecision(4))}%` : short(value));

/* Curves of a panel as [x, y] in order; a y of null is a gap. Values that were not logged (false) are left out. */
function curves(panel) {
  const found = [];
  data.runs.forEach((run, number) => {
    if (state.hidden.has(number)) return;
    for (const part of ["train", "valid"]) {
      const values = run[part].values[panel.key];
      if (!values) continue;
      const places = run[part][state.axis];
      const points = [];
      values.forEach((y, i) => { if (y !== false && places[i] !== null) points.push([places[i], y]); });
      if (points.some((point) => point[1] !== null)) found.push({ run: number, part, points });
    }
  });
  return found;
}

/* Exponential moving average without the pull of its start, as TensorBoard's; it begins anew after a gap. */
function smoothed(points, weight) {
  let mean = 0, count = 0;
  return points.map(([x, y]) => {
    if (y === null) { mean = count = 0; return [x, null]; }
    mean = weight * mean + (1 - weight) * y;
    count += 1;
    return [x, mean / (1 - weight ** count)];
  });
}

function pathOf(points, toX, toY) {
  let text = "", pen = "M", column = null, low, high;
  const draw = (x, y) => { text += `${pen}${x.toFixed(1)},${y.toFixed(1)}`; pen = "L"; };
  const flush = () => {
    if (column === null) return;
    draw(column, low);
    if (high !== low) draw(column, high);
    column = null;
  };
  for (const [x, y] of points) {
    const at = Math.round(toX(x) * 2) / 2, to = y === null ? NaN : toY(y);
    if (!Number.isFinite(to)) { flush(); pen = "M"; continue; }
    if (at !== column) { flush(); column = at; low = high = to; }
    low = Math.max(low, to);
    high = Math.min(high, to);
  }
  flush();
  return text;
}

function ticks(low, high, log, count) {
  if (log) {
    const decades = [];
    const factors = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const factor of factors) decades.push(factor * 10 ** e);
    }
    const inside = decades.filter((value) => value >= low && value <= high);
    const step = Math.ceil(inside.length / 8);
    return inside.filter((_, i) => i % step === 0);
  }
  const rough = (high - low) / count, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function limits(values, log) {
  const finite = values.filter((value) => value !== null && (!log || value > 0));
  if (!finite.length) return [log ? 1 : 0, log ? 10 : 1];
  let low = finite[0], high = finite[0];
  for (const value of finite) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const margin = log ? (high / low) ** 0.04 : (high - low) * 0.05;
  return log ? [low / margin, high * margin] : [low - margin, high + margin];
}

function xLimits() {
  if (state.range) return state.range;
  let high = 0;
  for (const run of data.runs) for (const part of ["train", "valid"]) {
    const places = run[part][state.axis];
    if (places.length) high = Math.max(high, places[places.length - 1] ?? 0);
  }
  return [0, high || 1];
}

function drawPanel(view) {
  const { panel, svg, tip } = view;
  const log = state.log[panel.key], wide = view.figure.classList.contains("wide");
  const width = Math.max(svg.clientWidth, 200), height = wide ? 340 : 230;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  tip.style.display = "none";
  const [x0, x1] = xLimits();
  const all = curves(panel);
  const visible = all.flatMap((curve) => curve.points.filter(([x]) => x >= x0 && x <= x1).map((point) => point[1]));
  const [y0, y1] = limits(visible, log);
  const scale = log ? Math.log : (value) => value;
  const toX = (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const toY = (y) => height - BOTTOM - (scale(y) - scale(y0)) / (scale(y1) - scale(y0)) * (height - TOP - BOTTOM);
  for (const value of ticks(y0, y1, log, 5)) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) }));
    svg.append(shape("text", { x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" }, shown(panel, value)));
  }
  for (const value of ticks(x0, x1, false, Math.max(3, width / 110))) {
    svg.append(shape("text", { x: toX(value), y: height - 6, "text-anchor": "middle" }, short(value)));
  }
  const plot = shape("svg", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height, viewBox: `${LEFT} 0 ${width - LEFT - RIGHT} ${height}` });
  svg.append(plot);
  if (state.axis === "iteration") {
    data.runs.forEach((run, number) => {
      if (state.hidden.has(number)) return;
      for (const at of run.restarts) {
        const line = shape("line", { class: "restart", x1: toX(at), x2: toX(at), y1: TOP, y2: height - BOTTOM, stroke: colour(number) });
        line.append(shape("title", {}, `${run.name} went on from iteration ${at}`));
        plot.append(line);
      }
    });
  }
  const single = data.runs.length === 1;
  for (const curve of all) {
    const ink = single && curve.part === "valid" ? colour(1) : colour(curve.run);
    const isSmoothed = state.smoothing > 0 && panel.noisy && curve.part === "train";
    if (isSmoothed) plot.append(shape("path", { class: "raw", d: pathOf(curve.points, toX, toY), stroke: ink }));
    curve.shown = isSmoothed ? smoothed(curve.points, state.smoothing) : curve.points;
    curve.ink = ink;
    plot.append(shape("path", { class: curve.part, d: pathOf(curve.shown, toX, toY), stroke: ink }));
    if (curve.part === "valid" && curve.points.length <= 100) {
      for (const [x, y] of curve.points) {
        if (y !== null && Number.isFinite(toY(y))) plot.append(shape("circle", { cx: toX(x), cy: toY(y), r: 2.6, fill: ink }));
      }
    }
  }
  view.drawn = { all, toX, width, height, x0, x1 };
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

const placeOf = (view, event) => {
  const { x0, x1, width } = view.drawn;
  const at = event.clientX - view.svg.getBoundingClientRect().left;
  return x0 + (at - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
};

function hover(view, event) {
  const { all, toX, width, height } = view.drawn;
  view.svg.querySelectorAll(".cursor").forEach((line) => line.remove());
  const x = placeOf(view, event);
  const lines = all.map((curve) => {
    const [at, y] = nearest(curve.shown, x);
    const name = `${data.runs.length > 1 ? `${data.runs[curve.run].name}, ` : ""}${curve.part === "train" ? "training" : "validation"}`;
    return element("div", {}, element("span", { class: "swatch", style: `background:${curve.ink}` }),
      `${name} at ${at.toLocaleString("en")}: ${y === null ? "not finite" : shown(view.panel, y)}`);
  });
  if (!lines.length) return;
  const at = Math.min(Math.max(toX(x), LEFT), width - RIGHT);
  view.svg.append(shape("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
  view.tip.replaceChildren(...lines);
  view.tip.style.display = "block";
  const right = at > width / 2;
  view.tip.style.left = right ? "auto" : `${at + 24}px`;
  view.tip.style.right = right ? `${width - at + 24}px` : "auto";
  view.tip.style.top = "2.4rem";
}

function leave(view) {
  view.svg.querySelectorAll(".cursor").forEach((line) => line.remove());
  view.tip.style.display = "none";
}

const views = data.panels.map((panel, number) => {
  const svg = shape("svg", { role: "img", "aria-label": panel.title });
  const tip = element("div", { class: "tip" });
  const button = element("button", { title: "linear or logarithmic" }, state.log[panel.key] ? "log" : "linear");
  const figure = element("figure", number === 0 ? { class: "wide" } : {}, element("figcaption", {}, panel.title, button));
  figure.append(svg, tip);
  const view = { panel, svg, tip, figure };
  button.addEventListener("click", () => {
    state.log[panel.key] = !state.log[panel.key];
    button.textContent = state.log[panel.key] ? "log" : "linear";
    drawPanel(view);
  });
  svg.addEventListener("pointermove", (event) => hover(view, event));
  svg.addEventListener("pointerleave", () => leave(view));
  svg.addEventListener("pointerdown", (event) => { view.from = placeOf(view, event); });
  svg.addEventListener("pointerup", (event) => {
    const ends = [view.from, placeOf(view, event)].sort((a, b) => a - b);
    const { x0, x1 } = view.drawn;
    if (view.from !== undefined && ends[1] - ends[0] > (x1 - x0) / 50) {
      state.range = [Math.max(ends[0], 0), ends[1]];
      drawAll();
    }
    view.from = undefined;
  });
  svg.addEventListener("dblclick", () => { state.range = null; drawAll(); });
  return view;
});
const drawAll = () => views.forEach(drawPanel);

function tableOf(rows) {
  const [head, ...body] = rows;
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))),
    element("tbody", {}, ...body.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text)))))));
}

function controls() {
  const legend = data.runs.map((run, number) => element("button", {
    "aria-pressed": "true", title: "show or hide",
    onclick: (event) => {
      const isHidden = !state.hidden.delete(number);
      if (isHidden) state.hidden.add(number);
      event.currentTarget.setAttribute("aria-pressed", String(!isHidden));
      drawAll();
    },
  }, element("span", { class: "swatch", style: `background:${colour(number)}` }), run.name));
  const weight = element("output", {}, "0");
  const slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing",
    oninput: (event) => { state.smoothing = Number(event.target.value); weight.value = event.target.value; drawAll(); } });
  const axis = element("select", { onchange: (event) => { state.axis = event.target.value; state.range = null; drawAll(); } },
    element("option", { value: "iteration" }, "iterations"), element("option", { value: "samples" }, "samples"));
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = element("button", { onclick: () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; } }, "light / dark");
  return element("div", { class: "bar" }, ...legend, element("label", {}, "smoothing", slider, weight),
    element("label", {}, "over", axis), theme,
    element("span", { class: "muted" }, "solid: training, dashed: validation; drag to zoom, double click to see all"));
}

function notes() {
  const found = data.runs.flatMap((run) => [
    ...run.notFinite.map((text) => `${run.name}: ${text}`),
    ...(run.restarts.length ? [`${run.name}: went on from iteration ${run.restarts.join(", ")} (dotted lines); what had been logged beyond does not count`] : []),
  ]);
  return found.length ? [element("h2", {}, "Notes"), element("ul", {}, ...found.map((text) => element("li", {}, text)))] : [];
}

function settings() {
  if (data.runs.length < 2) return [];
  const parts = [element("h2", {}, "Settings that differ")];
  if (data.settings.length) parts.push(tableOf([["setting", ...data.runs.map((run) => run.name)], ...data.settings]));
  else parts.push(element("p", { class: "muted" }, "none"));
  if (data.withoutSettings.length) {
    parts.push(element("p", { class: "muted" }, `No settings.json was found beside ${data.withoutSettings.join(", ")}.`));
  }
  return parts;
}

document.body.append(element("h1", {}, "Training report"), controls(),
  element("div", { class: "panels" }, ...views.map((view) => view.figure)),
  ...notes(), element("h2", {}, "Summary"), tableOf(data.summary), ...settings());
drawAll();
addEventListener("resize", drawAll);
