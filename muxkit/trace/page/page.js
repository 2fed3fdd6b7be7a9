"use strict";
// The page of a trace. All texts reach the page by textContent or by fillText, so none is read as markup.
const traces = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const ROW = 20, GAP = 100000; // px; µs from which a gap is a row of its own
const TALLEST = 3e7; // px; browsers let nothing be much taller, so more rows pass by faster
const LONG = 200, MOST_ERRORS = 1000; // characters of a name, lines of a list
const SENT = 0, RECEIVED = 1, GRANTED = 2, CREDITED = 3, BYTES_OUT = 7, BYTES_IN = 8, CLOSED = 10;
const KINDS = ["sent", "received", "credit granted", "credit received", "state", "timer", "error", "bytes sent",
  "bytes received", "opened", "closed", "span", "other"];
const AGAIN = "#c2410c", LOST = "#c22"; // frames that are sent once more; where a connection was lost
const COLOURS = ["#1757a6", "#1d7a3c", "#8a5a00", "#8a5a00", "#555", "#7a3c9a", "#c22", "#999", "#999", "#111", "#111", "#7a3c9a", "#777"];

for (const trace of traces) {
  let now = 0;
  trace.at = trace.t.map((step) => (now += step));
  trace.again = trace.texts.map((text) => text.endsWith(" again"));
}
let rows = [];      // [trace, event], or [-1, µs] for a gap
let selected = -1;

function matches(trace, event, words) {
  if (!words.length) return true;
  const text = (trace.texts[trace.c[event]] + " " + trace.texts[trace.n[event]] + " " + KINDS[trace.k[event]]).toLowerCase();
  return words.every((word) => text.includes(word));
}

function arrange() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const withBytes = byId("bytes").checked;
  const next = traces.map(() => 0);
  const events = [];
  for (;;) { // two traces are merged by time
    let first = -1;
    traces.forEach((trace, which) => {
      if (next[which] < trace.at.length && (first < 0 || trace.at[next[which]] < traces[first].at[next[first]])) first = which;
    });
    if (first < 0) break;
    const event = next[first]++, kind = traces[first].k[event];
    if (!withBytes && (kind === BYTES_OUT || kind === BYTES_IN)) continue;
    if (matches(traces[first], event, words)) events.push([first, event]);
  }
  rows = [];
  let before = null;
  for (const each of events) {
    const at = traces[each[0]].at[each[1]];
    if (before !== null && at - before > GAP) rows.push([-1, at - before]);
    rows.push(each);
    before = at;
  }
  byId("found").textContent = events.length + " events";
  byId("space").style.height = Math.max(Math.min(rows.length * ROW, TALLEST), 1) + "px";
  draw();
}

function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

const amount = (bytes) => bytes >= 1e6 ? (bytes / 1e6).toFixed(1) + " MB" : bytes >= 1e4 ? (bytes / 1e3).toFixed(1) + " kB" : bytes + " B";
const moment = (at) => (at / 1000).toFixed(3) + " ms";
const span = (at) => at >= 1e6 ? (at / 1e6).toFixed(2) + " s" : (at / 1000).toFixed(0) + " ms";

// Pixels above the window if all rows were there, and where to scroll for that.
function factor() {
  const height = byId("scroll").clientHeight;
  return Math.max(1, (rows.length * ROW - height) / Math.max(1, Math.min(rows.length * ROW, TALLEST) - height));
}
const hiddenAbove = () => byId("scroll").scrollTop * factor();

const brief = (text) => text.length > LONG ? text.slice(0, LONG) + " … (" + text.length + " characters)" : text;

let waiting = false;
function draw() {
  if (!waiting) { waiting = true; requestAnimationFrame(paint); }
}

