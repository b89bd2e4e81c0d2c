// Local time, and the values of charts at the pointer, the finger or the arrow keys. Loaded by app.js on first use.
const number = new Intl.NumberFormat("en"), all = (selector, root = document) => [...root.querySelectorAll(selector)];
const offset = String(new Date()).slice(28, 33);
let kept = null;
const isLocal = () => offset !== "+0000" && kept.get("zone") !== "utc", ours = () => isLocal() ? "UTC" + offset.slice(0, 3) + ":" + offset.slice(3) : "UTC";
function parts(at) {
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
  document.addEventListener("renewed", charts);
  return times;
}

const tip = Object.assign(document.createElement("div"), { className: "tipbox", hidden: true });
document.body.append(tip);
export function charts() {
  for (const svg of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(svg.dataset.chart), count = +svg.dataset.count, label = svg.getAttribute("aria-label");
    const x = i => data.x ? data.x[0] + data.x[1] * i : data.l ? 100 * (i + 0.5) / count : count > 1 ? 100 * i / (count - 1) : 50;
    const name = i => { if (data.l) return data.l[i]; const it = parts(new Date((data.t + data.s * i) * 1000)); return `${it.date} ${it.clock.slice(0, 5)}`; };
    const text = i => name(i) + ": " + data.n.map((what, line) => `${number.format(data.v[line][i] ?? 0)} ${what}`).join(", ");
    const show = i => {
      const box = svg.getBoundingClientRect(), left = box.left + box.width * x(i) / 100;
      svg.dataset.at = i;
      tip.textContent = text(i); tip.hidden = false;
      tip.style.left = `${Math.max(4, Math.min(left - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 4)) + scrollX}px`;
      tip.style.top = `${Math.max(0, box.top - tip.offsetHeight - 4) + scrollY}px`;
      svg.setAttribute("aria-valuenow", i); svg.setAttribute("aria-valuetext", text(i));
    };
    const near = event => { const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * 100; let best = 0; for (let i = 1; i < count; i++) if (Math.abs(x(i) - at) < Math.abs(x(best) - at)) best = i; return best; };
    const last = Math.min(+(svg.dataset.at ?? count - 1), count - 1);
    for (const [key, value] of Object.entries({ role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": count - 1, "aria-valuenow": last, "aria-valuetext": text(last) })) svg.setAttribute(key, value);
    svg.onpointermove = svg.onpointerdown = event => show(near(event));
    svg.onpointerleave = svg.onblur = () => { tip.hidden = true; };
    svg.onfocus = () => { if (svg.matches(":focus-visible")) show(last); };
    svg.onkeydown = event => {
      const at = +(svg.dataset.at ?? last), to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: count - 1 }[event.key];
      if (to !== undefined) { show(Math.max(0, Math.min(count - 1, to))); event.preventDefault(); event.stopPropagation(); }
      if (event.key === "Escape") tip.hidden = true;
    };
  }
}

