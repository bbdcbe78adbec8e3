"use strict";
// Draws the page from the data in it. Texts of the run (names of groups, codecs, events) only ever become text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  const tip = element("div", { class: "tip" });
  const redraws = [];

  // -- small helpers ---------------------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const known = (value) => value !== null && value !== undefined;
  const milli = (seconds) => (known(seconds) ? (1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1) : "-");
  const size = (bytes) => {
    if (!known(bytes)) return "-";
    const units = ["B", "KB", "MB", "GB", "TB"];
    let at = 0;
    while (bytes >= 1000 && at < units.length - 1) { bytes /= 1000; at += 1; }
    return (at ? bytes.toFixed(bytes < 10 ? 2 : 1) : Math.round(bytes)) + " " + units[at];
  };
  const plain = (value, digits = 4) => (known(value) ? Number(value.toPrecision(digits)).toLocaleString("en") : "-");
  const percent = (value) => (known(value) ? plain(100 * value, 3) + " %" : "-");
  const some = (values) => values.some(known);

  function table(columns, rows) {
    const kind = (column) => (column.text ? { class: "text" } : {});
    return element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ...columns.map((c) => element("th", kind(c), c.title)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...columns.map((c) => {
        const value = c.value(row);
        return element("td", kind(c), value instanceof Node ? value : String(value));
      }))))));
  }

  function cards(pairs) {
    return element("div", { class: "cards" }, ...pairs.filter(([, value]) => value !== "-")
      .map(([title, value]) => element("div", { class: "card" }, element("b", {}, value), element("span", {}, title))));
  }

  // -- charts ----------------------------------------------------------------------------------------------------------

  function place(title, note, height, make, wide) {
    const body = element("div");
    const box = element("div", { class: wide ? "chart wide" : "chart" }, element("h3", {}, title),
      note ? element("p", { class: "note" }, note) : null, body);
    let chart = null;
    const draw = () => {
      if (!body.clientWidth) return;
      if (chart) chart.destroy();
      chart = make(body, body.clientWidth, height);
    };
    redraws.push(draw);
    new ResizeObserver(() => {
      if (!chart) draw();
      else if (Math.abs(chart.width - body.clientWidth) > 1) chart.setSize({ width: body.clientWidth, height });
    }).observe(body);
    return box;
  }

  function axes(x, y, format) {
    const common = { stroke: colour("faint"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule"), width: 1 } };
    return [{ ...common, label: x, labelSize: 20, size: 34 },
      { ...common, label: y, labelSize: 20, size: 62, values: (u, ticks) => ticks.map((tick) => (known(tick) ? (format ? format(tick) : plain(tick)) : "")) }];
  }

  // The value at a place, or the nearest known one: of curves over time, each has its own places. Without a cursor the last.
  function nearest(values, at) {
    for (let off = 0; known(at) && off < values.length; off += 1) {
      if (known(values[at - off])) return values[at - off];
      if (known(values[at + off])) return values[at + off];
    }
    return values.filter(known).at(-1);
  }

  // series: [{label, values, colour, fill, dash, points}]; values stand beside xs. options.bands: see phaseBands.
  function lines(title, note, xs, x, y, series, options = {}) {
    const values = series.flatMap((one) => one.values).filter(known);
    const smallest = values.reduce((a, b) => Math.min(a, b), Infinity), largest = values.reduce((a, b) => Math.max(a, b), 0);
    const logarithmic = !options.linear && smallest > 0 && largest > 30 * smallest;
    return place(title, note, options.height || 240, (into, width, height) => new uPlot({
      width, height,
      scales: { x: { time: false }, y: logarithmic && !options.stacked ? { distr: 3 } : { range: (u, low, high) => range(low, high) } },
      axes: axes(x, y, options.format),
      cursor: { drag: { x: true, y: false } },
      legend: { live: true },
      hooks: { drawClear: options.bands || [], ready: [restLegend], setCursor: [restLegend] },
      series: [{ label: x, value: (u, v) => (known(v) ? plain(v) : "-") }, ...series.map((one) => ({
        label: one.label,
        stroke: colour(one.colour),
        fill: one.fill ? colour(one.colour) + "33" : undefined,
        width: 1.6,
        dash: one.dash ? [5, 4] : undefined,
        spanGaps: true,
        paths: one.paths,
        points: { show: Boolean(one.points) || xs.length < 3, size: 5 },
        value: (u, v, row, at) => {
          const found = nearest(one.values, at);
          return known(found) ? (options.format ? options.format(found) : plain(found)) : "-";
        },
      }))],
    }, [xs, ...series.map((one) => one.values)], into), options.wide);
  }

  // Legends show the last values while there is no cursor.
  function restLegend(u) {
    if (!known(u.cursor.idx) && u.data[0].length) u.setLegend({ idx: u.data[0].length - 1 }, false);
  }

  // -- what happened when ----------------------------------------------------------------------------------------------

  const PHASES = { ddp: ["grey", "DDP alone, watched"], pause: ["orange", "standing still to start, measure and plan"] };

  // Draws strips along the time axis, one row for each run that was not only training.
  const phaseBands = (runs) => [(u) => {
    const { ctx, bbox } = u, height = 9 * uPlot.pxRatio;
    ctx.save();
    runs.filter((run) => run.phases.length).forEach((run, row) => {
      for (const [kind, start, end] of run.phases) {
        const left = Math.max(bbox.left, u.valToPos(start, "x", true));
        const right = Math.min(bbox.left + bbox.width, u.valToPos(end, "x", true));
        if (right <= left) continue;
        const top = bbox.top + bbox.height - (row + 1) * height;
        ctx.fillStyle = colour(PHASES[kind][0]);
        ctx.globalAlpha = 0.12;
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        ctx.globalAlpha = 0.9;
        ctx.fillRect(left, top, Math.max(right - left, 2), height - 2);
      }
    });
    ctx.restore();
  }];

  function phaseLegend(runs) {
    const spent = {};
    for (const run of runs) for (const [kind, start, end] of run.phases) spent[kind] = (spent[kind] || 0) + end - start;
    return legend(Object.entries(spent).map(([kind, seconds]) => [PHASES[kind][0], PHASES[kind][1] + ": " + plain(seconds, 2) + " s"]));
  }

  function legend(entries) {
    return element("div", { class: "legend" }, ...entries.map(([shade, name]) => {
      const swatch = element("i");
      swatch.style.background = "var(--" + shade + ")";
      return element("span", {}, swatch, name);
    }));
  }

  function lossOverTime(runs) {
    const having = runs.filter((run) => run.notes.loss);
    if (!having.length) return null;
    const curves = having.map((run) => [run.name, run.notes.loss.time.map((t) => t - run.began), average(run.notes.loss.value)]);
    const box = overlay("Loss over time", "loss", curves, "seconds", true, null,
      { height: 320, bands: phaseBands(having), note: "Mean of the last ten steps." });
    if (having.some((run) => run.phases.length)) box.append(phaseLegend(having));
    return box;
  }

  const average = (values) => values.map((_, at) => {
    const recent = values.slice(Math.max(0, at - 9), at + 1).filter(known);
    return recent.length ? recent.reduce((a, b) => a + b / recent.length, 0) : null;
  });

  function range(low, high) {
    if (!known(low) || !known(high)) return [0, 1];
    const bottom = low >= 0 && (low < 0.6 * high || high - low < 0.05 * high) ? 0 : low - 0.08 * (high - low || Math.abs(high) || 1);
    return [bottom, high + 0.08 * (high - bottom || Math.abs(high) || 1)];
  }

  // -- timeline --------------------------------------------------------------------------------------------------------

  const KINDS = { forward: "grey", loss: "grey", optimizer: "grey", "between steps": "rule", compute: "grey", backward: "violet",
    "waiting for the exchange": "red", encode: "orange", decode: "green", commit: "teal", "take in": "teal", "hand back": "teal",
    "waiting for wire": "rule", "waiting for backward": "rule", "waiting for a core": "red" };
  const tone = (lane, name) => (lane === "wire" ? "blue" : KINDS[name] || (name === "work" ? "green" : "blue"));

  function gantt(run) {
    const box = element("section", {}, element("h2", {}, "Timeline of a step"));
    const traces = run.traces, predicted = run.predicted;
    if (!traces.length && !predicted.length) {
      box.append(element("p", { class: "faint" }, "No step was traced: wire.trace(20) after wire.log_to(...) writes down when everything happens."));
      return box;
    }
    const lengths = traces.map((trace) => trace.seconds).sort((a, b) => a - b);
    let chosen = Math.max(0, traces.findIndex((trace) => trace.seconds === lengths[lengths.length >> 1]));
    box.append(element("p", { class: "note" }, (predicted.length
      ? "Upper half of a row: predicted by the plan; lower half: measured. " : "")
      + "Milliseconds since backward began. Hover for details; drag to zoom, double-click to go back."));
    if (traces.length > 1) {
      const choice = element("select", { "aria-label": "traced step" }, ...traces.map((trace, at) =>
        element("option", at === chosen ? { value: at, selected: "" } : { value: at }, "step " + trace.step + " (" + milli(trace.seconds) + " ms)")));
      choice.addEventListener("change", () => { chosen = Number(choice.value); redrawOne(); });
      box.append(choice);
    }
    const shown = () => bars(run, traces[chosen], predicted);
    const count = Math.max(3, ...(traces.length ? traces : [null]).map((trace) => bars(run, trace, predicted).rows.length));
    const chart = place("", "", Math.min(760, 64 + 26 * count), (into, width, height) => drawGantt(into, width, height, shown()), true);
    const redrawOne = redraws[redraws.length - 1];
    chart.querySelector("h3").remove();
    chart.setAttribute("id", "gantt");
    const used = new Set([...traces.flatMap((t) => t.spans.map((s) => [s[0], s[1]].join("|"))), ...predicted.map((s) => [s[2], s[1]].join("|"))]);
    const names = new Map();
    for (const key of used) {
      const [lane, name] = key.split("|");
      names.set(lane === "wire" ? "collective" : name, tone(lane, name));
    }
    box.append(legend([...names].map(([name, shade]) => [shade, name])), chart);
    return box;
  }

  function bars(run, trace, predicted) {
    const names = trace ? (trace.groups.length ? trace.groups : [...new Set(trace.spans.map((s) => s[2]))].filter((g) => g >= 0)
      .sort((a, b) => a - b).map((g) => "bucket " + g)) : run.groups.map((group) => group.name);
    const rows = ["training", "exchange thread", ...names], found = [];
    const half = predicted.length > 0;
    for (const [lane, name, group, start, end] of trace ? trace.spans : []) {
      const waiting = name.startsWith("waiting");
      if (lane === "job") found.push({ row: 0, part: "whole", lane, name, start, end, what: "training" });
      if (lane === "thread") found.push({ row: 1, part: "whole", lane, name, start, end, what: group >= 0 ? names[group] : "exchange thread", quiet: waiting });
      if (lane !== "job" && group >= 0) found.push({ row: 2 + group, part: half ? "lower" : "whole", lane, name, start, end, what: "measured, " + names[group] });
    }
    for (const [group, name, lane, start, end] of predicted) {
      found.push({ row: 2 + group, part: "upper", lane: lane === "codec" ? "thread" : lane, name, start, end, what: "predicted, " + (names[group] || "") });
    }
    const marks = trace ? trace.arrivals.map(([at, tensors, first]) => ({ at, text: first + (tensors > 1 ? " and " + (tensors - 1) + " more" : "") })) : [];
    return { rows, bars: found, marks };
  }

  function drawGantt(into, width, height, shown) {
    const low = 1000 * Math.min(0, ...shown.bars.map((bar) => bar.start));
    const high = 1000 * Math.max(0.001, ...shown.bars.map((bar) => bar.end));
    const count = shown.rows.length;
    const most = width < 520 ? 13 : 22;
    const cut = (text) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
    const rectangle = (u, bar) => {
      const at = count - 1 - bar.row, [bottom, top] = { whole: [0.14, 0.86], lower: [0.1, 0.48], upper: [0.52, 0.9] }[bar.part];
      const left = u.valToPos(1000 * bar.start, "x", true), right = u.valToPos(1000 * bar.end, "x", true);
      const high = u.valToPos(at + top, "y", true), deep = u.valToPos(at + bottom, "y", true);
      return [left, high, Math.max(1, right - left), deep - high];
    };
    const chart = new uPlot({
      width, height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
      scales: { x: { time: false, range: (u, a, b) => [a, b] }, y: { range: () => [0, count] } },
      axes: [axes("ms since backward began", "")[0], {
        ...axes("", "")[1], label: undefined, size: width < 520 ? 96 : 160, grid: { show: false }, ticks: { show: false },
        splits: () => shown.rows.map((_, at) => count - 1 - at + 0.5), values: () => shown.rows.map(cut), gap: 8,
      }],
      series: [{}, { show: false }],
      hooks: {
        draw: [(u) => {
          const { ctx, bbox } = u;
          ctx.save();
          ctx.beginPath();
          ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
          ctx.clip();
          for (const bar of shown.bars) {
            ctx.globalAlpha = bar.part === "upper" ? 0.45 : bar.quiet ? 0.6 : 0.95;
            ctx.fillStyle = colour(tone(bar.lane, bar.name));
            ctx.fillRect(...rectangle(u, bar));
          }
          ctx.globalAlpha = 1;
          ctx.strokeStyle = colour("ink");
          for (const mark of shown.marks) {
            const x = u.valToPos(1000 * mark.at, "x", true), y = u.valToPos(count - 1 + 0.98, "y", true);
            ctx.beginPath(); ctx.moveTo(x, y); ctx.lineTo(x, u.valToPos(count - 1 + 0.02, "y", true)); ctx.stroke();
          }
          ctx.restore();
        }],
        setCursor: [(u) => {
          const { left, top } = u.cursor, ratio = uPlot.pxRatio;
          const x = left * ratio + u.bbox.left, y = top * ratio + u.bbox.top;
          const hits = left < 0 ? [] : shown.bars.filter((bar) => {
            const [l, t, w, h] = rectangle(u, bar);
            return x >= l - 1 && x <= l + w + 1 && y >= t && y <= t + h;
          });
          const bar = hits.sort((a, b) => (a.end - a.start) - (b.end - b.start))[0];
          if (!bar) { tip.style.display = "none"; return; }
          tip.textContent = bar.name + "\n" + bar.what + "\n" + milli(bar.start) + " to " + milli(bar.end) + " ms, takes " + milli(bar.end - bar.start) + " ms";
          tip.style.display = "block";
          const frame = u.over.getBoundingClientRect();
          const right = Math.min(window.scrollX + frame.left + left + 14, window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
          tip.style.left = Math.max(0, right) + "px";
          tip.style.top = window.scrollY + frame.top + top + 14 + "px";
        }],
      },
    }, [[low, high], [0, 0]], into);
    chart.over.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    return chart;
  }

  // -- one run ---------------------------------------------------------------------------------------------------------

  function oneRun(run) {
    const c = run.columns, s = run.summary, part = element("div");
    const ms = (values) => values.map((v) => (known(v) ? 1000 * v : null));
    part.append(cards([
      ["ms a step", milli(s.seconds)], ["ms computing", milli(s.compute)], ["ms waiting", milli(s.exposed)],
      known(s.link_bytes) ? ["on a rank's link a step", size(s.link_bytes)] : ["handed over by a rank a step", size(s.bytes)],
      ["less than dense", s.link_bytes && s.dense_bytes ? plain(s.dense_bytes / s.link_bytes, 3) + " x" : "-"],
      ["density", percent(s.density)], ["residual norm", plain(s.residual_norm)], ["loss", plain(s.loss)],
      ["steps", plain(s.steps, 9)], ["steps skipped", s.skipped ? String(s.skipped) : "-"],
    ]));
    if (run.plan) part.append(whichPlan(run.plan, s));
    if (run.groups.length) part.append(groupTable(run));
    if (run.traces.length || run.groups.length) part.append(gantt(run));
    if (run.fits.length) part.append(magnitudes(run));
    const box = element("div", { class: "charts" });
    const binned = run.binned ? " Means over neighbouring steps." : "";
    if (some(c.compute)) {
      box.append(lines("Where a step goes", "Computing and waiting add up to the step; the others run beside computing, as far as they can." + binned,
        c.step, "step", "ms", [
          { label: "step", values: ms(c.seconds), colour: "red", fill: true }, { label: "computing", values: ms(c.compute), colour: "violet", fill: true },
          { label: "encode", values: ms(c.encode), colour: "orange" }, { label: "wire", values: ms(c.wire), colour: "blue" },
          { label: "decode", values: ms(c.decode), colour: "green" }], { wide: true, height: 300, stacked: true }));
    } else if (some(c.seconds)) {
      box.append(lines("Step time", binned, c.step, "step", "ms", [{ label: "step", values: ms(c.seconds), colour: "red" }], { wide: true }));
    }
    if (some(c.link_bytes)) {
      const dense = s.dense_bytes ? [{ label: "dense", values: c.step.map(() => s.dense_bytes), colour: "grey", dash: true }] : [];
      box.append(lines("Bytes a step", "On the link of this rank, by the formulas of its collectives; without a wire, by its interface's counters.",
        c.step, "step", "", [{ label: "on the link", values: c.link_bytes, colour: "blue" }, ...dense], { format: size }));
    } else if (some(c.bytes)) {
      box.append(lines("Bytes a step", "What this rank hands over to collectives.", c.step, "step", "",
        [{ label: "handed over", values: c.bytes, colour: "blue" }], { format: size }));
    }
    if (some(c.density)) {
      box.append(lines("Density", "Share of the elements that travel, and what was asked for.", c.step, "step", "", [
        { label: "sent", values: c.density, colour: "blue" }, { label: "target", values: c.target, colour: "grey", dash: true }], { format: percent }));
    }
    if (some(c.residual_norm)) {
      const at = c.step.filter((_, i) => known(c.residual_norm[i]));
      box.append(lines("Residual norm", "Of what is not sent yet, on this rank.", at, "step", "",
        [{ label: "norm", values: c.residual_norm.filter(known), colour: "teal", points: at.length < 60 }]));
    }
    for (const [name, note] of Object.entries(run.notes)) {
      box.append(lines(name, "As noted by the job.", note.step, "step", "", [{ label: name, values: note.value, colour: "green" }]));
    }
    part.append(element("h2", {}, "Step by step"), box);
    if (run.ranks.length) part.append(element("h2", {}, "Ranks"), element("p", { class: "note" },
      "Means over the middle half of the steps. The rank that waits least is the one that the others wait for."), table([
      { title: "rank", value: (r) => r.rank, text: true }, { title: "host", value: (r) => r.host, text: true },
      ...["seconds", "compute", "exposed", "encode", "wire", "decode"].map((name) => ({ title: name + " ms", value: (r) => milli(r[name]) })),
      { title: "on the link", value: (r) => size(r.link_bytes) }], run.ranks));
    if (run.events.length) part.append(element("h2", {}, "Events"), table([
      { title: "step", value: (e) => e[0] }, { title: "what", value: (e) => e[1], text: true }, { title: "", value: (e) => e[2], text: true }],
      run.events.slice(-200)));
    return part;
  }

  function whichPlan(plan, s) {
    const gap = s.seconds && plan.predicted ? " Measured: " + milli(s.seconds) + " ms, " + plain(s.seconds / plan.predicted, 3) + " times that." : "";
    return element("section", {}, element("h2", {}, "The plan"), element("p", {},
      "For " + plan.model + " on " + plan.nodes + " x " + plan.ranks_per_node + " ranks" + (plan.rate ? ", " + plan.rate : "") + ", quality " + plan.quality
      + ", found by " + plan.search + ". A step is predicted to take " + milli(plan.predicted) + " ms; " + milli(plan.dense) + " ms dense, "
      + milli(plan.bound) + " ms without any communication." + gap), ...plan.remarks.map((remark) => element("p", { class: "faint" }, remark)));
  }

  function groupTable(run) {
    const planned = run.groups.some((group) => group.predicted);
    const beside = (name) => (group) => milli(group[name]) + (group.predicted ? " (" + milli(group.predicted[name]) + ")" : "");
    return element("section", {}, element("h2", {}, "What was chosen for each group"),
      element("p", { class: "note" }, "In the order in which they are sent. Medians of a step on this rank" + (planned ? "; in brackets: predicted." : ".")),
      table([
        { title: "group", value: (g) => element("span", { title: g.tensors.join("\n") }, g.name), text: true },
        { title: "codec", value: (g) => element("code", {}, g.codec), text: true },
        { title: "why", value: (g) => g.why, text: true },
        { title: "tensors", value: (g) => g.tensors.length }, { title: "elements", value: (g) => plain(g.elements, 3) },
        { title: "handed over", value: (g) => size(g.bytes) }, { title: "density", value: (g) => percent(g.density) },
        { title: "encode ms", value: beside("encode") }, { title: "wire ms", value: beside("wire") }, { title: "decode ms", value: beside("decode") },
      ], run.groups));
  }

  const MODELS = { laplace: ["Laplace", "orange"], gauss: ["Gauss", "violet"], pareto: ["generalised Pareto", "green"] };

  // How the magnitudes of each group are distributed: the last look as a drawing, the distances of all looks in a table.
  function magnitudes(run) {
    const part = element("section", {}, element("h2", {}, "How magnitudes are distributed"),
      element("p", { class: "note" }, "Of the gradient and what was not sent before, on this rank, without zeros. Only a cold start depends on it."));
    const box = element("div", { class: "charts" });
    for (const { group, looks } of run.fits.slice(0, 6)) box.append(histogram(group, looks[looks.length - 1]));
    const rows = run.fits.flatMap(({ group, looks }) => looks.map((look) => ({ group, ...look })));
    const of = (name) => (row) => { const model = row.models.find((one) => one[0] === name); return model ? plain(model[1], 3) : "-"; };
    part.append(box, element("p", { class: "note" }, "Wasserstein distance to each model, as a share of the mean magnitude:"), table([
      { title: "group", value: (r) => r.group, text: true }, { title: "exchange", value: (r) => r.step },
      { title: "zeros", value: (r) => percent(r.zeros) },
      ...Object.entries(MODELS).map(([name, [title]]) => ({ title, value: of(name) })),
      { title: "closest", value: (r) => (r.models.length ? (MODELS[r.models[0][0]] || [r.models[0][0]])[0] : "-"), text: true }], rows));
    return part;
  }

  function histogram(group, look) {
    const step = { paths: uPlot.paths.stepped({ align: 1 }) };
    const xs = look.edges.map((edge) => Math.log10(edge));
    // Bins are not equally wide on this axis: per octave, so that areas are shares.
    const closed = (shares) => [...shares.map((share, at) => share / Math.log2(look.edges[at + 1] / look.edges[at])), 0];
    return lines(group, "Exchange " + look.step + ": share of magnitudes per octave, and what each model expects; the closest is drawn through.",
      xs, "log10 of the magnitude", "", [
        { label: "measured", values: closed(look.shares), colour: "blue", fill: true, ...step },
        ...look.models.map(([name, , shares], at) => ({ label: (MODELS[name] || [name])[0], values: closed(shares),
          colour: (MODELS[name] || ["", "grey"])[1], dash: at > 0, ...step }))], { format: percent, linear: true });
  }

  // -- several ---------------------------------------------------------------------------------------------------------

  const SHADES = ["blue", "orange", "green", "red", "violet", "teal", "grey"];

  function comparison(runs) {
    const part = element("section", {}, lossOverTime(runs), element("h2", {}, "Runs beside each other"));
    const base = runs[0].summary.seconds;
    part.append(table([
      { title: "run", value: (r) => r.name, text: true }, { title: "codec", value: (r) => element("code", {}, r.summary.codec), text: true },
      { title: "ranks", value: (r) => r.summary.ranks }, { title: "steps", value: (r) => r.summary.steps },
      { title: "ms a step", value: (r) => milli(r.summary.seconds) },
      { title: "faster than the first", value: (r) => (r.summary.seconds && base ? plain(base / r.summary.seconds, 3) + " x" : "-") },
      { title: "computing", value: (r) => milli(r.summary.compute) }, { title: "waiting", value: (r) => milli(r.summary.exposed) },
      { title: "on a link a step", value: (r) => size(r.summary.link_bytes) }, { title: "density", value: (r) => percent(r.summary.density) },
      { title: "loss", value: (r) => plain(r.summary.loss) }], runs));
    const box = element("div", { class: "charts" });
    box.append(overlay("Step time", "ms", runs.map((r) => [r.name, r.columns.step, r.columns.seconds.map((v) => (known(v) ? 1000 * v : null))]), "step", true));
    const named = new Set(runs.flatMap((r) => Object.keys(r.notes)));
    for (const name of named) {
      const having = runs.filter((r) => r.notes[name]);
      box.append(overlay(name + " over steps", "", having.map((r) => [r.name, r.notes[name].step, r.notes[name].value]), "step"));
      if (name !== "loss") box.append(overlay(name + " over time", "", having.map((r) => [r.name, r.notes[name].time.map((t) => t - r.began), r.notes[name].value]), "seconds"));
    }
    const sent = runs.filter((r) => some(r.columns.link_bytes));
    if (sent.length) box.append(overlay("Bytes a step on a rank's link", "", sent.map((r) => [r.name, r.columns.step, r.columns.link_bytes]), "step", false, size));
    const kept = runs.filter((r) => some(r.columns.residual_norm));
    if (kept.length > 1) box.append(overlay("Residual norm", "", kept.map((r) => [r.name, r.columns.step, r.columns.residual_norm]), "step"));
    part.append(box);
    return part;
  }

  function overlay(title, unit, curves, x, wide, format, options = {}) {
    const joined = uPlot.join(curves.map(([, xs, ys]) => {
      const points = xs.map((v, at) => [v, ys[at]]).sort((a, b) => a[0] - b[0]);
      return [points.map((p) => p[0]), points.map((p) => p[1])];
    }));
    return lines(title, options.note || "", joined[0], x, unit, curves.map(([name], at) => ({
      label: name, values: joined[at + 1], colour: SHADES[at % SHADES.length], dash: at >= SHADES.length })), { ...options, wide, format });
  }

  function results(one) {
    const part = element("section", {}, element("h2", {}, one.name), element("p", { class: "note" }, one.command
      + (one.machine.processor ? ", " + one.machine.processor : "") + (one.versions.torch ? ", torch " + one.versions.torch : "")));
    const key = (row) => [row.workload, row.nodes, row.rate].filter(known).join(", ");
    const places = new Map();
    for (const row of one.rows) places.set(key(row), [...(places.get(key(row)) || []), row]);
    for (const rows of places.values()) {
      const first = rows[0];
      const longest = Math.max(...rows.map((row) => row.ci_high || row.seconds));
      part.append(element("h3", {}, [first.workload, known(first.nodes) ? first.nodes + " nodes" : "", "rate " + first.rate].filter(Boolean).join(", ")));
      for (const row of rows) {
        const fill = element("div", { class: "fill" });
        fill.style.width = (100 * row.seconds) / longest + "%";
        const track = element("div", { class: "track" }, fill);
        if (known(row.ci_low) && known(row.ci_high)) {
          const interval = element("div", { class: "range" });
          interval.style.left = (100 * row.ci_low) / longest + "%";
          interval.style.width = (100 * (row.ci_high - row.ci_low)) / longest + "%";
          track.append(interval);
        }
        const bytes = known(row.bytes_per_rank) ? ", " + size(row.bytes_per_rank) + " sent by a rank" : "";
        const line = element("div", { class: "bar", title: row.method + ": " + milli(row.seconds) + " ms a step" + bytes }, element("code", {}, String(row.method)), track,
          element("span", {}, milli(row.seconds) + " ms" + (row.ratio_to_fp32 ? ", " + plain(1 / row.ratio_to_fp32, 3) + " x" : "")));
        part.append(line);
      }
      part.append(element("p", { class: "note" }, known(first.ratio_to_fp32) ? "Milliseconds per step, and how much faster than fp32; the line is the 95 % interval." : ""));
    }
    return part;
  }

  // -- the page --------------------------------------------------------------------------------------------------------

  const { runs } = data;
  const single = runs.length === 1 && !data.results.length;
  const names = runs.map((run) => run.name).join(", ") || "Comparison";
  const titles = data.headlines.length ? data.headlines : [names];
  main.replaceChildren(...titles.map((said) => element("h1", {}, said)));
  if (data.headlines.length) main.prepend(element("p", { class: "faint names" }, names));
  if (single) {
    const run = runs[0], s = run.summary;
    main.append(element("p", { class: "faint" }, s.codec + " on " + s.ranks + " ranks, " + new Date(1000 * run.began).toISOString().slice(0, 16).replace("T", " ")
      + " UTC, " + run.start.host + ", thinwire " + run.start.thinwire + ", torch " + run.start.torch),
      ...[lossOverTime(runs)].filter(known), oneRun(run));
  } else {
    if (runs.length > 1) main.append(comparison(runs));
    data.results.forEach((one) => main.append(results(one)));
    for (const run of runs) main.append(element("details", runs.length === 1 ? { open: "" } : {}, element("summary", {}, run.name), oneRun(run)));
  }
  main.append(element("footer", {}, "Made by thinwire. What each number means: docs/report.md. Charts: uPlot, MIT licence, in this page."));
  document.body.append(tip);
  const redraw = () => redraws.forEach((draw) => draw());
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const paper = (on) => { document.documentElement.classList.toggle("light", on); redraw(); };
  addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((d) => { d.open = true; }); paper(true); });
  addEventListener("afterprint", () => paper(false));
})();
