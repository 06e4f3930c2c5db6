// The panel beside a lesson, and the timelines. Without this file all of it is in the text: cards, and the numbers of a timeline.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const cards = [...document.querySelectorAll(".card")];
  if (cards.length) panel(cards);
  document.querySelectorAll(".timeline").forEach(timeline);
  const explorer = document.querySelector("iframe.explorer");
  addEventListener("message", ({ source, data }) => { if (explorer && source === explorer.contentWindow) explorer.style.height = `${data}px`; });
});

function panel(cards) {
  const aside = document.createElement("aside");
  let now = null, mode = "both";
  aside.id = "panel";
  aside.setAttribute("aria-label", "the code that the text speaks of");
  document.querySelector(".main").append(aside);
  document.body.classList.add("panelled");

  function show(card) {
    if (card === now) return;
    if (now) now.classList.remove("now");
    now = card;
    card.classList.add("now");
    const head = card.querySelector(".card-head").cloneNode(true);
    const parts = [...card.querySelector(".around").children].slice(1).map((part) => part.cloneNode(true));
    for (const input of parts[0].querySelectorAll("input")) {
      input.name = "mode-panel";
      input.checked = input.value === mode;
      input.addEventListener("change", () => { mode = input.value; center(); });
    }
    aside.replaceChildren(head, ...parts);
    center();
  }

  function center() {
    const view = aside.querySelector(".view"), said = [...view.querySelectorAll("[data-said]")].filter((line) => line.offsetHeight);
    if (!said.length) return;
    const from = said[0].getBoundingClientRect().top, to = said.at(-1).getBoundingClientRect().bottom;
    const spare = Math.max(view.clientHeight - (to - from), 60) / 2;
    view.scrollTop += from - view.getBoundingClientRect().top - spare;
  }

  function follow() {                                     // the card whose middle is nearest to the middle of the window
    if (aside.querySelector(":focus-visible")) return;    // who works in the panel keeps it
    const middle = innerHeight / 2;
    const far = (card) => { const box = card.getBoundingClientRect(); return Math.abs((box.top + box.bottom) / 2 - middle); };
    show(cards.reduce((best, card) => far(card) < far(best) ? card : best));
  }
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; follow(); });
  }, { passive: true });
  for (const card of cards) {
    const hunk = card.querySelector(".hunk");
    hunk.title = "Enter goes to the whole file, Escape comes back";
    hunk.addEventListener("keydown", (press) => {
      if (press.key !== "Enter") return;
      show(card);                                         // a scroll may have brought another
      aside.querySelector(":checked").focus();
    });
    card.addEventListener("focusin", () => show(card));
  }
  aside.addEventListener("keydown", (press) => { if (press.key === "Escape") now.querySelector(".hunk").focus(); });
  addEventListener("resize", center);
  follow();
}

const LINKS = { NVLink: "#009e73", network: "#8064a2" };     // as in the picture of which the page is a larger form
const COLOURS = ["#66727f", "#c9a227", "#9a80bb", "#e08e45", "#4f9d9d", "#b05c8a", "#7a7a3a"];

