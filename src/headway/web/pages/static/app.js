// Behaviour of every page: theme, time zone, charts, dialogs, keys and live updates. Pages are complete without it.
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const number = new Intl.NumberFormat("en");
const root = document.documentElement;
const pill = $("[data-live]"), main = $("#main"), banner = $("#stale");
const kept = { get: name => { try { return localStorage[name]; } catch { return undefined; } }, set: (name, value) => { try { localStorage[name] = value; } catch { /* private mode */ } } };

// ---- theme: follows the system until the user chooses
const theme = () => root.dataset.theme || (matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light");
for (const button of $$("[data-theme-toggle]")) {
  button.hidden = false;
  const say = () => { button.textContent = theme() === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`); };
  button.addEventListener("click", () => { kept.set("theme", root.dataset.theme = theme() === "dark" ? "light" : "dark"); say(); });
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", say);
  say();
}

// ---- local times and the values of charts are in modules of their own: loaded where the clock differs from UTC, and on first use
const zone = $("[data-zone]");
let extra = null, times = () => {};
const load = () => extra ??= import(pill.dataset.extra).then(module => { times = module.start(zone, kept); return module; }, error => { extra = null; throw error; });
if (new Date().getTimezoneOffset()) load().catch(() => {}); else zone.remove();
for (const type of ["pointerover", "focusin"]) addEventListener(type, event => {
  const chart = event.target.closest?.("[data-chart]:not([role=slider])");
  if (chart) Promise.all([load(), import(pill.dataset.charts)]).then(([local, module]) => { module.charts(local.parts); chart.dispatchEvent(type === "focusin" ? new Event("focus") : new PointerEvent("pointermove", event)); });
});

// ---- forms: nothing typed is lost while the server or its store is unreachable
addEventListener("submit", async event => {
  const form = event.target;
  if (form.method !== "post" || !form.closest("dialog")) return;
  event.preventDefault();
  let ok = false;
  try { ok = (await fetch(pill.dataset.live.split("/api/")[0] + "/readyz", { signal: AbortSignal.timeout(5000) })).status !== 503; } catch { /* unreachable */ }
  if (ok) { form.submit(); return; }
  const note = $(".unsent", form) || form.appendChild(Object.assign(document.createElement("p"), { className: "unsent bad", role: "alert" }));
  note.textContent = "Not sent: the server or its database is unreachable. Your input is kept; try again.";
});

// ---- content that is replaced when the page is renewed
function wire(part) {
  times();
  for (const svg of $$("[data-chart]", part)) svg.setAttribute("tabindex", "0");
  for (const button of $$("[data-copy]", part)) {
    button.hidden = false;
    button.onclick = async () => {
      const code = $("code", button.parentElement);
      try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    };
  }
  if (!("commandForElement" in HTMLButtonElement.prototype)) // older browsers
    for (const button of $$("[commandfor]", part)) button.onclick = () => { const dialog = document.getElementById(button.getAttribute("commandfor")); button.getAttribute("command") === "close" ? dialog.close() : dialog.showModal(); };
}
wire(document);

// ---- keys: those of a single letter are in a module of their own
addEventListener("keydown", event => {
  if (kept.get("keys") === "off" || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.target.closest("input,select,textarea,dialog,[data-map]")) return;
  if (event.key === "/" && $(".find")) { $(".find").focus(); event.preventDefault(); }
  else if ("?gjkxrp".includes(event.key) || going) { going = event.key === "g"; (shortcuts ??= import(pill.dataset.shortcuts)).then(module => module.press(event.key), () => { shortcuts = null; }); }
});
let going = false, shortcuts = null; // one promise, so that keys are handled in the order they were pressed

// ---- live
// The socket sends the current state. Numbers with data-v are updated together, once per frame. When rows may have been added
// or removed, the page is fetched again. After 6 s without a message the page is marked as outdated.
const SILENCE = 6000, watch = (main.dataset.watch || "").split(" ").filter(Boolean), refresh = +pill.dataset.refresh * 1000;
let state = {}, seq = "", heard = performance.now(), tries = 0, socket = null, dirty = false, renewed = performance.now(), asked = false;

function value(path) { // section/id/field; an id may contain slashes
  const names = path.split("/"), section = names[0], field = names.at(-1), id = names.slice(1, -1).join("/");
  return state[section]?.[id]?.[field];
}
const percent = (done, total) => { if (!total) return "0%"; let p = 100 * done / total; if (done < total) p = Math.min(p, 99.9); return p === 0 || p === 100 ? `${p}%` : `${Math.max(p, 0.1).toFixed(1)}%`; };
const forms = {
  num: v => number.format(v),
  percent: v => `${Math.round(v)}%`,
  part: (v, node) => { const job = value(node.dataset.v.replace(/percent$/, "done")), total = value(node.dataset.v.replace(/percent$/, "total")); return percent(job, total); },
  minus: (v, node) => number.format(v - +node.dataset.minus),
};
function patch() {
  for (const node of $$("[data-v]")) {
    const now = value(node.dataset.v);
    if (now === undefined || now === null) continue;
    const text = forms[node.dataset.f || "num"](now, node);
    if (node.textContent !== text) node.textContent = text;
  }
  for (const node of $$("[data-bar]")) {
    const names = node.dataset.bar.split("/"), job = state[names[0]]?.[names.slice(1).join("/")], svg = $("svg", node);
    if (job && svg) bar(svg, job, +node.dataset.kept, +node.dataset.h);
  }
}
function bar(svg, job, kept, h) { // as draw.bar does it on the server
  let x = 0;
  const total = Math.max(1, job.total), put = (cls, left, top, width, tall) => { const r = document.createElementNS("http://www.w3.org/2000/svg", "rect"); for (const [k, v] of Object.entries({ class: `f-${cls}`, x: left, y: top, width, height: tall })) r.setAttribute(k, v); return r; };
  const parts = [put("pend", 0, 0, 1000, h)];
  for (const [cls, count, top, tall] of [["kept", kept, 0, h], ["done", job.done - kept, 0, h], ["retry", job.retrying, h * 0.4, h * 0.6], ["dead", job.dead, -2, h + 4]]) {
    if (count <= 0) continue;
    const width = Math.max(5, Math.min(1000, count / total * 1000));
    x = Math.min(x, 1000 - width);
    parts.push(put(cls, x, top, width, tall));
    x += width;
    if ((cls === "kept" || cls === "done") && x < 1000) { parts.push(put("bg", x, 0, 2, h)); x += 2; }
  }
  svg.replaceChildren(...parts);
}

function receive(message) {
  let touched = false;
  if (message.full) { state = message.full; touched = true; }
  for (const [section, entries] of Object.entries(message.delta || {})) {
    state[section] ??= {};
    for (const [id, entry] of Object.entries(entries)) {
      const before = state[section][id];
      if (entry === null) delete state[section][id]; else state[section][id] = entry;
      if (watch.includes(section) || watch.includes(`${section}/${id}`)) {
        dirty = true;
        // An entry was added or removed, or changed its state: fetch the page. Numbers are patched.
        if (entry === null || before === undefined || ["status", "state", "paused", "dead", "holder"].some(name => JSON.stringify(before[name]) !== JSON.stringify(entry[name]))) touched = true;
      }
    }
  }
  return touched && !message.full;
}

async function renew(everything = false) {
  if (asked || document.hidden || $("dialog[open], [name=item]:checked") || $("main :is(input,select,textarea):focus")) return;
  asked = true; dirty = false;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
    if (!answer.ok && answer.status !== 503) return;
    if ($("[data-away]") && answer.ok) { location.reload(); return; }
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"), next = $("#main", fresh);
    if (!next) return;
    const { merge } = await import(pill.dataset.renew).catch(() => location.reload()); // another version runs now
    if ($("dialog[open]")) return;
    const active = document.activeElement;
    waiting = merge(main, next, !everything && isHeld());
    offer.hidden = !waiting;
    if (active !== document.activeElement && main.contains(active)) active.focus({ preventScroll: true }); // the morph moved it
    document.title = fresh.title;
    for (const name of ["#asof", "#deadn"]) if ($(name, fresh) && $(name)) $(name).replaceChildren(...$(name, fresh).childNodes);
    for (const node of $$("[data-utc]")) if (node.closest("#main, #asof")) delete node.dataset.utc;
    wire(main); patch();
    document.dispatchEvent(new Event("renewed"));
  } catch { /* the status says that the connection is lost */ } finally { asked = false; renewed = performance.now(); }
}
// While a row is hovered, focused or open, rows stay in their place (renew.js), and a button offers the full update.
const isHeld = () => Boolean($("[data-key]:hover", main) || document.activeElement?.closest("#main [data-key]") || $("[data-key] details[open][data-unfolded]", main));
const offer = $("#held");
let waiting = false;
addEventListener("click", event => { const details = event.target.closest?.("summary")?.parentElement; if (details) details.open ? delete details.dataset.unfolded : details.dataset.unfolded = ""; });
offer.onclick = () => renew(true);

function say(text, look) { if (pill.textContent !== text) pill.textContent = text; const cls = `live s ${look}`; if (pill.className !== cls) pill.className = cls; }
function tell() {
  const silent = performance.now() - heard, away = state.store?.database?.error;
  const stale = silent > SILENCE || Boolean(away);
  document.body.classList.toggle("stale", stale);
  banner.hidden = !stale || Boolean($("[data-away]"));
  if (away) { say("Store unreachable", "s-lost bad"); $("p", banner).firstChild.data = `${away} The data below is from `; }
  else if ((seq || silent > SILENCE) && socket?.readyState !== WebSocket.OPEN) say("Connection lost, retrying", "s-lost bad");
  else if (silent > SILENCE) say(`No data for ${Math.round(silent / 1000)} s`, "s-lost bad");
  else if (seq) say("Live", "s-ok pulse");
}

function connect() {
  if (document.hidden) return;
  const url = new URL(pill.dataset.live, location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  if (seq) url.searchParams.set("since", seq);
  socket = new WebSocket(url);
  socket.onmessage = event => {
    const message = JSON.parse(event.data);
    const again = Boolean(seq && message.full); // another server process: changes in between are unknown
    heard = performance.now(); tries = 0; seq = message.seq;
    const shape = receive(message) || again;
    requestAnimationFrame(() => { patch(); tell(); });
    const waited = performance.now() - renewed;
    if (shape && waited > 1000) setTimeout(renew, Math.random() * 500);
    else if (refresh && waited > refresh && (dirty || !watch.length)) renew();
    else if (shape) renewed -= refresh; // fetch with the next message
    const time = $("time", banner);
    if (message.at && !state.store?.database?.error && time) { time.dataset.t = Date.parse(message.at) / 1000; time.textContent = time.dataset.utc = `${message.at.slice(11, 19)} UTC`; times(); }
  };
  socket.onclose = event => {
    socket = null;
    if (event.code === 4401) { location.reload(); return; } // the session has ended: go to the login
    if (document.hidden) return;
    tell();
    if (tries > 1) fetch(location.href, { method: "HEAD" }).then(answer => { if (answer.url.includes("/login?next=")) location.reload(); }).catch(() => {});
    setTimeout(connect, Math.min(15000, 500 * 2 ** tries++) * (0.5 + Math.random()));
  };
}
document.addEventListener("visibilitychange", () => { if (document.hidden) socket?.close(); else { heard = performance.now(); if (!socket) connect(); } });
setInterval(() => { if (document.hidden) return; tell(); if (waiting && !isHeld()) renew(); }, 1000);
connect();
