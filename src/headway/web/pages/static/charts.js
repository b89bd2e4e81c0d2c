// The values of charts at the pointer, the finger or the arrow keys. Loaded by app.js on first use.
const number = new Intl.NumberFormat("en");
const tip = Object.assign(document.createElement("div"), { className: "tipbox", hidden: true });
document.body.append(tip);
export function charts(parts) {
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

