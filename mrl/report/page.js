"use strict";
// What a page of mrl report does. All that comes from a run (texts of a model, names, config) becomes text nodes here:
// nothing is ever given to innerHTML, and Plotly, which reads a little markup, gets names with <, > and & escaped.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#2458a8", "#d1622b", "#2c8c4b", "#a33b8f", "#8a6d1d", "#1e8f97", "#b3283c", "#5d55b5", "#5a6b2f", "#777777"];
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
  const AXIS_TITLES = { step: "step", tokens: "tokens trained", seconds: "seconds of steps and evaluations" };
  const several = data.runs.length > 1;
  const state = readState();

  // ------------------------------------------------------------------------------------------------------- elements

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") node.className = value;
      else if (name in node && typeof value !== "string") node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }

  // Control characters, marks that turn the direction of text, and halves of surrogate pairs: shown, not obeyed.
  const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

  function words(text, node = document.createDocumentFragment()) {
    let end = 0;
    text = String(text);
    for (const match of text.matchAll(ODD)) {
      node.append(text.slice(end, match.index));
      const code = match[0].charCodeAt(0);
      const shown = code < 0x20 ? String.fromCharCode(0x2400 + code) : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
      node.append(make("span", { class: "odd", title: "U+" + code.toString(16).toUpperCase().padStart(4, "0") }, shown));
      end = match.index + match[0].length;
    }
    node.append(text.slice(end));
    return node;
  }

  const forPlotly = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function choice(label, options, value, changed) {
    const select = make("select", {}, ...options.map(([name, text]) => {
      const option = make("option", { value: String(name) });
      words(text, option);
      return option;
    }));
    select.value = String(value);
    select.addEventListener("change", () => changed(select.value));
    return make("label", {}, label, select);
  }

  function table(kind, head, rows) {
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell instanceof Node ? cell : words(cell))));
    return make("div", { class: "scroll" }, make("table", { class: kind }, make("thead", {}, row(head, "th")),
      make("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
  }

  function number(value) {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e12) return value.toLocaleString("en-US");
    return Math.abs(value) >= 1e4 && Math.abs(value) < 1e12 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  }

  // ---------------------------------------------------------- what the reader chose, kept in the address over reloads

  function readState() {
    const found = { axis: data.look.axis, smooth: data.look.smooth, log: false, hidden: [], follow: true,
      run: 0, file: null, page: 0, by: "group", order: "sampled", colour: "log_probs" };
    try {
      Object.assign(found, JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"));
    } catch { /* an address that another page wrote */ }
    if (!data.axes.includes(found.axis)) found.axis = "step";
    found.smooth = Math.min(Math.max(Number(found.smooth) || 0, 0), Math.max(data.look.smooth, 0.99));
    if (!Array.isArray(found.hidden)) found.hidden = [];
    if (!data.runs[found.run]) found.run = 0;
    return found;
  }

  function keepState() {
    history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
  }

  // --------------------------------------------------------------------------------------------------------- curves

  function smoothed(values, counts, weight) {
    // As mrl/report/metrics_file.py: without a bias towards the first; of a long curve the values are means of buckets.
    let total = 0, weights = 0;
    return values.map((value, i) => {
      const n = counts ? counts[i] : 1;
      if (value !== null && n) {
        const kept = Math.pow(weight, n);
        total = total * kept + value * (1 - kept);
        weights = weights * kept + (1 - kept);
      }
      return weights ? total / weights : null;
    });
  }

  function place(run, at) {
    const axis = run.axes[state.axis];
    return axis ? at.map((i) => axis[i]) : null;
  }

  function tracesOf(chart) {
    const traces = [];
    const left = [];
    data.runs.forEach((run, r) => {
      if (state.hidden.includes(run.name)) return;
      const same = {};
      chart.names.forEach((name, m) => {
        const curve = run.curves[name];
        if (!curve) return;
        const x = place(run, curve.at);
        if (!x) return void left.push(run.name);
        const drawn = JSON.stringify([curve.at, curve.values]);
        if (drawn in same) return void left.push(`${name} is equal to ${same[drawn]}`);
        same[drawn] = name;
        const colour = COLOURS[(several ? r : m) % COLOURS.length];
        const dash = several ? DASHES[m % DASHES.length] : "solid";
        const label = forPlotly(several ? (chart.names.length > 1 ? `${run.name}: ${name}` : run.name) : name);
        const steps = curve.at.map((i) => run.axes.step[i]);
        const smooth = state.smooth && !curve.sparse;
        traces.push({ x, y: curve.values, customdata: steps, name: label, type: "scatter", connectgaps: false,
          mode: curve.at.length < 2 || curve.sparse || curve.count <= 60 ? "lines+markers" : "lines", marker: { size: 5 },
          line: { color: colour, width: 1.6, dash }, opacity: smooth ? 0.3 : 1, legendgroup: label, showlegend: !smooth,
          hovertemplate: "%{y:.8~g}, step %{customdata}" });
        if (smooth) {
          const base = curve.buckets || curve;
          traces.push({ x: place(run, base.at), y: smoothed(base.values, base.counts, state.smooth), name: label,
            type: "scatter", mode: "lines", line: { color: colour, width: 2.2, dash }, legendgroup: label,
            hoverinfo: "skip" });
        }
      });
    });
    return [traces, left];
  }

  function stackOf(chart, run) {
    const stack = run.stacks[chart.key];
    const x = stack && place(run, stack.at);
    if (!x) return [];
    return chart.names.filter((name) => stack.values[name]).map((name) => ({
      x, y: stack.values[name], name: forPlotly(name), type: "scatter", mode: "lines", stackgroup: "all",
      line: { width: 0.5, shape: "hvh", color: COLOURS[chart.names.indexOf(name) % COLOURS.length] }, hovertemplate: "%{y:.5~g} s",
    }));
  }

  // Plotly gives a curve of one value an axis from 1 below it to 1 above: of a learning rate, -1 to 1.
  function rangeOf(traces, log) {
    const values = traces.flatMap((trace) => trace.y).filter((y) => y !== null);
    const value = values[0];
    if (!values.length || values.some((y) => y !== value) || (log && value <= 0)) return undefined;
    if (log) return [Math.log10(value) - 0.1, Math.log10(value) + 0.1];
    return value === 0 ? [-0.05, 1] : [value - Math.abs(value) / 10, value + Math.abs(value) / 10];
  }

  function draw(plot) {
    const { chart, run } = plot;
    const [traces, left] = chart.stacked ? [stackOf(chart, run), []] : tracesOf(chart);
    const many = traces.filter((trace) => trace.showlegend !== false).length > 1;
    const log = state.log && !chart.stacked;
    Plotly.react(plot.node, traces, {
      margin: { l: 58, r: 12, t: 8, b: 42 }, hovermode: "x unified", showlegend: many,
      legend: { orientation: "h", y: -0.22, font: { size: 11 } }, font: { size: 11, color: "#1f2733" },
      xaxis: { title: { text: AXIS_TITLES[state.axis], standoff: 6 }, zeroline: false },
      yaxis: { type: log ? "log" : "linear", zeroline: false, exponentformat: "e", range: chart.stacked ? undefined : rangeOf(traces, log) },
    }, { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" }); // else it offers an upload
    plot.notes.replaceChildren(...[...new Set(left)].map((text) => make("p", { class: "note" },
      words(data.runs.some((run) => run.name === text) ? `${text} has no ${state.axis}: not drawn` : text))));
    if (chart.stacked && run.stacks[chart.key] && run.stacks[chart.key].each > 1) {
      plot.notes.append(make("p", { class: "note" }, `means of ${run.stacks[chart.key].each} steps each`));
    }
    plot.drawn = true;
  }

  const plots = [];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const plot = plots.find((one) => one.node === entry.target);
      plot.visible = entry.isIntersecting;
      if (plot.visible && !plot.drawn) draw(plot);
    }
  }, { rootMargin: "400px" });

  function redraw() {
    keepState();
    for (const plot of plots) {
      plot.drawn = false;
      if (plot.visible) draw(plot);
    }
  }

  function chartBox(chart, run) {
    const node = make("div", { class: "plot" });
    const notes = make("div");
    const plot = { chart, run, node, notes, drawn: false, visible: false };
    plots.push(plot);
    const meanings = Object.entries(chart.meanings).map(([name, meaning]) => make("p", { class: "meaning" }, words(`${name}: ${meaning}`)));
    const title = words(chart.title + (chart.stacked && several ? `: ${run.name}` : ""));
    const box = make("div", { class: "chart", "data-chart": chart.key }, make("h3", {}, title), node, notes,
      meanings.length ? make("details", {}, make("summary", { class: "muted" }, "what it is"), ...meanings) : null);
    seen.observe(node);
    return box;
  }

  // ------------------------------------------------------------------------------------------- the parts of the page

  function header() {
    const node = document.getElementById("header");
    node.append(make("h1", {}, several ? `${data.runs.length} runs` : words(data.runs[0].name)));
    data.runs.forEach((run, r) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = COLOURS[r % COLOURS.length];
      node.append(make("div", {}, several ? swatch : null, words(`${run.path}: ${run.progress}`)));
      run.notes.forEach((note) => node.append(make("p", { class: "note" }, words(several ? `${run.name}: ${note}` : note))));
    });
    node.append(make("p", { class: "muted" }, words(`written ${data.written} by mrl ${data.version}`)));
  }

  function controls() {
    const node = document.getElementById("controls");
    node.append(choice("over", data.axes.map((axis) => [axis, AXIS_TITLES[axis]]), state.axis, (axis) => { state.axis = axis; redraw(); }));
    const smooth = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", id: "smooth" });
    smooth.value = state.smooth;
    const shown = make("span", { class: "muted" }, String(state.smooth));
    smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); shown.textContent = smooth.value; redraw(); });
    node.append(make("label", {}, "smooth", smooth, shown));
    const check = (text, name, changed) => {
      const box = make("input", { type: "checkbox", id: name });
      box.checked = state[name];
      box.addEventListener("change", () => { state[name] = box.checked; changed(); });
      return make("label", {}, box, text);
    };
    node.append(check("log scale", "log", redraw));
    if (several) {
      data.runs.forEach((run, r) => {
        const box = make("input", { type: "checkbox" });
        box.checked = !state.hidden.includes(run.name);
        box.addEventListener("change", () => {
          state.hidden = state.hidden.filter((name) => name !== run.name).concat(box.checked ? [] : [run.name]);
          redraw();
        });
        const swatch = make("span", { class: "swatch" });
        swatch.style.background = COLOURS[r % COLOURS.length];
        node.append(make("label", {}, box, swatch, words(run.name)));
      });
    }
    if (data.look.reload_s) {
      node.append(check(`follow (every ${data.look.reload_s} s)`, "follow", keepState));
      setInterval(() => { if (state.follow) { keepState(); location.reload(); } }, data.look.reload_s * 1000);
    }
  }

  function charts(main) {
    let section = null, grid = null;
    for (const chart of data.charts) {
      if (chart.section !== section) {
        section = chart.section;
        grid = make("div", { class: "charts" });
        main.append(make("h2", {}, words(section)), grid);
      }
      if (!chart.stacked) grid.append(chartBox(chart, data.runs[0]));
      else data.runs.filter((run) => run.stacks[chart.key].at.length).forEach((run) => grid.append(chartBox(chart, run)));
    }
  }

  function figures(main) {
    const rows = data.runs.flatMap((run) => run.figures.map((figure) => [figure.metric, ...(several ? [run.name] : []),
      number(figure.first), number(figure.last), number(figure.best), number(figure.best_step), number(figure.lowest),
      number(figure.highest), number(figure.values)]));
    const order = [...new Set(rows.map((row) => row[0]))];
    rows.sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
    main.append(make("h2", {}, "Figures"), make("details", {}, make("summary", {}, `all ${order.length} metrics in numbers`),
      table("", ["metric", ...(several ? ["run"] : []), "first", "last", "best", "at step", "lowest", "highest", "values"], rows)));
  }

  function settings(main) {
    const { runs, keys, versions, none } = data.differences;
    main.append(make("h2", {}, several ? "Differences" : "Config"));
    if (several) {
      const rows = [...Object.entries(versions), ...Object.entries(keys)].map(([name, values]) => [name, ...values]);
      main.append(rows.length ? table("text", ["", ...runs], rows) : make("p", {}, words(none)));
    }
    for (const run of data.runs) {
      const rows = [...Object.entries(run.header), ...Object.entries(run.keys)];
      main.append(make("details", {}, make("summary", {}, words(several ? `config of ${run.name}` : "versions, git state and all keys")), table("text", ["", ""], rows)));
    }
  }

  header();
  controls();
  const main = document.getElementById("main");
  charts(main);
  figures(main);
  if (data.runs.some((run) => run.samples.files.length || run.samples.notes.length)) {
    samplePages(main, { data, state, keepState, make, words, choice, number, several });
  }
  settings(main);
  document.documentElement.dataset.ready = "true";
})();
