// Local time. Loaded by app.js where the clock differs from UTC.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const offset = String(new Date()).slice(28, 33);
let kept = null;
const isLocal = () => offset !== "+0000" && kept.get("zone") !== "utc", ours = () => isLocal() ? "UTC" + offset.slice(0, 3) + ":" + offset.slice(3) : "UTC";
export function parts(at) {
  const shifted = new Date(+at - (isLocal() ? at.getTimezoneOffset() * 6e4 : 0)), format = options => shifted.toLocaleString("en", { timeZone: "UTC", ...options });
  return { clock: shifted.toISOString().slice(11, 19), day: Math.floor(+shifted / 864e5), name: format({ weekday: "long" }), date: `${shifted.getUTCDate()} ${format({ month: "short" })}` };
}
function when(at, utc) { // as render.when_text; the server's text says how precise it is
  const it = parts(at), days = parts(new Date()).day - it.day, clock = it.clock.slice(0, /:\d\d:/.test(utc) ? 8 : 5);
  const text = days === 0 ? clock : days === 1 ? `yesterday ${clock}` : days > 1 && days < 7 ? `${it.name} ${clock}` : `${it.date} ${clock}`;
  return utc.endsWith("UTC") ? `${text} ${ours()}` : text;
}
function times() {
  for (const node of all("[data-t]")) {
    const utc = node.dataset.utc ??= node.textContent, at = new Date(node.dataset.t * 1000);
    const text = !isLocal() || !utc.includes(":") ? utc : node.nodeName === "tspan" ? parts(at).clock.slice(0, 5) : when(at, utc);
    if (node.textContent !== text) node.textContent = text;
  }
  document.getElementById("zone").textContent = ours();
}
export function start(button, store) {
  kept = store;
  if (offset !== "+0000") {
    const say = () => { button.textContent = isLocal() ? "Show UTC" : "Show local time"; times(); };
    button.hidden = false;
    button.onclick = () => { store.set("zone", isLocal() ? "utc" : "local"); say(); };
    say();
  }
  return times;
}
