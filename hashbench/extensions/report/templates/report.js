"use strict";
// Texts of models are only ever set as textContent. Without this script the page still tells what changed and why.
(() => {
  const ROW = 24;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const nights = data.nights.length;
  const FEW = 15; // below as many rows there is nothing to filter
  const [ACCURACY, LETTER, KIND, KERNEL, CAUSE] = [0, 1, 2, 3, 4];

  // ------------------------------------------------------------------------------------------ models
  class Model {
    constructor([scope, name, detailed, flat], index) {
      this.index = index;
      this.name = name;
      this.scope = data.scopes[scope];
      this.detailed = detailed === 1;
      this.spells = [];
      let at = 0;
      for (let place = 0; place < flat.length; place += 3) {
        const first = at + flat[place];
        at = first + flat[place + 1];
        this.spells.push({ first, last: at - 1, state: data.states[flat[place + 2]] });
      }
      const newest = this.spells.length ? this.spells[this.spells.length - 1] : null;
      this.status = newest && newest.last === nights - 1 ? newest.state[ACCURACY] : "no row";
      this.dull = this.spells.every(({ state }) => state[KIND] === "pass" || state[KIND] === "skip");
      const now = newest && newest.last === nights - 1 ? newest.state[KIND] : "";
      this.trouble = now === "differ" ? 3 : now === "latent" ? 2 : now === "fail" ? 1 : 0;
      this.began = newest ? newest.first : -1;
    }
    at(night) {
      let low = 0, high = this.spells.length - 1;
      while (low <= high) {
        const middle = (low + high) >> 1, spell = this.spells[middle];
        if (night < spell.first) high = middle - 1;
        else if (night > spell.last) low = middle + 1;
        else return spell;
      }
      return null;
    }
    get words() {
      const told = this.spells.flatMap(({ state }) => [state[ACCURACY], state[KERNEL], state[CAUSE]]);
      return [this.name, ...this.scope, ...new Set(told)].join(" ").toLowerCase();
    }
    get suite() { return this.scope[0]; }
    get mode() { return this.scope[1]; }
    get scopeWords() { return this.scope.filter((part, place) => part && (place < 2 || varied[place])).map(shortSuite).join(" · "); }
  }
  const shortSuite = (text) => (text.includes("/") ? text.slice(text.lastIndexOf("/") + 1) : text);
  const varied = [0, 1, 2, 3].map((place) => new Set(data.scopes.map((scope) => scope[place])).size > 1);
  const models = data.models.map((one, index) => new Model(one, index));
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  // ------------------------------------------------------------------------------------------ theme
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const themeButton = byId("theme");
  function showTheme() {
    themeButton.setAttribute("aria-pressed", String(isDark()));
    themeButton.querySelector(".theme-word").textContent = isDark() ? "Light" : "Dark";
    readColours();
    draw();
  }
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  dark.addEventListener("change", showTheme);

  // ------------------------------------------------------------------------------------------ filter
  const search = byId("q");
  const choices = { kernel: byId("f-kernel"), cause: byId("f-cause"), suite: byId("f-suite"), mode: byId("f-mode"), status: byId("f-status") };
  function offer(select, values, label = (text) => text) {
    const ordered = [...values].filter(([text]) => text).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    for (const [text, count] of ordered.slice(0, 500)) {
      const option = document.createElement("option");
      option.value = text;
      option.textContent = `${label(text)} (${count})`;
      select.append(option);
    }
  }
  function counted(valuesOf) {
    const counts = new Map();
    for (const model of models) for (const value of new Set(valuesOf(model))) counts.set(value, (counts.get(value) || 0) + 1);
    return counts;
  }
  offer(choices.kernel, counted((model) => model.spells.map(({ state }) => state[KERNEL])));
  offer(choices.cause, counted((model) => model.spells.map(({ state }) => state[CAUSE])));
  offer(choices.suite, counted((model) => [model.suite]), shortSuite);
  offer(choices.mode, counted((model) => [model.mode]));
  offer(choices.status, counted((model) => [model.status]));

  const had = (model, column, value) => model.spells.some(({ state }) => state[column] === value);
  function matches(model) {
    const { kernel, cause, suite, mode, status } = choices;
    if (suite.value && model.suite !== suite.value) return false;
    if (mode.value && model.mode !== mode.value) return false;
    if (status.value && model.status !== status.value) return false;
    if (kernel.value && !had(model, KERNEL, kernel.value)) return false;
    if (cause.value && !had(model, CAUSE, cause.value)) return false;
    const asked = search.value.trim().toLowerCase();
    return !asked || asked.split(/\s+/).every((word) => model.words.includes(word));
  }
  const filtering = () => Boolean(search.value.trim()) || Object.values(choices).some((select) => select.value);

  let rows = [];
  function applyFilter() {
    const on = filtering();
    const kept = new Set(models.filter(matches).map((model) => model.index));
    for (const part of document.querySelectorAll("[data-model]")) {
      const index = Number(part.dataset.model);
      part.hidden = on && !kept.has(index);
    }
    let hiddenGroups = 0;
    for (const group of document.querySelectorAll(".change")) {
      group.hidden = on && !group.querySelector("[data-model]:not([hidden])");
      hiddenGroups += group.hidden && !group.closest(".standing") ? 1 : 0;
    }
    tell("changes-hidden", hiddenGroups, (count) => `${plural(count, "change")} hidden by the filter.`);
    const hidden = document.querySelectorAll("details.model[hidden]").length;
    tell("models-hidden", hidden, (count) => `${count === 1 ? "1 diagnosis" : `${count} diagnoses`} hidden by the filter.`);
    const few = models.length < FEW && !on; // an address may filter a short list: then there is a way back
    if (!few) byId("filter").hidden = false;
    byId("matches").textContent = on ? `${kept.size} of ${plural(models.length, "row")}` : plural(models.length, "row");
    const everything = byId("all-models").checked || models.length < FEW;
    rows = models.filter((model) => kept.has(model.index) && (everything || !model.dull));
    if (byId("order").value === "trouble") rows.sort((a, b) => Number(b.trouble > 0) - Number(a.trouble > 0) || b.began - a.began || b.trouble - a.trouble || a.index - b.index);
    cursor.row = Math.min(cursor.row, Math.max(0, rows.length - 1));
    layOut();
  }
  // What is chosen stands in the address, where a reload and somebody with the link find it: `#model`, or
  // `#kernel=…&q=…&model=…`.
  const controls = { q: search, ...choices, order: byId("order"), range: byId("range") };
  const asked = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : { model: decoded(location.hash.slice(1)) });
  function decoded(text) {
    try { return decodeURIComponent(text); } catch { return text; }
  }
  function standard(control) {
    return control.tagName === "SELECT" ? control.options[0].value : "";
  }
  function remember(model = asked().get("model") || "") {
    const words = new URLSearchParams();
    for (const [name, control] of Object.entries(controls)) if (control.value !== standard(control)) words.set(name, control.value);
    if (byId("all-models").checked && !byId("all-models").disabled) words.set("all", "1");
    const hash = [...words].length ? `#${new URLSearchParams([...words, ...(model ? [["model", model]] : [])])}` : `#${model}`;
    if (hash !== location.hash && (hash !== "#" || location.hash)) history.replaceState(null, "", hash);
  }
  function recall() {
    const words = asked();
    for (const [name, control] of Object.entries(controls)) {
      control.value = words.has(name) ? words.get(name) : standard(control);
      if (control.tagName === "SELECT" && control.selectedIndex < 0) control.value = standard(control);
    }
    if (!byId("all-models").disabled) byId("all-models").checked = words.has("all");
    if (Object.values(choices).some((select) => select.value)) { byId("choices").classList.add("open"); byId("more").setAttribute("aria-expanded", "true"); }
    setRange();
    applyFilter();
    if (words.get("model")) show(words.get("model"));
  }
  function tell(id, count, words) {
    byId(id).hidden = count === 0;
    byId(id).textContent = count ? words(count) : "";
  }
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(choose, 80); });
  function choose() {
    applyFilter();
    remember();
  }
  for (const select of [...Object.values(choices), byId("order"), byId("all-models")]) select.addEventListener("change", choose);
  byId("clear").addEventListener("click", () => {
    search.value = "";
    for (const select of Object.values(choices)) select.value = "";
    choose();
    search.focus();
  });
  byId("more").addEventListener("click", () => {
    const open = byId("choices").classList.toggle("open");
    byId("more").setAttribute("aria-expanded", String(open));
  });
  byId("filter").addEventListener("submit", (event) => event.preventDefault());

  // ------------------------------------------------------------------------------------------ heat map
  const grid = byId("grid"), space = byId("space"), axis = byId("axis"), range = byId("range");
  const cursor = { row: 0, night: nights - 1, shown: false };
  let colours = {}, from = 0, pool = [];
  function readColours() {
    for (const kind of ["differ", "latent", "fail", "pass", "skip"]) {
      const probe = document.querySelector(`.legend .k-${kind}`);
      const style = getComputedStyle(probe);
      colours[kind] = style.backgroundColor;
    }
    const probe = document.createElement("i");
    document.body.append(probe);
    for (const [name, variable] of [["ink", "--ink"], ["soft", "--soft"], ["accent", "--accent"], ["pass", "--pass"], ["skip", "--skip"], ["paper", "--on-badge"], ["line", "--line"]]) {
      probe.style.color = `var(${variable})`;
      colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
  }
  for (const count of [30, 90, 365]) if (count < nights) range.append(new Option(`last ${count}`, String(count)));
  range.append(new Option(nights === 1 ? "the only one" : `all ${nights}`, String(nights)));
  range.addEventListener("change", () => { setRange(); draw(); remember(); });
  function setRange() {
    from = Math.max(0, nights - Number(range.value));
    cursor.night = Math.max(cursor.night, from);
  }

  function layOut() {
    space.style.height = `${rows.length * ROW}px`;
    grid.style.height = `${Math.min(rows.length * ROW + 2, Math.max(8 * ROW, 0.7 * innerHeight))}px`;
    grid.setAttribute("aria-rowcount", String(rows.length));
    grid.setAttribute("aria-colcount", String(nights));
    if (!rows.length) byId("readout").textContent = "No model matches.";
    draw();
  }
  function makeRow() {
    const row = document.createElement("div"), label = document.createElement("span"), canvas = document.createElement("canvas");
    row.className = "row";
    row.setAttribute("role", "row");
    label.className = "label";
    label.setAttribute("role", "rowheader");
    canvas.setAttribute("role", "gridcell");
    row.append(label, canvas);
    space.append(row);
    return { row, label, canvas };
  }
  const summary = (model) => model.spells.slice(-4).reverse()
    .map(({ first, last, state }) => `${state[ACCURACY]} ${data.nights[first]}${first === last ? "" : ` to ${data.nights[last]}`}`).join("; ");
  function draw() {
    if (byId("map").hidden) return;
    drawAxis();
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW) - 2);
    const count = Math.min(rows.length - first, Math.ceil(grid.clientHeight / ROW) + 4);
    while (pool.length < count) pool.push(makeRow());
    for (const { row } of pool.slice(Math.max(0, count))) row.hidden = true;
    for (let place = 0; place < count; place++) {
      const at = first + place, model = rows[at], { row, label, canvas } = pool[place];
      row.hidden = false;
      row.style.top = `${at * ROW}px`;
      row.dataset.row = String(at);
      row.setAttribute("aria-rowindex", String(at + 1));
      row.classList.toggle("at", cursor.shown && at === cursor.row);
      canvas.id = `cell-${at}`;
      canvas.setAttribute("aria-label", `${model.name}: ${summary(model)}`);
      if (label.dataset.of !== String(model.index)) {
        label.dataset.of = String(model.index);
        label.replaceChildren();
        const name = document.createElement("bdi"), scope = document.createElement("span");
        name.textContent = model.name;
        scope.className = "scope";
        scope.textContent = ` ${model.scopeWords}`;
        label.title = `${model.name} ${model.scopeWords}`;
        label.append(name, scope);
      }
      drawRow(canvas, model, cursor.shown && at === cursor.row);
    }
    if (cursor.shown && rows.length) grid.setAttribute("aria-activedescendant", `cell-${cursor.row}`);
    else grid.removeAttribute("aria-activedescendant");
  }
  function sized(canvas, height) {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }
  const WORST = ["differ", "latent", "fail", "skip", "pass"];
  const cellWidth = (width) => Math.min(44, width / (nights - from));
  function drawRow(canvas, model, isAt) {
    const [pen, width] = sized(canvas, ROW), cell = cellWidth(width);
    const strong = [];
    for (const spell of model.spells) {
      if (spell.last < from) continue;
      const kind = spell.state[KIND];
      const x = (Math.max(spell.first, from) - from) * cell, w = (spell.last - Math.max(spell.first, from) + 1) * cell;
      strong.push([WORST.indexOf(kind), kind, x, w, spell]);
    }
    strong.sort((a, b) => b[0] - a[0]); // what is worse is drawn over what is better, where a night has less than a pixel
    for (const [, kind, x, w, spell] of strong) paint(pen, kind, x, w, cell, spell.state[LETTER]);
    for (const night of marked()) {
      pen.fillStyle = colours.accent;
      pen.globalAlpha = 0.35;
      pen.fillRect((night - from) * cell - 0.5, 0, 1, ROW);
      pen.globalAlpha = 1;
    }
    if (isAt) {
      pen.strokeStyle = colours.accent;
      pen.lineWidth = 2;
      pen.strokeRect((cursor.night - from) * cell + 1, 1, Math.max(cell - 2, 2), ROW - 2);
    }
  }
  function paint(pen, kind, x, w, cell, letter) {
    const gap = cell >= 6 ? 1 : 0;
    pen.fillStyle = colours[kind];
    if (kind === "pass") return void pen.fillRect(x, 10, w, 3);
    if (kind === "skip") {
      for (let at = x + 1; at < x + w; at += 4) pen.fillRect(at, 11, 2, 2);
      return;
    }
    const width = Math.max(w - gap, 1);
    pen.fillRect(x, 3, width, 18);
    if (kind === "fail") pen.clearRect(x, 11, width, 2);
    if (cell < 10) return;
    if (kind === "fail") { pen.fillRect(x, 3, width, 18); }
    pen.fillStyle = colours.paper;
    pen.font = "700 11px ui-monospace, Menlo, Consolas, monospace";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let at = x; at < x + w - cell / 2; at += cell) {
      if (at > x) pen.fillRect(at - gap, 3, gap, 18);
      pen.fillText(letter, at + (cell - gap) / 2, 12.5);
    }
  }
  const marked = () => Object.keys(data.marks).map(Number).filter((night) => night >= from);
  function drawAxis() {
    const [pen, width] = sized(axis, 34), cell = cellWidth(width);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const GAP = 14, labelled = [];
    const words = (night) => data.nights[night].slice(0, 12), room = (night) => pen.measureText(words(night)).width;
    // The last night is the one that is judged: its date comes first, the others have what room is left.
    const last = nights - 1, tick = (last - from) * cell, left = Math.max(0, Math.min(tick, width - room(last)));
    let end = -1;
    for (let night = from; night < last; night++) {
      const x = (night - from) * cell;
      if (x >= end && x + room(night) + GAP <= left) {
        labelled.push([night, x, x]);
        end = x + room(night) + GAP;
      }
    }
    labelled.push([last, left, tick]);
    axis.dataset.labels = labelled.map(([night]) => words(night)).join(" ");
    for (const [night, x, at] of labelled) {
      pen.fillStyle = night === last ? colours.ink : colours.soft;
      pen.fillText(words(night), x, 12);
      pen.fillRect(at, 15, 1, 4);
    }
    pen.fillStyle = colours.accent;
    for (const night of marked()) {
      const x = (night - from) * cell;
      pen.beginPath();
      pen.moveTo(x - 5, 22);
      pen.lineTo(x + 5, 22);
      pen.lineTo(x, 32);
      pen.fill();
    }
  }
  function readOut() {
    const model = rows[cursor.row], out = byId("readout");
    if (!model) return;
    const spell = model.at(cursor.night), mark = data.marks[cursor.night];
    const name = document.createElement("b");
    name.textContent = model.name;
    const did = spell
      ? [spell.state[ACCURACY], spell.state[KERNEL], spell.state[CAUSE]].filter(Boolean).join(", ") + nightsOf(spell)
      : "no row";
    out.replaceChildren(name, ` ${model.scopeWords} · ${data.nights[cursor.night]}: ${did}.`);
    if (mark) out.append(` ▼ Environment changed that night: ${mark}.`);
    if (model.detailed) {
      const link = document.createElement("a");
      link.href = `#${anchorOf(model.index)}`;
      link.textContent = "Diagnosis";
      out.append(" ", link);
    }
  }
  const nightsOf = ({ first, last }) => (last > first ? ` (${data.nights[first]} to ${data.nights[last]})` : "");

  let frame = 0;
  const drawSoon = () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(draw); };
  grid.addEventListener("scroll", drawSoon, { passive: true });
  addEventListener("resize", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(layOut); });
  function moveTo(row, night) {
    cursor.row = Math.max(0, Math.min(rows.length - 1, row));
    cursor.night = Math.max(from, Math.min(nights - 1, night));
    cursor.shown = true;
    const top = cursor.row * ROW;
    if (top < grid.scrollTop) grid.scrollTop = top;
    if (top + ROW > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + ROW - grid.clientHeight;
    draw();
    readOut();
  }
  const page = () => Math.max(1, Math.floor(grid.clientHeight / ROW) - 1);
  grid.addEventListener("keydown", (event) => {
    if (event.altKey || event.metaKey || !rows.length) return;
    const steps = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      PageUp: [-page(), 0], PageDown: [page(), 0], Home: [0, -nights], End: [0, nights],
    };
    if (event.ctrlKey && (event.key === "Home" || event.key === "End")) {
      moveTo(event.key === "Home" ? 0 : rows.length, cursor.night);
    } else if (event.ctrlKey) {
      return;
    } else if (event.key in steps) {
      const [down, right] = steps[event.key];
      if (cursor.shown) moveTo(cursor.row + down, cursor.night + right);
      else moveTo(cursor.row, cursor.night);
    } else if (event.key === "Enter") {
      if (rows[cursor.row].detailed) show(anchorOf(rows[cursor.row].index), grid);
    } else return;
    event.preventDefault();
  });
  function place(event) {
    const row = event.target.closest(".row");
    if (!row || row.hidden) return null;
    const canvas = row.querySelector("canvas"), box = canvas.getBoundingClientRect();
    const night = from + Math.floor((event.clientX - box.left) / cellWidth(box.width));
    return [Number(row.dataset.row), event.clientX < box.left ? cursor.night : night];
  }
  grid.addEventListener("mousemove", (event) => {
    const found = place(event);
    if (found && (found[0] !== cursor.row || found[1] !== cursor.night || !cursor.shown)) {
      [cursor.row, cursor.night, cursor.shown] = [found[0], Math.max(from, Math.min(nights - 1, found[1])), true];
      drawSoon();
      readOut();
    }
  });
  grid.addEventListener("click", (event) => {
    const found = place(event);
    if (found) moveTo(...found);
    if (found && event.target.closest(".label") && rows[found[0]].detailed) show(anchorOf(rows[found[0]].index), grid);
  });

  // ------------------------------------------------------------------------------------------ one model
  let cameFrom = null;
  const anchorOf = (index) => document.querySelector(`details.model[data-model="${index}"] .lead`).id;
  function show(anchor, source = null) {
    const lead = byId(anchor), part = lead && lead.closest("details.model");
    if (!part) return;
    cameFrom = source;
    part.hidden = false;
    part.open = true;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    part.querySelector("summary").focus({ preventScroll: true });
    part.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
  }
  document.addEventListener("click", (event) => {
    const copy = event.target.closest("button.copy");
    if (copy) return void copied(copy);
    const link = event.target.closest('a[href^="#"]');
    const anchor = link && link.getAttribute("href").slice(1);
    if (!anchor || !byId(anchor) || !byId(anchor).closest("details.model")) return;
    event.preventDefault();
    remember(anchor);
    show(anchor, link);
  });
  async function copied(button) {
    const code = button.parentNode.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // a browser that does not let a file do that
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
  for (const part of document.querySelectorAll("details.model"))
    part.addEventListener("toggle", () => { if (part.open) remember(part.querySelector(".lead").id); });
  addEventListener("hashchange", recall);

  // ------------------------------------------------------------------------------------------ sorted tables
  const sortKey = (cell) => {
    const text = (cell.dataset.sort || cell.textContent).trim(), number = Number(text);
    return text !== "" && !Number.isNaN(number) ? [0, number, ""] : [1, 0, text.toLowerCase()];
  };
  function sortBy(table, column, down) {
    const keyed = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[column]), row]);
    const order = ([a], [b]) => a[0] - b[0] || a[1] - b[1] || (a[2] < b[2] ? -1 : a[2] > b[2] ? 1 : 0);
    keyed.sort((a, b) => (down ? -order(a, b) : order(a, b)));
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    for (const [column, head] of heads.entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const was = head.getAttribute("aria-sort");
        const down = was ? was === "ascending" : head.classList.contains("number");
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sortBy(table, column, down);
      });
    }
  }
  // Diagnoses are sorted by what their summaries say; what is larger comes first, names and causes by the alphabet.
  for (const button of document.querySelectorAll(".heads button")) button.addEventListener("click", () => {
    const key = button.dataset.key, was = button.dataset.sorted, text = key === "cause";
    const down = was ? was === "ascending" : !(text || key === "place");
    const value = (part) => (text ? part.dataset.cause.toLowerCase() : Number(part.dataset[key]));
    const parts = [...document.querySelectorAll("details.model")];
    const places = (a, b) => Number(a.dataset.place) - Number(b.dataset.place);
    parts.sort((a, b) => { const [x, y] = [value(a), value(b)]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || places(a, b); });
    for (const other of document.querySelectorAll(".heads button")) { delete other.dataset.sorted; other.setAttribute("aria-pressed", "false"); }
    button.dataset.sorted = down ? "descending" : "ascending";
    button.setAttribute("aria-pressed", "true");
    byId("models-hidden").before(...parts);
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !byId("filter").hidden && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
    }
    if (event.key !== "Escape") return;
    if (event.target === search) {
      search.value = "";
      choose();
      return;
    }
    const part = event.target.closest("details.model[open]");
    if (!part) return;
    part.open = false;
    (cameFrom && cameFrom.isConnected ? cameFrom : part.querySelector("summary")).focus();
    cameFrom = null;
  });
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) if (!part.open) { part.open = true; part.dataset.printed = ""; }
  });
  addEventListener("afterprint", () => {
    for (const part of document.querySelectorAll("[data-printed]")) { part.open = false; delete part.dataset.printed; }
  });

  for (const part of document.querySelectorAll(".needs-script")) if (part.id !== "filter" && !part.id.endsWith("-hidden")) part.hidden = false;
  byId("map-choices").hidden = models.length < FEW && nights <= 30;
  if (!models.length || !nights) byId("map").hidden = true;
  else if (models.every((model) => model.dull)) byId("all-models").checked = byId("all-models").disabled = true; // rather all lines than none
  setRange();
  showTheme();
  recall();
})();
