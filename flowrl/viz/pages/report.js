"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (number) => (number == null ? "–" : String(Number(number.toPrecision(4))));

  function element(tag, content, attributes = {}) {
    const made = document.createElement(tag);
    if (content != null) made.textContent = content;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  // A chart, which the arrow keys read point by point.
  function draw(figure, table, names, key) {
    const colours = css("--series").split(",").map((each) => each.trim());
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const values = names.map((name) => table.series[name]);
    const plot = new uPlot(
      {
        width: Math.max(200, figure.clientWidth - 16),
        height: 200,
        cursor: { sync: { key } },
        hooks: { ready: [(ready) => ready.setLegend({ idx: table.x.length - 1 })] },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 32 }, { ...axis, size: 60, values: (_, ticks) => ticks.map(text) }],
        series: [
          { label: "step" },
          ...names.map((name, at) => ({
            label: name,
            stroke: colours[at % colours.length],
            dash: at >= colours.length ? [6, 4] : undefined,
            width: 1.5,
            points: { show: table.x.length < 40, size: 4 },
            value: (_, number) => text(number),
          })),
        ],
      },
      [table.x, ...values],
      figure,
    );
    let at = table.x.length - 1;
    figure.onkeydown = (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      at = Math.min(table.x.length - 1, Math.max(0, at + moves[event.key]));
      plot.setCursor({ left: plot.valToPos(table.x[at], "x"), top: 0 });
    };
    return plot;
  }

  const drawn = [];
  function chart(box, table, title, names, key) {
    const figure = element("figure", null, { tabindex: "0", role: "group" });
    figure.append(element("figcaption", title));
    const last = names.map((name) => `${name} ${text(table.series[name].findLast((each) => each != null))}`);
    figure.setAttribute("aria-label", `${title}, last values: ${last.join(", ")}`);
    box.append(figure);
    const state = { figure, table, names, key, plot: draw(figure, table, names, key) };
    drawn.push(state);
    return state;
  }
  function again(state) {
    state.plot.destroy();
    state.plot = draw(state.figure, state.table, state.names, state.key);
  }

  for (const box of document.querySelectorAll("[data-table]")) {
    const table = data.tables[Number(box.dataset.table)];
    for (const { title, series } of table.charts) chart(box, table, title, series, table.name);
    const choice = element("select", null, { "aria-label": `a number of ${table.name}` });
    for (const name of Object.keys(table.series)) choice.append(element("option", name));
    const state = chart(box, table, "any number: ", [choice.value], table.name);
    state.figure.querySelector("figcaption").append(choice);
    choice.onchange = () => {
      state.names = [choice.value];
      again(state);
    };
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(again));
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      for (const { plot, figure } of drawn) plot.setSize({ width: Math.max(200, figure.clientWidth - 16), height: 200 });
    }, 100);
  });

  const search = document.getElementById("search");
  if (search === null) return;
  const [step, order, found, rows, more] = ["step", "order", "found", "rows", "more"].map((id) => document.getElementById(id));
  for (const name of new Set(data.samples.map((row) => `${row.stage} ${row.step}`))) step.append(element("option", name));
  const orders = {
    worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
    best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
    longest: (a, b) => b.num_tokens - a.num_tokens,
  };
  let limit = 20;

  function shown(row) {
    const box = element("article", null, { class: "sample" });
    const score = row.score == null ? "no score" : `score ${text(row.score)}`;
    const terms = Object.entries(row.terms).map(([name, value]) => `${name} ${text(value)}`);
    const head = [`${row.stage} ${row.step}`, row.sample, row.rollout, score, ...terms, `${row.num_tokens} tokens`, row.finish, row.end, row.reason];
    box.append(element("p", head.filter(Boolean).join(" · ")));
    box.append(element("pre", row.prompt), element("pre", row.response));
    const line = element("p", row.answer ? `answer ${row.answer} ` : "", { class: "dim" });
    const same = element("button", "same prompt");
    same.onclick = () => {
      search.value = row.prompt;
      step.value = order.value = "";
      list();
      search.focus();
    };
    line.append(same);
    box.append(line);
    return box;
  }
  function list() {
    const wanted = search.value.trim().toLowerCase();
    const chosen = data.samples.filter(
      (row) =>
        (step.value === "" || step.value === "all" || step.value === `${row.stage} ${row.step}`) &&
        [row.prompt, row.response, row.answer, row.reason].some((each) => each.toLowerCase().includes(wanted)),
    );
    if (order.value) chosen.sort(orders[order.value]);
    rows.replaceChildren(...chosen.slice(0, limit).map(shown));
    found.textContent = `${chosen.length} of ${data.samples.length}`;
    more.hidden = chosen.length <= limit;
  }
  for (const each of [search, step, order])
    each.addEventListener("input", () => {
      limit = 20;
      list();
    });
  more.onclick = () => {
    limit += 50;
    list();
  };
  list();
})();