// Only the rows in the window are drawn, however many there are.
function paint() {
  waiting = false;
  const scroll = byId("scroll"), canvas = byId("rows");
  const width = scroll.clientWidth, height = scroll.clientHeight;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = fit(canvas, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const side = (width - 100) / traces.length;
  traces.forEach((trace, which) => {
    pen.strokeStyle = "#bbb";
    for (const x of [100 + which * side + 12, 100 + (which + 1) * side - 12]) {
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
    }
  });
  const above = hiddenAbove(), first = Math.floor(above / ROW), last = Math.min(rows.length, first + Math.ceil(height / ROW) + 1);
  for (let row = first; row < last; row++) {
    const [which, event] = rows[row], y = row * ROW - above + ROW / 2;
    if (which < 0) {
      pen.fillStyle = "#f0f0f0"; pen.fillRect(0, y - ROW / 2, width, ROW);
      pen.fillStyle = "#666"; pen.textAlign = "center"; pen.fillText("… " + span(event) + " …", width / 2, y);
      continue;
    }
    const trace = traces[which], kind = trace.k[event], left = 100 + which * side + 12, right = 100 + (which + 1) * side - 12;
    if (row === selected) { pen.fillStyle = "#fff3c4"; pen.fillRect(0, y - ROW / 2, width, ROW); }
    pen.fillStyle = "#777"; pen.textAlign = "right"; pen.fillText(moment(trace.at[event]), 92, y);
    pen.strokeStyle = pen.fillStyle = kind === SENT && trace.again[trace.n[event]] ? AGAIN : COLOURS[kind];
    const outwards = kind === SENT || kind === GRANTED || kind === BYTES_OUT;
    const inwards = kind === RECEIVED || kind === CREDITED || kind === BYTES_IN;
    let label = trace.texts[trace.c[event]] + " " + trace.texts[trace.n[event]];
    if (outwards || inwards) {
      if (trace.s[event]) label += " " + amount(trace.s[event]);
      const [from, to] = outwards ? [left, right] : [right, left], head = outwards ? -6 : 6;
      pen.beginPath(); pen.moveTo(from, y + 7); pen.lineTo(to, y + 7);
      pen.moveTo(to + head, y + 4); pen.lineTo(to, y + 7); pen.lineTo(to + head, y + 10); pen.stroke();
    } else {
      pen.fillRect(left - 3, y - 3, 6, 6);
      label = KINDS[kind] + " " + label;
    }
    pen.textAlign = "left";
    pen.save(); pen.beginPath(); pen.rect(left, y - ROW / 2, right - left, ROW); pen.clip();
    pen.fillText(label.slice(0, 300), left + 12, y - 1); pen.restore();
  }
}

function select(row) {
  selected = row;
  const found = rows[row];
  if (!found) return;
  if (found[0] < 0) { byId("selected").textContent = "nothing for " + span(found[1]); draw(); return; }
  const [which, event] = found, trace = traces[which];
  byId("selected").textContent = [trace.title, moment(trace.at[event]), KINDS[trace.k[event]], trace.texts[trace.c[event]],
    trace.texts[trace.n[event]], trace.s[event] ? trace.s[event] + " bytes" : ""].filter(Boolean).join("\n");
  const choice = which + ":" + trace.c[event];
  if ([...byId("channel").options].some((option) => option.value === choice)) { byId("channel").value = choice; credit(); }
  draw();
}

// What has gone wrong, and how the session ended, leads to its place in the diagram.
function go(which, event) {
  byId("search").value = "";
  arrange();
  const row = rows.findIndex((each) => each[0] === which && each[1] === event);
  if (row < 0) return;
  byId("scroll").scrollTop = Math.max(0, (row - 5) * ROW) / factor();
  select(row);
}

function cell(row, text) {
  const made = document.createElement("td");
  made.textContent = text;
  row.append(made);
}

const END = Math.max(1, ...traces.map((trace) => trace.at.length ? trace.at[trace.at.length - 1] : 1));

// A scale of time, and a line where a connection was lost.
function axis(pen, width, height) {
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "alphabetic";
  const rough = END / Math.max(2, width / 90), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  pen.strokeStyle = "#eee"; pen.fillStyle = "#777"; pen.textAlign = "center";
  for (let at = step; at < END; at += step) {
    const x = at / END * width;
    pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - 14); pen.stroke();
    if (x < width - 20) pen.fillText(at >= 1e6 || step >= 1e5 ? (at / 1e6).toFixed(step < 1e6 ? 1 : 0) + " s" : at / 1000 + " ms", x, height - 3);
  }
  pen.strokeStyle = LOST; pen.setLineDash([3, 3]);
  for (const [, at] of traces[0].losses) { pen.beginPath(); pen.moveTo(at / END * width, 0); pen.lineTo(at / END * width, height - 14); pen.stroke(); }
  pen.setLineDash([]); pen.textAlign = "left";
}

function rates() {
  const canvas = byId("rates"), width = canvas.clientWidth, height = canvas.clientHeight, pen = fit(canvas, width, height);
  const end = END, steps = 100, sums = [new Float64Array(steps), new Float64Array(steps)];
  for (const trace of traces.slice(0, 1))
    for (let event = 0; event < trace.at.length; event++) {
      const kind = trace.k[event];
      if (kind === SENT || kind === RECEIVED) sums[kind][Math.min(steps - 1, Math.floor(trace.at[event] / end * steps))] += trace.s[event];
    }
  const most = Math.max(1, ...sums[0], ...sums[1]);
  axis(pen, width, height);
  sums.forEach((sum, which) => {
    pen.strokeStyle = COLOURS[which]; pen.beginPath();
    sum.forEach((value, step) => pen.lineTo((step + .5) / steps * width, height - 16 - value / most * (height - 32)));
    pen.stroke();
  });
  pen.fillStyle = "#555";
  const lost = traces[0].losses.length ? "; red: the connection was lost" : "";
  pen.fillText("most: " + amount(Math.round(most / (end / steps / 1e6))) + "/s; blue sent, green received" + lost, 4, 11);
}

