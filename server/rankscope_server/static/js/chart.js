// Drift per rank over time. The chart is made once; the stream brings the series, then points that are put behind it.
(() => {
  const TRACES = 6;
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const WINDOW_SECONDS = 900;
  const AXIS_FONT = "12px system-ui, sans-serif";
  const PLOT_HEIGHT = 226; // As --plot-height says; the legend comes below it.

  const colour = (name) => {
    // A token may be light-dark(...): only a computed colour says what it is now.
    const probe = document.createElement("span");
    probe.hidden = true;
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const computed = getComputedStyle(probe).color;
    probe.remove();
    return computed;
  };

  document.addEventListener("DOMContentLoaded", () => {
    const holder = document.getElementById("drift-chart");
    const stream = document.getElementById("stream");
    if (!holder || !stream) return;

    let palette = {};
    const readPalette = () => {
      for (const name of ["--accent", "--muted", "--rule", "--rule-strong", ...Array.from({ length: TRACES }, (_, i) => `--trace-${i + 1}`)]) palette[name] = colour(name);
    };
    readPalette();

    let plot = null;
    let labels = [];
    let data = [[]];
    let zoomed = false;

    const clock = (at, step) =>
      new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined });
    // Half of a time's label stands out beyond the last tick.
    const labelWidth = () => {
      const context = document.createElement("canvas").getContext("2d");
      context.font = AXIS_FONT;
      return context.measureText(clock(data[0][0] ?? 0, 1)).width;
    };
    const last = (column) => column[column.length - 1];
    const size = () => ({ width: holder.clientWidth, height: PLOT_HEIGHT });
    const axis = (more) => ({
      stroke: () => palette["--muted"],
      grid: { stroke: () => palette["--rule"], width: 1 },
      ticks: { stroke: () => palette["--rule"], width: 1, size: 4 },
      font: AXIS_FONT,
      ...more,
    });
    // Values that stand alone between unknown ones have no line to be seen by.
    const isolated = (self, trace, drawn, gaps) => {
      if (drawn) return null;
      const values = self.data[trace];
      const [first, end] = self.series[trace].idxs ?? [0, values.length - 1];
      const alone = [];
      for (let i = first; i <= end; i++) if (values[i] != null && values[i - 1] == null && values[i + 1] == null) alone.push(i);
      return alone.length ? alone : null;
    };
    // Vertical lines where the trim fix was turned on or off; the note below the chart has them in words.
    const drawMarks = (self) => {
      const { ctx, bbox } = self;
      const ratio = devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = palette["--accent"];
      ctx.lineWidth = 1.5 * ratio;
      ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      for (const { at, label } of JSON.parse(document.getElementById("engine-drift-note")?.dataset.acted ?? "[]")) {
        const x = self.valToPos(at, "x", true);
        if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
        ctx.setLineDash([]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        const left = x > bbox.left + bbox.width / 2;
        ctx.textAlign = left ? "right" : "left";
        ctx.fillText(label, x + (left ? -5 : 5) * ratio, bbox.top + 2 * ratio);
      }
      ctx.restore();
    };
    const build = () => {
      plot?.destroy();
      holder.replaceChildren();
      plot = new uPlot({
        ...size(),
        padding: [8, Math.ceil(labelWidth() / 2) + 4, 0, 0],
        cursor: { drag: { x: true, y: false } },
        scales: { x: { time: true }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(8, (high ?? 0) * 1.08)] } },
        axes: [axis({ space: Math.ceil(labelWidth()) + 16, values: (_, marks, __, ___, step) => marks.map((at) => clock(at, step)) }), axis({ size: 44, space: 34 })],
        series: [
          { label: "Time", value: (self, at) => clock(at ?? last(self.data[0]), 1) },
          ...labels.map((label, index) => ({
            label,
            stroke: () => palette[`--trace-${(index % TRACES) + 1}`],
            width: 2,
            dash: DASHES[index % DASHES.length],
            points: { show: false, size: 6, filter: isolated },
            spanGaps: false,
            // Away from the pointer the legend tells the newest values.
            value: (self, value, trace) => {
              const shown = self.cursor.idx == null ? last(self.data[trace]) : value;
              return shown == null ? "unknown" : String(shown);
            },
          })),
        ],
        hooks: {
          draw: [drawMarks],
          setSelect: [(self) => { zoomed = self.select.width > 0; }],
        },
      }, data, holder);
      plot.over.addEventListener("dblclick", () => { zoomed = false; });
    };

    const show = () => {
      if (plot) plot.setData(data, !zoomed);
    };

    stream.addEventListener("series", (event) => {
      const series = JSON.parse(event.detail.data);
      data = [series.times, ...series.values];
      if (!plot || series.labels.join("\n") !== labels.join("\n")) {
        labels = series.labels;
        if (!labels.length || !series.times.length) return;
        build();
      } else {
        show();
      }
    });

    stream.addEventListener("points", (event) => {
      const { times, labels: named, values } = JSON.parse(event.detail.data);
      if (!times.length) return;
      while (data[0].length && data[0][data[0].length - 1] >= times[0]) for (const column of data) column.pop();
      data[0].push(...times);
      values.forEach((column, index) => (data[index + 1] ??= []).push(...column));
      const oldest = data[0][data[0].length - 1] - WINDOW_SECONDS;
      const cut = data[0].findIndex((at) => at >= oldest);
      if (cut > 0) for (const column of data) column.splice(0, cut);
      if (!plot) { labels = named; build(); } else show();
    });

    const empty = document.createElement("p");
    empty.className = "chart-empty";
    empty.textContent = "Waiting for the first sample";
    holder.append(empty);

    const note = document.getElementById("engine-drift-note");
    if (note) new MutationObserver(() => plot?.redraw(false)).observe(note, { attributeFilter: ["data-acted"] });
    new ResizeObserver(() => plot?.setSize(size())).observe(holder);
    const repaint = () => { readPalette(); plot?.redraw(false); };
    document.addEventListener("rankscope:theme", repaint);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  });
})();