function timeline(box) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const ranks = Object.keys(data.ranks), end = Math.max(...data.events.map((event) => event[4] + event[5]));
  const streams = data.streams.map((name, i) => [name, i]).filter(([name]) => name !== "actions" || data.events.some((e) => data.streams[e[1]] === name));
  const canvas = document.createElement("canvas"), out = document.createElement("output"), bar = document.createElement("div");
  const key = document.createElement("p"), lane = 26, left = 92, title = 20, foot = 20;
  if (data.memory) streams.push(["memory", -1]);
  const rows = ranks.flatMap((rank) => streams.map(([name, i]) => [Number(rank), i, name]));
  const most = Math.max(...Object.values(data.memory ?? {}).flat().map(([, size]) => size));
  const colour = (event) => data.names[event[2]].startsWith("wait for") ? "#d9534f" : data.streams[event[1]] === "actions"
    ? { F: "#9ec5e8", B: "#3f76ad", I: "#3f76ad", W: "#6aa56e" }[data.names[event[2]][0]] || "#a9a9a9" : shade(event[1]);
  const shade = (i) => LINKS[data.streams[i]] ?? COLOURS[i % COLOURS.length];
  let from = 0, to = end, drag = null, at = null, picked = -1;
  const by_row = new Map(rows.map(([rank, stream]) => [`${rank} ${stream}`, data.events.filter((e) => e[0] === rank && e[1] === stream)
    .sort((a, b) => a[4] - b[4])]));
  const until = new Map(ranks.map((rank) => [Number(rank), Math.max(...rows.filter((row) => row[0] === Number(rank))
    .flatMap(([, stream]) => by_row.get(`${rank} ${stream}`).slice(-1).map((e) => e[4] + e[5])))]));
  const order = data.events.toSorted((a, b) => a[4] - b[4]);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "timeline of a step; arrows move, plus and minus zoom, 0 shows all, comma and full stop go from bar to bar");
  out.setAttribute("aria-live", "polite");
  out.textContent = "point at a bar: here stands what it is";
  key.className = "key";
  const kinds = streams.filter(([name]) => name !== "actions" && name !== "memory").map(([name, i]) => [name === "compute" ? "kernels" : name in LINKS ? name : `${name} on a link`, shade(i)]);
  for (const [name, shade] of [...kinds, ["waiting", "#d9534f"], ["forward", "#9ec5e8"], ["backward", "#3f76ad"], ["the rest", "#a9a9a9"]]) {
    const entry = document.createElement("span"), square = document.createElement("i");
    square.style.background = shade;
    entry.append(square, name);
    key.append(entry);
  }
  for (const [label, act] of [["zoom in", () => zoom(0.5)], ["zoom out", () => zoom(2)], ["←", () => move(-0.25)], ["→", () => move(0.25)],
    ["all", () => set(0, end)]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.addEventListener("click", act);
    bar.append(button);
  }
  box.append(bar, canvas, out, key);

  const width = () => canvas.clientWidth - left - 8;
  const x_of = (when) => left + (when - from) / (to - from) * width();
  const when_of = (x) => from + (x - left) / width() * (to - from);
  const y_of = (row) => title * (Math.floor(row / streams.length) + 1) + row * lane;

  function set(a, b) {
    const span = Math.min(Math.max(b - a, end / 1e5), end);
    from = Math.min(Math.max(a, 0), end - span);
    to = from + span;
    draw();
  }
  function zoom(factor, about = (from + to) / 2) { set(about - (about - from) * factor, about + (to - about) * factor); }
  function move(part) { set(from + part * (to - from), to + part * (to - from)); }

  function draw() {
    const ratio = devicePixelRatio || 1, pen = canvas.getContext("2d"), style = getComputedStyle(box);
    const height = y_of(rows.length - 1) + lane + foot;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    pen.scale(ratio, ratio);
    pen.font = "11px sans-serif";
    pen.textBaseline = "middle";
    rows.forEach(([rank, stream, name], row) => {
      const y = y_of(row);
      pen.fillStyle = style.color;
      if (row % streams.length === 0) pen.fillText(data.ranks[rank], 4, y - title / 2);
      pen.fillText(name === "compute" ? "kernels" : name, 12, y + lane / 2, left - 16);
      if (name === "memory") return hold(rank, y);
      let drawn = -1;
      for (const event of by_row.get(`${rank} ${stream}`)) {
        const a = Math.max(x_of(event[4]), left), b = Math.min(x_of(event[4] + event[5]), left + width());
        if (b < left || a > left + width() || b < drawn + 0.2) continue;
        drawn = b;
        pen.fillStyle = colour(event);
        pen.fillRect(a, y + 2, Math.max(b - a - (b - a > 3 ? 0.5 : 0), 0.5), lane - 4);
        if (b - a > 26) {
          pen.fillStyle = pen.fillStyle === "#9ec5e8" || pen.fillStyle === "#a9a9a9" || pen.fillStyle === "#c9a227" ? "#111" : "#fff";
          pen.save();
          pen.beginPath();
          pen.rect(a, y, b - a - 2, lane);
          pen.clip();
          pen.fillText(data.names[event[2]], a + 3, y + lane / 2);
          pen.restore();
        }
      }
    });
    pen.fillStyle = style.color;
    const ticks = width() < 400 ? 2 : 4;                    // more would run into each other
    for (let i = 0; i <= ticks; i++) {
      pen.textAlign = i === ticks ? "right" : i ? "center" : "left";
      pen.fillText(micro(from + (to - from) * i / ticks), left + width() * i / ticks, height - foot / 2);
    }
    pen.textAlign = "left";
    if (drag !== null && at !== null) {
      pen.fillStyle = "rgba(120,160,255,.3)";
      pen.fillRect(Math.min(drag, at), 0, Math.abs(at - drag), height - foot);
    }
  }
  function hold(rank, y) {                                // the memory, and how high the fullest rank's is
    const pen = canvas.getContext("2d"), base = y + lane - 2;
    pen.fillStyle = "#9a9a9a";
    pen.beginPath();
    pen.moveTo(left, base);
    let high = base;
    for (const [when, size] of [...data.memory[rank], [until.get(rank), 0]]) {
      const x = Math.min(Math.max(x_of(when), left), left + width());
      pen.lineTo(x, high);
      high = base - size / most * (lane - 4);
      pen.lineTo(x, high);
    }
    pen.fill();
  }
  function micro(tenths) { return tenths >= 1e4 ? `${(tenths / 1e4).toPrecision(4)} ms` : `${(tenths / 10).toPrecision(3)} µs`; }
  function say(event) {
    const place = data.places[event[3]];
    out.textContent = `${data.memory ? data.ranks[event[0]] : `rank ${event[0]}`}, ${data.streams[event[1]]}: ${data.names[event[2]]}${place ? `, ${place}` : ""}\n`
      + `from ${micro(event[4])}, for ${micro(event[5])}`;
  }
  canvas.addEventListener("pointerdown", (press) => { drag = at = press.offsetX; canvas.setPointerCapture(press.pointerId); });
  canvas.addEventListener("pointermove", (point) => {
    at = point.offsetX;
    if (drag !== null) return draw();
    const row = rows.findIndex((_, i) => point.offsetY >= y_of(i) && point.offsetY < y_of(i) + lane);
    if (row < 0) return;
    const when = when_of(at), slack = (to - from) / width();
    if (rows[row][2] === "memory") {
      const held = data.memory[rows[row][0]].findLast(([since]) => since <= when);
      if (held) out.textContent = `${data.ranks[rows[row][0]]}: ${held[1].toFixed(1)} GiB\nat ${micro(when)}`;
      return;
    }
    const near = by_row.get(`${rows[row][0]} ${rows[row][1]}`).find((e) => e[4] - slack <= when && when <= e[4] + e[5] + slack);
    if (near) say(near);
  });
  canvas.addEventListener("pointerup", (lift) => {
    const [a, b] = [drag, lift.offsetX].sort((one, other) => one - other);
    drag = null;
    if (b - a > 4) set(when_of(Math.max(a, left)), when_of(b)); else draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("wheel", (turn) => {
    if (!turn.ctrlKey) return;
    turn.preventDefault();
    zoom(turn.deltaY > 0 ? 1.25 : 0.8, when_of(turn.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (press) => {
    const act = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "-": () => zoom(2), 0: () => set(0, end),
      ",": () => step(-1), ".": () => step(1) }[press.key];
    if (!act || press.ctrlKey || press.metaKey) return;
    press.preventDefault();
    act();
  });
  function step(by) {
    picked = Math.min(Math.max(picked + by, 0), order.length - 1);
    const event = order[picked];
    say(event);
    if (event[4] < from || event[4] > to) move((event[4] - (from + to) / 2) / (to - from)); else draw();
  }
  addEventListener("resize", draw);
  draw();
}