function credit() {
  const canvas = byId("credit"), width = canvas.clientWidth, height = canvas.clientHeight, pen = fit(canvas, width, height);
  const [which, channel] = byId("channel").value.split(":").map(Number), trace = traces[which];
  if (!trace) return;
  const end = END;
  let shaded = 0;
  pen.fillStyle = "#f7c6c6";
  for (const [of, begin, until] of trace.blocked) if (of === channel) {
    shaded += until - begin;
    pen.fillRect(begin / end * width, 0, Math.max(1, (until - begin) / end * width), height - 14);
  }
  axis(pen, width, height);
  const line = [];
  let balance = 0, most = 1;
  for (let event = 0; event < trace.at.length; event++) {
    if (trace.c[event] !== channel) continue;
    if (trace.k[event] === CREDITED) balance += trace.s[event];
    else if (trace.k[event] === SENT) balance -= trace.s[event];
    else continue;
    line.push([trace.at[event] / end * width, balance]);
    most = Math.max(most, balance);
  }
  pen.strokeStyle = "#8a5a00"; pen.beginPath();
  const y = (value) => height - 16 - Math.max(0, value) / most * (height - 32);
  let before = 0;
  for (const [x, value] of line) { pen.lineTo(x, y(before)); pen.lineTo(x, y(value)); before = value; }
  pen.stroke();
  pen.fillStyle = "#555"; pen.fillText("most: " + amount(most), 4, 11);
  byId("blocked").textContent = "blocked on credit (red): " + span(shaded) + " of " + span(end);
}

function trips() {
  const open = [], found = [];
  const trace = traces[0];
  for (let event = 0; event < trace.at.length; event++) {
    const name = trace.texts[trace.n[event]].toLowerCase();
    if (trace.k[event] === SENT && name === "ping") open.push(trace.at[event]);
    else if (trace.k[event] === RECEIVED && name === "pong" && open.length) found.push(trace.at[event] - open.shift());
  }
  found.sort((one, other) => one - other);
  byId("trips").textContent = found.length
    ? found.length + " pings: least " + moment(found[0]) + ", median " + moment(found[found.length >> 1]) + ", most " + moment(found[found.length - 1])
    : "no ping was answered in this trace";
}

function begin() {
  const choices = [];
  byId("title").textContent = traces.map((trace) => brief(trace.title) || "trace").join(" | ");
  traces.forEach((trace, which) => {
    for (const [text, event] of trace.errors.slice(0, MOST_ERRORS)) {
      const item = document.createElement("li"), button = document.createElement("button");
      button.textContent = moment(trace.at[event]) + " " + (traces.length > 1 ? brief(trace.title) + ": " : "") + brief(text);
      if (trace.k[event] === CLOSED && trace.texts[trace.n[event]] === "in order") button.className = "orderly";
      button.addEventListener("click", () => go(which, event));
      item.append(button); byId("errors").append(item);
    }
    if (trace.errors.length > MOST_ERRORS) {
      const rest = document.createElement("li");
      rest.textContent = "and " + (trace.errors.length - MOST_ERRORS) + " more";
      byId("errors").append(rest);
    }
    for (const [name, one] of Object.entries(trace.channels).slice(0, 2000)) {
      const row = document.createElement("tr");
      for (const value of [brief(name), one.frames_sent, one.frames_received, one.bytes_sent, one.bytes_received, one.resends, one.blocked_ms.toFixed(1), brief(one.state), brief(one.trace_id)]) cell(row, value);
      byId("channels").append(row);
      if (one.credit_received) choices.push([one.blocked_ms, which + ":" + trace.texts.indexOf(name), (traces.length > 1 ? brief(trace.title) + ": " : "") + brief(name)]);
    }
  });
  choices.sort((one, other) => other[0] - one[0]); // the longest blocked one is shown first
  for (const [blocked, value, name] of choices) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = name + (blocked ? ", blocked " + span(blocked * 1000) : "");
    byId("channel").append(option);
  }
  arrange(); rates(); trips();
  if (choices.length) { credit(); return; }
  byId("blocked").textContent = "this trace tells of no credit that came in";
  byId("channel").hidden = byId("credit").hidden = true;
}

byId("scroll").addEventListener("scroll", draw, { passive: true });
byId("rows").addEventListener("click", (click) => select(Math.floor((hiddenAbove() + click.offsetY) / ROW)));
byId("search").addEventListener("input", () => { selected = -1; byId("scroll").scrollTop = 0; arrange(); });
byId("bytes").addEventListener("change", arrange);
byId("channel").addEventListener("change", credit);
window.addEventListener("resize", () => { draw(); rates(); if (!byId("credit").hidden) credit(); });
begin();
